"""`OneSidedAllToAll`: dispatch and combine of a mixture of experts between the GPUs of one NVLink domain.

    exchange = OneSidedAllToAll(group, num_experts=256, top_k=8, hidden=7168, max_tokens_per_rank=128, protocol="fence")
    arrived = exchange.dispatch(rows, ids, weights)
    ...                                 experts read arrived.rows in place and write exchange.combine_buffer()
    exchange.combine(out)
    exchange.check()                    raises if a peer did not come in time

Both calls enqueue on the current stream, allocate nothing, never wait for the device, and may be captured in a graph:
inputs go by address, token counts by value.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from epcross.kernels.errors import BuildError, EpcrossError, InvalidArguments, WaitExpired
from epcross.kernels.formats import RowFormat, row_size
from epcross.kernels.onesided import jit
from epcross.kernels.onesided.buffers import facts_here, gather, judge
from epcross.kernels.onesided.crossover import Crossovers, NoCrossover, Setting, machine_name
from epcross.kernels.onesided.engine import Engine, Kernels, bytes_per_rank
from epcross.kernels.onesided.inputs import Expected, Options, option_problems, slot_ranks
from epcross.kernels.onesided.layout import Layout, Protocol, Shape, layout
from epcross.kernels.onesided.plan import BLOCK_THREADS, Phase
from epcross.kernels.onesided.views import Dispatched, Landing

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

AUTO = "auto"
_PHASES = {1: "dispatch", 2: "combine"}  # WaitPhase of csrc/params.cuh


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
    size = row_size(RowFormat(dispatch_format), hidden)
    return Shape(
        ep_size=ep_size,
        capacity=max_tokens_per_rank,
        row_bytes=size.padded_row_bytes,
        scale_bytes=size.padded_scale_bytes,
        top_k=top_k,
        hidden=hidden,
    )


class OneSidedAllToAll:
    """One rank's, or one process's several ranks', end of an exchange. Not for use by several threads at once."""

    def __init__(
        self,
        group: "ProcessGroup | None",
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens_per_rank: int,
        dispatch_format: RowFormat | str = RowFormat.BF16,
        protocol: str = AUTO,
        placement: Sequence[int] | None = None,
        local_ranks: int = 1,
        ranks_per_gpu: int = 1,
        timeout_s: float = 10.0,
        num_sms: int | None = None,
        programmatic_launch: bool = True,
        crossover: "Crossovers | str | os.PathLike[str] | None" = None,
        device: "torch.device | int | None" = None,
    ) -> None:
        """Compile, compare with all ranks, allocate, map and arm. Collective; untimed.

        Args:
            group: the processes that take part, of one NVLink domain; None for this process alone.
            num_experts: ids are 0 to num_experts - 1, or the slots of `placement`.
            top_k: selections of a token, 1 to 16.
            hidden: values of a row and of a combine row; a multiple of 8.
            max_tokens_per_rank: most tokens of any rank in any round.
            dispatch_format: how rows travel.
            protocol: "fence", "sentinel", or "auto", which takes the faster one by `crossover`.
            placement: the rank of each slot, at least num_experts of them; None spreads the experts in order.
            local_ranks: ranks of this process, all on this GPU, served by one launch; the exchange has
                group size * local_ranks ranks.
            ranks_per_gpu: processes that share this GPU, under MPS.
            timeout_s: longest wait for a peer inside a kernel.
            num_sms: at most so many blocks wait at once.
            programmatic_launch: let kernels in before the one before has ended.
            crossover: for "auto": the stored crossovers of this machine, or their file.
            device: None for torch's current one.

        Raises:
            InvalidArguments: on every rank, with the problems of all ranks.
            BuildError, NoCrossover: as problems of an `InvalidArguments`, since the other ranks must hear of them.
            NotOneDomain: ranks cannot map each other's memory.
            DoesNotFit: the workspaces are larger than the memory that is free.
        """
        self._closed, self._most = False, max_tokens_per_rank
        self._counts: tuple[int, ...] | None = None
        self.local_ranks, self._ranks_per_gpu, self._timeout_s = local_ranks, ranks_per_gpu, timeout_s
        processes, process = (1, 0) if group is None else (group.size(), group.rank())
        self.ep_size, self.rank = processes * local_ranks, process * local_ranks
        self.workspace, self.device = 0, _device(device)
        self._sentinel_up_to: int | None = None
        options = Options(
            local_ranks=local_ranks,
            ranks_per_gpu=ranks_per_gpu,
            timeout_s=timeout_s,
            num_sms=num_sms,
            programmatic_launch=programmatic_launch,
        )
        shape: Shape | None = None
        kernels: Kernels | None = None
        layouts: dict[Protocol, Layout] = {}
        ranks, problems = slot_ranks(num_experts, self.ep_size, placement)
        problems += option_problems(options, len(ranks), top_k)
        problems += [why] if (why := unavailable()) else []
        try:
            self.format = RowFormat(dispatch_format)
            shape = shape_of(
                ep_size=self.ep_size,
                max_tokens_per_rank=max_tokens_per_rank,
                top_k=top_k,
                hidden=hidden,
                dispatch_format=self.format,
            )
            layouts = _layouts(protocol, shape)
            self.workspace = bytes_per_rank(layouts)
            if not problems:
                kernels = Kernels(self.device, tuple(layouts), self.ep_size, len(ranks), options)
        except (ValueError, EpcrossError) as error:
            problems.append(str(error))
        settings = {
            "num_experts": num_experts, "top_k": top_k, "hidden": hidden, "max_tokens_per_rank": max_tokens_per_rank,
            "dispatch_format": dispatch_format, "protocol": protocol, "local_ranks": local_ranks, "placement": ranks,
            "kernels": jit.sources_hash(),
        }  # fmt: skip
        told = {name: str(value) for name, value in settings.items()}
        everyone = gather(group, facts_here(group, self.device, self.workspace * local_ranks, told, problems))
        self.transport = judge(everyone, ranks_per_gpu)
        assert shape is not None, "judge raises what is in problems"
        assert kernels is not None
        self._expected = Expected(
            shape=shape,
            local_ranks=local_ranks,
            num_slots=len(ranks),
            bf16_rows=self.format is RowFormat.BF16,
            device=self.device,
        )
        if protocol == AUTO:
            self._sentinel_up_to = self._look_up(group, crossover)
        self._engine = Engine(group, self.device, kernels, layouts, ranks, options, self.transport)
        self._engine.use(next(iter(layouts)))

    # -- the round -----------------------------------------------------------------------------------------------

    def dispatch(
        self,
        rows: "torch.Tensor",
        ids: "torch.Tensor",
        weights: "torch.Tensor",
        scales: "torch.Tensor | None" = None,
        *,
        tokens: int | Sequence[int] | None = None,
        group_tokens: int | None = None,
        check_ids: bool = False,
    ) -> Dispatched:
        """Send each token once to every rank that holds one of its slots, and await what comes here.

        With several local ranks everything has a leading dimension V of them. Values of a rank are contiguous.

        Args:
            rows: [T, hidden] bf16, or [T, row_bytes] uint8 (any format), padded to a multiple of 16 bytes.
            ids: int32 [T, top_k], slots; -1 = dropped. Others are an error that only `check_ids` finds.
            weights: fp32 [T, top_k], carried along.
            scales: uint8 [T, scale_bytes], padded to a multiple of 16 bytes; none for bf16.
            tokens: tokens of this rank, or of each local rank; None = T.
            group_tokens: most tokens of any rank of the group in this round, the same on every rank: decides the grid,
                and the protocol if that is "auto" (a change is collective, waits for the device and arms the workspaces
                anew, and cannot be captured). None = max_tokens_per_rank.
            check_ids: look at the ids, which waits for the device.

        Raises:
            InvalidArguments: all problems at once; nothing was enqueued.
        """
        engine = self._opened()
        counts = self._expected.token_counts(rows, tokens)
        problems = self._expected.dispatch_problems(rows, ids, weights, scales, counts, group_tokens)
        if not problems and check_ids:
            problems = self._expected.id_problems(ids, counts)
        if problems:
            raise InvalidArguments(problems)
        self._counts, self._most = counts, self._expected.shape.capacity if group_tokens is None else group_tokens
        if self._sentinel_up_to is not None:
            wanted = Protocol.SENTINEL if self._most <= self._sentinel_up_to else Protocol.FENCE
            if wanted is not engine.at.protocol:
                engine.use(wanted)
        engine.point("rows", rows)
        engine.point("ids", ids)
        engine.point("weights", weights)
        if scales is not None:
            engine.point("scales", scales)
        engine.call["tokens"][: self.local_ranks] = counts
        engine.launch(Phase.DISPATCH, self._most)
        return engine.views.dispatched

    def combine(self, out: "torch.Tensor") -> None:
        """Add the partials of each token of the last dispatch: fp32, ranks ascending from +0, rounded once to bf16.

        Args:
            out: bf16 [T, hidden] ([V, T, hidden]); a token that was sent nowhere gets zeros.

        Raises:
            InvalidArguments: all problems at once, or there was no dispatch; nothing was enqueued.
        """
        engine = self._opened()
        if self._counts is None:
            raise InvalidArguments(["combine has no dispatch before it: call dispatch first"])
        if problems := self._expected.combine_problems(out, self._counts):
            raise InvalidArguments(problems)
        engine.point("out", out)
        engine.launch(Phase.COMBINE, self._most)

    def combine_buffer(self) -> "torch.Tensor":
        """bf16 [ep, C, hidden] ([V, ep, C, hidden]): where experts write the partial of (source rank, its token)."""
        return self._opened().views.partials

    def landing_sets(self) -> tuple[Landing, ...]:
        """Every landing set of the protocol in use: one for Fence, two for Sentinel."""
        return self._opened().views.dispatched.sets

    @property
    def protocol(self) -> Protocol:
        """The one in use."""
        return self._opened().at.protocol

    @property
    def set_index(self) -> "torch.Tensor":
        """int32 [V] on the device: the landing set of the last dispatch."""
        return self._opened().views.dispatched.set_index

    @property
    def dispatch_epoch(self) -> "torch.Tensor":
        """int32 [V] on the device: the bits of the next dispatch's epoch. Equal on all ranks between rounds; wraps."""
        return self._opened().views.dispatch_epoch

    # -- faults and the end --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Look whether a wait ran out of time, as far as the host has been told; waits for nothing.

        Raises:
            WaitExpired: one did. Kernels return at once from then on, until `rearm`.
        """
        for record in self._opened().failures:
            if record["state"]:
                phase = _PHASES.get(int(record["phase"]), record["phase"])
                raise WaitExpired(
                    f"rank {record['rank']} waited {self._timeout_s:g} s for rank {record['peer']} in {phase} of epoch "
                    f"{record['epoch']}: see whether that rank lives and makes the same calls; then rearm() on every "
                    "rank, or close()"
                )

    def rearm(self) -> None:
        """Bring all workspaces to their state before the first round. Collective; waits for device and ranks."""
        engine = self._opened()
        engine.use(engine.at.protocol)
        self._counts = None

    def close(self) -> None:
        """Let go of the workspace. Idempotent.

        Waits for the own device, and for no other rank: memory is freed once all ranks have closed. Views and captured
        graphs must not be used any more.
        """
        if not self._closed:
            self._closed = True
            self._engine.close()

    @staticmethod
    def workspace_bytes(
        *, ep_size: int, max_tokens_per_rank: int, top_k: int, hidden: int, dispatch_format: str = "bf16", protocol: str
    ) -> int:
        """Bytes that one rank's workspace takes. Raises `ValueError`, naming every value that is out of range."""
        shape = shape_of(
            ep_size=ep_size,
            max_tokens_per_rank=max_tokens_per_rank,
            top_k=top_k,
            hidden=hidden,
            dispatch_format=dispatch_format,
        )
        return bytes_per_rank(_layouts(protocol, shape))

    def describe(self) -> dict[str, Any]:
        """What runs: protocol, transport, the kernels of the last grid with their registers, and the sources' hash."""
        engine = self._opened()
        cubin, resident = engine.kernels.module.cubin, engine.kernels.resident
        usage = {kernel.name: kernel for kernel in cubin.usage}
        steps = {phase: engine.step(phase, self._most) for phase in Phase}
        return {
            "protocol": str(engine.at.protocol),
            "transport": str(self.transport),
            "architecture": cubin.arch,
            "sources": jit.sources_hash(),
            "workspace_bytes": self.workspace,
            "kernels": {
                str(phase): {
                    "name": chosen.kernel,
                    "blocks": chosen.blocks,
                    "threads": BLOCK_THREADS,
                    "resident_blocks": resident[chosen.kernel],
                    "registers": usage[chosen.kernel].registers,
                    "spill_bytes": usage[chosen.kernel].spill_bytes,
                }
                for phase, chosen in steps.items()
            },
        }

    def _opened(self) -> Engine:
        if self._closed:
            raise InvalidArguments(["this exchange is closed: make another"])
        return self._engine

    def _look_up(self, group: "ProcessGroup | None", crossover: "Crossovers | str | os.PathLike[str] | None") -> int:
        """The crossover here; the same answer, or the same error, on every rank."""
        import torch

        setting = Setting(
            machine=machine_name(
                torch.cuda.get_device_name(self.device), self.transport, self.local_ranks * self._ranks_per_gpu
            ),
            ep_size=self.ep_size,
            hidden=self._expected.shape.hidden,
            dispatch_format=self.format,
        )
        limit, problem = -1, ""
        try:
            if crossover is None:
                raise NoCrossover(
                    f"protocol='auto' needs crossover=, a file with an entry for {setting}; or choose one"
                )
            known = crossover if isinstance(crossover, Crossovers) else Crossovers.load(crossover)
            limit = known.sentinel_up_to(setting)
        except NoCrossover as error:
            problem = str(error)
        answers = gather(group, (limit, problem))
        if wrong := {problem for _, problem in answers if problem}:
            raise NoCrossover("; ".join(sorted(wrong)))
        if len(set(answers)) > 1:
            raise NoCrossover(
                f"ranks have different crossovers, {[limit for limit, _ in answers]}: give all the same file"
            )
        return limit


def _layouts(protocol: str, shape: Shape) -> dict[Protocol, Layout]:
    """Of each protocol that may come to be used."""
    if protocol == AUTO:
        return {each: layout(each, shape) for each in Protocol}
    if protocol not in set(Protocol):
        raise ValueError(f"protocol={protocol} is not one of {', '.join((*Protocol, AUTO))}")
    return {Protocol(protocol): layout(Protocol(protocol), shape)}


def _device(device: "torch.device | int | None") -> "torch.device":
    import torch

    if device is None:
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return chosen if chosen.index is not None else _device(None)
