"""The order of calls of an exchange, and what "auto" does between rounds: on CPU tensors, with nothing launched."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch (make torch)")

from epcross.kernels.errors import InvalidArguments, WaitExpired  # noqa: E402
from epcross.kernels.onesided import OneSidedAllToAll, Protocol, exchange  # noqa: E402
from epcross.kernels.onesided.agreement import shape_of  # noqa: E402
from epcross.kernels.onesided.engine import raise_together  # noqa: E402
from epcross.kernels.onesided.inputs import Expected  # noqa: E402
from epcross.kernels.onesided.layout import CALL, FAILURE  # noqa: E402
from epcross.kernels.onesided.plan import Phase  # noqa: E402


class Idle:
    """An engine that notes what it was told to launch and to arm for; settles a change of protocol as the real one."""

    def __init__(self, *_: Any) -> None:
        self.first_rank, self.done = 0, []
        self.call, self.failures = np.zeros((), CALL), np.zeros(1, FAILURE)
        self.views = SimpleNamespace(dispatched=object(), partials=None)
        self.refuses = False

    def use(self, protocol: Protocol, *, unless: Any = str) -> None:
        raise_together([(protocol, unless())])
        self.at = SimpleNamespace(protocol=protocol)
        self.failures[:] = np.zeros((), FAILURE)
        self.done.append(str(protocol))

    def point(self, name: str, tensor: Any) -> None:
        self.call[name] = tensor.data_ptr()

    def launch(self, phase: Phase, tokens: int) -> None:
        if self.refuses:
            raise RuntimeError("the driver refused")
        self.done.append((str(phase), tokens))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> OneSidedAllToAll:
    """For at most 8 tokens, of which Sentinel is taken up to 4; begins with Fence."""
    shape = shape_of(ep_size=1, max_tokens_per_rank=8, top_k=2, hidden=64, dispatch_format="bf16")
    agreed = SimpleNamespace(
        expected=Expected(shape=shape, local_ranks=1, num_slots=8, bf16_rows=True, device=torch.device("cpu")),
        kernels=None,
        layouts=dict.fromkeys(Protocol),
        slot_ranks=(0,) * 8,
        workspace_bytes=0,
        transport=None,
        sentinel_up_to=4,
    )
    monkeypatch.setattr(exchange, "agree", lambda *_: agreed)
    monkeypatch.setattr(exchange, "Engine", Idle)
    return OneSidedAllToAll(None, num_experts=8, top_k=2, hidden=64, max_tokens_per_rank=8)


def engine_of(made: OneSidedAllToAll) -> Idle:
    engine: Any = made._engine
    return engine


def send(made: OneSidedAllToAll, tokens: int, **more: Any) -> None:
    rows = torch.zeros(tokens, 64, dtype=torch.bfloat16)
    made.dispatch(rows, torch.zeros(tokens, 2, dtype=torch.int32), torch.zeros(tokens, 2), group_tokens=tokens, **more)


OUT = torch.zeros(8, 64, dtype=torch.bfloat16)


def test_dispatch_and_combine_take_turns(made: OneSidedAllToAll) -> None:
    """A second dispatch would have the epoch of the first, whose rows are there: they would pass for its own."""
    with pytest.raises(InvalidArguments, match="combine has no dispatch before it: call dispatch first"):
        made.combine(OUT)
    send(made, 8)
    with pytest.raises(InvalidArguments, match="dispatch follows a dispatch: call combine first, or rearm"):
        send(made, 8)
    made.combine(OUT)
    with pytest.raises(InvalidArguments, match="combine has no dispatch before it: call dispatch first"):
        made.combine(OUT)
    send(made, 7)
    made.rearm()
    send(made, 6)
    made.combine(OUT)
    rounds = [("dispatch", 8), ("combine", 8), ("dispatch", 7), "fence", ("dispatch", 6), ("combine", 6)]
    assert engine_of(made).done == ["fence", *rounds]


def test_what_was_refused_is_no_round(made: OneSidedAllToAll) -> None:
    with pytest.raises(InvalidArguments, match="tokens=9 of local rank 0 must be 0 to max_tokens_per_rank=8"):
        send(made, 9)
    engine_of(made).refuses = True
    with pytest.raises(RuntimeError, match="the driver refused"):
        send(made, 8)
    engine_of(made).refuses = False
    with pytest.raises(InvalidArguments, match="combine has no dispatch before it"):
        made.combine(OUT)
    send(made, 8)
    with pytest.raises(InvalidArguments, match="out has room for 7 tokens, and there are 8"):
        made.combine(OUT[:7])
    made.combine(OUT)
    assert engine_of(made).done == ["fence", ("dispatch", 8), ("combine", 8)]


def test_auto_arms_for_the_other_protocol_when_tokens_cross_the_limit(made: OneSidedAllToAll) -> None:
    for tokens in (8, 4, 1, 5):
        send(made, tokens)
        made.combine(OUT)
    changes = [done for done in engine_of(made).done if isinstance(done, str)]
    assert changes == ["fence", "sentinel", "fence"]


def test_a_change_of_protocol_forgets_no_wait_that_expired(made: OneSidedAllToAll) -> None:
    send(made, 8)
    made.combine(OUT)
    engine_of(made).failures[0] = (1, 0, 3, 2, 1)  # as a kernel writes it
    words = r"rank 0 waited 10 s for rank 3 in combine of epoch 1: .* rearm\(\) on every rank"
    with pytest.raises(WaitExpired, match=words):
        send(made, 2)
    with pytest.raises(WaitExpired, match=words):
        made.check()
    assert made.protocol is Protocol.FENCE
    made.rearm()
    made.check()
    send(made, 2)
    assert made.protocol is Protocol.SENTINEL


def test_ranks_raise_together_what_one_of_them_has() -> None:
    raise_together([("fence", ""), ("fence", "")])
    with pytest.raises(WaitExpired, match=r"^rank 1 waited$"):
        raise_together([("fence", ""), ("fence", "rank 1 waited")])
    with pytest.raises(InvalidArguments, match=r"different protocols, \['fence', 'sentinel'\]: give all"):
        raise_together([("fence", ""), ("sentinel", "")])
