"""FlashInfer's two-sided exchange (`NVLinkTwoSidedAlltoAll`): packets through a queue for each peer, receivers copy.

A first step exchanges routing and counts; rows, and scale rows after them, follow. Combine sends a partial back to the
selection it came from and adds over selections with torch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from epcross.harness.backends import vendor
from epcross.harness.backends.base import ContractShape, Description
from epcross.harness.backends.flashinfer import MAX_RANKS, FlashInfer
from epcross.harness.point import Point
from epcross.harness.terms import Boundary, RoutingKind, RowFormat
from epcross.kernels.formats import row_size

if TYPE_CHECKING:
    from torch import Tensor


FORMATS = {RowFormat.BF16: 8, RowFormat.FP8: 512, RowFormat.MXFP8: 512, RowFormat.NVFP4: 256}
"""What rows must be a multiple of: rows travel in units of 16 bytes, and so do scale rows, in a call of their own."""

MAX_TOP_K = 32
PEERS_PER_BLOCK = 8

COUNT_CELL = "CounterCommunicator, csrc/nvlink_two_sided_prepare.cu:124 of 0.7.4"
"""Where the count of rows for a peer is kept: one cell, which its reader empties and its writer does not look at. What
keeps a rank from writing the next step's count over one that is not read yet is a row of that step, in either direction
or through a third rank: with it the reader's kernel is over. Without any a count is lost, and its reader waits for
ever."""


class FlashInferTwoSided(FlashInfer):
    """Rows arrive in tensors of their own."""

    name = "flashinfer_two_sided"
    library = "NVLinkTwoSidedAlltoAll"
    contract_shape = ContractShape(format_hidden=512, slots_multiple=4)
    boundary = vendor.boundaries(
        {Boundary.LAYOUT, Boundary.COUNT_EXCHANGE, Boundary.TRANSFER, Boundary.COPY_OUT},
        {Boundary.TRANSFER, Boundary.COPY_OUT, Boundary.REDUCE},
    )

    def differs(self) -> str | None:
        """See `FlashInfer`."""
        return None

    def unsupported(self, point: Point) -> str | None:
        """Experts in fours, how many of them a token may choose, what rows are made of, and that some cross."""
        problems = vendor.format_problems(self.name, point, FORMATS)
        if point.placement.num_slots % 4:
            problems.append(f"{self.name} takes a multiple of 4 experts, not {point.placement.num_slots}")
        if point.model.top_k > MAX_TOP_K:
            problems.append(f"{self.name} takes top_k up to {MAX_TOP_K}, not {point.model.top_k}")
        if point.ep_size > MAX_RANKS:
            problems.append(f"{self.name} takes at most {MAX_RANKS} ranks, not {point.ep_size}")
        if _nothing_crosses(point):
            problems.append(
                f"{self.name} takes steps in which rows cross between ranks, not routing={point.routing.kind}: a count"
                f" of rows may then be overwritten before it is read, and its reader waits for ever ({COUNT_CELL});"
                " choose another routing, or backend=flashinfer_one_sided"
            )
        return "; ".join(problems) or None

    def workspace_bytes(self, point: Point) -> int:
        """Receive tensors, partials, and what of them comes back to each selection; the queues beside them depend on
        the GPU's number of SMs and not on the shape."""
        size = row_size(point.dispatch_format, point.model.hidden)
        most, top_k = max(1, point.max_tokens_per_rank), point.model.top_k
        row = size.row_bytes + size.scale_bytes + 8 * top_k
        partial = 2 * point.model.hidden
        return most * point.ep_size * (row + partial) + most * top_k * partial

    def prebuild(self) -> None:
        """Have the library compile its kernels."""
        if self.unavailable() is None:
            from flashinfer.moe_ep.backends.split.comm.nvlink_two_sided import (  # type: ignore[import-not-found]
                kernels,
            )

            kernels.get_nvlink_two_sided_alltoall_module()

    def configuration(self) -> Any:
        """See `FlashInfer`. Makes the buffers of partials too: combine reads a tensor of the caller."""
        import torch
        from flashinfer.moe_ep.backends.split.comm.nvlink_two_sided.config import (  # type: ignore[import-not-found]
            NVLinkTwoSidedConfig,
        )

        shape = (self._most * self._point.ep_size, self._point.model.hidden)
        self._partials = [torch.zeros(shape, dtype=torch.bfloat16, device=self._device) for _ in self._inputs]
        return NVLinkTwoSidedConfig()

    def dropped_id(self, point: Point) -> int:
        """See `FlashInfer`. Its kernels find an id's rank by a division that makes -1 one of rank 0; what comes after
        the last slot is nobody's."""
        return point.placement.num_slots

    def sources(self, tokens_per_rank: int) -> "Tensor | None":
        """See `FlashInfer`. Rows of all sources lie one after another without gaps (csrc/nvlink_two_sided_prepare.cu of
        0.7.4 adds up counts of rows), so a source begins where those before it end."""
        return None

    def stage_ranks(self, set_index: int, partials: "Sequence[Tensor]") -> None:
        """See `GpuBackend`. Where rows lie follows the routing, hence a buffer for each set."""
        self._partials[set_index][self._at] = partials[0].to(self._device)

    def combine(self, set_index: int) -> None:
        """See `Backend`."""
        self._communication.combine(self._partials[set_index], output=self._out[set_index])

    def _num_sms(self) -> int:
        """Channels over half of the multiprocessors, each of which sends with a block for some peers and receives with
        as many (computeMoeCommChannelCount in csrc/nvlink_two_sided_alltoall.cuh of 0.7.4)."""
        blocks = 2 * -(-self._point.ep_size // PEERS_PER_BLOCK)
        return max(vendor.sm_count() // 2 // blocks, 1) * blocks if vendor.sm_count() else 0

    def describe(self) -> Description:
        """See `Backend`."""
        queues = sum(
            int(held.shape[1]) * held.element_size()
            for name in ("_workspace", "_prepare_workspace")
            if (held := getattr(self._communication, name, None)) is not None
        )
        return Description(
            version=vendor.version_of("flashinfer-python"),
            transport="nvlink two-sided",
            algorithm="counts, rows and scale rows one after another",
            workspace_bytes=queues + self.workspace_bytes(self._point),
            num_sms=self._num_sms(),
            libraries=self.libraries(),
        )


def _nothing_crosses(point: Point) -> bool:
    """Whether no token of any step has an expert on another rank, as far as a point tells."""
    within = point.model.top_k <= point.experts_per_rank  # a rank with fewer gives all, and others the rest
    return point.routing.kind is RoutingKind.LOCAL_ONLY and point.ep_size > 1 and within
