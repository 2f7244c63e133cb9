"""`deep_ep` as documented: `ElasticBuffer` of the second generation, and both modes of the first's `Buffer`."""

from types import SimpleNamespace
from typing import Any

import torch
from tests.fakes.world import chosen, garbage, install, localised, module, ranks_of, scrambled


def install_deep_ep(monkeypatch: Any, fault: str = "") -> None:
    """Make `import deep_ep` find the imitation, with one thing wrong if `fault` names it."""
    faulty = {"fault": fault}
    install(
        monkeypatch,
        module(
            "deep_ep",
            ElasticBuffer=type("ElasticBuffer", (ElasticBuffer,), faulty),
            Buffer=type("Buffer", (Buffer,), faulty),
            topk_idx_t=torch.int64,
        ),
    )


def _land(group: Any, given: dict[str, Any], per_rank: int, order: Any) -> list[tuple[int, int, dict[str, Any]]]:
    """(source, token, inputs of the source) of each row, sources ascending, tokens in `order`."""
    landed = []
    for source, inputs in enumerate(group.exchange(given)):
        tokens = chosen(inputs["ids"], group.rank(), per_rank)
        landed += [(source, tokens[i], inputs) for i in order(len(tokens))]
    return landed


def _unpack(x: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return x if isinstance(x, tuple) else (x, None)


def _copies(x: Any, ids: torch.Tensor, weights: torch.Tensor) -> dict[str, Any]:
    rows, scales = _unpack(x)
    return {
        "rows": rows.clone(),
        "scales": None if scales is None else scales.clone(),
        "ids": ids.clone(),
        "weights": weights.clone(),
    }


def _sum(ids: torch.Tensor, per_rank: int, partials: list[dict[int, torch.Tensor]], hidden: int) -> torch.Tensor:
    """fp32 sums of the partials of each token, ranks as its ids name them."""
    out = torch.empty(len(ids), hidden, dtype=torch.bfloat16)
    for token, selected in enumerate(ids):
        total = torch.zeros(hidden)
        for rank in ranks_of(selected, per_rank):
            total += partials[rank][token].float()
        out[token] = total.bfloat16()
    return out


class ElasticBuffer:
    fault = ""

    def __init__(
        self,
        group,
        num_max_tokens_per_rank=0,
        hidden=0,
        num_topk=0,
        use_fp8_dispatch=False,
        prefer_overlap_with_compute=True,
        num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100,
        explicitly_destroy=False,
    ):
        self.group, self.most, self.hidden = group, num_max_tokens_per_rank, hidden
        self.num_scaleup_ranks = 1 if self.fault == "rdma" else group.size()
        self.num_bytes = 2 << 20
        self.sms = 24 if prefer_overlap_with_compute else 64
        assert explicitly_destroy

    def dispatch(
        self,
        x,
        topk_idx: Any = None,
        topk_weights: Any = None,
        num_experts: Any = None,
        num_max_tokens_per_rank: Any = None,
        num_sms=0,
        do_handle_copy=True,
        do_cpu_sync: Any = None,
    ):
        assert do_cpu_sync is False
        ranks = self.group.size()
        per_rank, most = num_experts // ranks, num_max_tokens_per_rank
        rows, scales = _unpack(x)
        assert rows.shape[1:] == (self.hidden,)
        assert len(rows) <= most <= self.most
        landed = _land(self.group, _copies(x, topk_idx, topk_weights), per_rank, scrambled)
        worst, top_k = ranks * most, topk_idx.shape[1]
        recv_x = garbage(worst, self.hidden, dtype=rows.dtype)
        recv_sf = None if scales is None else garbage(worst, scales.shape[1], dtype=torch.float32)
        ids, weights = garbage(worst, top_k, dtype=torch.int64), garbage(worst, top_k, dtype=torch.float32)
        meta = garbage(worst, 2 + top_k, dtype=torch.int32)
        for n, (source, token, given) in enumerate(landed):
            recv_x[n] = given["rows"][token]
            if recv_sf is not None:
                recv_sf[n] = given["scales"][token]
            mine = localised(given["ids"][token], self.group.rank(), per_rank)
            ids[n] = given["ids"][token] if self.fault == "global_ids" else mine
            weights[n] = given["weights"][token].roll(int(self.fault == "weights"))
            meta[n, 0] = source * most + token
        sources = torch.tensor([source for source, _, _ in landed], dtype=torch.int64)
        handle = SimpleNamespace(
            psum_num_recv_tokens_per_scaleup_rank=torch.bincount(sources, minlength=ranks).cumsum(0).int(),
            recv_src_metadata=meta,
            topk_idx=topk_idx.clone() if do_handle_copy else topk_idx,
            per_rank=per_rank,
            most=most,
            num_sms=num_sms or self.sms,
        )
        return (recv_x if recv_sf is None else (recv_x, recv_sf)), ids, weights, handle, None

    def combine(self, x, handle, topk_weights: Any = None):
        assert self.hidden % 256 == 0, "NVCC compilation failed"
        count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        partials = []
        me = self.group.rank()
        for rows, places in self.group.exchange((x[:count].clone(), handle.recv_src_metadata[:count, 0].tolist())):
            partials.append({p % handle.most: rows[n] for n, p in enumerate(places) if p // handle.most == me})
        if self.fault == "last_rank_lost" and me == 0:
            partials[-1] = {token: torch.zeros_like(row) for token, row in partials[-1].items()}
        return _sum(handle.topk_idx, handle.per_rank, partials, self.hidden), None, None

    def destroy(self):
        return


def low_latency_cast(rows: torch.Tensor, round_scale: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and fp32 scales of bf16 [..., hidden], as the low-latency dispatch casts: by 448 over the largest magnitude,
    or by the power of two that is not below its 448th part."""
    parts = rows.float().unflatten(-1, (-1, 128))
    largest = parts.abs().amax(-1).clamp(min=1e-4)
    factor, scales = torch.tensor(448.0) / largest, largest * torch.tensor(1 / 448)
    if round_scale:
        scales = torch.exp2(torch.log2(scales.double()).ceil()).float()
        factor = 1 / scales
    return (parts * factor[..., None]).flatten(-2).to(torch.float8_e4m3fn), scales


class _Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes, ranks):
        return 4096 * ranks


class Buffer:
    fault = ""
    num_sms = 20

    def __init__(
        self,
        group,
        num_nvl_bytes=0,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=False,
    ):
        self.group, self.low_latency = group, low_latency_mode
        assert (num_rdma_bytes > 0) == low_latency_mode
        assert explicitly_destroy

    @classmethod
    def set_num_sms(cls, number):
        cls.num_sms = number

    @staticmethod
    def get_dispatch_config(ranks):
        return _Config()

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(tokens, hidden, ranks, experts):
        assert tokens * ranks % 4 == 0
        return 4 * experts * tokens * hidden

    def get_dispatch_layout(self, topk_idx, num_experts):
        ranks = self.group.size()
        in_rank = torch.zeros(len(topk_idx), ranks, dtype=torch.bool)
        for rank in range(ranks):
            in_rank[chosen(topk_idx, rank, num_experts // ranks), rank] = True
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, None

    def dispatch(
        self,
        x,
        handle: Any = None,
        num_tokens_per_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        topk_idx: Any = None,
        topk_weights: Any = None,
        num_worst_tokens=0,
        config: Any = None,
    ):
        ranks, me = self.group.size(), self.group.rank()
        assert num_worst_tokens
        assert len(num_tokens_per_rank) == ranks
        per_rank = len(num_tokens_per_expert) // ranks
        rows, scales = _unpack(x)
        row_bytes = rows.shape[1] * rows.element_size()
        assert row_bytes % 32 == 0
        assert row_bytes // 2 + 8 <= 8192
        landed = _land(self.group, _copies(x, topk_idx, topk_weights), per_rank, range)
        top_k = topk_idx.shape[1]
        recv_x = garbage(num_worst_tokens, rows.shape[1], dtype=rows.dtype)
        recv_sf = None if scales is None else garbage(num_worst_tokens, scales.shape[1], dtype=torch.float32)
        ids = torch.full((num_worst_tokens, top_k), -1)
        weights = torch.zeros(num_worst_tokens, top_k)
        places = garbage(num_worst_tokens, dtype=torch.int32)
        for n, (_, token, given) in enumerate(landed):
            recv_x[n], places[n] = given["rows"][token], token
            if recv_sf is not None:
                recv_sf[n] = given["scales"][token]
            ids[n] = localised(given["ids"][token], me, per_rank)
            weights[n] = torch.where(ids[n] >= 0, given["weights"][token], 0)
        counts = torch.stack(self.group.exchange(is_token_in_rank.sum(0)))  # [source, destination]
        prefix = counts.cumsum(0).int()
        if self.fault == "own_counts":
            prefix = counts.T.contiguous().cumsum(0).int()
        handle = (prefix, None, None, places, (topk_idx, per_rank), is_token_in_rank)
        return (recv_x if recv_sf is None else (recv_x, recv_sf)), ids, weights, [], handle, None

    def combine(self, x, handle, topk_weights: Any = None, config: Any = None):
        me = self.group.rank()
        prefix, _, _, places, (topk_idx, per_rank), _ = handle
        partials = []
        for rows, ends, tokens in self.group.exchange((x.clone(), prefix.clone(), places.clone())):
            # the column of a rank that received: its rows of source `me` begin where the source before ends
            mine = len(partials)
            begin = int(ends[me - 1, mine]) if me else 0
            partials.append({int(tokens[n]): rows[n] for n in range(begin, int(ends[me, mine]))})
        return _sum(topk_idx, per_rank, partials, x.shape[1]), None, None

    def low_latency_dispatch(
        self,
        x,
        topk_idx,
        num_max_dispatch_tokens_per_rank,
        num_experts,
        use_fp8=True,
        round_scale=False,
        async_finish=False,
        return_recv_hook=False,
    ):
        assert self.low_latency
        assert x.dtype is torch.bfloat16
        ranks, me, most = self.group.size(), self.group.rank(), num_max_dispatch_tokens_per_rank
        per_rank = num_experts // ranks
        given = self.group.exchange((x.clone(), topk_idx.clone()))
        rows = garbage(per_rank, most * ranks, x.shape[1], dtype=torch.bfloat16)
        info = garbage(per_rank, most * ranks, dtype=torch.int32)
        ranges = torch.zeros(per_rank, ranks, dtype=torch.int64)
        counts = torch.zeros(per_rank, dtype=torch.int32)
        for expert in range(per_rank):
            begin = 0
            for source in scrambled(ranks):
                of_source, ids = given[source]
                tokens = (ids == me * per_rank + expert).any(dim=1).nonzero()[:, 0]
                tokens = tokens[scrambled(len(tokens))]
                if self.fault == "lost_copy" and expert == 0 and source == 0:
                    tokens = tokens[1:]
                end = begin + len(tokens)
                rows[expert, begin:end], info[expert, begin:end] = of_source[tokens], tokens.int()
                if self.fault == "differing_copy" and expert == 1 and end > begin:
                    rows[expert, begin] = -rows[expert, begin]
                ranges[expert, source] = (begin << 32) | len(tokens)
                begin = end
            counts[expert] = begin
        if use_fp8:  # quantised by the sender; scales lie by column
            rows, scales = low_latency_cast(rows, round_scale)
            rows = rows, scales.transpose(1, 2).contiguous().transpose(1, 2)
        return rows, counts, (info, ranges, most, x.shape[1], num_experts), None, None

    def low_latency_combine(self, x, topk_idx, topk_weights, handle, out: Any = None):
        info, ranges, _, hidden, experts = handle
        per_rank, me = experts // self.group.size(), self.group.rank()
        given = self.group.exchange((x.clone(), info.clone(), ranges.clone()))
        for token in range(len(topk_idx)):
            total = torch.zeros(hidden)
            for k, expert in enumerate(topk_idx[token].tolist()):
                if expert < 0:
                    continue
                rows, tokens, of = given[expert // per_rank]
                local = expert % per_rank
                begin, count = int(of[local, me]) >> 32, int(of[local, me]) & 0xFFFFFFFF
                at = begin + (tokens[local, begin : begin + count] == token).nonzero()[0, 0]
                weight = 1.0 if self.fault == "unweighted" else topk_weights[token, k]
                total += rows[local, at].float() * weight
            out[token] = total.bfloat16()
        return out, None, None

    def destroy(self):
        return
