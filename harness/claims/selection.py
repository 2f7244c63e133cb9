"""Which measured rows a claim is about, and how they fall into readings that compare like with like."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from epcross.harness.claims.book import Book
from epcross.harness.claims.claim import Claim, Kind, Member, Quantity
from epcross.harness.claims.hardware import is_one
from epcross.harness.claims.verdict import Verdict
from epcross.harness.planning.tokens import counted
from epcross.harness.terms import Domain, Phase, Regime, Status

if TYPE_CHECKING:
    import pandas as pd


_FOLLOWERS: Mapping[str, tuple[str, ...]] = {
    "model": ("num_experts", "num_slots", "top_k", "hidden", "intermediate"),
    "routing": ("routing_params",),
    "placement": ("num_slots",),
}
"""Columns that change with a factor."""


class NoRows(Exception):
    """Why there is nothing to judge by."""

    def __init__(self, verdict: Verdict, reason: str) -> None:
        """The verdict that follows, and a sentence."""
        super().__init__(reason)
        self.verdict = verdict
        self.reason = reason


def select(
    claim: Claim, book: Book, members: Sequence[Member], measured: "pd.DataFrame", usable: "pd.DataFrame"
) -> "pd.DataFrame":
    """The rows of these backends that `claim` is about: of `usable`, or for a count of wrong rows of `measured`.

    Raises:
        NoRows: there are none, with what comes nearest.
    """
    names = ", ".join(dict.fromkeys(map(_member_text, members)))
    there = measured[_of_members(measured, members)]
    if there.empty:
        raise NoRows(Verdict.NOT_MEASURED, f"no rows of {names}")
    if claim.quantity is Quantity.INCORRECT_ROWS:
        rows = there[there["status"].isin([Status.OK, Status.INCORRECT])]
    else:
        rows = usable[_of_members(usable, members)]
    if rows.empty:
        counts = [f"{count} {status}" for status, count in there["status"].value_counts().items() if count]
        raise NoRows(
            Verdict.NOT_MEASURED, f"no row of {names} to rest on: {', '.join(counts)}, flagged ones among them"
        )
    for name, allowed, words in _conditions(claim, book):
        fits = {value: allowed(plain(value)) for value in rows[name].unique()}
        left = rows[rows[name].map(fits).astype(bool)]
        if left.empty:
            seen = ", ".join(map(str, sorted(map(plain, fits), key=_order)))
            where = f"on {seen}" if name == "product" else f"at {name} {seen}"
            verdict = Verdict.NOT_MEASURED if name == "tokens_per_rank" else Verdict.NOT_COMPARABLE
            raise NoRows(verdict, f"{names}: measured {where}, not {words}")
        rows = left
    return _of_least_wait(rows)


def _of_least_wait(rows: "pd.DataFrame") -> "pd.DataFrame":
    """Communication of a layer as that of the rank that waits least, where rows have it.

    What a rank waits for one with more experts to read is no communication, and grows less with the batch than it does.
    A steady row has one sample of each rank, of which `latency_min_us` is the least; of spans it would be the least of
    many pairs as well, so they stay as they are, and `of_layers` says which it is.
    """
    alone = (rows["phase"] == Phase.LAYER_COMM) & (rows["regime"] == Regime.STEADY)
    return rows.assign(latency_us=rows["latency_us"].mask(alone, rows["latency_min_us"])) if alone.any() else rows


def _member_text(member: Member) -> str:
    from epcross.harness.analysis.inputs import option_words

    options = [option_words(name, value) for name, value in member.options.items()]
    return " ".join([member.backend, *([f"compute={member.compute}"] if member.compute else []), *options])


def _of_members(rows: "pd.DataFrame", members: Sequence[Member]) -> "pd.Series":
    """Which rows are of one of these backends, with the options and the expert stage that are named."""
    import pandas as pd

    chosen = pd.Series(False, index=rows.index)
    for member in members:
        own = rows["backend"] == member.backend
        fits = {text: _has_options(text, member) for text in rows.loc[own, "options"].unique()}
        own &= rows["options"].map(fits).eq(True)
        if member.compute:
            own &= rows["compute"] == member.compute
        chosen |= own
    return chosen


def _has_options(text: str, member: Member) -> bool:
    try:
        options = json.loads(text)
    except ValueError:  # of rows that something else wrote
        options = None
    if not isinstance(options, dict):
        return not member.options
    if options.get("staging", True) is False and "staging" not in member.options:
        return False
    return all(options.get(name) == value for name, value in member.options.items())


def _conditions(claim: Claim, book: Book) -> Iterator[tuple[str, Callable[[Any], bool], str]]:
    """Column, test of a value, and words for what is allowed; what says most about a row first, batches last.

    A batch that lacks is one to measure; any other condition makes rows of something else.
    """
    yield "domain", partial(_is_among, [Domain.NVLINK]), f"at {Domain.NVLINK}, one rank per GPU"
    system = book.systems[claim.hardware]
    if claim.kind is Kind.ABSOLUTE:
        yield "product", partial(is_one, system), f"on {claim.hardware}, and the claim is absolute"
    if claim.quantity in (Quantity.SHARE, Quantity.SHARE_TREND):
        yield "phase", partial(_is_among, [Phase.LAYER, Phase.LAYER_COMM]), f"at {Phase.LAYER} and {Phase.LAYER_COMM}"
    elif claim.phase is not None:
        yield "phase", partial(_is_among, [claim.phase]), f"at {claim.phase}"
    factors = {**claim.where, **_change_values(claim), **claim.open}
    for name, values in sorted(factors.items(), key=lambda factor: factor[0] == "tokens_per_rank"):
        if isinstance(values, Mapping):
            low, high = values.get("from", 0), values.get("to", inf)
            yield name, partial(_is_between, low, high), f"at {low:g} to {high:g}"
        else:
            allowed = as_list(values)
            yield name, partial(_is_among, allowed), f"at {' or '.join(map(str, allowed))}"


def _order(value: Any) -> tuple[bool, float, str]:
    """Numbers by size, then words."""
    number = isinstance(value, int | float)
    return not number, value if number else 0.0, str(value)


def _is_among(allowed: Sequence[Any], value: Any) -> bool:
    return value in allowed


def _is_between(low: float, high: float, value: float) -> bool:
    return low <= value <= high


def _change_values(claim: Claim) -> dict[str, list[Any]]:
    return {claim.change.factor: [claim.change.base, *claim.change.to]} if claim.change else {}


def axes(claim: Claim) -> list[str]:
    """Factors besides the tokens of which the source states several values: the claim must hold at each."""
    several = [name for name, values in claim.where.items() if isinstance(values, Mapping | list | tuple)]
    return [name for name in several if name != "tokens_per_rank"]


def keys(claim: Claim) -> list[str]:
    """What the rows of one reading agree in."""
    from epcross.harness.analysis.frame import CONDITIONS
    from epcross.harness.analysis.inputs import STAGING

    varied = [*axes(claim), *_change_values(claim)]
    # staging is the actors' to name (`_has_options`): the two sides may then differ in it, and `staged` says so
    apart = {"phase", STAGING, *varied, *(follower for name in varied for follower in _FOLLOWERS.get(name, ()))}
    tokens = ["tokens_per_rank"] if "tokens_per_rank" in claim.open else []
    return [*(name for name in CONDITIONS if name not in apart), *tokens, "product"]


def by_backend(rows: "pd.DataFrame") -> "dict[str, pd.DataFrame]":
    """The rows of each subject; options and versions stand in its label where they differ."""
    from epcross.harness.analysis.frame import SUBJECT

    subjects = list(zip(*(rows[name].tolist() for name in SUBJECT), strict=True))
    keys = sorted(set(subjects))
    found = {}
    for key in keys:
        alike = [other for other in keys if other[0] == key[0]]
        differing = [str(key[at]) for at in range(1, len(SUBJECT)) if len({other[at] for other in alike}) > 1]
        part = rows if len(keys) == 1 else rows[[subject == key for subject in subjects]]
        found[" ".join([str(key[0]), *differing])] = part
    return found


def lacking(claim: Claim, rows: "pd.DataFrame") -> str:
    """Which stated values were not measured: the claim is about all of them, so without one it cannot be judged."""
    for name, values in {**claim.where, **_change_values(claim)}.items():
        needed = list(values.values()) if isinstance(values, Mapping) else as_list(values)
        there = set(map(plain, rows[name].unique()))
        if missing := [str(value) for value in needed if value not in there]:
            return f"{name} {', '.join(missing)} is missing; the claim is about {', '.join(map(str, needed))}"
    return ""


def unlike(rows: "pd.DataFrame", other: "pd.DataFrame") -> str:
    """Why a ratio of the two sides would not compare like with like; empty if it does."""
    from epcross.harness.analysis.frame import NOT_REPORTED

    if set(rows["allocation_id"]) != set(other["allocation_id"]):
        return "the two sides were measured in different allocations, at other times or places"
    trial = ["tokens_per_rank", "run_id", "launch", "seed"]
    ids = [own[own["ids_hash"] != NOT_REPORTED].groupby(trial)["ids_hash"].first() for own in (rows, other)]
    both = ids[0].to_frame("own").join(ids[1].rename("other"), how="inner")
    differing = both[both["own"] != both["other"]]
    if differing.empty:
        return ""
    return f"the two sides had other token ids at {counted(differing.index[0][0])}"


def issued(rows: "pd.DataFrame", other: "pd.DataFrame") -> str:
    """How the pairs of the two sides were issued, where that differs: replaying a graph spares a loop's launches."""
    ways = [" or ".join(sorted(set(own["enqueued"].dropna()))) or "not reported" for own in (rows, other)]
    return f"pairs issued by {ways[0]} against {ways[1]}" if ways[0] != ways[1] else ""


