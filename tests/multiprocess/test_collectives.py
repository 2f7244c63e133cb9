"""The forms of torch.distributed, through every case of the contract in real processes, over gloo where no GPU is."""

import pytest
from _contract_ranks import problems_on_ranks

pytest.importorskip("torch", reason="torch is not installed; make torch")
pytestmark = pytest.mark.beside

RIGHT = (
    "epcross.harness.backends.nccl_a2a:NcclAllToAll",
    "epcross.harness.backends.nccl_a2a_padded:NcclAllToAllPadded",
    "epcross.harness.backends.ag_rs:AllGatherReduceScatter",
)
BROKEN = {
    "EveryoneReceives": ("plain", "a row that was not sent here"),
    "StaleZeros": ("ragged", "a wrong combined sum"),
    "AddsUnwanted": ("rotated", "a wrong combined sum"),
    "SharesPartials": ("ragged", "a chain of 5 pairs"),
    "WrongOrder": ("rotated", "dispatch of exact rows"),
}


@pytest.mark.parametrize("size", [2, 3])
def test_they_pass_the_contract(size: int) -> None:
    found = problems_on_ranks([(target, "*") for target in RIGHT], size)
    assert {target: [text for text in texts if text] for target, texts in found.items() if texts} == {}


def test_a_broken_one_is_caught() -> None:
    found = problems_on_ranks([(f"_broken_collectives:{name}", case) for name, (case, _) in BROKEN.items()], 2)
    for name, (_, says) in BROKEN.items():
        texts = found.get(f"_broken_collectives:{name}", [])
        assert any(says in text for text in texts), (name, texts)
