import io
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType
from store_values import CONTEXT, TIMING, make_point, make_unit

from epcross.harness.analysis.table import WIDTH, Footnotes, microseconds, run_table, status_table
from epcross.harness.planning.tokens import nominal_words
from epcross.harness.record import Record
from epcross.harness.storing.rows import failed_records
from epcross.harness.terms import Regime, Stage, Status


def text_of(renderable: RenderableType, width: int = WIDTH) -> str:
    """What a pipe receives."""
    stream = io.StringIO()
    Console(file=stream, width=width).print(renderable)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def measured(backend: str, *, latency_us: float = 10.0, tokens: int = 4, **point: object) -> list[Record]:
    """Eight ok rows of two launches: latency_us + 0 ... 7."""
    units = [make_unit(make_point(backend=backend, tokens=tokens, **point), i, latency_us=latency_us) for i in (0, 1)]  # type: ignore[arg-type]
    return [replace(row, boundary="pack transfer") for unit in units for row in unit.records]


def line_of(text: str, first_word: str) -> str:
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [first_word]]
    return line


def test_a_cell_is_the_median_and_the_range_of_the_repeats():
    rows = measured("shm_fence") + measured("gloo", latency_us=100.0) + measured("gloo", latency_us=1000.0, tokens=512)
    text = text_of(run_table(rows))
    assert text.splitlines()[0] == "EP 2, cpu, steady: round trip in us"
    assert line_of(text, "per").split() == ["per", "rank", "gloo", "shm_fence"]
    assert line_of(text, "4").split() == ["4", "104", "[100..107]", "13.5", "[10.0..17.0]"]
    assert line_of(text, "512").split() == ["512", "1004", "[1000..1007]", "-"]


def test_the_caption_says_how_it_was_measured():
    rows = measured("shm_fence") + [replace(row, boundary="copy_out pack transfer") for row in measured("gloo")]
    text = text_of(run_table(rows))
    assert "median [lowest..highest] over n = 8 repeats (2 launches x 2 seeds x 2 chains)" in text
    assert "each repeat: median over ranks of the chain period" in text
    assert "within_launch: fewer than 5 launches" in text
    assert "inside the window: pack transfer; gloo also copy_out" in text
    assert "domain cpu; run run-a; processes over shared memory" in text


def test_groups_that_cannot_be_compared_have_tables_of_their_own():
    rows = measured("a") + measured("a", ep_size=4) + measured("a", regime=Regime.ENTRY)
    rows += [replace(row, domain="nvlink") for row in measured("a")]
    text = text_of(run_table(rows))
    heads = [line for line in text.splitlines() if line.startswith("EP ")]
    assert heads == [
        "EP 2, cpu, entry: round trip in us",
        "EP 2, cpu, steady: round trip in us",
        "EP 2, nvlink, steady: round trip in us",
        "EP 4, cpu, steady: round trip in us",
    ]
    assert text.count("13.5 [10.0..17.0]") == 4  # dispatch and combine of entry are no headline


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.OK])
def test_what_is_not_ok_is_a_word_with_its_reason(status: Status):
    point = make_point(backend="broken")
    failed = [
        row
        for launch in (0, 1)
        for row in failed_records(
            point, TIMING, launch, CONTEXT, status, "it [needs] a GPU", failed_stage=Stage.PREPARE
        )
    ]
    text = text_of(run_table(measured("shm_fence") + failed))
    assert line_of(text, "4").split()[1:3] == [status.value, "(a)"]
    assert f"(a) {status}: it [needs] a GPU" in text


def test_a_failed_repeat_is_said_beside_the_others():
    rows = measured("shm_fence")
    rows[7] = replace(rows[7], status=Status.TIMEOUT, reason="rank 1 hung", latency_us=None)
    text = text_of(run_table(rows))
    assert line_of(text, "4").split() == ["4", "13.0", "[10.0..16.0]", "(a)"]
    assert "(a) 1 of 8 repeats timeout: rank 1 hung" in text


