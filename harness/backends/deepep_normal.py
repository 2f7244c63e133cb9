"""DeepEP's first generation, `deep_ep.Buffer`, its throughput kernels inside one node: chunks through NVLink queues.

The layout step is a call of its own and lies inside the window, as an engine pays it in every step. With
`num_worst_tokens` the receive tensors have room for every token of every rank and the host waits for nothing.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from epcross.harness.backends import vendor
from epcross.harness.backends.base import ContractShape, Description
from epcross.harness.backends.deepep import REBUILDS, DeepEPInSequence, tensors_bytes
from epcross.harness.backends.gpu import DeviceReceived
from epcross.harness.backends.landing import as_received
from epcross.harness.point import Point, Scalar
from epcross.harness.terms import Boundary, RowFormat
from epcross.kernels.formats import row_size

RANKS = (2, 4, 8)
"""Sizes that its kernels for one node are compiled for."""

HALF_ROW_BYTES = 8192 - 8
"""What a warp of dispatch has room for: half a row, and its barrier (csrc/kernels/intranode.cu)."""

MAX_TOP_K = 32
MAX_EXPERTS_PER_RANK = 128
"""Threads of the block that counts, one for each (notify_dispatch of the same file)."""

CHUNK_TOKENS = 256  # received tokens that a queue of the default configuration holds
BESIDE_ROW_BYTES = 128 * (8 + 4) + 75 * 4  # ids, weights and scales beside each, at the library's own upper limits


class DeepEPNormal(DeepEPInSequence):
    """Intranode, worst-case receive tensors."""

    name = "deepep_normal"
    needs = "Buffer"
    remedy = "make env-deepep_v1 builds its environment"
    contract_shape = ContractShape(format_hidden=384)  # three scales of fp8
    boundary: ClassVar = vendor.boundaries(
        {Boundary.LAYOUT, Boundary.COUNT_EXCHANGE, Boundary.PACK, Boundary.TRANSFER, Boundary.COPY_OUT},
        {Boundary.PACK, Boundary.TRANSFER, Boundary.REDUCE},
    )

    @classmethod
    def option_defaults(cls) -> Mapping[str, Scalar]:
        """`num_sms`, even: half of them send, half receive; 20 is the library's default."""
        return {"num_sms": 20}

    @classmethod
    def option_problems(cls, options: Mapping[str, Scalar]) -> list[str]:
        """See `Backend`."""
        sms = vendor.integer(options["num_sms"])
        return [f"num_sms={sms} must be even and at least 2"] if sms < 2 or sms % 2 else []

    def differs(self, buffer: Any) -> str | None:
        """See `DeepEP`."""
        return (
            vendor.lacks("Buffer", buffer.__init__, "num_nvl_bytes", "explicitly_destroy")
            or vendor.lacks("Buffer.dispatch", buffer.dispatch, "num_worst_tokens", "config", "topk_weights")
            or vendor.lacks("Buffer.combine", buffer.combine, "x", "handle", "config")
        )

    def unsupported(self, point: Point) -> str | None:
        """The sizes of groups, rows that travel in two halves of 16-byte vectors, fp8 ones with a scale for each 128
        values; and ranks on one GPU that do not fit on it together."""
        problems = vendor.format_problems(self.name, point, {RowFormat.BF16: 16, RowFormat.FP8: 128})
        row_bytes = row_size(point.dispatch_format, point.model.hidden).row_bytes
        if row_bytes > 2 * HALF_ROW_BYTES:
            problems.append(
                f"{self.name} dispatches rows of up to {2 * HALF_ROW_BYTES} bytes, not {row_bytes}, those of "
                f"hidden={point.model.hidden} in {point.dispatch_format}"
            )
        if point.model.top_k > MAX_TOP_K:
            problems.append(f"{self.name} takes top_k up to {MAX_TOP_K}, not {point.model.top_k}")
        if point.experts_per_rank > MAX_EXPERTS_PER_RANK:
            problems.append(
                f"{self.name} takes up to {MAX_EXPERTS_PER_RANK} experts per rank, not {point.experts_per_rank}"
            )
        if point.ep_size not in RANKS:
            problems.append(f"inside a node {self.name} takes {', '.join(map(str, RANKS))} ranks, not {point.ep_size}")
        sms = vendor.integer(self.options["num_sms"])
        fitting = vendor.LEAST_SMS // point.ep_size // 2 * 2
        problems += vendor.crowding_problems(self.name, point, sms, f"num_sms={fitting} fits")
        return "; ".join(problems) or None

    def workspace_bytes(self, point: Point) -> int:
        """The queues, about what the library's own hint says, which takes the library; receive tensors and partials."""
        channels = vendor.integer(self.options["num_sms"]) // 2
        queues = channels * point.ep_size * CHUNK_TOKENS * (2 * point.model.hidden + BESIDE_ROW_BYTES)
        return queues + tensors_bytes(point, max(1, point.max_tokens_per_rank) * point.ep_size)

    def make_buffer(self, deep_ep: Any, torch_group: Any) -> None:
        """See `DeepEP`."""
        ranks = self._point.ep_size
        deep_ep.Buffer.set_num_sms(vendor.integer(self.options["num_sms"]))
        self._configs = deep_ep.Buffer.get_dispatch_config(ranks), deep_ep.Buffer.get_combine_config(ranks)
        self._bytes = max(config.get_nvl_buffer_size_hint(2 * self._hidden, ranks) for config in self._configs)
        self._buffer = deep_ep.Buffer(torch_group, self._bytes, 0, explicitly_destroy=True)
        self._worst = self._capacity * ranks
        self.make_partials(self._worst)

    def dispatch(self, set_index: int) -> None:
        """See `Backend`."""
        inputs = self._inputs[set_index]
        per_rank, _, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(inputs.ids, self._slots)
        self._landed = self._buffer.dispatch(
            self.given(set_index),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=inputs.ids,
            topk_weights=inputs.weights,
            num_worst_tokens=self._worst,
            config=self._configs[0],
        )

    def received_ranks(self, set_index: int) -> list[DeviceReceived]:
        """See `GpuBackend`. Rows of a source are contiguous, sources ascending; the handle says how many, and which."""
        import torch

        vendor.synchronize()
        x, ids, weights, _, handle, _ = self._landed
        rows, scales = x if isinstance(x, tuple) else (x, None)
        ends = handle[0][:, self._rank].long()
        count = int(ends[-1])
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        local = ids[:count]
        return [
            as_received(
                self._point,
                self._rank,
                source=torch.arange(len(counts), device=counts.device).repeat_interleave(counts),
                token=handle[3][:count],
                ids=(local + self._rank * self._point.experts_per_rank).where(local >= 0, local),
                weights=weights[:count],
                rows=rows[:count],
                scales=None if scales is None else scales[:count],
            )
        ]

    def combine(self, set_index: int) -> None:
        """See `Backend`."""
        sums, _, _ = self._buffer.combine(self._partials[set_index], handle=self._landed[4], config=self._configs[1])
        self._out.put(set_index, sums)

    def describe(self) -> Description:
        """See `Backend`."""
        return Description(
            version=vendor.version_of(*REBUILDS),
            transport="nvlink, queues in device memory",
            algorithm="intranode, worst-case receive tensors",
            workspace_bytes=self.held_bytes(self._bytes),
            num_sms=vendor.integer(self.options["num_sms"]),
            libraries=self.libraries(),
        )
