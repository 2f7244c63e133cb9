"""What all ranks settle before any memory is allocated: every rank goes on, or every rank raises the same error."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING

from epcross.kernels.errors import BuildError, EpcrossError, InvalidArguments
from epcross.kernels.extras import Extra
from epcross.kernels.formats import RowFormat, row_size
from epcross.kernels.onesided import jit
from epcross.kernels.onesided.buffers import Transport, facts_here, gather, judge
from epcross.kernels.onesided.crossover import Crossovers, NoCrossover, Setting, machine_name
from epcross.kernels.onesided.engine import Kernels, bytes_per_rank
from epcross.kernels.onesided.inputs import (
    Expected,
    Options,
    expert_problems,
    is_whole,
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
_WITHIN_BOUNDS = {"ep_size": 1, "max_tokens_per_rank": 1, "top_k": 1, "hidden": _COMBINE_UNIT}


def unavailable() -> str | None:
    """Why the exchange cannot be used on this machine, as a sentence; None if it can. Never raises."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported ({error}): install it for CUDA, {Extra.CUDA.install}"
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
    """What decides the size of a workspace. Raises `InvalidArguments`, a sentence for each wrong value."""
    given = {"ep_size": ep_size, "max_tokens_per_rank": max_tokens_per_rank, "top_k": top_k, "hidden": hidden}
    problems = number_problems(given)
    if not _is_one_of(dispatch_format, tuple(RowFormat)):
        problems.append(f"dispatch_format={dispatch_format} is not one of {', '.join(RowFormat)}")
        dispatch_format = RowFormat.BF16
    # numpy's narrow integers would overflow in what is made of them; what is no number must not hide the others' bounds
    values = {name: index(value) if is_whole(value) else _WITHIN_BOUNDS[name] for name, value in given.items()}
    # Shape has the words for a combine row that is none, and every such row fills whole bytes in any format
    a_row = values["hidden"] > 0 and values["hidden"] % _COMBINE_UNIT == 0
    size = row_size(RowFormat(dispatch_format), values["hidden"] if a_row else _COMBINE_UNIT)
    try:
        shape = Shape(
            ep_size=values["ep_size"],
            capacity=values["max_tokens_per_rank"],
            row_bytes=size.padded_row_bytes,
            scale_bytes=size.padded_scale_bytes,
            top_k=values["top_k"],
            hidden=values["hidden"],
        )
    except InvalidArguments as error:
        raise InvalidArguments([*problems, *error.problems]) from None
    if problems:
        raise InvalidArguments(problems)
    return shape


def layouts_of(
    *,
    ep_size: int,
    max_tokens_per_rank: int,
    top_k: int,
    hidden: int,
    dispatch_format: RowFormat | str,
    protocol: str,
) -> dict[Protocol, Layout]:
    """The workspace for each protocol that may come to be used. Raises `InvalidArguments`, as `shape_of`."""
    try:
        shape = shape_of(
            ep_size=ep_size,
            max_tokens_per_rank=max_tokens_per_rank,
            top_k=top_k,
            hidden=hidden,
            dispatch_format=dispatch_format,
        )
    except InvalidArguments as error:
        raise InvalidArguments([*error.problems, *_protocol_problems(protocol)]) from None
    return {each: layout(each, shape) for each in protocols_of(protocol)}


def protocols_of(protocol: str) -> tuple[Protocol, ...]:
    """Those that may come to be used. Raises `InvalidArguments`."""
    if problems := _protocol_problems(protocol):
        raise InvalidArguments(problems)
    return tuple(Protocol) if protocol == AUTO else (Protocol(protocol),)


def _protocol_problems(protocol: str) -> list[str]:
    words = (*Protocol, AUTO)
    return [] if _is_one_of(protocol, words) else [f"protocol={protocol} is not one of {', '.join(words)}"]


def _is_one_of(value: object, words: Sequence[str]) -> bool:
    """Arrays and the like have an idea of their own of what is equal."""
    return isinstance(value, str) and value in words


def _is_group(group: object) -> bool:
    """Whether it is torch's, and has this process in it: torch's word for one that has not is a number."""
    try:
        from torch.distributed import ProcessGroup
    except ImportError:  # torch was built without
        return False
    return isinstance(group, ProcessGroup)


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
    try:
        device, problems = _device(request.device)
    except ImportError as error:
        raise InvalidArguments([str(unavailable())]) from error
    no_group = group is not None and not _is_group(group)
    if no_group:
        problems.append(
            f"group={group!r} is no group of which this process is a member: give a torch.distributed.ProcessGroup "
            "that it is in, or None for this process alone"
        )
        group = None  # nobody can be asked: what else is wrong is told here
    options = request.options
    problems += option_problems(options)
    local_ranks = 1 if number_problems({"local_ranks": options.local_ranks}) else index(options.local_ranks)
    ep_size = (1 if group is None else group.size()) * local_ranks
    if no_group:  # where slots may lie depends on its size
        ranks, wrong = (), expert_problems(request.num_experts)
    else:
        ranks, wrong = slot_ranks(request.num_experts, ep_size, request.placement)
    problems += wrong + slot_problems(len(ranks), request.top_k)
    problems += [why] if (why := unavailable()) else []
    kernels: Kernels | None = None
    layouts: dict[Protocol, Layout] = {}
    try:
        layouts = layouts_of(
            ep_size=ep_size,
            max_tokens_per_rank=request.max_tokens_per_rank,
            top_k=request.top_k,
            hidden=request.hidden,
            dispatch_format=request.dispatch_format,
            protocol=request.protocol,
        )
    except InvalidArguments as error:
        problems += error.problems
    try:
        if not problems:
            kernels = Kernels(device, tuple(layouts), len(ranks), options)
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
    assert kernels is not None, "judge raises what is in problems"
    return Agreement(
        expected=Expected(
            shape=next(iter(layouts.values())).shape,
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
