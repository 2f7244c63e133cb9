"""How many bits of a sum the tensor cores keep in fp8: what kernels/experts/oracle.py should allow for.

    python tests/benchmark/gpu_fp8_bits.py [--json FILE]

Three looks. A row of 128 products holds one of 2**16 and one of 2**(16 - gap); all else is zero: what of the small one
arrives says how far below the large one a product is cut off, whether that depends on how far apart they stand in the
row, and in which direction. Sums of 128 random products are compared, bit for bit, with those of the emulation
(tests/_tensor_core.py) for each number of bits. And sums of a layer's first product, over hidden 7168 with scales added
in fp32, are compared with float64: what they lose, as a share of what `ACCUMULATOR_LOSS` multiplies. Needs a GPU and
Triton.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from epcross.kernels.experts.formats import WeightFormat  # noqa: E402
from epcross.kernels.experts.quantise import quantise_fp8_rows  # noqa: E402
from epcross.kernels.experts.weights import make_weights  # noqa: E402
from epcross.kernels.formats import RowFormat  # noqa: E402

from tests import _tensor_core  # noqa: E402  # isort: skip
from tests._experts import hidden_states, shape_of  # noqa: E402  # isort: skip

K, TILE, LARGEST = 128, 64, 16
HIDDEN, COLUMNS = 7168, 2048
BITS = range(8, 25)
PLACES = (1, 8, 16, 32, 64, 127)


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, K: tl.constexpr, TILE: tl.constexpr):
    row, column, k = tl.arange(0, TILE), tl.arange(0, TILE), tl.arange(0, K)
    a = tl.load(a_ptr + row[:, None] * K + k[None, :])
    b = tl.load(b_ptr + column[None, :] * K + k[:, None])
    tl.store(out_ptr + row[:, None] * TILE + column[None, :], tl.dot(a, b))


@triton.jit
def scaled_kernel(
    w_ptr, w_scale_ptr, x_ptr, x_scale_ptr, out_ptr,
    HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Weights times rows as `gather_gemm` does it: a product of 128 values from 0, then scaled and added in fp32."""
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row, k = tl.arange(0, TILE), tl.arange(0, K)
    steps: tl.constexpr = HIDDEN // K
    total = tl.zeros((TILE, TILE), tl.float32)
    for step in tl.range(steps):
        w = tl.load(w_ptr + column[:, None] * HIDDEN + step * K + k[None, :])
        x = tl.load(x_ptr + row[:, None] * HIDDEN + step * K + k[None, :])
        w_scale = tl.load(w_scale_ptr + tl.program_id(0) * TILE // K * steps + step)
        total += tl.dot(w, x.T) * (tl.load(x_scale_ptr + row * steps + step) * w_scale)[None, :]
    tl.store(out_ptr + row[None, :] * COLUMNS + column[:, None], total)


def equal_to_emulation() -> dict[int, float]:
    """The share of sums of 128 random products that are, to the last bit, those of so many bits."""
    generator = torch.Generator().manual_seed(1)
    codes = [quantise_fp8_rows(torch.randn((TILE, K), generator=generator).bfloat16())[0] for _ in range(2)]
    out = torch.empty(TILE, TILE, device="cuda")
    launch: Any = product_kernel
    launch[(1,)](*(each.cuda() for each in codes), out, K=K, TILE=TILE)
    made = out.cpu()
    left, right = (each.float() for each in codes)
    return {bits: (_tensor_core.added(left, right, bits) == made).float().mean().item() for bits in BITS}


def lost() -> dict[str, float]:
    """Of sums over hidden 7168: error over the bound's size, without ACCUMULATOR_LOSS (oracle.py says how)."""
    shape = shape_of(
        RowFormat.FP8, WeightFormat.FP8, hidden=HIDDEN, intermediate=COLUMNS // 2, num_local_experts=1, first_slot=0
    )
    copy = make_weights(shape, seed=1, device="cuda").copies[0]
    x, x_scales = quantise_fp8_rows(hidden_states(TILE, HIDDEN, torch.Generator("cuda").manual_seed(1), "cuda"))
    w, w_scales = copy.gate_up[0], copy.gate_up_scales
    assert w_scales is not None
    out = torch.empty(TILE, COLUMNS, device="cuda")
    launch: Any = scaled_kernel
    launch[(COLUMNS // TILE,)](w, w_scales[0], x, x_scales, out, HIDDEN=HIDDEN, COLUMNS=COLUMNS, K=K, TILE=TILE)
    spread = w_scales[0].double().repeat_interleave(K, 0).repeat_interleave(K, 1)
    left, right = x.double() * x_scales.double().repeat_interleave(K, 1), w.double() * spread
    sums = left @ right.T
    size = (left.square() @ right.square().T + sums.square() * (4 * K / HIDDEN)).sqrt()
    share = (out.double() - sums) / size
    towards_zero = (share * -sums.sign()).mean()
    return {
        "standard_deviation": share.std().item(), "largest": share.abs().max().item(),
        "mean_towards_zero": towards_zero.item(), "sums": share.numel(),
    }  # fmt: skip


def arrived(gap: int, place: int, sign: float) -> float:
    """What of a small product 2**(LARGEST - gap) beside one of 2**LARGEST arrives, as a share of it."""
    a, b = torch.zeros(TILE, K), torch.zeros(TILE, K)
    a[:, 0] = b[:, 0] = 2.0 ** (LARGEST // 2)
    exponent = LARGEST - gap
    first = max(-9, exponent // 2)  # e4m3 holds powers of two from -9 to 8
    a[:, place], b[:, place] = sign * 2.0**first, 2.0 ** (exponent - first)
    out = torch.empty(TILE, TILE, device="cuda")
    as_fp8 = [x.to(torch.float8_e4m3fn).cuda() for x in (a, b)]
    launch: Any = product_kernel
    launch[(1,)](*as_fp8, out, K=K, TILE=TILE)
    return (out[0, 0].item() - 2.0**LARGEST) / (sign * 2.0**exponent)


def main() -> None:
    """Print a line for each gap."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="store everything there, too")
    words = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    name = torch.cuda.get_device_name()
    sys.stdout.write(
        f"{name}: share of a product that arrives, by gap in bits and place in the row (+ and - alike, or both)\n"
    )
    sys.stdout.write("gap " + " ".join(f"{place:>12}" for place in PLACES) + "\n")
    found: list[dict[str, Any]] = []
    for gap in range(4, 25):
        cells = []
        for place in PLACES:
            shares = [arrived(gap, place, sign) for sign in (1.0, -1.0)]
            found.append({"gap": gap, "place": place, "plus": shares[0], "minus": shares[1]})
            cells.append(f"{shares[0]:g}" if shares[0] == shares[1] else f"{shares[0]:g}/{shares[1]:g}")
        sys.stdout.write(f"{gap:3} " + " ".join(f"{cell:>12}" for cell in cells) + "\n")
    same = equal_to_emulation()
    sys.stdout.write("share of random sums equal to the emulation, by bits: ")
    sys.stdout.write(", ".join(f"{bits}: {share:.4f}" for bits, share in same.items()) + "\n")
    share = lost()
    deviation, largest = (math.log2(share[name]) for name in ("standard_deviation", "largest"))
    sys.stdout.write(
        f"{share['sums']} sums over {HIDDEN} values lose 2**{deviation:.2f} of their size (one standard deviation),"
        f" at most 2**{largest:.2f}; mean towards zero {share['mean_towards_zero']:.2e}\n"
    )
    if words.json:
        stored = {"gpu": name, "triton": triton.__version__, "arrived": found, "equal": same, "lost": share}
        words.json.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
