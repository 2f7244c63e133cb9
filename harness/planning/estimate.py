"""What a plan needs, in closed form: time, memory of a rank, bytes of /dev/shm. Rough on purpose; nothing is run.

job  = launches x (backends x group start + units)
unit = prepare + seeds x (checks before and after + chains x series)
series = (warm-up + timed pairs) x pair
pair = (fixed cost + rows over the copy rate), both stretched where ranks outnumber cores
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from epcross.harness.backends import answers, loader
from epcross.harness.backends.base import Backend
from epcross.harness.planning.plan import Job, Plan
from epcross.harness.planning.schema import BackendConfig
from epcross.harness.point import Point, Timing, processes
from epcross.harness.terms import BackendKind, Domain, Phase, Regime, RowFormat, WeightFormat
from epcross.kernels.formats import row_size

GROUP_START_S = 0.6
"""Starting one rank's worker: interpreter, numpy, mapping of memory. Two ranks on two cores of a 2020s server."""

PREPARE_S = 0.05
"""Untimed work of a unit that does not grow with rows."""

CHECK_GBPS = 1.0
"""Rows generated and checked, in 10^9 bytes per second; what the harness promises at worst."""

PAIR_FIXED_US = 10.0
"""A dispatch and combine of one small row between two ranks through shared memory."""

SWITCH_US = 50.0
"""A wait that ends by a change of process, paid where ranks outnumber cores."""

COPY_GBPS = 3.0
"""Rate at which one core copies rows to another's landing buffer, in 10^9 bytes per second."""

PROCESS_BYTES = 150 * 10**6
"""A worker with numpy and scipy, without rows."""


GPU_START_S = 12.0
"""Starting one worker on a GPU: torch, the CUDA context, loading kernels. Cold, on a server of the 2020s."""

GPU_PREPARE_S = 0.5
"""Untimed work of a unit on a GPU: workspaces, mapping, capturing graphs."""

GPU_CHECK_GBPS = 1.5
"""Rows that the host makes and the GPU checks, in 10^9 bytes per second: making and copying them is what takes time."""

GPU_COPY_GBPS = {Domain.NVLINK: 300.0, Domain.SHARED_GPU: 1500.0}
"""Rate at which rows move: of one rank over NVLink, of all ranks of one GPU together."""


GPU_WEIGHT_GBPS = 3000.0
"""Rate at which a layer reads its experts' weights, what it computes included."""

WEIGHTS_MADE_GBPS = 10.0
"""Rate at which a rank's weights are made and brought into the layout of its library, before anything is timed."""

ORACLE_EXPERT_S = 0.005
"""What one expert costs where its outputs are judged, the rounds of a seed together: its weights in float64."""

ORACLE_SELECTION_S = 6e-6
"""What each of its tokens costs in one judged round: two products in float64, and as many of squares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one job needs. Time is a sum; bytes are the largest at any moment, for backends take turns."""

    ep_size: int
    units: int
    rows: int  # result rows of points that are tried
    time_s: float
    rank_memory_bytes: int  # of the fullest rank, workspace included
    shm_bytes: int  # of the host, all ranks together

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def needs(plan: Plan, cores: int | None = None) -> tuple[Need, ...]:
    """The need of each job of the plan, for a host with `cores` usable cores (this host's by default)."""
    cores = cores or usable_cores()
    backends: dict[tuple[Any, ...], Backend] = {}
    found = tuple(job_need(job, plan, cores, backends) for job in plan.jobs)
    if plan.soak is None:
        return found
    units = sum(need.units for need in found)
    return tuple(replace(need, time_s=plan.soak.seconds * need.units / units) for need in found)


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def free_shm_bytes(folder: Path = Path("/dev/shm")) -> int | None:
    """Free bytes where shared-memory segments live; None where there is no such folder."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def pair_us(point: Point, cores: int) -> float:
    """Expected time of one dispatch and combine, in microseconds."""
    if point.domain in GPU_COPY_GBPS:
        if point.kind is BackendKind.EXPERTS:
            return PAIR_FIXED_US + _experts_us(point)
        tokens = sum(point.tokens) if point.domain is Domain.SHARED_GPU else max(point.tokens)
        moved = tokens * min(point.model.top_k, point.ep_size) * (_dispatch_bytes(point) + _combine_bytes(point))
        return PAIR_FIXED_US + moved / (GPU_COPY_GBPS[point.domain] * 1e3) + _experts_us(point)
    crowd = max(1.0, point.ep_size / cores)
    copies = min(point.model.top_k, point.ep_size)
    copied_bytes = max(point.tokens) * copies * (_dispatch_bytes(point) + _combine_bytes(point))
    switches_us = SWITCH_US * point.ep_size if crowd > 1.0 else 0.0
    return (PAIR_FIXED_US + copied_bytes / (COPY_GBPS * 1e3)) * crowd + switches_us


def series_s(point: Point, timing: Timing, cores: int) -> float:
    """Expected time of one timed series, warm-up included, in seconds."""
    pair = pair_us(point, cores)
    if point.regime is Regime.STEADY:
        pairs = min(max(timing.chain_ms * 1e3 / pair, timing.min_pairs), timing.max_pairs)
    else:
        pairs = timing.iterations
    return max(timing.warmup_pairs * pair * 1e-6, timing.warmup_ms * 1e-3) + pairs * pair * 1e-6


def checked_bytes(point: Point, timing: Timing) -> int:
    """Bytes generated and checked for one seed, all ranks: inputs of every set, and two passes before and after."""
    tokens = sum(point.tokens)
    sent = tokens * _dispatch_bytes(point)
    received = sent * min(point.model.top_k, point.ep_size)
    combined = tokens * _combine_bytes(point)
    if point.kind is BackendKind.EXPERTS:  # rows that come to one rank, and what it makes of them
        return (timing.sets + 4) * (received + received) // point.ep_size
    return timing.sets * sent + 4 * (sent + received + combined)


def unit_s(point: Point, timing: Timing, cores: int) -> float:
    """Expected time of one unit, in seconds; never more than its wall limit."""
    on_gpu = point.domain in GPU_COPY_GBPS
    checks = checked_bytes(point, timing) / ((GPU_CHECK_GBPS if on_gpu else CHECK_GBPS) * 1e9)
    series = series_s(point, timing, cores) * (2 if Phase.LAYER_COMM in point.phases else 1)  # again, in place
    expected = (GPU_PREPARE_S if on_gpu else PREPARE_S) + timing.seeds * (checks + timing.chains * series)
    if point.weight_format is not None:
        expected += _weight_bytes(point) / (WEIGHTS_MADE_GBPS * 1e9) + timing.seeds * _oracle_s(point, timing)
    return min(expected, timing.wall_limit_s)


def _oracle_s(point: Point, timing: Timing) -> float:
    """What must come out of all rounds of one seed, for the tokens that one process judges."""
    selections = sum(point.tokens) * point.model.top_k
    slots = point.placement.num_slots
    if point.kind is BackendKind.EXPERTS:
        selections, slots = selections // point.ep_size, point.experts_per_rank
    elif point.domain is Domain.NVLINK:
        selections //= point.ep_size
    rounds = timing.sets + 2
    return min(rounds * selections, slots) * ORACLE_EXPERT_S + rounds * selections * ORACLE_SELECTION_S


def inputs_bytes(point: Point, timing: Timing) -> int:
    """Memory of all ranks' inputs of one seed, which processes of one host hold at the same time."""
    return timing.sets * sum(point.tokens) * (_dispatch_bytes(point) + 8 * point.model.top_k)


