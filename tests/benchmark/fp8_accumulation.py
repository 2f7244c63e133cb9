"""How far right fp8 results stay below the oracle's bound, and faults above it: tensor cores emulated on the CPU.

    python tests/benchmark/fp8_accumulation.py [--tokens 2000] [--hidden 256] [--intermediate 128] [--experts 4]

For 13 bits and for 10 (tests/_tensor_core.py): what an element of GEMM1 loses, as a share of the root of the sum of its
squared products (the bound's d is `ACCUMULATOR_LOSS`); the largest `times_allowed` of all tokens, and of all experts
over their tokens, which must stay below 1; the sum of squared errors over what is expected of it; and for each fault
the largest of both, of which one must be above 1. A chunk of 500 tokens at a time. Last, experts of 1, 2, 3 and 8
tokens that round as each library declares (`Arithmetic`), by the rule for sums over them.
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402

from epcross.kernels.experts import oracle  # noqa: E402
from epcross.kernels.experts.formats import Arithmetic, ExpertShape, WeightFormat  # noqa: E402
from epcross.kernels.experts.rows import RankMajorRows  # noqa: E402
from epcross.kernels.experts.weights import WeightCopy, make_weights  # noqa: E402
from epcross.kernels.formats import RowFormat  # noqa: E402

from tests import _tensor_core  # noqa: E402  # isort: skip
from tests._experts import rank_major, shape_of  # noqa: E402  # isort: skip

CHUNK = 500
BITS = (13, 10)
_FP8 = Arithmetic(intermediate=RowFormat.FP8)
LIBRARIES = {
    "gather_gemm": _FP8,
    "deepgemm": replace(_FP8, gate_up_rounded=True, output_rounded=True),
    "megamoe": replace(_FP8, scale_block=64, weight_first=True, output_rounded=True),
}
FEW, FEW_TIMES = (1, 2, 3, 8), 25
FACTORS = {"gate_up_scales": (0.68, 2.97), "down_scales": (0.88, 1.28)}  # hard to see at DeepSeek-V3's sizes


def lost(shape: ExpertShape, copy: WeightCopy, rows: RankMajorRows, bits: int) -> torch.Tensor:
    """Errors of GEMM1's sums over what `ACCUMULATOR_LOSS` multiplies, of one expert and up to 16 rows."""
    one = rows.sets[0]
    x, scales = one.rows[:16], one.scales[:16]
    values = oracle.row_values(shape.row_format, x, scales)
    gate_up, _ = oracle.stored_experts(shape, copy)(shape.first_slot)
    size = (values.square() @ gate_up.square().T).sqrt()
    assert copy.gate_up_scales is not None
    codes, factors = x.view(torch.float8_e4m3fn), scales.contiguous().view(torch.float32)
    made = _tensor_core.product(codes, factors, copy.gate_up[0], copy.gate_up_scales[0], bits)
    return (made.double() - values @ gate_up.T) / size


def faults(copy: WeightCopy, rows: RankMajorRows) -> dict[str, tuple[WeightCopy, RankMajorRows]]:
    """One of each, at the first token or the first expert's first block."""
    one = rows.sets[0]
    ids, weights = one.ids.clone(), one.weights.clone()
    ids[0, 0] = -1
    made = {"expert dropped": (copy, replace(rows, sets=(replace(one, ids=ids),)))}
    if weights.shape[1] > 1:
        weights[0, [0, 1]] = weights[0, [1, 0]]
        made["weight swapped"] = copy, replace(rows, sets=(replace(one, weights=weights),))
    for name, factors in FACTORS.items():
        right = getattr(copy, name)
        other = right[0].flatten()[(right[0] / right[0, 0, 0]).log().abs().argmax()]
        blocks = {"stale": other, **{f"x {factor}": factor * right[0, 0, 0] for factor in factors}}
        for how, scale in blocks.items():
            scales = right.clone()
            scales[0, 0, 0] = scale
            made[f"{name}: one block {how}"] = replace(copy, **{name: scales}), rows
    return made


