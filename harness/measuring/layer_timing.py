"""How a layer is timed: as `cuda_timing` times a pair, and what of it is communication, in two ways.

    steady   chains |layer|layer| ... and |in place|in place| ... take turns, A B B A, so that a drift favours neither;
             layer_comm = period of the layer - period of the same layer on rows already in place
    entry    |flush|line up, stamp|layer|stamp|
    spans    |hold|layer|layer| ... under the profiler; layer_comm = span of dispatch + span of combine

Both ways count what a rank waits for fuller ones as communication, and neither what the other does: kernels of the
exchange run while the next ones start, and rows that are in place may lie in a cache. So rows say which way it was, by
their regime. Quantisation is in the layer and in place alike, unless a library does it inside its dispatch.
"""

from dataclasses import replace

from epcross.harness.backends.layer import LayerBackend
from epcross.harness.measuring.cuda_timing import CudaTimer
from epcross.harness.measuring.spans import phase_spans
from epcross.harness.measuring.timing import Pair, Series
from epcross.harness.terms import BackendKind, Phase, Regime


class LayerTimer(CudaTimer):
    """A `Timer` of layers, of every kind of them."""

    def series(self, regime: Regime, pair: Pair, *, pairs: int, iterations: int, sets: int) -> Series:
        """See `Timer`."""
        assert isinstance(pair, LayerBackend)
        whole = Phase.EXPERTS if pair.kind is BackendKind.EXPERTS else Phase.LAYER
        if regime is Regime.STEADY:
            return self._steady_layer(pair, whole, pairs=pairs, sets=sets)
        if regime is Regime.SPANS:
            return self._spans_layer(pair, whole, pairs=pairs, sets=sets)
        entry = self.entry_whole(pair, iterations=iterations, sets=sets)
        return replace(entry, values_us={whole: entry.values_us[Phase.ROUND_TRIP]})

    def _steady_layer(self, layer: LayerBackend, whole: Phase, *, pairs: int, sets: int) -> Series:
        """The layer's chains come first and last, so that what they leave is what is checked."""
        if layer.kind is not BackendKind.LAYER:
            series = self.steady(layer, pairs=pairs, sets=sets)
            return replace(series, values_us={whole: series.values_us[Phase.ROUND_TRIP]})
        alone = InPlace(layer)

        def period(pair: Pair, name: str) -> float:
            return self.steady(pair, pairs=pairs, sets=sets, name=name).values_us[Phase.ROUND_TRIP][0]

        first = period(layer, "steady")
        in_place = (period(alone, "in place") + period(alone, "in place")) / 2
        last = self.steady(layer, pairs=pairs, sets=sets)
        period_us = (first + last.values_us[Phase.ROUND_TRIP][0]) / 2
        return replace(last, values_us={whole: [period_us], Phase.LAYER_COMM: [period_us - in_place]})

    def _spans_layer(self, layer: LayerBackend, whole: Phase, *, pairs: int, sets: int) -> Series:
        parts = layer.parts()
        seen, count = self.seen_kernels(parts, pairs=pairs, sets=sets)
        values = {whole: phase_spans(seen, [phase for phase, _ in parts], count)}
        if layer.kind is BackendKind.LAYER:
            values |= {phase: phase_spans(seen, phase, count) for phase in (Phase.DISPATCH, Phase.COMBINE)}
            both = zip(values[Phase.DISPATCH], values[Phase.COMBINE], strict=False)
            values[Phase.LAYER_COMM] = [dispatch + combine for dispatch, combine in both]
        return Series(values_us=values, starts_ns=[0], pairs=count)


class InPlace:
    """A layer without its exchange, to be timed as a pair."""

    def __init__(self, layer: LayerBackend) -> None:
        self._layer = layer

    def dispatch(self, set_index: int, /) -> None:
        """Nothing: rows are there."""

    def experts(self, set_index: int, /) -> None:
        """Quantise, and the experts."""
        self._layer.in_place(set_index)

    def combine(self, set_index: int, /) -> None:
        """Nothing."""
