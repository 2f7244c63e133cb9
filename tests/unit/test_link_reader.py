"""The process that reads counters of links: a real one, with an imitated pynvml, and what becomes of its faults."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.fakes.nvml import KIB, LINKS, RX, TX, Nvml

from epcross.harness.measuring import link_counters
from epcross.harness.measuring.link_counters import LinkBytes, LinkCounters
from epcross.harness.measuring.link_reader import GUARD_FIELDS, Links, Overrun

ROOT = Path(__file__).parents[2]
COUNTED = LinkBytes(tx_bytes=777 // LINKS * LINKS * KIB, rx_bytes=5_000_000 // LINKS * LINKS * KIB, links=LINKS)
WHO = "the process that reads counters of links"
ABORT = "(sys.stderr.write('free(): invalid pointer\\n'), sys.stderr.flush(), os.abort())"
ONCE = "not os.path.exists('was_here') and (open('was_here', 'w').close(), {})"


@pytest.fixture
def counters(tmp_path, monkeypatch):
    """Makes `LinkCounters` whose reader finds, in pynvml's place, `Nvml` with these arguments, which are source."""
    made = []

    def make(arguments="", *, uuid="GPU-1", limit_s=30.0, source=None):
        lines = f"import os, sys, time\nfrom tests.fakes.nvml import Nvml\nsys.modules[__name__] = Nvml({arguments})\n"
        (tmp_path / "pynvml.py").write_text(source or lines)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, ROOT / "src", ROOT))))
        monkeypatch.chdir(tmp_path)
        made.append(LinkCounters(uuid, limit_s))
        return made[-1]

    yield make
    for each in made:
        each.close()


def pid(counters):
    assert counters._reader is not None
    return counters._reader.process.pid


def test_links_that_are_there_are_summed():
    assert LinkBytes(**Links(Nvml(), "handle").read()) == COUNTED


def test_links_that_are_down_or_counted_in_one_direction_are_left_out():
    one_way = frozenset({(TX, 0), (RX, 0), (RX, 3), (TX, 17)})
    read = LinkBytes(**Links(Nvml(down=one_way), "handle").read())
    assert read == LinkBytes(tx_bytes=777 // LINKS * 15 * KIB, rx_bytes=5_000_000 // LINKS * 15 * KIB, links=15)


@pytest.mark.parametrize(
    ("nvml", "words"),
    [
        (Nvml(links=0), "NVML counts no link of this GPU"),
        (Nvml(down=frozenset((TX, link) for link in range(LINKS))), "NVML counts no link of this GPU"),
        (Nvml(code=3), "NVML gives no counters of links: Not Supported"),
        (type("Old", (), {"NVMLError": Nvml.NVMLError})(), "too old"),
    ],
)
def test_nvml_without_counters_is_a_reason(nvml, words):
    assert words in Links(nvml, "handle").read()["note"]


@pytest.mark.parametrize(
    ("beyond", "overrun_bytes"),
    [((0, 1), 1), ((0, 40), 40), ((-LINKS * 40 - 8, 8), 8), ((GUARD_FIELDS * 40 - 4, 4), GUARD_FIELDS * 40)],
)
def test_what_nvml_writes_beyond_its_values_is_seen(beyond, overrun_bytes):
    with pytest.raises(Overrun) as raised:
        Links(Nvml(beyond=beyond), "handle").read()
    assert (raised.value.overrun_bytes, raised.value.asked_bytes) == (overrun_bytes, LINKS * 40)


def test_one_process_serves_one_reading_after_the_other(counters):
    links = counters()
    assert links.read() == COUNTED
    reader = pid(links)
    assert reader != os.getpid()
    assert os.getsid(reader) == os.getsid(0)  # so that it is one of the run's
    assert links.read() == COUNTED
    assert pid(links) == reader


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"arguments": "links=0"}, "NVML counts no link of this GPU"),
        ({"uuid": "GPU-2"}, "NVML gives no counters of links: Not Supported"),
        ({"source": "raise ImportError"}, "there is no NVML here (nvidia-ml-py)"),
    ],
)
def test_a_reason_comes_through(counters, made, words):
    assert counters(**made).read() == words


