import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from store_values import CONTEXT, TIMING, TINY, make_point, make_unit

from epcross.harness.point import Placement, Routing
from epcross.harness.record import SCHEMA_VERSION, Record
from epcross.harness.storing.rows import base_record, check_record, failed_records, join_words, planned_records
from epcross.harness.terms import Flag, PlacementKind, Regime, RoutingKind, RowFormat, Stage, Status

OK = replace(make_unit(make_point()).records[0], boundary="pack transfer", weights_by="experts", flags="late_start")
FAILED = replace(
    failed_records(make_point(), TIMING, 0, CONTEXT, Status.ERROR, "died")[0], failed_rank=1, failed_stage=Stage.TIME
)


def test_a_row_carries_what_follows_from_its_point():
    point = replace(
        make_point(backend="shm_fence", tokens=8, ep_size=3),
        options=(("chunk", 64), ("name", "x")),
        model=replace(TINY, hidden=100),
        tokens=(8, 0, 5),
        max_tokens_per_rank=16,
        routing=Routing(kind=RoutingKind.ZIPF, exponent=1.25, path="/tmp/somewhere"),
        placement=Placement(kind=PlacementKind.REPLICATED, num_slots=9),
        dispatch_format=RowFormat.FP8,
    )
    record = base_record(point, CONTEXT)
    assert record.point_id == point.point_id
    assert (record.backend, record.options) == ("shm_fence", '{"chunk":64,"name":"x"}')
    assert (record.num_experts, record.num_slots, record.top_k, record.hidden, record.intermediate) == (
        8,
        9,
        2,
        100,
        32,
    )
    assert (record.ep_size, record.tokens_per_rank, record.tokens_min, record.tokens_total) == (3, 8, 0, 13)
    assert record.max_tokens_per_rank == 16
    assert (record.routing, json.loads(record.routing_params)) == ("zipf", {"exponent": 1.25})
    assert (record.placement, record.dispatch_format, record.combine_format) == ("replicated", "fp8", "bf16")
    # 100 fp8 values and one fp32 scale, each padded to 16 bytes; 100 bf16 values come back
    assert (record.row_bytes, record.scale_bytes, record.padded_bytes) == (100, 4, 112 + 16)
    assert record.combine_row_bytes == 208
    assert record.metadata_bytes == 2 * (4 + 4)
    assert (record.run_id, record.measure_hash, record.machine) == ("run-a", "cafe", "beef")
    assert (record.domain, record.sharing, record.scope, record.regime) == ("cpu", "none", "scale_up", "steady")


@pytest.mark.parametrize(
    ("regime", "phases"),
    [
        (Regime.STEADY, ["round_trip"]),
        (Regime.ENTRY, ["dispatch", "combine", "round_trip"]),
        (Regime.SPANS, ["dispatch", "combine"]),
    ],
)
def test_a_launch_has_one_row_for_each_phase_seed_and_chain(regime: Regime, phases: list[str]):
    records = planned_records(base_record(make_point(regime=regime), CONTEXT), TIMING, 1)
    assert [(r.phase, r.repeat, r.launch, r.seed, r.chain) for r in records] == [
        (phase, repeat, 1, seed, chain)
        for phase in phases
        for repeat, seed, chain in [(4, 0, 0), (5, 0, 1), (6, 1, 0), (7, 1, 1)]
    ]


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.OK])
def test_a_failure_may_be_stored_whatever_it_is(status: Status):
    records = failed_records(
        make_point(regime=Regime.ENTRY),
        TIMING,
        1,
        CONTEXT,
        status,
        "rank 1\n  died",
        failed_rank=1,
        failed_stage=Stage.VERIFY_BEFORE,
        flags=(Flag.UNPINNED, Flag.OVERSUBSCRIBED, Flag.UNPINNED),
    )
    assert len(records) == 3 * 4
    for record in records:
        assert check_record(record) == []
        assert (record.status, record.reason, record.flags) == (status, "rank 1 died", "oversubscribed unpinned")
        assert (record.failed_rank, record.failed_stage, record.latency_us) == (1, "verify_before", None)


@pytest.mark.parametrize(("status", "reason"), [(Status.OK, "fine"), (Status.ERROR, " \n")])
def test_a_failure_needs_a_status_and_a_reason(status: Status, reason: str):
    with pytest.raises(ValueError, match="other than ok and a reason"):
        failed_records(make_point(), TIMING, 0, CONTEXT, status, reason)


