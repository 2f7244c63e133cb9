"""FlashInfer's fused mixture of experts (CUTLASS): bf16 rows with bf16 weights, or with fp4 weights on sm_90.

It sorts rows, runs both products and adds the weighted outputs itself. Rows must be dense, so those of records are
copied first. Weights are kept in its own order: up before gate, and for fp4 interleaved. Its module is compiled with
nvcc when first used, which takes minutes, unless a wheel with compiled kernels is installed.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from epcross.kernels.experts.compute import ComputeDescription, ExpertCompute
from epcross.kernels.experts.formats import Arithmetic, ExpertShape, Layout, WeightFormat
from epcross.kernels.experts.rows import ExpertRows, RankMajorRows
from epcross.kernels.experts.weights import ExpertWeights, WeightCopy
from epcross.kernels.extras import Extra
from epcross.kernels.formats import RowFormat

if TYPE_CHECKING:
    import torch


class FlashInferMoe(ExpertCompute):
    """bf16 rows; rank-major."""

    name: ClassVar[str] = "flashinfer"

    def __init__(self, deterministic: bool = True) -> None:
        """`deterministic`: sums of a row in a fixed order, in a kernel of its own, instead of atomics in GEMM2."""
        self._deterministic = deterministic

    def unavailable(self) -> str | None:
        """Needs flashinfer with its fused MoE, and compute capability 9.0."""
        try:
            import flashinfer.fused_moe as library
            import torch
        except ImportError as error:
            return f"flashinfer is not usable ({error}); {Extra.FLASHINFER.install}"
        if not hasattr(library, "cutlass_fused_moe"):
            return "this flashinfer has no cutlass_fused_moe; install flashinfer-python 0.7.4"
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
            return "needs compute capability 9.0 or newer"
        return _cannot_be_had()

    def unsupported(self, shape: ExpertShape, layout: Layout) -> str | None:
        """bf16 rows with bf16 or fp4 weights."""
        if found := shape.problems():
            return found[0]
        if layout is not Layout.RANK_MAJOR:
            return f"takes rank-major rows, not {layout} ones"
        if shape.row_format is not RowFormat.BF16 or shape.weight_format is WeightFormat.FP8:
            return f"serves bf16 rows with bf16 or fp4 weights, not {shape.row_format} with {shape.weight_format}"
        if shape.weight_format is WeightFormat.FP4 and (shape.hidden % 128 or shape.intermediate % 128):
            return (
                f"hidden={shape.hidden} and intermediate={shape.intermediate} must be multiples of 128 with fp4 weights"
            )
        return None

    def arithmetic(self, shape: ExpertShape) -> Arithmetic:
        """Products are stored in bf16."""
        return Arithmetic(intermediate=RowFormat.BF16, gate_up_rounded=False, output_rounded=True)

    def prepare(self, shape: ExpertShape, layout: Layout, weights: ExpertWeights) -> None:
        """Reorders the weights."""
        import flashinfer
        import flashinfer.fused_moe as library
        import torch

        self._shape, self._library, self._version = shape, library, str(getattr(flashinfer, "__version__", "unknown"))
        device = weights.copies[0].gate_up.device
        self._x = torch.zeros((shape.capacity_rows, shape.hidden), dtype=torch.bfloat16, device=device)
        self._out = torch.empty_like(self._x)
        self._copies = [self._ordered(copy) for copy in weights.copies]

    def run(self, rows: ExpertRows, weights_copy: int = 0) -> None:
        """See `ExpertCompute`."""
        import torch

        assert isinstance(rows, RankMajorRows)
        shape, count = self._shape, rows.capacity_rows
        ids, x, weights = self._of_set(rows, 0)
        if len(rows.sets) == 2 and rows.epoch is not None:
            odd = (rows.epoch.reshape(-1)[0] & 1) == 1
            ids, x, weights = (
                torch.where(odd, b, a) for a, b in zip((ids, x, weights), self._of_set(rows, 1), strict=True)
            )
        if not x.is_contiguous():
            x = self._x[:count].copy_(x)
        out = rows.out if rows.out.is_contiguous() else self._out[:count]
        fc1, fc2, scales = self._copies[weights_copy % len(self._copies)]
        fp4 = {"use_w4_group_scaling": True} if shape.weight_format is WeightFormat.FP4 else {}
        self._library.cutlass_fused_moe(
            x, ids, weights.contiguous(), fc1, fc2, torch.bfloat16, quant_scales=scales, output=out,
            ep_size=2, ep_rank=0, use_fused_finalize=not self._deterministic,
            tune_max_num_tokens=max(1, count), **fp4,
        )  # fmt: skip
        if out is not rows.out:
            rows.out.copy_(out)

    def describe(self) -> ComputeDescription:
        """FlashInfer, and its entry point."""
        options = {"use_fused_finalize": str(not self._deterministic)}
        return ComputeDescription(
            version=f"flashinfer {self._version}", kernels=("cutlass_fused_moe",), options=options
        )

    @property
    def workspace_bytes(self) -> int:
        """Dense rows and sums, and the weights in its order; what it takes for itself at each call comes on top."""
        kept = [self._x, self._out, *(t for fc1, fc2, scales in self._copies for t in (fc1, fc2, *scales))]
        return sum(tensor.nbytes for tensor in kept)

    def release(self) -> None:
        """Lets go of all of that."""
        self._copies = []
        del self._x, self._out

    def _of_set(self, rows: RankMajorRows, number: int) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
        """Local expert of each selection, or that of another rank; rows in bf16; weights."""
        import torch

        one, experts = rows.sets[number], self._shape.num_local_experts
        expert = one.ids - self._shape.first_slot
        local = (expert >= 0) & (expert < experts) & rows.present(number)[:, None]
        weights = torch.where(local, one.weights, 0)  # of a place that holds nothing they may be NaN
        return torch.where(local, expert, experts).to(torch.int32), one.rows.view(torch.bfloat16), weights

    def _ordered(self, copy: WeightCopy) -> "tuple[torch.Tensor, torch.Tensor, list[Any]]":
        """fc1, fc2 and scales as the library reads them."""
        import torch

        def up_first(tensor: "torch.Tensor") -> "torch.Tensor":
            return torch.cat(tensor.chunk(2, 1)[::-1], 1)

        if copy.gate_up_scales is None or copy.down_scales is None:
            return up_first(copy.gate_up), copy.down, []
        library = self._library
        fc1, fc2 = (
            library.interleave_moe_weights_for_sm90_mixed_gemm(values.contiguous(), "fp4")
            for values in (up_first(copy.gate_up), copy.down)
        )
        scales = [
            library.interleave_moe_scales_for_sm90_mixed_gemm(each.contiguous()).view(torch.int32)
            for each in (up_first(copy.gate_up_scales), copy.down_scales)
        ]
        return fc1, fc2, scales


def _cannot_be_had() -> str | None:
    """Why its module is neither compiled nor to be compiled, as of a trimmed install; None if that is not known.

    Else a build that looks for files that are not there would end every unit, after all that comes before it.
    """
    import torch

    try:
        from flashinfer.jit import env

        sources = Path(env.FLASHINFER_CSRC_DIR) / "fused_moe" / "cutlass_backend"
        folders = [Path(each) for each in (env.FLASHINFER_JIT_DIR, *env.FLASHINFER_AOT_DIRS)]
    except (ImportError, AttributeError, TypeError):
        return None
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9
    module = f"fused_moe_{major}0"
    if sources.is_dir() or any((folder / module / f"{module}.so").is_file() for folder in folders):
        return None
    return (
        f"this flashinfer has neither {module} compiled nor the sources to compile it from ({sources}); install all"
        " of flashinfer-python 0.7.4"
    )
