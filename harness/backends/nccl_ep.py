"""What the adapters of NCCL's expert-parallel library share: `nccl.ep` of nccl-extensions.

One handle serves all sets: it takes the routing of a step by `update`, which is inside the window as an engine pays it
in every step. Both layouts send a token once to each rank with its ids and weights and do not say whose it is, which
the adapter finds by the row's contents, outside the window. Experts apply weights.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from epcross.harness.backends import vendor
from epcross.harness.backends.base import Batch, Description, Group, Reduction, Shard
from epcross.harness.backends.device_inputs import DeviceInputs, device_inputs, value_dtype
from epcross.harness.backends.gpu import DeviceReceived, GpuBackend
from epcross.harness.backends.landing import as_identified
from epcross.harness.point import Point, Scalar
from epcross.harness.terms import Boundary, Domain, GraphSupport, RowFormat, Sharing
from epcross.kernels.formats import row_size

if TYPE_CHECKING:
    from torch import Tensor

REMEDY = "make env-nccl_ep builds its environment"


class NcclEP(GpuBackend):
    """What both algorithms have in common."""

    domains = frozenset({Domain.NVLINK, Domain.SHARED_GPU})
    host_sync = False
    graph = GraphSupport.YES
    reduction = Reduction(order="unordered", accumulate="fp32", exact=False)
    stable_order = False
    boundary: ClassVar = vendor.boundaries(
        {Boundary.LAYOUT, Boundary.COUNT_EXCHANGE, Boundary.PACK, Boundary.TRANSFER, Boundary.COPY_OUT},
        {Boundary.PACK, Boundary.TRANSFER, Boundary.REDUCE},
    )
    bf16_multiple: ClassVar[int]  # values that rows of bf16 are a multiple of
    algorithm: ClassVar[str]  # a member of the library's Algorithm
    layout: ClassVar[str]  # a member of its Layout
    landed_ids: ClassVar[str]  # the torch type that ids arrive as
    default_sms: ClassVar[int] = 0  # the library's choice, where it tells one
    ordered: ClassVar[bool] = True  # whether a row's ids keep the token's own order

    _library_group: Any = None
    _handle: Any = None

    @classmethod
    def option_defaults(cls) -> Mapping[str, Scalar]:
        """`max_num_sms` (0: the library's choice), and `timeout_s`, which bounds waits on the GPU."""
        return {"max_num_sms": 0, "timeout_s": 20}

    @classmethod
    def option_problems(cls, options: Mapping[str, Scalar]) -> list[str]:
        """See `Backend`."""
        return vendor.too_small(options, max_num_sms=0, timeout_s=1)

    def unavailable(self) -> str | None:
        """No GPU, no library, or one whose calls take other arguments."""
        if reason := vendor.no_gpu((9, 0)) or vendor.no_module("nccl.ep", REMEDY):
            return reason
        import nccl.ep as ep  # type: ignore[import-not-found]

        return (
            vendor.lacks("nccl.ep.GroupConfig", ep.GroupConfig, "max_recv_tokens_per_rank", "max_num_sms")
            or vendor.lacks("nccl.ep.Handle.update", ep.Handle.update, "topk_idx", "layout_info", "stream")
            or vendor.lacks("nccl.ep.Handle.dispatch", ep.Handle.dispatch, "inputs", "outputs", "layout_info")
        )

    def unsupported(self, point: Point) -> str | None:
        """bf16 rows, and fp8 ones whose scale rows fill 16-byte vectors."""
        problems = vendor.format_problems(self.name, point, {RowFormat.BF16: self.bf16_multiple, RowFormat.FP8: 512})
        problems += vendor.crowding_problems(
            self.name, point, vendor.integer(self.options["max_num_sms"]), "max_num_sms=0 has the adapter choose"
        )
        problems += self.limits(point)
        return "; ".join(problems) or None

    def refused_here(self, point: Point) -> str | None:
        """Several ranks on a GPU, where the NCCL that is loaded does not take them."""
        return vendor.nccl_refuses_sharing(point)

    @abstractmethod
    def limits(self, point: Point) -> list[str]:
        """What rules a point out for this algorithm."""

    @abstractmethod
    def landing_shape(self, point: Point) -> tuple[int, ...]:
        """Leading dimensions of the receive tensors."""

    def room(self, point: Point) -> int:
        """Tokens per rank that the library is told."""
        return max(1, point.max_tokens_per_rank)

    def most_sms(self, point: Point) -> int:
        """Multiprocessors that the library is told to take at most; 0 has it choose. Its blocks fill one each and wait
        for those of other ranks, so that ranks on one GPU must share it out."""
        asked = vendor.integer(self.options["max_num_sms"])
        if asked or point.sharing is not Sharing.PROCESSES:
            return asked
        share = vendor.LEAST_SMS // point.ep_size
        return min(share, self.default_sms or share)

    def workspace_bytes(self, point: Point) -> int:
        """Receive tensors and partials, which are the caller's; what the library stages beside them it does not tell,
        so it is taken to be as much again."""
        size = row_size(point.dispatch_format, point.model.hidden)
        slots = self.room(point) * point.ep_size
        return 2 * slots * (size.padded_bytes + 2 * point.model.hidden + 12 * point.model.top_k)

    def prepare_ranks(self, point: Point, shards: Sequence[Shard], group: Group) -> None:
        """See `GpuBackend`."""
        import nccl.ep as ep  # type: ignore[import-not-found]
        import torch
        from nccl.ep.interop.torch import get_nccl_comm_from_group  # type: ignore[import-not-found]

        (shard,) = shards
        self._ep: Any = ep
        self._point, self._rank, self._group = point, shard.rank, group
        self._tokens, self._device = point.tokens[shard.rank], vendor.device()
        self._most = self.room(point)
        self._inputs: list[DeviceInputs] = device_inputs(point, shard, self._device, torch.int64)
        self._make_tensors(point)

        def connected() -> Any:
            """What a communicator allocates when it is first used is no point's own: it is used here."""
            communicator = get_nccl_comm_from_group(vendor.torch_group(group, "gloo"))
            self._make_handle(communicator)
            self._let_go()
            return communicator

        # one for all points: its end alone waits for a thread of NCCL that looks up each half second
        communicator = vendor.kept(group, "nccl.ep", connected)
        free_bytes = self._free_bytes()
        self._make_handle(communicator)
        self._staging_bytes = max(0, free_bytes - self._free_bytes())

    def _make_handle(self, communicator: Any) -> None:
        self._library_group = self._ep.Group.create(communicator, self._config(self._point))
        self._handle = self._library_group.create_handle(
            getattr(self._ep.Layout, self.layout),
            self._given[0]["ids"],
            layout_info=self._routing_info(),
            stream=stream(),
        )

    def _free_bytes(self) -> int:
        """This rank's share of what is free on its GPU, while none of them allocates. Collective."""
        import torch

        vendor.synchronize()
        self._group.barrier()
        free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
        self._group.barrier()
        return free // (self._point.ep_size if self._point.sharing is Sharing.PROCESSES else 1)

    def _config(self, point: Point) -> Any:
        size = row_size(point.dispatch_format, point.model.hidden)
        return self._ep.GroupConfig(
            algorithm=getattr(self._ep.Algorithm, self.algorithm),
            num_experts=point.placement.num_slots,
            max_dispatch_tokens_per_rank=self._most,
            # of the throughput algorithm: the worst case, since a size that follows the routing needs the host
            max_recv_tokens_per_rank=self._most * point.ep_size if self.algorithm == "HIGH_THROUGHPUT" else 0,
            max_token_bytes=max(size.padded_bytes, 2 * point.model.hidden),
            max_num_sms=self.most_sms(point),
            timeout_ns=vendor.integer(self.options["timeout_s"]) * 10**9,
        )

    def _make_tensors(self, point: Point) -> None:
        import torch

        shape, hidden, top_k = self.landing_shape(point), point.model.hidden, point.model.top_k
        size = row_size(point.dispatch_format, hidden)

        def zeros(*of: int, dtype: Any = torch.bfloat16) -> "Tensor":
            return torch.zeros(*of, dtype=dtype, device=self._device)

        tensor = self._ep.Tensor
        self._rows = zeros(*shape, hidden, dtype=value_dtype(point.dispatch_format))
        self._scales = zeros(*shape, size.scale_bytes // 4, dtype=torch.float32) if size.scale_bytes else None
        self._ids = zeros(*shape, top_k, dtype=getattr(torch, self.landed_ids))
        self._weights = zeros(*shape, top_k, dtype=torch.float32)
        self._counts = zeros(point.ep_size if len(shape) == 2 else 1, dtype=torch.int32)
        self._partials = [zeros(*shape, hidden) for _ in self._inputs]
        self._out = [zeros(self._tokens, hidden) for _ in self._inputs]
        # descriptors of memory that stays where it is, made once
        self._given = [
            {
                "ids": tensor(i.ids),
                "inputs": self._ep.DispatchInputs(
                    tokens=tensor(i.values),
                    topk_weights=tensor(i.weights),
                    scales=None if i.factors is None else tensor(i.factors),
                ),
                "partials": self._ep.CombineInputs(tokens=tensor(partials)),
                "sums": self._ep.CombineOutputs(tokens=tensor(out)),
            }
            for i, partials, out in zip(self._inputs, self._partials, self._out, strict=True)
        ]
        self._landing = self._ep.DispatchOutputs(
            tokens=tensor(self._rows),
            topk_weights=tensor(self._weights),
            topk_idx=tensor(self._ids),
            scales=None if self._scales is None else tensor(self._scales),
        )
        recipe = self._ep.DispatchQuantizationRecipe
        self._how = self._ep.DispatchConfig(quantization_recipe=recipe.FWD if size.scale_bytes else recipe.NONE)
        self._counter = tensor(self._counts)
        landed = (self._rows, self._scales, self._ids, self._weights, self._counts, self._partials[0])
        self._tensor_bytes = sum(held.nbytes for held in landed if held is not None)

    def _routing_info(self) -> Any:
        """What `update` is told to leave; None for the low-latency algorithm, which demands that."""
        return None

    def _landing_info(self) -> Any:
        """What `dispatch` is told to leave; None for the throughput algorithm."""
        return None

    def refill_ranks(self, set_index: int, batches: Sequence[Batch]) -> None:
        """See `GpuBackend`."""
        (batch,) = batches
        self._inputs[set_index].refill(batch)

    def dispatch(self, set_index: int) -> None:
        """See `Backend`."""
        given, current = self._given[set_index], stream()
        self._handle.update(given["ids"], layout_info=self._routing_info(), stream=current)
        self._handle.dispatch(
            given["inputs"], self._landing, layout_info=self._landing_info(), config=self._how, stream=current
        )
        self._handle.complete(stream=current)

    @abstractmethod
    def _arrived(self) -> "tuple[Tensor, Tensor | None]":
        """Which rows of the flattened receive tensors count, and the source of each where the layout tells."""

    def received_ranks(self, set_index: int) -> list[DeviceReceived]:
        """See `GpuBackend`. Ids arrive numbered from this rank's first. Collective: whose rows these are is asked."""
        vendor.synchronize()
        point, top_k = self._point, self._point.model.top_k
        self._at, source = self._arrived()
        local = self._ids.view(-1, top_k)[self._at]
        ids = (local + self._rank * point.experts_per_rank).where(local >= 0, local)
        weights = self._weights.view(-1, top_k)[self._at]
        rows = self._rows.view(-1, self._rows.shape[-1])[self._at]
        scales = None if self._scales is None else self._scales.view(-1, self._scales.shape[-1])[self._at]
        inputs = self._inputs[set_index]
        return [
            as_identified(
                point,
                self._rank,
                self._group,
                inputs,
                source=source,
                ids=ids,
                weights=weights,
                rows=rows,
                scales=scales,
                ordered=self.ordered,
            )
        ]

    def stage_ranks(self, set_index: int, partials: "Sequence[Tensor]") -> None:
        """See `GpuBackend`. Where rows lie follows the routing, hence a buffer for each set."""
        self._partials[set_index].view(-1, self._point.model.hidden)[self._at] = partials[0].to(self._device)

    def combine(self, set_index: int) -> None:
        """See `Backend`."""
        given = self._given[set_index]
        self._handle.combine(given["partials"], given["sums"], stream=stream())

    def combined_ranks(self, set_index: int) -> "list[Tensor]":
        """See `GpuBackend`."""
        vendor.synchronize()
        return [self._out[set_index]]

    def poison(self) -> None:
        """See `Backend`."""
        for out in self._out:
            out.fill_(float("nan"))
        self._ids.fill_(-1)

    def describe(self) -> Description:
        """See `Backend`."""
        import torch

        version = vendor.version_of("nccl-extensions")
        return Description(
            version=version,
            transport="nvlink, nccl windows",
            algorithm=f"{self.algorithm.lower()}, {self.layout.lower()}",
            workspace_bytes=self._staging_bytes + self._tensor_bytes,
            num_sms=self.most_sms(self._point) or self.default_sms,
            libraries={
                "nccl_ep": f"{version}, library {self._ep.get_lib_version()}",
                "torch": torch.__version__,
                **vendor.loaded_nccl(),
            },
        )

    def close(self) -> None:
        """See `Backend`. The communicator outlives a point."""
        self._let_go()

    def _let_go(self) -> None:
        held = self._handle, self._library_group
        self._handle = self._library_group = None
        if any(each is not None for each in held):
            vendor.synchronize()
            self._group.barrier()
            for each in held:
                if each is not None:
                    each.destroy()


def stream() -> int:
    """The current one, as the library takes it."""
    import torch

    return torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
