"""The experts in torch operations: a grouped matrix product from torch around gathers that anybody would write.

On CUDA the products are torch's grouped GEMM for bf16, with offsets that stay on the device; elsewhere a loop over
experts, for tests. Rows are copied, sorted by expert, into a buffer for as many as there may be.
"""

from typing import TYPE_CHECKING, ClassVar

from epcross.kernels.experts.compute import ComputeDescription, ExpertCompute
from epcross.kernels.experts.formats import Arithmetic, ExpertShape, Layout, WeightFormat
from epcross.kernels.experts.rows import ExpertMajorRows, ExpertRows, RankMajorRows
from epcross.kernels.experts.weights import ExpertWeights
from epcross.kernels.extras import Extra
from epcross.kernels.formats import RowFormat

if TYPE_CHECKING:
    import torch


class TorchGrouped(ExpertCompute):
    """bf16 only."""

    name: ClassVar[str] = "torch_grouped"

    def unavailable(self) -> str | None:
        """Needs torch with a grouped product, and on CUDA compute capability 9.0."""
        try:
            import torch
        except ImportError:
            return f"torch is not installed; {Extra.GPU.install}"
        if not hasattr(torch, "_grouped_mm"):
            return f"torch {torch.__version__} has no grouped GEMM; install torch 2.9 or newer"
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
            return "torch's grouped GEMM needs compute capability 9.0 or newer"
        return None

    def unsupported(self, shape: ExpertShape, layout: Layout) -> str | None:
        """bf16 rows and weights; both layouts."""
        if found := shape.problems():
            return found[0]
        if shape.row_format is not RowFormat.BF16 or shape.weight_format is not WeightFormat.BF16:
            return f"serves bf16 rows and weights only, not {shape.row_format} rows and {shape.weight_format} weights"
        if shape.hidden % 8 or shape.intermediate % 8:
            return f"hidden={shape.hidden} and intermediate={shape.intermediate} must be multiples of 8"
        return None

    def arithmetic(self, shape: ExpertShape) -> Arithmetic:
        """Every product is stored in bf16."""
        return Arithmetic(intermediate=RowFormat.BF16, gate_up_rounded=True, output_rounded=True)

    def prepare(self, shape: ExpertShape, layout: Layout, weights: ExpertWeights) -> None:
        """Keeps the weights, transposed as views."""
        import torch

        self._shape, self._weights = shape, weights
        self._cuda = weights.copies[0].gate_up.is_cuda
        self._version = torch.__version__

    def run(self, rows: ExpertRows, weights_copy: int = 0) -> None:
        """See `ExpertCompute`."""
        if isinstance(rows, RankMajorRows):
            self._rank_major(rows, weights_copy)
        else:
            self._expert_major(rows, weights_copy)

    def describe(self) -> ComputeDescription:
        """torch, and its product."""
        product = "torch._grouped_mm" if self._cuda else "torch.matmul"
        return ComputeDescription(version=self._version, kernels=(product,))

    @property
    def workspace_bytes(self) -> int:
        """What the operations hold at most at one time."""
        shape = self._shape
        return 2 * shape.selections_bound * (2 * shape.hidden + 3 * shape.intermediate)

    def _rank_major(self, rows: RankMajorRows, weights_copy: int) -> None:
        import torch

        shape, places = self._shape, self._shape.selections_bound
        number = len(rows.sets) > 1 and rows.epoch is not None and rows.epoch.reshape(-1)[0] & 1
        expert, x, weight = self._of_set(rows, 0)
        if len(rows.sets) > 1:
            other = self._of_set(rows, 1)
            expert, x, weight = (
                torch.where(torch.as_tensor(number, device=x.device) == 1, b, a)
                for a, b in zip((expert, x, weight), other, strict=True)
            )
        order = expert.reshape(-1).argsort(stable=True)[:places]
        counts = (expert.reshape(-1, 1) == torch.arange(shape.num_local_experts, device=x.device)).sum(0)
        made = self._experts(x[order // shape.top_k], counts, weights_copy)
        valid = torch.arange(len(order), device=x.device) < counts.sum()
        made = torch.where(valid[:, None], made.float() * weight.reshape(-1)[order, None], 0)
        total = torch.zeros((*expert.shape, shape.hidden), dtype=torch.float32, device=x.device)
        total.view(-1, shape.hidden)[order] = made
        here = (expert < shape.num_local_experts).any(1)
        rows.out.copy_(torch.where(here[:, None], total.sum(1).to(torch.bfloat16), rows.out))

    def _expert_major(self, rows: ExpertMajorRows, weights_copy: int) -> None:
        import torch

        x, capacity = rows.rows.view(torch.bfloat16), rows.capacity_rows
        copy = self._weights.copy(weights_copy)
        gate, up = torch.bmm(x, copy.gate_up.transpose(1, 2)).chunk(2, -1)
        y = torch.bmm(_swiglu(gate, up), copy.down.transpose(1, 2))
        here = torch.arange(capacity, device=x.device)[None, :] < rows.counts[:, None]
        rows.out.copy_(torch.where(here[:, :, None], y, rows.out))

    def _of_set(self, rows: RankMajorRows, number: int) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
        """Local expert of each selection ([N, top_k], E where there is none), rows in bf16, and weights."""
        import torch

        one = rows.sets[number]
        expert = one.ids - self._shape.first_slot
        local = (expert >= 0) & (expert < self._shape.num_local_experts) & rows.present(number)[:, None]
        return torch.where(local, expert, self._shape.num_local_experts), one.rows.view(torch.bfloat16), one.weights

    def _experts(self, x: "torch.Tensor", counts: "torch.Tensor", weights_copy: int) -> "torch.Tensor":
        """bf16 [P, hidden] of rows sorted by expert, `counts` each; what lies behind the last is not looked at."""
        import torch

        copy = self._weights.copy(weights_copy)
        if self._cuda:
            ends = counts.cumsum(0).to(torch.int32)
            product = getattr(torch, "_grouped_mm")  # noqa: B009 - public under another name from torch 2.10 on
            gate, up = product(x, copy.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
            return product(_swiglu(gate, up), copy.down.transpose(1, 2), offs=ends)
        made, first = torch.zeros((len(x), self._shape.hidden), dtype=torch.bfloat16), 0
        for expert, count in enumerate(counts.tolist()):
            part = slice(first, first := first + count)
            gate, up = (x[part] @ copy.gate_up[expert].T).chunk(2, -1)
            made[part] = _swiglu(gate, up) @ copy.down[expert].T
        return made


def _swiglu(gate: "torch.Tensor", up: "torch.Tensor") -> "torch.Tensor":
    """In fp32, rounded once."""
    import torch

    return (torch.nn.functional.silu(gate.float()) * up.float()).to(torch.bfloat16)
