"""Claims against simulated rows whose truth is known."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from claims_values import BOOK, PUBLISHED, TOKENS, book_of, measured, verdict_of

from epcross.harness.claims.claim import Actor, Change, Member, Way
from epcross.harness.claims.judge import exit_code, judge
from epcross.harness.claims.verdict import Better, Verdict
from epcross.harness.errors import InputError
from epcross.harness.planning.tokens import counted
from epcross.harness.terms import Phase

RATIO = {
    "open": {**BOOK.claim("P01").open, "regime": ("steady",), "routing": ("uniform",), "dispatch_format": ("bf16",)}
}


def line(fixed_us: float, per_token_us: float = 0.05):
    return lambda tokens: fixed_us + per_token_us * tokens


def by(factor: float, curve=None):
    base = curve or line(10.0)
    return lambda tokens: factor * base(tokens)


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (2.0, Verdict.INSIDE),
        (4.0, Verdict.EXCEEDED),
        (1.05, Verdict.OUTSIDE),
        (0.5, Verdict.OUTSIDE),
        (1.2, Verdict.INCONCLUSIVE),
    ],
)
def test_speedup_over_a_baseline(tmp_path: Path, factor: float, verdict: Verdict) -> None:
    rows = measured(tmp_path, {"onesided_fence": line(10.0), "deepep_ll": by(factor)})
    found = verdict_of(book_of("P01", **RATIO), rows)
    assert found.verdict is verdict, found.reason
    (reading,) = [one for one in found.readings if one.headline]
    assert [one.at for one in reading.findings] == [counted(tokens) for tokens in TOKENS]
    for one in reading.findings:
        assert one.low <= one.value <= one.high
        assert one.value == pytest.approx(factor, rel=0.02)


def test_the_fastest_baseline_at_each_batch_is_the_headline_and_each_is_read_apart(tmp_path: Path) -> None:
    def low_latency(tokens: int) -> float:
        return 20.0 if tokens <= 32 else 90.0

    curves = {"onesided_fence": lambda _: 10.0, "deepep_ll": low_latency, "deepep_v2": lambda _: 25.0}
    found = verdict_of(book_of("P01", **RATIO), measured(tmp_path, curves))
    assert found.verdict is Verdict.INSIDE
    readings = {one.baseline: one for one in found.readings}
    assert readings.keys() == {"fastest", "deepep_ll", "deepep_v2"}
    values = {name: [round(one.value, 1) for one in reading.findings] for name, reading in readings.items()}
    assert values["fastest"] == [2.0, 2.0, 2.0, 2.5, 2.5]
    assert values["deepep_ll"] == [2.0, 2.0, 2.0, 9.0, 9.0]
    assert readings["deepep_ll"].verdict is Verdict.EXCEEDED  # and does not count
    assert [name for name, one in readings.items() if one.headline] == ["fastest"]


def test_a_baseline_that_stops_at_a_batch_is_the_fastest_up_to_there(tmp_path: Path) -> None:
    rows = measured(tmp_path / "a", {"onesided_fence": lambda _: 10.0, "deepep_v2": lambda _: 25.0})
    short = measured(tmp_path / "b", {"deepep_ll": lambda _: 20.0}, tokens=(1, 8))
    found = verdict_of(book_of("P01", **RATIO), rows, short)
    head = next(one for one in found.readings if one.headline)
    assert [round(one.value, 1) for one in head.findings] == [2.0, 2.0, 2.5, 2.5, 2.5]


def test_the_faster_of_two_protocols_stands_for_the_kernel(tmp_path: Path) -> None:
    curves = {"onesided_sentinel": line(5.0, 0.2), "onesided_fence": line(12.0, 0.02), "deepep_v2": line(20.0, 0.1)}
    found = verdict_of(book_of("P01", **RATIO), measured(tmp_path, curves))
    head = next(one for one in found.readings if one.headline)
    assert head.subject == "fastest"
    expected = [(20 + 0.1 * t) / min(5 + 0.2 * t, 12 + 0.02 * t) for t in TOKENS]
    assert [one.value for one in head.findings] == pytest.approx(expected, rel=0.02)
    assert {one.subject for one in found.readings} == {"fastest", "onesided_fence", "onesided_sentinel"}


def test_few_launches_call_nothing(tmp_path: Path) -> None:
    rows = measured(tmp_path, {"onesided_fence": line(10.0), "deepep_ll": by(2.0)}, repeats=(2, 2, 3))
    found = verdict_of(book_of("P01", **RATIO), rows)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "2 launches are fewer than 3" in found.reason
    assert found.found.startswith("2")


def test_one_batch_outside_spoils_a_claim_about_every_batch(tmp_path: Path) -> None:
    rows = measured(tmp_path, {"onesided_fence": line(10.0), "deepep_ll": lambda t: 20.0 if t < 512 else 30.0})
    found = verdict_of(book_of("P01", **RATIO), rows)
    assert found.verdict is Verdict.OUTSIDE
    assert found.reason.startswith("at 512 tokens")


def test_open_factors_are_judged_each_and_the_verdict_says_for_which_it_holds(tmp_path: Path) -> None:
    steady = measured(tmp_path / "s", {"onesided_fence": line(10.0), "deepep_ll": by(2.0)})
    entry = measured(tmp_path / "e", {"onesided_fence": line(10.0), "deepep_ll": by(1.01)}, regime="entry")
    found = verdict_of(book_of("P01"), steady, entry)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "it depends: " in found.reason
    assert "inside for regime=steady" in found.reason
    assert "outside for regime=entry" in found.reason
    assert "Left open and not measured: " in found.reason
    assert "routing perfect" in found.reason
    assert "dispatch_format fp8" in found.reason
    assert {str(one.factors["regime"]) for one in found.readings} == {"steady", "entry"}
    both = verdict_of(book_of("P01"), steady, entry.assign(latency_us=steady["latency_us"].to_numpy()))
    assert both.verdict is Verdict.INSIDE


def test_relative_claims_hold_on_any_system_and_say_which(tmp_path: Path) -> None:
    rows = measured(tmp_path, {"onesided_fence": line(10.0), "deepep_ll": by(2.0)})
    assert "On NVIDIA H200, where the source has Blackwell" in verdict_of(book_of("P01", **RATIO), rows).reason
    own = rows.assign(product="NVIDIA GB200")
    assert "where the source has" not in verdict_of(book_of("P01", **RATIO), own).reason


def test_absolute_claims_need_the_named_hardware(tmp_path: Path) -> None:
    rows = measured(tmp_path, {"deepep_ll": lambda _: 24.0}, tokens=(1,), ep_size=8, dispatch_format="fp8")
    here = verdict_of(book_of("D01"), rows, way=Way.REPRODUCES)
    assert here.verdict is Verdict.INSIDE
    elsewhere = verdict_of(book_of("D01"), rows.assign(product="NVIDIA H100 80GB HBM3"), way=Way.REPRODUCES)
    assert elsewhere.verdict is Verdict.NOT_COMPARABLE
    assert "measured on NVIDIA H100 80GB HBM3, not on H200, and the claim is absolute" in elsewhere.reason
    for product in ("NVIDIA GH200 480GB", "NVIDIA H100, NVIDIA H200", "no GPU", "GPU not reported"):
        found = verdict_of(book_of("D01"), rows.assign(product=product), way=Way.REPRODUCES)
        assert found.verdict is Verdict.NOT_COMPARABLE, product


@pytest.mark.parametrize(
    ("latency_us", "verdict"), [(24.0, "inside"), (12.0, "exceeded"), (40.0, "outside"), (28.2, "inconclusive")]
)
def test_latency(tmp_path: Path, latency_us: float, verdict: str) -> None:
    rows = measured(tmp_path, {"deepep_ll": lambda _: latency_us}, tokens=(1,), ep_size=8, dispatch_format="fp8")
    assert verdict_of(book_of("D01"), rows, way=Way.REPRODUCES).verdict == verdict


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("domain", "cpu", "measured at domain cpu, not at nvlink"),
        ("domain", "shared_gpu", "measured at domain shared_gpu"),
        ("ep_size", 2, "measured at ep_size 2, not at 8"),
        ("dispatch_format", "bf16", "measured at dispatch_format bf16, not at fp8"),
        ("model", "tiny", "measured at model tiny, not at deepseek_v3"),
        ("phase", "dispatch", "measured at phase dispatch, not at round_trip"),
        ("scope", "scale_out", "measured at scope scale_out"),
        ("routing", "zipf", "measured at routing zipf, not at uniform or perfect"),
    ],
)
def test_other_conditions_are_not_comparable(tmp_path: Path, column: str, value: object, words: str) -> None:
    rows = measured(tmp_path, {"deepep_ll": lambda _: 24.0}, tokens=(1,), ep_size=8, dispatch_format="fp8")
    other = rows.assign(**{column: pd.Series([value] * len(rows)).astype(rows[column].dtype)})
    found = verdict_of(book_of("D01"), other, way=Way.REPRODUCES)
    assert found.verdict is Verdict.NOT_COMPARABLE
    assert words in found.reason


def test_a_batch_that_lacks_is_not_measured_and_what_is_there_is_in_order(tmp_path: Path) -> None:
    kernels = {"deepep_ll": lambda _: 24.0}
    rows = measured(tmp_path / "a", kernels, tokens=(8, 32, 128, 512), ep_size=8, dispatch_format="fp8")
    found = verdict_of(book_of("D01"), rows, way=Way.REPRODUCES)
    assert found.verdict is Verdict.NOT_MEASURED
    assert found.reason == "deepep_ll: measured at tokens_per_rank 8, 32, 128, 512, not at 1"
    elsewhere = measured(tmp_path / "b", kernels, tokens=(8, 32), ep_size=2, dispatch_format="fp8")
    found = verdict_of(book_of("D01"), elsewhere, way=Way.REPRODUCES)
    assert found.verdict is Verdict.NOT_COMPARABLE  # other batches of it would be at another EP size too
    assert found.reason == "deepep_ll: measured at ep_size 2, not at 8"


def test_no_rows_are_not_measured(tmp_path: Path) -> None:
    rows = measured(tmp_path, {"shm_fence": line(10.0)})
    found = verdict_of(book_of("P01"), rows)
    assert (found.verdict, found.reason) == (Verdict.NOT_MEASURED, "no rows of onesided_fence, onesided_sentinel")
    half = verdict_of(book_of("P01"), measured(tmp_path, {"onesided_fence": line(10.0)}))
    assert half.verdict is Verdict.NOT_MEASURED
    assert half.reason == "no rows of deepep_v2, deepep_v2_max, deepep_ll, deepep_normal"


def test_failed_and_flagged_rows_are_no_measurement(tmp_path: Path) -> None:
    rows = measured(tmp_path, {"onesided_fence": line(10.0), "deepep_ll": by(2.0)})
    flagged = rows.assign(
        is_throttled=rows["backend"] == "deepep_ll", flags=np.where(rows["backend"] == "deepep_ll", "throttled", "")
    )
    found = verdict_of(book_of("P01", **RATIO), flagged)
    assert found.verdict is Verdict.NOT_MEASURED
    assert "no row of deepep_v2, deepep_v2_max, deepep_ll, deepep_normal to rest on" in found.reason
    kept = verdict_of(book_of("P01", **RATIO), flagged, keep=["throttled"])
    assert kept.verdict is Verdict.INSIDE
    with pytest.raises(InputError, match="flag hot is unknown"):
        verdict_of(book_of("P01"), rows, keep=["hot"])
    failed = rows.assign(status=pd.Series(["error"] * len(rows)).astype(rows["status"].dtype))
    assert "120 error" in verdict_of(book_of("P01"), failed).reason


def test_a_ratio_across_allocations_is_not_comparable(tmp_path: Path) -> None:
    rows = measured(tmp_path, {"onesided_fence": line(10.0), "deepep_ll": by(2.0)})
    other = rows.assign(allocation_id=np.where(rows["backend"] == "deepep_ll", "b", "a"))
    found = verdict_of(book_of("P01", **RATIO), other)
    assert found.verdict is Verdict.NOT_COMPARABLE
    assert "different allocations" in found.reason


def test_a_ratio_on_other_token_ids_is_not_comparable(tmp_path: Path) -> None:
    rows = measured(tmp_path, {"onesided_fence": line(10.0), "deepep_ll": by(2.0)}).assign(ids_hash="x")
    assert verdict_of(book_of("P01", **RATIO), rows).verdict is Verdict.INSIDE
    wrong = rows.assign(ids_hash=np.where((rows["backend"] == "deepep_ll") & (rows["tokens_per_rank"] == 32), "y", "x"))
    found = verdict_of(book_of("P01", **RATIO), wrong)
    assert found.verdict is Verdict.NOT_COMPARABLE
    assert "other token ids at 32 tokens" in found.reason


def test_a_graph_against_a_loop_is_said(tmp_path: Path) -> None:
    rows = measured(tmp_path, {"onesided_fence": line(10.0), "deepep_ll": by(2.0)})
    issued = np.where(rows["backend"] == "deepep_ll", "eager", "graph")
    found = verdict_of(book_of("P01", **RATIO), rows.assign(enqueued=pd.array(issued, dtype="string")))
    assert found.verdict is Verdict.INSIDE
    assert "pairs issued by graph against eager" in found.reason
    alike = verdict_of(book_of("P01", **RATIO), rows.assign(enqueued="graph"))
    assert "issued" not in alike.reason


def test_two_machines_are_two_readings(tmp_path: Path) -> None:
    rows = measured(tmp_path, {"onesided_fence": line(10.0), "deepep_ll": by(2.0)})
    other = measured(tmp_path, {"onesided_fence": line(10.0), "deepep_ll": by(1.01)}, machine="feed")
    found = verdict_of(book_of("P01", **RATIO), rows, other)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "inside for machine beef" in found.reason
    assert "machine feed" in found.reason
    split = rows.assign(machine=np.where(rows["backend"] == "deepep_ll", "feed", "beef"))
    assert verdict_of(book_of("P01", **RATIO), split).verdict is Verdict.NOT_MEASURED


@pytest.mark.parametrize(
    ("curve", "verdict"),
    [(line(30.0, 0.05), "inside"), (line(12.0, 0.5), "outside"), (by(2.0), "inconclusive")],
)
def test_trend_of_the_speedup(tmp_path: Path, curve, verdict: str) -> None:
    rows = measured(tmp_path, {"onesided_fence": line(10.0), "deepep_ll": curve})
    found = verdict_of(book_of("P02", **RATIO), rows)
    assert found.verdict == verdict, found


def test_a_trend_needs_three_batches(tmp_path: Path) -> None:
    rows = measured(tmp_path, {"onesided_fence": line(10.0), "deepep_ll": by(2.0)}, tokens=(1, 8))
    found = verdict_of(book_of("P02", **RATIO), rows)
    assert found.verdict is Verdict.NOT_MEASURED
    assert "needs 3 token counts" in found.reason


@pytest.mark.parametrize(
    ("factor", "verdict"), [(2.4, "inside"), (3.0, "exceeded"), (1.5, "outside"), (2.65, "inconclusive")]
)
def test_up_to_is_about_the_largest(tmp_path: Path, factor: float, verdict: str) -> None:
    rows = measured(
        tmp_path,
        {"layer_onesided": line(10.0), "layer_deepep_v2": lambda t: (factor if t == 8 else 1.1) * (10 + 0.05 * t)},
        phase="layer",
        compute="deepgemm",
    )
    found = verdict_of(book_of("P03"), rows)
    assert found.verdict == verdict, found
    (one,) = next(iter(found.readings)).findings
    assert one.value == pytest.approx(factor, rel=0.02)


def test_a_baseline_that_is_named_by_its_expert_stage_is_no_other_layer(tmp_path: Path) -> None:
    curves = {"layer_onesided": line(10.0), "layer_deepep_v2": line(24.0)}
    rows = measured(tmp_path, curves, phase="layer", compute="gather_gemm")
    found = verdict_of(book_of("P03"), rows)
    assert found.verdict is Verdict.NOT_MEASURED
    assert "no rows of layer_deepep_v2 compute=deepgemm" in found.reason


def test_a_window_that_leaves_staging_out_is_not_set_against_one_that_has_it(tmp_path: Path) -> None:
    """It would win: MegaMoE looks ahead from 64 tokens on if its inputs may be staged before."""
    subject = {"layer_onesided": lambda t: 100.0 * (t / 190) ** 0.2}
    both = [
        measured(tmp_path / "staged", {**subject, "megamoe": lambda _: 100.0}, tokens=CROSSING, phase="layer"),
        measured(
            tmp_path / "before",
            {"megamoe": lambda _: 100.0 * (60 / 190) ** 0.2},
            tokens=CROSSING,
            phase="layer",
            options='{"staging":false}',
        ),
    ]
    assert verdict_of(book_of("P04"), *both).verdict == "inside"
    actors = {
        **BOOK.actors,
        "megamoe": Actor(says="", reproduces=(Member(backend="megamoe", options={"staging": False}),)),
    }
    named = replace(book_of("P04"), actors=actors)
    assert verdict_of(named, *both).verdict == "outside"


CROSSING = (16, 64, 128, 192, 256, 512)


@pytest.mark.parametrize(
    ("at", "p04", "p05"),
    [
        (190, "inside", "inside"),
        (60, "outside", "inside"),
        (400, "inside", "outside"),
        (1e9, "inside", "outside"),  # the subject leads throughout
        (1, "outside", "inside"),  # the baseline leads throughout
    ],
)
def test_crossover(tmp_path: Path, at: float, p04: str, p05: str) -> None:
    rows = measured(
        tmp_path,
        {"layer_onesided": lambda t: 100.0 * (t / at) ** 0.2, "megamoe": lambda _: 100.0},
        tokens=CROSSING,
        phase="layer",
    )
    assert [verdict_of(book_of(name), rows).verdict for name in ("P04", "P05")] == [p04, p05]


def test_a_lead_at_one_batch_is_no_crossover(tmp_path: Path) -> None:
    rows = measured(tmp_path, {"layer_onesided": line(10.0), "megamoe": line(20.0)}, tokens=(64, 128), phase="layer")
    found = verdict_of(book_of("P04"), rows)
    assert (found.verdict, found.reason) == (
        Verdict.NOT_MEASURED,
        "a crossover needs 3 token counts, measured on both sides; there are 2",
    )


def test_a_change_of_models_is_one_reading(tmp_path: Path) -> None:
    small = measured(tmp_path / "s", {"onesided_fence": lambda _: 10.0}, hidden=2048, tokens=(8,))
    large = measured(tmp_path / "l", {"onesided_fence": lambda _: 20.0}, model="kimi_k2", num_experts=384, tokens=(8,))
    claim = replace(
        BOOK.claim("P16"),
        subject="one_sided",
        phase=Phase.ROUND_TRIP,
        change=Change(factor="model", base="deepseek_v3", to=("kimi_k2",)),
        open={name: values for name, values in RATIO["open"].items() if name != "model"},
    )
    found = verdict_of(book_of(claim), small, large)
    assert found.verdict is Verdict.INSIDE, found.reason
    assert found.readings[0].findings[0].value == pytest.approx(2.0, rel=0.02)


def test_a_crossover_the_other_way_round_contradicts_both(tmp_path: Path) -> None:
    rows = measured(
        tmp_path,
        {"layer_onesided": lambda t: 100.0 * (190 / t) ** 0.2, "megamoe": lambda _: 100.0},
        tokens=CROSSING,
        phase="layer",
    )
    for name in ("P04", "P05"):
        found = verdict_of(book_of(name), rows)
        assert found.verdict is Verdict.OUTSIDE
        assert "the other way round" in found.reason


@pytest.mark.parametrize(
    ("leads_to", "p04", "p05"), [(64, "inconclusive", "inconclusive"), (256, "inside", "inconclusive")]
)
def test_a_lead_that_ends_in_a_draw_reaches_no_further_than_its_last_batch(
    tmp_path: Path, leads_to: int, p04: str, p05: str
) -> None:
    """Faster up to 64 tokens and equal from there on is neither `faster up to 128` nor `overtaken by 256`."""
    curves = {"layer_onesided": lambda t: 80.0 if t <= leads_to else 100.0, "megamoe": lambda _: 100.0}
    rows = measured(tmp_path, curves, tokens=CROSSING, phase="layer")
    found = [verdict_of(book_of(name), rows) for name in ("P04", "P05")]
    assert [one.verdict for one in found] == [p04, p05]
    assert {one.found for one in found} == {f"inf [{leads_to}..inf]"}
    back = {"layer_onesided": lambda _: 100.0, "megamoe": lambda t: 100.0 if t < leads_to else 80.0}
    behind = measured(tmp_path / "back", back, tokens=CROSSING, phase="layer")
    assert verdict_of(book_of("P04"), behind).found == f"0 [0..{leads_to}]"


def test_a_crossover_that_cannot_be_told_is_inconclusive(tmp_path: Path) -> None:
    equal = measured(tmp_path, {"layer_onesided": line(10.0), "megamoe": line(10.0)}, tokens=CROSSING, phase="layer")
    found = verdict_of(book_of("P04"), equal)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "equal wherever they were measured" in found.reason
    noisy = measured(
        tmp_path,
        {"layer_onesided": lambda t: 100.0 * (t / 190) ** 0.02, "megamoe": lambda _: 100.0},
        tokens=CROSSING,
        spread=(0.2, 0.05, 0.05),
        phase="layer",
    )
    assert verdict_of(book_of("P04"), noisy).verdict is Verdict.INCONCLUSIVE
    twice = measured(
        tmp_path,
        {"layer_onesided": lambda t: 80.0 if t in (16, 256, 512) else 130.0, "megamoe": lambda _: 100.0},
        tokens=CROSSING,
        phase="layer",
    )
    assert (
        "the lead changes more than once, between 16 and 256 tokens: the subject leads at both ends"
        in verdict_of(book_of("P04"), twice).reason
    )


@pytest.mark.parametrize(
    ("curve", "words"),
    [
        (
            lambda t: 100.0 * (t / 190) ** 0.2,
            "the subject leads below, the baseline above, and the lead changes between 128 and 256 tokens",
        ),
        (
            lambda t: 100.0 * (190 / t) ** 0.2,
            "the baseline leads below, the subject above, and the lead changes between 128 and 256 tokens",
        ),
        (lambda _: 80.0, "the subject leads wherever they are more than 3% apart"),
        (lambda _: 130.0, "the baseline leads wherever they are more than 3% apart"),
        (lambda _: 100.0, "the two are within 3% at every batch"),
        (
            lambda t: 130.0 if t in (16, 256) else 80.0,
            "the lead changes more than once, between 16 and 512 tokens: the baseline leads below, the subject above",
        ),
    ],
)
def test_a_crossover_that_is_not_called_says_who_leads_where(tmp_path: Path, curve: Any, words: str) -> None:
    """One launch calls nothing, and the number alone does not say which side is ahead before it."""
    rows = measured(
        tmp_path, {"layer_onesided": curve, "megamoe": lambda _: 100.0}, tokens=CROSSING, phase="layer",
        repeats=(1, 3, 4), spread=(0.0, 0.0, 0.0),
    )  # fmt: skip
    for name in ("P04", "P05"):
        found = verdict_of(book_of(name), rows)
        assert found.verdict is Verdict.INCONCLUSIVE
        assert f"one launch says nothing about the variance between launches; by the medians {words}" in found.reason


@pytest.mark.parametrize(("share", "verdict"), [(0.49, "inside"), (0.3, "outside"), (0.542, "inconclusive")])
def test_share_of_the_layer(tmp_path: Path, share: float, verdict: str) -> None:
    layer = measured(tmp_path / "l", {"layer_onesided": lambda _: 40.0}, tokens=(1,), phase="layer")
    comm = measured(
        tmp_path / "c", {"layer_onesided": lambda _: 40.0 * share}, tokens=(1,), phase="layer_comm", rng_seed=1
    )
    found = verdict_of(book_of("P08"), layer, comm)
    assert found.verdict == verdict, found
    alone = verdict_of(book_of("P08"), layer)
    assert alone.verdict is Verdict.NOT_MEASURED
    assert "layer_comm and layer" in alone.reason


def test_trend_of_the_share_in_prefill(tmp_path: Path) -> None:
    tokens = (512, 1024, 2048, 4096, 8192)

    def rows(slope: float, upto: tuple[int, ...] = tokens) -> list[pd.DataFrame]:
        layer = measured(tmp_path / "l", {"layer_onesided": lambda t: 0.1 * t}, tokens=upto, phase="layer")
        curves = {"layer_onesided": lambda t: 0.03 * t * (t / 2048) ** slope}
        return [layer, measured(tmp_path / "c", curves, tokens=upto, phase="layer_comm", rng_seed=1)]

    assert verdict_of(book_of("P17"), *rows(0.1)).verdict is Verdict.INSIDE
    assert verdict_of(book_of("P17"), *rows(-0.1)).verdict is Verdict.OUTSIDE
    short = verdict_of(book_of("P17"), *rows(0.1, tokens[:4]))
    assert short.verdict is Verdict.NOT_MEASURED
    assert "tokens_per_rank 8192 is missing" in short.reason


def test_communication_is_that_of_the_rank_that_waits_least(tmp_path: Path) -> None:
    """Waiting falls with the batch while moving rows takes longer: without it 18.1 grows to 35 us, with it 90 to 50."""

    def rows(**columns: Any) -> pd.DataFrame:
        curves = {"layer_onesided": lambda t: 90.0 if t == 1 else 50.0}
        columns |= {"phase": "layer_comm", "weight_format": "fp8"}
        whole = measured(tmp_path / "r", curves, tokens=(1, 128), **columns)
        return whole.assign(latency_min_us=whole["tokens_per_rank"].map({1: 18.1, 128: 35.0}))

    def change(found: Any) -> float:
        return found.readings[0].findings[0].value

    steady = verdict_of(book_of("P16"), rows())
    assert change(steady) == pytest.approx(35.0 / 18.1)
    assert "of the rank that waits least" in steady.reason
    spans = verdict_of(book_of("P16", open={**BOOK.claim("P16").open, "regime": ("spans",)}), rows(regime="spans"))
    assert change(spans) == pytest.approx(50 / 90, rel=0.03)
    assert "holds what a rank waits for" in spans.reason
    assert "waits least" in BOOK.claim("P16").note


def test_change_over_ep_sizes(tmp_path: Path) -> None:
    small = measured(tmp_path / "8", {"layer_onesided": lambda _: 182.0}, tokens=(128,), phase="layer", ep_size=8)
    large = measured(tmp_path / "64", {"layer_onesided": lambda _: 103.0}, tokens=(128,), phase="layer", ep_size=64)
    large = large.assign(allocation_id="another", run_id="run-b")
    found = verdict_of(book_of("P10"), small, large)
    assert found.verdict is Verdict.INSIDE
    assert found.readings[0].findings[0].at == "ep_size 64"
    assert found.readings[0].findings[0].value == pytest.approx(103 / 182, rel=0.01)
    assert "ep_size 64 is missing" in verdict_of(book_of("P10"), small).reason


def test_change_over_tokens(tmp_path: Path) -> None:
    rows = measured(
        tmp_path, {"layer_onesided": lambda t: 18.1 if t == 1 else 35.0}, tokens=(1, 32, 128), phase="layer_comm"
    )
    found = verdict_of(book_of("P16"), rows)
    assert found.verdict is Verdict.INSIDE
    assert found.readings[0].findings[0].value == pytest.approx(35.0 / 18.1, rel=0.01)


def formats(folder: Path, times: dict[str, float]) -> list[pd.DataFrame]:
    """Dispatch of 2048 tokens per rank at EP 8 with these times, in bytes that shrink as the format says."""
    sizes = {"bf16": 14336, "mxfp8": 7392, "nvfp4": 4032}
    return [
        measured(
            folder / name,
            {"onesided_fence": lambda _, time_us=time_us: time_us},
            tokens=(2048,),
            phase="dispatch",
            regime="entry",
            ep_size=8,
            dispatch_format=name,
            rank_bytes=2048.0 * 8 * 8 * sizes[name],
        )
        for name, time_us in times.items()
    ]


def test_formats_against_each_other(tmp_path: Path) -> None:
    rows = formats(tmp_path, {"bf16": 311.8, "mxfp8": 172.2, "nvfp4": 101.7})
    speedup = verdict_of(book_of("B04"), *rows)
    assert speedup.verdict is Verdict.INSIDE
    assert speedup.readings[0].findings[0].value == pytest.approx(3.06, rel=0.01)
    ratio = verdict_of(book_of("B06"), *rows)
    assert ratio.verdict is Verdict.INSIDE
    values = {one.at: one.value for one in ratio.readings[0].findings}
    assert values == pytest.approx({"dispatch_format mxfp8": 0.93, "dispatch_format nvfp4": 0.86}, abs=0.01)
    faster = verdict_of(book_of("B06"), *formats(tmp_path, {"bf16": 311.8, "mxfp8": 172.2, "nvfp4": 80.0}))
    assert faster.verdict is Verdict.OUTSIDE
    assert "at dispatch_format nvfp4" in faster.reason


@pytest.mark.parametrize(("last", "verdict"), [(18.0, "inside"), (22.0, "outside")])
def test_spread_over_batches(tmp_path: Path, last: float, verdict: str) -> None:
    rows = measured(
        tmp_path,
        {"onesided_fence": lambda t: last if t == 32 else 17.6},
        tokens=(1, 4, 32, 512),
        phase="dispatch",
        regime="entry",
        ep_size=8,
    )
    found = verdict_of(book_of("B02"), rows)
    assert found.verdict == verdict, found
    assert found.readings[0].findings[0].value == pytest.approx(last / 17.6, rel=0.01)
    assert "tokens_per_rank 32 is missing" in verdict_of(book_of("B02"), rows[rows["tokens_per_rank"] < 32]).reason


def test_wire_time_multiple(tmp_path: Path) -> None:
    """One rank's 28672 bytes at the H200's 450 GB/s are 0.0637 us."""
    rows = measured(tmp_path, {"onesided_fence": lambda _: 6.0}, tokens=(1,), wire_bytes=2 * 28672.0)
    found = verdict_of(book_of("P12"), rows)
    assert found.verdict is Verdict.INSIDE
    assert found.readings[0].findings[0].value == pytest.approx(6.0 / (28672 / 450e3), rel=0.01)
    slow = rows.assign(wire_bytes=2 * 28672.0 * 30)
    assert verdict_of(book_of("P12"), slow).verdict is Verdict.OUTSIDE
    unknown = verdict_of(book_of("P12"), rows.assign(product="NVIDIA L40S"))
    assert unknown.verdict is Verdict.NOT_COMPARABLE
    assert "nominal" in unknown.reason
    assert verdict_of(book_of("P12"), rows.assign(wire_bytes=0.0)).verdict is Verdict.NOT_MEASURED


def test_share_of_nominal_bandwidth(tmp_path: Path) -> None:
    rows = measured(
        tmp_path,
        {"onesided_fence": lambda _: 311.8},
        tokens=(2048,),
        phase="dispatch",
        regime="entry",
        ep_size=8,
        rank_bytes=2048.0 * 8 * 8 * 14336,
        product="NVIDIA GB200",
    )
    found = verdict_of(book_of("B01"), rows)
    assert found.verdict is Verdict.INSIDE
    assert found.readings[0].findings[0].value == pytest.approx(753.3 / 900, rel=0.01)


def test_a_claim_over_stated_ep_sizes_must_hold_at_each(tmp_path: Path) -> None:
    def rows(last: float, sizes: tuple[int, ...] = (8, 16, 64)) -> list[pd.DataFrame]:
        return [
            measured(
                tmp_path / str(ep_size),
                {"onesided_sentinel": lambda _, t=last if ep_size == 64 else 17.0: t},
                tokens=(1,),
                ep_size=ep_size,
                product="NVIDIA GB200",
            )
            for ep_size in sizes
        ]

    found = verdict_of(book_of("P07"), *rows(17.2))
    assert found.verdict is Verdict.INSIDE
    assert [one.at for one in found.readings[0].findings] == [f"ep_size {n}, 1 token" for n in (8, 16, 64)]
    assert found.readings[0].factors["tokens_per_rank"] == 1
    wide = verdict_of(book_of("P07"), *rows(25.0))
    assert wide.verdict is Verdict.OUTSIDE
    assert wide.reason.startswith("at ep_size 64, 1 token")
    assert "ep_size 64 is missing" in verdict_of(book_of("P07"), *rows(17.0, (8, 16))).reason


def test_all_methods_must_hold(tmp_path: Path) -> None:
    curves = {"flashinfer_one_sided": lambda _: 18.0, "deepep_ll": lambda _: 47.0, "deepep_v2": lambda _: 60.0}
    rows = measured(tmp_path, curves, tokens=(1,), ep_size=8, product="NVIDIA B200")
    found = verdict_of(book_of("P06"), rows, way=Way.REPRODUCES)
    assert {one.subject: one.verdict for one in found.readings} == {
        "flashinfer_one_sided": "inside", "deepep_ll": "inside", "deepep_v2": "outside",
    }  # fmt: skip
    assert found.verdict is Verdict.OUTSIDE


def test_options_tell_protocols_of_a_shipped_kernel_apart(tmp_path: Path) -> None:
    rows = measured(tmp_path, {"flashinfer_one_sided": lambda _: 17.0}, tokens=(1,), product="NVIDIA GB200")
    several = [
        rows.assign(ep_size=ep_size, options=options, latency_us=rows["latency_us"] * factor)
        for ep_size in (8, 64)
        for options, factor in (('{"transport":"lamport"}', 1.0), ('{"transport":"fence"}', 3.0))
    ]
    found = verdict_of(book_of("P07"), *several, way=Way.REPRODUCES)
    assert found.verdict is Verdict.INSIDE
    fence = [own for own in several if "fence" in own["options"].iloc[0]]
    missing = verdict_of(book_of("P07"), *fence, way=Way.REPRODUCES)
    assert missing.reason == "no rows of flashinfer_one_sided transport=lamport"


def test_wrong_rows_are_counted(tmp_path: Path) -> None:
    rows = measured(tmp_path, {"onesided_fence": lambda _: 6.0}, tokens=(1, 8)).assign(verified_rounds=10)
    rows["verified_rounds"] = rows["verified_rounds"].astype("Int64")
    found = verdict_of(book_of("P14"), rows)
    assert found.verdict is Verdict.INSIDE
    assert "120 rounds of onesided_fence verified" in found.reason  # 2 points x 6 launches x 10
    wrong = rows.copy()
    wrong.loc[3, "status"] = "incorrect"
    wrong["reason"] = wrong["reason"].astype("string")
    wrong.loc[3, "reason"] = "rank 1, token 3: torn"
    broken = verdict_of(book_of("P14"), wrong)
    assert broken.verdict is Verdict.OUTSIDE
    assert "rank 1, token 3: torn" in broken.reason
    newer = rows.assign(run_id="newer", measure_hash="b" * 16, started_at="2030-01-01T00:00:00+00:00")
    assert verdict_of(book_of("P14"), wrong, newer).verdict is Verdict.OUTSIDE
    none = verdict_of(book_of("P14"), rows.assign(verified_rounds=pd.array([0] * len(rows), dtype="Int64")))
    assert none.verdict is Verdict.INCONCLUSIVE


def test_facts_follow_from_published_numbers() -> None:
    empty = PUBLISHED.iloc[:0].assign(product="")
    facts = {one.claim.id: one for one in judge(BOOK, empty, PUBLISHED) if one.way is Way.CHECKS}
    assert {name: one.verdict for name, one in facts.items()} == dict.fromkeys(["P11", "B09", "H01", "H02"], "inside")
    assert facts["B09"].readings[0].findings[0].at == "the worst of 75 cells"
    eight = replace(BOOK.claim("P11"), open={"dispatch_format": ("bf16",), "tokens_per_rank": (7, 8)})
    (found,) = judge(replace(BOOK, claims=(eight,)), empty, PUBLISHED)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert [round(one.findings[0].value, 3) for one in found.readings] == [0.892, 1.019]
    assert "outside for dispatch_format=bf16 tokens_per_rank=8" in found.reason
    lost = judge(BOOK, empty, PUBLISHED[PUBLISHED["phase"] != "link"])
    assert {one.claim.id: one.verdict for one in lost if one.way is Way.CHECKS}["H02"] is Verdict.NOT_MEASURED


def test_exit_codes(tmp_path: Path) -> None:
    empty = PUBLISHED.iloc[:0].assign(product="")
    assert exit_code(judge(BOOK, empty, PUBLISHED)) == 3
    rows = measured(tmp_path, {"onesided_fence": line(10.0), "deepep_ll": by(2.0)})
    assert exit_code(judge(book_of("P01", **RATIO), rows, PUBLISHED)) == 0
    assert exit_code(judge(book_of("P01", **RATIO, lower=2.5), rows, PUBLISHED)) == 1
    assert exit_code(judge(book_of("P01", **RATIO, upper=1.5, better=Better.NEITHER), rows, PUBLISHED)) == 1


def test_equal_backends_are_seldom_called_better_than_a_bound(tmp_path: Path) -> None:
    """Of 100 experiments in which the truth lies exactly on the bound, a few are called, as a 95 % interval allows."""
    from analysis_values import simulate

    rows = simulate(
        tmp_path,
        {"onesided_fence": lambda _: 10.0, "deepep_ll": lambda _: 12.0},
        tokens=(8,),
        repeats=(5, 2, 2),
        spread=(0.03, 0.01, 0.01),
        experiments=100,
    )
    rows = rows.assign(
        domain=pd.Series(["nvlink"] * len(rows)).astype(rows["domain"].dtype),
        machine=rows["model"],
        model="deepseek_v3",
        product="NVIDIA H200",
    )
    found = verdict_of(book_of("P01", **RATIO), rows)
    verdicts = [one.verdict for one in found.readings if one.headline]
    assert len(verdicts) == 100
    wrong = sum(verdict is Verdict.OUTSIDE for verdict in verdicts)
    assert wrong <= 8  # 2.5 % expected
    assert sum(verdict is Verdict.INCONCLUSIVE for verdict in verdicts) >= 88
