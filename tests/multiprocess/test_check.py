"""`epcross check` in real processes: right backends pass, each broken one is named with case, seed and place."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from _command import epcross, write_backends
from _spawn import PYTHONPATH, until
from epcross.harness import cli
from epcross.harness.errors import NOTHING_SHOWN
from epcross.harness.planning.build import build
from epcross.harness.running import check_ranks, room
from epcross.harness.running.check_ranks import _named, _told_once  # pyright: ignore[reportPrivateUsage]
from epcross.harness.verification.cases import cases

OWN = """
import os, signal, sys, time
from tests.broken_backends import ReferenceBackend
from epcross.harness.backends.base import ContractShape

class Crashes(ReferenceBackend):
    def combine(self, set_index):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        super().combine(set_index)

class Aborts(ReferenceBackend):
    def dispatch(self, set_index):
        os.write(2, b"group.cc:12: num_experts % 4 == 0\\n")
        os.abort()

class Sleeps(ReferenceBackend):
    def prepare(self, point, shard, group):
        super().prepare(point, shard, group)
        if self.rank == 0:
            time.sleep(1000)

class Absent(ReferenceBackend):
    def unavailable(self):
        return "libfoo is missing; install it"

class AbsentToRanks(ReferenceBackend):
    def unavailable(self):
        return "there is no GPU; use one" if any("worker" in word for word in sys.orig_argv) else None

class Chatters(ReferenceBackend):
    def prepare(self, point, shard, group):
        print("one word", file=sys.stderr, flush=True)
        time.sleep(1000)

class Refuses(ReferenceBackend):
    def unsupported(self, point):
        return f"hidden={point.model.hidden} is no multiple of 128" if point.model.hidden % 128 else None

class Wide(ReferenceBackend):
    contract_shape = ContractShape(hidden=256, format_hidden=512)
    def unsupported(self, point):
        return f"hidden={point.model.hidden} is no multiple of 256" if point.model.hidden % 256 else None

class WideAndWrong(Wide):
    def combine(self, set_index):
        super().combine(set_index)
        self.sums[:] = 0

class Chooses(ReferenceBackend):
    @classmethod
    def option_defaults(cls):
        return {"spoil": False}
    def combine(self, set_index):
        super().combine(set_index)
        if self.options["spoil"]:
            self.sums[:] = 0
"""
TARGETS = {
    **{name: f"tests.broken_backends:{name}" for name in ("ReferenceBackend", "Hangs", "OneWrongRow", "EatsAllOnes")},
    **{name: f"tests.broken_backends:{name}" for name in ("RaisesIn_dispatch", "RaisesIn_close", "WeightTwice")},
    **{
        name: f"own:{name}"
        for name in (
            "Crashes",
            "Aborts",
            "Sleeps",
            "Absent",
            "AbsentToRanks",
            "Chatters",
            "Refuses",
            "Wide",
            "WideAndWrong",
            "Chooses",
        )
    },
}

Check = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backends")
    (folder / "own.py").write_text(OWN)
    write_backends(folder, TARGETS)
    return folder


@pytest.fixture(scope="module")
def check(folder: Path) -> Check:
    """The real command; nothing of it may outlive it."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        mark = f"{folder}/{time.monotonic_ns()}"
        given = ("check", *words, "--config-dir", str(folder))
        ended = epcross(folder, *given, EPCROSS_TEST_RUN=mark, TMPDIR=str(folder))
        assert not [
            process for process in psutil.process_iter() if _environment(process).get("EPCROSS_TEST_RUN") == mark
        ]
        return ended

    return run


def _environment(process: psutil.Process) -> Mapping[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


@pytest.mark.beside
def test_a_right_backend_passes_every_case(check: Check, folder: Path) -> None:
    ended = check("backend=shm_sentinel", "seed=0")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    names = re.findall(r"^passed +(\w+)$", ended.stdout, re.MULTILINE)
    assert names == [case.name for case in cases(2)]
    assert f"{len(names)} passed in" in ended.stdout
    assert not list(folder.glob("epcross-check-*")), "the output of ranks is kept only after a failure"


@pytest.mark.beside
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("backend=OneWrongRow", "case=plain"), "rank 1: wrong bytes in a row (source 1, token 0, column 3): got 0x"),
        (("backend=WeightTwice", "case=plain"), "combine of exact rows, set 0: rank 0: a wrong combined sum (source 0"),
        (("backend=EatsAllOnes", "case=any_bits_bf16", "ep_size=3"), "got 0x00, want 0xff; "),
        (("backend=RaisesIn_dispatch", "case=plain"), "rank 1: dispatch raised RuntimeError: deliberate"),
        (("backend=RaisesIn_close", "case=plain"), "rank 1: the first close raised RuntimeError: deliberate"),
        (
            ("backend=Crashes", "case=plain"),
            "rank 1 in combine: its process was killed by SIGSEGV; its last words: Fatal",
        ),
        (("backend=Chooses", "case=plain", "backend.options.spoil=true"), "a wrong combined sum"),
    ],
)
def test_a_broken_backend_is_named_with_case_seed_place_and_the_line_that_repeats_it(
    check: Check, folder: Path, words: tuple[str, ...], expected: str
) -> None:
    ended = check(*words)
    assert ended.returncode == 1
    case = words[1].removeprefix("case=")
    head, seed, first, *_ = ended.stdout.splitlines()[1:]
    assert head == f"failed    {case}"
    assert seed.strip().startswith("seed 0, after ")
    assert expected in first
    (again,) = re.findall(r"again: (.*)", ended.stdout)
    program, verb, *line = shlex.split(again)
    assert (program, verb) == ("epcross", "check")
    assert line == [words[0], *words[2:], "--config-dir", str(folder), f"case={case}", "seed=0"]


