"""The example layer without a GPU: over an exchange in torch that fills workspaces as the kernels do."""

from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch (make torch)")

from epcross.kernels.onesided import Dispatched, OneSidedAllToAll  # noqa: E402
from epcross.kernels.onesided.agreement import shape_of  # noqa: E402
from epcross.kernels.onesided.example import MoELayer, route, run_experts  # noqa: E402
from epcross.kernels.onesided.layout import Protocol, layout  # noqa: E402
from epcross.kernels.onesided.views import Views  # noqa: E402

HIDDEN, INTERMEDIATE, TOP_K = 32, 16, 3


class Workspaces:
    """Dispatch and combine between the ranks of this process, token by token, through real workspaces."""

    rank = 0

    def __init__(self, protocol: Protocol, ranks: int, experts: int) -> None:
        self.local_ranks, self.experts = ranks, experts
        shape = shape_of(ep_size=ranks, max_tokens_per_rank=8, top_k=TOP_K, hidden=HIDDEN, dispatch_format="bf16")
        self.at = layout(protocol, shape)
        size = -(-self.at.total_bytes // 128) * 128
        self.views = Views(torch.zeros(ranks, size, dtype=torch.uint8), self.at)
        self.views.arm(1)

    def several(self, tensor: Any) -> Any:
        """With the dimension of local ranks, which is left out where there is one."""
        return tensor if self.local_ranks > 1 else tensor[None]

    def dispatch(self, rows: Any, ids: Any, weights: Any) -> Dispatched:
        rows, ids, weights = (self.several(tensor) for tensor in (rows, ids, weights))
        epoch = int(self.views.dispatch_epoch[0])
        self.views.dispatched.epoch.fill_(epoch)
        landing = self.views.dispatched.sets[epoch % self.at.sets]
        self.sent = torch.zeros(self.local_ranks, len(rows[0]), self.local_ranks, dtype=torch.bool)
        for source in range(self.local_ranks):
            for token in range(len(rows[source])):
                for to in range(self.local_ranks):
                    goes = bool((ids[source, token] * self.local_ranks // self.experts == to).any())
                    self.sent[source, token, to] = goes
                    header = epoch << 21 | len(rows[source]) << 1 | goes
                    self.several(landing.headers)[to, token, source] = header
                    if goes:
                        row = rows[source, token].view(torch.uint8)
                        self.several(landing.rows)[to, source, token] = row
                        self.several(landing.ids)[to, source, token] = ids[source, token]
                        self.several(landing.weights)[to, source, token] = weights[source, token]
        return self.views.dispatched

    def combine_buffer(self) -> Any:
        return self.views.partials

    def combine(self, out: Any) -> None:
        out = self.several(out)
        for source, token in np.ndindex(*self.sent.shape[:2]):
            total = torch.zeros(HIDDEN)
            for to in self.sent[source, token].nonzero().flatten().tolist():
                total += self.several(self.views.partials)[to, source, token].float()
            out[source, token] = total.to(torch.bfloat16)
        self.views.dispatch_epoch += 1


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("protocol", Protocol)
def test_the_layer_agrees_with_all_experts_in_one_place(protocol: Protocol, ranks: int) -> None:
    experts, generator = 8, torch.Generator().manual_seed(2)

    def normal(*shape: int, scale: float = 1.0) -> Any:
        return (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16)

    gate_up = normal(ranks, experts // ranks, 2 * INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5)
    down = normal(ranks, experts // ranks, HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5)
    layer = MoELayer(cast("OneSidedAllToAll", Workspaces(protocol, ranks, experts)), gate_up, down)
    for tokens in (5, 1, 8):
        x, logits = normal(ranks, tokens, HIDDEN), normal(ranks, tokens, experts)
        out = layer.forward(x, logits, TOP_K).view(-1, HIDDEN).float()
        ids, weights = route(logits.view(-1, experts), TOP_K)
        every = run_experts(x.view(-1, HIDDEN), ids, weights, gate_up.flatten(0, 1), down.flatten(0, 1), 0).float()
        # each partial is rounded to bf16, and the sum once more
        assert float(((out - every).norm(dim=-1) / every.norm(dim=-1)).max()) < 2**-7


def test_experts_are_what_the_formula_says() -> None:
    """silu(x W_gate) * (x W_up) W_down, weighted; by hand, in fp64, on numbers that bf16 holds."""
    rows = torch.tensor([[1.0, 2.0], [-1.0, 0.5]], dtype=torch.bfloat16)
    gate_up = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.5, 0.5], [2.0, 0.0]]], dtype=torch.bfloat16)
    down = torch.tensor([[[1.0], [2.0]], [[-1.0], [4.0]]], dtype=torch.bfloat16)
    ids = torch.tensor([[4, 5], [5, -1]], dtype=torch.int32)
    weights = torch.tensor([[0.25, 0.75], [1.0, 9.0]])
    out = run_experts(rows, ids, weights, gate_up, down, first_slot=4).double()

    def silu(x: float) -> float:
        return x / (1 + np.exp(-x))

    first = 0.25 * silu(1) * 2 * np.array([1, 2]) + 0.75 * silu(1.5) * 2 * np.array([-1, 4])
    second = silu(-0.25) * -2 * np.array([-1, 4])
    assert np.allclose(out.numpy(), [first, second], rtol=2**-6)


def test_routing_takes_the_best_and_their_softmax() -> None:
    ids, weights = route(torch.tensor([[0.0, 3.0, 1.0, 2.0]]), 2)
    assert ids.tolist() == [[1, 3]]
    assert ids.dtype is torch.int32
    assert np.allclose(weights.numpy(), [[1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))]])
