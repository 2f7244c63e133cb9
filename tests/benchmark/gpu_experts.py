"""Tiles of `gather_gemm`, verified and timed on one GPU, beside the other expert stages: what its defaults rest on.

    python tests/benchmark/gpu_experts.py [--out FILE] [--formats fp8,bf16] [--points 8x1,fp8:2x512x64,...]
        [--ours] [--limit-s 200]

A point is EPxTOKENS or EPxTOKENSxEXPERTS: one rank's slice of DeepSeek-V3 (256 experts, or so many, over EP ranks,
top 8, uniform routing) with TOKENS tokens on each rank; `fp8:` or `bf16:` before it keeps it from the other format. A
graph rotates two sets of rows and as many copies of the weights as the L2 asks for; each line of FILE (JSON,
written as it comes) has the median of seven replays, whether all tokens passed the oracle before and after, and what of
the memory's bandwidth the weights took. For choosing; what is quoted comes from `epcross run sweep=experts_h200`.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402

from epcross.kernels.experts.compute import ExpertCompute  # noqa: E402
from epcross.kernels.experts.deepgemm import DeepGemm  # noqa: E402
from epcross.kernels.experts.formats import Layout  # noqa: E402
from epcross.kernels.experts.gather.tiles import chosen_tiles  # noqa: E402
from epcross.kernels.experts.gather_gemm import GatherGemm  # noqa: E402
from epcross.kernels.experts.landing import RankMajorLanding  # noqa: E402
from epcross.kernels.experts.torch_grouped import TorchGrouped  # noqa: E402
from epcross.kernels.experts.weights import ExpertWeights, copies_needed, make_weights  # noqa: E402

from tests.benchmark.expert_choices import Tiles, choices  # noqa: E402  # isort: skip
from tests.benchmark.expert_points import Place, Point, l2_bytes, places_of, provenance, room_for  # noqa: E402  # isort: skip

POINTS = ",".join(f"{ep}x{tokens}" for ep in (8, 16, 32, 64) for tokens in (1, 8, 32, 128))


def compile_tiles(place: Place, tiles: Tiles) -> str | None:
    """In a process of its own: Triton's cache then has the kernels that the point is served by. Why not, if they cannot
    be had."""
    shape = replace(place.shape(), capacity_rows=place.ep)
    try:
        weights = ExpertWeights(weight_format=shape.weight_format, copies=(room_for(shape),))
        landing = RankMajorLanding(shape, place.ep, "cuda")
        compute = GatherGemm(**tiles)
        if reason := compute.unsupported(shape, Layout.RANK_MAJOR):
            return reason
        compute.prepare(shape, Layout.RANK_MAJOR, weights)
        compute.run(landing.rows)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.cuda.empty_cache()
    return None


def main() -> None:
    """Read the words and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu-check" / "experts.jsonl")
    parser.add_argument("--formats", default="fp8,bf16")
    parser.add_argument("--points", default=POINTS)
    parser.add_argument("--limit-s", type=float, default=200.0)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--others-only", action="store_true", help="one choice of tiles: the default")
    what.add_argument("--ours", action="store_true", help="no other expert stages")
    words = parser.parse_args()
    began, where = time.monotonic(), provenance()
    places = places_of(words.points, words.formats)
    words.out.parent.mkdir(parents=True, exist_ok=True)
    asked = {} if words.others_only else {place: list(choices(place.shape())) for place in places}
    failed = compiled_ahead(asked)
    with words.out.open("a") as file:

        def put(place: Place, **row: Any) -> None:
            row = {**place.named(), **row}
            file.write(json.dumps({**row, **where}) + "\n")
            file.flush()
            sys.stdout.write(
                f"{place} {row.get('compute')} {row.get('tiles') or ''} {row.get('us') or ''} {row.get('wrong') or ''}"
                f" {row.get('kernels_us', '')}\n"
            )
            sys.stdout.flush()

        sys.stdout.write(f"{sum(map(len, asked.values()))} choices compiled after {time.monotonic() - began:.0f} s\n")
        weights, of = None, None
        for place in places:
            if time.monotonic() - began > words.limit_s:
                put(place, wrong="left out: the time was over")
                continue
            experts = (place.formats, place.slots // place.ep)
            if weights is None or of != experts:
                weights = None
                least = place.shape()
                copies = min(12, copies_needed(least.bytes_per_expert, l2_bytes()))
                weights, of = make_weights(least, seed=1, device="cuda", copies=copies), experts
            point = Point(place, weights, (Layout.RANK_MAJOR,) if words.ours else tuple(Layout))
            for name, layout, tiles, compute in candidates(asked.get(place, []), ours=words.ours):
                about = {"compute": name, "layout": str(layout), "tiles": tiles}
                if (name, tiles) != ("gather_gemm", {}) and time.monotonic() - began > words.limit_s:
                    put(place, **about, wrong="left out: the time was over")
                    continue
                if tiles and (reason := failed.get((place, json.dumps(tiles)))):
                    put(place, **about, wrong=f"does not compile: {reason[:300]}")
                    continue
                if compute.unsupported(point.shape_in(layout), layout) or compute.unavailable():
                    continue
                try:
                    found = point.measure(compute, layout)
                except Exception as error:
                    found = {"wrong": f"{type(error).__name__}: {str(error)[:300]}"}
                put(place, **about, hit=point.hit, copies=len(point.weights.copies), **found)


def compiled_ahead(asked: dict[Place, list[Tiles]]) -> dict[tuple[Place, str], str]:
    """Compile in as many processes as there are cores for, once where points share kernels; which choices cannot be
    had, and why."""
    workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    waiting: dict[Any, Future[str | None]] = {}
    which: dict[tuple[Place, str], Any] = {}
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for place, found in asked.items():
            shape = place.shape()
            for tiles in ({}, *found):
                key = (place.formats, shape.num_local_experts, chosen_tiles(shape, tiles, specialised=True))
                which[place, json.dumps(tiles)] = key
                if key not in waiting:
                    waiting[key] = pool.submit(compile_tiles, place, tiles)
    return {each: reason for each, key in which.items() if (reason := waiting[key].result())}


def candidates(found: list[Tiles], *, ours: bool) -> list[tuple[str, Layout, Tiles | None, ExpertCompute]]:
    """The default first, then others' stages unless only `ours` are wanted, then choices of tiles."""
    listed: list[tuple[str, Layout, Tiles | None, ExpertCompute]] = [
        ("gather_gemm", Layout.RANK_MAJOR, {}, GatherGemm())
    ]
    if not ours:
        listed += [
            ("deepgemm masked", Layout.RANK_MAJOR, None, DeepGemm("masked")),
            ("deepgemm", Layout.EXPERT_MAJOR, None, DeepGemm()),
            ("torch_grouped", Layout.RANK_MAJOR, None, TorchGrouped()),
        ]
    if not ours and not found:  # twice to six times as long as masked
        listed.append(("deepgemm contiguous", Layout.RANK_MAJOR, None, DeepGemm("contiguous")))
    return listed + [("gather_gemm", Layout.RANK_MAJOR, tiles, GatherGemm(**tiles)) for tiles in found]


if __name__ == "__main__":
    main()
