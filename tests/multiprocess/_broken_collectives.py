"""Collectives with one thing wrong, each in a way that a careless adapter could be."""

from epcross.harness.backends.ag_rs import AllGatherReduceScatter
from epcross.harness.backends.nccl_a2a import NcclAllToAll
from epcross.harness.backends.nccl_a2a_padded import NcclAllToAllPadded


class EveryoneReceives(AllGatherReduceScatter):
    """Takes rows that chose another rank for its own."""

    def present(self, landed):
        import torch

        source, token = torch.ones(landed.shape[:2], dtype=torch.bool).nonzero(as_tuple=True)
        return source, token


class StaleZeros(AllGatherReduceScatter):
    """Leaves partials of another routing where this one has none."""

    def stage_ranks(self, set_index, partials):
        self._partials[set_index][self._present] = partials[0]


class AddsUnwanted(NcclAllToAllPadded):
    """Adds what a rank returned for tokens that it never had."""

    def wanted(self, set_index):
        return super().wanted(set_index) | True


class SharesPartials(NcclAllToAll):
    """One buffer for partials whose places follow the routing."""

    def allocate(self, sets):
        super().allocate(sets)
        self._partials = [self._partials[0]] * sets


class WrongOrder(NcclAllToAll):
    """Gives rows to the ranks in the wrong order."""

    def wanted(self, set_index):
        return super().wanted(set_index).roll(1, dims=0)
