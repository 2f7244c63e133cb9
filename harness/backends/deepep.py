"""What the adapters of DeepEP share: both generations of the library are imported as `deep_ep`."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from epcross.harness.backends import vendor
from epcross.harness.backends.base import Batch, Group, Reduction, Shard
from epcross.harness.backends.device_inputs import DeviceInputs, OwnedByLibrary, device_inputs
from epcross.harness.backends.gpu import GpuBackend
from epcross.harness.point import Point
from epcross.harness.terms import Domain, GraphSupport
from epcross.kernels.formats import row_size

if TYPE_CHECKING:
    from torch import Tensor

REBUILDS = ("deep-ep", "tokenspeed-deepep")
"""Names that the library, or a rebuild of its sources by others, is distributed under."""


class DeepEP(GpuBackend):
    """One rank a process; inputs where the library reads them."""

    domains = frozenset({Domain.NVLINK, Domain.SHARED_GPU})
    host_sync = False
    graph = GraphSupport.YES
    reduction = Reduction(order="unordered", accumulate="fp32", exact=False)  # ranks as the token's ids name them
    stable_order = False  # the library promises none
    needs: ClassVar[str]  # the class of `deep_ep` that the adapter calls
    remedy: ClassVar[str]
    over: ClassVar[str] = "gloo"  # the torch group that the library is given

    _buffer: Any = None
    _landed: Any = None  # what the last dispatch returned
    _partials: "list[Tensor]"  # of each set, what combine is given

    def unavailable(self) -> str | None:
        """No GPU, no library, or one whose calls take other arguments than these."""
        if reason := vendor.no_gpu((9, 0)) or vendor.no_module("deep_ep", self.remedy):
            return reason
        import deep_ep  # type: ignore[import-not-found]

        if not hasattr(deep_ep, self.needs):
            return f"{vendor.version_of(*REBUILDS)} has no {self.needs}; {self.remedy}"
        return self.differs(getattr(deep_ep, self.needs))

    @abstractmethod
    def differs(self, buffer: Any) -> str | None:
        """How the installed class differs from what the adapter calls; None if it does not."""

    def prepare_ranks(self, point: Point, shards: Sequence[Shard], group: Group) -> None:
        """See `GpuBackend`."""
        import deep_ep  # type: ignore[import-not-found]
        import torch

        (shard,) = shards
        self._point, self._rank, self._group = point, shard.rank, group
        self._tokens, self._capacity = point.tokens[shard.rank], max(1, point.max_tokens_per_rank)
        self._hidden, self._slots = point.model.hidden, point.placement.num_slots
        self._device = vendor.device()
        ids_dtype = getattr(deep_ep, "topk_idx_t", torch.int64)
        self._inputs: list[DeviceInputs] = device_inputs(point, shard, self._device, ids_dtype)
        self.make_buffer(deep_ep, vendor.torch_group(group, self.over))
        vendor.synchronize()

    @abstractmethod
    def make_buffer(self, deep_ep: Any, torch_group: Any) -> None:
        """Make the library's buffer, and the adapter's."""

    def refill_ranks(self, set_index: int, batches: Sequence[Batch]) -> None:
        """See `GpuBackend`."""
        (batch,) = batches
        self._inputs[set_index].refill(batch)

    def zeros(self, *shape: int) -> "Tensor":
        """bf16 on the device."""
        import torch

        return torch.zeros(*shape, dtype=torch.bfloat16, device=self._device)

    def given(self, set_index: int) -> Any:
        """What the library takes as x: rows, or rows and their scales."""
        inputs = self._inputs[set_index]
        return inputs.values if inputs.factors is None else (inputs.values, inputs.factors)

    def held_bytes(self, library_bytes: int) -> int:
        """What this rank holds: the library's buffer, what a dispatch returns, and partials of one set."""
        return library_bytes + vendor.tensor_bytes(self._landed) + self._partials[0].nbytes

    def libraries(self) -> dict[str, str]:
        """Versions as loaded."""
        import torch

        return {"deep_ep": vendor.version_of(*REBUILDS), "torch": torch.__version__, **vendor.loaded_nccl()}

    def close(self) -> None:
        """See `Backend`. A buffer is destroyed by all ranks, when none of them uses it any more."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            vendor.synchronize()
            self._group.barrier()
            buffer.destroy()


def tensors_bytes(point: Point, rows: int) -> int:
    """What a dispatch that has room for so many rows returns, and as many partials."""
    size = row_size(point.dispatch_format, point.model.hidden)
    return rows * (size.padded_bytes + 12 * point.model.top_k + 2 * point.model.hidden)


class DeepEPInSequence(DeepEP):
    """Those that leave rows in one sequence, and whose combine makes a tensor of its own."""

    _out: OwnedByLibrary

    def make_partials(self, rows: int) -> None:
        """Room for what experts return for so many rows, and nothing returned yet."""
        self._partials = [self.zeros(rows, self._hidden) for _ in self._inputs]
        self._out = OwnedByLibrary()

    def stage_ranks(self, set_index: int, partials: "Sequence[Tensor]") -> None:
        """See `GpuBackend`. In the order of rows, hence a buffer for each set."""
        self._partials[set_index][: len(partials[0])] = partials[0]

    def combined_ranks(self, set_index: int) -> "list[Tensor]":
        """See `GpuBackend`."""
        vendor.synchronize()
        return [self._out.get(set_index)]

    def poison(self) -> None:
        """See `Backend`."""
        self._out.poison()

    def close(self) -> None:
        """See `DeepEP`."""
        if self._buffer is not None:
            self._out.clear()
            self._landed = None
        super().close()
