"""MPS is used where it runs, started where it does not, ended only if it was started, and refused with a sentence."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from epcross.harness.running import mps
from epcross.harness.storing.probe import Probe

DAEMON = """\
#!/bin/sh
[ "$1" = -d ] && { echo "$CUDA_MPS_PIPE_DIRECTORY${CUDA_VISIBLE_DEVICES+ sees some GPUs}" >>LOG; exit CODE; }
exit 1
"""


class Machine(Probe):
    def __init__(self, **variables: str) -> None:
        self._variables = variables

    @property
    def variables(self) -> Mapping[str, str]:
        return self._variables


class Daemon:
    """Answers as a control daemon does; `runs_in` are the pipe folders that have one."""

    def __init__(self, *runs_in: str, starts: bool = True) -> None:
        self.runs_in, self.starts, self.asked = set(runs_in), starts, []

    def __call__(self, word: str, variables: Mapping[str, str]) -> str | None:
        folder = variables.get("CUDA_MPS_PIPE_DIRECTORY", "default")
        self.asked.append((word, folder))
        if folder not in self.runs_in and not (self.starts and folder != "default"):
            return None
        return "" if word == "get_server_list" else "bye"


def installed(tmp_path: Path, code: int = 0, **variables: str) -> Machine:
    program = tmp_path / "bin" / mps.CONTROL
    program.parent.mkdir()
    program.write_text(DAEMON.replace("LOG", str(tmp_path / "log")).replace("CODE", str(code)))
    program.chmod(0o755)
    return Machine(PATH=f"{program.parent}{os.pathsep}{os.environ['PATH']}", **variables)


def test_a_daemon_that_runs_is_used_and_left_alone(tmp_path: Path) -> None:
    daemon = Daemon("default")
    with mps.mps_environment(installed(tmp_path), ask=daemon) as environment:
        assert environment == {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    assert daemon.asked == [("get_server_list", "default")]
    assert not (tmp_path / "log").exists()


def test_one_is_started_in_a_folder_of_its_own_and_ended(tmp_path: Path) -> None:
    daemon = Daemon()
    with mps.mps_environment(installed(tmp_path), ask=daemon) as environment:
        folder = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert environment["CUDA_MPS_LOG_DIRECTORY"] == folder
        assert environment["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"
        assert (tmp_path / "log").read_text() == f"{folder}\n"
        assert ("quit", folder) not in daemon.asked
    assert daemon.asked[-1] == ("quit", folder)
    assert not Path(folder).exists()


def test_the_daemon_sees_every_gpu_since_its_clients_choose_among_those_it_sees(tmp_path: Path) -> None:
    with mps.mps_environment(installed(tmp_path, CUDA_VISIBLE_DEVICES="1"), ask=Daemon()) as environment:
        assert (tmp_path / "log").read_text() == f"{environment['CUDA_MPS_PIPE_DIRECTORY']}\n"


def test_without_mps_there_is_a_sentence() -> None:
    with (
        pytest.raises(mps.MpsRefused, match=r"not installed.*device=cuda_one_launch"),
        mps.mps_environment(Machine(PATH="/nowhere"), ask=Daemon()),
    ):
        pass


def test_a_daemon_that_does_not_start_is_a_sentence(tmp_path: Path) -> None:
    with (
        pytest.raises(mps.MpsRefused, match="did not start \\(7; no words\\)"),
        mps.mps_environment(installed(tmp_path, code=7), ask=Daemon()),
    ):
        pass
