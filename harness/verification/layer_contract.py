"""The contract suite of layers: small cases that go wrong elsewhere, in every pair of formats, judged by the oracle."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from epcross.harness.backends.base import ContractShape
from epcross.harness.backends.layer import LayerBackend, hidden_point
from epcross.harness.point import Scalar
from epcross.harness.terms import BackendKind, RowFormat, WeightFormat
from epcross.harness.verification.cases import Case, cases
from epcross.harness.verification.contract import CHAIN_PAIRS, SETS
from epcross.harness.verification.gpu_contract import GpuVisit
from epcross.harness.verification.local_ranks import local_ranks
from epcross.harness.workload.batches import GroupBatch

FORMATS = (
    (RowFormat.BF16, WeightFormat.BF16),
    (RowFormat.FP8, WeightFormat.FP8),
    (RowFormat.FP8, WeightFormat.FP4),
)
"""Of activations and weights."""

HIDDEN, INTERMEDIATE = 512, 256
"""Multiples of what every library here is written for."""

_NAMES = (
    *("plain", "one_token", "ragged", "capacity_above_tokens", "all_to_one", "local_only", "masked_ids", "masked_rows"),
    *("rotated", "every_expert", "replicated", "zero_tokens_on_a_rank", "zero_received_on_a_rank"),
)
"""Cases of an exchange that are about routing and counts; what is about bytes has no meaning here."""


def suite(
    kind: BackendKind,
    ep_size: int,
    backend: str,
    *,
    compute: str = "",
    compute_options: Sequence[tuple[str, Scalar]] = (),
    shape: ContractShape | None = None,
) -> tuple[Case, ...]:
    """The cases of a backend of this kind. `shape` is its own; names and number are the same without."""
    shape = shape or ContractShape()
    plain = cases(ep_size, backend, shape)
    if kind is BackendKind.EXCHANGE:
        return plain
    found = []
    for rows, weights in FORMATS:
        for case in plain:
            if case.name not in _NAMES:
                continue
            point = replace(
                case.point,
                model=replace(case.point.model, hidden=max(HIDDEN, shape.hidden), intermediate=INTERMEDIATE),
                dispatch_format=rows,
                kind=kind,
                compute=compute,
                compute_options=tuple(sorted(compute_options)),
                weight_format=weights,
            )
            found.append(replace(case, name=f"{case.name}_{rows}_{weights}", point=point))
    return tuple(found)


class LayerVisit(GpuVisit):
    """One layer at one case, on the ranks of one process."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.inputs = hidden_point(self.point)

    def local_ranks(self) -> Any:
        """See `GpuVisit`."""
        return local_ranks(self.backend, self.point, self.group, self.slots)

    def chain(self, batches: list[GroupBatch]) -> None:
        """See `Visit`. The layer in place is run too, since steady series time it."""
        backend = self.backend
        assert isinstance(backend, LayerBackend)
        self.call("stage", lambda: self.ranks.stage_timed(batches))
        self.agree(None)
        self.call("poison", backend.poison)
        self.agree(None)
        if backend.kind is BackendKind.LAYER:
            for index in range(SETS):
                self.call("in_place", lambda index=index: backend.in_place(index))
        self.pairs()
        last = (CHAIN_PAIRS - 1) % SETS
        wrong = self.call("outputs", lambda: self.ranks.check_timed(last, batches[last]))
        self.agree(wrong, f"a chain of {CHAIN_PAIRS} layers, set {last}")
        self.call("drain_timing", backend.drain_timing)
