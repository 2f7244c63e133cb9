"""Every variant of the one-sided kernels at every step size: what `VARIANTS` in kernels/onesided/plan.py rests on.

    python tests/benchmark/gpu_variants.py [--ep 2] [--tokens 1,8,32,128,512] [--one-launch]

With two GPUs or more and without --one-launch, one rank on each of `--ep` GPUs; otherwise all ranks in one launch on
one GPU. Prints microseconds of one dispatch and combine, the median of seven replays of a graph of 40 that rotates two
sets of inputs, the slowest rank: for choosing, not for quoting (nothing is verified here; `epcross run` does that).
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from torch import distributed  # noqa: E402
from torch.multiprocessing.spawn import spawn  # noqa: E402

from epcross.kernels.onesided import plan  # noqa: E402

from tests.gpu._rounds import Case, random_ids  # noqa: E402  # isort: skip

PAIRS, REPLAYS, HIDDEN, SLOTS, TOP_K = 40, 7, 7168, 256, 8


def period_us(case: Case, tokens: int, group: Any) -> float:
    """The chained pair's period on this process."""
    with torch.cuda.stream(torch.cuda.Stream()):
        exchange = case.exchange(group=group)
        ranks = exchange.local_ranks
        shape = (ranks, tokens) if ranks > 1 else (tokens,)
        generator = torch.Generator("cuda").manual_seed(exchange.rank)
        sets = []
        for _ in range(2):
            rows = torch.randn((*shape, HIDDEN), device="cuda", generator=generator).to(torch.bfloat16)
            ids = random_ids(case, tokens, generator)[:ranks].view(*shape, TOP_K).contiguous()
            sets.append((rows, ids, torch.rand((*shape, TOP_K), device="cuda"), torch.empty_like(rows)))
        exchange.combine_buffer().normal_()

        def pair(number: int) -> None:
            rows, ids, weights, out = sets[number % 2]
            exchange.dispatch(rows, ids, weights, group_tokens=tokens)
            exchange.combine(out)

        pair(0)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for number in range(PAIRS):
                pair(number)
        times = []
        for _ in range(50):  # clocks and links wake up
            graph.replay()
        for _ in range(REPLAYS):
            if group is not None:
                distributed.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(5):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / PAIRS / 5)
        exchange.check()
        del graph
        exchange.close()
    return statistics.median(times)


def measure(rank: int, ep: int, steps: list[int], one_launch: bool, meeting: str) -> None:
    """All variants, on one process."""
    torch.cuda.set_device(0 if one_launch else rank)
    group = None
    if not one_launch:
        distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ep)
        group = distributed.group.WORLD
    names = list(plan.PER_LANE)
    for protocol in plan.Protocol:
        for tokens in steps:
            case = Case(
                ep_size=ep, capacity=tokens, hidden=HIDDEN, top_k=TOP_K, num_slots=SLOTS, protocol=str(protocol)
            )
            cells = []
            for there in names:
                for back in names:
                    plan.VARIANTS[protocol] = ((None, there, back),)
                    us = period_us(case, tokens, group)
                    if group is not None:
                        everyone: list[Any] = [None] * ep
                        distributed.all_gather_object(everyone, us)
                        us = max(everyone)
                    cells.append(f"{there}/{back} {us:.2f}")
            if rank == 0:
                sys.stdout.write(f"{protocol:8} EP {ep} {tokens:5} tokens: {', '.join(cells)}\n")
                sys.stdout.flush()
    if group is not None:
        distributed.destroy_process_group()


def main() -> None:
    """Read the words and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep", type=int, default=2, help="ranks")
    parser.add_argument("--tokens", default="1,8,32,128,512", help="tokens of each rank, with commas")
    parser.add_argument("--one-launch", action="store_true", help="all ranks on the first GPU")
    words = parser.parse_args()
    steps = [int(step) for step in words.tokens.split(",")]
    if words.one_launch or torch.cuda.device_count() < words.ep:
        measure(0, words.ep, steps, True, "")
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = (words.ep, steps, False, str(Path(folder) / "meeting"))
        spawn(measure, args=arguments, nprocs=words.ep)


if __name__ == "__main__":
    main()
