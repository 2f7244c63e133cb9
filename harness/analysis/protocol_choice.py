"""Up to how many tokens Sentinel is to be taken on a machine, from runs of both protocols; `onesided_auto` goes by it.

The limit is the measured token count that costs least over all that were measured: with every count up to it served by
Sentinel and every other one by Fence, the sum of log latencies is smallest. It is 0 where Sentinel is never faster, and
never beyond what was measured. Where medians cross once it is the last count at which Sentinel is ahead.

A limit is that of one kind of measurement. Of several runs that measured one setting, those that are of one kind with
the newest are taken together; every other one is left out, by name and with what it differs in.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epcross.harness.analysis.cells import headline_flags
from epcross.harness.analysis.material import Run
from epcross.harness.analysis.older import differs_from, shown
from epcross.harness.errors import InputError
from epcross.harness.record import Record
from epcross.harness.terms import Domain, Phase, Regime, RowFormat, Status
from epcross.kernels.onesided.crossover import Setting, machine_name

SENTINEL, FENCE = "onesided_sentinel", "onesided_fence"
_ALIKE = (
    *("domain", "sharing", "scope", "machine", "measure_hash", "backend_version", "options"),
    *("model", "num_experts", "num_slots", "top_k", "routing", "routing_params", "placement", "combine_format"),
)
"""What rows of one setting must agree in, lest the limit be that of a mixture."""

Times = Mapping[int, Mapping[str, Sequence[Record]]]
"""Tokens per rank -> protocol -> rows, where both protocols have some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One setting, what was measured there, and what follows."""

    setting: Setting
    medians_us: Mapping[int, tuple[float, float]]  # tokens -> (Sentinel, Fence)
    repeats: tuple[int, int]  # behind one median: the fewest and the most
    sentinel_up_to: int
    source: str  # the runs, and the kernels they were of

    @property
    def open_ended(self) -> bool:
        """Whether Sentinel was still ahead at the largest count: more tokens may be its own, too."""
        return self.sentinel_up_to == max(self.medians_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A run that a limit does not rest on, or no limit at all."""

    run_id: str
    setting: Setting | None  # None: it is left out of all
    reason: str

    @property
    def words(self) -> str:
        """All of it in one line."""
        of = "" if self.setting is None else f" of {words(self.setting)}"
        return f"{self.run_id}: left out{of}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What follows from several runs, and what of them was left out."""

    chosen: tuple[Choice, ...]
    left_out: tuple[LeftOut, ...]


def choices(runs: Sequence[Run]) -> Choices:
    """A choice for each setting in which both protocols have steady, ok and unflagged round trips of one call.

    Raises:
        InputError: there is none; the message names every run with the reason why.
    """
    left_out: list[LeftOut] = []
    settings: dict[Setting, list[tuple[Run, list[Record]]]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run.directory.created, run.run_id), reverse=True):
        if reason := _objection(run):
            left_out.append(LeftOut(run_id=run.run_id, setting=None, reason=reason))
            continue
        own: dict[Setting, list[Record]] = defaultdict(list)
        for row in filter(_counts, run.records):
            own[_setting(run, row)].append(row)
        for setting, rows in own.items():
            settings[setting].append((run, rows))
    chosen: list[Choice] = []
    for setting, parts in sorted(settings.items(), key=lambda item: _order(item[0])):
        taken, others = _alike(setting, parts)
        left_out += others
        if taken:
            chosen.append(_choice(setting, taken))
    if not chosen:
        raise InputError(
            f"these runs hold no token count at which both {SENTINEL} and {FENCE} have steady round trips that are ok, "
            "without flags and of one call; measure both, such as with sweep=onesided_nvlink or sweep=onesided_h200"
            + "".join(f"\n  - {one.words}" for one in left_out)
        )
    return Choices(chosen=tuple(chosen), left_out=tuple(left_out))


def words(setting: Setting) -> str:
    """A setting as a person reads it."""
    return f"EP {setting.ep_size}, hidden {setting.hidden}, {setting.dispatch_format} on {setting.machine}"


def _order(setting: Setting) -> tuple[int, int, str, str]:
    """As `words` has it, with numbers as numbers: EP 16 comes after EP 2."""
    return setting.ep_size, setting.hidden, str(setting.dispatch_format), setting.machine


def _objection(run: Run) -> str:
    """Why no limit can rest on `run`; empty if one may."""
    if run.plan.soak is not None:
        return "a soak: its cases are drawn at random, so no curve goes through them"
    own = [row for row in run.records if row.backend in (SENTINEL, FENCE)]
    if missing := sorted({SENTINEL, FENCE} - {row.backend for row in own}):
        return f"it has no rows of {' or of '.join(missing)}"
    if not any(map(_counts, own)):
        steady = [row for row in own if row.phase == Phase.ROUND_TRIP and row.regime == Regime.STEADY]
        why = Counter(_why_not(row) for row in steady)
        told = ", ".join(f"{count} {reason}" for reason, count in sorted(why.items()))
        return f"of its steady round trips of both none counts ({told or 'there are none'})"
    names = _gpus(run)
    return "" if len(names) == 1 else f"it was taken on GPUs {names or 'that it does not name'}, not on one kind"


