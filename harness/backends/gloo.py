"""The outside peer on the CPU: what a user gets from `torch.distributed` without writing a kernel.

Each dispatch is two `all_to_all_single` calls over gloo's TCP transport: one for the counts, whose result the host
needs before it can size the second, and one for the rows. A row goes once to each rank that holds one of the token's
experts, with its scales, ids and weights in the same message:

    | row, padded | scale row, padded | token, ids[top_k], weights[top_k], zeros to 16 bytes |

Combine sends one bf16 partial back for each such row and adds them in fp32 in ascending rank order.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from epcross.harness.backends.base import (
    Backend,
    Batch,
    BF16Bits,
    Bytes,
    Description,
    Float32,
    Group,
    Int32,
    Received,
    Shard,
)
from epcross.harness.point import Point
from epcross.harness.terms import Boundary, Domain, Phase, RowFormat, Scope
from epcross.kernels.extras import Extra
from epcross.kernels.formats import padded, row_size

if TYPE_CHECKING:
    from torch import Tensor

CACHE_LINE_BYTES = 64
COUNT_BYTES = 8  # one int64 for each destination

_DISPATCH = frozenset({Boundary.LAYOUT, Boundary.PACK, Boundary.COUNT_EXCHANGE, Boundary.TRANSFER})
_COMBINE = frozenset({Boundary.TRANSFER, Boundary.REDUCE})


def _meta_bytes(top_k: int) -> int:
    """What travels beside a row: its token index, ids and weights, 4 bytes each, padded."""
    return padded(4 * (1 + 2 * top_k))


class Gloo(Backend):
    """`torch.distributed.all_to_all_single` on gloo."""

    name = "gloo"
    domains = frozenset({Domain.CPU})
    scopes = frozenset({Scope.SCALE_UP, Scope.SCALE_OUT})
    boundary: ClassVar[Mapping[Phase, frozenset[Boundary]]] = {
        Phase.DISPATCH: _DISPATCH,
        Phase.COMBINE: _COMBINE,
        Phase.ROUND_TRIP: _DISPATCH | _COMBINE | {Boundary.EXPERTS_IDENTITY},
    }
    host_sync = True  # the received counts size the row exchange
    _group: Any = None

    def unavailable(self) -> str | None:
        """See `Backend`. Imports torch."""
        try:
            import torch.distributed as dist

            usable = dist.is_available() and dist.is_gloo_available()
        except ImportError:
            return f"torch is not installed; `make torch`, or {Extra.GLOO.install}, with a CPU index of torch"
        except Exception as error:
            return f"torch does not import here ({error}); install a CPU build of it with `make torch`"
        return None if usable else "this torch was built without gloo; install a CPU build of it with `make torch`"

    def unsupported(self, point: Point) -> str | None:
        """See `Backend`."""
        if point.domain is not Domain.CPU:
            return f"domain={point.domain}: gloo moves host memory; only domain=cpu is measured with it"
        if point.combine_format is not RowFormat.BF16:
            return f"combine_format={point.combine_format}: gloo returns bf16 partials only"
        return None

    def workspace_bytes(self, point: Point) -> int:
        """Send and landing buffers of both directions; inputs, staged partials and sums are the caller's anywhere."""
        size = row_size(point.dispatch_format, point.model.hidden)
        record = size.padded_bytes + _meta_bytes(point.model.top_k)
        partial = row_size(point.combine_format, point.model.hidden).row_bytes
        most = point.max_tokens_per_rank
        sent = most * min(point.ep_size, point.model.top_k)
        landed = most * point.ep_size
        return (sent + landed) * (record + partial) + 2 * point.ep_size * COUNT_BYTES

    def prepare(self, point: Point, shard: Shard, group: Group) -> None:
        """See `Backend`."""
        import torch

        torch.set_num_threads(1)  # one core per rank, as for every backend of this domain
        size = row_size(point.dispatch_format, point.model.hidden)
        self._rank, self._ranks = shard.rank, point.ep_size
        self._top_k, self._hidden = point.model.top_k, point.model.hidden
        self._row, self._scale = size.padded_row_bytes, size.padded_scale_bytes
        self._padding = self._row - size.row_bytes + self._scale - size.scale_bytes
        self._record = size.padded_bytes + _meta_bytes(self._top_k)
        self._tokens = shard.tokens[shard.rank]
        # A dropped selection (-1) indexes the last entry: a rank that does not exist.
        self._slot_rank = np.append(shard.slot_rank, np.int32(self._ranks))

        self._inputs = [self._input() for _ in shard.batches]
        self._staged = [_zeros(0, 2 * self._hidden) for _ in shard.batches]
        sent = self._tokens * min(self._ranks, self._top_k)
        landed = sum(shard.tokens)
        self._send, self._landed = _zeros(sent, self._record), _zeros(landed, self._record)
        self._partials, self._returned = _zeros(landed, 2 * self._hidden), _zeros(sent, 2 * self._hidden)
        self._sums = torch.zeros(self._tokens, self._hidden)
        self._out = torch.zeros(self._tokens, self._hidden, dtype=torch.bfloat16)
        self._send_counts = torch.zeros(self._ranks, dtype=torch.int64)
        self._landed_counts = torch.zeros(self._ranks, dtype=torch.int64)
        self._sent_to: list[int] = [0] * self._ranks
        self._landed_from: list[int] = [0] * self._ranks
        self._sent_tokens = torch.zeros(0, dtype=torch.int64)
        self._group = group.torch("gloo")
        for index, batch in enumerate(shard.batches):
            self.refill(index, batch)

    def _input(self) -> dict[str, "Tensor"]:
        fields = {"rows": self._row, "scales": self._scale, "meta": self._record - self._row - self._scale}
        return {name: _zeros(self._tokens, width) for name, width in fields.items()}

    def refill(self, set_index: int, batch: Batch) -> None:
        """See `Backend`."""
        held = self._inputs[set_index]
        held["rows"].numpy()[:] = batch.rows
        held["scales"].numpy()[:] = batch.scales
        meta = held["meta"].numpy().view(np.int32)
        meta[:, 0] = np.arange(self._tokens)
        meta[:, 1 : 1 + self._top_k] = batch.ids
        meta[:, 1 + self._top_k : 1 + 2 * self._top_k] = batch.weights.view(np.int32)

    def _layout(self, set_index: int) -> tuple["Tensor", "Tensor"]:
        """Who gets what: rows to each rank [ep_size], and the token of each, ascending within ascending ranks."""
        import torch

        meta = self._inputs[set_index]["meta"].numpy().view(np.int32)
        wanted = np.zeros((self._ranks + 1, self._tokens), dtype=np.bool_)
        wanted[self._slot_rank[meta[:, 1 : 1 + self._top_k]], np.arange(self._tokens)[:, None]] = True
        wanted = wanted[: self._ranks]
        return torch.from_numpy(wanted.sum(axis=1)), torch.from_numpy(np.nonzero(wanted)[1])

    def dispatch(self, set_index: int) -> None:
        """See `Backend`."""
        import torch
        import torch.distributed as dist

        counts, tokens = self._layout(set_index)
        self._send_counts.copy_(counts)
        begin = 0
        for field in self._inputs[set_index].values():
            end = begin + field.shape[1]
            torch.index_select(field, 0, tokens, out=self._send[: len(tokens), begin:end])
            begin = end
        dist.all_to_all_single(self._landed_counts, self._send_counts, group=self._group)
        self._sent_tokens = tokens
        self._sent_to, self._landed_from = self._send_counts.tolist(), self._landed_counts.tolist()
        self._exchange(self._landed, self._landed_from, self._send, self._sent_to)

    def _exchange(self, into: "Tensor", into_rows: list[int], source: "Tensor", source_rows: list[int]) -> None:
        import torch.distributed as dist

        into, source = into[: sum(into_rows)], source[: sum(source_rows)]
        dist.all_to_all_single(into, source, into_rows, source_rows, group=self._group)

    def received(self, set_index: int) -> Received:
        """See `Backend`."""
        landed = self._landed[: sum(self._landed_from)].numpy()
        meta: Int32 = landed[:, self._row + self._scale :].copy().view(np.int32)
        ids = meta[:, 1 : 1 + self._top_k]
        weights: Float32 = meta[:, 1 + self._top_k : 1 + 2 * self._top_k].copy().view(np.float32)
        here = self._slot_rank[ids] == self._rank
        rows: Bytes = landed[:, : self._row].copy()
        return Received(
            source=np.repeat(np.arange(self._ranks, dtype=np.int32), self._landed_from),
            token=meta[:, 0].copy(),
            ids=np.where(here, ids, np.int32(-1)),
            weights=np.where(here, weights, np.float32(0)),
            rows=rows,
            scales=landed[:, self._row : self._row + self._scale].copy(),
        )

    def stage(self, set_index: int, partials: BF16Bits) -> None:
        """See `Backend`."""
        self._staged[set_index] = _zeros(len(partials), 2 * self._hidden)
        self._staged[set_index].numpy().view(np.uint16)[:] = partials
        self._partials[: len(partials)].copy_(self._staged[set_index])

    def experts(self, set_index: int) -> None:
        """See `Backend`."""
        landed = self._landed[: sum(self._landed_from)]
        landed[:, ::CACHE_LINE_BYTES].sum()  # eager: torch never drops a read whose result is unused
        staged = self._staged[set_index]
        self._partials[: len(staged)].copy_(staged)

    def combine(self, set_index: int) -> None:
        """See `Backend`."""
        import torch

        self._exchange(self._returned, self._sent_to, self._partials, self._landed_from)
        returned = self._returned.view(torch.bfloat16)
        self._sums.zero_()
        begin = 0
        for (
            rows
        ) in self._sent_to:  # a token occurs at most once for each rank, so the order of its sum is that of ranks
            end = begin + rows
            self._sums.index_add_(0, self._sent_tokens[begin:end], returned[begin:end].float())
            begin = end
        self._out.copy_(self._sums)

    def combined(self, set_index: int) -> BF16Bits:
        """See `Backend`."""
        import torch

        return self._out.view(torch.int16).numpy().view(np.uint16).copy()

    def poison(self) -> None:
        """See `Backend`. All ones: no valid token index, and a NaN in bf16."""
        for buffer in (self._landed, self._returned):
            buffer.fill_(0xFF)
        self._out.fill_(float("nan"))

    def describe(self) -> Description:
        """See `Backend`."""
        import torch

        rows = [int(self._layout(index)[0].sum()) for index in range(len(self._inputs))]
        beside_row = self._record - self._row - self._scale + self._padding
        buffers = (self._send, self._landed, self._partials, self._returned, self._send_counts, self._landed_counts)
        return Description(
            version=f"torch {torch.__version__}",
            transport="gloo tcp",
            algorithm="all_to_all_single, counts first",
            workspace_bytes=sum(buffer.nbytes for buffer in buffers),
            protocol_bytes=self._ranks * COUNT_BYTES + round(beside_row * sum(rows) / len(rows)),
            libraries={"torch": torch.__version__},
        )

    def close(self) -> None:
        """See `Backend`."""
        if self._group is not None:
            import torch.distributed as dist

            group, self._group = self._group, None
            if group is not dist.group.WORLD:  # the world outlives a point: it belongs to whoever made the group
                dist.destroy_process_group(group)


def _zeros(rows: int, width_bytes: int) -> "Tensor":
    import torch

    return torch.zeros(rows, width_bytes, dtype=torch.uint8)
