"""What the length of a CUDA graph does to NCCL's collectives: microseconds of a pair in graphs of 5 to 400 pairs.

    python -m torch.distributed.run --nproc_per_node 2 tests/benchmark/gpu_graphs.py [--tokens 8] [--json FILE]

A pair is an all-gather and a reduce-scatter of TOKENS rows of hidden 7168 in BF16, or two all-to-alls of as many. Each
line is one length, with the first kernels as the profiler saw them, which tells time on the GPU from time between
kernels. `launch us` is what the host takes to enqueue a pair while the GPU is held, so that nothing keeps it waiting,
and `held us` the period of a single graph that was enqueued whole before it ran: if a chain takes as long as its
launches, and longer than that, it is the host that is timed. harness/measuring/cuda_steady.py rests on it: how many
pairs a steady graph holds, and what it does about a slow host.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HIDDEN = 7168
LENGTHS = (5, 20, 50, 100, 200, 400)
SERIES_US = 20_000.0
SEEN = 6
HOLD_CYCLES = 60_000_000  # some 30 ms: longer than the host takes for 400 pairs


def pairs_of(tokens: int, ranks: int) -> dict[str, Callable[[], None]]:
    """What is captured, by name."""

    def rows(count: int) -> torch.Tensor:
        return torch.zeros(count, HIDDEN, dtype=torch.bfloat16, device="cuda")

    own, all_of_them, partials, out = rows(tokens), rows(tokens * ranks), rows(tokens * ranks), rows(tokens)
    there, back = rows(tokens * ranks), rows(tokens * ranks)

    def gather_scatter() -> None:
        dist.all_gather_into_tensor(all_of_them, own)
        dist.reduce_scatter_tensor(out, partials)

    def all_to_all() -> None:
        dist.all_to_all_single(there, back)
        dist.all_to_all_single(back, there)

    return {"all-gather, reduce-scatter": gather_scatter, "two all-to-alls": all_to_all}


def line_up() -> None:
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def period(pair: Callable[[], None], length: int) -> dict[str, Any]:
    """Median of five series of at least `SERIES_US`, after a fill."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(length):
            pair()
    line_up()
    graph.replay()
    times, host = [], []
    for _ in range(5):
        line_up()
        replays = max(2, round(SERIES_US / (30.0 * length)))
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        started = time.perf_counter()
        for _ in range(replays):
            graph.replay()
        host.append((time.perf_counter() - started) * 1e6 / replays / length)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / replays / length)
    launches, held = [], []
    for _ in range(5):
        line_up()
        torch.cuda._sleep(HOLD_CYCLES)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        started = time.perf_counter()
        graph.replay()
        launches.append((time.perf_counter() - started) * 1e6 / length)
        end.record()
        end.synchronize()
        held.append(begin.elapsed_time(end) * 1e3 / length)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        graph.replay()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or []
        if "CUDA" in str(event.device_type)
    )[:SEEN]
    line_up()
    return {
        "pairs": length,
        "us": round(statistics.median(times), 2),
        "host_us": round(statistics.median(host), 2),
        "launch_us": round(statistics.median(launches), 2),
        "held_us": round(statistics.median(held), 2),
        "kernels_us": [round(end - begin, 1) for begin, end in spans],
        "gaps_us": [round(after[0] - before[1], 1) for before, after in pairwise(spans)],
    }


def main() -> None:
    """Measure every length; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8, help="of each rank")
    parser.add_argument("--json", type=Path, help="store everything there, too")
    words = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    found: dict[str, list[dict[str, Any]]] = {}
    for name, pair in pairs_of(words.tokens, dist.get_world_size()).items():
        for _ in range(5):
            pair()
        if dist.get_rank() == 0:
            sys.stdout.write(f"{name}, {dist.get_world_size()} ranks, {words.tokens} tokens\n")
            sys.stdout.write(
                f"{'pairs':>6}{'us':>9}{'host us':>9}{'launch us':>11}{'held us':>9}  kernels, gaps between them (us)\n"
            )
        for length in LENGTHS:
            line = period(pair, length)
            found.setdefault(name, []).append(line)
            if dist.get_rank() == 0:
                times = f"{line['us']:9.2f}{line['host_us']:9.2f}{line['launch_us']:11.2f}{line['held_us']:9.2f}"
                sys.stdout.write(f"{line['pairs']:6}{times}  {line['kernels_us']} {line['gaps_us']}\n")
                sys.stdout.flush()
                if words.json:
                    words.json.write_text(json.dumps(found, indent=1) + "\n")
    line_up()
    os._exit(0)  # graphs hold NCCL's buffers, and taking both down in order is not what is measured


if __name__ == "__main__":
    main()
