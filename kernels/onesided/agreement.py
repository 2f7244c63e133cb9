"""What all ranks settle before any memory is allocated: every rank goes on, or every rank raises the same error."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING

from epcross.kernels.errors import BuildError, EpcrossError, InvalidArguments
from epcross.kernels.formats import RowFormat, row_size
from epcross.kernels.onesided import jit
from epcross.kernels.onesided.buffers import Transport, facts_here, gather, judge
from epcross.kernels.onesided.crossover import Crossovers, NoCrossover, Setting, machine_name
from epcross.kernels.onesided.engine import Kernels, bytes_per_rank
from epcross.kernels.onesided.inputs import (
    Expected,
    Options,
    number_problems,
    option_problems,
    slot_problems,
    slot_ranks,
)
from epcross.kernels.onesided.layout import VECTOR_BYTES, Layout, Protocol, Shape, layout

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

AUTO = "auto"
_COMBINE_UNIT = VECTOR_BYTES // 2  # values


def unavailable() -> str | None:
    """Why the exchange cannot be used on this machine, as a sentence; None if it can. Never raises."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported ({error}): install it for CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU: an H100 or newer and torch for CUDA are needed"
    try:
        jit.architecture(*torch.cuda.get_device_capability())
    except BuildError as error:
        return str(error)
    return jit.unavailable()


def shape_of(
    *, ep_size: int, max_tokens_per_rank: int, top_k: int, hidden: int, dispatch_format: RowFormat | str
) -> Shape:
    """What decides the size of a workspace. Raises `ValueError`, naming every value that is out of range."""
    values = {"ep_size": ep_size, "max_tokens_per_rank": max_tokens_per_rank, "top_k": top_k, "hidden": hidden}
    if problems := number_problems(values) + _format_problems(dispatch_format):
        raise ValueError("; ".join(problems))
    hidden = index(hidden)  # numpy's narrow integers would overflow in what is made of them
    # Shape has the words for a combine row that is none, and every such row fills whole bytes in any format
    size = row_size(RowFormat(dispatch_format), hidden if hidden > 0 and hidden % _COMBINE_UNIT == 0 else _COMBINE_UNIT)
    return Shape(
        ep_size=index(ep_size),
        capacity=index(max_tokens_per_rank),
        row_bytes=size.padded_row_bytes,
        scale_bytes=size.padded_scale_bytes,
        top_k=index(top_k),
        hidden=hidden,
    )


def _format_problems(dispatch_format: RowFormat | str) -> list[str]:
    if dispatch_format in list(RowFormat):
        return []
    return [f"dispatch_format={dispatch_format} is not one of {', '.join(RowFormat)}"]


