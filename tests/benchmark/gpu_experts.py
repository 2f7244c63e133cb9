"""Tiles of `gather_gemm`, verified and timed on one GPU, beside the other expert stages: what its defaults rest on.

    python tests/benchmark/gpu_experts.py [--out FILE] [--formats fp8,bf16] [--points 8x1,8x32,...] [--limit-s 200]

A point is EPxTOKENS: one rank's slice of DeepSeek-V3 (256 experts over EP ranks, top 8, uniform routing) with TOKENS
tokens on each rank. GEMM1 and GEMM2 are tuned one after the other: every choice for the one with the default of the
other. A graph rotates two sets of rows and as many copies of the weights as the L2 asks for; each line of FILE (JSON,
written as it comes) has the median of seven replays, whether all tokens passed the oracle before and after, and what of
the memory's bandwidth the weights took. For choosing; what is quoted comes from `epcross run sweep=experts_h200`.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402

from epcross.kernels.experts import oracle  # noqa: E402
from epcross.kernels.experts.compute import ExpertCompute  # noqa: E402
from epcross.kernels.experts.deepgemm import MASKED_ROWS_MULTIPLE, DeepGemm  # noqa: E402
from epcross.kernels.experts.formats import ExpertShape, Layout, WeightFormat  # noqa: E402
from epcross.kernels.experts.gather_gemm import GatherGemm  # noqa: E402
from epcross.kernels.experts.landing import ExpertMajorLanding, RankMajorLanding  # noqa: E402
from epcross.kernels.experts.quantise import quantise_fp8_rows  # noqa: E402
from epcross.kernels.experts.torch_grouped import TorchGrouped  # noqa: E402
from epcross.kernels.experts.weights import ExpertWeights, WeightCopy, copies_needed, make_weights  # noqa: E402
from epcross.kernels.formats import RowFormat  # noqa: E402

from tests._experts import hidden_states, random_ids  # noqa: E402  # isort: skip
from tests.benchmark.expert_choices import Tiles, choices  # noqa: E402  # isort: skip

SLOTS, TOP_K, HIDDEN, INTERMEDIATE = 256, 8, 7168, 2048
POINTS = ",".join(f"{ep}x{tokens}" for ep in (8, 16, 32, 64) for tokens in (1, 8, 32, 128))
FORMATS = {"fp8": (RowFormat.FP8, WeightFormat.FP8), "bf16": (RowFormat.BF16, WeightFormat.BF16)}
GRAPH_US, BYTES_PER_US = 6000, 4.3e6  # a graph lasts about this long, if weights are all that counts


def shape_of(ep: int, tokens: int, formats: str) -> ExpertShape:
    rows, weights = FORMATS[formats]
    return ExpertShape(
        num_local_experts=SLOTS // ep, first_slot=0, top_k=TOP_K, hidden=HIDDEN, intermediate=INTERMEDIATE,
        row_format=rows, weight_format=weights, capacity_rows=ep * tokens,
        expected_rows_per_expert=max(1, ep * tokens * TOP_K // SLOTS),
    )  # fmt: skip


def compile_tiles(formats: str, pairs: int, tiles: Tiles) -> str | None:
    """In a process of its own: Triton's cache then has the kernels that an expert with so many pairs is served by. Why
    not, if they cannot be had."""
    shape = replace(shape_of(128, 1, formats), expected_rows_per_expert=pairs)
    try:
        weights = ExpertWeights(weight_format=shape.weight_format, copies=(_room(shape),))
        landing = RankMajorLanding(shape, 128, "cuda")
        compute = GatherGemm(**tiles)
        compute.prepare(shape, Layout.RANK_MAJOR, weights)
        compute.run(landing.rows)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _room(shape: ExpertShape) -> WeightCopy:
    """Memory of weights, for kernels that will find no rows."""
    experts, fp8 = shape.num_local_experts, shape.weight_format is WeightFormat.FP8
    element = torch.float8_e4m3fn if fp8 else torch.bfloat16
    sizes = (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    values = [torch.empty((experts, *size), dtype=element, device="cuda") for size in sizes]
    scales = [torch.ones((experts, size[0] // 128, size[1] // 128), device="cuda") if fp8 else None for size in sizes]
    return WeightCopy(gate_up=values[0], down=values[1], gate_up_scales=scales[0], down_scales=scales[1])


class Point:
    """Rows, weights and what must come out, made once for all candidates."""

    def __init__(self, ep: int, tokens: int, formats: str, weights: ExpertWeights) -> None:
        self.shape = shape_of(ep, tokens, formats)
        generator = torch.Generator("cuda").manual_seed(ep * tokens)
        self.landings = {Layout.RANK_MAJOR: [], Layout.EXPERT_MAJOR: []}
        self.hit = []
        for _ in range(2):
            ids = random_ids(ep * tokens, TOP_K, SLOTS, generator, "cuda").view(ep, tokens, TOP_K)
            values = hidden_states(ep * tokens, HIDDEN, generator, "cuda")
            factors = torch.rand((ep, tokens, TOP_K), generator=generator, device="cuda")
            rows, scales = values.view(torch.uint8).view(ep, tokens, -1), [None] * ep
            if formats == "fp8":
                codes, scales = quantise_fp8_rows(values)
                rows, scales = codes.view(torch.uint8).view(ep, tokens, -1), scales.view(ep, tokens, -1)
            for layout, made in ((Layout.RANK_MAJOR, RankMajorLanding), (Layout.EXPERT_MAJOR, ExpertMajorLanding)):
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
            times = []
            for replay in range(10):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                if replay >= 3:
                    times.append(begin.elapsed_time(end) * 1e3 / runs)
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


def provenance() -> dict[str, str]:
    ran = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": ran.stdout.strip() or "unknown",
        "command": " ".join(sys.argv),
    }  # fmt: skip


def main() -> None:
    """Read the words and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu-check" / "experts.jsonl")
    parser.add_argument("--formats", default="fp8,bf16")
    parser.add_argument("--points", default=POINTS)
    parser.add_argument("--limit-s", type=float, default=200.0)
    parser.add_argument("--others-only", action="store_true", help="one choice of tiles: the default")
    words = parser.parse_args()
    began, where = time.monotonic(), provenance()
    points = [tuple(map(int, point.split("x"))) for point in words.points.split(",")]
    words.out.parent.mkdir(parents=True, exist_ok=True)
    asked: dict[tuple[str, int, str], Tiles] = {}
    for formats in words.formats.split(","):
        for ep, tokens in points:
            shape = shape_of(ep, tokens, formats)
            for tiles in [] if words.others_only else choices(shape):
                asked[formats, shape.expected_rows_per_expert, json.dumps(tiles)] = tiles
    failed: dict[tuple[str, int, str], str] = {}
    workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {key: pool.submit(compile_tiles, *key[:2], tiles) for key, tiles in asked.items()}
        for key, each in waiting.items():
            if reason := each.result():
                failed[key] = reason
    with words.out.open("a") as file:

        def put(**row: Any) -> None:
            file.write(json.dumps({**row, **where}) + "\n")
            file.flush()
            sys.stdout.write(
                f"{row.get('formats')} EP {row.get('ep')} T {row.get('tokens')} {row.get('compute')}"
                f" {row.get('tiles') or ''} {row.get('us') or row.get('wrong')}"
                f" {row.get('kernels_us', '') if not row.get('tiles') else ''}\n"
            )
            sys.stdout.flush()

        for key, reason in failed.items():
            put(formats=key[0], compute="gather_gemm", tiles=asked[key], wrong=f"does not compile: {reason[:300]}")
        sys.stdout.write(f"{len(asked)} choices compiled after {time.monotonic() - began:.0f} s\n")
        for formats in words.formats.split(","):
            weights, of = None, 0
            for ep, tokens in points:
                if time.monotonic() - began > words.limit_s:
                    put(formats=formats, ep=ep, tokens=tokens, wrong="left out: the time was over")
                    continue
                if weights is None or of != ep:
                    weights = None
                    least = shape_of(ep, 1, formats)
                    copies = min(12, copies_needed(least.bytes_per_expert, l2_bytes()))
                    weights, of = make_weights(least, seed=1, device="cuda", copies=copies), ep
                point = Point(ep, tokens, formats, weights)
                candidates: list[tuple[str, Layout, Tiles | None, ExpertCompute]] = [
                    ("gather_gemm", Layout.RANK_MAJOR, {}, GatherGemm()),
                    ("deepgemm masked", Layout.RANK_MAJOR, None, DeepGemm("masked")),
                    ("deepgemm", Layout.EXPERT_MAJOR, None, DeepGemm()),
                    ("torch_grouped", Layout.RANK_MAJOR, None, TorchGrouped()),
                ]
                if words.others_only:  # twice to six times as long as masked
                    candidates.append(("deepgemm contiguous", Layout.RANK_MAJOR, None, DeepGemm("contiguous")))
                candidates += [
                    ("gather_gemm", Layout.RANK_MAJOR, tiles, GatherGemm(**tiles))
                    for key, tiles in asked.items()
                    if key[:2] == (formats, point.shape.expected_rows_per_expert) and key not in failed
                ]
                for name, layout, tiles, compute in candidates:
                    if time.monotonic() - began > words.limit_s:
                        put(
                            formats=formats,
                            ep=ep,
                            tokens=tokens,
                            compute=name,
                            tiles=tiles,
                            wrong="left out: the time was over",
                        )
                        continue
                    if (
                        not point.landings[layout]
                        or compute.unsupported(point.shape_in(layout), layout)
                        or compute.unavailable()
                    ):
                        continue
                    about = {"formats": formats, "ep": ep, "tokens": tokens, "compute": name, "layout": str(layout)}
                    try:
                        found = point.measure(compute, layout)
                    except Exception as error:
                        found = {"wrong": f"{type(error).__name__}: {str(error)[:300]}"}
                    put(**about, tiles=tiles, hit=point.hit, copies=len(point.weights.copies), **found)


if __name__ == "__main__":
    main()
