"""`flashinfer.moe_ep` of 0.7.4: rank-major rows, ids of padding invalid, partials summed over ranks. One-sided, each
source has room for as many rows as a rank has tokens, and what is no id goes nowhere. Two-sided, rows lie without gaps,
as its kernels place them, which divide ids as C does: -1 goes to rank 0."""

from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from tests.fakes.world import chosen, garbage, install, module, ranks_of, scrambled

ONE = "flashinfer.moe_ep.backends.split.comm.nvlink_one_sided"
TWO = "flashinfer.moe_ep.backends.split.comm.nvlink_two_sided"


class QuantFormat(Enum):
    DeepSeekFp8 = 1
    MXFP8 = 2
    NVFP4 = 3


@dataclass
class BootstrapConfig:
    world_size: int
    rank: int
    device: int | None = None
    process_group: Any = None


@dataclass(frozen=True)
class MoEEpCommParams:
    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    hidden_size: int
    dtype: Any = None
    dispatch_format: Any = None
    invalid_expert_id: int = -1


@dataclass
class NVLinkOneSidedConfig:
    cft: bool | None = None
    lamport: bool | None = None
    lamport_max_tokens: int | None = None
    timeout_sec: int = 300


@dataclass
class NVLinkTwoSidedConfig:
    comm_backend: Any = None


class Communication:
    """What both backends have in common."""

    fault = ""
    gaps = True

    def __init__(self, bootstrap: BootstrapConfig, params: MoEEpCommParams, config: Any) -> None:
        self.group, self.params, self.config = bootstrap.process_group, params, config
        assert self.group.size() == bootstrap.world_size
        self.ranks, self.me = bootstrap.world_size, bootstrap.rank
        self.per_rank = params.num_experts // self.ranks
        self._round: dict[str, Any] | None = None
        self.workspace = torch.zeros(self.ranks, 4096, dtype=torch.uint8)

    def dispatch(
        self,
        hidden_states,
        topk_ids,
        topk_weights: Any = None,
        *,
        hidden_states_scale: Any = None,
        runtime_max_tokens_per_rank: Any = None,
    ):
        assert self._round is None
        assert topk_ids.dtype is torch.int32
        each, top_k = runtime_max_tokens_per_rank, self.params.top_k
        assert len(hidden_states) <= each <= self.params.max_tokens_per_rank
        given = self.group.exchange(
            [None if t is None else t.clone() for t in (hidden_states, hidden_states_scale, topk_ids, topk_weights)]
        )
        rows = garbage(self.ranks * each, hidden_states.shape[1], dtype=hidden_states.dtype)
        scales = None
        if hidden_states_scale is not None:
            scales = garbage(self.ranks * each, hidden_states_scale.shape[1], dtype=hidden_states_scale.dtype)
        ids = torch.full((self.ranks * each, top_k), self.params.invalid_expert_id, dtype=torch.int32)
        weights = garbage(self.ranks * each, top_k, dtype=torch.float32)
        places: dict[tuple[int, int], int] = {}
        first = 0
        for source, (of_rows, of_scales, of_ids, of_weights) in enumerate(given):
            tokens = self.tokens(of_ids)
            for n, i in enumerate(scrambled(len(tokens))):
                at, token = first + n, tokens[i]
                rows[at], ids[at], weights[at] = of_rows[token], of_ids[token], of_weights[token]
                if scales is not None:
                    scales[at] = of_scales[token]
                places[source, token] = at
            if self.fault == "unsanitised" and len(tokens) < each:
                ids[first + len(tokens)] = self.me * self.per_rank
            first += each if self.gaps else len(tokens)
        self._round = {"lamport": self.fault != "fence_instead" and bool(getattr(self.config, "lamport", False))}
        self._routing = topk_ids, places
        return SimpleNamespace(
            hidden_states=rows, topk_ids=ids, topk_weights=weights, tokens_per_rank=each, hidden_states_scale=scales
        )

    def combine(self, expert_output, *, output: Any = None):
        assert self._round is not None
        self._round = None
        ids, places = self._routing
        given = self.group.exchange((expert_output.clone(), places))
        for token, selected in enumerate(ids):
            total = torch.zeros(self.params.hidden_size)
            for rank in self.destinations(selected):
                partials, at = given[rank]
                total += partials[at[self.me, token]].float()
            output[token] = total.bfloat16()
        return output

    def tokens(self, ids):
        return chosen(ids, self.me, self.per_rank)

    def destinations(self, selected):
        return ranks_of(selected, self.per_rank)

    def destroy(self):
        return