def staged(rows: "pd.DataFrame", other: "pd.DataFrame") -> str:
    """What was done before the window of layers, where a claim's actors ask for rows that leave it out; the baseline's
    beside it where it is not the same."""
    from epcross.harness.analysis.inputs import NOT_STAGED, STAGED_WORDS

    told = [" or ".join(sorted(set(own["staging"]) - {NOT_STAGED})) for own in (rows, other)]
    if set(told) <= {STAGED_WORDS[False], ""}:
        return ""
    return f"inputs {told[0]}" + (f" against {told[1]}" if told[1] not in ("", told[0]) else "")


def of_layers(rows: "pd.DataFrame") -> str:
    """What must be said of a layer's numbers: the formats it computes in, and how its communication was told apart.
    Both sides of a comparison agree in them, since they are conditions (`frame.CONDITIONS`)."""
    from epcross.harness.analysis.frame import FORMATS, NO_WEIGHTS

    layers = rows[rows["weight_format"] != NO_WEIGHTS]
    if layers.empty:
        return ""
    formats = sorted({" x ".join(map(str, key)) for key in zip(*(layers[name] for name in FORMATS), strict=True)})
    apart = sorted(map(str, layers.loc[layers["phase"] == Phase.LAYER_COMM, "regime"].unique()))
    words = [f"activations x weights {', '.join(formats)}", *(_APART[regime] for regime in apart)]
    return "; ".join(words)


_APART: Mapping[str, str] = {
    Regime.STEADY: "communication is the layer's period less that of the layer on rows in place, "
    "of the rank that waits least for others with more experts to read",
    Regime.SPANS: "communication is the spans of the dispatch and combine kernels, and "
    "holds what a rank waits for one with more experts to read",
}


def as_list(values: Any) -> list[Any]:
    """A value, or several, as a list."""
    return list(values) if isinstance(values, list | tuple) else [values]


def plain(value: Any) -> Any:
    """A cell as Python has it."""
    return value.item() if hasattr(value, "item") else value
