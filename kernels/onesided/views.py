"""Tensors that look into a workspace: what arrived, who sent it, and where the experts write."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from epcross.kernels.errors import InvalidArguments
from epcross.kernels.onesided.layout import ARMED_WORD, CONTROL, COUNT_BITS, EPOCH_SHIFT, Layout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """One landing set, [V, ep, C, ...]: V local ranks (left out if there is one), source rank, token on its source.

    Places that `Dispatched.arrived` does not name hold garbage.
    """

    rows: "torch.Tensor"  # uint8 [V, ep, C, row_bytes]; .view(torch.bfloat16) for bf16
    scales: "torch.Tensor"  # uint8 [V, ep, C, scale_bytes], of no size for bf16
    ids: "torch.Tensor"  # int32 [V, ep, C, top_k], all of the token's, also those of other ranks; -1 = dropped
    weights: "torch.Tensor"  # fp32 [V, ep, C, top_k]
    headers: "torch.Tensor"  # int64 [V, C, ep]: epoch << 21 | tokens of the source << 1 | whether the token came


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """What a dispatch left in the workspace, read in place. Valid until the round's combine, which lets go of it.

    Sentinel lands in two sets by turns, and which one is known to the device: `set_index`, for kernels, which may be
    replayed in a graph. `rows` and its kin read it and so wait for the device; with Fence they do not. The other
    members enqueue torch operations and never wait.
    """

    sets: tuple[Landing, ...]
    epoch: "torch.Tensor"  # int64 [V]: of the last dispatch

    @property
    def set_index(self) -> "torch.Tensor":
        """int32 [V]: the set of the last dispatch, the same on every local rank between rounds."""
        import torch

        return (self.epoch & (len(self.sets) - 1)).to(torch.int32)

    def arrived(self) -> "torch.Tensor":
        """bool [V, ep, C] ([ep, C]): what came, by source and token."""
        here = [self._of_this_round(landing.headers) & (landing.headers & 1 == 1) for landing in self.sets]
        either = here[0] if len(here) == 1 else here[0] | here[1]  # a set of another round has another epoch
        return either.transpose(-1, -2)

    def source_tokens(self) -> "torch.Tensor":
        """int64 [V, ep] ([ep]): how many tokens each source has in this round, whether they came here or not."""
        firsts = [landing.headers[..., 0, :] for landing in self.sets]
        counts = [
            (first >> 1 & ((1 << COUNT_BITS) - 1)) * self._of_this_round(first[..., None, :])[..., 0, :]
            for first in firsts
        ]
        return counts[0] if len(counts) == 1 else counts[0] + counts[1]

    @property
    def source_mask(self) -> "torch.Tensor":
        """int32 [V, C, 3] ([C, 3]): `arrived` as bits; bit s % 32 of word s // 32 is source s."""
        import torch
        from torch.nn.functional import pad

        sent = self.arrived().transpose(-1, -2)
        bits = pad(sent, (0, 96 - sent.shape[-1])).unflatten(-1, (3, 32)).long()
        return (bits << torch.arange(32, device=bits.device)).sum(-1).to(torch.int32)

    def landing(self) -> Landing:
        """The set of the last dispatch; waits for the device if there are two.

        Raises:
            InvalidArguments: a graph is being captured, and there are two.
        """
        if len(self.sets) == 1:
            return self.sets[0]
        import torch

        if self.epoch.is_cuda and torch.cuda.is_current_stream_capturing():
            raise InvalidArguments(
                ["which landing set a replay uses is known to the device only: in a graph use `sets` with `set_index`"]
            )
        return self.sets[int(self.epoch[0]) & 1]

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

    def _of_this_round(self, headers: "torch.Tensor") -> "torch.Tensor":
        """bool: which headers [V, .., ep] carry the epoch of the last dispatch, in the bits that they have for it."""
        epoch = self.epoch if headers.dim() == 2 else self.epoch[:, None, None]
        return (headers ^ (epoch << EPOCH_SHIFT)) >> EPOCH_SHIFT == 0


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
            headers = (capacity, shape.ep_size)
            return Landing(
                rows=self._view(torch.uint8, record, (*rows, shape.row_bytes), stride),
                scales=self._view(torch.uint8, record + shape.row_bytes, (*rows, shape.scale_bytes), stride),
                ids=self._view(torch.int32, ids, (*rows, shape.top_k), stride),
                weights=self._view(torch.float32, ids + 4 * shape.top_k, (*rows, shape.top_k), stride),
                headers=self._view(torch.int64, offset[f"headers_{parity}"], headers, (8 * shape.ep_size,)),
            )

        self.dispatched = Dispatched(
            sets=tuple(landing(parity) for parity in range(at.sets)), epoch=self._epoch("combine_epoch")
        )
        self.partials = self._view(
            torch.bfloat16, offset["partials"], (*rows, shape.hidden), (capacity * at.partial_stride, at.partial_stride)
        )
        self.dispatch_epoch = self._epoch("dispatch_epoch")

    def arm(self, first_epoch: int) -> None:
        """Bring the workspaces to their state before the first round, on the current stream, while nothing is sent."""
        import torch

        self._memory.zero_()
        words = self._memory.view(torch.int64)
        for region in self._at.armed:
            words[:, region.offset // 8 : (region.offset + region.size) // 8].fill_(_signed(ARMED_WORD))
        self.dispatch_epoch.fill_(_signed(first_epoch))

    def _epoch(self, name: str) -> "torch.Tensor":
        """int64 [V], also for one local rank."""
        import torch

        offset = self._at["control"].offset + (CONTROL.names or ()).index(name) * 8  # the epochs come first
        ranks, total = self._memory.shape
        return self._memory.view(-1).view(torch.int64).as_strided((ranks,), (total // 8,), offset // 8)

    def _view(
        self, dtype: "torch.dtype", offset: int, size: tuple[int, ...], stride_bytes: tuple[int, ...]
    ) -> "torch.Tensor":
        """`size` values of the same place in every local rank's workspace; the last dimension is dense."""
        ranks, total = self._memory.shape
        width = dtype.itemsize
        strides = (total // width, *(stride // width for stride in stride_bytes), 1)
        view = self._memory.view(-1).view(dtype).as_strided((ranks, *size), strides, offset // width)
        return view[0] if ranks == 1 else view


def _signed(word: int) -> int:
    """The same 64 bits as a signed number, as torch's integers are."""
    return word - (1 << 64) if word >> 63 else word
