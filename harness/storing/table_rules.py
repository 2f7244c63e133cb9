"""What every table of rows must hold: the rules of `rows.check_record`, for all its rows at once, and each row once.

Rows are taken column by column, so that thousands are checked in milliseconds.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from epcross.harness.measuring.gpu_state import slowed
from epcross.harness.storing.rows import CLOSED_LISTS, CLOSED_WORDS, is_timed, join_words
from epcross.harness.terms import BackendKind, Flag, Status

ROW_KEY = ("run_id", "point_id", "phase", "repeat")
"""What a row is: there is one for each."""

_MAY_BE_NEGATIVE = frozenset({"gpu_temperature_c"})
_COUNTED = frozenset(
    {
        *("experts_hit", "tokens_per_expert_mean", "error_ratio", "error_share", "nvlink_wire_bytes", "fan_out"),
        *("imbalance", "wall_s"),
    }
)
"""Numbers that are no integers, since they are means, and yet not below 0; those of latencies are looked at by row."""

_SHARE_SINCE = 8
"""Schema version from which rows of layers say how near their outputs are to the bound; older ones may lack it."""


def table_problems(table: pa.Table) -> list[str]:
    """Every rule that the rows of `table`, of `ROWS_SCHEMA`, break, as sentences; empty if a run may have left them."""
    return [
        *_latency_problems(table),
        *_word_problems(table),
        *_number_problems(table),
        *_flag_problems(table),
        *_copies(table),
    ]


def _latency_problems(table: pa.Table) -> list[str]:
    ok = pc.equal(table["status"], Status.OK)
    low, latency, high = (table[name] for name in ("latency_min_us", "latency_us", "latency_max_us"))
    timed = _sure(pc.and_(pc.is_finite(latency), pc.greater(latency, 0)))
    ordered = _sure(pc.and_(_all(pc.greater(low, 0), pc.less_equal(low, latency)), pc.less_equal(latency, high)))
    not_ok = pc.invert(ok)
    told = pc.or_(pc.or_(pc.is_valid(low), pc.is_valid(latency)), pc.or_(pc.is_valid(high), _given(table["estimator"])))
    rules = {
        "are ok without a latency above 0": _all(ok, pc.invert(timed)),
        "are ok with a latency_us outside their own latency_min_us to latency_max_us, above 0": _all(
            ok, timed, pc.invert(ordered)
        ),
        "are ok without an estimator": _all(ok, pc.invert(_given(table["estimator"]))),
        "are ok with n_samples below 1": _all(ok, pc.less(table["n_samples"], 1)),
        "are ok with an error_share above 1": _all(ok, pc.greater(table["error_share"], 1)),
        f"of schema version {_SHARE_SINCE} or later are ok layers or expert stages without an error_share": _all(
            ok,
            _sure(pc.greater_equal(table["schema_version"], _SHARE_SINCE)),
            _of_experts(table),
            pc.is_null(table["error_share"]),
        ),
        "are ok with a reason why they are not": _all(ok, pc.is_valid(table["reason"])),
        "have a latency though they are not ok": _all(not_ok, told),
        "are not ok and give no reason": _all(not_ok, pc.invert(_given(table["reason"]))),
    }
    return [f"{count} rows {words}{_first(table, wrong)}" for words, wrong in rules.items() if (count := _count(wrong))]


def _of_experts(table: pa.Table) -> Any:
    """Which rows have outputs of experts, that are held against the oracle; rows of before have no kind."""
    return _sure(pc.not_equal(table["kind"], BackendKind.EXCHANGE))


def _word_problems(table: pa.Table) -> list[str]:
    problems = []
    for name, words in CLOSED_LISTS.items():
        unknown = sorted(set(pc.unique(table[name]).to_pylist()) - {*words, None})
        problems += [f"{name} is {unknown[0]!r}, where only {', '.join(words)} are allowed"] if unknown else []
    for name, words in CLOSED_WORDS.items():
        for value in pc.unique(table[name]).to_pylist():
            own = (value or "").split()
            if unknown := sorted(set(own) - set(words)):
                problems.append(f"{name} has {unknown[0]!r}, where only {', '.join(words)} are allowed")
            elif value and value != join_words(own):
                problems.append(f"{name} is {value!r}, where words stand sorted, once each, with one space between")
    if problems:
        return problems
    kinds = pc.fill_null(table["kind"], BackendKind.EXCHANGE)  # rows from before there were others
    for place in pc.unique(pc.binary_join_element_wise(table["phase"], table["regime"], kinds, " ")).to_pylist():
        phase, regime, kind = place.split(" ")
        if not is_timed(phase, regime, kind):
            problems.append(f"phase is {phase!r}, which regime {regime} of kind {kind} does not time")
    return problems


def _flag_problems(table: pa.Table) -> list[str]:
    """Flags that a row's other columns contradict: what was seen on its GPUs must be told."""
    told: set[str] = set()
    for flags, reasons, others in set(
        zip(*(table[name].to_pylist() for name in ("flags", "throttle_reasons", "other_processes")), strict=True)
    ):
        words = set((flags or "").split())
        held = None if reasons is None else slowed(reasons.split())
        if held is not None and held not in words:
            told.add(f"flags is {flags!r} with throttle_reasons {reasons!r}, which are {held}")
        if Flag.POWER_CAPPED in words and held is not Flag.POWER_CAPPED:
            told.add(f"flags is {flags!r} with throttle_reasons {reasons!r}, which are not {Flag.POWER_CAPPED}")
        if (others or 0) > 0 and Flag.NOT_ALONE not in words:
            told.add(f"flags is {flags!r} with other_processes {others}, which is {Flag.NOT_ALONE}")
    return sorted(told)


