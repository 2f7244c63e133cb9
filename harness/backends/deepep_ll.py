"""DeepEP's first generation, `deep_ep.Buffer`, its low-latency kernels: one copy of a row for each selection.

Rows lie by expert and carry neither ids nor weights: combine, at the token's own rank, multiplies and adds one partial
for each selection. The adapter learns ids and weights of received tokens from their ranks, outside the window.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from epcross.harness.backends import vendor
from epcross.harness.backends.base import ContractShape, Description
from epcross.harness.backends.deepep import REBUILDS, DeepEP
from epcross.harness.backends.gpu import DeviceReceived
from epcross.harness.backends.landing import as_bytes, as_received, fold, gather_routing
from epcross.harness.point import Point, Scalar
from epcross.harness.terms import Boundary, RowFormat, WeightsBy

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
"""Rows that its kernels are compiled for."""

MAX_TOP_K = 9
"""Of the versions that wheels exist for; later sources allow 11."""

QUEUE_DEPTH = 1024
"""NVSHMEM's, which must hold two requests for each token and two more."""

_HEADER_BYTES = 16  # before each dispatched row
_TAKES = ("x", "topk_idx", "num_max_dispatch_tokens_per_rank", "num_experts", "use_fp8")


def capacity(point: Point, multiple: int = 4) -> int:
    """Tokens per rank that the library is told: ranks times this must be a multiple of 4, or of what experts ask."""
    step = room_step(point, multiple)
    return -(-max(2, point.max_tokens_per_rank) // step) * step


def room_step(point: Point, multiple: int) -> int:
    """What a rank's room must be a multiple of."""
    return multiple // math.gcd(multiple, point.ep_size)


def blocks(slots: int, tokens: int, sms: int) -> int:
    """Of the larger of its two kernels: a block for as many experts as it takes for all to have one; of combine, one
    for each token if those are more, or for as many tokens (launches of csrc/kernels/internode_ll.cu)."""
    return max(-(-count // -(-count // sms)) for count in (slots, max(1, tokens)))


class DeepEPLowLatency(DeepEP):
    """BF16 rows; dispatch copies what arrived for an expert to tensors of its own."""

    name = "deepep_ll"
    needs = "Buffer"
    remedy = "make env-deepep_v1 builds its environment"
    weights_by = WeightsBy.COMBINE
    contract_shape = ContractShape(hidden=HIDDEN[0], format_hidden=HIDDEN[0])
    room_multiple: ClassVar[int] = 4
    """What the rows that an expert has room for are a multiple of."""
    boundary: ClassVar = vendor.boundaries(
        {Boundary.LAYOUT, Boundary.PACK, Boundary.COUNT_EXCHANGE, Boundary.TRANSFER, Boundary.COPY_OUT},
        {Boundary.PACK, Boundary.TRANSFER, Boundary.REDUCE},
    )

    @classmethod
    def option_defaults(cls) -> Mapping[str, Scalar]:
        """`allow_mnnvl`: ranks on several hosts of one NVLink domain, as on GB200."""
        return {"allow_mnnvl": False}

    def differs(self, buffer: Any) -> str | None:
        """See `DeepEP`."""
        return (
            vendor.lacks("Buffer", buffer.__init__, "low_latency_mode", "num_qps_per_rank", "explicitly_destroy")
            or vendor.lacks("Buffer.low_latency_dispatch", buffer.low_latency_dispatch, *_TAKES)
            or vendor.lacks("Buffer.low_latency_combine", buffer.low_latency_combine, "handle", "out")
        )

    def unsupported(self, point: Point) -> str | None:
        """The shapes that are compiled in, and fp8: the library makes its fp8 rows itself, from bf16 ones."""
        if point.dispatch_format is not RowFormat.BF16:
            return (
                f"{self.name} takes bf16 rows and makes fp8 ones inside dispatch, so it cannot be given rows that are "
                f"{point.dispatch_format} already; use dispatch_format=bf16"
            )
        problems = vendor.format_problems(self.name, point, {RowFormat.BF16: 1})
        if point.model.hidden not in HIDDEN:
            problems.append(f"{self.name} takes hidden {', '.join(map(str, HIDDEN))}, not {point.model.hidden}")
        if point.model.top_k > MAX_TOP_K:
            problems.append(f"{self.name} takes top_k up to {MAX_TOP_K}, not {point.model.top_k}")
        if 2 * (self.room(point) + 1) > QUEUE_DEPTH:
            most, step = QUEUE_DEPTH // 2 - 1, room_step(point, self.room_multiple)
            why = f" ({most}, in steps of {step})" if most % step else ""
            problems.append(
                f"{self.name} holds at most {most // step * step} tokens per rank at EP {point.ep_size}{why}, not"
                f" {point.max_tokens_per_rank}"
            )
        most = blocks(point.placement.num_slots, max(point.tokens), vendor.LEAST_SMS)
        problems += vendor.crowding_problems(self.name, point, most, "use device=cuda")
        return "; ".join(problems) or None

    def room(self, point: Point) -> int:
        """Tokens per rank that the library is told."""
        return capacity(point, self.room_multiple)

    def workspace_bytes(self, point: Point) -> int:
        """Two sets of send, receive and signalling buffers, as the library lays them out; rows and partials beside."""
        tokens, slots, row = self.room(point), point.placement.num_slots, 2 * point.model.hidden
        send = max(tokens * (_HEADER_BYTES + row), slots * tokens * row)
        receive = max(slots * tokens * (_HEADER_BYTES + row), slots * tokens * row)
        return 2 * (send + receive + 4 * slots) + 2 * slots * tokens * row

    def make_buffer(self, deep_ep: Any, torch_group: Any) -> None:
        """See `DeepEP`."""
        point = self._point
        self._most = self.room(point)
        ranks = point.ep_size
        self._bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(self._most, self._hidden, ranks, self._slots)
        self._buffer = deep_ep.Buffer(
            torch_group,
            0,
            self._bytes,
            low_latency_mode=True,
            num_qps_per_rank=point.experts_per_rank,
            allow_nvlink_for_low_latency_mode=True,
            allow_mnnvl=bool(self.options["allow_mnnvl"]),
            explicitly_destroy=True,
        )
        shape = (point.experts_per_rank, self._most * ranks, self._hidden)
        self._partials = [self.zeros(*shape) for _ in self._inputs]
        self._out = [self.zeros(self._tokens, self._hidden) for _ in self._inputs]

    def dispatch(self, set_index: int) -> None:
        """See `Backend`."""
        inputs = self._inputs[set_index]
        self._landed = self._buffer.low_latency_dispatch(
            inputs.values, inputs.ids, self._most, self._slots, use_fp8=False
        )

    def received_ranks(self, set_index: int) -> list[DeviceReceived]:
        """See `GpuBackend`. Collective: ids and weights come from the ranks of the tokens."""
        import torch

        vendor.synchronize()
        rows, counts, handle, _, _ = self._landed
        info, ranges = handle[0], handle[1]
        copies, sources, slots = [], [], []
        first = self._rank * self._point.experts_per_rank
        for expert, (per_source, total) in enumerate(zip(ranges.tolist(), counts.tolist(), strict=True)):
            told = 0
            for source, packed in enumerate(per_source):
                count, begin = packed & 0xFFFFFFFF, packed >> 32
                told += count
                copies += range(expert * rows.shape[1] + begin, expert * rows.shape[1] + begin + count)
                sources += [source] * count
                slots += [first + expert] * count
            assert told == total, f"expert {expert} counts {total} tokens and its ranges {told}"
        device = rows.device
        at = torch.tensor(copies, dtype=torch.int64, device=device)
        token = info.flatten()[at]
        source = torch.tensor(sources, dtype=torch.int64, device=device)
        slot = torch.tensor(slots, dtype=torch.int64, device=device)
        contents = as_bytes(rows.flatten(0, 1)[at])
        folded = fold(source, token, slot, contents, stride=max(1, self._most))
        self._copies = at, folded.row_of
        ids, weights = self._routing(set_index, folded.source, folded.token)
        delivered = torch.zeros(len(folded.token), self._slots, dtype=torch.bool, device=device)
        delivered[folded.row_of, slot] = True
        # an id counts where its copy came; a copy that no id of the token asked for shows as a wrong id
        came = delivered.gather(1, ids.clamp(min=0).long()) & (ids >= 0)
        place = torch.where(ids >= 0, ids, self._slots).long()  # one column more for dropped ones
        asked = torch.zeros(len(ids), self._slots + 1, dtype=torch.bool, device=device).scatter_(1, place, True)
        ids = torch.where(came, ids, torch.full_like(ids, -1))
        stray = delivered & ~asked[:, : self._slots]
        ids[:, 0] = torch.where(stray.any(dim=1), stray.int().argmax(dim=1).int(), ids[:, 0])
        return [
            as_received(
                self._point,
                self._rank,
                source=folded.source,
                token=folded.token,
                ids=ids,
                weights=weights,
                rows=rows.flatten(0, 1)[at][folded.representative],
                scales=None,
            )
        ]

    def _routing(self, set_index: int, source: "Tensor", token: "Tensor") -> "tuple[Tensor, Tensor]":
        """Ids and weights of these tokens; of a token that does not exist, none."""
        import numpy as np
        import torch

        gathered = gather_routing(self._group, self._inputs[set_index])
        top_k = self._point.model.top_k
        ids = np.full((len(gathered), self._most, top_k), -1, np.int32)
        weights = np.zeros((len(gathered), self._most, top_k), np.float32)
        for rank, (of_ids, of_weights) in enumerate(gathered):
            ids[rank, : len(of_ids)], weights[rank, : len(of_weights)] = of_ids, of_weights
        at = source.long().cpu().numpy(), token.long().clamp(0, self._most - 1).cpu().numpy()
        device = source.device
        return torch.from_numpy(ids[at]).to(device), torch.from_numpy(weights[at]).to(device)

    def stage_ranks(self, set_index: int, partials: "Sequence[Tensor]") -> None:
        """See `GpuBackend`. Each copy gets its row's partial."""
        at, row_of = self._copies
        self._partials[set_index].flatten(0, 1)[at] = partials[0].to(self._device)[row_of]

    def combine(self, set_index: int) -> None:
        """See `Backend`."""
        inputs = self._inputs[set_index]
        self._buffer.low_latency_combine(
            self._partials[set_index], inputs.ids, inputs.weights, self._landed[2], out=self._out[set_index]
        )

    def combined_ranks(self, set_index: int) -> "list[Tensor]":
        """See `GpuBackend`."""
        vendor.synchronize()
        return [self._out[set_index]]

    def poison(self) -> None:
        """See `Backend`."""
        for out in self._out:
            out.fill_(float("nan"))

    def _num_sms(self) -> int:
        return blocks(self._slots, self._tokens, sms) if (sms := vendor.sm_count()) else 0

    def describe(self) -> Description:
        """See `Backend`."""
        return Description(
            version=vendor.version_of(*REBUILDS),
            transport="nvlink through nvshmem",
            algorithm="low latency, one copy for each selection",
            workspace_bytes=self.held_bytes(self._bytes),
            num_sms=self._num_sms(),
            libraries=self.libraries(),
        )

    def close(self) -> None:
        """See `Backend`."""
        self._landed = None
        super().close()
