"""What tensor cores lose of sums of bf16 products, as a share of what `oracle.ACCUMULATOR_LOSS` is a share of.

    python tests/benchmark/gpu_bf16_loss.py [--values 7168]

Rows of normal values, about 0 and about others, so that sums are up to twelve times as large as the root of their
products' squares; fp32 results of torch beside float64. Each line: how large the sums are, how many there are, one
standard deviation of what is lost and the most, both as powers of two of the size.
"""

import argparse
import itertools
import sys

import torch

ROWS, PART = 4096, 512
EDGES = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 12.0)


def main() -> None:
    """Read the words and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=7168, help="of each sum")
    values = parser.parse_args().values
    torch.manual_seed(0)
    for mean in (0.0, 0.05, 0.2):
        x, w = ((torch.randn(ROWS, values, device="cuda") + mean).bfloat16() for _ in range(2))
        found = torch.mm(x, w.T, out_dtype=torch.float32)
        shares, lost = [], []
        for first in range(0, ROWS, PART):
            part = x[first : first + PART].double()
            sums = part @ w.double().T
            squares = part.square() @ w.double().square().T
            size = (squares + sums.square() * (4 * 128 / values)).sqrt()  # as the oracle has it
            shares.append((sums.abs() / squares.sqrt()).flatten())
            lost.append(((found[first : first + PART].double() - sums) / size).flatten())
        share, loss = torch.cat(shares), torch.cat(lost)
        for low, high in itertools.pairwise(EDGES):
            here = (share >= low) & (share < high)
            if int(here.sum()) > 1:
                one, most = loss[here].square().mean().sqrt().log2(), loss[here].abs().max().log2()
                sys.stdout.write(
                    f"values about {mean}: sums of {low} to {high} times their products' root of squares,"
                    f" {int(here.sum())}: 2**{float(one):.2f}, at most 2**{float(most):.2f}\n"
                )


if __name__ == "__main__":
    main()