def protocols_of(protocol: str) -> tuple[Protocol, ...]:
    """Those that may come to be used. Raises `ValueError`."""
    if protocol == AUTO:
        return tuple(Protocol)
    if protocol not in list(Protocol):
        raise ValueError(f"protocol={protocol} is not one of {', '.join((*Protocol, AUTO))}")
    return (Protocol(protocol),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What an exchange was asked for; see `OneSidedAllToAll`."""

    num_experts: int
    top_k: int
    hidden: int
    max_tokens_per_rank: int
    dispatch_format: RowFormat | str
    protocol: str
    placement: Sequence[int] | None
    options: Options
    crossover: "Crossovers | str | os.PathLike[str] | None"
    device: "torch.device | int | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What an exchange is to be."""

    expected: Expected
    kernels: Kernels
    layouts: dict[Protocol, Layout]
    slot_ranks: tuple[int, ...]
    workspace_bytes: int  # of one rank
    transport: Transport
    sentinel_up_to: int | None  # tokens; None unless the protocol is "auto"


def agree(group: "ProcessGroup | None", request: Request) -> Agreement:
    """Compile, load and compare. Collective.

    Raises:
        InvalidArguments, NotOneDomain, DoesNotFit, NoCrossover: the same on every rank.
    """
    if group is not None and not hasattr(group, "rank"):  # torch's word for a group that this process is no part of
        raise InvalidArguments([f"group={group!r} is no group of which this process is a member: give one, or None"])
    try:
        device, problems = _device(request.device)
    except ImportError as error:
        raise InvalidArguments([str(unavailable())]) from error
    options = request.options
    problems += option_problems(options)
    local_ranks = 1 if number_problems({"local_ranks": options.local_ranks}) else index(options.local_ranks)
    ep_size = (1 if group is None else group.size()) * local_ranks
    ranks, wrong = slot_ranks(request.num_experts, ep_size, request.placement)
    problems += wrong + slot_problems(len(ranks), request.top_k)
    problems += [why] if (why := unavailable()) else []
    shape: Shape | None = None
    kernels: Kernels | None = None
    layouts: dict[Protocol, Layout] = {}
    try:
        shape = shape_of(
            ep_size=ep_size,
            max_tokens_per_rank=request.max_tokens_per_rank,
            top_k=request.top_k,
            hidden=request.hidden,
            dispatch_format=request.dispatch_format,
        )
    except ValueError as error:
        problems.append(str(error))
    try:
        protocols = protocols_of(request.protocol)
        if shape is not None:
            layouts = {protocol: layout(protocol, shape) for protocol in protocols}
        if not problems:
            kernels = Kernels(device, protocols, len(ranks), options)
    except (ValueError, EpcrossError, RuntimeError) as error:  # RuntimeError: torch's, of a GPU that cannot be used
        problems.append(str(error))
    wanted_bytes = bytes_per_rank(layouts) if layouts else 0
    names = ("num_experts", "top_k", "hidden", "max_tokens_per_rank", "dispatch_format", "protocol")
    settings = {name: str(getattr(request, name)) for name in names}
    settings |= {name: str(getattr(options, name)) for name in ("local_ranks", "ranks_per_gpu")}
    settings |= {"placement": str(ranks), "kernels": jit.sources_hash()}
    facts = facts_here(group, device, wanted_bytes * local_ranks, settings, problems)
    try:
        transport = judge(gather(group, facts), options.ranks_per_gpu)
        limit = _sentinel_up_to(group, request, device, ep_size, transport) if request.protocol == AUTO else None
    except EpcrossError:
        if kernels is not None:
            kernels.module.close()
        raise
    assert shape is not None, "judge raises what is in problems"
    assert kernels is not None
    return Agreement(
        expected=Expected(
            shape=shape,
            local_ranks=local_ranks,
            num_slots=len(ranks),
            bf16_rows=RowFormat(request.dispatch_format) is RowFormat.BF16,
            device=device,
        ),
        kernels=kernels,
        layouts=layouts,
        slot_ranks=ranks,
        workspace_bytes=wanted_bytes,
        transport=transport,
        sentinel_up_to=limit,
    )


def _sentinel_up_to(
    group: "ProcessGroup | None", request: Request, device: "torch.device", ep_size: int, transport: Transport
) -> int:
    """The crossover here; the same answer, or the same error, on every rank."""
    import torch

    options = request.options
    setting = Setting(
        machine=machine_name(
            torch.cuda.get_device_name(device), transport, options.local_ranks * options.ranks_per_gpu
        ),
        ep_size=ep_size,
        hidden=request.hidden,
        dispatch_format=RowFormat(request.dispatch_format),
    )
    limit, problem = -1, ""
    try:
        limit = _given(request.crossover).sentinel_up_to(setting)
    except NoCrossover as error:
        problem = str(error)
    answers = gather(group, (limit, problem))
    if wrong := {problem for _, problem in answers if problem}:
        raise NoCrossover("; ".join(sorted(wrong)))
    if len(set(answers)) > 1:
        raise NoCrossover(f"ranks have different crossovers, {[limit for limit, _ in answers]}: give all the same file")
    return limit


def _given(crossover: "Crossovers | str | os.PathLike[str] | None") -> Crossovers:
    if crossover is None:
        return Crossovers({}, "no file was given as crossover=, so protocol='auto'")
    return crossover if isinstance(crossover, Crossovers) else Crossovers.load(crossover)


def _device(device: "torch.device | int | None") -> "tuple[torch.device, list[str]]":
    """The GPU that is meant, and what is wrong with it; torch's current one then."""
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    current = torch.device("cuda", torch.cuda.current_device() if seen else 0)
    if device is None:
        return current, []
    try:
        chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError, ValueError):  # of kinds of devices that torch knows, or of too large a number
        chosen = None
    if chosen is None or chosen.type != "cuda":
        return current, [f"device={device!r} is no GPU: give its number, such as 0, or None for torch's current one"]
    if seen and chosen.index is not None and chosen.index >= seen:
        return current, [f"device={device!r} is not one of the {seen} GPUs here: give 0 to {seen - 1}"]
    return (current if chosen.index is None else chosen), []
