"""Rounds of the one-sided exchange with every rank in one launch: inputs, an oracle in torch, and what must agree."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from epcross.kernels.formats import RowFormat, row_size
from epcross.kernels.onesided import Dispatched, OneSidedAllToAll, plan
from epcross.kernels.onesided.layout import ARMED_WORD, ESCAPE_WORD, MAX_LOCAL_RANKS, Protocol
from epcross.kernels.onesided.plan import ROW

if TYPE_CHECKING:
    import pytest
    from torch.distributed import ProcessGroup

Tensor = torch.Tensor

RESERVED = (ARMED_WORD, ESCAPE_WORD, 0xFFFF_FFFF_FFFF_FFFF, 0x7FC0_7FC0_7FC0_7FC0, 0x8000_0000_8000_0000, 0)
"""Words that a protocol over NaN patterns could trip over."""

FORMS = ("fence", "fence_row", "sentinel")
"""What a case's `protocol` may be: the protocols, and Fence that takes `row` at any size once `always` was called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Shapes of an exchange."""

    ep_size: int
    capacity: int
    dispatch_format: RowFormat = RowFormat.BF16
    hidden: int = 256
    top_k: int = 8
    num_slots: int = 256
    protocol: str = "sentinel"  # one of `FORMS`, or auto

    @property
    def named(self) -> str:
        """The protocol as an exchange takes it."""
        return self.protocol.partition("_")[0]

    def exchange(
        self,
        placement: Sequence[int] | None = None,
        *,
        group: "ProcessGroup | None" = None,
        timeout_s: float = 20.0,
        **options: Any,
    ) -> OneSidedAllToAll:
        """Every rank in this process, or as many in each process of `group`."""
        return OneSidedAllToAll(
            group,
            num_experts=self.num_slots,
            top_k=self.top_k,
            hidden=self.hidden,
            max_tokens_per_rank=self.capacity,
            dispatch_format=self.dispatch_format,
            protocol=self.named,
            placement=placement,
            local_ranks=self.ep_size // (1 if group is None else group.size()),
            timeout_s=timeout_s,
            **options,
        )

    def linear(self, device: str = "cuda") -> Tensor:
        """The rank of each slot when they are spread in order."""
        return torch.arange(self.num_slots, device=device) * self.ep_size // self.num_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What all ranks send in a round. [V, T, ...]; rank v has the first `counts[v]` tokens."""

    rows: Tensor
    scales: Tensor
    ids: Tensor
    weights: Tensor
    partials: Tensor  # bf16 [V destination, V source, T, hidden]: what the experts of a rank answer
    counts: list[int]

    def destinations(self, slot_rank: Tensor) -> Tensor:
        """bool [V source, T, V destination]: who gets a token."""
        known = (self.ids >= 0) & (self.ids < len(slot_rank))
        ranks = torch.where(known, slot_rank[self.ids.clamp(0, len(slot_rank) - 1)], -1)
        sent = (ranks[..., None] == torch.arange(len(self.counts), device=ranks.device)).any(2)
        tokens = torch.arange(self.ids.shape[1], device=ranks.device)
        return sent & (tokens < torch.tensor(self.counts, device=ranks.device)[:, None])[..., None]

    def combined(self, slot_rank: Tensor) -> Tensor:
        """bf16 [V, T, hidden]: fp32 sums over ranks, ascending from +0, rounded once."""
        sent = self.destinations(slot_rank)
        total = torch.zeros(self.partials.shape[1:], dtype=torch.float32, device=self.ids.device)
        for rank in range(len(self.counts)):
            total = torch.where(sent[..., rank, None], total + self.partials[rank].float(), total)
        return total.to(torch.bfloat16)


def always(form: str, patch: "pytest.MonkeyPatch | None" = None) -> None:
    """If `form` is "fence_row", have Fence take `row` at any size in exchanges made from now on, also where many ranks
    share a launch; until `patch` is undone. A mere protocol changes nothing."""
    if form != "fence_row":
        return
    rows = tuple((limit, ROW, back) for limit, _, back in plan.VARIANTS[Protocol.FENCE])
    changes = {
        "VARIANTS": {**plan.VARIANTS, Protocol.FENCE: rows},
        "ROW_RANKS": MAX_LOCAL_RANKS,
        "BLOCKS": {**plan.BLOCKS, ROW: replace(plan.BLOCKS[ROW], per_sm=None)},  # or many ranks would find no room
    }
    for name, value in changes.items():
        if patch is None:
            setattr(plan, name, value)
        else:
            patch.setattr(plan, name, value)


def random_bits(shape: Sequence[int], generator: torch.Generator, reserved: bool) -> Tensor:
    """uint8 bits. `reserved`: every other word of 8 bytes is one of `RESERVED`."""
    bits = torch.randint(0, 256, tuple(shape), dtype=torch.uint8, device=generator.device, generator=generator)
    if not reserved or bits.numel() == 0:
        return bits
    flat = bits.view(-1)
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    chosen = torch.randint(0, 2 * len(RESERVED), words.shape, device=words.device, generator=generator)
    for index, word in enumerate(RESERVED):
        words[chosen == index] = word - (1 << 64) if word >> 63 else word
    return bits


