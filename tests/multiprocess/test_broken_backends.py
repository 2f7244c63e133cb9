"""One sweep over broken backends, as a user's own folder: each ends as its own status, none as a time."""

import pytest

from _command import epcross, rows_of, write_backends
from _spawn import left_overs
from epcross.harness.record import Record
from epcross.harness.storing.store import open_run

pytestmark = pytest.mark.beside

EXPECTED = {
    "ReferenceBackend": ("ok", None, None),
    "RaisesIn_prepare": ("error", "prepare", "deliberate"),
    "RaisesIn_dispatch": ("error", "verify_before", "deliberate"),
    "RaisesIn_experts": ("error", "time", "deliberate"),
    "RaisesIn_close": ("error", "close", "deliberate"),
    "Hangs": ("timeout", "verify_before", "broken_backends.py line"),
    "ReturnsEarly": ("incorrect", "verify_before", "row"),
    "WritesLate": ("incorrect", "verify_before", "wrong bytes in a row"),
    "OneWrongRow": ("incorrect", "verify_before", "wrong bytes in a row"),
    "WrongExpert": ("incorrect", "verify_before", "wrong ids of a row"),
    "WeightTwice": ("incorrect", "verify_before", "a wrong combined sum"),
    "NoOpAfterFirst": ("incorrect", "verify_before", "row"),
    "IdleWhileTimed": ("incorrect", "time", "a wrong combined sum"),
}
"""Class in broken_backends.py -> status, stage, words of the reason."""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Record]]:
    folder = tmp_path_factory.mktemp("broken")
    write_backends(folder, {name: f"tests.broken_backends:{name}" for name in EXPECTED})
    (folder / "sweep").mkdir()
    (folder / "sweep" / "broken.yaml").write_text(
        "description: Backends that are each wrong in one way.\n"
        "timing: smoke\n"
        f"grid: {{backend: [{', '.join(EXPECTED)}], ep_size: 2, model: tiny, tokens_per_rank: 3, regime: steady}}\n"
    )
    words = ["sweep=broken", f"output_dir={folder}/runs", f"--config-dir={folder}"]
    ended = epcross(folder, "run", *words, "timing.wall_limit_s=4", "timing.max_pairs=20")
    assert ended.returncode == 1, ended.stderr
    (run_path,) = (folder / "runs").iterdir()
    assert not left_overs(open_run(run_path))
    found: dict[str, list[Record]] = {}
    for record in rows_of(run_path):
        found.setdefault(record.backend, []).append(record)
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_it_ends_as_its_own_status(records: dict[str, list[Record]], name: str) -> None:
    status, stage, words = EXPECTED[name]
    (record,) = records[name]  # one phase, one repeat
    assert record.status == status, record.reason
    if status == "ok":
        assert record.latency_us is not None
        assert record.reason is None
        return
    assert record.latency_us is None
    assert record.failed_stage == stage
    assert words in (record.reason or "")
    if stage != "prepare":  # where every rank raises, and any may be first
        assert record.failed_rank == 1 or status == "incorrect"
    assert record.failed_rank in (0, 1)
