"""Errors added over all tokens of an expert: what one token may do, all of them together may not.

What is wrong with an expert's weights spoils each of its tokens a little: a scale of GEMM2 128 columns, one of GEMM1
all. So squares of errors are added over the expert's tokens, over each 128 columns and over all, and the sum may be at
most

    rounding + E + z    with    V / J**2 * h(z * J / V) = L,    h(u) = (1 + u) * log(1 + u) - u

`rounding` is the sum of what is allowed for roundings. The rest is Bennett's inequality for moves of the re-quantised
intermediate (`intermediate.py`), which are rare and independent: element j moves with a small chance by a step q_j, and
the squared error grows by a_j = q_j**2 * w**2 * D_j, where w is the routing weight and D_j the sum of the squares of
GEMM2's column j over the columns that are looked at. E is what is expected of the sum; V is its variance, the sum of
E_j * a_j, and for each token 2 * E**2 / columns, as moves add like vectors of random direction; J is the farthest that
any one element may move. A right sum is above with a chance of exp(-L), 1e-12, at most, and a unit has less than a
million of them. At few tokens J decides (z is 6 to 10 J), at many E.

A token of several experts counts for each of them, with the expert's share of what is expected of the token.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epcross.kernels.experts.intermediate import Intermediate

if TYPE_CHECKING:
    import torch

COLUMNS = 128  # judged by themselves
_LOG_CHANCE = 28.0
"""L: of a false alarm in one sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What re-quantisation may add to the squared error of each of n tokens, over each 128 columns and, last, all.

    Adding an expert changes the tensors in place.
    """

    mean: "torch.Tensor"  # float64 [n, blocks + 1]
    variance: "torch.Tensor"  # likewise
    largest: "torch.Tensor"  # likewise: by one element
    token: "list[torch.Tensor]"  # int64 [P] of each expert that has tokens
    own: "list[torch.Tensor]"  # float64 [P]: what it adds to `mean`, over all columns
    slots: list[int]  # of these experts

    @classmethod
    def none(cls, values: "torch.Tensor") -> "Moves":
        """Before any expert is added, for outputs of the shape of `values`, on its device."""
        import torch

        shape = 3, len(values), -(-values.shape[1] // COLUMNS) + 1
        mean, variance, largest = torch.zeros(shape, dtype=torch.float64, device=values.device)
        return cls(mean=mean, variance=variance, largest=largest, token=[], own=[], slots=[])

    def part(self, first: int, last: int) -> "Moves":
        """Of the tokens from `first` up to `last`, as if there had been no others."""
        found = Moves(
            mean=self.mean[first:last],
            variance=self.variance[first:last],
            largest=self.largest[first:last],
            token=[],
            own=[],
            slots=[],
        )
        for slot, token, own in zip(self.slots, self.token, self.own, strict=True):
            here = (token >= first) & (token < last)
            if bool(here.any()):
                found.slots.append(slot)
                found.token.append(token[here] - first)
                found.own.append(own[here])
        return found

    def add(
        self, slot: int, token: "torch.Tensor", made: Intermediate, down_squares: "torch.Tensor",
        weight_squares: "torch.Tensor", usual: float,
    ) -> None:  # fmt: skip
        """What one expert does to its tokens.

        Args:
            slot: the expert's.
            token: int64 [P].
            made: of these tokens.
            down_squares: float64 [hidden, intermediate].
            weight_squares: float64 [P, 1], of what its output is multiplied by.
            usual: what GEMM2's own sums lose, as a share of the size of what is added.
        """
        length = with_total(column_sums(down_squares.T)).T  # [blocks + 1, intermediate]
        moved = made.moved + (usual * made.value).square()
        mean = moved @ length.T * weight_squares
        self.mean.index_add_(0, token, mean)
        variance = (made.moved * made.step.square()) @ length.square().T
        self.variance.index_add_(0, token, variance * weight_squares.square())
        # over 128 elements at a time, whose lengths are nearly the same
        farthest = _blocks(made.farthest.square()).amax(-1)  # [P, intermediate / 128]
        longest = _blocks(length).amax(-1)  # [blocks + 1, intermediate / 128]
        largest = (farthest[:, None] * longest).amax(-1) * weight_squares
        self.largest.scatter_reduce_(0, token[:, None].expand_as(largest), largest, "amax")
        self.token.append(token)
        self.own.append(mean[:, -1])
        self.slots.append(slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSums:
    """One verdict for each of m experts."""

    slots: list[int]
    tokens: list[int]  # of each
    times_allowed: "torch.Tensor"  # float64 [m]: root of the largest sum over what it may be; above 1 is wrong
    worst_block: "torch.Tensor"  # int64 [m]: where, as 128 columns; one more than there are is all of them
    blocks: int

    @property
    def ok(self) -> bool:
        """Whether every expert is right."""
        return bool((self.times_allowed <= 1).all())

    def sentence(self) -> str:
        """How many are wrong, and the worst."""
        if not self.slots:
            return "no experts"
        worst, wrong = int(self.times_allowed.argmax()), int((self.times_allowed > 1).sum())
        block = int(self.worst_block[worst])
        columns = "all columns" if block == self.blocks else f"columns {COLUMNS * block} to {COLUMNS * block + 127}"
        tokens = self.tokens[worst]
        return (
            f"{wrong} of {len(self.slots)} experts wrong by the sum over their tokens; the worst, slot"
            f" {self.slots[worst]}, over {tokens} token{'s' * (tokens != 1)} and {columns}, is off by"
            f" {float(self.times_allowed[worst]):.2f} times what is allowed"
        )


def judge_sums(error: "torch.Tensor", rounding: "torch.Tensor", moves: Moves) -> ExpertSums:
    """Of squared errors over each 128 columns, float64 [n, blocks], and what is allowed for roundings, likewise."""
    import torch

    if not moves.slots:
        none = torch.zeros(0, dtype=torch.float64, device=error.device)
        return ExpertSums(slots=[], tokens=[], times_allowed=none, worst_block=none.long(), blocks=error.shape[1])
    counts = [len(token) for token in moves.token]
    token = torch.cat(moves.token)
    expert = torch.arange(len(counts), device=token.device).repeat_interleave(torch.tensor(counts, device=token.device))

    own = torch.cat(moves.own)
    share = torch.where(own > 0, own / moves.mean[token, -1], 0.0)[:, None]

    def added(values: "torch.Tensor", weight: "torch.Tensor") -> "torch.Tensor":
        zeros = torch.zeros((len(counts), values.shape[1]), dtype=values.dtype, device=values.device)
        return zeros.index_add_(0, expert, values[token] * weight)

    each = torch.maximum(rounding, rounding.mean(1, keepdim=True))
    usual = torch.cat([each, rounding.sum(1, keepdim=True)], 1) + moves.mean
    columns = torch.full((error.shape[1] + 1,), float(COLUMNS), dtype=torch.float64, device=error.device)
    columns[-1] *= error.shape[1]
    variance = added(moves.variance + 2 * moves.mean.square() / columns, share.square())
    largest = torch.zeros_like(variance)
    largest.scatter_reduce_(0, expert[:, None].expand(-1, largest.shape[1]), moves.largest[token] * share, "amax")
    allowed = added(usual, share) + _above_mean(variance, largest)
    found = added(with_total(error), share)
    ratio = torch.where(found == 0, 0.0, found / allowed)
    ratio = torch.where(ratio.isnan(), math.inf, ratio).sqrt()
    worst = ratio.max(1)
    return ExpertSums(
        slots=moves.slots, tokens=counts, times_allowed=worst.values, worst_block=worst.indices, blocks=error.shape[1]
    )


def _above_mean(variance: "torch.Tensor", largest: "torch.Tensor") -> "torch.Tensor":
    """z of V / J**2 * h(z * J / V) = L, with h(u) = (1 + u) * log(1 + u) - u: halves what lies between 0 and
    Bernstein's sqrt(2 * V * L) + J * L / 3, which is never below."""
    import torch

    high = (2 * _LOG_CHANCE * variance).sqrt() + _LOG_CHANCE / 3 * largest
    low = torch.zeros_like(high)
    for _ in range(30):
        middle = (low + high) / 2
        u = middle * largest / variance
        enough = variance * ((1 + u) * torch.log1p(u) - u) >= _LOG_CHANCE * largest.square()
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high


def column_sums(values: "torch.Tensor") -> "torch.Tensor":
    """[n, columns] added over each 128 of them, the last maybe fewer."""
    return _blocks(values).sum(-1)


def with_total(sums: "torch.Tensor") -> "torch.Tensor":
    """[n, blocks + 1]: their sum comes last."""
    import torch

    return torch.cat([sums, sums.sum(1, keepdim=True)], 1)


def _blocks(values: "torch.Tensor") -> "torch.Tensor":
    """[n, blocks, 128], the last padded with zeros."""
    import torch

    missing = -values.shape[1] % COLUMNS
    return torch.nn.functional.pad(values, (0, missing)).unflatten(1, (-1, COLUMNS))