@pytest.mark.beside
def test_the_printed_line_repeats_the_failure(check: Check, folder: Path) -> None:
    ended = check("backend=EatsAllOnes", "case=any_bits_bf16", "seed=2")
    assert "seed 2, after" in ended.stdout
    (again,) = re.findall(r"again: (.*)", ended.stdout)
    repeated = check(*[word for word in shlex.split(again)[2:] if word not in ("--config-dir", str(folder))])
    places = [re.findall(r"rank \d: wrong bytes.*", text.stdout) for text in (ended, repeated)]
    assert places[0] == places[1] != []


@pytest.mark.parametrize(
    ("words", "file", "ranks", "call"),
    [
        (("backend=Hangs",), "broken_backends.py", "rank 1", "dispatch"),
        (("backend=Sleeps", "case=plain"), "own.py", "rank 0", "prepare"),
    ],
)
def test_a_hang_ends_in_bounded_time_and_is_named(
    check: Check, words: tuple[str, ...], file: str, ranks: str, call: str
) -> None:
    begin = time.monotonic()
    ended = check(*words, "--limit-s", "1.5")
    assert time.monotonic() - begin < 30
    assert ended.returncode == 1
    (line,) = {
        line.strip() for line in ended.stdout.splitlines() if f"{ranks} hangs: it did not come back from {call}" in line
    }
    assert re.search(rf'within \d s; File ".*{file}", line \d+ in {call}', line)
    if len(words) == 1:  # after two hangs the rest would only take time
        assert ended.stdout.count("\nhung ") == 2
        assert f"2 failed, {len(cases(2)) - 2} not tried" in ended.stdout