def test_a_reader_that_nvml_kills_is_told_by_its_signal_and_last_words(counters, capfd):
    links = counters(f"before=lambda: {ABORT}")
    words = f"{WHO} was killed by SIGABRT (free(): invalid pointer)"
    assert links.read() == words
    assert capfd.readouterr().err == 2 * f"{words}\n"  # another one was asked
    assert links.read() == words


def test_a_reader_that_dies_once_costs_no_count(counters, capfd):
    assert counters(f"before=lambda: {ONCE.format(ABORT)}").read() == COUNTED
    assert "SIGABRT" in capfd.readouterr().err


def test_a_reader_that_was_killed_between_two_readings_is_replaced(counters, capfd):
    links = counters()
    links.read()
    os.kill(pid(links), signal.SIGKILL)
    assert links.read() == COUNTED
    assert capfd.readouterr().err == f"{WHO} was killed by SIGKILL\n"


def test_a_reader_that_raises_is_told_by_its_last_words(counters):
    assert counters(source="raise RuntimeError('torn')").read() == (
        f"{WHO} ended with exit status 1 (RuntimeError: torn)"
    )


def test_a_reader_that_hangs_is_waited_for_once_and_ended(counters):
    links = counters("before=lambda: time.sleep(600)", limit_s=1.0)
    assert links.read() == f"{WHO} gave no answer within 1 s"
    assert links._reader is None
    begin = time.monotonic()
    assert links.read() == f"{WHO} gave no answer within 1 s"
    assert time.monotonic() - begin < 0.9


def test_a_reader_that_says_nothing_more_and_lives_is_ended(counters, monkeypatch):
    monkeypatch.setattr(link_counters, "_END_S", 0.2)
    links = counters(source="import os, time\nos.close(1)\ntime.sleep(600)")
    assert links.read() == f"{WHO} closed its output and went on"
    assert links._reader is None


def test_a_reader_that_saw_an_overrun_gives_no_more_numbers(counters):
    links = counters("beyond=(0, 40)")
    assert links.read() == f"{WHO} saw NVML write 40 bytes beyond the {LINKS * 40} that were asked for"
    assert links._reader is None


def test_an_overrun_that_does_not_come_again_costs_no_count(counters, capfd):
    arguments = f"beyond=({ONCE.format('1')}) and (0, 40)"
    assert counters(arguments).read() == COUNTED
    assert "saw NVML write 40 bytes" in capfd.readouterr().err


@pytest.mark.parametrize("source", ["x", "x" * 5000], ids=["bit by bit", "fast"])
def test_a_line_without_an_end_is_not_waited_for(counters, source):
    links = counters(
        source=f"import time\nwhile True: print('{source}', end='', flush=True); time.sleep(0.01)", limit_s=2
    )
    begin = time.monotonic()
    words = links.read()
    assert time.monotonic() - begin < 15
    late, long = f"{WHO} gave no answer within 2 s", f"{WHO} said what is no answer: b'{'x' * 200}'"
    assert words == (long if len(source) > 1 else late)
    assert links._reader is None


def test_an_answer_that_comes_in_parts_is_one(counters):
    said = json.dumps({"note": "none"})
    parts = f"import time\nfor c in {said!r}: print(c, end='', flush=True); time.sleep(0.01)\nprint(flush=True)"
    assert counters(source=f"{parts}\ntime.sleep(600)").read() == "none"


def test_whatever_it_writes_to_standard_error_it_answers(counters):
    links = counters("before=lambda: print('x' * 5_000_000, file=sys.stderr)", limit_s=10.0)
    assert links.read() == links.read() == COUNTED


def test_the_last_words_of_many_are_told(counters):
    assert counters(f"before=lambda: (print('x' * 5_000_000, file=sys.stderr), {ABORT})").read() == (
        f"{WHO} was killed by SIGABRT (free(): invalid pointer)"
    )


