"""DeepEP's second generation, `deep_ep.ElasticBuffer`: kernels compiled at run time, over NCCL's windows.

Dispatch sends a token once to each rank and copies it out of the landing buffer; experts apply weights; combine adds
ranks' partials. Without a sync of the host the receive tensors have room for every token of every rank, and the number
of rows that count is on the GPU.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from epcross.harness.backends import vendor
from epcross.harness.backends.base import ContractShape, Description
from epcross.harness.backends.deepep import REBUILDS, DeepEPInSequence, tensors_bytes
from epcross.harness.backends.gpu import DeviceReceived
from epcross.harness.backends.landing import as_received
from epcross.harness.errors import EpcrossError
from epcross.harness.point import Point, Scalar
from epcross.harness.terms import Boundary, RowFormat, Sharing
from epcross.kernels.formats import row_size

HIDDEN_MULTIPLE = 256
"""What rows are a multiple of: a warp's 16-byte vectors of bf16 (asserted by impls/combine.cuh of 2.1.0, which does not
compile for others)."""

MAX_EXPERTS, MAX_EXPERTS_PER_RANK = 2048, 256
"""What its workspace has room for (common/layout.cuh of 2.1.0)."""

_FORMATS = (RowFormat.BF16, RowFormat.FP8)
_ALIGN_BYTES = 2 << 20  # buffers are multiples of this
_DISPATCH_TAKES = (
    *("x", "topk_idx", "topk_weights", "num_experts", "num_max_tokens_per_rank", "num_sms"),
    *("do_handle_copy", "do_cpu_sync"),
)


class DeepEPV2(DeepEPInSequence):
    """Non-expanded layout, no sync of the host."""

    name = "deepep_v2"
    needs = "ElasticBuffer"
    over = "nccl"  # whose communicator it goes on with
    remedy = "make env-deepep_v2 builds its environment"
    contract_shape = ContractShape(hidden=HIDDEN_MULTIPLE, format_hidden=HIDDEN_MULTIPLE)
    boundary: ClassVar = vendor.boundaries(
        {Boundary.LAYOUT, Boundary.COUNT_EXCHANGE, Boundary.TRANSFER, Boundary.COPY_OUT},
        {Boundary.TRANSFER, Boundary.REDUCE},
    )

    @classmethod
    def option_defaults(cls) -> Mapping[str, Scalar]:
        """`sm_budget` default: few SMs, so that compute may overlap, as the library does unless told otherwise;
        maximum: as many as it takes when told that nothing overlaps. `num_sms` above 0 sets the number itself.
        `timeout_s` bounds waits on the GPU."""
        return {"sm_budget": "default", "num_sms": 0, "timeout_s": 100}

    @classmethod
    def option_problems(cls, options: Mapping[str, Scalar]) -> list[str]:
        """See `Backend`."""
        problems = vendor.not_among(options, sm_budget=("default", "maximum"))
        problems += vendor.too_small(options, num_sms=0, timeout_s=1)
        if vendor.integer(options["num_sms"]) % 2:
            problems.append(f"num_sms={options['num_sms']} must be even, or 0 for the library's choice")
        return problems

    def differs(self, buffer: Any) -> str | None:
        """See `DeepEP`."""
        return (
            vendor.lacks("ElasticBuffer", buffer.__init__, "num_max_tokens_per_rank", "prefer_overlap_with_compute")
            or vendor.lacks("ElasticBuffer.dispatch", buffer.dispatch, *_DISPATCH_TAKES)
            or vendor.lacks("ElasticBuffer.combine", buffer.combine, "x", "handle")
        )

    def unsupported(self, point: Point) -> str | None:
        """Rows that a warp's 16-byte vectors divide, since combine sends bf16 ones whatever dispatch did; as many
        experts as its workspace has room for."""
        problems = vendor.format_problems(self.name, point, dict.fromkeys(_FORMATS, HIDDEN_MULTIPLE))
        if point.model.top_k > 32:
            problems.append(f"{self.name} takes top_k up to 32, not {point.model.top_k}")
        if point.placement.num_slots > MAX_EXPERTS:
            problems.append(f"{self.name} takes up to {MAX_EXPERTS} experts, not {point.placement.num_slots}")
        if point.experts_per_rank > MAX_EXPERTS_PER_RANK:
            problems.append(
                f"{self.name} takes up to {MAX_EXPERTS_PER_RANK} experts per rank, not {point.experts_per_rank}"
            )
        if point.sharing is Sharing.PROCESSES:
            problems.append(
                f"{self.name} does not come back from its first step between processes on one GPU, seen with DeepEP "
                "2.1.0 and NCCL 2.30.7 under MPS; use device=cuda"
            )
        return "; ".join(problems) or None

    def workspace_bytes(self, point: Point) -> int:
        """About what the library asks for at one NVLink domain, which only its compiled part knows exactly: landing
        buffers of both directions, to its alignment; and receive tensors and partials."""
        size = row_size(point.dispatch_format, point.model.hidden)
        slots = max(1, point.max_tokens_per_rank) * point.ep_size
        needed = slots * (size.padded_bytes + 16 * point.model.top_k + 2 * point.model.hidden)
        return -(-needed // _ALIGN_BYTES) * _ALIGN_BYTES + tensors_bytes(point, slots)

    def make_buffer(self, deep_ep: Any, torch_group: Any) -> None:
        """See `DeepEP`."""
        point = self._point
        timeout_s = vendor.integer(self.options["timeout_s"])
        self._buffer = deep_ep.ElasticBuffer(
            torch_group,
            num_max_tokens_per_rank=self._capacity,
            hidden=self._hidden,
            num_topk=point.model.top_k,
            use_fp8_dispatch=point.dispatch_format is RowFormat.FP8,
            prefer_overlap_with_compute=self.options["sm_budget"] == "default",
            num_cpu_timeout_secs=timeout_s,
            num_gpu_timeout_secs=timeout_s,
            explicitly_destroy=True,
        )
        if self._buffer.num_scaleup_ranks != point.ep_size:
            raise EpcrossError(
                f"DeepEP sees {self._buffer.num_scaleup_ranks} of {point.ep_size} ranks in this NVLink domain and "
                "would send to the others over RDMA: that is another exchange than the one asked for"
            )
        self.make_partials(self._capacity * point.ep_size)

    def dispatch(self, set_index: int) -> None:
        """See `Backend`."""
        inputs = self._inputs[set_index]
        self._landed = self._buffer.dispatch(
            self.given(set_index),
            topk_idx=inputs.ids,
            topk_weights=inputs.weights,
            num_experts=self._slots,
            num_max_tokens_per_rank=self._capacity,
            num_sms=vendor.integer(self.options["num_sms"]),
            do_handle_copy=False,
            do_cpu_sync=False,
        )

    def received_ranks(self, set_index: int) -> list[DeviceReceived]:
        """See `GpuBackend`. Ids arrive numbered from this rank's first, with -1 for other ranks'."""
        vendor.synchronize()
        x, ids, weights, handle, _ = self._landed
        rows, scales = x if isinstance(x, tuple) else (x, None)
        count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        place = handle.recv_src_metadata[:count, 0]
        local = ids[:count]
        return [
            as_received(
                self._point,
                self._rank,
                source=place.div(self._capacity, rounding_mode="floor"),
                token=place % self._capacity,
                ids=(local + self._rank * self._point.experts_per_rank).where(local >= 0, local),
                weights=weights[:count],
                rows=rows[:count],
                scales=None if scales is None else scales[:count],
            )
        ]

    def combine(self, set_index: int) -> None:
        """See `Backend`."""
        sums, _, _ = self._buffer.combine(self._partials[set_index], handle=self._landed[3])
        self._out.put(set_index, sums)

    def describe(self) -> Description:
        """See `Backend`."""
        return Description(
            version=vendor.version_of(*REBUILDS),
            transport="nvlink, nccl windows",
            algorithm=f"not expanded, sm_budget {self.options['sm_budget']}",
            kernels=("dispatch", "dispatch_copy_epilogue", "combine", "combine_reduce_epilogue"),
            workspace_bytes=self.held_bytes(self._buffer.num_bytes),
            num_sms=0 if self._landed is None else self._landed[3].num_sms,
            libraries=self.libraries(),
        )