class NVLinkOneSidedAlltoAll(Communication):
    def __init__(self, bootstrap, params, config):
        super().__init__(bootstrap, params, config)
        self._buffer = torch.zeros(self.ranks * params.max_tokens_per_rank, params.hidden_size, dtype=torch.bfloat16)

    @property
    def lamport_enabled(self):
        return bool(self.config.lamport) and self.fault != "no_lamport"

    def get_combine_input_buffer(self, dtype):
        assert self._round is not None, "valid between dispatch and combine"
        return self._buffer


class NVLinkTwoSidedAlltoAll(Communication):
    gaps = False

    def dispatch(self, hidden_states, topk_ids, *given, **named):
        """A step after which a rank may go on before another has read its count of rows ends in a hang, sooner or
        later; here at once. It may unless in that step it has waited for the other, or for somebody that had: so found
        in every interleaving of two and of three ranks."""
        rows = self.group.exchange({rank for ids in topk_ids for rank in self.destinations(ids)})
        for rank in range(self.ranks):
            waited_for = {rank} | rows[rank] | {r for r in range(self.ranks) if rows[r] & ({rank} | rows[rank])}
            assert waited_for == set(range(self.ranks)), f"a hang: the count of rank {rank} may be overwritten"
        return super().dispatch(hidden_states, topk_ids, *given, **named)

    def tokens(self, ids):
        here = ids.div(self.per_rank, rounding_mode="trunc") == self.me
        return here.any(dim=1).nonzero()[:, 0].tolist()

    def destinations(self, selected):
        ranks = dict.fromkeys(int(int(i) / self.per_rank) for i in selected)
        return [rank for rank in ranks if rank < self.ranks]


def install_flashinfer(monkeypatch: Any, fault: str = "") -> None:
    """Make `import flashinfer.moe_ep` find the imitation, with one thing wrong if `fault` names it."""
    one = type("NVLinkOneSidedAlltoAll", (NVLinkOneSidedAlltoAll,), {"fault": fault})
    two = type("NVLinkTwoSidedAlltoAll", (NVLinkTwoSidedAlltoAll,), {"fault": fault})

    def create_communication(bootstrap, params, backend):
        return (one if isinstance(backend, NVLinkOneSidedConfig) else two)(bootstrap, params, backend)

    install(
        monkeypatch,
        module("flashinfer.moe_ep", NVLinkOneSidedAlltoAll=one, NVLinkTwoSidedAlltoAll=two),
        module("flashinfer.moe_ep.config", BootstrapConfig=BootstrapConfig),
        module(
            "flashinfer.moe_ep.core.comm.communication",
            MoEEpCommParams=MoEEpCommParams,
            create_communication=create_communication,
        ),
        module(f"{ONE}.config", NVLinkOneSidedConfig=NVLinkOneSidedConfig),
        module(f"{ONE}.kernels", get_nvlink_one_sided_alltoall_module=lambda: None),
        module(f"{TWO}.config", NVLinkTwoSidedConfig=NVLinkTwoSidedConfig),
        module(f"{TWO}.kernels", get_nvlink_two_sided_alltoall_module=lambda: None),
        module("flashinfer.comm.mnnvl", MnnvlMemory=type("MnnvlMemory", (), {"supports_mnnvl": lambda: True})),
        module("flashinfer.fused_moe.api", QuantFormat=QuantFormat),
    )
