"""Rows, scale rows and partials of a batch where they are needed: on a GPU, bit for bit those of `workload.batches`.

The tapes are copied to the device once; a row is then a gather from them. Decoding is by look-up in tables that
`kernels.codecs` made, and one fp32 multiplication, so that a value has the same bits on any device.
"""

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from epcross.harness.workload.batches import GroupBatch
from epcross.harness.workload.tape import STEP_BYTES, Payload, TapeKind, tape
from epcross.kernels.codecs import SCALE_BLOCK, bf16_to_float
from epcross.kernels.formats import RowFormat, row_size

if TYPE_CHECKING:
    from torch import Tensor

TIMED_SET = 3_000
"""Set number by which the partials of timed series are placed: the same for all sets of a seed."""

_TIMED_TAPE = (Payload.EXACT, RowFormat.BF16, TapeKind.ROWS)  # small integers: sums are exact in any order


class DeviceRows:
    """Windows of tapes on one device. `device` is whatever torch takes; "cpu" in tests."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._tapes: dict[tuple[Any, ...], Tensor] = {}
        self._tables: dict[str, Tensor] = {}

    def put(self, array: Any) -> "Tensor":
        """A numpy array as a tensor on the device."""
        import torch

        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def rows(self, gb: GroupBatch, source: Any, token: Any) -> "Tensor":
        """As `GroupBatch.rows`: uint8 [N, padded_row_bytes]. `source` and `token` are numpy arrays throughout."""
        size = row_size(gb.point.dispatch_format, gb.point.model.hidden)
        what = (gb.payload, gb.point.dispatch_format, TapeKind.ROWS)
        return self._windows(gb, what, size.row_bytes, size.padded_row_bytes, gb.places(source, token))

    def scales(self, gb: GroupBatch, source: Any, token: Any) -> "Tensor":
        """As `GroupBatch.scales`: uint8 [N, padded_scale_bytes]."""
        import torch

        size = row_size(gb.point.dispatch_format, gb.point.model.hidden)
        if not size.scale_bytes:
            return torch.zeros((len(token), 0), dtype=torch.uint8, device=self.device)
        what = (gb.payload, gb.point.dispatch_format, TapeKind.SCALES)
        return self._windows(gb, what, size.scale_bytes, size.padded_scale_bytes, gb.places(source, token))

    def adversarial_partials(self, gb: GroupBatch, rank: Any, source: Any, token: Any) -> "Tensor":
        """As `GroupBatch.adversarial_partials`: bf16 [N, hidden]."""
        what = (gb.payload, gb.point.dispatch_format, TapeKind.PARTIALS)
        return self._partials(gb, what, gb.partial_places(rank, source, token))

    def timed_partials(self, gb: GroupBatch, rank: Any, source: Any, token: Any) -> "Tensor":
        """What experts say in timed series: bf16 [N, hidden], +-1, +-2, +-4, the same for every set of a seed."""
        placed = replace(gb, set_index=TIMED_SET)
        return self._partials(gb, _TIMED_TAPE, placed.partial_places(rank, source, token))

    def decode(self, row_format: RowFormat, rows: "Tensor", scales: "Tensor", hidden: int) -> "Tensor":
        """As `codecs.decode`: float32 [N, hidden]."""
        import torch

        size = row_size(row_format, hidden)
        rows = rows[:, : size.row_bytes].contiguous()
        if row_format is RowFormat.BF16:
            return rows.view(torch.bfloat16).float()
        table = self._table(row_format)
        # the second size is named: of no rows, none could be inferred
        width = rows.shape[1] * (table.numel() // len(table))
        values = table.index_select(0, rows.reshape(-1).int()).reshape(len(rows), width)[:, :hidden]
        used = scales[:, : size.scale_bytes].contiguous()
        if row_format is RowFormat.FP8:
            factors = used.view(torch.float32)
        else:
            scale_table = self._table(f"scales of {row_format}")
            factors = scale_table.index_select(0, used.reshape(-1).int()).reshape(used.shape)
        return values * factors.repeat_interleave(SCALE_BLOCK[row_format], dim=1)[:, :hidden]

    def _table(self, name: str) -> "Tensor":
        if name not in self._tables:
            self._tables[name] = self.put(_tables()[name])
        return self._tables[name]

    def _partials(self, gb: GroupBatch, what: tuple[Any, ...], place: Any) -> "Tensor":
        import torch

        width = 2 * gb.point.model.hidden
        return self._windows(gb, what, width, width, place).view(torch.bfloat16)

    def _windows(self, gb: GroupBatch, what: tuple[Any, ...], used: int, width: int, place: Any) -> "Tensor":
        """[N, width] bytes, zero from `used` on."""
        import torch

        key = (*what, used, gb.place_bits)
        if key not in self._tapes:
            self._tapes[key] = self.put(tape(*key))
        every = self._tapes[key].as_strided((1 << gb.place_bits, used), (STEP_BYTES, 1))
        rows = every.index_select(0, self.put(place))
        return rows if used == width else torch.nn.functional.pad(rows, (0, width - used))


@cache
def _tables() -> dict[str, Any]:
    """fp32 values by byte: [256] or, for two 4-bit values in a byte, [256, 2]."""
    byte = np.arange(256, dtype=np.uint8)
    e4m3 = byte.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    nibbles = np.stack([byte & 15, byte >> 4], axis=1)
    return {
        RowFormat.FP8: e4m3,
        RowFormat.MXFP8: e4m3,
        RowFormat.NVFP4: nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32),
        f"scales of {RowFormat.MXFP8}": byte.view(ml_dtypes.float8_e8m0fnu).astype(np.float32),
        f"scales of {RowFormat.NVFP4}": e4m3,
    }


def bf16_value(bits: int) -> float:
    """The value of one bf16 by its bits, for messages."""
    return float(bf16_to_float(np.array([bits], np.uint16))[0])