def test_good_records_pass():
    assert check_record(OK) == []
    assert check_record(FAILED) == []
    assert check_record(replace(OK, error_share=1.0)) == check_record(replace(FAILED, error_share=1.01)) == []
    assert check_record(replace(OK, latency_us=10, latency_min_us=9, latency_max_us=10)) == []
    # a record of words read back from JSON is as good as one of enums
    assert check_record(Record(**json.loads(json.dumps({n: getattr(OK, n) for n in OK.__slots__})))) == []


@pytest.mark.parametrize(
    ("base", "changes", "problem"),
    [
        (OK, {"latency_us": None}, "latency_us is missing though status is ok"),
        (OK, {"latency_max_us": None}, "latency_max_us is missing though status is ok"),
        (OK, {"estimator": ""}, "estimator is missing though status is ok"),
        (OK, {"n_samples": 0}, "n_samples is 0 though status is ok"),
        (OK, {"error_share": 1.01}, "error_share is 1.01 though status is ok; above 1 outputs are wrong"),
        (
            OK,
            {"kind": "layer", "phase": "layer"},
            "error_share is missing though status is ok and kind is layer; say how near it was",
        ),
        (OK, {"kind": "experts", "phase": "experts"}, "error_share is missing though status is ok and kind is experts"),
        (OK, {"reason": "but"}, "reason is 'but' though status is ok"),
        (OK, {"latency_us": math.nan}, "latency_us is nan; it must be finite"),
        (OK, {"latency_max_us": math.inf}, "latency_max_us is inf; it must be finite"),
        (OK, {"latency_min_us": 0.0}, "latencies must be positive and in order, not min 0.0, latency 10.0, max 11.0"),
        (OK, {"latency_us": -1.0}, "latencies must be positive and in order"),
        (OK, {"latency_us": 12.0}, "latencies must be positive and in order"),
        (OK, {"fan_out": math.nan}, "fan_out is nan; it must be finite"),
        (FAILED, {"latency_us": 1.0}, "latency_us is 1.0 though status is error; only ok rows have a latency"),
        (FAILED, {"estimator": "x"}, "estimator is 'x' though status is error"),
        (FAILED, {"reason": None}, "status error needs a reason"),
        (FAILED, {"reason": " "}, "status error needs a reason"),
        (FAILED, {"failed_stage": "lunch"}, "failed_stage is 'lunch'; allowed: start, prepare"),
        (OK, {"status": ""}, "status is ''; allowed: ok, incorrect"),
        (OK, {"phase": "tour"}, "phase is 'tour'; allowed: stage, dispatch"),
        (OK, {"phase": "dispatch"}, "phase dispatch is not timed in regime steady"),
        (OK, {"domain": "moon"}, "domain is 'moon'; allowed: cpu, nvlink"),
        (OK, {"dispatch_format": "fp7"}, "dispatch_format is 'fp7'; allowed: bf16"),
        (OK, {"weights_by": "nobody"}, "weights_by is 'nobody'; allowed: experts, combine"),
        (OK, {"flags": "warm"}, "flags has warm; allowed: oversubscribed"),
        (OK, {"flags": "unpinned late_start"}, "its words must be sorted"),
        (OK, {"boundary": "pack  transfer"}, "its words must be sorted"),
        (OK, {"boundary": "pack tea"}, "boundary has tea; allowed: layout"),
        (OK, {"repeat": np.int64(1)}, "repeat is np.int64(1) of type int64; it must be int"),
        (OK, {"repeat": True}, "repeat is True of type bool; it must be int"),
        (OK, {"tuned": 1}, "tuned is 1 of type int; it must be bool"),
        (OK, {"backend": None}, "backend is None of type NoneType; it must be str"),
        (OK, {"wall_s": "2"}, "wall_s is '2' of type str; it must be float or None"),
        (OK, {"machine": ""}, "machine is empty"),
        (OK, {"attempt": -1}, "attempt is negative: -1"),
        (OK, {"schema_version": 99}, f"schema_version is 99; this epcross writes {SCHEMA_VERSION}"),
    ],
)
def test_each_broken_rule_is_named(base: Record, changes: dict[str, Any], problem: str):
    problems = check_record(replace(base, **changes))
    assert len(problems) == 1
    assert problem in problems[0]


def test_all_broken_rules_are_named_together():
    problems = check_record(replace(OK, domain="moon", machine="", latency_us=None))
    assert len(problems) == 3


def test_words_are_joined_in_one_way():
    assert join_words([Flag.UNPINNED, Flag.THROTTLED, Flag.UNPINNED]) == "throttled unpinned"
    assert join_words([]) == ""