def _number_problems(table: pa.Table) -> list[str]:
    problems = []
    for name in table.column_names:
        column = table[name]
        floating = pa.types.is_floating(column.type) and name != "latency_us"
        if floating and pc.all(pc.is_finite(column)).as_py() is False:
            problems.append(f"{name} is infinite or no number somewhere")
        if name in _COUNTED or (pa.types.is_integer(column.type) and name not in _MAY_BE_NEGATIVE):
            least = pc.min(column).as_py()
            if least is not None and least < 0:
                problems.append(f"{name} is {least}, where only numbers from 0 on are allowed")
    return problems


def _copies(table: pa.Table) -> list[str]:
    key = np.zeros(table.num_rows, np.int64)  # each row's, as a number; equal if and only if all four are
    for name in ROW_KEY:
        values = table[name].combine_chunks().dictionary_encode()
        key = key * len(values.dictionary) + values.indices.to_numpy()
    copies = table.num_rows - len(np.unique(key))
    if not copies:
        return []
    _, first, counts = np.unique(key, return_index=True, return_counts=True)
    row = table.select(ROW_KEY).slice(int(first[counts > 1].min()), 1).to_pylist()[0]
    return [f"{copies} rows are there more than once, where each is there once; the first: {_words(row)}"]


def _all(*masks: Any) -> Any:
    every = masks[0]
    for mask in masks[1:]:
        every = pc.and_(every, mask)
    return every


def _sure(mask: Any) -> Any:
    """What is not known, since a number is missing, is not so."""
    return pc.fill_null(mask, False)


def _given(texts: Any) -> Any:
    return _sure(pc.greater(pc.utf8_length(pc.utf8_trim_whitespace(texts)), 0))


def _count(mask: Any) -> int:
    return pc.sum(mask).as_py() or 0


def _first(table: pa.Table, mask: Any) -> str:
    return f" (the first: {_words(table.select(ROW_KEY).filter(mask).slice(0, 1).to_pylist()[0])})"


def _words(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {row[name]}" for name in ROW_KEY)
