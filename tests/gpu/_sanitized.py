"""Small rounds of every form of both protocols, to be run under compute-sanitizer, slowed a hundredfold."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from epcross.kernels.formats import RowFormat  # noqa: E402
from epcross.kernels.onesided import plan  # noqa: E402
from epcross.kernels.onesided.layout import Protocol  # noqa: E402

from tests.gpu._rounds import FORMS, Case, always, make_inputs, play  # noqa: E402  # isort: skip


def main() -> None:
    """Every kernel, with odd shapes, empty ranks and words that need escapes."""
    for protocol in FORMS:
        with pytest.MonkeyPatch.context() as patch:
            every_variant(patch)
            always(protocol, patch)
            rounds(protocol)


def every_variant(patch: pytest.MonkeyPatch) -> None:
    """Have the few tokens of `rounds` take every kernel of either protocol; until `patch` is undone."""
    limits = ((12, "narrow", "narrow"), (100, "mid", "mid"), (None, "wide", "wide"))
    patch.setattr(plan, "VARIANTS", dict.fromkeys(Protocol, limits))


def rounds(protocol: str) -> None:
    """Of one form."""
    for dispatch_format, hidden, ep_size in ((RowFormat.BF16, 136, 3), (RowFormat.NVFP4, 64, 8)):
        case = Case(
            ep_size=ep_size,
            capacity=200,
            hidden=hidden,
            num_slots=16 * ep_size,
            dispatch_format=dispatch_format,
            protocol=protocol,
        )
        exchange = case.exchange(timeout_s=300, num_sms=16)
        used = set()
        for seed, counts in enumerate(([2, 0, 1], [3], [30, 1], [200, 7], [0])):
            of_ranks = [counts[rank % len(counts)] for rank in range(ep_size)]
            play(exchange, make_inputs(case, of_ranks, seed, reserved=True), case.linear())
            used |= {kernel["name"] for kernel in exchange.describe()["kernels"].values()}
        assert used == kernels_of(protocol)
        exchange.close()


def kernels_of(form: str) -> set[str]:
    """Names of all that a form may take."""
    rows = form == "fence_row"
    return {
        name
        for (phase, variant), name in plan.kernel_names(Protocol(form.partition("_")[0])).items()
        if phase is plan.Phase.COMBINE or (variant == plan.ROW) is rows
    }


if __name__ == "__main__":
    main()
