"""What `gpu_experts.py` measures expert stages at: a rank's slice of a model, its rows and its weights."""

import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tests._experts import hidden_states, random_ids

from epcross.kernels.experts import oracle
from epcross.kernels.experts.compute import ExpertCompute
from epcross.kernels.experts.deepgemm import MASKED_ROWS_MULTIPLE
from epcross.kernels.experts.formats import ExpertShape, Layout, WeightFormat
from epcross.kernels.experts.landing import ExpertMajorLanding, RankMajorLanding
from epcross.kernels.experts.quantise import quantise_fp8_rows
from epcross.kernels.experts.weights import ExpertWeights, WeightCopy, copies_needed
from epcross.kernels.formats import RowFormat

ROOT = Path(__file__).resolve().parents[2]
TOP_K, HIDDEN, INTERMEDIATE = 8, 7168, 2048
FORMATS = {"fp8": (RowFormat.FP8, WeightFormat.FP8), "bf16": (RowFormat.BF16, WeightFormat.BF16)}
GRAPH_US, BYTES_PER_US = 6000, 4.3e6  # a graph lasts about this long, if weights are all that counts


@dataclass(frozen=True)
class Place:
    """A point, as typed."""

    ep: int
    tokens: int
    slots: int
    formats: str

    def shape(self) -> ExpertShape:
        """Of a rank's slice there."""
        rows, weights = FORMATS[self.formats]
        return ExpertShape(
            num_local_experts=self.slots // self.ep, first_slot=0, top_k=TOP_K, hidden=HIDDEN,
            intermediate=INTERMEDIATE, row_format=rows, weight_format=weights, capacity_rows=self.ep * self.tokens,
            expected_rows_per_expert=max(1, self.ep * self.tokens * TOP_K // self.slots),
        )  # fmt: skip

    def __str__(self) -> str:
        return " ".join(f"{name.upper() if name == 'ep' else name} {value}" for name, value in self.named().items())

    def named(self) -> dict[str, Any]:
        """For a line of the file."""
        experts = {} if self.slots == 256 else {"experts": self.slots}
        return {"formats": self.formats, "ep": self.ep, "tokens": self.tokens, **experts}


def places_of(points: str, formats: str) -> list[Place]:
    """Those of each format together, in the order typed."""
    found = []
    for wanted in formats.split(","):
        for point in points.split(","):
            only, _, sizes = point.rpartition(":")
            ep, tokens, slots = (*map(int, sizes.split("x")), 256)[:3]
            if only in ("", wanted):
                found.append(Place(ep, tokens, slots, wanted))
    return found


def provenance() -> dict[str, str]:
    """Where and from what a line of the file was measured."""
    ran = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": ran.stdout.strip() or "unknown",
        "command": " ".join(sys.argv),
    }  # fmt: skip


