"""Compile the kernels ahead, without a GPU: `python -m epcross.kernels.onesided.prebuild [architecture ...]`."""

import sys
import time
from collections.abc import Sequence

from epcross.kernels.errors import BuildError
from epcross.kernels.onesided import jit


def main(architectures: Sequence[str]) -> str | None:
    """Build for `architectures`, or for all, and say what ptxas gave each kernel. Returns what went wrong, or None."""
    try:
        for arch in architectures or jit.ARCHITECTURES:
            started = time.monotonic()
            cubin = jit.build(arch)
            sys.stdout.write(f"{cubin.path} ({time.monotonic() - started:.1f} s)\n")
            for kernel in cubin.usage:
                sys.stdout.write(
                    f"  {kernel.name}: {kernel.registers} registers, {kernel.spill_bytes} bytes spilled, "
                    f"{kernel.stack_bytes} bytes of stack, {kernel.shared_bytes} bytes of shared memory\n"
                )
    except BuildError as failure:
        return str(failure)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
