"""The one-sided exchange over time: graphs replayed, epochs that wrap, a protocol that changes, peers that fail."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch", reason="needs torch for CUDA and a GPU")

from epcross.kernels.errors import InvalidArguments, WaitExpired  # noqa: E402
from epcross.kernels.formats import RowFormat  # noqa: E402
from epcross.kernels.onesided import Dispatched, OneSidedAllToAll  # noqa: E402
from epcross.kernels.onesided.crossover import Crossovers, NoCrossover, Setting, machine_name  # noqa: E402
from epcross.kernels.onesided.plan import Phase  # noqa: E402

from tests.gpu._rounds import FORMS, Case, Inputs, Tensor, make_inputs, play, same_sums  # noqa: E402  # isort: skip

pytestmark = pytest.mark.gpu(1)

PROTOCOLS = FORMS
REPLAYS = 10_000
POOL = 16


@contextmanager
def opened(exchange: OneSidedAllToAll) -> Iterator[OneSidedAllToAll]:
    try:
        yield exchange
    finally:
        exchange.close()


def bounce(exchange: OneSidedAllToAll, dispatched: Dispatched) -> None:
    """Experts that answer with the row they got; in a graph, so the landing set is chosen on the device."""
    sets = [landing.rows.view(torch.bfloat16) for landing in dispatched.sets]
    rows = sets[0]
    if len(sets) == 2:
        rows = torch.where(dispatched.set_index.view(-1, 1, 1, 1) == 0, sets[0], sets[1])
    exchange.combine_buffer().copy_(rows)


class Replayed:
    """A graph of whole rounds over inputs that are changed in place, and what it must give."""

    def __init__(self, case: Case, exchange: OneSidedAllToAll, tokens: int, rounds: int, seed: int) -> None:
        self.pool = [self.bf16(case, make_inputs(case, [tokens] * case.ep_size, seed + i)) for i in range(POOL)]
        self.rows, self.ids, self.weights = (tensor.clone() for tensor in self.pool[0][:3])
        self.out = [torch.empty_like(self.rows) for _ in range(rounds)]
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            for out in self.out:
                dispatched = exchange.dispatch(self.rows, self.ids, self.weights, group_tokens=tokens)
                bounce(exchange, dispatched)
                exchange.combine(out)

    @staticmethod
    def bf16(case: Case, inputs: Inputs) -> tuple[Tensor, ...]:
        rows = inputs.partials[0, :, : inputs.rows.shape[1]]
        inputs.partials[:] = rows
        return rows, inputs.ids, inputs.weights, inputs.combined(case.linear())

    def replay(self, index: int, wrong: Tensor) -> None:
        """Change the inputs, replay, and count on the device what differs."""
        rows, ids, weights, expected = self.pool[index % POOL]
        self.rows.copy_(rows)
        self.ids.copy_(ids)
        self.weights.copy_(weights)
        self.graph.replay()
        for out in self.out:
            wrong += (out != expected).sum()


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_ten_thousand_replays_with_inputs_changed_in_place(protocol: str, rounds: int) -> None:
    """One and three rounds a graph: an odd number, so that the landing sets of a node change from replay to replay."""
    case = Case(ep_size=4, capacity=8, hidden=512, num_slots=32, top_k=4, protocol=protocol)
    with opened(case.exchange()) as exchange:
        replayed, wrong = Replayed(case, exchange, 8, rounds, 1), torch.zeros((), dtype=torch.int64, device="cuda")
        for index in range(REPLAYS // rounds):
            replayed.replay(index, wrong)
        torch.cuda.synchronize()
        exchange.check()
        assert int(wrong) == 0
        assert exchange.dispatch_epoch.tolist() == [1 + REPLAYS // rounds * rounds] * 4


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_graphs_of_one_and_eight_tokens_alternate_on_one_workspace(protocol: str) -> None:
    case = Case(ep_size=8, capacity=8, hidden=512, num_slots=32, top_k=4, protocol=protocol)
    with opened(case.exchange()) as exchange:
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        graphs = [
            Replayed(case, exchange, tokens, rounds, tokens) for tokens, rounds in ((1, 1), (8, 1), (1, 2), (8, 3))
        ]
        order = random.Random(3)
        for index in range(2000):
            order.choice(graphs).replay(index, wrong)
        torch.cuda.synchronize()
        exchange.check()
        assert int(wrong) == 0
        play(exchange, make_inputs(case, [8, 0, 1, 8, 3, 0, 0, 2], 9), case.linear())


def test_a_graph_must_choose_the_landing_set_on_the_device() -> None:
    case = Case(ep_size=2, capacity=2, hidden=64, num_slots=4, top_k=1)
    with opened(case.exchange()) as exchange:
        inputs, graph = make_inputs(case, [2, 2], 1), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dispatched = exchange.dispatch(inputs.rows, inputs.ids, inputs.weights)
            with pytest.raises(InvalidArguments, match="known to the device only"):
                _ = dispatched.rows
            with pytest.raises(InvalidArguments, match="cannot be armed while a graph is captured"):
                exchange.rearm()


@pytest.mark.parametrize("bits", [43, 52, 64])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_epoch_wraps(protocol: str, bits: int) -> None:
    """In headers, in flags, and as a whole."""
    case = Case(ep_size=4, capacity=6, hidden=256, num_slots=16, top_k=4, protocol=protocol)
    with opened(case.exchange()) as exchange:
        exchange.dispatch_epoch.fill_((1 << bits) - 3 if bits < 64 else -3)
        for seed in range(8):
            play(exchange, make_inputs(case, [6, 0, 2, 6], seed), case.linear())
        assert exchange.dispatch_epoch.tolist() == [(1 << bits) + 5 if bits < 64 else 5] * 4


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_rounds_in_which_nobody_has_a_token(protocol: str) -> None:
    case = Case(ep_size=4, capacity=6, hidden=256, num_slots=16, top_k=4, protocol=protocol)
    with opened(case.exchange()) as exchange:
        for seed, tokens in enumerate((0, 0, 0, 6, 0, 6, 0, 0, 1, 6)):
            play(exchange, make_inputs(case, [tokens] * 4, seed), case.linear())


def leave_out_the_last_rank(exchange: OneSidedAllToAll) -> Callable[[], None]:
    """Launch for all local ranks but the last, which so never arrives. Returns how to bring it back."""
    engine, ranks = exchange._engine, exchange.local_ranks
    launch = engine.launch

    def fewer(phase: Phase, tokens: int) -> None:
        chosen = engine.step(phase, tokens)
        engine.call["chunk_blocks"] = chosen.chunk_blocks
        grid = (chosen.chunk_blocks * (ranks - 1), *chosen.grid[1:])
        engine._launchers[chosen.kernel](grid, torch.cuda.current_stream().cuda_stream)

    def back() -> None:
        engine.launch = launch

    engine._exchange["local_ranks"] = ranks - 1
    engine.launch = fewer
    return back


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("ep_size", [2, 4, 12])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_peer_that_never_arrives_is_named_and_does_not_hang_the_rest(protocol: str, ep_size: int, phase: str) -> None:
    case = Case(
        ep_size=ep_size, capacity=4, hidden=256, num_slots=4 * ep_size, top_k=2 * ep_size - 1, protocol=protocol
    )
    case = case if ep_size < 12 else Case(ep_size=12, capacity=4, hidden=256, num_slots=24, top_k=16, protocol=protocol)
    with opened(case.exchange(timeout_s=0.25)) as exchange:
        inputs = make_inputs(case, [4] * ep_size, 1)
        play(exchange, inputs, case.linear())
        out = torch.empty_like(inputs.partials[0])
        if phase == "combine":
            exchange.dispatch(inputs.rows, inputs.ids, inputs.weights)
            torch.cuda.synchronize()
        back, started = leave_out_the_last_rank(exchange), time.monotonic()
        if phase == "dispatch":
            exchange.dispatch(inputs.rows, inputs.ids, inputs.weights)
        exchange.combine(out)
        torch.cuda.synchronize()
        assert 0.2 < time.monotonic() - started < 5
        message = rf"rank \d+ waited 0\.25 s for rank {ep_size - 1} in {phase} of epoch 2: .*rearm"
        with pytest.raises(WaitExpired, match=message):
            exchange.check()
        started = time.monotonic()
        for _ in range(5):
            exchange.dispatch(inputs.rows, inputs.ids, inputs.weights)
            exchange.combine(out)
        torch.cuda.synchronize()
        assert time.monotonic() - started < 0.2, "kernels after the first that failed return at once"
        with pytest.raises(WaitExpired, match=message):
            exchange.check()
        back()
        exchange.rearm()
        exchange.check()
        for seed in range(3):
            play(exchange, make_inputs(case, [4] * ep_size, seed), case.linear())


def test_auto_follows_the_stored_crossover() -> None:
    case = Case(ep_size=4, capacity=64, hidden=512, protocol="auto")
    machine = machine_name(torch.cuda.get_device_name(), "local", 4)
    setting = Setting(machine=machine, ep_size=4, hidden=512, dispatch_format=RowFormat.BF16)
    with pytest.raises(NoCrossover, match=r"no file was given as crossover=.*choose protocol='fence' or 'sentinel'"):
        case.exchange()
    other = Setting(machine=machine, ep_size=2, hidden=512, dispatch_format=RowFormat.BF16)
    with pytest.raises(NoCrossover, match="ep_size=4 hidden=512 dispatch_format=bf16: measure both protocols"):
        case.exchange(crossover=Crossovers({other: (8, "a test")}))
    with opened(case.exchange(crossover=Crossovers({setting: (8, "a test")}))) as exchange:
        for seed, (tokens, protocol) in enumerate(
            [(1, "sentinel"), (8, "sentinel"), (9, "fence"), (64, "fence"), (2, "sentinel"), (33, "fence")]
        ):
            play(exchange, make_inputs(case, [tokens, 0, tokens, 1], seed), case.linear())
            assert exchange.protocol == protocol
        inputs, graph = make_inputs(case, [1] * 4, 1), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inputs.rows.clone()  # torch warns of an empty graph
            with pytest.raises(InvalidArguments, match="cannot be armed while a graph"):
                exchange.dispatch(inputs.rows, inputs.ids, inputs.weights, group_tokens=1)


def test_the_example_layer_agrees_with_all_experts_in_one_place() -> None:
    from epcross.kernels.onesided.example import MoELayer, route, run_experts

    ranks, experts, hidden, tokens, top_k = 4, 16, 256, 24, 4
    case = Case(ep_size=ranks, capacity=32, hidden=hidden, num_slots=experts, top_k=top_k)
    generator = torch.Generator("cuda").manual_seed(4)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device="cuda") * scale).to(torch.bfloat16)

    gate_up = normal(ranks, experts // ranks, 2 * 128, hidden, scale=hidden**-0.5)
    down = normal(ranks, experts // ranks, hidden, 128, scale=128**-0.5)
    with opened(case.exchange()) as exchange:
        layer = MoELayer(exchange, gate_up, down)
        for _ in range(3):
            x, logits = normal(ranks, tokens, hidden), normal(ranks, tokens, experts)
            ids, weights = route(logits, top_k)
            flat = run_experts(
                x.view(-1, hidden),
                ids.view(-1, top_k),
                weights.view(-1, top_k),
                gate_up.flatten(0, 1),
                down.flatten(0, 1),
                0,
            )
            out = layer.forward(x, logits, top_k).view(-1, hidden)
            exchange.check()
            # partials are rounded to bf16 once more: half a unit of the largest of up to four terms, and of the sum
            error = (out.float() - flat.float()).norm(dim=-1) / flat.float().norm(dim=-1)
            assert float(error.max()) < 2**-7
            assert not same_sums(out, torch.zeros_like(out))
