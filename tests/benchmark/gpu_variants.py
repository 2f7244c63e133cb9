"""Every variant of the one-sided kernels at every step size: what `VARIANTS` in kernels/onesided/plan.py rests on.

    python tests/benchmark/gpu_variants.py [--ep 2] [--tokens 1,8,32,128,512] [--threads 128,256,512] [--one-launch]
                                           [--protocols sentinel,fence] [--variants wide/wide,row/wide]
                                           [--block row=512x1] [--define EPCROSS_WIDE_BLOCKS=4] [--json FILE]

With two GPUs or more and without --one-launch, one rank on each of `--ep` GPUs; otherwise all ranks in one launch on
one GPU. Prints a table for each protocol and token count, a line for each kind of blocks, and stores all of it as JSON
after each: microseconds of one dispatch and combine, the median of seven replays of a graph of 40 that rotates two sets
of inputs, the slowest rank, and what the profiler says that either kernel took on the first. For choosing, not for
quoting (nothing is verified here; `epcross run` is for that). A variant that cannot run has the reason in the JSON and
a dash in the table. --threads are those of `narrow`, `mid` and `wide`. --block, which may be repeated, is one more
line: a variant's threads and how many of its blocks a multiprocessor is given. --define gives the compiler a macro of
csrc/kernels.cu and may be repeated.

    python tests/benchmark/gpu_variants.py --compile sm_90a [--threads ...] [--json FILE]

needs no GPU: registers and spills of each kernel at each number of threads.
"""

import argparse
import contextlib
import functools
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from torch import distributed  # noqa: E402
from torch.multiprocessing.spawn import spawn  # noqa: E402

from epcross.kernels.errors import EpcrossError  # noqa: E402
from epcross.kernels.onesided import jit, plan  # noqa: E402

from tests.gpu._rounds import Case, random_ids  # noqa: E402  # isort: skip

PAIRS, REPLAYS, HIDDEN, SLOTS, TOP_K = 40, 7, 7168, 256, 8


_build, _blocks = jit.build, dict(plan.BLOCKS)
BOUNDED = ("narrow", "mid", "wide")
"""Variants whose blocks have as many threads as `EPCROSS_MAX_THREADS` allows."""
plan_threads = _blocks["wide"].threads
ROW_THREADS = 512
"""At most, of `row`'s blocks: as csrc/kernels.cu bounds it."""


