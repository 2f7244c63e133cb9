"""What the compiled extension offers, for readers and the type checker. `build.load()` returns it."""

import mmap
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

ReceivedArrays = tuple[
    NDArray[np.int32],  # [N] source rank
    NDArray[np.int32],  # [N] token on its source
    NDArray[np.int32],  # [N, top_k] ids as sent
    NDArray[np.float32],  # [N, top_k] weights as sent
    NDArray[np.uint8],  # [N, row_bytes]
    NDArray[np.uint8],  # [N, scale_bytes]
]


class Exchange(Protocol):
    """One rank's end of an exchange. Any call that waits raises `WaitExpired` when a peer does not come."""

    def start(self, first_epoch: int) -> None:
        """Make the own workspace ready; before any peer dispatches. Epochs are 32 bits wide and wrap."""
        ...

    def bind(
        self,
        set_index: int,
        ids: NDArray[np.int32],
        weights: NDArray[np.float32],
        rows: NDArray[np.uint8],
        scales: NDArray[np.uint8],
        out: NDArray[np.uint16],
    ) -> None:
        """Use these arrays, in place, as the inputs and output of a set. Raises ValueError if they do not fit."""
        ...

    def check(self, set_index: int) -> None:
        """Raise ValueError if an id of the set names no slot; call it after each change in place."""
        ...

    def dispatch(self, set_index: int) -> None:
        """Send the set's rows and wait for one's own."""
        ...

    def received(self) -> ReceivedArrays:
        """Copies of the rows of the last dispatch, by source and slot."""
        ...

    def stage(self, set_index: int, staged: NDArray[np.uint16]) -> None:
        """Keep the experts' rows [N, partial_bytes / 2] of a set and put them where `combine` reads."""
        ...

    def experts(self, set_index: int) -> None:
        """Touch every received row in place and copy the staged rows to where `combine` reads."""
        ...

    def combine(self, set_index: int) -> None:
        """Return the partials and add one's own into the set's output."""
        ...

    @property
    def epoch(self) -> int:
        """Number of the last round, in the shared workspace."""
        ...


class ExchangeClass(Protocol):
    """A protocol's constructor."""

    def __call__(
        self,
        shape: Mapping[str, int],
        layout: Mapping[str, int],
        workspaces: Sequence[mmap.mmap],
        slot_rank: Sequence[int] | NDArray[np.int32],
        *,
        wait_limit_s: float,
        share_cores: bool,
        sets: int,
    ) -> Exchange:
        """Map in rank order; `share_cores` makes waits yield early."""
        ...


class Native(Protocol):
    """The extension module."""

    ARMED: int  # the sentinel's 64 bits
    Fence: ExchangeClass
    Sentinel: ExchangeClass
    TwoSided: ExchangeClass

    def empty(self) -> None:
        """What a call costs that does nothing."""
        ...

    def ping_pong(
        self,
        mine: memoryview,
        theirs: memoryview,
        *,
        first: bool,
        rounds: int,
        rank: int,
        peer: int,
        wait_limit_s: float,
        share_cores: bool,
    ) -> float:
        """Seconds per round of two ranks that answer each other."""
        ...

    def timed_copies(self, dst: memoryview, src: memoryview, times: int) -> tuple[float, float]:
        """Start and end, in seconds of the monotonic clock, of `times` copies in a row."""
        ...