def test_flagged_repeats_stay_out_of_the_median():
    rows = measured("shm_fence") + measured("shm_fence", tokens=8)
    rows[0] = replace(rows[0], flags="late_start within_launch")
    text = text_of(run_table(rows))
    assert line_of(text, "4").split() == ["4", "14.0", "[11.0..17.0]", "(a)"]
    assert "(a) 1 of 8 repeats left out, flagged late_start" in text
    assert line_of(text, "8").split() == ["8", "13.5", "[10.0..17.0]"]
    assert "over n = 7 to 8 repeats (2 launches x 2 seeds x 2 chains)" in text


def test_n_counts_what_is_shown_and_nothing_that_was_left_out():
    """Of 4 tokens a launch ran beside another, at 8 a repeat hung, and gloo is not there."""
    rows = measured("shm_fence") + measured("shm_fence", tokens=8)
    rows = [replace(row, flags="not_alone") if (row.tokens_per_rank, row.launch) == (4, 1) else row for row in rows]
    hung = {"status": Status.TIMEOUT, "reason": "rank 1 hung", "latency_us": None, "estimator": None}
    rows[8] = replace(rows[8], **hung)
    gone = failed_records(make_point(backend="gloo"), TIMING, 0, CONTEXT, Status.UNAVAILABLE, "no torch")
    text = text_of(run_table([*rows, *gone]))
    assert "over n = 4 to 7 repeats (1 to 2 launches x 2 seeds x 2 chains)" in text
    assert "over n = 0 repeats: none is ok" in text_of(run_table(gone))
    assert "within_launch" not in text_of(run_table(gone))


def test_where_all_are_flagged_they_are_shown_and_marked():
    rows = measured("shm_fence") + [replace(row, flags="throttled") for row in measured("gloo")]
    text = text_of(run_table(rows))
    assert line_of(text, "4").split() == ["4", "13.5", "[10.0..17.0]", "(a)", "13.5", "[10.0..17.0]"]
    assert "(a) flagged throttled: no headline" in text


def test_a_gpu_at_its_power_limit_is_told_beside_its_number():
    capped = [replace(row, flags="power_capped", sm_clock_mhz=1395 + row.repeat) for row in measured("shm_fence")[:3]]
    text = text_of(run_table([*capped, *measured("shm_fence")[3:], *measured("gloo")]))
    assert line_of(text, "4").split() == ["4", "13.5", "[10.0..17.0]", "13.5", "[10.0..17.0]", "(a)"]
    assert "(a) at the GPU's power limit" in text
    assert "power_capped: 3 of 16 repeats at the power limit of a GPU, at SM clocks down to 1395 MHz" in text
    assert "power" not in text_of(run_table(measured("gloo")))


def test_a_flag_of_the_whole_table_is_said_once():
    rows = [replace(row, flags="oversubscribed") for row in measured("gloo", ep_size=4)]
    rows += [replace(row, flags="late_start oversubscribed") for row in measured("shm_fence", ep_size=4)]
    text = text_of(run_table(rows))
    assert line_of(text, "4").split() == ["4", "13.5*", "[10.0..17.0]", "13.5*", "[10.0..17.0]", "(a)"]
    assert "* every row is flagged oversubscribed: no headline" in text
    assert "(a) flagged late_start: no headline" in text


def test_variants_of_a_backend_are_columns_of_their_own():
    tuned = [replace(row, options='{"chunk":64}') for row in measured("shm_fence", latency_us=50.0)]
    text = text_of(run_table(measured("shm_fence") + tuned))
    assert line_of(text, "4").split() == ["4", "13.5", "[10.0..17.0]", "53.5", "[50.0..57.0]"]
    assert "shm_fence chunk=64" in " ".join(text.split())


def test_options_that_all_rows_of_a_backend_share_are_not_in_its_heads():
    def tuned(chunk: int, latency_us: float) -> list[Record]:
        options = json.dumps({"chunk": chunk, "timeout_s": 10.0})
        return [replace(row, options=options) for row in measured("shm_fence", latency_us=latency_us)]

    text = " ".join(text_of(run_table(tuned(64, 50.0) + tuned(8, 30.0))).split())
    assert "chunk=64" in text
    assert "chunk=8 " in text
    assert "timeout_s" not in text


