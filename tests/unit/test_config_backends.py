"""From a backend's YAML to the backend: targets, options, interpreters."""

from dataclasses import replace
from pathlib import Path

import pytest
from planning import FIXTURES, plan_of, problems_of, the_problem

from epcross.harness.backends import loader
from epcross.harness.errors import ConfigError
from epcross.harness.planning.schema import BackendConfig, KnownIssue


def config(target: str = "fixture_backends:Plain", **changes) -> BackendConfig:
    base = BackendConfig(name="mine", target=target, label="Mine", color="#000000", folder=str(FIXTURES))
    return replace(base, **changes)


def test_options_are_defaults_then_configuration():
    assert loader.load(config(options={"chunk": 8})).options == {
        "chunk": 8,
        "algorithm": "ring",
        "fast": True,
        "limit": None,
    }


def test_wrong_options_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        loader.load(config(options={"chunck": 8, "algorithm": False, "fast": 1, "limit": 3}))
    text = str(caught.value)
    assert len(caught.value.problems) == 3
    assert "unknown option 'chunck'; did you mean 'chunk'?" in text
    assert "option algorithm is False, but must be text; YAML reads on, off" in text
    assert "option fast is 1, but must be true or false" in text


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("fixture_backends", "must be written module:Class"),
        ("fixture_backends:", "must be written module:Class"),
        ("no_such_module:Plain", "there is no module 'no_such_module'; put it into"),
        ("fixture_backends:Plane", "no class 'Plane'; did you mean 'Plain'?"),
        ("fixture_backends:NOT_A_CLASS", "is no subclass"),
        ("fixture_backends:Path", "no class 'Path'"),
        ("fixture_backends:Unfinished", "lacks close, combine"),
    ],
)
def test_a_wrong_target_is_a_configuration_error(target: str, says: str):
    with pytest.raises(ConfigError, match=says):
        loader.load(config(target))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import no_such_vendor_library\n", "needs the module 'no_such_vendor_library', which is not installed"),
        ("raise OSError('libcuda.so.1 not found')\n", "fails with OSError: libcuda.so.1 not found"),
    ],
)
def test_a_module_that_cannot_be_imported_is_unavailable(tmp_path: Path, source: str, says: str):
    name = f"broken_{abs(hash(source)) % 10**8}"
    (tmp_path / f"{name}.py").write_text(source)
    reason = loader.unavailable(config(f"{name}:Kernel", folder=str(tmp_path)))
    assert reason is not None
    assert says in reason


def test_another_module_of_the_same_name_is_not_taken_in_silence(tmp_path: Path):
    source = "from tests.broken_backends import ReferenceBackend as Kernel\n"
    for folder in ("first", "second", "package/twice"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("first/twice.py", "second/twice.py", "package/twice/__init__.py", "second/colorsys.py"):
        (tmp_path / name).write_text(source)
    loader.load(config("twice:Kernel", folder=str(tmp_path / "first")))
    loader.load(config("twice:Kernel", folder=str(tmp_path / "first")))
    for folder, name, taken in [
        ("second", "twice", tmp_path / "first" / "twice.py"),
        ("package", "twice", tmp_path / "first" / "twice.py"),
        ("second", "colorsys", "lib.*/colorsys.py"),  # a user's file never hides an installed module
    ]:
        says = f"'{name}' is {tmp_path / folder}.*another module of that name, .*{taken}"
        with pytest.raises(ConfigError, match=says):
            loader.load(config(f"{name}:Kernel", folder=str(tmp_path / folder)))


def test_its_points_are_rows_that_say_so(tmp_path: Path):
    (tmp_path / "backend").mkdir()
    (tmp_path / "backend" / "vendor.yaml").write_text("target: vendor_adapter:V\nlabel: V\ncolor: '#111111'\n")
    (tmp_path / "vendor_adapter.py").write_text("import no_such_vendor_library\n")
    plan = plan_of("sweep=smoke", "backend=vendor,plain", "backend.options.chunk=2", more=(tmp_path,))
    assert {str(i.status) for i in plan.impossible} == {"unavailable"}
    assert len(plan.impossible) * 2 == len(plan.points)
    assert plan.jobs[0].backends == ("plain",)


def test_a_check_that_raises_is_a_reason():
    assert loader.unavailable(config("fixture_backends:Careless")) == (
        "its check failed with RuntimeError: driver not loaded"
    )


def test_the_environment_of_the_yaml_reaches_the_check():
    assert loader.unavailable(config("fixture_backends:FromEnvironment")) == "FIXTURE_BACKEND is not on"
    assert loader.unavailable(config("fixture_backends:FromEnvironment", env={"FIXTURE_BACKEND": "on"})) is None


@pytest.mark.parametrize(
    ("python", "says"),
    [("/no/such/python", "cannot be started: No such file"), ("/bin/false", "cannot run epcross (no output)")],
)
def test_a_wrong_interpreter_is_a_reason(python: str, says: str):
    reason = loader.unavailable(config(python=python))
    assert reason is not None
    assert says in reason


def test_the_configuration_survives_json():
    rich = config(
        options={"chunk": 8},
        env={"A": "1"},
        known_issues=(KnownIssue(versions="<2", reason="races"),),
        engines={"v": "x"},
    )
    assert BackendConfig.from_json(rich.to_json()) == rich


def test_a_wrong_backend_file_is_refused(tmp_path: Path):
    (tmp_path / "backend").mkdir()
    path = tmp_path / "backend" / "mine.yaml"
    path.write_text("target: a:B\nlabel: M\ncolor: blue\n")
    assert 'must be written "#rrggbb"' in the_problem("sweep=smoke", "backend=mine", more=(tmp_path,))
    path.write_text("target: a:B\nlabel: M\ncolor: '#123456'\nmarker: x\n")
    assert "marker is 'x', but must be one of o s ^ D" in the_problem("sweep=smoke", "backend=mine", more=(tmp_path,))
    path.write_text("targt: a:B\nlabel: ''\ncolor: '#123456'\nenv: {DEBUG: 1}\n")
    text = "\n".join(problems_of("sweep=smoke", "backend=mine", more=(tmp_path,)))
    for says in ("did you mean 'target'?", "target is missing", "put it in quotes"):
        assert says in text


@pytest.mark.parametrize("versions", ["1.3", "<1.3 or >2", "older", "=1.3", "<1.3.*", "", " , "])
def test_what_is_no_specifier_is_refused(tmp_path: Path, versions: str):
    (tmp_path / "backend").mkdir()
    path = tmp_path / "backend" / "mine.yaml"
    head = "target: fixture_backends:Plain\nlabel: M\ncolor: '#123456'\nknown_issues:\n"
    path.write_text(f"{head}  - {{versions: '<2', reason: races}}\n  - {{versions: '{versions}', reason: races}}\n")
    assert the_problem("sweep=smoke", "backend=mine", more=(tmp_path,)) == (
        f"backend 'mine' ({path}): known_issues: versions is {versions!r}, but must be a PEP 440 specifier, such as "
        '"<1.3", "==2.0.*" or ">=1.1,<1.3"; ">=0" is every version'
    )
    path.write_text(f"{head}  - {{versions: '<2', reason: ' '}}\n")
    assert "known_issues: reason is empty" in the_problem("sweep=smoke", "backend=mine", more=(tmp_path,))
