"""`nccl.ep` as its header documents it: rank-major rows of LL, flat ones of HT, ids numbered from the rank's first."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from tests.fakes.world import chosen, install, localised, module, ranks_of, scrambled


class Algorithm(IntEnum):
    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class Layout(IntEnum):
    RANK_MAJOR = 2
    FLAT = 3


class ExpertIdKind(IntEnum):
    AUTO = 0
    LOCAL = 1


class DispatchQuantizationRecipe(IntEnum):
    NONE = 0
    FWD = 1


@dataclass
class GroupConfig:
    algorithm: Algorithm = Algorithm.LOW_LATENCY
    num_experts: int = 0
    max_dispatch_tokens_per_rank: int = 0
    max_recv_tokens_per_rank: int = 0
    max_token_bytes: int = 0
    max_num_sms: int = 0
    timeout_ns: int = 0


class Tensor:
    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer


@dataclass
class LayoutInfo:
    src_rank_counters: Tensor | None = None
    recv_total_counter: Tensor | None = None
    recv_topk_idx_kind: ExpertIdKind = ExpertIdKind.AUTO


@dataclass
class DispatchInputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None


@dataclass
class DispatchOutputs(DispatchInputs):
    topk_idx: Tensor | None = None


@dataclass
class DispatchConfig:
    quantization_recipe: DispatchQuantizationRecipe = DispatchQuantizationRecipe.NONE


@dataclass
class CombineInputs:
    tokens: Tensor | None = None


@dataclass
class CombineOutputs:
    tokens: Tensor | None = None


class Handle:
    fault = ""

    def __init__(self, communicator: Any, config: GroupConfig, layout: Layout) -> None:
        self.group, self.config, self.layout = communicator, config, layout
        self.ranks, self.me = communicator.size(), communicator.rank()
        self.per_rank = config.num_experts // self.ranks

        most, experts = config.max_dispatch_tokens_per_rank, config.num_experts
        if layout is Layout.RANK_MAJOR:
            message_bytes = config.max_token_bytes + config.max_token_bytes // 256 * 4
            assert most * self.ranks * message_bytes % 16 == 0
            assert config.max_token_bytes % 1024 == 0, "code 3: it does not compile"
        else:
            assert experts % 4 == 0

    def update(self, topk_idx, *, layout_info: Any = None, stream):
        assert topk_idx.buffer.dtype is torch.int64
        assert (layout_info is None) == (self.layout is Layout.RANK_MAJOR)
        assert len(topk_idx.buffer) <= self.config.max_dispatch_tokens_per_rank
        self.topk = topk_idx.buffer.clone()
        if layout_info is not None:
            self.total = layout_info.recv_total_counter.buffer

    def dispatch(self, inputs, outputs, *, layout_info: Any = None, config: Any = None, stream):
        if self.layout is Layout.FLAT:
            # ht_ep_adapter.cu of 0.1.0, with every rank in one domain
            assert self.config.max_dispatch_tokens_per_rank * self.ranks % 4 == 0, "SIGABRT in dispatch_impl"
        rows, weights, scales = inputs.tokens.buffer, inputs.topk_weights.buffer, inputs.scales
        assert (scales is not None) == (config.quantization_recipe is DispatchQuantizationRecipe.FWD)
        most = self.config.max_dispatch_tokens_per_rank
        copied = [rows.clone(), weights.clone(), None if scales is None else scales.buffer.clone(), self.topk]
        given = self.group.exchange(copied)
        into = outputs.tokens.buffer.flatten(0, -2)
        ids, of_weights = outputs.topk_idx.buffer.flatten(0, -2), outputs.topk_weights.buffer.flatten(0, -2)
        assert ids.dtype is (torch.int32 if self.layout is Layout.RANK_MAJOR else torch.int64)
        self.places: dict[tuple[int, int], int] = {}
        pairs = []
        for source, (_, _, _, topk) in enumerate(given):
            tokens = chosen(topk, self.me, self.per_rank)
            order = scrambled(len(tokens))
            pairs += [(source, n, tokens[i]) for n, i in enumerate(order)]
            if self.layout is Layout.RANK_MAJOR:
                layout_info.src_rank_counters.buffer[source] = len(tokens)
        if self.layout is Layout.FLAT:
            assert layout_info is None
            assert len(pairs) <= self.config.max_recv_tokens_per_rank
            pairs = [pairs[i] for i in scrambled(len(pairs))]
            self.total[0] = len(pairs)
        for number, (source, n, token) in enumerate(pairs):
            at = source * most + n if self.layout is Layout.RANK_MAJOR else number
            of_rows, w, of_scales, topk = given[source]
            own, own_weights = localised(topk[token], self.me, self.per_rank), w[token]
            if self.layout is Layout.FLAT:
                own, own_weights = by_expert(own, own_weights)
            into[at], ids[at] = of_rows[token], own
            of_weights[at] = torch.zeros_like(own_weights) if self.fault == "no_weights" else own_weights
            if self.fault == "swapped_weights":
                of_weights[at, :2] = own_weights[:2].flip(0)
            if of_scales is not None:
                outputs.scales.buffer.flatten(0, -2)[at] = of_scales[token]
            self.places[source, token] = at

        self.pending = True

    def complete(self, *, stream):
        self.pending = False

    def combine(self, inputs, outputs, *, stream):
        assert not self.pending
        topk = self.topk
        given = self.group.exchange((inputs.tokens.buffer.flatten(0, -2).clone(), self.places))
        out = outputs.tokens.buffer
        for token, selected in enumerate(topk):
            total = torch.zeros(out.shape[1])
            for rank in ranks_of(selected, self.per_rank):
                partials, places = given[rank]
                total += partials[places[self.me, token]].float()
            if self.fault == "bf16_twice":
                total = total + total
            out[token] = total.bfloat16()

    def destroy(self):
        self.group.events.append("handle")


def by_expert(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending and without gaps, as HT hands them over: seen on two H200s, version 0.1.0."""
    here = (ids >= 0).nonzero()[:, 0]
    here = here[ids[here].argsort()]
    sorted_ids, of_them = torch.full_like(ids, -1), torch.zeros_like(weights)
    sorted_ids[: len(here)], of_them[: len(here)] = ids[here], weights[here]
    return sorted_ids, of_them