def test_uneven_tokens_and_capacities_are_told_apart():
    rows = measured("a", latency_us=10.0)
    rows += [replace(row, tokens_min=0, tokens_total=4) for row in measured("a", latency_us=20.0)]
    rows += [replace(row, max_tokens_per_rank=64) for row in measured("a", latency_us=30.0)]
    text = text_of(run_table(rows))
    assert [line.strip() for line in text.splitlines() if "[" in line and "median" not in line] == [
        "4 (min 0, all 4)   23.5 [20.0..27.0]",
        "4 cap 4   13.5 [10.0..17.0]",
        "4 cap 64   33.5 [30.0..37.0]",
    ]


def test_the_mean_of_a_list_is_not_rounded():
    rows = [
        replace(row, tokens_per_rank=3, tokens_min=0, tokens_total=5, max_tokens_per_rank=5) for row in measured("a")
    ]
    assert rows[0].ep_size == 2
    assert "2.5 (min 0, all" in text_of(run_table(rows))
    assert nominal_words(3, 0, 5, 2) == "2.5"
    assert nominal_words(2, 1, 6, 4) == "1.5"
    assert nominal_words(4, 0, 4, 2) == "4"  # 4 tokens on each rank that has any
    assert nominal_words(1, 0, 3, 4) == "1"


@pytest.mark.parametrize("width", [80, 100, 200])
def test_everything_fits(width: int):
    rows: Sequence[Record] = [
        row for i in range(9) for row in measured(f"a_backend_with_a_long_name_{i}", latency_us=98765.0, tokens=65536)
    ]
    rows = [replace(row, reason="why " * 60, status=Status.ERROR) if row.repeat == 3 else row for row in rows]
    rows = [replace(row, run_id="20260102-030405-quickstart-abcd", routing_params='{"exponent":1.25}') for row in rows]
    progress = status_table(rows, planned_units=10, done_units=9, problems=["x" * 300])
    for renderable in (run_table(rows), progress):
        text = text_of(renderable, width)
        assert max(map(len, text.splitlines())) <= min(width, WIDTH)
    table = text_of(run_table(rows), width)
    assert table.count("EP 2, cpu") == 3  # nine backends, four to a table
    assert table.count("[98765..98772]") == 9  # nothing is cut off


def test_progress_counts_units_rows_and_problems():
    failed = failed_records(
        make_point(backend="gloo"), TIMING, 0, CONTEXT, Status.UNAVAILABLE, "torch is not installed"
    )
    text = text_of(
        status_table([*measured("shm_fence"), *failed], planned_units=8, done_units=3, problems=["a.0.json: cut"])
    )
    assert line_of(text, "rows").split() == ["rows", "of", "ok", "unavailable"]
    assert line_of(text, "gloo").split() == ["gloo", "4"]
    assert line_of(text, "shm_fence").split() == ["shm_fence", "8"]
    assert "units: 3 done of 8 planned (37 %)" in text
    assert "files that cannot be used: 1\n  - a.0.json: cut" in text
    assert text_of(status_table([], planned_units=0, done_units=0)) == "units: 0 done of 0 planned"


def test_nothing_planned_is_said():
    assert text_of(run_table([])) == "No round trips were planned."


@pytest.mark.parametrize(
    ("value_us", "words"),
    [(0.5, "0.50"), (9.994, "9.99"), (9.996, "10.0"), (99.94, "99.9"), (99.96, "100"), (1234.5, "1234")],
)
def test_times_have_three_digits(value_us: float, words: str):
    assert microseconds(value_us) == words


def test_footnotes_have_letters_enough():
    notes = Footnotes()
    marks = [notes.mark(f"s{i}") for i in range(28)]
    assert marks[0] == "(a)"
    assert marks[25:] == ["(z)", "(aa)", "(ab)"]
    assert notes.mark("s1") == "(b)"
    assert notes.lines()[27] == "(ab) s27"