def test_what_is_waited_for_is_told_ever_less_often(folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(check_ranks, "TELL_S", 1.0)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    words = ["backend=Sleeps", "case=plain", "seed=0", "--limit-s", "6", "--config-dir", str(folder)]
    assert cli.run(["check", *words]) == 1
    text = capsys.readouterr().out
    found = re.findall(r"^waiting   plain, seed 0: (\d+) s; (?!.*ranks have started)(.*)$", text, re.MULTILINE)
    told = [seconds for seconds, _ in found]
    assert told == ["1", "2", "4"][-len(told) :]  # a slow machine may be starting yet after the first second
    assert found[-1][1] == "rank 0: prepare; rank 1: waiting for the other ranks"
    assert text.index("waiting   plain") < text.index("hung      plain")


def test_how_many_ranks_have_started_is_told(folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(check_ranks, "TELL_S", 0.01)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    assert cli.run(["check", "backend=ReferenceBackend", "case=plain", "seed=0", "--config-dir", str(folder)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^ReferenceBackend, EP 2: 1 case, 1 seed each, in 2 processes on \d+ cores?", text, re.MULTILINE)
    assert re.search(r"s; 0 of 2 ranks have started, not ranks 0, 1$", text, re.MULTILINE)
    assert _named([str(rank) for rank in range(12)]) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("free_shm_bytes", 4096, r"/dev/shm has 4096 bytes free and EP 3 of this check needs \d+: lower ep_size"),
        ("free_memory_bytes", 10**8, r"has 100000000 bytes of memory free and the 3 processes of EP 3 take at least"),
    ],
)
def test_a_check_that_does_not_fit_is_refused_before_a_process_starts(
    monkeypatch, capsys, name: str, value: int, says: str
) -> None:
    monkeypatch.setattr(room, name, lambda: value)
    assert cli.run(["check", "backend=shm_fence", "ep_size=3"]) == 1
    said = capsys.readouterr()
    assert re.search(says, said.err)
    assert said.out == ""


def test_inputs_that_memory_cannot_hold_are_refused_before_a_process_starts(monkeypatch, tmp_path, capsys) -> None:
    """2 sets of 2 ranks' 1000 rows of 2 x 64 bytes, with ids and weights of 2 experts each: 576000 bytes."""
    words = ["backend=shm_fence", "ep_size=2", "model=tiny", "tokens_per_rank=1000", "regime=steady", "timing=smoke"]
    monkeypatch.setattr(room, "WORKER_BYTES", 1)
    plan = build(words)
    monkeypatch.setattr(room, "free_memory_bytes", lambda: 575_999)
    assert cli.run(["run", *words, f"output_dir={tmp_path}"]) == 1
    assert (
        "this machine has 575999 bytes of memory free and the inputs of EP 2 alone take 576000 (timing.sets=2 x 2000 "
        "tokens of hidden=64, top_k=2): lower tokens_per_rank, or the others"
    ) in capsys.readouterr().err
    monkeypatch.setattr(room, "free_memory_bytes", lambda: 576_000)
    room.check_room(plan)


def test_more_ranks_than_files_may_be_open_are_refused(monkeypatch, capsys) -> None:
    monkeypatch.setattr(room.resource, "getrlimit", lambda _: (100, 100))
    assert cli.run(["check", "backend=shm_fence", "ep_size=32"]) == 1
    assert "may open 100 files here and EP 32 needs 160: lower ep_size, or ulimit -n 160" in capsys.readouterr().err


def test_free_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   2 kB\n")
    assert room.free_memory_bytes(tmp_path / "meminfo") == 2048
    assert room.free_memory_bytes(tmp_path / "absent") is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(("backend", "kept"), [("Chatters", True), ("Sleeps", False)])
def test_an_interrupted_check_says_what_it_leaves(
    folder: Path, tmp_path: Path, number: signal.Signals, backend: str, kept: bool
) -> None:
    words = ["check", f"backend={backend}", "case=plain", "--config-dir", str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "epcross.harness.cli", *words],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ranks = until(lambda: [*tmp_path.glob("epcross-check-*/start1.rank1.log")], 60)[0]
    if kept:
        until(lambda: ranks.stat().st_size, 60)
    time.sleep(1.0)  # all ranks are made, and the command waits for them
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.split("\n") == ["", "epcross: interrupted", ""]
    assert (f"What the ranks wrote: {ranks.parent}\n" in out) == ranks.parent.exists() == kept


def test_a_case_that_is_done_soon_is_told_once(check: Check) -> None:
    assert "waiting" not in check("backend=ReferenceBackend", "case=plain").stdout


@pytest.mark.beside
def test_a_refusal_is_no_failure_and_says_why(check: Check) -> None:
    ended = check("backend=Refuses", "case=odd_hidden")
    assert "refused   odd_hidden: hidden=67 is no multiple of 128" in ended.stdout
    assert ended.returncode == NOTHING_SHOWN, "nothing passed, so nothing was shown"
    ended = check("backend=Refuses", "case=plain", "seed=7")
    assert ended.returncode == 0


@pytest.mark.beside
def test_what_a_library_says_before_it_ends_the_process_is_told(check: Check) -> None:
    ended = check("backend=Aborts", "case=plain", "seed=0")
    assert "killed by SIGABRT; its last words: group.cc:12: num_experts % 4 == 0 | Fatal Python error: Aborted" in (
        ended.stdout
    )


@pytest.mark.beside
def test_a_backend_is_checked_at_a_shape_that_it_takes(check: Check) -> None:
    ended = check("backend=Wide", "seed=0")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.findall(r"^refused +(\w+)", ended.stdout, re.MULTILINE) == ["odd_hidden", "tiny_rows"]
    assert f"{len(cases(2)) - 2} passed, 2 refused" in ended.stdout
    ended = check("backend=WideAndWrong", "case=any_bits_nvfp4", "seed=0")
    assert ended.returncode == 1
    assert "a wrong combined sum" in ended.stdout


@pytest.mark.beside
def test_a_backend_that_is_absent_here_says_so(check: Check) -> None:
    ended = check("backend=Absent")
    assert ended.returncode == NOTHING_SHOWN
    assert ended.stderr == "epcross: Absent cannot be used here: libfoo is missing; install it\n"
    ended = check("backend=AbsentToRanks")  # as where there is no GPU, which only the ranks ask for
    assert ended.returncode == NOTHING_SHOWN
    assert ended.stderr == "epcross: AbsentToRanks cannot be used here: there is no GPU; use one\n"
    assert "failed" not in ended.stdout


@pytest.mark.beside
def test_wrong_words_are_all_reported(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["backend=shm_fense", "ep_size=0", "case=plane", "seed=-1", "colour=red", "loose", "ep_size=3"]
    assert cli.run(["check", *words]) == 2
    text = capsys.readouterr().err
    for problem in (
        "unknown backend 'shm_fense'; did you mean 'shm_fence'?",
        "ep_size=0 must be a whole number from 1 to",
        "unknown case 'plane'; did you mean 'plain'?",
        "seed=-1 must be a whole number from 0 to",
        "unknown key 'colour'",
        "'loose' cannot be read; write key=value",
        "'ep_size' is given twice",
    ):
        assert problem in text
    assert cli.run(["check"]) == 2
    assert "no backend is named; add backend=NAME" in capsys.readouterr().err
    assert cli.run(["check", "backend=shm_fence", "backend.options.nope=1"]) == 2
    assert "unknown option 'nope'" in capsys.readouterr().err


def test_what_only_passes_on_a_problem_is_left_out() -> None:
    first = "plain: rank 1: dispatch raised RuntimeError: deliberate"
    assert _told_once([f"plain: rank 0: a peer was lost: rank 1 gave up: {first}", first, first]) == (first,)