class Group:
    handle = Handle

    def __init__(self, communicator: Any, config: GroupConfig) -> None:
        self._given = communicator, config

    @classmethod
    def create(cls, comm, config):
        return cls(comm, config)

    def create_handle(self, layout, topk_idx, *, layout_info: Any = None, config: Any = None, stream):
        made = self.handle(*self._given, layout)
        made.update(topk_idx, layout_info=layout_info, stream=stream)
        return made

    def destroy(self):
        self._given[0].events.append("group")


class Communicator:
    """Of the ranks of a torch group; `events` says what was destroyed, in order."""

    def __init__(self, torch_group: Any, events: list[str]) -> None:
        self.size, self.rank, self.exchange = torch_group.size, torch_group.rank, torch_group.exchange
        self.events = events

    def destroy(self):
        self.events.append("communicator")


def install_nccl_ep(monkeypatch: Any, fault: str = "") -> list[list[str]]:
    """Make `import nccl.ep` find the imitation, with one thing wrong if `fault` names it. What comes to be in the list
    that is returned are the `events` of every communicator that was made."""
    made: list[list[str]] = []

    def communicator(torch_group: Any) -> Communicator:
        made.append([])
        return Communicator(torch_group, made[-1])

    handle = type("Handle", (Handle,), {"fault": fault})
    ep = module(
        "nccl.ep",
        **{
            c.__name__: c
            for c in (
                *(Algorithm, Layout, ExpertIdKind, DispatchQuantizationRecipe, GroupConfig, Tensor, LayoutInfo),
                *(DispatchInputs, DispatchOutputs, DispatchConfig, CombineInputs, CombineOutputs),
            )
        },
        Group=type("Group", (Group,), {"handle": handle}),
        Handle=handle,
        get_lib_version=lambda: "0.2.0",
    )
    install(monkeypatch, ep, module("nccl.ep.interop.torch", get_nccl_comm_from_group=communicator))
    return made
