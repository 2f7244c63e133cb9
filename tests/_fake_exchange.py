"""`OneSidedAllToAll` for all ranks of one process, in torch on the CPU: what its callers may rely on, and no more."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epcross.harness.backends import onesided
from epcross.kernels.formats import row_size
from epcross.kernels.onesided.layout import Protocol


class FakeExchange:
    """Lands in two sets by turns, as Sentinel does; places that nothing came to hold garbage."""

    def __init__(self, group: Any, **given: Any) -> None:
        assert group is None, "this one has no peers"
        self.given = given
        self.device = torch.device("cpu")
        self.ranks, capacity, top_k = given["local_ranks"], given["max_tokens_per_rank"], given["top_k"]
        size = row_size(given["dispatch_format"], given["hidden"])
        places = (2, self.ranks, self.ranks, capacity)
        self.rows = torch.randint(0, 256, (*places, size.padded_row_bytes), dtype=torch.uint8)
        self.scales = torch.randint(0, 256, (*places, size.padded_scale_bytes), dtype=torch.uint8)
        self.ids = torch.randint(-9, 0, (*places, top_k), dtype=torch.int32)
        self.weights = torch.full((*places, top_k), float("nan"))
        self.present = torch.zeros(places[1:], dtype=torch.bool)
        self.partials = torch.full((*places[1:], given["hidden"]), float("nan"), dtype=torch.bfloat16)
        self.slot_rank = torch.tensor([*given["placement"], -1])
        self.protocol = Protocol.FENCE if given["protocol"] == "auto" else Protocol(given["protocol"])
        self.epoch, self.closed, self.checked = 1, False, 0

    def _seen(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[0] if self.ranks == 1 else tensor

    def dispatch(self, rows, ids, weights, scales, *, tokens, group_tokens) -> Any:
        if self.ranks == 1:
            rows, ids, weights = rows[None], ids[None], weights[None]
            scales = None if scales is None else scales[None]
        assert group_tokens >= max(tokens)
        self.epoch, self.tokens = self.epoch + 1, list(tokens)
        at = self.epoch % 2
        self.present.zero_()
        for source, count in enumerate(tokens):
            reached = self.slot_rank[ids[source, :count].long()]
            for rank in range(self.ranks):
                token = (reached == rank).any(dim=1).nonzero()[:, 0]
                self.present[rank, source, token] = True
                self.rows[at, rank, source, token] = rows[source, token]
                self.ids[at, rank, source, token] = ids[source, token]
                self.weights[at, rank, source, token] = weights[source, token]
                if scales is not None:
                    self.scales[at, rank, source, token] = scales[source, token]
        sets = tuple(
            SimpleNamespace(
                **{name: self._seen(getattr(self, name)[n]) for name in ("rows", "scales", "ids", "weights")}
            )
            for n in range(2)
        )
        return SimpleNamespace(
            sets=sets,
            set_index=torch.full((self.ranks,), at, dtype=torch.int32),
            landing=lambda: sets[at],
            arrived=lambda: self._seen(self.present),
        )

    def combine_buffer(self) -> torch.Tensor:
        return self._seen(self.partials)

    def combine(self, out: torch.Tensor) -> None:
        out = out[None] if self.ranks == 1 else out
        for source, count in enumerate(self.tokens):
            total = torch.zeros((count, out.shape[-1]))
            for rank in range(self.ranks):
                here = self.present[rank, source, :count, None]
                total = torch.where(here, total + self.partials[rank, source, :count].float(), total)
            out[source, :count] = total.to(torch.bfloat16)

    def check(self) -> None:
        self.checked += 1

    def close(self) -> None:
        self.closed = True

    def describe(self) -> dict[str, Any]:
        step = {"blocks": 7, "threads": 256}
        return {
            "protocol": "sentinel",
            "transport": "local",
            "architecture": "none",
            "sources": "0123456789abcdef",
            "workspace_bytes": 4096,
            "kernels": {"dispatch": {"name": "fake_dispatch", **step}, "combine": {"name": "fake_combine", **step}},
        }


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[FakeExchange]:
    """Has the adapters of the one-sided exchange take this one; those that they made come to lie in the list."""
    made: list[FakeExchange] = []

    def make(*given: Any, **named: Any) -> FakeExchange:
        made.append(FakeExchange(*given, **named))
        return made[-1]

    monkeypatch.setattr(onesided, "OneSidedAllToAll", make)
    monkeypatch.setattr(onesided.OneSided, "_wait", lambda self: self._opened().check())
    monkeypatch.setattr(onesided.OneSided, "_sm_count", lambda self: 4)
    return made
