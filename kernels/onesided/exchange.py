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

from epcross.kernels.errors import InvalidArguments, WaitExpired
from epcross.kernels.formats import RowFormat
from epcross.kernels.onesided import jit
from epcross.kernels.onesided.agreement import AUTO, Request, agree, layouts_of
from epcross.kernels.onesided.crossover import Crossovers
from epcross.kernels.onesided.engine import Engine, bytes_per_rank
from epcross.kernels.onesided.inputs import Options
from epcross.kernels.onesided.layout import Protocol
from epcross.kernels.onesided.plan import Phase
from epcross.kernels.onesided.views import Dispatched, Landing

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_PHASES = {1: "dispatch", 2: "combine"}  # WaitPhase of csrc/params.cuh


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
            num_sms: take room for as many blocks as so many multiprocessors hold.
            programmatic_launch: let kernels in before the one before has ended.
            crossover: for "auto": the stored crossovers of this machine, or their file.
            device: None for torch's current one.

        Raises:
            InvalidArguments: on every rank, with the problems of all ranks, a failed compilation among them.
            NoCrossover: the protocol is "auto", and nobody measured which is faster here.
            NotOneDomain: ranks cannot map each other's memory.
            DoesNotFit: the workspaces are larger than the memory that is free.
        """
        options = Options(
            local_ranks=local_ranks,
            ranks_per_gpu=ranks_per_gpu,
            timeout_s=timeout_s,
            num_sms=num_sms,
            programmatic_launch=programmatic_launch,
        )
        request = Request(
            num_experts=num_experts,
            top_k=top_k,
            hidden=hidden,
            max_tokens_per_rank=max_tokens_per_rank,
            dispatch_format=dispatch_format,
            protocol=protocol,
            placement=placement,
            options=options,
            crossover=crossover,
            device=device,
        )
        agreed = agree(group, request)
        self._expected, self._sentinel_up_to = agreed.expected, agreed.sentinel_up_to
        self.local_ranks, self._timeout_s, self._closed = agreed.expected.local_ranks, timeout_s, False
        self._counts: tuple[int, ...] | None = None  # of a dispatch whose combine is still to come
        self._most = agreed.expected.shape.capacity
        self.ep_size, self.workspace = agreed.expected.shape.ep_size, agreed.workspace_bytes
        self.transport, self.device = agreed.transport, agreed.expected.device
        self._engine = Engine(
            group, self.device, agreed.kernels, agreed.layouts, agreed.slot_ranks, options, self.transport
        )
        self._engine.use(next(iter(agreed.layouts)))
        self.rank = self._engine.first_rank

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
            ids: int32 [T, top_k], slots; -1 = dropped. Others are an error that only `check_ids` finds;
                without it they are dropped too.
            weights: fp32 [T, top_k], carried along.
            scales: uint8 [T, scale_bytes], padded to a multiple of 16 bytes; none for bf16.
            tokens: tokens of this rank, or of each local rank; None = T.
            group_tokens: most tokens of any rank of the group in this round, the same on every rank: decides the grid,
                and the protocol if that is "auto". A change of protocol is collective, waits for the device, arms the
                workspaces anew and cannot be captured; views and graphs of before hold again once `protocol` is again
                what it was. None = max_tokens_per_rank.
            check_ids: look at the ids, which waits for the device.

        Raises:
            InvalidArguments: all problems at once, or the dispatch before had no combine yet; nothing was enqueued.
            WaitExpired: "auto" would arm the workspaces anew for the other protocol, and a wait of a round before ran
                out on some rank; nothing was enqueued.
        """
        engine = self._opened()
        if self._counts is not None:  # of one epoch: rows of the first would pass for its own
            raise InvalidArguments(["dispatch follows a dispatch: call combine first, or rearm() on every rank"])
        counts = self._expected.token_counts(rows, tokens)
        problems = self._expected.dispatch_problems(rows, ids, weights, scales, counts, group_tokens)
        if not problems and check_ids:
            problems = self._expected.id_problems(ids, counts)
        if problems:
            raise InvalidArguments(problems)
        most = self._expected.shape.capacity if group_tokens is None else int(group_tokens)
        if self._sentinel_up_to is not None:
            wanted = Protocol.SENTINEL if most <= self._sentinel_up_to else Protocol.FENCE
            if wanted is not engine.at.protocol:
                engine.use(wanted, unless=self._expired)
        engine.point("rows", rows)
        engine.point("ids", ids)
        engine.point("weights", weights)
        if scales is not None:
            engine.point("scales", scales)
        engine.call["tokens"][: self.local_ranks] = counts
        engine.launch(Phase.DISPATCH, most)
        self._counts, self._most = counts, most
        return engine.views.dispatched

    def combine(self, out: "torch.Tensor") -> None:
        """Add the partials of each token of the last dispatch: fp32, ranks ascending from +0, rounded once to bf16.

        Args:
            out: bf16 [T, hidden] ([V, T, hidden]); a token that was sent nowhere gets zeros.

        Raises:
            InvalidArguments: all problems at once, or there was no dispatch since the last combine; nothing was
                enqueued.
        """
        engine = self._opened()
        if self._counts is None:
            raise InvalidArguments(["combine has no dispatch before it: call dispatch first"])
        if problems := self._expected.combine_problems(out, self._counts):
            raise InvalidArguments(problems)
        engine.point("out", out)
        engine.launch(Phase.COMBINE, self._most)
        self._counts = None

    def combine_buffer(self) -> "torch.Tensor":
        """bf16 [ep, C, hidden] ([V, ep, C, hidden]): where experts write the partial of (source rank, its token).

        With "auto" it lies elsewhere for each protocol: ask after each dispatch.
        """
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
        """int64 [V] on the device: the bits of the next dispatch's epoch. Equal on all ranks between rounds; wraps."""
        return self._opened().views.dispatch_epoch

    def check(self) -> None:
        """Look whether a wait ran out of time, as far as the host has been told; waits for nothing.

        Raises:
            WaitExpired: one did. Kernels return at once from then on, until `rearm`.
        """
        if why := self._expired():
            raise WaitExpired(why)

    def _expired(self) -> str:
        """The first wait that ran out, as a sentence; empty if none did."""
        for record in self._opened().failures:
            if record["state"]:
                phase = _PHASES.get(int(record["phase"]), record["phase"])
                return (
                    f"rank {record['rank']} waited {self._timeout_s:g} s for rank {record['peer']} in {phase} of epoch "
                    f"{record['epoch']}: see whether that rank lives and makes the same calls; then rearm() on every "
                    "rank, or close()"
                )
        return ""

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
        """Bytes that one rank's workspace takes. Raises `InvalidArguments` (a `ValueError`): all that is wrong."""
        layouts = layouts_of(
            ep_size=ep_size,
            max_tokens_per_rank=max_tokens_per_rank,
            top_k=top_k,
            hidden=hidden,
            dispatch_format=dispatch_format,
            protocol=protocol,
        )
        return bytes_per_rank(layouts)

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
                    "grid": chosen.grid,
                    "blocks": chosen.blocks,
                    "threads": engine.kernels.loaded[chosen.kernel].block,
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
