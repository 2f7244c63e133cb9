"""A layer that says that it runs on a CPU, as the stand-in in plain torch can."""

from tests._torch_layer import PlainExperts, TorchInLayer, TorchLayer

from epcross.harness.point import Point
from epcross.harness.terms import Domain


class CpuInLayer(TorchInLayer):
    """With one rank, all of them are in one process anywhere."""

    domains = frozenset({Domain.CPU})

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, point: Point) -> str | None:
        return None


class CpuLayer(TorchLayer):
    name = "cpu_layer"
    exchange_class = CpuInLayer


class CpuExperts(PlainExperts):
    name = "cpu_experts"
