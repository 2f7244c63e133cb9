"""What a rank's experts are: shapes and formats, as plain values that need no GPU and no torch."""

from dataclasses import dataclass
from enum import StrEnum

from epcross.kernels.formats import RowFormat, row_size

FP8_BLOCK = 128
"""fp8: values of a row that share a scale, and the side of the square of weights that does."""
FP4_BLOCK = 32
"""fp4: weights of a row that share a scale."""


class WeightFormat(StrEnum):
    """How expert weights are stored."""

    BF16 = "bf16"
    FP8 = "fp8"  # e4m3, one fp32 scale per 128 x 128
    FP4 = "fp4"  # e2m1, one e8m0 scale per 32 along the summed dimension


class RowScaling(StrEnum):
    """How bf16 rows are brought to fp8. A value of few bits over a largest one of few bits often lies halfway between
    two codes, or would if scales were not rounded: then the operations say which it becomes."""

    QUOTIENT = "quotient"  # scale = largest / 448, code = value / scale
    RECIPROCAL = "reciprocal"  # scale = largest / 448, code = value * (1 / scale)
    FACTOR = "factor"  # scale = largest * (1 / 448), code = value * (448 / largest)


class Layout(StrEnum):
    """How the rows of a rank lie in memory; `rows.py` has a class for each."""

    RANK_MAJOR = "rank_major"
    EXPERT_MAJOR = "expert_major"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Where an implementation rounds on its way. The oracle follows it, so that what is left is error.

    Without any of these: operands as stored, sums exact, the intermediate quantised once, as is the weighted sum.
    """

    intermediate: RowFormat  # bf16 or fp8
    scale_block: int = FP8_BLOCK  # fp8: values of the intermediate that share a scale
    power_of_two_scales: bool = False  # fp8: scales are rounded up to powers of two
    gate_up_rounded: bool = False  # GEMM1 leaves bf16, and SwiGLU reads that
    output_rounded: bool = False  # an expert's output is rounded to bf16 before it is weighted
    weight_first: bool = False  # the weight multiplies the intermediate, before that is quantised


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The experts of one rank, and how rows come to them.

    The intermediate is quantised to the format in which rows arrive: bf16 rounds it once, fp8 gives it a scale per 128.
    """

    num_local_experts: int
    first_slot: int  # global slot of expert 0 of this rank
    top_k: int
    hidden: int
    intermediate: int
    row_format: RowFormat
    weight_format: WeightFormat
    capacity_rows: int  # rank-major: rows that a landing set has room for; expert-major: those of each expert
    power_of_two_scales: bool = False  # of fp8: rows, weights and intermediate, as tensor cores of sm_100 read them
    expected_rows_per_expert: int = 0  # a mean, for libraries that choose a kernel by it on the host; 0 = unknown
    max_selections: int = 0  # of this rank in any run, where the caller knows; bounds workspaces. 0 = the worst case

    @property
    def selections_bound(self) -> int:
        """Selections of this rank that memory must suffice for, rank-major."""
        worst = self.capacity_rows * min(self.top_k, self.num_local_experts)
        return min(worst, self.max_selections) if self.max_selections else worst

    @property
    def last_slot(self) -> int:
        """Global slot of this rank's last expert."""
        return self.first_slot + self.num_local_experts - 1

    @property
    def bytes_per_expert(self) -> int:
        """Weights and scales of one expert, as stored: what reading an expert once costs."""
        values = 3 * self.hidden * self.intermediate
        if self.weight_format is WeightFormat.BF16:
            return 2 * values
        if self.weight_format is WeightFormat.FP4:
            return values // 2 + values // FP4_BLOCK
        blocks = -(-self.hidden // FP8_BLOCK) * -(-self.intermediate // FP8_BLOCK)
        return values + 3 * blocks * 4

    @property
    def row_bytes(self) -> int:
        """Bytes of an arriving row, without padding."""
        return row_size(self.row_format, self.hidden).row_bytes

    def problems(self) -> list[str]:
        """Why no implementation could serve this shape, one sentence each."""
        found = [
            f"{name}={value} must be at least 1"
            for name in ("num_local_experts", "top_k", "hidden", "intermediate", "capacity_rows")
            if (value := getattr(self, name)) < 1
        ]
        if self.first_slot < 0:
            found.append(f"first_slot={self.first_slot} must not be negative")
        if found:
            return found
        quantised = self.weight_format is not WeightFormat.BF16 or self.row_format is not RowFormat.BF16
        found = [
            f"{name}={value} is not a multiple of {FP8_BLOCK}, which a format with scales asks for"
            for name in ("hidden", "intermediate")
            if quantised and (value := getattr(self, name)) % FP8_BLOCK
        ]
        if self.row_format not in {RowFormat.BF16, RowFormat.FP8}:
            found.append(f"row_format={self.row_format} is no format that experts read; use bf16 or fp8")
        return found
