"""How many bits of a sum the tensor cores keep in fp8: what kernels/experts/oracle.py should allow for.

    python tests/benchmark/gpu_fp8_bits.py [--json FILE]

A row of 128 products holds one of 2**16 and one of 2**(16 - gap); all else is zero. What of the small one arrives says
how far below the large one a product is cut off, whether that depends on how far apart they stand in the row, and in
which direction. An exact sum needs `gap` bits below the largest product. Needs a GPU and Triton.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

K, TILE, LARGEST = 128, 64, 16
PLACES = (1, 8, 16, 32, 64, 127)


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, K: tl.constexpr, TILE: tl.constexpr):
    row, column, k = tl.arange(0, TILE), tl.arange(0, TILE), tl.arange(0, K)
    a = tl.load(a_ptr + row[:, None] * K + k[None, :])
    b = tl.load(b_ptr + column[None, :] * K + k[:, None])
    tl.store(out_ptr + row[:, None] * TILE + column[None, :], tl.dot(a, b))


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
    if words.json:
        words.json.write_text(
            json.dumps({"gpu": name, "triton": triton.__version__, "arrived": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
