"""Stages of a unit as NVTX ranges, for a profiler that a worker was started under (`epcross point --profile`)."""

from collections.abc import Callable
from typing import Any

from epcross.harness.terms import Stage


class StageRanges:
    """Reports stages as ever and opens a range for each, which ends with the next stage or with `close`.

    `nvtx` is `torch.cuda.nvtx`, whose calls cost next to nothing while nobody listens.
    """

    def __init__(self, report_stage: Callable[[Stage], None], nvtx: Any) -> None:
        self._report_stage, self._nvtx = report_stage, nvtx
        self._open = False

    def __call__(self, stage: Stage) -> None:
        """Enter a stage."""
        self.close()
        self._report_stage(stage)
        self._nvtx.range_push(f"epcross {stage}")
        self._open = True

    def close(self) -> None:
        """End the range that is open. Idempotent."""
        if self._open:
            self._nvtx.range_pop()
            self._open = False


def staged(report_stage: Callable[[Stage], None]) -> StageRanges | None:
    """Ranges for this process, if its torch has CUDA."""
    import torch

    return StageRanges(report_stage, torch.cuda.nvtx) if torch.cuda.is_available() else None
