"""Up to how many tokens Sentinel is to be taken on a machine, from runs of both protocols; `onesided_auto` goes by it.

The limit is the measured token count that costs least over all that were measured: with every count up to it served by
Sentinel and every other one by Fence, the sum of log latencies is smallest. It is 0 where Sentinel is never faster, and
never beyond what was measured. Where medians cross once it is the last count at which Sentinel is ahead.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epcross.harness.analysis.cells import headline_flags
from epcross.harness.analysis.material import Run
from epcross.harness.errors import InputError
from epcross.harness.record import Record
from epcross.harness.terms import Domain, Phase, Regime, RowFormat, Status
from epcross.kernels.onesided.crossover import Setting, machine_name

SENTINEL, FENCE = "onesided_sentinel", "onesided_fence"
_ALIKE = (
    *("model", "num_experts", "num_slots", "top_k", "routing", "routing_params", "placement", "combine_format"),
    *("options", "measure_hash", "sharing"),
)
"""What rows of one setting must agree in, lest the limit be that of a mixture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One setting, what was measured there, and what follows."""

    setting: Setting
    medians_us: Mapping[int, tuple[float, float]]  # tokens -> (Sentinel, Fence)
    sentinel_up_to: int
    source: str  # the runs, and the kernels they were of

    @property
    def open_ended(self) -> bool:
        """Whether Sentinel was still ahead at the largest count: more tokens may be its own, too."""
        return self.sentinel_up_to == max(self.medians_us)


def choices(runs: Sequence[Run]) -> list[Choice]:
    """A choice for each setting in which both protocols have steady, ok and unflagged round trips.

    Raises:
        InputError: there is none, a run does not know its GPU, or rows of one setting differ in what must be alike.
    """
    groups: dict[Setting, list[Record]] = defaultdict(list)
    for run in runs:
        for row in run.records:
            if row.backend in (SENTINEL, FENCE) and _counts(row):
                groups[_setting(run, row)].append(row)
    found = [_choice(setting, rows) for setting, rows in groups.items() if len({row.backend for row in rows}) == 2]
    chosen = [one for one in found if one is not None]
    if not chosen:
        raise InputError(
            f"these runs hold no token count at which both {SENTINEL} and {FENCE} have steady round trips that are ok "
            "and without flags; measure both, such as with sweep=onesided_nvlink or sweep=onesided_h200"
        )
    return sorted(chosen, key=lambda one: str(one.setting))


def _counts(row: Record) -> bool:
    return (
        row.phase == Phase.ROUND_TRIP
        and row.regime == Regime.STEADY
        and row.status == Status.OK
        and not headline_flags(row)
        and row.tokens_min * row.ep_size == row.tokens_total
    )


def _setting(run: Run, row: Record) -> Setting:
    names = {str(gpu["name"]) for gpu in run.directory.environment.get("gpus") or ()}
    if len(names) != 1:
        raise InputError(f"{run.run_id} was taken on GPUs {sorted(names) or 'that it does not name'}, not on one kind")
    shared = row.ep_size if row.domain == Domain.SHARED_GPU else 1
    return Setting(
        machine=machine_name(names.pop(), str(row.transport), shared),
        ep_size=row.ep_size,
        hidden=row.hidden,
        dispatch_format=RowFormat(row.dispatch_format),
    )


def _choice(setting: Setting, rows: Sequence[Record]) -> Choice | None:
    if mixed := [name for name in _ALIKE if len({getattr(row, name) for row in rows}) > 1]:
        raise InputError(
            f"rows of EP {setting.ep_size}, hidden {setting.hidden}, {setting.dispatch_format} on {setting.machine} "
            f"differ in {', '.join(mixed)}; give runs that agree in these"
        )
    times: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        assert row.latency_us is not None
        times[row.tokens_per_rank][row.backend].append(row.latency_us)
    medians = {
        tokens: (statistics.median(both[SENTINEL]), statistics.median(both[FENCE]))
        for tokens, both in sorted(times.items())
        if len(both) == 2
    }
    if not medians:
        return None
    used = [row for row in rows if row.tokens_per_rank in medians]
    kernels = sorted({str(row.backend_version) for row in used})
    return Choice(
        setting=setting,
        medians_us=medians,
        sentinel_up_to=limit_of(medians),
        source=f"{', '.join(sorted({row.run_id for row in used}))}; kernels {', '.join(kernels)}",
    )


def limit_of(medians_us: Mapping[int, tuple[float, float]]) -> int:
    """The count, or 0, up to which Sentinel is taken at the least cost. The smallest of several that cost the same."""
    gains = {tokens: math.log(fence / sentinel) for tokens, (sentinel, fence) in sorted(medians_us.items())}
    best, total, limit = 0.0, 0.0, 0
    for tokens, gain in gains.items():
        total += gain
        if total > best:
            best, limit = total, tokens
    return limit