def of_expected(out: torch.Tensor, wanted: oracle.Expected) -> float:
    """Squared errors of all tokens over a plain grouped GEMM's and what is expected of moves."""
    error, plain = ((each.double() - wanted.value).square().sum().item() for each in (out, wanted.plain))
    return error / (plain + wanted.moves.mean[:, -1].sum().item())


def few_tokens(shape: ExpertShape, copy: WeightCopy, tokens: int, arithmetic: Arithmetic) -> torch.Tensor:
    """`times_allowed` of every expert, each with so many tokens of its own, over and over."""
    experts = shape.num_local_experts
    given = replace(shape, top_k=1, capacity_rows=tokens * experts)
    found = []
    for number in range(FEW_TIMES):
        rows = rank_major(given, seed=number, headers=False, share=1.0, slots=experts)
        rows.sets[0].ids[:] = torch.arange(experts, dtype=torch.int32).repeat(tokens)[:, None]
        _, wanted = oracle.expected_of_rows(given, copy, rows, arithmetic)
        out = _tensor_core.layer(given, copy, rows, BITS[0], arithmetic)
        found.append(oracle.judge(out, wanted).experts.times_allowed)
    return torch.cat(found)


def both(judged: oracle.Judgement) -> str:
    """How much of either bound is used."""
    token, expert = judged.times_allowed.max().item(), judged.experts.times_allowed.max().item()
    return f"{token:.2f} of what a token may, {expert:.2f} of what an expert may over its tokens"


def main() -> None:
    """Read the words, emulate, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("tokens", 2000), ("hidden", 256), ("intermediate", 128), ("experts", 4), ("top-k", 2)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    words = parser.parse_args()
    top_k, chunk = min(words.top_k, words.experts), min(CHUNK, words.tokens)
    shape = shape_of(
        RowFormat.FP8, WeightFormat.FP8, hidden=words.hidden, intermediate=words.intermediate, first_slot=0,
        num_local_experts=words.experts, top_k=top_k, capacity_rows=chunk,
    )  # fmt: skip
    copy = make_weights(shape, seed=1, device="cpu").copies[0]
    worst: dict[int, list[torch.Tensor]] = {bits: [] for bits in BITS}
    seen: dict[str, str] = {}
    for number in range(math.ceil(words.tokens / chunk)):
        rows = rank_major(shape, seed=number, headers=False, share=1.0, slots=words.experts)
        _, wanted = oracle.expected_of_rows(shape, copy, rows, _FP8)
        for bits in BITS:
            if number == 0:
                share = lost(shape, copy, rows, bits)
                sys.stdout.write(
                    f"{bits} bits: GEMM1 loses 2**{math.log2(share.std().item()):.1f} (one standard deviation),"
                    f" at most 2**{math.log2(share.abs().max().item()):.1f}\n"
                )
            out = _tensor_core.layer(shape, copy, rows, bits)
            judged = oracle.judge(out, wanted)
            ratios = (
                judged.times_allowed.max().item(),
                judged.experts.times_allowed.max().item(),
                of_expected(out, wanted),
            )
            worst[bits].append(torch.tensor(ratios))
        if number == 0:
            for name, (bad_copy, bad_rows) in faults(copy, rows).items():
                made = _tensor_core.layer(shape, bad_copy, bad_rows, BITS[0])
                seen[name] = both(oracle.judge(made, wanted))
    for bits, ratios in worst.items():
        token, expert, _ = torch.stack(ratios).amax(0).tolist()
        mean = torch.stack(ratios)[:, 2].mean().item()
        sys.stdout.write(
            f"{bits} bits: {words.tokens} right tokens reach {token:.2f} of what a token may, their experts"
            f" {expert:.2f} of what one may over its tokens; the sum of squares is {mean:.2f} of what is expected\n"
        )
    for name, words_of_both in seen.items():
        sys.stdout.write(f"{name}: {words_of_both}\n")
    for name, rounds in LIBRARIES.items():
        for tokens in FEW:
            sums = few_tokens(shape, copy, tokens, rounds)
            sys.stdout.write(
                f"{name}, experts of {tokens} tokens: {len(sums)} sums reach {sums.max().item():.2f}, half of them"
                f" {sums.median().item():.2f}\n"
            )


if __name__ == "__main__":
    main()
