"""Who reads what a run says may go, such as `head` or a lost connection: the run goes on, with its own exit code."""

import os
import pty
import subprocess
import sys
from pathlib import Path

from _command import rows_of
from epcross.harness.errors import INTERRUPTED


def test_a_run_goes_on_when_nobody_reads_its_progress(tmp_path: Path):
    words = ["sweep=smoke", "backend=shm_fence", f"output_dir={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "epcross.harness.cli", "run", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"run ")
    process.stdout.close()
    assert process.wait(120) == 0
    (run,) = tmp_path.iterdir()
    assert {row.status for row in rows_of(run)} == {"ok"}


def test_a_terminal_that_is_gone_ends_a_run_in_good_order(tmp_path: Path):
    pid, terminal = pty.fork()
    if pid == 0:
        words = ["run", "sweep=smoke", "backend=shm_fence", "timing.launches=1000", f"output_dir={tmp_path}"]
        os.execv(sys.executable, [sys.executable, "-P", "-m", "epcross.harness.cli", *words])
    assert b"run " in os.read(terminal, 1000)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == INTERRUPTED
    (run,) = tmp_path.iterdir()
    *_, last = (run / "progress.jsonl").read_text().splitlines()
    assert '"reason": "cancelled by SIGHUP"' in last
