"""`Device` by torch and the instrument kernels: streams, graphs, events, stamps, the common start, the profiler."""

import contextlib
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epcross.harness.backends.base import Group
from epcross.harness.backends.replays import Calls, capturing
from epcross.harness.errors import EpcrossError, WaitExpired
from epcross.harness.measuring.device import ClockOffset, KernelSpan, Replay
from epcross.harness.measuring.spans import kernel_spans
from epcross.kernels.instruments.native import MAX_PROCESSES, Instruments
from epcross.kernels.onesided.jit import architecture

MAX_STAMPS = 1 << 16
START_MARGIN_NS = 3_000
"""From rank 0's decision to the common start: longer than a word takes to any peer."""

OFFSET_ROUNDS = 200
STEP_READINGS = 20_000
_PING = MAX_PROCESSES + 1  # word of a pad, after those of `line_up`
_PAD_BYTES = 8 * (_PING + 1)
_WORDS = 64  # private words of the device: state, expired, results

_last: "list[CudaDevice]" = []  # at most one: a worker has one process group, and a device holds memory


def open_device(group: Group, limit_s: float) -> "CudaDevice":
    """The current GPU, prepared once for all units of a process group. Collective.

    Raises:
        EpcrossError: its kernels cannot be built or loaded, or the processes cannot map each other's memory.
    """
    if not _last or _last[0].group is not group:
        _last.clear()
        _last.append(CudaDevice(group, limit_s))
    return _last[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Symmetric:
    """Memory of this process that all processes of the group have mapped, as long as this is kept."""

    memory: Any  # uint8
    addresses: list[int]  # of every process's, as mapped here
    handle: Any  # torch's, which owns the mappings


class CudaDevice:
    """See `Device`."""

    def __init__(self, group: Group, limit_s: float) -> None:
        import torch

        if group.size > MAX_PROCESSES:
            raise EpcrossError(f"EP {group.size} is more than the {MAX_PROCESSES} processes that can start together")
        self._torch: Any = torch
        self.group = group
        self._limit_ns = int(limit_s * 1e9)
        self.index = torch.cuda.current_device()
        properties: Any = torch.cuda.get_device_properties(self.index)
        self.sm_count = int(properties.multi_processor_count)
        self.cache_bytes = int(properties.L2_cache_size)
        torch.cuda.synchronize()  # the context must be there before a module is loaded into it
        self.kernels = Instruments(architecture(properties.major, properties.minor))
        self._capture_stream: Any = torch.cuda.Stream()
        self.words: Any = torch.zeros(_WORDS, dtype=torch.int64, device="cuda")
        self._stamps: Any = torch.zeros(MAX_STAMPS, dtype=torch.int64, device="cuda")
        self._flush: Any = torch.empty(2 * self.cache_bytes, dtype=torch.uint8, device="cuda")
        self.pads = Symmetric(memory=None, addresses=[0], handle=None)
        self._table: Any = torch.zeros(1, dtype=torch.int64, device="cuda")
        self._uuids = [b""]
        self._step_ns = self.timer_step_ns()
        if group.size > 1:
            self.pads = self.symmetric(_PAD_BYTES)
            self._table = torch.tensor(self.pads.addresses, dtype=torch.int64, device="cuda")
            self._uuids = group.all_gather(str(properties.uuid).encode())
            self.measure_offset()

    def measure_offset(self) -> ClockOffset:
        """See `Device`. Process 0 exchanges clocks with each of the others in turn; GPUs that are the same have one
        clock."""
        if self.group.size == 1:
            return ClockOffset()
        group, mine = self.group, ClockOffset(error_ns=self._step_ns)
        for peer in range(1, group.size):
            if self._uuids[peer] == self._uuids[0]:
                continue
            takes_part = group.rank in (0, peer)
            if takes_part:
                self.pads.memory[8 * _PING :].zero_()
                self._torch.cuda.synchronize()
            group.barrier()
            measured = self._ping(peer) if takes_part else b""
            told = group.all_gather(measured)[0]
            if group.rank == peer:
                offset_ns, error_ns = json.loads(told)
                mine = ClockOffset(offset_ns=offset_ns, error_ns=error_ns + self._step_ns)
        self.words[_OFFSET] = mine.offset_ns
        self._torch.cuda.synchronize()
        return mine

    def _ping(self, peer: int) -> bytes:
        """This process's part; on process 0 offset and error as JSON."""
        own, first = self.group.rank, self.group.rank == 0
        mine, theirs = (self.pads.addresses[rank] + 8 * _PING for rank in (own, peer if first else 0))
        words = (self.word(_EXPIRED), self.word(_RESULT))
        self._enqueue("ping_clock", mine, theirs, int(first), OFFSET_ROUNDS, self._limit_ns, *words)
        self.synchronize()
        return json.dumps(self.words[_RESULT : _RESULT + 2].tolist()).encode() if first else b""

    def capture(self, enqueue: Callable[[], None]) -> Replay:
        """See `Device`."""
        torch = self._torch
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads of the process do meanwhile (a profiler, NCCL's watchdog) spoils nothing
        with (
            without_collection(),
            capturing() as calls,
            torch.cuda.graph(graph, stream=self._capture_stream, capture_error_mode="thread_local"),
        ):
            enqueue()
        return _Captured(graph, calls)

    def host_us(self, enqueue: Callable[[], None]) -> float:
        """See `Device`."""
        begin = time.perf_counter()
        enqueue()
        return (time.perf_counter() - begin) * 1e6

    def mark(self) -> Any:
        """See `Device`."""
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_us(self, first: Any, last: Any) -> float:
        """See `Device`."""
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3

    def synchronize(self) -> None:
        """See `Device`."""
        self._torch.cuda.synchronize()
        if self.group.size > 1 and int(self.words[_EXPIRED]):
            raise WaitExpired(
                f"rank {self.group.rank} waited {self._limit_ns / 1e9:g} s on its GPU for the common start: a rank is "
                "stuck, stopped or gone"
            )

    def line_up(self, slot: int) -> None:
        """See `Device`."""
        self._enqueue(
            "line_up",
            self._table.data_ptr(),
            self.group.rank,
            self.group.size,
            self.word(_OFFSET),
            START_MARGIN_NS,
            self._limit_ns,
            self.word(_STATE),
            self.word(_EXPIRED),
            self._slot(slot),
        )

    def stamp(self, slot: int) -> None:
        """See `Device`."""
        self._enqueue("stamp", self._slot(slot))

    def stamps_ns(self, count: int) -> Sequence[int]:
        """See `Device`."""
        self.synchronize()
        return self._stamps[:count].tolist()

    def flush_cache(self) -> None:
        """See `Device`."""
        self._flush.zero_()

    def hold(self, duration_us: float) -> None:
        """See `Device`."""
        self._enqueue("hold", int(duration_us * 1e3))

    def empty(self) -> None:
        """See `Device`."""
        self._enqueue("empty")

    def kernel_spans(self, run: Callable[[], None]) -> Sequence[KernelSpan]:
        """See `Device`."""
        profiler = self._torch.profiler
        kinds = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]
        with profiler.profile(activities=kinds, acc_events=True) as profile:
            run()
        with tempfile.TemporaryDirectory(prefix="epcross-trace-") as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            return kernel_spans(json.loads(path.read_text())["traceEvents"])

    def range(self, name: str) -> AbstractContextManager[None]:
        """See `Device`."""
        return _Range(self._torch, name)

    def symmetric(self, size_bytes: int) -> Symmetric:
        """Zeroed memory that all processes map. Collective."""
        import torch.distributed._symmetric_memory as symmetric_memory

        symmetric: Any = symmetric_memory
        memory = symmetric.empty(size_bytes, dtype=self._torch.uint8, device=f"cuda:{self.index}")
        handle = symmetric.rendezvous(memory, self.group.torch("gloo"))
        memory.zero_()
        self._torch.cuda.synchronize()
        self.group.barrier()
        return Symmetric(memory=memory, addresses=[int(address) for address in handle.buffer_ptrs], handle=handle)

    def clear_pads(self) -> None:
        """Zero this process's pad. For when no process waits on it."""
        self.pads.memory.zero_()
        self._torch.cuda.synchronize()

    def word(self, number: int) -> int:
        """Address of a private word; they are zero unless a kernel wrote them."""
        return self.words.data_ptr() + 8 * number

    def timer_step_ns(self) -> int:
        """The smallest step of the GPU's timer that is seen."""
        self._enqueue("timer_step", STEP_READINGS, self.word(_RESULT))
        self._torch.cuda.synchronize()
        return int(self.words[_RESULT])

    def _slot(self, slot: int) -> int:
        if not 0 <= slot < MAX_STAMPS:
            raise EpcrossError(f"a series needs stamp {slot} and there are {MAX_STAMPS}: lower timing.iterations")
        return self._stamps.data_ptr() + 8 * slot

    def _enqueue(self, name: str, *values: int, blocks: int = 1, dependent: bool = False) -> None:
        stream = self._torch.cuda.current_stream().cuda_stream
        self.kernels.enqueue(name, stream, *values, blocks=blocks, dependent=dependent)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Python's collector of cycles does not run inside: memory that it frees there may have to be unmapped, which a
    capture forbids and torch's symmetric memory answers by ending the process. Nor does it have to run before: that
    took a tenth of a second for each graph, more than all else of a unit together."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_STATE, _EXPIRED, _RESULT, _OFFSET = 0, 2, 3, 5  # words: two of state, one, two results, one; more from 8 on


class _Captured:
    """A graph, and the calls that go with each replay of it."""

    def __init__(self, graph: Any, calls: Calls) -> None:
        self._graph, self._calls = graph, calls

    def replay(self) -> None:
        self._graph.replay()
        for call in self._calls.values():
            call()


class _Range:
    """A range in torch's profiler and in NVTX, whichever listens."""

    def __init__(self, torch: Any, name: str) -> None:
        self._torch, self._name = torch, name
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._torch.profiler.record_function(self._name))
        self._stack.enter_context(self._torch.cuda.nvtx.range(self._name))

    def __exit__(self, *error: object) -> None:
        self._stack.close()