def random_ids(case: Case, tokens: int, generator: torch.Generator, routing: str = "uniform") -> Tensor:
    """int32 [V, T, K] of distinct slots; `routing` is uniform, skewed (to low slots), masked (some -1), empty, or
    beyond (some are no slots, which drops them)."""
    scores = torch.rand(case.ep_size, tokens, case.num_slots, device=generator.device, generator=generator)
    if routing == "skewed":
        scores = scores * torch.linspace(1, 0, case.num_slots, device=scores.device) ** 4
    ids = scores.topk(case.top_k, dim=-1).indices.to(torch.int32)
    if routing == "masked":
        ids[torch.rand(ids.shape, device=ids.device, generator=generator) < 0.6] = -1
    if routing == "beyond":
        chosen = torch.rand(ids.shape, device=ids.device, generator=generator)
        ids[chosen < 0.2] = case.num_slots
        ids[chosen > 0.8] = torch.iinfo(torch.int32).max
    if routing == "empty":
        ids.fill_(-1)
    return ids


def make_inputs(
    case: Case, counts: list[int], seed: int, *, routing: str = "uniform", reserved: bool = False, device: str = "cuda"
) -> Inputs:
    """Random inputs; values are arbitrary bits in dispatch, and without `reserved` ordinary numbers in combine."""
    generator = torch.Generator(device=device).manual_seed(seed)
    size, ranks, tokens = row_size(case.dispatch_format, case.hidden), case.ep_size, max([*counts, 1])
    answers = (ranks, ranks, tokens, case.hidden)
    if reserved:
        partials = random_bits((*answers[:-1], 2 * case.hidden), generator, reserved).view(torch.bfloat16)
    else:
        partials = torch.randn(answers, device=device, generator=generator).to(torch.bfloat16)
    return Inputs(
        rows=random_bits((ranks, tokens, size.padded_row_bytes), generator, reserved),
        scales=random_bits((ranks, tokens, size.padded_scale_bytes), generator, reserved),
        ids=random_ids(case, tokens, generator, routing),
        weights=random_bits((ranks, tokens, 4 * case.top_k), generator, reserved).view(torch.float32),
        partials=partials,
        counts=counts,
    )


def play(exchange: OneSidedAllToAll, inputs: Inputs, slot_rank: Tensor) -> None:
    """One whole round, compared with the oracle bit for bit; the part of this process's ranks."""
    dispatched = send(exchange, inputs)
    torch.cuda.synchronize()
    exchange.check()
    sent = inputs.destinations(slot_rank)
    several = exchange.local_ranks > 1  # else the exchange leaves the dimension of local ranks out
    arrived = dispatched.arrived() if several else dispatched.arrived()[None]
    landing, buffer = dispatched.landing(), exchange.combine_buffer()
    assert dispatched.source_tokens().flatten().tolist() == inputs.counts * exchange.local_ranks
    tokens = inputs.ids.shape[1]
    assert not arrived[..., tokens:].any()
    assert torch.equal(arrived[..., :tokens], sent.permute(2, 0, 1)[own(exchange)]), "who sent what to whom"
    for local in range(exchange.local_ranks):
        rank = exchange.rank + local
        here = sent[..., rank].nonzero(as_tuple=True)
        rows, scales, ids, weights, answers = (
            tensor[local] if several else tensor
            for tensor in (landing.rows, landing.scales, landing.ids, landing.weights, buffer)
        )
        assert torch.equal(rows[here], inputs.rows[here])
        assert torch.equal(scales[here], inputs.scales[here])
        assert torch.equal(ids[here], inputs.ids[here])
        assert torch.equal(bits(weights[here]), bits(inputs.weights[here]))
        answers[here] = inputs.partials[rank][here]
    out = torch.full_like(inputs.partials[0][own(exchange)], 3.0)
    exchange.combine(out if several else out[0])
    torch.cuda.synchronize()
    exchange.check()
    expected = inputs.combined(slot_rank)[own(exchange)]
    for local, count in enumerate(inputs.counts[own(exchange)]):
        assert same_sums(out[local, :count], expected[local, :count]), f"sums of rank {exchange.rank + local}"
        assert torch.all(out[local, count:] == 3.0), "written past its tokens"


def own(exchange: OneSidedAllToAll) -> slice:
    """The ranks of this process."""
    return slice(exchange.rank, exchange.rank + exchange.local_ranks)


def send(exchange: OneSidedAllToAll, inputs: Inputs) -> Dispatched:
    """Enqueue the dispatch of a round."""
    given = [inputs.rows, inputs.ids, inputs.weights, *([inputs.scales] if inputs.scales.shape[-1] else [])]
    mine = [tensor[own(exchange)] for tensor in given]
    rows, ids, weights, *scales = mine if exchange.local_ranks > 1 else [tensor[0] for tensor in mine]
    counts, most = inputs.counts[own(exchange)], max(inputs.counts)
    return exchange.dispatch(rows, ids, weights, *scales[:1], tokens=counts, group_tokens=most)


def bits(tensor: Tensor) -> Tensor:
    """The bytes, so that NaNs compare."""
    return tensor.contiguous().view(torch.uint8)


def same_sums(out: Tensor, expected: Tensor) -> bool:
    """Bit for bit, save that one NaN is as good as another."""
    nan = expected.isnan()
    return torch.equal(out.isnan(), nan) and torch.equal(bits(out[~nan]), bits(expected[~nan]))
