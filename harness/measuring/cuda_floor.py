"""What GPUs and their links cost without an exchange: no exchange can be faster, and every latency is a multiple of it.

In the domain shared_gpu, and for one process, rows go from one place of a GPU's memory to another; in the domain nvlink
from each GPU to the next one's.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from epcross.harness.backends.base import Group
from epcross.harness.measuring.cuda_device import CudaDevice, open_device
from epcross.harness.measuring.timing import of_all_ranks

COPY_BYTES = 256 << 20
"""More than any second-level cache holds, read and written."""

_LIMIT_S = 10.0
_EMPTY_PAIRS = 100  # of one graph
_EMPTY_REPLAYS = 10
_ROUNDS = 2000
_COPIES = 4
_SERIES = 3
_VECTOR_BYTES = 16


def measure_gpu_floor(group: Group) -> dict[str, Any]:
    """Measure the floor of the GPUs of `group`. Collective; the same values on every rank; a few seconds.

    Returns:
        `empty_pair_us`: two empty kernels of a graph, with programmatic dependent launch; `empty_pair_plain_us`:
            without.
        `flag_one_way_us`: half a round of ping-pong between neighbours, median over pairs; between two blocks of the
            GPU for a single process. `flag_pairs_us`: each pair's.
        `push_gbps_by_blocks`, `pull_gbps_by_blocks`: 10^9 bytes per second that a rank writes to, or reads from, its
            neighbour, by number of blocks of 512 threads (so of SMs, up to their number), slowest rank.
        `copy_gbps`: bytes copied (not read plus written) per second by all ranks at once, best of those and, where
            memory is one GPU's, of its own copy.
        `device_copy_gbps`: the GPU's own copy within its memory, slowest rank; `host_to_device_gbps` and
            `device_to_host_gbps`: pinned memory, all ranks at once, slowest rank.
        `timer_step_ns`, `clock_error_ns`: of the stamps.
    """
    device = open_device(group, _LIMIT_S)
    floor = _Floor(device, group)
    pairs_us = floor.flag_pairs_us()
    push, pull = floor.link_gbps()
    device_copy = floor.device_copy_gbps()
    best_push = max(push.values())
    alone = floor.one_gpu
    return {
        "empty_pair_us": floor.worst(floor.empty_pair_us(dependent=True), max),
        "empty_pair_plain_us": floor.worst(floor.empty_pair_us(dependent=False), max),
        "flag_one_way_us": statistics.median(pairs_us),
        "flag_pairs_us": pairs_us,
        "flag_rounds": _ROUNDS,
        "push_gbps_by_blocks": push,
        "pull_gbps_by_blocks": pull,
        # processes that share a GPU share its memory: their sum is what one could do
        "copy_gbps": max(best_push * group.size, device_copy) if alone else best_push * group.size,
        "copy_bytes_per_rank": COPY_BYTES,
        "device_copy_gbps": device_copy,
        **floor.host_link_gbps(),
        "sm_count": device.sm_count,
        "cache_bytes": device.cache_bytes,
        "timer_step_ns": device.timer_step_ns(),
        "clock_error_ns": int(floor.worst(device.measure_offset().error_ns, max)),
    }


class _Floor:
    """The measurements, each collective."""

    def __init__(self, device: CudaDevice, group: Group) -> None:
        import torch

        self._torch: Any = torch
        self._device, self._group = device, group
        uuid = str(torch.cuda.get_device_properties(device.index).uuid).encode()  # type: ignore[attr-defined]
        self.one_gpu = len(set(group.all_gather(uuid))) == 1

    def worst(self, value: float, choose: Callable[[Sequence[float]], float]) -> float:
        """The largest (max) or smallest (min) of all ranks."""
        return choose(of_all_ranks(self._group, value))

    def empty_pair_us(self, *, dependent: bool) -> float:
        device = self._device

        def pairs() -> None:
            stream = self._torch.cuda.current_stream().cuda_stream
            for _ in range(2 * _EMPTY_PAIRS):
                device.kernels.enqueue("empty", stream, blocks=device.sm_count, dependent=dependent)

        graph = device.capture(pairs)
        graph.replay()
        first = device.mark()
        for _ in range(_EMPTY_REPLAYS):
            graph.replay()
        return device.elapsed_us(first, device.mark()) / (_EMPTY_PAIRS * _EMPTY_REPLAYS)

    def flag_pairs_us(self) -> list[float]:
        """Between two blocks of this GPU, or one neighbouring pair of processes at a time."""
        group = self._group
        if group.size == 1:
            words = self._torch.zeros(64, dtype=self._torch.int64, device="cuda")
            self._torch.cuda.synchronize()
            here, there = words.data_ptr(), words.data_ptr() + 256  # a line each
            streams = [self._torch.cuda.Stream() for _ in range(2)]
            self._ping(streams[0], here, there, first=True)
            self._ping(streams[1], there, here, first=False)
            return [self._trip_us()]
        pairs = [(rank, (rank + 1) % group.size) for rank in range(group.size if group.size > 2 else 1)]
        return [self._pair_us(*pair) for pair in pairs]

    def _pair_us(self, first: int, second: int) -> float:
        device, group = self._device, self._group
        took_us = 0.0
        if group.rank in (first, second):
            device.clear_pads()
        group.barrier()
        if group.rank in (first, second):
            other = second if group.rank == first else first
            stream = self._torch.cuda.current_stream()
            self._ping(
                stream, device.pads.addresses[group.rank], device.pads.addresses[other], first=group.rank == first
            )
            took_us = self._trip_us()
        took_us = self.worst(took_us, max)
        if group.rank in (first, second):
            device.clear_pads()  # the next common start expects a pad nobody wrote to
        group.barrier()
        return took_us

    def _ping(self, stream: Any, mine: int, theirs: int, *, first: bool) -> None:
        # one result word for each side, of which the first one's counts
        result = self._device.word(_RESULTS + (0 if first else 1))
        values = (mine, theirs, int(first), _ROUNDS, int(_LIMIT_S * 1e9), self._device.word(_EXPIRED), result)
        self._device.kernels.enqueue("ping_pong", stream.cuda_stream, *values)

    def _trip_us(self) -> float:
        self._torch.cuda.synchronize()
        if int(self._device.words[_EXPIRED]):
            raise TimeoutError("a flag between two ranks did not arrive within 10 s: they do not run at the same time")
        return int(self._device.words[_RESULTS]) / _ROUNDS / 2 / 1e3

    def link_gbps(self) -> tuple[dict[str, float], dict[str, float]]:
        """Push and pull by number of blocks. Within one process there is one direction only."""
        group, device = self._group, self._device
        own = self._torch.ones(COPY_BYTES, dtype=self._torch.uint8, device="cuda")
        if group.size == 1:
            other = self._torch.empty_like(own)
            peer = other.data_ptr()
        else:
            other = device.symmetric(COPY_BYTES)
            peer = other.addresses[(group.rank + 1) % group.size]
        blocks = sorted({1, 2, 4, 8, 16, 32, 64, device.sm_count, 2 * device.sm_count})
        push = {str(n): self._kernel_gbps(peer, own.data_ptr(), n) for n in blocks}
        pull = {str(n): self._kernel_gbps(own.data_ptr(), peer, n) for n in blocks} if group.size > 1 else {}
        group.barrier()  # a peer may still be reading what is freed now
        del own, other
        return push, pull

    def _kernel_gbps(self, target: int, source: int, blocks: int) -> float:
        def copy() -> None:
            stream = self._torch.cuda.current_stream().cuda_stream
            count = COPY_BYTES // _VECTOR_BYTES
            self._device.kernels.enqueue("copy_vectors", stream, target, source, count, blocks=blocks)

        return self._gbps(copy)

    def device_copy_gbps(self) -> float:
        own = self._torch.ones(COPY_BYTES, dtype=self._torch.uint8, device="cuda")
        other = self._torch.empty_like(own)
        return self._gbps(lambda: other.copy_(own))

    def host_link_gbps(self) -> dict[str, float]:
        host = self._torch.ones(COPY_BYTES // 4, dtype=self._torch.uint8).pin_memory()
        own = self._torch.empty(COPY_BYTES // 4, dtype=self._torch.uint8, device="cuda")
        size = COPY_BYTES // 4
        return {
            "host_to_device_gbps": self._gbps(lambda: own.copy_(host, non_blocking=True), size),
            "device_to_host_gbps": self._gbps(lambda: host.copy_(own, non_blocking=True), size),
        }

    def _gbps(self, copy: Callable[[], Any], size_bytes: int = COPY_BYTES) -> float:
        """Best series of the slowest rank; all ranks at once."""
        device, best = self._device, 0.0
        copy()
        for _ in range(_SERIES):
            self._torch.cuda.synchronize()
            self._group.barrier()
            first = device.mark()
            for _ in range(_COPIES):
                copy()
            best = max(best, size_bytes * _COPIES / device.elapsed_us(first, device.mark()) / 1e3)
        return self.worst(best, min)


_EXPIRED, _RESULTS = 2, 8  # words of the device that the measurements write to
