"""What is wrong with the arguments of a call: every problem at once, without asking the device."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any

from epcross.kernels.errors import InvalidArguments
from epcross.kernels.onesided.layout import MAX_LOCAL_RANKS, MAX_RANKS, MAX_SLOTS, MAX_TOP_K, VECTOR_BYTES, Shape

if TYPE_CHECKING:
    import torch

MAX_TIMEOUT_S = 3600.0
_NAMED_SLOTS = 4


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
        import torch

        if not isinstance(rows, torch.Tensor):
            raise InvalidArguments([_no_tensor("rows", rows)])
        if rows.dim() != self.dimensions:
            raise InvalidArguments(
                [f"rows has {rows.dim()} dimensions and must have {self.dimensions}: {self._leading()}"]
            )
        if tokens is None:
            return (rows.shape[-2],) * self.local_ranks
        given: tuple[Any, ...] = (tokens,) if is_whole(tokens) or not isinstance(tokens, Iterable) else tuple(tokens)
        if not all(map(is_whole, given)):
            raise InvalidArguments(
                [f"tokens={tokens!r} must be a whole number, or a sequence of one for each local rank"]
            )
        counts = tuple(map(index, given))
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
        found = [] if group_tokens is None else number_problems({"group_tokens": group_tokens})
        mistyped = bool(found)
        found += [
            f"tokens={count} of local rank {local} must be 0 to max_tokens_per_rank={shape.capacity}"
            for local, count in enumerate(counts)
            if not 0 <= count <= shape.capacity
        ]
        if group_tokens is not None and not mistyped and not most <= group_tokens <= shape.capacity:
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
        import torch

        if not isinstance(tensor, torch.Tensor):
            yield _no_tensor(name, tensor)
            return
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
        # where there is one of something its stride says nothing, and torch's contiguous() leaves it as it is
        dense = (width < 2 or tensor.stride(-1) == 1) and (tensor.shape[-2] < 2 or tensor.stride(-2) == width)
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
    found = expert_problems(num_experts)
    if placement is not None:
        ranks, wrong = _placed(placement, ep_size, least=0 if found else index(num_experts))
        return (() if found else ranks), found + wrong
    if found:
        return (), found
    if ep_size < 1 or num_experts % ep_size:
        return (), [f"num_experts={num_experts} is no multiple of ep_size={ep_size}: give a placement"]
    return tuple(slot * ep_size // num_experts for slot in range(num_experts)), []


def expert_problems(num_experts: int) -> list[str]:
    """What is wrong with so many experts, wherever they are."""
    if found := number_problems({"num_experts": num_experts}):
        return found
    if num_experts < 1:
        return [f"num_experts={num_experts} must be at least 1"]
    return slot_problems(num_experts, 0)


def _placed(placement: Sequence[int], ep_size: int, *, least: int) -> tuple[tuple[int, ...], list[str]]:
    """The rank of each slot, of at least `least`, as told; and what is wrong with it."""
    if not isinstance(placement, Iterable):
        return (), [f"placement={placement!r} must be a sequence of ranks, one for each slot"]
    given = tuple(islice(placement, MAX_SLOTS + 1))  # before a list of more is made
    if len(given) > MAX_SLOTS:
        return (), slot_problems(len(placement) if isinstance(placement, Sized) else len(given), 0)
    found = [
        f"placement[{slot}]={rank!r} must be a rank, 0 to {ep_size - 1}"
        for slot, rank in enumerate(given)
        if not is_whole(rank) or not 0 <= index(rank) < ep_size
    ]
    if len(found) > _NAMED_SLOTS:
        found[_NAMED_SLOTS:] = [f"placement has {len(found) - _NAMED_SLOTS} more slots without a rank"]
    ranks = () if found else tuple(map(index, given))
    if len(given) < least:
        found.append(f"placement has {len(given)} slots, and there are num_experts={least}")
    return ranks, found


def slot_problems(num_slots: int, top_k: int) -> list[str]:
    """What is wrong with so many slots, of which a token selects `top_k`."""
    found = []
    if num_slots > MAX_SLOTS:
        found.append(f"{num_slots} slots are above {MAX_SLOTS}: give fewer experts, or a shorter placement")
    if num_slots and is_whole(top_k) and num_slots < top_k <= MAX_TOP_K:
        found.append(f"top_k={top_k} is above the number of slots {num_slots}")
    return found


def option_problems(options: Options) -> list[str]:
    """What is wrong with how an exchange shall run."""
    counts = {"local_ranks": options.local_ranks, "ranks_per_gpu": options.ranks_per_gpu}
    found = number_problems(counts | ({} if options.num_sms is None else {"num_sms": options.num_sms}))
    timed = isinstance(options.timeout_s, Real) and not isinstance(options.timeout_s, bool)
    if not timed:
        found.append(f"timeout_s={options.timeout_s!r} must be a number of seconds")
    if not isinstance(options.programmatic_launch, bool):
        found.append(f"programmatic_launch={options.programmatic_launch!r} must be True or False")
    bounds = (
        ("local_ranks", options.local_ranks, 1, MAX_LOCAL_RANKS),
        ("ranks_per_gpu", options.ranks_per_gpu, 1, MAX_RANKS),
        ("num_sms", options.num_sms, 1, None),
    )
    found += [
        f"{name}={value} must be at least {low}" + ("" if high is None else f" and at most {high}")
        for name, value, low, high in bounds
        if value is not None and is_whole(value) and not low <= value <= (value if high is None else high)
    ]
    if timed and not 0 < options.timeout_s <= MAX_TIMEOUT_S:
        found.append(f"timeout_s={options.timeout_s} must be above 0 and at most {MAX_TIMEOUT_S:g}")
    if all(is_whole(value) and value > 1 for value in counts.values()):
        found.append("local_ranks and ranks_per_gpu are two ways to share a GPU: leave one of them 1")
    return found


def number_problems(values: Mapping[str, object]) -> list[str]:
    """Which of these are no whole numbers. Fractions would pass every bound and be cut off later."""
    return [f"{name}={value!r} must be a whole number" for name, value in values.items() if not is_whole(value)]


def is_whole(value: object) -> bool:
    """Python's integers, numpy's, and tensors that hold one; True and False are none."""
    if isinstance(value, bool):
        return False
    try:
        index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # torch has words of its own for tensors of several values
        return False
    return True


def _no_tensor(name: str, value: object) -> str:
    return f"{name} is a {type(value).__name__} and must be a tensor"
