"""A pair whose time is known, on a clock that tests move."""

from tests._fake_device import FakeDevice
from tests.contract.threads import Shared, ThreadGroup

from epcross.harness.measuring.cuda_timing import CudaTimer
from epcross.harness.terms import GraphSupport


class Clock:
    """Nanoseconds that pass only when told to."""

    def __init__(self, start_ns: int = 10**9) -> None:
        self.now_ns = start_ns

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, us: float) -> None:
        self.now_ns += round(us * 1000)


class Pair:
    """Takes 3 us for dispatch, 1 for experts, 5 for combine."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.calls = clock, []

    def dispatch(self, set_index: int) -> None:
        self.calls.append(set_index)
        self.clock.advance(3)

    def experts(self, set_index: int) -> None:
        self.clock.advance(1)

    def combine(self, set_index: int) -> None:
        self.clock.advance(5)


def parts(*, graph=GraphSupport.YES, clock=None, **costs):
    clock = clock or Clock()
    device = FakeDevice(clock, advance=clock.advance, **costs)
    return CudaTimer(device, ThreadGroup(0, Shared(1)), graph=graph), device, Pair(clock)
