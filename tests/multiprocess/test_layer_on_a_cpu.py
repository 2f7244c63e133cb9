"""A layer on a CPU: a check holds it to the contract, and says that a run does not time it, as the run's rows do."""

from pathlib import Path

import pytest

from _command import epcross, rows_of
from epcross.harness.errors import NOTHING_SHOWN
from epcross.harness.terms import Phase, Status

pytest.importorskip("torch", reason="torch is not installed; make torch")

ONLY = "layers and expert stages are timed on GPUs only"
WORDS = ("backend=cpu_layer", "ep_size=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cpu_layer")
    for group, target, more in (
        ("backend", "tests.cpu_layer:CpuLayer", 'color: "#777777"\ncompute: cpu_experts\n'),
        ("compute", "tests.cpu_layer:CpuExperts", ""),
    ):
        (folder / group).mkdir()
        name = "cpu_layer" if group == "backend" else "cpu_experts"
        (folder / group / f"{name}.yaml").write_text(f"target: {target}\nlabel: {name}\n{more}")
    return folder


def test_a_check_passes_and_says_so(folder: Path) -> None:
    ended = epcross(folder, "check", *WORDS, "case=plain_bf16_bf16", "seed=0", f"--config-dir={folder}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == f"epcross run refuses it on a CPU: {ONLY}"
    assert "1 passed in" in ended.stdout


def test_every_row_of_a_run_says_so(folder: Path) -> None:
    words = (*WORDS, "model=tiny", "tokens_per_rank=3", "regime=steady", "device=cpu")
    ended = epcross(folder, "run", *words, f"output_dir={folder}/runs", f"--config-dir={folder}")
    assert ended.returncode == NOTHING_SHOWN, ended.stdout + ended.stderr
    (run_path,) = (folder / "runs").iterdir()
    rows = rows_of(run_path)
    assert {row.phase for row in rows} == {Phase.LAYER, Phase.LAYER_COMM}
    assert {(row.status, row.reason) for row in rows} == {
        (
            Status.UNSUPPORTED,
            f"cpu_layer has kind=layer: {ONLY}, not in domain cpu; let its class declare domain nvlink or shared_gpu",
        )
    }


def test_spans_are_of_gpus_too(folder: Path) -> None:
    """On a CPU they were times of another kind: the host's around each call, without a common start."""
    words = ("backend=shm_fence", "ep_size=2", "model=tiny", "tokens_per_rank=3", "regime=spans")
    ended = epcross(folder, "run", *words, f"output_dir={folder}/spans")
    assert ended.returncode == NOTHING_SHOWN
    (run_path,) = (folder / "spans").iterdir()
    assert {(row.status, row.reason) for row in rows_of(run_path)} == {
        (
            Status.UNSUPPORTED,
            "regime=spans is what a profiler sees of a GPU's kernels, and domain cpu has none; take regime=steady or "
            "regime=entry",
        )
    }
