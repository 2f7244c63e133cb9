"""Rows to their experts' places in a library's buffers and weighted sums back: memory, and the launches."""

from typing import TYPE_CHECKING, Any

from epcross.kernels.experts.formats import FP8_BLOCK, ExpertShape
from epcross.kernels.experts.gather.index import apart, epoch_of, on
from epcross.kernels.experts.rows import RankMajorRows
from epcross.kernels.formats import RowFormat

if TYPE_CHECKING:
    import torch

_PROGRAMS_PER_SM = 8
_RETURNS_PER_SM = 16  # of 128 threads with 32 registers each
_MOST_ROWS = 64  # of a program that places pairs
_RETURN_BLOCK = 1024  # columns of a program: 16 bytes a thread


class Permutation:
    """The pairs of a rank, the rows that have some, and the kernels that bring those and return sums.

    `bring`, then `swiglu_kernel` with `listed_count` and `taken_count`, then `back`: in this order, each once, as each
    clears what another has counted.
    """

    def __init__(self, shape: ExpertShape, room: int, align: int, device: "torch.device") -> None:
        """Take memory.

        Args:
            shape: of the experts.
            room: places of each expert; 0 = the contiguous form, an expert's places begin where the last one's end.
            align: of experts' first places in that form.
            device: where.
        """
        import torch
        import triton

        self._shape, self._room, self._align = shape, room, align
        experts, bound, rows, top_k = (
            shape.num_local_experts, shape.selections_bound, shape.capacity_rows, shape.top_k,
        )  # fmt: skip
        self.max_tiles = 0 if room else bound // align + min(experts, bound)
        self.places = experts * room if room else self.max_tiles * align
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        wanted = -(-rows // (_PROGRAMS_PER_SM * self._sms))
        self._rows_each = min(_MOST_ROWS, triton.next_power_of_2(wanted))

        def empty(*size: int) -> "torch.Tensor":
            return torch.empty(size, dtype=torch.int32, device=device)

        self._counters = torch.zeros(experts + 1, dtype=torch.int32, device=device)
        self._taken, self._listed, self._place = empty(1), empty(rows, 2), empty(rows, top_k)
        self._pair = self._place if room else empty(rows, top_k)
        self._weights = torch.empty((rows, top_k), dtype=torch.float32, device=device)
        self._clean = True
        words = shape.row_bytes // 4
        scales = shape.hidden // FP8_BLOCK if shape.row_format is RowFormat.FP8 else 0
        self._sizes = {
            "WORDS": words, "WORDS_PAD": triton.next_power_of_2(words), "SCALES": scales,
            "SCALES_PAD": triton.next_power_of_2(max(1, scales)), "K": top_k, "K_PAD": triton.next_power_of_2(top_k),
            "E": experts, "num_warps": 4 if words <= 2048 else 8,
        }  # fmt: skip
        self._experts_pad = triton.next_power_of_2(experts)

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        held = {id(value): value for value in vars(self).values() if hasattr(value, "nbytes")}
        return sum(value.nbytes for value in held.values())

    @property
    def expert_rows(self) -> "torch.Tensor":
        """int32 [E]: pairs of each expert, from `bring` to `back`."""
        return self._counters[:-1]

    @property
    def listed_count(self) -> "torch.Tensor":
        """int32 [1]: rows with pairs, from `bring` until it is taken."""
        return self._counters[-1:]

    @property
    def taken_count(self) -> "torch.Tensor":
        """int32 [1]: what it was, for `back`."""
        return self._taken

    def bring(self, rows: RankMajorRows, x: "torch.Tensor", x_scale: "torch.Tensor", group: Any = None) -> None:
        """Enqueue the kernels that count pairs and copy rows.

        Args:
            rows: as they lie.
            x: [E, room, hidden], or [places, hidden] in the contiguous form, in the format of rows.
            x_scale: fp32 [..., hidden / 128] of the same places, in memory by columns.
            group: out int32 [places]: the expert of each, in the contiguous form only.
        """
        import torch

        from epcross.kernels.experts.gather.permute_kernels import bring_kernel, place_kernel

        if not self._clean:  # the last run ended between two launches
            self._counters.zero_()
        self._clean = False
        shape, first, second, unused = self._shape, rows.sets[0], rows.sets[-1], self._taken
        headers, fp8 = first.headers, shape.row_format is RowFormat.FP8
        source, to = first.rows.view(torch.int32), x.view(torch.int32)
        scales: Any = first.scales.view(torch.float32) if fp8 else unused
        moved = (
            source, apart(first.rows, second.rows) // 4, source.stride(0),
            scales, apart(first.scales, second.scales) // 4 if fp8 else 0, scales.stride(0) if fp8 else 0,
        )  # fmt: skip
        two_sets = len(rows.sets) == 2
        on(place_kernel, -(-rows.capacity_rows // self._rows_each))(
            first.ids, apart(first.ids, second.ids), first.ids.stride(0),
            first.weights, apart(first.weights, second.weights), first.weights.stride(0), *moved,
            unused if headers is None else headers,
            0 if headers is None or second.headers is None else apart(headers, second.headers),
            *((0, 0) if headers is None else headers.stride()),
            rows.capacity_rows if headers is None else headers.shape[1],
            epoch_of(rows, unused), unused if rows.count is None else rows.count, rows.capacity_rows, shape.first_slot,
            self._counters, self._listed, self._pair, self._weights, self._room or rows.capacity_rows,
            to, x_scale, x_scale.stride(0), x_scale.stride(-1), **self._sizes,
            ROWS=self._rows_each, COPY=self._room > 0, TWO_SETS=two_sets, HAS_HEADERS=headers is not None,
            HAS_LIMIT=rows.count is not None,
        )  # fmt: skip
        if not self._room:
            on(bring_kernel, self._programs(rows.capacity_rows, _PROGRAMS_PER_SM))(
                *moved, epoch_of(rows, unused), self._counters, self._listed, self._pair, self._place,
                rows.capacity_rows, to, x_scale, x_scale.stride(-1), group, self.max_tiles, self.places, **self._sizes,
                E_PAD=self._experts_pad, BLOCK_T=self._align, TWO_SETS=two_sets,
            )  # fmt: skip

    def back(self, rows: RankMajorRows, y: "torch.Tensor") -> None:
        """Enqueue the kernel that adds what lies in `y`, bf16 [..., hidden], at a row's places, into `rows.out`."""
        from epcross.kernels.experts.gather.permute_kernels import return_kernel

        shape = self._shape
        chunks = -(-shape.hidden // _RETURN_BLOCK)
        on(return_kernel, self._programs(rows.capacity_rows * chunks, _RETURNS_PER_SM))(
            y, self._counters, self._taken, self._listed, self._place, self._weights, rows.out, rows.out.stride(0),
            H=shape.hidden, K=shape.top_k, E=shape.num_local_experts, E_PAD=self._experts_pad, BLOCK_N=_RETURN_BLOCK,
            num_warps=4,
        )  # fmt: skip
        self._clean = True

    def _programs(self, most: int, per_sm: int) -> int:
        """As many as the device holds, or as there could be work for."""
        return min(most, per_sm * self._sms)