def defines(threads: int, given: Sequence[str] = ()) -> dict[str, str]:
    """Macros for blocks of so many threads, which take as many of a multiprocessor as those of 128; and those given."""
    more = dict(text.split("=", 1) for text in given)
    if threads == plan_threads:
        return more
    blocks = {"EPCROSS_NARROW_BLOCKS": 8, "EPCROSS_WIDE_BLOCKS": 6}  # of 128 threads, as in csrc/kernels.cu
    scaled = {name: str(max(1, count * 128 // threads)) for name, count in blocks.items()}
    return {"EPCROSS_MAX_THREADS": str(threads), **scaled, **more}


def pairs_of(protocol: str, chosen: list[str]) -> list[tuple[str, str]]:
    """Variants of dispatch and of combine; those of `chosen`, or all if that is empty."""
    kernels = plan.kernel_names(plan.Protocol(protocol))
    there, back = ([variant for at, variant in kernels if at is phase] for phase in plan.Phase)
    return [pair for pair in itertools.product(there, back) if not chosen or "/".join(pair) in chosen]


def use_blocks(kind: str, given: Sequence[str]) -> None:
    """Have exchanges made from now on take blocks of a kind: a number of threads, or such as `row=512x1,wide=64x4`."""
    threads = int(kind) if kind.isdecimal() else plan_threads
    plan.BLOCKS.update({name: replace(_blocks[name], threads=threads) for name in BOUNDED})
    plan.BLOCKS.update({name: _blocks[name] for name in _blocks if name not in BOUNDED})
    plan.BLOCKS.update({} if kind.isdecimal() else block_kinds(kind))
    jit.build = functools.partial(_build, defines=defines(threads, given))  # type: ignore[assignment]


def block_kinds(text: str) -> dict[str, plan.Block]:
    """Of such as `row=512x1,wide=64x4`."""
    found = {}
    for word in text.split(","):
        name, _, size = word.partition("=")
        threads, _, per_sm = size.partition("x")
        if name not in _blocks or not threads.isdecimal() or not per_sm.isdecimal() or not int(per_sm):
            known = ", ".join(_blocks)
            raise argparse.ArgumentTypeError(
                f"{word} is no variant=THREADSxBLOCKS, such as row=512x1, with one of {known} and a block at least"
            )
        found[name] = replace(_blocks[name], threads=thread_counts(threads)[0], per_sm=int(per_sm))
    return found


def too_large(kinds: Sequence[str], given: Sequence[str]) -> str:
    """Which of `--block` have more threads than their kernel is compiled for; empty if none."""
    bounded = int(defines(plan_threads, given).get("EPCROSS_MAX_THREADS", plan_threads))
    found = []
    for name, block in itertools.chain.from_iterable(block_kinds(kind).items() for kind in kinds):
        if block.threads > (most := bounded if name in BOUNDED else ROW_THREADS):
            more = f", or --define EPCROSS_MAX_THREADS={block.threads}" if name in BOUNDED else ""
            found.append(f"--block {name}={block.threads}x{block.per_sm}: {name} has at most {most} threads{more}")
    return "; ".join(found)


def spans_us(graph: torch.cuda.CUDAGraph) -> dict[str, float]:
    """Mean of either kernel over one replay, as the profiler sees them; empty if it sees nothing."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize()
    events = [(e.name, e.device_time_total) for e in seen.events() or () if e.device_time_total]
    times = {phase: [us for name, us in events if f"_{phase}_" in name] for phase in ("dispatch", "combine")}
    return {phase: round(statistics.fmean(each), 3) for phase, each in times.items() if each}


def check_kernels(took: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise unless the kernels that were asked for ran: `wide` stands in for `row` where that cannot serve."""
    if list(took) != list(wanted):
        raise EpcrossError(f"{', '.join(took)} ran in place of {', '.join(wanted)}, which cannot serve this shape here")


def period_us(case: Case, tokens: int, group: Any, kernels: Sequence[str]) -> tuple[float, dict[str, float]]:
    """The chained pair's period on this process, and what its `kernels` take."""
    with torch.cuda.stream(torch.cuda.Stream()), contextlib.closing(case.exchange(group=group)) as exchange:
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
        check_kernels([kernel["name"] for kernel in exchange.describe()["kernels"].values()], kernels)
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
        if group is not None:
            distributed.barrier()
        spans = spans_us(graph)
        exchange.check()
        del graph
    return statistics.median(times), spans


def measure(rank: int, words: argparse.Namespace, one_launch: bool, meeting: str) -> None:
    """All variants, on one process."""
    ep = words.ep
    torch.cuda.set_device(0 if one_launch else rank)
    group = None
    if not one_launch:
        distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ep)
        group = distributed.group.WORLD
    # in one launch, too, if such blocks, one on each multiprocessor, are enough: two for each rank
    plan.ROW_RANKS = torch.cuda.get_device_properties(0).multi_processor_count // 2  # type: ignore[misc]
    found: list[dict[str, Any]] = []
    for protocol in words.protocols:
        for tokens in words.tokens:
            case = Case(ep_size=ep, capacity=tokens, hidden=HIDDEN, top_k=TOP_K, num_slots=SLOTS, protocol=protocol)
            for kind in [*map(str, words.threads), *words.block]:
                use_blocks(kind, words.define)
                for there, back in pairs_of(protocol, words.variants):
                    plan.VARIANTS[plan.Protocol(protocol)] = ((None, there, back),)
                    us, spans, reason = slowest(case, tokens, group, (there, back))
                    at = {"protocol": protocol, "ep_size": ep, "tokens": tokens, "blocks": kind}
                    found.append(
                        {**at, "dispatch": there, "combine": back, "us": us, "spans_us": spans, "reason": reason}
                    )
            here = [line for line in found if (line["protocol"], line["tokens"]) == (protocol, tokens)]
            if rank == 0 and here:
                sys.stdout.write(table(here))
                sys.stdout.flush()
                store(words.json, found, torch.cuda.get_device_name(), "one launch" if one_launch else "a GPU each")
    if group is not None:
        distributed.destroy_process_group()


def slowest(
    case: Case, tokens: int, group: Any, variants: tuple[str, str]
) -> tuple[float | None, dict[str, float], str]:
    """Microseconds of the slowest rank, of either kernel on this one, or why there are none. What is refused, all ranks
    refuse alike."""
    try:
        names = plan.kernel_names(plan.Protocol(case.protocol))
        kernels = [names[phase, variant] for phase, variant in zip(plan.Phase, variants, strict=True)]
        us, spans = period_us(case, tokens, group, kernels)
    except EpcrossError as error:
        return None, {}, str(error)
    if group is not None:
        everyone: list[Any] = [None] * group.size()
        distributed.all_gather_object(everyone, us)
        us = max(everyone)
    return round(us, 3), spans, ""


def table(lines: list[dict[str, Any]]) -> str:
    """One protocol and token count: a line for each kind of blocks, a column for each pair of variants; the least is
    marked. Below it, what either kernel took."""
    columns = list(dict.fromkeys((line["dispatch"], line["combine"]) for line in lines))
    times = {(line["blocks"], line["dispatch"], line["combine"]): line["us"] for line in lines}
    spans = {(line["blocks"], line["dispatch"], line["combine"]): line.get("spans_us") or {} for line in lines}
    least = min((us for us in times.values() if us is not None), default=None)
    first = lines[0]
    heads = [f"{there}/{back}" for there, back in columns]
    text = f"{first['protocol']}, EP {first['ep_size']}, {first['tokens']} tokens, us by dispatch/combine variant\n"
    kinds = list(dict.fromkeys(line["blocks"] for line in lines))
    width = max(len(kind) for kind in [*kinds, "blocks"])
    text += f"{'blocks':{width}} " + " ".join(f"{head:>14}" for head in heads) + "\n"
    for kind in kinds:
        cells = [times[(kind, *column)] for column in columns]
        shown = ["-" if us is None else f"{us:.2f}{'*' if us == least else ' '}" for us in cells]
        text += f"{kind:{width}} " + " ".join(f"{cell:>14}" for cell in shown) + "\n"
        parts = [spans[(kind, *column)] for column in columns]
        if any(parts):
            shown = ["+".join(f"{us:.1f}" for us in part.values()) for part in parts]
            text += f"{'':{width}} " + " ".join(f"{cell:>14}" for cell in shown) + "\n"
    return text + "\n"


def store(path: Path | None, found: list[dict[str, Any]], machine: str, ranks: str) -> None:
    """All that was found, so that a machine taken away costs one table at most."""
    if path is not None:
        facts = {"machine": machine, "ranks": ranks, "hidden": HIDDEN, "top_k": TOP_K, "num_slots": SLOTS}
        path.write_text(json.dumps({**facts, "sources": jit.sources_hash(), "variants": found}, indent=1) + "\n")


def compile_all(arch: str, threads: list[int], path: Path | None, given: Sequence[str] = ()) -> None:
    """Registers and spills of each kernel at each number of threads."""
    found = []
    sys.stdout.write(f"{'threads':7} {'kernel':26} {'registers':>9} {'spill bytes':>11}\n")
    for count in threads:
        for kernel in _build(arch, defines=defines(count, given)).usage:
            found.append({"threads": count, **asdict(kernel)})
            sys.stdout.write(f"{count:7} {kernel.name:26} {kernel.registers:9} {kernel.spill_bytes:11}\n")
    store(path, found, arch, "none")


def main() -> None:
    """Read the words and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep", type=int, default=2, help="ranks")
    parser.add_argument("--tokens", type=numbers, default="1,8,32,128,512", help="tokens of each rank, with commas")
    parser.add_argument("--threads", type=thread_counts, default="128,256,512", help="threads of a block, with commas")
    parser.add_argument("--protocols", type=protocols, default="sentinel,fence", help="with commas")
    parser.add_argument("--variants", type=variants, default="", help="pairs such as row/wide, with commas; else all")
    parser.add_argument("--block", type=block_kind, action="append", default=[], help="such as row=512x1")
    parser.add_argument("--define", action="append", type=macro, default=[], metavar="NAME=VALUE", help="a macro")
    parser.add_argument("--one-launch", action="store_true", help="all ranks on the first GPU")
    parser.add_argument("--compile", choices=jit.ARCHITECTURES, help="compile only")
    parser.add_argument("--json", type=Path, help="store everything there, too")
    words = parser.parse_args()
    if wrong := too_large(words.block, words.define):
        parser.error(wrong)
    if words.compile:
        compile_all(words.compile, words.threads, words.json, words.define)
        return
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU; --compile ARCH needs none")
    if words.one_launch or torch.cuda.device_count() < words.ep:
        measure(0, words, True, "")
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, args=(words, False, str(Path(folder) / "meeting")), nprocs=words.ep)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def thread_counts(text: str) -> list[int]:
    """A block has 1024 threads at most, in whole warps."""
    found = numbers(text)
    if wrong := [count for count in found if not plan.LANES <= count <= 1024 or count % plan.LANES]:
        raise argparse.ArgumentTypeError(f"{wrong[0]} threads are no whole warps of a block, 32 to 1024")
    return found


def block_kind(text: str) -> str:
    """As it was written, once it can be read."""
    block_kinds(text)
    return text


def variants(text: str) -> list[str]:
    """Of either protocol; those that a protocol does not have are left out there."""
    found = [word for word in text.split(",") if word]
    known = {"/".join(pair) for protocol in plan.Protocol for pair in pairs_of(protocol, [])}
    if wrong := set(found) - known:
        raise argparse.ArgumentTypeError(f"{sorted(wrong)[0]} is no pair of variants, such as row/wide")
    return found


def macro(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text} is no NAME=VALUE")
    return text


def protocols(text: str) -> list[str]:
    found = text.split(",")
    if wrong := set(found) - set(plan.Protocol):
        raise argparse.ArgumentTypeError(f"{sorted(wrong)[0]} is none of {', '.join(plan.Protocol)}")
    return found


if __name__ == "__main__":
    main()
