"""Inputs of a rank on its device, changed in place; and where the outputs of a library that allocates them are."""

from typing import TYPE_CHECKING, Any

import numpy as np

from epcross.harness.backends.base import Batch, Shard
from epcross.harness.backends.replays import captured
from epcross.harness.point import Point
from epcross.kernels.formats import RowFormat, row_size

if TYPE_CHECKING:
    from torch import Tensor


class DeviceInputs:
    """One set. T = tokens of this rank. Captured graphs read these addresses, so `refill` writes in place.

    Args:
        ids_dtype: what the library takes expert ids as; torch's int32 or int64.
        dropped: what it takes for a selection that goes nowhere.
    """

    def __init__(self, point: Point, batch: Batch, device: str, ids_dtype: Any, dropped: int = -1) -> None:
        import torch

        size = row_size(point.dispatch_format, point.model.hidden)
        tokens, top_k = len(batch.ids), point.model.top_k
        self._row_bytes, self._scale_bytes, self._dropped = size.row_bytes, size.scale_bytes, dropped
        self.rows: Tensor = torch.zeros(tokens, size.row_bytes, dtype=torch.uint8, device=device)
        self.scales: Tensor = torch.zeros(tokens, size.scale_bytes, dtype=torch.uint8, device=device)
        self.ids: Tensor = torch.full((tokens, top_k), -1, dtype=ids_dtype, device=device)
        self.weights: Tensor = torch.zeros(tokens, top_k, dtype=torch.float32, device=device)
        self.values = self.rows.view(value_dtype(point.dispatch_format))  # [T, hidden]; [T, hidden / 2] in bytes of fp4
        self.factors = self.scales.view(scale_dtype(point.dispatch_format)) if size.scale_bytes else None
        self.refill(batch)

    def refill(self, batch: Batch) -> None:
        """New contents."""
        import torch

        for held, given in (
            (self.rows, batch.rows[:, : self._row_bytes]),
            (self.scales, batch.scales[:, : self._scale_bytes]),
            (self.ids, np.where(batch.ids < 0, self._dropped, batch.ids)),
            (self.weights, batch.weights),
        ):
            held.copy_(torch.from_numpy(np.ascontiguousarray(given)))


def device_inputs(point: Point, shard: Shard, device: str, ids_dtype: Any, dropped: int = -1) -> list[DeviceInputs]:
    """Those of every set."""
    return [DeviceInputs(point, batch, device, ids_dtype, dropped) for batch in shard.batches]


def value_dtype(row_format: RowFormat) -> Any:
    """The torch type whose values, or bytes of two fp4 values, a row is made of."""
    import torch

    if row_format is RowFormat.NVFP4:
        return torch.uint8
    return torch.bfloat16 if row_format is RowFormat.BF16 else torch.float8_e4m3fn


def scale_dtype(row_format: RowFormat) -> Any:
    """The torch type of a row's scales."""
    import torch

    return torch.float32 if row_format is RowFormat.FP8 else torch.uint8


class OwnedByLibrary:
    """The sums of each set where every call allocates its own: of the last combine that ran, eagerly or in a replay."""

    def __init__(self) -> None:
        self._last: dict[int, Tensor] = {}
        self._captured: dict[tuple[int, int], Tensor] = {}  # the last of each graph and set, at an address of its own

    def put(self, set_index: int, sums: "Tensor") -> None:
        """Remember what a combine of this set returned; if it is being captured, at each replay of that graph."""

        def remember() -> None:
            self._last[set_index] = sums

        calls = captured()
        if calls is None:
            remember()
        else:
            calls[id(self), set_index] = remember
            self._captured[id(calls), set_index] = sums

    def get(self, set_index: int) -> "Tensor":
        """The sums of the set's last combine."""
        return self._last[set_index]

    def poison(self) -> None:
        """Make all sums NaN."""
        for sums in (*self._last.values(), *self._captured.values()):
            sums.fill_(float("nan"))

    def clear(self) -> None:
        """Let go of all of them."""
        self._last.clear()
        self._captured.clear()
