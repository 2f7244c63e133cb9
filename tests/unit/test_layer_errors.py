"""How near to its bound a layer is, worked out by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed, which the GPU path needs even on the CPU")

import torch
from tests._points import slots_of
from tests._torch_layer import layer, layer_point
from tests.contract.threads import on_ranks

from epcross.harness.measuring.unit_session import UnitSession
from epcross.harness.terms import RowFormat
from epcross.harness.verification.layer_ranks import LayerRanks
from epcross.harness.workload.batches import group_batch
from epcross.harness.workload.tape import Payload
from epcross.kernels.experts.expert_sums import Moves
from epcross.kernels.experts.formats import Arithmetic
from epcross.kernels.experts.oracle import Expected

STEP = 2.0**-7  # of bf16 above 1, by which the plain product is off in every column
TOKENS, HIDDEN = 4, 256
FIRST, SECOND = (Arithmetic(intermediate=RowFormat.FP8, scale_block=block) for block in (64, 128))


def off_by(steps: float, columns: int = HIDDEN) -> torch.Tensor:
    """Outputs of a rank that are off by so many steps, in the first columns."""
    out = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)
    out[:, :columns] += steps * STEP
    return out


def wanted(steps: float = 0, slack: float = 0.0, *, sums: bool = False) -> Expected:
    """1 in every column, and `steps` more; slack in squares of steps."""
    value = off_by(steps).double()
    moves = Moves.none(value)
    if sums:  # of one expert, of whose intermediate next to nothing moves
        moves.mean.fill_(1e-15)
        moves.token.append(torch.arange(TOKENS))
        moves.own.append(moves.mean[:, -1])
        moves.slots.append(0)
    allowed = torch.full_like(value, slack * STEP**2)
    return Expected(value=value, plain=off_by(steps + 1), slack=allowed, moves=moves)


class Ranks(LayerRanks):
    """Two ranks that gave `outs`; `rules` has what must come out."""

    def __init__(self, rules: dict[Arithmetic, Expected], *outs: torch.Tensor) -> None:
        point = layer_point((TOKENS, TOKENS), hidden=HIDDEN)
        backend: Any = SimpleNamespace(arithmetics=lambda point: list(rules))
        group: Any = SimpleNamespace(rank=0)
        super().__init__(backend, point, group, slots_of(point), 2)
        self.rules, self.outs = rules, outs
        self.batch = group_batch(point, seed=0, set_index=0, payload=Payload.RANDOM)

    def judged(self, set_index, batch):
        return list(zip(self.ranks, self.outs, strict=True))

    def expected(self, rank, batches, arithmetic):
        return [self.rules[arithmetic] for _ in batches]

    def check(self, *outs: torch.Tensor) -> Any:
        self.outs = outs or self.outs
        return self.check_combined(0, self.batch)


@pytest.mark.parametrize(
    ("of", "out", "ratio", "share"),
    [
        (wanted(), off_by(0), 0, 0),
        (wanted(), off_by(1), 1, 0.5),
        (wanted(), off_by(2), 2, 1),
        (wanted(), off_by(3), 3, 1.5),
        (wanted(), off_by(3, 128), 3 / math.sqrt(2), 1.5),  # by these columns alone
        (wanted(slack=12), off_by(3), 3, 0.75),  # above 2, and right
        (wanted(slack=12, sums=True), off_by(3), 3, 1.5),  # by the sum over the expert's tokens alone
        (wanted(), off_by(math.nan), math.inf, math.inf),
        (wanted(), off_by(0)[:1], math.inf, math.inf),  # malformed
    ],
)
def test_the_error_of_a_layer_over_what_is_allowed(of, out, ratio, share):
    ranks = Ranks({FIRST: of}, off_by(0), out)
    assert ranks.worst_share == -math.inf  # nothing was judged yet
    assert (ranks.check() is None) == (share <= 1)
    assert ranks.worst_ratio == pytest.approx(ratio)
    assert ranks.worst_share == pytest.approx(share, rel=1e-6)


def test_it_is_the_worst_of_all_ranks_and_rounds():
    ranks = Ranks({FIRST: wanted()}, off_by(1), off_by(0))
    assert ranks.check() is None
    assert ranks.check(off_by(0), off_by(0.5)) is None
    assert (ranks.worst_ratio, ranks.worst_share) == (pytest.approx(1), pytest.approx(0.5))
    wrong = ranks.check(off_by(3), off_by(5))
    assert wrong.rank == 0
    assert (ranks.worst_ratio, ranks.worst_share) == (pytest.approx(5), pytest.approx(2.5))


@pytest.mark.parametrize(
    ("seen", "told"),
    [((-math.inf, 0.25), 0.25), ((1.5, 0.25), 1.5), ((math.inf, 0.25), None), ((-math.inf, -math.inf), None)],
)
def test_a_row_has_the_worst_of_all_processes_if_it_is_a_number(seen, told):
    def fields(group):
        ranks = Ranks({FIRST: wanted()})
        ranks.worst_ratio = ranks.worst_share = seen[group.rank]
        session: Any = SimpleNamespace(backend=layer(), ranks=ranks, group=group)
        return UnitSession.error_fields(session)

    assert on_ranks(2, fields) == [{"error_ratio": told, "error_share": told}] * 2


def test_of_several_rules_it_is_that_of_the_one_that_is_followed():
    rules = {FIRST: wanted(), SECOND: wanted(steps=2)}
    ranks = Ranks(rules, off_by(3), off_by(3))
    assert ranks.check() is None
    assert (ranks.worst_ratio, ranks.worst_share) == (pytest.approx(1), pytest.approx(0.5))
    neither = Ranks(rules, off_by(6), off_by(6))
    assert neither.check() is not None
    assert neither.worst_share == pytest.approx(2)  # the nearest one's