def room_for(shape: ExpertShape) -> WeightCopy:
    """Memory of weights, for kernels that will find no rows."""
    experts, fp8 = shape.num_local_experts, shape.weight_format is WeightFormat.FP8
    element = torch.float8_e4m3fn if fp8 else torch.bfloat16
    sizes = (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    values = [torch.empty((experts, *size), dtype=element, device="cuda") for size in sizes]
    scales = [torch.ones((experts, size[0] // 128, size[1] // 128), device="cuda") if fp8 else None for size in sizes]
    return WeightCopy(gate_up=values[0], down=values[1], gate_up_scales=scales[0], down_scales=scales[1])


class Point:
    """Rows, weights and what must come out, made once for all candidates."""

    def __init__(self, place: Place, weights: ExpertWeights, layouts: tuple[Layout, ...]) -> None:
        self.shape = place.shape()
        ep, tokens = place.ep, place.tokens
        generator = torch.Generator("cuda").manual_seed(ep * tokens)
        self.landings = {layout: [] for layout in layouts}
        self.hit = []
        for _ in range(2):
            ids = random_ids(ep * tokens, TOP_K, place.slots, generator, "cuda").view(ep, tokens, TOP_K)
            values = hidden_states(ep * tokens, HIDDEN, generator, "cuda")
            factors = torch.rand((ep, tokens, TOP_K), generator=generator, device="cuda")
            rows, scales = values.view(torch.uint8).view(ep, tokens, -1), [None] * ep
            if place.formats == "fp8":
                codes, scales = quantise_fp8_rows(values)
                rows, scales = codes.view(torch.uint8).view(ep, tokens, -1), scales.view(ep, tokens, -1)
            for layout in layouts:
                made = RankMajorLanding if layout is Layout.RANK_MAJOR else ExpertMajorLanding
                landing = made(self.shape_in(layout), ep, "cuda")
                for source in range(ep):
                    landing.land(source, rows[source], scales[source], ids[source], factors[source])
                self.landings[layout].append(landing)
            local = ids[(ids >= 0) & (ids < self.shape.num_local_experts)]
            self.hit.append(len(local.unique()))
        needed = copies_needed(min(self.hit) * self.shape.bytes_per_expert, l2_bytes())
        self.weights = ExpertWeights(weight_format=weights.weight_format, copies=weights.copies[:needed])
        self.bytes = statistics.mean(self.hit) * self.shape.bytes_per_expert
        self._wanted: dict[Any, Any] = {}

    def shape_in(self, layout: Layout) -> ExpertShape:
        """Rows by expert get room for whole tiles, as engines give them."""
        if layout is Layout.RANK_MAJOR:
            return self.shape
        room = -(-self.shape.capacity_rows // MASKED_ROWS_MULTIPLE) * MASKED_ROWS_MULTIPLE
        return replace(self.shape, capacity_rows=room)

    def wrong(self, compute: ExpertCompute, layout: Layout) -> str | None:
        """What the oracle says of both sets."""
        arithmetic = compute.arithmetic(self.shape)
        for number, landing in enumerate(self.landings[layout]):
            key = (layout, number, arithmetic)
            if key not in self._wanted:
                self._wanted[key] = oracle.expected_of_rows(
                    self.shape, self.weights.copies[0], landing.rows, arithmetic
                )
            place, wanted = self._wanted[key]
            judged = oracle.judge(landing.rows.out.flatten(0, -2)[place], wanted)
            if not judged.ok:
                return judged.sentence()
        return None

    def measure(self, compute: ExpertCompute, layout: Layout) -> dict[str, Any]:
        """Verified before and after, timed between."""
        landings = self.landings[layout]
        compute.prepare(self.shape_in(layout), layout, self.weights)
        runs = 2 * len(self.weights.copies)
        torch.cuda.synchronize()  # what was prepared is filled, before another stream reads it
        with torch.cuda.stream(torch.cuda.Stream()):
            for number in range(runs):
                compute.run(landings[number % 2].rows, number)
            torch.cuda.synchronize()
            if reason := self.wrong(compute, layout):
                return {"wrong": reason}
            runs *= max(1, round(min(100, GRAPH_US * BYTES_PER_US / self.bytes) / runs))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for number in range(runs):
                    compute.run(landings[number % 2].rows, number // 2)
            for landing in landings:
                landing.rows.out.fill_(float("nan"))
            times = [us / runs for us in replays_us(graph)]
            reason = self.wrong(compute, layout)
        told = compute.describe()
        spans = kernels_us(lambda: [compute.run(landings[n % 2].rows, n) for n in range(20)], 20)
        del graph
        compute.release()
        us = statistics.median(times)
        return {
            "us": us, "us_min": min(times), "us_max": max(times), "weights_gbps": self.bytes / us / 1e3,
            "kernels_us": spans, "version": told.version, "options": dict(told.options),
            **({"wrong": reason} if reason else {}),
        }  # fmt: skip


def replays_us(graph: torch.cuda.CUDAGraph) -> list[float]:
    """What each of seven replays takes, after three."""
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return times[3:]


def kernels_us(work: Any, times: int) -> dict[str, float]:
    """Mean time of each kernel by itself, as the profiler sees it; the weights stay warm or cold as in the chain.

    A kernel that runs several times in a layer, as a library's product does, has a number for each time.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        work()
        torch.cuda.synchronize()
    found = [event for event in (seen.events() or []) if event.device_time_total > 0]
    found.sort(key=lambda event: event.time_range.start)
    spans: dict[str, list[float]] = {}
    for event in found:
        name = event.name.removeprefix("void ").split("<")[0].split("(")[0][:60]
        spans.setdefault(name, []).append(event.device_time_total)
    told = {}
    for name, each in spans.items():
        of_layer = max(1, round(len(each) / times))
        for number in range(of_layer):
            mine = each[number::of_layer]
            told[name if of_layer == 1 else f"{name} {number + 1}"] = round(sum(mine) / len(mine), 2)
    return told


def l2_bytes() -> int:
    return int(torch.cuda.get_device_properties(0).L2_cache_size)
