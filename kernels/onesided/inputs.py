"""What is wrong with the arguments of a call: every problem at once, without asking the device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epcross.kernels.errors import InvalidArguments
from epcross.kernels.onesided.layout import MAX_LOCAL_RANKS, MAX_RANKS, MAX_SLOTS, MAX_TOP_K, VECTOR_BYTES, Shape

if TYPE_CHECKING:
    import torch

MAX_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How an exchange runs; see `OneSidedAllToAll`."""

    local_ranks: int
    ranks_per_gpu: int
    timeout_s: float
    num_sms: int | None
    programmatic_launch: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What every call of one exchange must look like."""

    shape: Shape
    local_ranks: int
    num_slots: int
    bf16_rows: bool  # rows may be bf16 [.., hidden] besides uint8 [.., row_bytes]
    device: "torch.device"

    def token_counts(self, rows: "torch.Tensor", tokens: int | Sequence[int] | None) -> tuple[int, ...]:
        """Tokens of each local rank.

        Raises:
            InvalidArguments: not one count for each local rank, or `rows` has no dimension of tokens.
        """
        if rows.dim() != self.dimensions:
            raise InvalidArguments(
                [f"rows has {rows.dim()} dimensions and must have {self.dimensions}: {self._leading()}"]
            )
        if tokens is None:
            return (rows.shape[-2],) * self.local_ranks
        counts = (tokens,) if isinstance(tokens, int) else tuple(int(count) for count in tokens)
        if len(counts) != self.local_ranks:
            raise InvalidArguments(
                [f"tokens={counts} has {len(counts)} counts: one is needed for each of {self.local_ranks} local ranks"]
            )
        return counts

    @property
    def dimensions(self) -> int:
        """Of every input: [V, T, width], without V where there is one local rank."""
        return 2 if self.local_ranks == 1 else 3

    def dispatch_problems(
        self,
        rows: "torch.Tensor",
        ids: "torch.Tensor",
        weights: "torch.Tensor",
        scales: "torch.Tensor | None",
        counts: tuple[int, ...],
        group_tokens: int | None,
    ) -> list[str]:
        """All that is wrong with the arguments of a dispatch."""
        import torch

        shape, most = self.shape, max(counts)
        found = [
            f"tokens={count} of local rank {local} must be 0 to max_tokens_per_rank={shape.capacity}"
            for local, count in enumerate(counts)
            if not 0 <= count <= shape.capacity
        ]
        if group_tokens is not None and not most <= group_tokens <= shape.capacity:
            found.append(
                f"group_tokens={group_tokens} must be the largest count of any rank: {most} (the most here) to "
                f"max_tokens_per_rank={shape.capacity}"
            )
        if self.bf16_rows and rows.dtype is torch.bfloat16:
            found += self._tensor("rows", rows, torch.bfloat16, shape.hidden, most)
        else:
            found += self._tensor("rows", rows, torch.uint8, shape.row_bytes, most)
        found += self._tensor("ids", ids, torch.int32, shape.top_k, most)
        found += self._tensor("weights", weights, torch.float32, shape.top_k, most)
        if shape.scale_bytes and scales is None:
            found.append(f"scales is missing: this format has {shape.scale_bytes} bytes of them for each token")
        elif scales is not None and not shape.scale_bytes:
            found.append("scales is given, and this format has none")
        elif scales is not None:
            found += self._tensor("scales", scales, torch.uint8, shape.scale_bytes, most)
        return found

    def id_problems(self, ids: "torch.Tensor", counts: tuple[int, ...]) -> list[str]:
        """Ids outside -1 to the last slot; waits for the device."""
        found = []
        for local, count in enumerate(counts):
            mine = ids[local, :count] if self.local_ranks > 1 else ids[:count]
            wrong = ((mine < -1) | (mine >= self.num_slots)).nonzero()
            if len(wrong):
                token, k = wrong[0].tolist()
                found.append(
                    f"{len(wrong)} ids of local rank {local} are outside -1 to {self.num_slots - 1}; the first is "
                    f"{int(mine[token, k])}, selection {k} of token {token}"
                )
        return found

    def combine_problems(self, out: "torch.Tensor", counts: tuple[int, ...]) -> list[str]:
        """All that is wrong with the argument of a combine."""
        import torch

        return list(self._tensor("out", out, torch.bfloat16, self.shape.hidden, max(counts)))

    def _tensor(
        self, name: str, tensor: "torch.Tensor", dtype: "torch.dtype", width: int, least_tokens: int
    ) -> Iterator[str]:
        if tensor.dtype is not dtype:
            yield f"{name} is {tensor.dtype} and must be {dtype}"
        if tensor.device != self.device:
            yield f"{name} is on {tensor.device} and must be on {self.device}"
        if (
            tensor.dim() != self.dimensions
            or tensor.shape[-1] != width
            or (self.local_ranks > 1 and tensor.shape[0] != self.local_ranks)
        ):
            yield f"{name} is {list(tensor.shape)} and must be {self._leading()[:-1]}, {width}]"
            return
        if tensor.shape[-2] < least_tokens:
            yield f"{name} has room for {tensor.shape[-2]} tokens, and there are {least_tokens}"
        width_bytes = width * tensor.element_size()
        dense = tensor.stride(-1) == 1 and (tensor.shape[-2] < 2 or tensor.stride(-2) == width)
        if not dense:
            yield f"{name} has strides {list(tensor.stride())}: the values of a local rank must be contiguous"
        if name in ("rows", "scales", "out"):
            step = tensor.stride(0) * tensor.element_size() if self.local_ranks > 1 else 0
            if tensor.data_ptr() % VECTOR_BYTES or step % VECTOR_BYTES:
                yield f"{name} does not begin at a multiple of {VECTOR_BYTES} bytes ({width_bytes} bytes a token)"

    def _leading(self) -> str:
        return "[tokens]" if self.local_ranks == 1 else f"[{self.local_ranks} local ranks, tokens]"


def slot_ranks(num_experts: int, ep_size: int, placement: Sequence[int] | None) -> tuple[tuple[int, ...], list[str]]:
    """The rank of each slot, and what is wrong with it. Without `placement`, experts are spread in order."""
    if placement is None:
        if num_experts < 1 or ep_size < 1 or num_experts % ep_size:
            return (), [f"num_experts={num_experts} is no multiple of ep_size={ep_size}: give a placement"]
        return tuple(slot * ep_size // num_experts for slot in range(num_experts)), []
    ranks = tuple(int(rank) for rank in placement)
    found = [
        f"placement[{slot}]={rank} must be a rank, 0 to {ep_size - 1}"
        for slot, rank in enumerate(ranks)
        if not 0 <= rank < ep_size
    ]
    if len(ranks) < num_experts:
        found.append(f"placement has {len(ranks)} slots, and there are num_experts={num_experts}")
    return ranks, found


def option_problems(options: Options, num_slots: int, top_k: int) -> list[str]:
    """What is wrong with how an exchange shall run."""
    bounds = (
        ("local_ranks", options.local_ranks, 1, MAX_LOCAL_RANKS),
        ("ranks_per_gpu", options.ranks_per_gpu, 1, MAX_RANKS),
        ("num_sms", options.num_sms, 1, None),
        ("the number of slots", num_slots or None, 1, MAX_SLOTS),
    )
    found = [
        f"{name}={value} must be at least {low}" + ("" if high is None else f" and at most {high}")
        for name, value, low, high in bounds
        if value is not None and not low <= value <= (value if high is None else high)
    ]
    if not 0 < options.timeout_s <= MAX_TIMEOUT_S:
        found.append(f"timeout_s={options.timeout_s} must be above 0 and at most {MAX_TIMEOUT_S:g}")
    if options.local_ranks > 1 and options.ranks_per_gpu > 1:
        found.append("local_ranks and ranks_per_gpu are two ways to share a GPU: leave one of them 1")
    if num_slots and 1 <= top_k <= MAX_TOP_K and top_k > num_slots:
        found.append(f"top_k={top_k} is above the number of slots {num_slots}")
    return found
