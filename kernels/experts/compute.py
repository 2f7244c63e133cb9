"""The contract of whatever runs the experts of a rank.

    compute.prepare(shape, layout, weights)      allocates, compiles, transforms weights; may wait
    compute.run(rows, weights_copy)              enqueues GEMM1, SwiGLU, re-quantisation, GEMM2, weighting
    compute.release()                            lets go of all that

`run` enqueues on torch's current stream, waits for nothing on the host, takes no memory from the driver, and may be
captured in a CUDA graph that is replayed with other routing. Rows are given at each run, since some libraries return
fresh tensors from every dispatch; within a graph their addresses are those of the capture. What `prepare` fills, it
fills on the stream that is current then: wait for the device before another stream runs it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from epcross.kernels.experts.formats import Arithmetic, ExpertShape, Layout
from epcross.kernels.experts.rows import ExpertRows
from epcross.kernels.experts.weights import ExpertWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeDescription:
    """What a row says of an implementation."""

    version: str  # of the library that brings the kernels
    kernels: tuple[str, ...]  # what runs, in order
    options: Mapping[str, str] = field(default_factory=dict)  # tile sizes and the like, as chosen for the shape


class ExpertCompute(ABC):
    """The experts of one rank. Options are keyword arguments of the constructor, which each have a plain default; it
    keeps them and touches nothing else, since it is called on machines that have neither GPU nor library."""

    name: ClassVar[str]

    def option_problems(self) -> Sequence[str]:
        """Which options no machine and no shape could serve, each as "NAME=VALUE must be ...". Never raises."""
        return ()

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why this cannot run on this machine, in a sentence with the next step, or None."""

    @abstractmethod
    def unsupported(self, shape: ExpertShape, layout: Layout) -> str | None:
        """Why it cannot serve these experts, in a sentence, or None. Needs no GPU and never raises."""

    @abstractmethod
    def arithmetic(self, shape: ExpertShape) -> Arithmetic:
        """Where it rounds, for the oracle."""

    @abstractmethod
    def prepare(self, shape: ExpertShape, layout: Layout, weights: ExpertWeights) -> None:
        """All that takes time or memory, on the current device; run once before `run`.

        Args:
            shape: sizes and formats; `capacity_rows` bounds the rows of every later `run`.
            layout: how rows will lie.
            weights: kept, not copied, unless the implementation reads another layout.
        """

    @abstractmethod
    def run(self, rows: ExpertRows, weights_copy: int = 0) -> None:
        """Enqueue the experts on `rows`, with one of the copies of the weights (taken modulo their number)."""

    @abstractmethod
    def describe(self) -> ComputeDescription:
        """What ran; after `prepare`."""

    @property
    @abstractmethod
    def workspace_bytes(self) -> int:
        """Device memory beyond weights and rows that `prepare` took."""

    def release(self) -> None:
        """Let go of memory. Nothing by default."""
        return
