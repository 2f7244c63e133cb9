"""Tensors that look into a workspace: what arrived, who sent it, and where the experts write."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from epcross.kernels.errors import InvalidArguments
from epcross.kernels.onesided.layout import ARMED_WORD, CONTROL, VECTOR_BYTES, Layout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """One landing set, [V, ep, C, ...]: V local ranks (left out if there is one), source rank, token on its source.

    Slots that `source_mask` does not name hold garbage.
    """

    rows: "torch.Tensor"  # uint8 [V, ep, C, row_bytes]; .view(torch.bfloat16) for bf16
    scales: "torch.Tensor"  # uint8 [V, ep, C, scale_bytes], of no size for bf16
    ids: "torch.Tensor"  # int32 [V, ep, C, top_k], all of the token's, also those of other ranks; -1 = dropped
    weights: "torch.Tensor"  # fp32 [V, ep, C, top_k]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """What a dispatch left in the workspace, read in place. Valid until the dispatch after the next (Sentinel), or the
    next (Fence).

    Sentinel lands in two sets by turns, and which one is known to the device: `set_index`, for kernels, which may be
    replayed in a graph. `rows` and its kin read it and so wait for the device; with Fence they do not.
    """

    sets: tuple[Landing, ...]
    set_index: "torch.Tensor"  # int32 [V]: the set of the last dispatch; equal on every local rank between rounds
    source_mask: (
        "torch.Tensor"  # int32 [V, C, 3]: bit s % 32 of word s // 32 says that source s sent its token of that index
    )

    def landing(self) -> Landing:
        """The set of the last dispatch; waits for the device if there are two.

        Raises:
            InvalidArguments: a graph is being captured, and there are two.
        """
        if len(self.sets) == 1:
            return self.sets[0]
        import torch

        if torch.cuda.is_current_stream_capturing():
            raise InvalidArguments(
                ["which landing set a replay uses is known to the device only: in a graph use `sets` with `set_index`"]
            )
        return self.sets[int(self.set_index.reshape(-1)[0])]

    @property
    def rows(self) -> "torch.Tensor":
        """See `Landing.rows`."""
        return self.landing().rows

    @property
    def scales(self) -> "torch.Tensor":
        """See `Landing.scales`."""
        return self.landing().scales

    @property
    def ids(self) -> "torch.Tensor":
        """See `Landing.ids`."""
        return self.landing().ids

    @property
    def weights(self) -> "torch.Tensor":
        """See `Landing.weights`."""
        return self.landing().weights


class Views:
    """All tensors into `memory` (uint8 [local_ranks, bytes_per_rank], contiguous) laid out as `at` says."""

    def __init__(self, memory: "torch.Tensor", at: Layout) -> None:
        import torch

        self._memory, self._at = memory, at
        shape = at.shape
        rows, capacity = (shape.ep_size, shape.capacity), shape.capacity
        offset = {region.name: region.offset for region in at.regions}

        def landing(parity: int) -> Landing:
            record = offset[f"records_{parity}"]
            stride = (capacity * at.record_stride, at.record_stride)
            ids = record + shape.row_bytes + shape.scale_bytes
            return Landing(
                rows=self._view(torch.uint8, record, (*rows, shape.row_bytes), stride),
                scales=self._view(torch.uint8, record + shape.row_bytes, (*rows, shape.scale_bytes), stride),
                ids=self._view(torch.int32, ids, (*rows, shape.top_k), stride),
                weights=self._view(torch.float32, ids + 4 * shape.top_k, (*rows, shape.top_k), stride),
            )

        control = offset["control"]
        self.dispatched = Dispatched(
            sets=tuple(landing(parity) for parity in range(at.sets)),
            set_index=self._control(control, "set_index"),
            source_mask=self._view(torch.int32, offset["received_masks"], (capacity, 3), (VECTOR_BYTES,)),
        )
        self.partials = self._view(
            torch.bfloat16, offset["partials"], (*rows, shape.hidden), (capacity * at.partial_stride, at.partial_stride)
        )
        self.dispatch_epoch = self._control(control, "dispatch_epoch")

    def arm(self, first_epoch: int) -> None:
        """Bring the workspaces to their state before the first round, on the current stream, while nothing is sent."""
        import torch

        self._memory.zero_()
        words = self._memory.view(torch.int64)
        for region in self._at.armed:
            words[:, region.offset // 8 : (region.offset + region.size) // 8].fill_(_signed(ARMED_WORD, 64))
        self.dispatch_epoch.fill_(_signed(first_epoch, 32))

    def _control(self, control: int, name: str) -> "torch.Tensor":
        import torch

        offset = control + dict(CONTROL.fields or {})[name][1]
        ranks, total = self._memory.shape
        return self._memory.view(-1).view(torch.int32).as_strided((ranks,), (total // 4,), offset // 4)

    def _view(
        self, dtype: "torch.dtype", offset: int, size: tuple[int, ...], stride_bytes: tuple[int, ...]
    ) -> "torch.Tensor":
        """`size` values of the same place in every local rank's workspace; the last dimension is dense."""
        ranks, total = self._memory.shape
        width = dtype.itemsize
        strides = (total // width, *(stride // width for stride in stride_bytes), 1)
        view = self._memory.view(-1).view(dtype).as_strided((ranks, *size), strides, offset // width)
        return view[0] if ranks == 1 else view


def _signed(word: int, bits: int) -> int:
    """The same bits as a signed number, as torch's integers are."""
    return word - (1 << bits) if word >> (bits - 1) else word