@pytest.mark.parametrize("held", ["stderr", "stdout"])
def test_a_child_that_outlives_it_and_holds_its_output_costs_no_more_than_the_limit(counters, held):
    other = {"stderr": "stdout", "stdout": "stderr"}[held]
    source = (
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen(['sleep', '60'], {other}=subprocess.DEVNULL)\n"
        "print(child.pid, file=open('children', 'a'), flush=True)\n"
        "print('torn', file=sys.stderr, flush=True)\n"
        "os._exit(3)\n"
    )
    begin = time.monotonic()
    words = counters(source=source, limit_s=2.0).read()
    took_s = time.monotonic() - begin
    for child in Path("children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    assert words == f"{WHO} ended with exit status 3 (torn)"
    assert took_s < 20


def test_a_forked_process_starts_a_reader_of_its_own_and_leaves_the_other_alone(counters):
    links = counters()
    links.read()
    reader = pid(links)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            links.close()
            told = [links.read() == COUNTED, pid(links)]
            links.close()
            os.write(write_end, json.dumps(told).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end) as answer:
        is_counted, other = json.load(answer)
    os.waitpid(child, 0)
    assert is_counted
    assert other != reader
    assert links.read() == COUNTED
    assert pid(links) == reader


def test_an_answer_that_was_not_waited_for_is_not_taken_for_the_next_one(counters, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt  # a signal of the process may be another thread's to take, and come a little later

    links = counters()
    links.read()
    reader = pid(links)
    with monkeypatch.context() as stopped:
        stopped.setattr(link_counters.select, "poll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            links.read()
    assert links.read() == COUNTED
    assert pid(links) != reader


def answer(tx_bytes="1", rx_bytes="1", links="18", more=""):
    return f'{{"tx_bytes": {tx_bytes}, "rx_bytes": {rx_bytes}, "links": {links}{more}}}'


NO_ANSWERS = [
    *("", "5", "[]", "{}", '{"tx_bytes": 1}', "not JSON", "\\xff", '"note"', "[" * 8000),
    *(answer('"a"', "null", "true"), answer(links="true"), answer("NaN"), answer(rx_bytes="-1"), answer("1.0")),
    *(answer("1e400"), answer("1" * 5000), answer(more=', "note": "x"'), '{"note": 5}', '{"note": null}'),
    *('{"overrun_bytes": 4}', '{"overrun_bytes": "4", "asked_bytes": 720}'),
]


@pytest.mark.parametrize("said", NO_ANSWERS, ids=range(len(NO_ANSWERS)))
def test_what_is_no_answer_is_told(counters, said):
    words = counters(source=f"import sys\nsys.stdout.buffer.write(b'{said}\\n'); sys.stdout.flush()").read()
    assert words.startswith(f"{WHO} said what is no answer: b'")


def test_a_reader_that_cannot_be_started_is_a_reason(counters, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert counters().read().startswith(f"{WHO} cannot be started: [Errno 2]")


def test_a_reader_ends_with_the_process_that_it_reads_for(counters):
    counters()
    source = (
        "import sys\n"
        "from epcross.harness.measuring.link_counters import counters_of\n"
        "assert counters_of('GPU-1').read() == counters_of('GPU-1').read()\n"
        "print(counters_of('GPU-1')._reader.process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", source], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        reader = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
        process.wait()
    has_ended = select.poll()
    has_ended.register(reader, select.POLLIN)
    assert has_ended.poll(20_000)
    os.close(reader)


def test_it_holds_no_file_of_the_process_that_started_it_and_nothing_is_preloaded(counters, tmp_path, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "")
    with (tmp_path / "held").open("w") as held:
        os.set_inheritable(held.fileno(), True)
        links = counters()
        links.read()
        folder = Path(f"/proc/{pid(links)}")
        targets = {os.readlink(link) for link in (folder / "fd").iterdir()}
    assert not any(target.startswith(str(tmp_path)) for target in targets)
    assert len([target for target in targets if target.startswith("pipe:")]) == 2
    assert b"LD_PRELOAD=" not in (folder / "environ").read_bytes()


def test_it_imports_nothing_heavy():
    source = (
        f"import json, runpy, sys\nsys.argv = ['', 'GPU-1']\nsys.modules['pynvml'] = None\n"
        f"runpy.run_module({link_counters.READER!r}, run_name='__main__')\nprint(json.dumps(sorted(sys.modules)))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-S", "-c", source],
        env={"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        input="",
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name.split(".")[0] for name in json.loads(ran.stdout)}
    assert "json" in loaded
    assert loaded <= {*sys.stdlib_module_names, "epcross", "pynvml", "encodings", "__main__", "__mp_main__"}
    ours = {name for name in json.loads(ran.stdout) if name.startswith("epcross")}
    assert ours <= {"epcross", "epcross.harness", "epcross.harness.measuring", link_counters.READER}
