"""Where a worker stands that does not come back, from what it wrote to its log."""

from pathlib import Path

import pytest

from epcross.harness.running import stuck

DUMP = """last words of a library
Thread 0x1 (most recent call first):
  File "/usr/lib/threading.py", line 1 in wait

Current thread 0x2 (most recent call first):
  File "/home/a b/my_kernel.py", line 85 in wait
  File "/home/a b/my_kernel.py", line 111 in dispatch
"""
CALLERS = [
    "/src/epcross/harness/verification/contract.py",
    "/src/epcross/harness/verification/gpu_contract.py",  # whose lambda stands between the contract and the backend
    "/src/epcross/harness/measuring/unit_session.py",
]


@pytest.mark.parametrize("caller", CALLERS)
def test_it_is_the_backends_own_call_and_what_it_has_come_to(tmp_path: Path, caller: str) -> None:
    log = tmp_path / "log"
    log.write_text(DUMP + f'  File "{caller}", line 40 in <lambda>\n  File "/src/worker.py", line 5 in main\n')
    call, reached = stuck.frames(log)
    assert call == 'File "/home/a b/my_kernel.py", line 111 in dispatch'
    assert reached == 'File "/home/a b/my_kernel.py", line 85 in wait'
    assert stuck.place(log) == "my_kernel.py line 111 in dispatch, at my_kernel.py line 85 in wait"


def test_a_stopped_worker_writes_nothing(tmp_path: Path) -> None:
    assert stuck.place(tmp_path / "none") == ""
    (tmp_path / "log").write_text("compiling\n")
    assert stuck.place(tmp_path / "log") == ""
    assert stuck.told(["", ""]) == ""


def test_what_fewest_ranks_are_in_comes_first_and_many_are_counted() -> None:
    places = ["k.py line 9 in wait"] * 8
    places[5] = "k.py line 3 in dispatch"
    assert stuck.told(places) == "; rank 5: k.py line 3 in dispatch; ranks 0 and 6 more: k.py line 9 in wait"
