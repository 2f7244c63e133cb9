"""Our own one-sided exchange between GPUs, `kernels.onesided`, under the contract: one protocol each."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from epcross.harness.backends.base import Batch, Description, Group, Shard
from epcross.harness.backends.gpu import DeviceReceived, GpuBackend, InPlace, Landed
from epcross.harness.backends.onesided_bytes import own_bytes, sent_bytes
from epcross.harness.point import Point, Scalar
from epcross.harness.terms import Boundary, Domain, GraphSupport, Phase, RowFormat, Sharing
from epcross.kernels.formats import RowSize, row_size
from epcross.kernels.onesided.agreement import protocols_of, shape_of, unavailable
from epcross.kernels.onesided.exchange import OneSidedAllToAll
from epcross.kernels.onesided.inputs import Options, option_problems, slot_problems
from epcross.kernels.onesided.layout import MAX_LOCAL_RANKS, Protocol, Shape, layout

if TYPE_CHECKING:
    from torch import Tensor

_DISPATCH = frozenset({Boundary.LAYOUT, Boundary.TRANSFER})
_COMBINE = frozenset({Boundary.TRANSFER, Boundary.REDUCE})


class OneSided(GpuBackend):
    """What both protocols have in common."""

    protocol: ClassVar[str]  # one of `Protocol`, or `AUTO`
    domains = frozenset({Domain.NVLINK, Domain.SHARED_GPU})
    host_sync = False
    graph = GraphSupport.YES

    _exchange: OneSidedAllToAll | None = None
    _group: object | None = None  # torch's, where there are several processes

    @classmethod
    def option_defaults(cls) -> Mapping[str, Scalar]:
        """`num_sms` bounds the blocks that wait at once (0: as many as the GPU holds); `programmatic_launch` lets a
        kernel in before the one before has ended; `timeout_s` bounds every wait for a peer."""
        return {"num_sms": 0, "programmatic_launch": True, "timeout_s": 10.0}

    @classmethod
    def option_problems(cls, options: Mapping[str, Scalar]) -> list[str]:
        """See `Backend`."""
        num_sms = options["num_sms"]
        wrong = [] if _number(num_sms) >= 0 else [f"num_sms={num_sms} must be at least 0, which is no bound"]
        return wrong + option_problems(_launch({**options, "num_sms": 0}))

    def unavailable(self) -> str | None:
        """No GPU of a kind that the kernels are made for, no torch for CUDA, or no compiler."""
        return unavailable()

    def unsupported(self, point: Point) -> str | None:
        """bf16 sums, rows of multiples of 16 bytes, and the limits of the layout; and memory, once a GPU is at hand."""
        problems = []
        if point.combine_format is not RowFormat.BF16:
            problems.append(f"{self.name} adds bf16 partials; combine_format={point.combine_format} is not one")
        problems += slot_problems(point.placement.num_slots, point.model.top_k)
        if point.sharing is Sharing.ONE_LAUNCH and point.ep_size > MAX_LOCAL_RANKS:
            problems.append(f"one launch serves at most {MAX_LOCAL_RANKS} ranks, not ep_size={point.ep_size}")
        problems += option_problems(replace(self._options(point), local_ranks=1))  # their number was judged above
        try:
            needed = self.workspace_bytes(point) * _sharers(point)
        except ValueError as error:
            problems.append(f"{self.name}: {error}")
        else:
            problems += _memory_problem(needed)
        return "; ".join(problems) or None

    def workspace_bytes(self, point: Point) -> int:
        """The workspace of one rank. Raises `ValueError` for a shape beyond the limits."""
        shape = _shape(point)
        return max(layout(protocol, shape).total_bytes for protocol in protocols_of(self.protocol))

    def prebuild(self) -> None:
        """Compile for the GPU of this machine, exchange and instruments."""
        import torch

        from epcross.kernels.instruments import native
        from epcross.kernels.onesided import jit

        if unavailable() is None:
            arch = jit.architecture(*torch.cuda.get_device_capability())
            jit.build(arch)
            native.build(arch)

    def prepare_ranks(self, point: Point, shards: Sequence[Shard], group: Group) -> None:
        """See `GpuBackend`."""
        import torch

        self._torch: Any = torch
        self._point = point
        self._first, self._local = shards[0].rank, len(shards)
        self._counts = [point.tokens[shard.rank] for shard in shards]
        self._size: RowSize = row_size(point.dispatch_format, point.model.hidden)
        options = self._options(point)
        torch.cuda.empty_cache()  # what torch keeps of earlier points is free memory, too
        self._group = group.torch("gloo") if group.size > 1 else None
        self._exchange = OneSidedAllToAll(
            self._group,  # type: ignore[arg-type]
            num_experts=point.placement.num_slots,
            top_k=point.model.top_k,
            hidden=point.model.hidden,
            max_tokens_per_rank=max(1, point.max_tokens_per_rank),
            dispatch_format=point.dispatch_format,
            protocol=self.protocol,
            placement=shards[0].slot_rank.tolist(),
            local_ranks=self._local,
            ranks_per_gpu=options.ranks_per_gpu,
            timeout_s=options.timeout_s,
            num_sms=options.num_sms,
            programmatic_launch=options.programmatic_launch,
            **self._more(),
        )
        # a dropped selection (-1) indexes the last entry: a rank that does not exist
        slot_rank = np.append(shards[0].slot_rank, np.int32(-1))
        self._device = self._exchange.device
        self._slot_rank = torch.from_numpy(slot_rank).to(self._device)
        self._inputs = [self._input() for _ in shards[0].batches]
        self._out = [self._zeros(point.model.hidden, torch.bfloat16) for _ in shards[0].batches]
        self._arrived: dict[int, list[tuple[Tensor, ...]]] = {}  # source and token of each row, sources ascending
        for index in range(len(shards[0].batches)):
            self.refill_ranks(index, [shard.batches[index] for shard in shards])

    def _options(self, point: Point) -> Options:
        return replace(
            _launch(self.options),
            local_ranks=point.ep_size if point.sharing is Sharing.ONE_LAUNCH else 1,
            ranks_per_gpu=point.ep_size if point.sharing is Sharing.PROCESSES else 1,
        )

    def _more(self) -> dict[str, Any]:
        """Arguments of the exchange beside those that all protocols take."""
        return {}

    def _input(self) -> dict[str, "Tensor"]:
        torch, size, top_k = self._torch, self._size, self._point.model.top_k
        return {
            "rows": self._zeros(size.padded_row_bytes, torch.uint8),
            "ids": self._zeros(top_k, torch.int32),
            "weights": self._zeros(top_k, torch.float32),
            "scales": self._zeros(size.padded_scale_bytes, torch.uint8),
        }

    def _zeros(self, width: int, dtype: Any) -> "Tensor":
        """[T, width], or [V, T, width] with room for the fullest rank."""
        leading = () if self._local == 1 else (self._local,)
        return self._torch.zeros((*leading, max(self._counts), width), dtype=dtype, device=self._device)

    def refill_ranks(self, set_index: int, batches: Sequence[Batch]) -> None:
        """See `GpuBackend`."""
        for name, held in self._inputs[set_index].items():
            for local, batch in enumerate(batches):
                given = self._torch.from_numpy(getattr(batch, name))
                self._of_rank(held, local)[: len(given)].copy_(given)

    def dispatch(self, set_index: int) -> None:
        """See `Backend`."""
        given = self._inputs[set_index]
        self._landed = self._opened().dispatch(
            given["rows"],
            given["ids"],
            given["weights"],
            given["scales"] if self._size.scale_bytes else None,
            tokens=self._counts,
            group_tokens=max(self._point.tokens),
        )

    def received_ranks(self, set_index: int) -> list[DeviceReceived]:
        """See `GpuBackend`. The landing set of the last dispatch, wherever it was enqueued from."""
        self._wait()
        landing = self._landed.landing()
        arrived = self._landed.arrived()
        self._arrived[set_index] = [
            self._of_rank(arrived, local).nonzero(as_tuple=True) for local in range(self._local)
        ]
        found = []
        for local, (source, token) in enumerate(self._arrived[set_index]):
            at = (source, token) if self._local == 1 else (local, source, token)
            ids, weights = landing.ids[at], landing.weights[at]
            here = self._slot_rank[ids.long()] == self._first + local
            found.append(
                DeviceReceived(
                    source=source.int(),
                    token=token.int(),
                    ids=self._torch.where(here, ids, self._torch.full_like(ids, -1)),
                    weights=self._torch.where(here, weights, self._torch.zeros_like(weights)),
                    rows=landing.rows[at],
                    scales=landing.scales[at],
                )
            )
        return found

    def stage_ranks(self, set_index: int, partials: "Sequence[Tensor]") -> None:
        """See `GpuBackend`. One buffer at (source, token) serves every set."""
        buffer = self._opened().combine_buffer()
        for local, (source, token) in enumerate(self._arrived[set_index]):
            self._of_rank(buffer, local)[source, token] = partials[local]

    def combine(self, set_index: int) -> None:
        """See `Backend`."""
        self._opened().combine(self._out[set_index])

    def combined_ranks(self, set_index: int) -> "list[Tensor]":
        """See `GpuBackend`."""
        self._wait()
        return [self._of_rank(self._out[set_index], local)[:count] for local, count in enumerate(self._counts)]

    def in_place(self) -> InPlace:
        """See `GpuBackend`."""
        buffer, every = self._opened().combine_buffer(), range(self._local)
        return InPlace(
            landed=self._landed_in_place,
            partials=[self._of_rank(buffer, local) for local in every],
            sums=[[self._of_rank(out, local)[: self._counts[local]] for local in every] for out in self._out],
        )

    def _landed_in_place(self) -> list[Landed]:
        """Of two landing sets the device alone knows which is the last dispatch's, in a graph that is replayed."""
        sets, arrived = self._landed.sets, self._landed.arrived()
        index = self._landed.set_index.view(*(() if self._local == 1 else (self._local,)), 1, 1, 1)

        def last(name: str) -> "Tensor":
            held = [getattr(landing, name) for landing in sets]
            return held[0] if len(held) == 1 else self._torch.where(index == 0, *held)

        values = {name: last(name) for name in ("rows", "scales", "ids", "weights")}
        return [
            Landed(
                present=self._of_rank(arrived, local),
                **{name: self._of_rank(value, local) for name, value in values.items()},
            )
            for local in range(self._local)
        ]

    def poison(self) -> None:
        """See `Backend`. Landing words of Sentinel must stay armed, so the sums alone; all ones is a NaN in bf16."""
        for out in self._out:
            out.view(self._torch.int16).fill_(-1)

    def drain_timing(self) -> None:
        """See `Backend`."""
        self._wait()

    def describe(self) -> Description:
        """See `Backend`."""
        exchange = self._opened()
        told = exchange.describe()
        steps = told["kernels"]
        most_blocks = max(step["blocks"] for step in steps.values())
        return Description(
            version=told["sources"],
            transport=told["transport"],
            algorithm=", ".join(f"{phase} by {step['blocks']} blocks" for phase, step in steps.items()),
            kernels=tuple(step["name"] for step in steps.values()),
            workspace_bytes=told["workspace_bytes"],
            protocol_bytes=self._protocol_bytes(),
            num_sms=min(most_blocks, self._sm_count()),
            libraries={"torch": self._torch.__version__},
        )

    def close(self) -> None:
        """See `Backend`."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()
            self._inputs, self._out, self._arrived = [], [], {}
        group, self._group = self._group, None
        if group is not None:
            import torch.distributed as dist

            if group is not dist.group.WORLD:  # the world outlives a point: it belongs to whoever made the group
                dist.destroy_process_group(group)  # type: ignore[arg-type]

    def _protocol_bytes(self) -> int:
        """What the rank here that writes most does in a round besides rows, scales, ids, weights, partials and sums; of
        set 0."""
        at = layout(self._opened().protocol, _shape(self._point))
        found = []
        for local, tokens in enumerate(self._counts):
            rank = self._first + local
            reached = self._slot_rank[self._of_rank(self._inputs[0]["ids"], local)[:tokens].long()]
            sent = [int((reached == to).any(dim=-1).sum()) for to in range(self._point.ep_size)]
            returned = received = sum(sent) - sent[rank]
            if arrived := self._arrived.get(0):  # else, in a layer, nobody asked: as many, on average
                received = int((arrived[local][0] != rank).sum())
            own = own_bytes(at, tokens=tokens, received=received, returned=returned)
            found.append(sent_bytes(at, tokens=tokens, rows=sum(sent)) + own)
        return max(found)

    def _of_rank(self, tensor: "Tensor", local: int) -> "Tensor":
        return tensor if self._local == 1 else tensor[local]

    def _sm_count(self) -> int:
        return self._torch.cuda.get_device_properties(self._device).multi_processor_count

    def _wait(self) -> None:
        self._torch.cuda.synchronize(self._device)
        self._opened().check()

    def _opened(self) -> OneSidedAllToAll:
        assert self._exchange is not None
        return self._exchange


class OneSidedFence(OneSided):
    """Throughput: plain vector stores, then flags; combine pulls."""

    name = "onesided_fence"
    protocol = Protocol.FENCE
    boundary: ClassVar = {Phase.DISPATCH: _DISPATCH, Phase.COMBINE: _COMBINE, Phase.ROUND_TRIP: _DISPATCH | _COMBINE}


class OneSidedSentinel(OneSided):
    """Latency: every landing word is armed and the data is its own flag; re-arming is inside the window."""

    name = "onesided_sentinel"
    protocol = Protocol.SENTINEL
    boundary: ClassVar = {
        Phase.DISPATCH: _DISPATCH | {Boundary.REARM},
        Phase.COMBINE: _COMBINE | {Boundary.REARM},
        Phase.ROUND_TRIP: _DISPATCH | _COMBINE | {Boundary.REARM},
    }


def _launch(options: Mapping[str, Scalar]) -> Options:
    """How an exchange of one rank on its own GPU runs with a backend's options."""
    return Options(
        local_ranks=1,
        ranks_per_gpu=1,
        timeout_s=_number(options["timeout_s"]),
        num_sms=int(_number(options["num_sms"])) or None,  # 0: no bound
        programmatic_launch=bool(options["programmatic_launch"]),
    )


def _shape(point: Point) -> Shape:
    return shape_of(
        ep_size=point.ep_size,
        max_tokens_per_rank=max(1, point.max_tokens_per_rank),
        top_k=point.model.top_k,
        hidden=point.model.hidden,
        dispatch_format=point.dispatch_format,
    )


def _sharers(point: Point) -> int:
    """Ranks whose workspaces lie on one GPU."""
    return point.ep_size if point.domain is Domain.SHARED_GPU else 1


def _memory_problem(needed: int) -> list[str]:
    """Why the workspaces can never lie on this GPU. Where no GPU is in use yet, nothing is known and nothing said."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    _, total = torch.cuda.mem_get_info()
    if needed <= total:
        return []
    return [f"its workspaces need {needed} bytes of one GPU, which has {total}: lower max_tokens_per_rank or ep_size"]


def _number(value: Scalar) -> float:
    assert isinstance(value, int | float)
    return float(value)
