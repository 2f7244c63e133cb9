"""A mixture-of-experts layer on the one-sided exchange: an example to start from, short rather than fast.

Each rank holds as many SwiGLU experts in bf16. A real layer would replace `run_experts` by grouped GEMMs that read the
landed rows in place, choose the landing set on the device and so run in a graph; what surrounds it stays.

    exchange = OneSidedAllToAll(group, num_experts=64, top_k=4, hidden=1024, max_tokens_per_rank=64, protocol="fence")
    layer = MoELayer(exchange, gate_up, down)
    y = layer.forward(x, router_logits, top_k=4)
    exchange.check()
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from epcross.kernels.onesided.exchange import OneSidedAllToAll


def route(logits: "torch.Tensor", top_k: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """The `top_k` experts of each token and their softmax weights, which add to 1.

    Args:
        logits: [tokens, experts].
        top_k: experts of a token.

    Returns:
        ids int32 [tokens, top_k] and weights fp32 [tokens, top_k].
    """
    import torch

    best, ids = logits.float().topk(top_k, dim=-1)
    return ids.to(torch.int32), best.softmax(dim=-1)


def run_experts(
    rows: "torch.Tensor",
    ids: "torch.Tensor",
    weights: "torch.Tensor",
    gate_up: "torch.Tensor",
    down: "torch.Tensor",
    first_slot: int,
) -> "torch.Tensor":
    """What the experts of one rank make of rows: their outputs, weighted and added in fp32, rounded once.

    Args:
        rows: bf16 [rows, hidden].
        ids: int32 [rows, top_k]; slots of other ranks, and -1, count for nothing.
        weights: fp32 [rows, top_k].
        gate_up: bf16 [experts of the rank, 2 * intermediate, hidden].
        down: bf16 [experts of the rank, hidden, intermediate].
        first_slot: slot of the rank's first expert.

    Returns:
        bf16 [rows, hidden].
    """
    import torch
    from torch.nn.functional import silu

    total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    for expert in range(len(gate_up)):
        row, selection = (ids == first_slot + expert).nonzero(as_tuple=True)
        gate, up = (rows[row] @ gate_up[expert].T).chunk(2, dim=-1)
        output = (silu(gate) * up) @ down[expert].T
        total.index_add_(0, row, output.float() * weights[row, selection, None])
    return total.to(torch.bfloat16)


class MoELayer:
    """The layer on the ranks of one process; `forward` is collective."""

    def __init__(self, exchange: "OneSidedAllToAll", gate_up: "torch.Tensor", down: "torch.Tensor") -> None:
        """Take an exchange for bf16 rows whose experts are spread in order, and the weights of this process's ranks.

        Args:
            exchange: made with `hidden` and the number of experts of all ranks.
            gate_up: bf16 [local ranks, experts of a rank, 2 * intermediate, hidden].
            down: bf16 [local ranks, experts of a rank, hidden, intermediate].
        """
        self._exchange, self._gate_up, self._down = exchange, gate_up, down

    def forward(self, x: "torch.Tensor", logits: "torch.Tensor", top_k: int) -> "torch.Tensor":
        """The layer's output for the tokens of this process's ranks.

        Args:
            x: bf16 [local ranks, tokens, hidden].
            logits: [local ranks, tokens, experts].
            top_k: experts of a token.

        Returns:
            bf16 [local ranks, tokens, hidden].
        """
        import torch

        exchange, several = self._exchange, len(x) > 1
        ids, weights = route(logits, top_k)
        out = torch.empty_like(x)
        # without local ranks to tell apart, the exchange leaves their dimension out
        dispatched = exchange.dispatch(*(t if several else t[0] for t in (x, ids, weights)))
        landing, partials, arrived = dispatched.landing(), exchange.combine_buffer(), dispatched.arrived()
        for local, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            here = (arrived[local] if several else arrived).nonzero(as_tuple=True)  # (source, token) of every row
            rows, slots, factors = (
                (t[local] if several else t)[here] for t in (landing.rows, landing.ids, landing.weights)
            )
            first_slot = (exchange.rank + local) * len(gate_up)
            done = run_experts(rows.view(torch.bfloat16), slots, factors, gate_up, down, first_slot)
            (partials[local] if several else partials)[here] = done
        exchange.combine(out if several else out[0])
        return out
