"""Expert stages that are wrong, raise, or end their process: each costs its own points, in a sentence that names it."""

import json
from pathlib import Path

import pytest

from _command import epcross, rows_of
from _spawn import PYTHONPATH
from epcross.harness.backends import computes, loader, trial
from epcross.harness.backends.answers import WrongBackend
from epcross.harness.doctor import ranks
from epcross.harness.errors import NOTHING_SHOWN
from epcross.harness.planning.schema import BackendConfig, ComputeConfig

pytestmark = pytest.mark.beside

HERE = "tests.broken_stages"
TRIED = "as it was tried in a process of its own"
CONTRACT = "epcross/kernels/experts/compute.py"
MADE = (
    f"it must only keep its options: load what may be missing in prepare(), and name it in unavailable(), as {CONTRACT}"
)
WRONG = {
    "Raises": f"__init__ of {HERE}:Raises raised FileNotFoundError: [Errno 2] no libmine.so; {MADE} says",
    "Leaves": f"__init__ of {HERE}:Leaves raised SystemExit: 0; {MADE} says",
    "Ends": f"making an instance of {HERE}:Ends ends the process with status 0, {TRIED}; "
    f"correct {HERE}, which must return or raise",
    "Demands": f"__init__ of {HERE}:Demands raised TypeError: Demands.__init__() missing 1 required positional "
    f"argument: 'tile'; {MADE} says",
    "RaisesLate": f"option_problems of {HERE}:RaisesLate raised RuntimeError: cannot tell; it must return, as "
    f"{CONTRACT} says",
    "Letters": f"option_problems() of {HERE}:Letters is 'no', but must be a list of sentences, empty if every value "
    f"can be used; correct it as {CONTRACT} says",
}
"""What breaks the contract: an error of the points."""
ABSENT = {
    "ends_module": f"importing ends_module ends the process with status 7 (no driver), {TRIED}; "
    "correct ends_module, which must return or raise",
    "leaves_module": "importing leaves_module fails with SystemExit: 0",
}
"""What cannot be imported, as a library that is not here."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    (folder / "compute").mkdir()
    ends = "import os, sys\nsys.stderr.write('no driver\\n')\nsys.stderr.flush()\nos._exit(7)\n"
    (folder / "ends_module.py").write_text(ends)
    (folder / "leaves_module.py").write_text("raise SystemExit(0)\n")
    targets = {name: f"{HERE}:{name}" for name in (*WRONG, "Number", "Careless", "Plain")}
    for name, target in {**targets, **{name: f"{name}:Stage" for name in ABSENT}}.items():
        (folder / "compute" / f"{name}.yaml").write_text(f"target: {target}\nlabel: {name}\n")
    return folder


def stage(name: str, folder: Path | None = None) -> ComputeConfig:
    return ComputeConfig(name=name, target=f"{HERE}:{name}", label=name, folder=str(folder or ""))


@pytest.mark.parametrize("name", WRONG)
def test_a_check_fails_and_names_the_stage(folder: Path, name: str) -> None:
    ended = epcross(folder, "check", "backend=layer_onesided", f"compute={name}", f"--config-dir={folder}")
    said = f"failed    declarations\n          compute '{name}': {WRONG[name]}\n1 failed, "
    assert (ended.returncode, ended.stderr, ended.stdout.startswith(said)) == (1, "", True), ended.stdout


@pytest.mark.parametrize("name", ABSENT)
def test_a_check_of_what_cannot_be_imported_shows_nothing(folder: Path, name: str) -> None:
    ended = epcross(folder, "check", "backend=layer_onesided", f"compute={name}", f"--config-dir={folder}")
    said = f"epcross: layer_onesided cannot be used here: compute '{name}': {ABSENT[name]}\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (NOTHING_SHOWN, "", said)


def test_a_run_has_a_row_for_each_with_the_same_words(folder: Path) -> None:
    names = ",".join([*WRONG, *ABSENT])
    words = ("backend=layer_onesided", f"compute={names}", "device=cuda_one_launch", "model=tiny", "ep_size=2")
    ended = epcross(folder, "run", *words, "tokens_per_rank=3", f"output_dir={folder}/runs", f"--config-dir={folder}")
    assert ended.returncode == 1, ended.stderr
    (run_path,) = (folder / "runs").iterdir()
    told = {record.compute: (str(record.status), record.reason) for record in rows_of(run_path)}
    expected = {name: ("error", f"compute '{name}': {text}") for name, text in WRONG.items()}
    assert told == expected | {name: ("unavailable", f"compute '{name}': {text}") for name, text in ABSENT.items()}


def test_all_are_listed(folder: Path) -> None:
    ended = epcross(folder, "backends", f"--config-dir={folder}")
    assert ended.returncode == 0, ended.stderr
    cells = [line.split("│")[1:-1] for line in ended.stdout.splitlines() if line.count("│") == 4]
    said = "".join(f" {name.strip()} " * bool(name.strip()) + text.strip() + " " for name, _, text in cells)
    said = " ".join(said.split())
    for name, text in (WRONG | ABSENT).items():
        assert f" {name} no: compute '{name}': {text}".replace(" ", "") in said.replace(" ", ""), name
    assert " Plain yes " in said


def test_a_backend_that_ends_the_process_is_listed_beside_the_others(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "backend").mkdir()
    (tmp_path / "ends_too.py").write_text("import os\nos._exit(0)\n")
    (tmp_path / "backend" / "ends.yaml").write_text('target: ends_too:Kernel\nlabel: ends\ncolor: "#777777"\n')
    ended = epcross(folder, "backends", "--json", f"--config-dir={tmp_path}")
    found = {entry["name"]: entry["unavailable"] for entry in json.loads(ended.stdout)}
    assert found["ends"] == (
        f"importing ends_too ends the process with status 0, {TRIED}; correct ends_too, which must return or raise"
    )
    assert "shm_fence" in found


def test_what_kills_a_process_and_what_another_interpreter_meets() -> None:
    with pytest.raises(
        WrongBackend, match=f"compute 'Killed': making an instance of {HERE}:Killed ends the process by"
    ):
        computes.compute_class(stage("Killed"))
    backend = BackendConfig(
        name="layer_onesided",
        target="epcross.harness.backends.layer_onesided:LayerOneSided",
        label="L",
        color="#000000",
        env={"PYTHONPATH": PYTHONPATH},
        computes={"Ends": stage("Ends")},
    )
    assert "ended with status 0 before it answered (no output): " in (said := loader.unavailable(backend, "Ends") or "")
    assert said.endswith("or compute 'Ends' ends the process; correct it, so that it returns or raises")


def test_a_check_that_fails_and_a_wrong_answer_name_the_stage() -> None:
    asked = {name: computes.maker(stage(name), {})() for name in ("Careless", "Number", "Plain")}
    assert computes.unavailable(stage("Plain"), asked["Plain"]) is None
    assert computes.unavailable(stage("Careless"), asked["Careless"]) == (
        "compute 'Careless': its check failed with RuntimeError: driver not loaded; unavailable() must return why it "
        f"cannot be used, or None, as {CONTRACT} says"
    )
    with pytest.raises(WrongBackend, match=rf"^compute 'Number': unavailable\(\) of {HERE}:Number is 5, .*{CONTRACT}"):
        computes.unavailable(stage("Number"), asked["Number"])


def test_an_import_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "waits_for_ever.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(trial, "LIMIT_S", 0.5)
    found = trial.fatal("waits_for_ever:Stage", str(tmp_path))
    assert found is not None
    assert found.reason.startswith("importing waits_for_ever takes longer than 0.5 s, as it was tried")


def test_the_doctor_goes_on_after_one_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(config: BackendConfig) -> None:
        if config.name == "gloo":
            raise WrongBackend("gloo is wrong")

    monkeypatch.setattr(loader, "unavailable", unavailable)
    found = ranks.backends_here()
    assert (found["gloo"], found["shm_fence"]) == ("gloo is wrong", None)


def test_what_comes_with_epcross_is_not_tried_and_others_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(trial, "_run", lambda module, *_: started.append(module) or (0, b"id", ""))
    trial._tried.cache_clear()
    for _ in range(2):
        assert trial.fatal("epcross.kernels.experts.torch_grouped:TorchGrouped", "") is None
        assert trial.fatal("mine:Stage", "") is None
    assert started == ["mine"]
    monkeypatch.setattr(trial, "_expendable", True)
    assert trial.fatal("yours:Stage", "") is None
    assert started == ["mine"]
    trial._tried.cache_clear()