def rank_bytes(point: Point, timing: Timing, workspace_bytes: int) -> int:
    """Memory of the fullest rank: the process, its inputs, what a check holds, and the workspace."""
    ids_and_weights = 8 * point.model.top_k
    inputs = timing.sets * max(point.tokens) * (_dispatch_bytes(point) + ids_and_weights)
    # at worst every token comes to one rank
    received = sum(point.tokens) * (_dispatch_bytes(point) + _combine_bytes(point) + ids_and_weights)
    return PROCESS_BYTES + inputs + received + workspace_bytes


def _experts_us(point: Point) -> float:
    """Of a layer: the weights of as many experts as tokens can choose, read once, by each rank that shares a GPU; of an
    expert stage by the one rank that there is."""
    if point.weight_format is None:
        return 0.0
    chosen = min(1.0, sum(point.tokens) * point.model.top_k / point.placement.num_slots)
    alone = point.kind is BackendKind.EXPERTS or point.domain is not Domain.SHARED_GPU
    sharers = 1 if alone else point.ep_size
    return sharers * chosen * _weight_bytes(point) / (GPU_WEIGHT_GBPS * 1e3)


def _weight_bytes(point: Point) -> int:
    """Of one rank."""
    values = 3 * point.model.hidden * point.model.intermediate * point.experts_per_rank
    half_bytes = {WeightFormat.BF16: 4, WeightFormat.FP8: 2, WeightFormat.FP4: 1}
    return 0 if point.weight_format is None else values * half_bytes[point.weight_format] // 2


def _dispatch_bytes(point: Point) -> int:
    return row_size(point.dispatch_format, point.model.hidden).padded_bytes


def _combine_bytes(point: Point) -> int:
    # experts return BF16 until a backend quantises its combine
    return row_size(RowFormat.BF16, point.model.hidden).padded_bytes


def job_need(job: Job, plan: Plan, cores: int, backends: dict[tuple[Any, ...], Backend]) -> Need:
    """The need of one job, or of a part of one, on a host with `cores` cores; `backends` are those made before."""
    timing = plan.timing
    workspaces = {point: _workspace_bytes(point, plan.backends, backends) for point in job.points}
    on_gpu = job.domain in GPU_COPY_GBPS
    group_s = (GPU_START_S if on_gpu else GROUP_START_S) * max(1.0, processes(job.ep_size, job.sharing) / cores)
    once_s = len(job.backends) * group_s + sum(unit_s(point, timing, cores) for point in job.points)
    return Need(
        ep_size=job.ep_size,
        units=len(job.points) * timing.launches,
        rows=sum(len(point.phases) for point in job.points) * timing.repeats,
        time_s=timing.launches * once_s,
        rank_memory_bytes=max((rank_bytes(p, timing, size) for p, size in workspaces.items()), default=0),
        shm_bytes=max((job.ep_size * size for p, size in workspaces.items() if p.domain is Domain.CPU), default=0),
    )


def _workspace_bytes(
    point: Point, configs: Mapping[str, BackendConfig], backends: dict[tuple[Any, ...], Backend]
) -> int:
    key = (point.backend, point.options, point.compute, point.compute_options)
    if key not in backends:
        backends[key] = loader.for_point(configs[point.backend], point)
    return answers.workspace_bytes(backends[key], point)
