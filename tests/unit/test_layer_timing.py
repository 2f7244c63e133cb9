"""Layers on a queue whose time the test decides: what of them is communication, in each regime."""

import pytest
from tests._fake_device import FakeDevice
from tests.contract.threads import Shared, ThreadGroup

from epcross.harness.backends.layer import LayerBackend
from epcross.harness.measuring.layer_timing import LayerTimer
from epcross.harness.terms import BackendKind, GraphSupport, Phase, Regime


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10**9

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, us: float) -> None:
        self.now_ns += round(us * 1000)


class Layer(LayerBackend):
    """Dispatch takes 7 us, 2 of them to quantise; experts 20 and combine 5. Each layer makes the next 1 us slower."""

    name, domains, boundary = "layer", frozenset(), {}  # type: ignore[assignment]

    def __init__(self, clock, kind=BackendKind.LAYER, drift=0.0) -> None:
        super().__init__({})
        self.clock, self.calls, self.drift, self.slower = clock, [], drift, 0.0
        vars(self)["kind"] = kind

    def dispatch(self, set_index):
        self.calls.append("dispatch")
        self.clock.advance(7)

    def experts(self, set_index):
        self.calls.append("experts")
        self.slower += self.drift
        self.clock.advance(20 + self.slower)

    def combine(self, set_index):
        self.calls.append("combine")
        self.clock.advance(5)

    def before(self, set_index):
        self.clock.advance(2)

    def send(self, set_index):
        self.clock.advance(5)

    def parts(self):
        return ((Phase.STAGE, self.before), (Phase.DISPATCH, self.send), *super().parts()[1:])

    def in_place(self, set_index):
        self.calls.append("in place")
        self.slower += self.drift
        self.clock.advance(22 + self.slower)

    def unavailable(self):
        return None

    def unsupported(self, point):
        return None

    def workspace_bytes(self, point):
        return 0

    def arithmetics(self, point):
        return []

    def prepare_ranks(self, point, shards, group): ...

    def refill_ranks(self, set_index, batches): ...

    def outputs_ranks(self, set_index):
        return []

    def describe(self):
        raise NotImplementedError

    def close(self): ...


def parts(**given):
    clock = Clock()
    device = FakeDevice(clock, advance=clock.advance)
    return LayerTimer(device, ThreadGroup(0, Shared(1)), graph=GraphSupport.YES), device, Layer(clock, **given)


def test_communication_is_the_period_less_that_of_the_layer_on_rows_in_place():
    timer, device, layer = parts()
    series = timer.series(Regime.STEADY, layer, pairs=10, iterations=0, sets=2)
    assert series.values_us == {Phase.LAYER: [pytest.approx(32)], Phase.LAYER_COMM: [pytest.approx(10)]}
    assert series.pairs == 10
    assert device.captured == 2  # the layer, and the layer in place
    assert layer.calls[:3] == ["dispatch", "experts", "combine"]
    assert layer.calls[-1] == "combine"  # what is checked is what the layer left
    assert layer.calls.count("in place") == 40  # two chains and their fills


def test_a_drift_does_not_pass_for_communication():
    timer, _, layer = parts(drift=0.01)
    (communication,) = timer.series(Regime.STEADY, layer, pairs=10, iterations=0, sets=2).values_us[Phase.LAYER_COMM]
    assert communication == pytest.approx(10, abs=0.01)  # one after the other it would be 0.2 less


def test_a_long_chain_is_replays_of_a_graph_of_layers():
    timer, _, layer = parts()
    timer.expect(100.0)  # ten in a graph
    assert timer.series(Regime.STEADY, layer, pairs=25, iterations=0, sets=2).pairs == 30


def test_entry_times_the_layer_alone():
    timer, device, layer = parts()
    series = timer.series(Regime.ENTRY, layer, pairs=0, iterations=4, sets=2)
    assert series.values_us == {Phase.LAYER: [pytest.approx(32)] * 4}
    assert "in place" not in layer.calls
    assert (series.graph_pairs, len(device.graphs)) == (4, 1)


def test_entry_of_a_layer_takes_graphs_of_one_where_long_ones_are_slower():
    timer, device, layer = parts()
    fast = layer.combine
    layer.combine = lambda s: (fast(s), layer.clock.advance(3 * (device.starts - 1)))  # type: ignore[method-assign]
    series = timer.series(Regime.ENTRY, layer, pairs=0, iterations=20, sets=2)
    assert series.graph_pairs == 1
    assert series.values_us == {Phase.LAYER: [pytest.approx(32)] * 20}


def test_spans_of_dispatch_and_combine_are_communication():
    timer, _, layer = parts()
    values = timer.series(Regime.SPANS, layer, pairs=4, iterations=0, sets=2).values_us
    assert {phase: set(map(round, each)) for phase, each in values.items()} == {
        Phase.DISPATCH: {5},  # without what is done before it
        Phase.COMBINE: {5},
        Phase.LAYER: {32},
        Phase.LAYER_COMM: {10},
    }


@pytest.mark.parametrize(("kind", "phase"), [(BackendKind.FUSED, Phase.LAYER), (BackendKind.EXPERTS, Phase.EXPERTS)])
@pytest.mark.parametrize("regime", list(Regime))
def test_what_cannot_be_taken_apart_has_one_phase(kind, phase, regime):
    timer, _, layer = parts(kind=kind)
    series = timer.series(regime, layer, pairs=4, iterations=4, sets=2)
    assert set(series.values_us) == {phase}
    assert series.values_us[phase][0] == pytest.approx(32)
