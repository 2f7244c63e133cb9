"""Expert stages that are each wrong in one way: in what they answer, or in how they end."""

import os
from collections.abc import Sequence
from typing import Any

from epcross.kernels.experts.compute import ComputeDescription, ExpertCompute
from epcross.kernels.experts.formats import Arithmetic


class Plain(ExpertCompute):
    """A stage that says nothing wrong, and whose experts do nothing."""

    name = "plain"

    def __init__(self, tile: int = 64) -> None:
        self.tile = tile

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, shape: Any, layout: Any) -> str | None:
        return None

    def arithmetic(self, shape: Any) -> Arithmetic:
        return Arithmetic(intermediate=shape.row_format, power_of_two_scales=shape.power_of_two_scales)

    def prepare(self, shape: Any, layout: Any, weights: Any) -> None:
        return

    def run(self, rows: Any, weights_copy: int = 0) -> None:
        return

    def describe(self) -> ComputeDescription:
        return ComputeDescription(version="1", kernels=())

    @property
    def workspace_bytes(self) -> int:
        return 0


class Raises(Plain):
    def __init__(self, tile: int = 64) -> None:
        raise OSError(2, "no libmine.so")  # of a kind that the command line has words of its own for


class Leaves(Plain):
    def __init__(self, tile: int = 64) -> None:
        raise SystemExit(0)


class Ends(Plain):
    def __init__(self, tile: int = 64) -> None:
        os._exit(0)


class Killed(Plain):
    def __init__(self, tile: int = 64) -> None:
        os.abort()


class Demands(Plain):
    def __init__(self, tile: int) -> None:
        self.tile = tile


class RaisesLate(Plain):
    def option_problems(self) -> Sequence[str]:
        raise RuntimeError("cannot tell")


class Letters(Plain):
    def option_problems(self) -> Sequence[str]:
        return "no"


class Number(Plain):
    def unavailable(self) -> str | None:
        return 5  # pyright: ignore[reportReturnType]


class Careless(Plain):
    def unavailable(self) -> str | None:
        raise RuntimeError("driver not loaded")


class EndsAsked(Plain):
    def unavailable(self) -> str | None:
        os._exit(0)


class EndsAtPoint(Plain):
    def unsupported(self, shape: Any, layout: Any) -> str | None:
        os._exit(4)
