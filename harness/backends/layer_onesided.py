"""A layer around our own exchange: experts read the landing set in place, and write where combine returns from."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from epcross.harness.backends import vendor
from epcross.harness.backends.onesided import OneSided, OneSidedFence, OneSidedSentinel
from epcross.harness.backends.split_layer import Given, InLayer, SplitLayer
from epcross.harness.point import Point, Scalar
from epcross.kernels.experts.rows import RankMajorRows, of_dispatched
from epcross.kernels.onesided.layout import Protocol

if TYPE_CHECKING:
    from torch import Tensor


class OneSidedInLayer(OneSided, InLayer):
    """What a layer asks for, of both protocols."""

    def capacity_rows(self, point: Point) -> int:
        """See `InLayer`: a place for each token of each rank."""
        return point.ep_size * max(1, point.max_tokens_per_rank)

    def given_ranks(self, set_index: int) -> Sequence[Given]:
        """See `InLayer`."""
        held = self._inputs[set_index]
        return [
            Given(self._of_rank(held["rows"], local)[:count], self._of_rank(held["scales"], local)[:count])
            for local, count in enumerate(self._counts)
        ]

    def partial_buffers(self) -> "Sequence[Tensor]":
        """See `InLayer`. Local memory, which no word of a protocol lies in."""
        return [self._opened().combine_buffer()]

    def landed_ranks(self, set_index: int) -> Sequence[RankMajorRows]:
        """See `InLayer`. Views that every round and every replay finds again."""
        out = self._opened().combine_buffer()
        return [of_dispatched(self._landed, out, local) for local in range(self._local)]


class FenceInLayer(OneSidedFence, OneSidedInLayer):
    """One landing set."""


class SentinelInLayer(OneSidedSentinel, OneSidedInLayer):
    """Two landing sets; which of them is in use is known to the device alone."""


class LayerOneSided(SplitLayer):
    """Fence or Sentinel, as `protocol` says."""

    name = "layer_onesided"
    exchange_class = SentinelInLayer

    @classmethod
    def option_defaults(cls) -> Mapping[str, Scalar]:
        """Those of the exchange, `staging`, and `protocol`: sentinel or fence."""
        return {**super().option_defaults(), "protocol": str(Protocol.SENTINEL)}

    @classmethod
    def option_problems(cls, options: Mapping[str, Scalar]) -> list[str]:
        """See `SplitLayer`."""
        return [*super().option_problems(options), *vendor.not_among(options, protocol=Protocol)]

    def make_exchange(self) -> InLayer:
        """See `SplitLayer`."""
        own: dict[str, Any] = {name: self.options[name] for name in OneSided.option_defaults()}
        return FenceInLayer(own) if self.options["protocol"] == Protocol.FENCE else SentinelInLayer(own)
