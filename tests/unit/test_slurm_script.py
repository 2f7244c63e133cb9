"""The scripts, at the border to sbatch: a faked one keeps what it is given, and it is compared with stored files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from epcross.harness.cli import run as cli
from epcross.harness.errors import EpcrossError
from epcross.harness.planning.build import build
from epcross.harness.slurm import submit
from epcross.harness.slurm.layout import pieces
from epcross.harness.slurm.plan_view import script_text

CONF = Path(__file__).parents[1] / "slurm" / "conf"
GOLDEN = Path(__file__).parent / "golden"
GPUS = ("sweep=grid", "device=cuda", "backend=spanning", "model=deepseek_v3", "launcher=slurm")
GB200 = (*GPUS, "cluster=gb200_nvl72", "cluster.partition=batch", "cluster.account=team")

SBATCH = """#!/bin/sh
cp "$1" {folder}/script
env > {folder}/environment
echo "Submitted batch job 77"
"""


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a faked sbatch leaves its script and its environment."""
    folder = tmp_path / "slurm_bin"
    folder.mkdir()
    for name, text in (("sbatch", SBATCH.format(folder=folder)), ("srun", "#!/bin/sh\nexit 1\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def neutral(text: str, run: Path) -> str:
    """Without the names of this machine and this run."""
    text = text.replace(str(run), "RUN").replace(sys.executable, "PYTHON")
    return re.sub(r"-[0-9a-f]{4}$", "-RUN", text, flags=re.MULTILINE)


CASES = {
    "gb200_ep8": (*GB200, "ep_size=8"),
    "gb200_ep64": (*GB200, "ep_size=64"),
    "gb200_ep72": (*GB200, "ep_size=72", "placement=replicated"),
    "gb200_tray_container": (
        *GB200,
        "ep_size=4",
        "cluster.container=/images/epcross.sqsh",
        "cluster.container_mounts=['/data:/data']",
        "cluster.python=python3",
        "cluster.setup=['export EPCROSS_CACHE_DIR=/tmp/epcross']",
        "cluster.sbatch=['--reservation=tuesday','--mem=0']",
    ),
    "h200_ep8_gres": (*GPUS, "cluster=h200_x8", "ep_size=8", "cluster.sbatch=['--gres=gpu:h200:8']"),
    "h200_array": (
        *(*GPUS, "cluster=h200_x8", "ep_size=8", "tokens_per_rank=1,2,4,8"),
        "launcher.points_per_job=2",
        "cluster.qos=normal",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_the_stored_one_and_plan_shows_it(name: str, sbatch: Path, tmp_path: Path) -> None:
    plan = build([*CASES[name], f"output_dir={tmp_path}"], [CONF])
    run, jobs = submit.start(plan)
    text = neutral((sbatch / "script").read_text(), run.path)
    golden = GOLDEN / f"{name}.sbatch"
    if os.environ.get("EPCROSS_WRITE_GOLDEN"):
        golden.write_text(text + "\n")
    assert text + "\n" == golden.read_text()
    assert {job.job_id.partition("_")[0] for job in jobs} == {"77"}
    assert subprocess.run(["bash", "-n", str(sbatch / "script")], check=False).returncode == 0
    shown = script_text(plan, pieces(plan)).replace(str(tmp_path / "RUN"), "RUN").replace(sys.executable, "PYTHON")
    assert shown.replace("-RUN\n", "-RUN\n") == text


def test_nothing_of_another_job_reaches_sbatch(sbatch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaked = {
        "SLURM_CPU_BIND": "mask",
        "SBATCH_PARTITION": "x",
        "SRUN_DEBUG": "3",
        "SUBMITIT_EXECUTOR": "slurm",
        "RANK": "1",
    }
    for name, value in {**leaked, "SLURM_CONF": "/etc/slurm/slurm.conf", "HTTP_PROXY": "kept"}.items():
        monkeypatch.setenv(name, value)
    submit.start(build(["sweep=grid", "launcher=slurm", f"output_dir={tmp_path}"], [CONF]))
    names = {line.partition("=")[0] for line in (sbatch / "environment").read_text().splitlines()}
    assert names & {*leaked} == set()
    assert {"SLURM_CONF", "HTTP_PROXY"} <= names
    assert os.environ["SLURM_CPU_BIND"] == "mask"  # ours is what it was


def test_what_sbatch_refuses_is_told_with_the_way_on(sbatch: Path, tmp_path: Path) -> None:
    (sbatch / "sbatch").write_text(
        "#!/bin/sh\necho 'sbatch: error: Batch job submission failed: Invalid account' >&2\nexit 1\n"
    )
    with pytest.raises(
        EpcrossError, match=r"does not take the job .*: Batch job submission failed: Invalid account.*cluster=local"
    ):
        submit.start(build(["sweep=grid", "launcher=slurm", f"output_dir={tmp_path / 'runs'}"], [CONF]))
    assert list((tmp_path / "runs").iterdir()) == []  # no run that nobody will ever write to


def test_without_slurm_the_way_on_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EpcrossError, match=r"sbatch and srun are not on PATH.*launcher=local"):
        submit.start(build(["sweep=grid", "launcher=slurm", f"output_dir={tmp_path}"], [CONF]))
    assert list(tmp_path.iterdir()) == []


def test_plan_shows_price_and_scripts_without_any_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*GB200, "ep_size=8,64", "--config-dir", str(CONF)]
    assert cli(["plan", *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["slurm"]
    eight, many = document["jobs"]
    assert (eight["nodes"], many["nodes"]) == (2, 16)
    assert eight["gpu_hours"] == pytest.approx(8 * eight["time_s"] / 3600)
    assert document["gpu_hours"] == pytest.approx(eight["gpu_hours"] + many["gpu_hours"])
    assert [script["jobs"] for script in document["scripts"]] == [["nvlink_ep8"], ["nvlink_ep64"]]
    assert cli(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --segment=16" in text
    assert re.search(r"^2 jobs: [\d.e-]+ GPU-hours, ", text, re.MULTILINE)
    assert "Nodes of cluster=gb200_nvl72 are aarch64" in text


def test_what_cannot_be_laid_out_is_refused_by_plan_and_run(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("plan", "run"):
        assert cli([verb, *GPUS, "cluster=h200_x8", "ep_size=16", "--config-dir", str(CONF)]) == 2
        assert "one NVLink domain of cluster=h200_x8 has 1 of 8 GPUs" in capsys.readouterr().err
