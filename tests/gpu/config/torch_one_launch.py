"""A one-launch exchange in plain torch operations, on any device torch has: it takes the harness through its GPU path
without a kernel of ours, and gives tests something whose results are known."""

from collections.abc import Sequence
from typing import Any

from epcross.harness.backends.base import Batch, Description, Group, Shard
from epcross.harness.backends.gpu import DeviceReceived, GpuBackend, InPlace, Landed
from epcross.harness.point import Point
from epcross.harness.terms import Boundary, Domain, GraphSupport, Phase, RowFormat, Sharing
from epcross.kernels.formats import row_size

_DISPATCH = frozenset({Boundary.LAYOUT, Boundary.TRANSFER})
_COMBINE = frozenset({Boundary.TRANSFER, Boundary.REDUCE})


class TorchOneLaunch(GpuBackend):
    """Every row goes to every rank; a mask says which count."""

    name = "torch_one_launch"
    domains = frozenset({Domain.SHARED_GPU})
    boundary = {Phase.DISPATCH: _DISPATCH, Phase.COMBINE: _COMBINE, Phase.ROUND_TRIP: _DISPATCH | _COMBINE}  # noqa: RUF012
    host_sync = False
    graph = GraphSupport.YES

    def unavailable(self) -> str | None:
        try:
            import torch  # noqa: F401
        except ImportError:
            return "it needs torch; install it"
        return None

    def unsupported(self, point: Point) -> str | None:
        if point.sharing is not Sharing.ONE_LAUNCH:
            return f"{self.name} holds all ranks in one process; use device=cuda_one_launch"
        return None if point.combine_format is RowFormat.BF16 else f"{self.name} adds bf16 partials"

    def workspace_bytes(self, point: Point) -> int:
        size = row_size(point.dispatch_format, point.model.hidden)
        return point.ep_size * point.max_tokens_per_rank * (size.padded_bytes + 2 * point.model.hidden)

    def prepare_ranks(self, point: Point, shards: Sequence[Shard], group: Group) -> None:
        import torch

        self.torch: Any = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.point, self.ep = point, point.ep_size
        size = row_size(point.dispatch_format, point.model.hidden)
        tokens, top_k = point.max_tokens_per_rank, point.model.top_k
        shape = (len(shards[0].batches), self.ep, tokens)

        def zeros(*width: int, dtype: Any = torch.uint8) -> Any:
            return torch.zeros((*shape, *width), dtype=dtype, device=self.device)

        self.rows, self.scales = zeros(size.padded_row_bytes), zeros(size.padded_scale_bytes)
        self.ids, self.weights = zeros(top_k, dtype=torch.int32), zeros(top_k, dtype=torch.float32)
        # one entry more than there are slots: what a dropped selection (-1) indexes
        slot_rank = [*shards[0].slot_rank.tolist(), -1]
        self.slot_rank = torch.tensor(slot_rank, dtype=torch.int32, device=self.device)
        self.landed = torch.zeros((self.ep, *shape[1:], size.padded_row_bytes), dtype=torch.uint8, device=self.device)
        self.landed_scales = torch.zeros(
            (self.ep, *shape[1:], size.padded_scale_bytes), dtype=torch.uint8, device=self.device
        )
        self.present = torch.zeros((self.ep, *shape[1:]), dtype=torch.bool, device=self.device)
        self.partials = torch.zeros((self.ep, *shape[1:], point.model.hidden), dtype=torch.bfloat16, device=self.device)
        self.sums = zeros(point.model.hidden, dtype=torch.bfloat16)
        for index in range(len(shards[0].batches)):
            self.refill_ranks(index, [shard.batches[index] for shard in shards])

    def refill_ranks(self, set_index: int, batches: Sequence[Batch]) -> None:
        for rank, batch in enumerate(batches):
            count = len(batch.ids)
            self.ids[set_index, rank] = -1
            for name in ("ids", "weights", "rows", "scales"):
                given = self.torch.from_numpy(getattr(batch, name)).to(self.device)
                getattr(self, name)[set_index, rank, :count] = given

    def dispatch(self, set_index: int) -> None:
        self.last = set_index
        places = self.slot_rank[self.ids[set_index].long()]  # [ep, T, top_k]
        for rank in range(self.ep):
            self.present[rank] = (places == rank).any(dim=2)
        self.landed.copy_(self.rows[set_index].expand_as(self.landed))
        self.landed_scales.copy_(self.scales[set_index].expand_as(self.landed_scales))

    def received_ranks(self, set_index: int) -> list[DeviceReceived]:
        torch, found = self.torch, []
        for rank in range(self.ep):
            source, token = self.present[rank].nonzero(as_tuple=True)
            ids, weights = self.ids[set_index, source, token], self.weights[set_index, source, token]
            here = self.slot_rank[ids.long()] == rank
            found.append(
                DeviceReceived(
                    source=source.int(),
                    token=token.int(),
                    ids=torch.where(here, ids, torch.full_like(ids, -1)),
                    weights=torch.where(here, weights, torch.zeros_like(weights)),
                    rows=self.landed[rank, source, token],
                    scales=self.landed_scales[rank, source, token],
                )
            )
        return found

    def stage_ranks(self, set_index: int, partials: Sequence[Any]) -> None:
        for rank, here in enumerate(partials):
            source, token = self.present[rank].nonzero(as_tuple=True)
            self.partials[rank, source, token] = here

    def combine(self, set_index: int) -> None:
        torch = self.torch
        total = torch.zeros(self.sums[set_index].shape, dtype=torch.float32, device=self.device)
        for rank in range(self.ep):
            total += torch.where(self.present[rank][..., None], self.partials[rank], 0).float()
        self.sums[set_index].copy_(total)

    def combined_ranks(self, set_index: int) -> list[Any]:
        return [self.sums[set_index, rank, :count] for rank, count in enumerate(self.point.tokens)]

    def in_place(self) -> InPlace:
        return InPlace(
            landed=self._landed_in_place,
            partials=list(self.partials),
            sums=[[rank[:count] for rank, count in zip(s, self.point.tokens, strict=True)] for s in self.sums],
        )

    def _landed_in_place(self) -> list[Landed]:
        ids, weights = self.ids[self.last], self.weights[self.last]
        return [
            Landed(present=present, rows=rows, scales=scales, ids=ids, weights=weights)
            for present, rows, scales in zip(self.present, self.landed, self.landed_scales, strict=True)
        ]

    def poison(self) -> None:
        self.sums.fill_(float("nan"))
        self.landed.fill_(0xFF)

    def describe(self) -> Description:
        return Description(
            version=f"torch {self.torch.__version__}",
            transport="one process",
            algorithm="every row to every rank",
            workspace_bytes=self.workspace_bytes(self.point),
            libraries={"torch": self.torch.__version__},
        )

    def close(self) -> None:
        return