def _counts(row: Record) -> bool:
    of_protocols = row.backend in (SENTINEL, FENCE) and row.phase == Phase.ROUND_TRIP and row.regime == Regime.STEADY
    return of_protocols and not _why_not(row)


def _why_not(row: Record) -> str:
    """Why a steady round trip does not count; empty if it does."""
    if row.status != Status.OK:
        return row.status
    if flags := headline_flags(row):
        return f"flagged {' '.join(sorted(flags))}"
    return "" if row.tokens_min * row.ep_size == row.tokens_total else "with other numbers of tokens on some ranks"


def _gpus(run: Run) -> list[str]:
    return sorted({str(gpu["name"]) for gpu in run.directory.environment.get("gpus") or ()})


def _setting(run: Run, row: Record) -> Setting:
    (name,) = _gpus(run)
    shared = row.ep_size if row.domain == Domain.SHARED_GPU else 1
    return Setting(
        machine=machine_name(name, str(row.transport), shared),
        ep_size=row.ep_size,
        hidden=row.hidden,
        dispatch_format=RowFormat(row.dispatch_format),
    )


def _alike(setting: Setting, parts: Sequence[tuple[Run, Sequence[Record]]]) -> tuple[dict[str, Times], list[LeftOut]]:
    """Run -> what of it can be used together with the newest, which comes first in `parts`; and what of them not."""
    taken: dict[str, Times] = {}
    left_out = []
    newest: dict[str, str] = {}
    newest_at = ""
    for run, rows in parts:
        kind, problem = _kind(rows)
        times = _of_one_call(rows)
        if problem:
            reason = f"its own rows differ in {problem}; measure each of these in a run of its own"
        elif not times:
            reason = "no token count at which both protocols have such round trips in one call"
        elif newest and (
            difference := differs_from(next(iter(taken)), kind, newest, as_old=run.directory.created == newest_at)
        ):
            reason = difference
        else:
            if not newest:
                newest, newest_at = kind, run.directory.created
            taken[run.run_id] = times
            continue
        left_out.append(LeftOut(run_id=run.run_id, setting=setting, reason=reason))
    return taken, left_out


def _kind(rows: Sequence[Record]) -> tuple[dict[str, str], str]:
    """The one value of everything in `_ALIKE`, and what has several, with them."""
    found = {name: sorted({shown(name, getattr(row, name)) for row in rows}) for name in _ALIKE}
    several = [f"{name} ({', '.join(values)})" for name, values in found.items() if len(values) > 1]
    return {name: values[0] for name, values in found.items()}, ", ".join(several)


def _of_one_call(rows: Sequence[Record]) -> Times:
    """Rows of calls in which both protocols were measured with as many tokens."""
    calls: dict[tuple[int, str], dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        calls[row.tokens_per_rank, row.allocation_id][row.backend].append(row)
    found: dict[int, dict[str, list[Record]]] = {}
    for (tokens, _), both in sorted(calls.items()):
        if len(both) == 2:
            for backend, own in both.items():
                found.setdefault(tokens, {}).setdefault(backend, []).extend(own)
    return found


def _choice(setting: Setting, taken: Mapping[str, Times]) -> Choice:
    rows: dict[int, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for times in taken.values():
        for tokens, both in times.items():
            for backend, own in both.items():
                rows[tokens][backend] += own
    medians = {tokens: (_median_us(both[SENTINEL]), _median_us(both[FENCE])) for tokens, both in sorted(rows.items())}
    counts = [len(own) for both in rows.values() for own in both.values()]
    kernels = sorted({str(row.backend_version) for both in rows.values() for own in both.values() for row in own})
    return Choice(
        setting=setting,
        medians_us=medians,
        repeats=(min(counts), max(counts)),
        sentinel_up_to=limit_of(medians),
        source=f"{', '.join(sorted(taken))}; kernels {', '.join(kernels)}",
    )


def _median_us(rows: Sequence[Record]) -> float:
    return statistics.median(row.latency_us for row in rows if row.latency_us is not None)


def limit_of(medians_us: Mapping[int, tuple[float, float]]) -> int:
    """The count, or 0, up to which Sentinel is taken at the least cost. The smallest of several that cost the same."""
    gains = {tokens: math.log(fence / sentinel) for tokens, (sentinel, fence) in sorted(medians_us.items())}
    best, total, limit = 0.0, 0.0, 0
    for tokens, gain in gains.items():
        total += gain
        if total > best:
            best, limit = total, tokens
    return limit
