"""The index of the pairs of a rank, and the tiles that follow from it: memory, and the launch that fills it."""

from typing import TYPE_CHECKING, Any

from epcross.kernels.experts.formats import ExpertShape
from epcross.kernels.experts.rows import RankMajorRows
from epcross.kernels.extras import Extra

if TYPE_CHECKING:
    import torch

_ROWS = 64  # of a block


class PairIndex:
    """What `index_kernel` writes. Tiles have `block_t` pairs."""

    def __init__(
        self,
        shape: ExpertShape,
        block_t: int,
        device: "torch.device",
        *,
        column_blocks: int = 1,
        units: int = 0,
        balance: int = 0,
    ) -> None:
        """Take memory.

        Args:
            shape: of the experts.
            block_t: pairs of a tile.
            device: where.
            column_blocks: units of work that a tile is to GEMM1.
            units: of GEMM1 that are wanted; with fewer, programs share a sum. 0 = they never do.
            balance: 1 shares sums so that the last turn of the programs is full, not by powers of two; 2 shares
                those of the last turn alone.
        """
        import torch

        self._shape, self.block_t, self._column_blocks, self._units = shape, block_t, column_blocks, units
        self._balance = balance if units > 0 else 0
        bound, experts = shape.selections_bound, shape.num_local_experts
        self.max_tiles = bound // block_t + min(experts, bound)

        def empty(*size: int) -> "torch.Tensor":
            return torch.empty(size, dtype=torch.int32, device=device)

        self.pairs = empty(experts, shape.capacity_rows)
        self.place = empty(shape.capacity_rows, shape.top_k)
        self.shared = empty(shape.capacity_rows)
        self.counters = torch.zeros(experts + 2, dtype=torch.int32, device=device)
        self.schedule = torch.zeros(5, dtype=torch.int32, device=device)
        self.expert_rows = empty(experts)
        self.expert_tile = empty(experts)
        self.tile = empty(4, self.max_tiles)

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return sum(value.nbytes for value in vars(self).values() if hasattr(value, "nbytes"))

    def fill(self, rows: RankMajorRows, *, pdl: bool, early: bool = False) -> None:
        """Enqueue the kernel on `rows`; with `pdl` the next one may be brought up meanwhile, with `early` this one is
        while the one before it ends."""
        import triton

        from epcross.kernels.experts.gather.index_kernel import MAX_SPLITS, index_kernel

        shape, first, second = self._shape, rows.sets[0], rows.sets[-1]
        headers = first.headers
        sources_stride = (0, 0) if headers is None else headers.stride()
        unused: Any = self.schedule
        on(index_kernel, triton.cdiv(rows.capacity_rows, _ROWS))(
            first.ids, apart(first.ids, second.ids), first.ids.stride(0),
            unused if headers is None else headers,
            0 if headers is None or second.headers is None else apart(headers, second.headers),
            *sources_stride, rows.capacity_rows if headers is None else headers.shape[1],
            epoch_of(rows, unused), unused if rows.count is None else rows.count, rows.capacity_rows, shape.first_slot,
            self.pairs, self.place, self.shared, self.counters, self.schedule, self.expert_rows, self.expert_tile,
            self.tile, self.max_tiles, self._units,
            E=shape.num_local_experts, E_PAD=triton.next_power_of_2(shape.num_local_experts), K=shape.top_k,
            K_PAD=triton.next_power_of_2(shape.top_k), ROWS=_ROWS, BLOCK_T=self.block_t,
            COLUMN_BLOCKS=self._column_blocks, MAX_SPLITS=MAX_SPLITS if self._units else 1,
            BALANCE=self._balance,
            TWO_SETS=len(rows.sets) == 2, HAS_HEADERS=headers is not None, HAS_LIMIT=rows.count is not None, PDL=pdl,
            EARLY=early, num_warps=4, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip

    def dropped(self) -> int:
        """Tiles of the last run that found no place; waits for the device."""
        return int(self.schedule[3])


def on(kernel: Any, *grid: int) -> Any:
    """A Triton program as a function of its arguments, on that many programs."""
    return kernel[grid]


def apart(first: "torch.Tensor", second: "torch.Tensor") -> int:
    """Elements from one tensor to another."""
    return (second.data_ptr() - first.data_ptr()) // first.element_size()


def epoch_of(rows: RankMajorRows, unused: Any) -> Any:
    """The word that names a set, or anything else where there is one set without headers."""
    return unused if rows.epoch is None else rows.epoch


def interpreted() -> bool:
    """Whether Triton runs kernels as Python, on the CPU."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def triton_missing() -> str | None:
    """Why kernels in Triton cannot run on this machine, in a sentence, or None."""
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed; {Extra.GPU.install}"
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() < (9, 0):
        return "needs compute capability 9.0 or newer, for bulk copies of tiles"
    return None
