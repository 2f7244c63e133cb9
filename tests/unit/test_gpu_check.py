"""The one command for a GPU machine names sweeps that exist, and goes on with the runs that it should."""

import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))
    monkeypatch.delitem(sys.modules, "check", raising=False)
    import check  # type: ignore[import-not-found]

    return check


def test_every_step_runs_a_sweep_that_exists(check, tmp_path):
    words = [word for commands in check.commands(tmp_path).values() for command in commands for word in command]
    named = {word.removeprefix("sweep=") for word in words if word.startswith("sweep=")} - {"gpu_smoke"}
    assert {"onesided_nvlink", "baselines_nvlink", "nvlink_ep8"} <= named
    assert [name for name in sorted(named) if not (ROOT / "sweeps" / f"{name}.yaml").is_file()] == []


def test_the_ranks_of_a_group_of_gpus_are_chosen(check, tmp_path):
    (command,) = check.commands(tmp_path, 4)["ep"]
    assert "ep_size=4" in command
    assert "sweep=nvlink_ep8" in command


def test_resume_takes_up_evidence_and_no_smoke(check, tmp_path):
    for name in (
        "20261130-010203-baselines_nvlink-aa",
        "20261130-010203-baselines_smoke-bb",
        "20261130-1-nvlink_ep8-c",
        "20261130-1-layer_h200x2-d",
        "20261130-1-layer_smoke-e",
    ):
        (tmp_path / "runs" / name).mkdir(parents=True)
    resumed = [command[-1].split("/")[-1] for command in check.commands(tmp_path)["resume"]]
    assert resumed == [
        "20261130-010203-baselines_nvlink-aa",
        "20261130-1-layer_h200x2-d",
        "20261130-1-nvlink_ep8-c",
    ]


def test_a_command_is_asked_to_end_before_it_is_killed(check, tmp_path, monkeypatch):
    """A run that is asked keeps what it has, and says how to go on; one that does not listen is killed all the same."""
    listens = "import signal, sys, time\ntry:\n time.sleep(60)\nexcept KeyboardInterrupt:\n print('kept'); sys.exit(0)"
    deaf = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    monkeypatch.setattr(check, "LAST_WORDS_S", 1.0)
    for code, said in ((listens, "kept"), (deaf, "deaf")):
        log = tmp_path / said
        assert check.run("step", [sys.executable, "-c", code], log, 2.0) == 124
        assert said in log.read_text()


def test_layers_are_warmed_in_the_words_of_their_sweep(check, tmp_path, monkeypatch):
    monkeypatch.setenv("LAYER_WORDS", "model.num_experts=64 timing.launches=1")
    steps = check.commands(tmp_path)
    for step in ("layer_warm", "layer"):
        (command,) = steps[step]
        assert {"sweep=layer_h200x2", "model.num_experts=64", "timing.launches=1"} <= set(command)


def test_exchanges_are_warmed_in_the_words_of_their_sweep_and_only_those_that_compile(check, tmp_path, monkeypatch):
    monkeypatch.setenv("BASELINES_WORDS", "timing.wall_limit_s=120")
    steps = check.commands(tmp_path)
    for step in ("baselines_warm", "baselines"):
        (command,) = steps[step]
        assert {"sweep=baselines_nvlink", "timing.wall_limit_s=120"} <= set(command)
    (command,) = steps["baselines_warm"]
    named = command[command.index("--backends") + 1].split(",")
    assert {"deepep_v2", "deepep_v2_max", "nccl_ep_ht"} <= set(named)
    assert [name for name in named if not (ROOT / "conf" / "backend" / f"{name}.yaml").is_file()] == []


def test_all_steps_end_in_the_time_of_a_call(check, tmp_path, monkeypatch):
    """What runs is asked to end in time to keep what it has; what the time does not reach says that it did not run."""
    monkeypatch.setattr(check, "LAST_WORDS_S", 0.5)
    python = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(check, "commands", lambda out, ep: {"first": [python], "second": [python]})
    words = ["check.py", "--steps", "first,second", "--out", str(tmp_path), "--all-s", "2"]
    monkeypatch.setattr(sys, "argv", words)
    begin = time.monotonic()
    assert check.main() == 1
    assert time.monotonic() - begin < 10
    assert (tmp_path / "first.log").exists()
    assert not (tmp_path / "second.log").exists()
