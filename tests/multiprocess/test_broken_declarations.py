"""Backends that answer what the contract does not allow, in a run and a check: each costs its own points, in words."""

from pathlib import Path

import pytest

from _command import epcross, rows_of, write_backends
from epcross.harness.errors import NOTHING_SHOWN
from epcross.harness.record import Record

pytestmark = pytest.mark.beside

HERE = "tests.broken_declarations"
EXPECTED = {
    "Wrong_told_version": ("error", "version is 1, but must be text that is not empty"),
    "Wrong_told_libraries": ("error", "libraries is {'nccl': 2}, but must be a mapping of names to versions"),
    "Wrong_refused_here": ("error", "is False, but must be None, or a sentence"),
    "Wrong_unsupported": ("error", "is ' ', but must be None, or a sentence"),
    "Wrong_domains": ("error", "domains is None, but must be a set of Domain"),
    "Leaves_prepare": ("error", "SystemExit: 0"),
    "Leaves_prebuild": ("error", "building it ahead failed: prebuild() raised SystemExit: 0"),
    "Leaves_unavailable": ("unavailable", "its check failed with SystemExit: 0"),
    "Right_told_workspace_bytes": ("ok", ""),
    "Right_contract_shape": ("ok", ""),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("declarations")
    write_backends(folder, {name: f"{HERE}:{name}" for name in EXPECTED})
    return folder


@pytest.fixture(scope="module")
def records(folder: Path) -> dict[str, Record]:
    (folder / "sweep").mkdir()
    (folder / "sweep" / "broken.yaml").write_text(
        "description: Backends that each say one wrong thing.\n"
        "timing: smoke\n"
        f"grid: {{backend: [{', '.join(EXPECTED)}], ep_size: 2, model: tiny, tokens_per_rank: 3, regime: steady}}\n"
    )
    ended = epcross(folder, "run", "sweep=broken", f"output_dir={folder}/runs", f"--config-dir={folder}")
    assert ended.returncode == 1, ended.stderr
    (run_path,) = (folder / "runs").iterdir()
    return {record.backend: record for record in rows_of(run_path)}


@pytest.mark.parametrize("name", EXPECTED)
def test_it_costs_its_own_points(records: dict[str, Record], name: str) -> None:
    status, words = EXPECTED[name]
    assert (records[name].status, words in (records[name].reason or "")) == (status, True), records[name].reason
    assert (records[name].latency_us is None) == (status != "ok")


@pytest.mark.parametrize("name", [name for name, (status, _) in EXPECTED.items() if status == "error"])
def test_a_check_fails_and_says_why(folder: Path, name: str) -> None:
    ended = epcross(folder, "check", f"backend={name}", "case=plain", "seed=0", f"--config-dir={folder}")
    assert ended.returncode == 1
    assert EXPECTED[name][1].removeprefix("building it ahead failed: ") in ended.stdout + ended.stderr


@pytest.mark.parametrize("name", ["Right_told_workspace_bytes", "Right_contract_shape"])
def test_a_check_of_the_same_with_a_right_value_passes(folder: Path, name: str) -> None:
    ended = epcross(folder, "check", f"backend={name}", "case=plain", "seed=0", f"--config-dir={folder}")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_check_of_a_backend_whose_library_leaves_shows_nothing(folder: Path) -> None:
    ended = epcross(folder, "check", "backend=Leaves_unavailable", f"--config-dir={folder}")
    assert ended.returncode == NOTHING_SHOWN
    assert "its check failed with SystemExit: 0" in ended.stderr
