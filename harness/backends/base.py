"""The contract between the harness and a baseline.

A backend is told what to exchange and enqueues it; it neither times nor grades itself. To add one, subclass
`Backend` in a file of its own and name the class in `conf/backend/<name>.yaml` (`target: my.module:Class`).

Life on each rank, in this order, collective where marked (c):

    unavailable() -> unsupported(point) -> prebuild()          once per machine, in any process
    refused_here(point)                                        in each rank's process
    prepare(point, shard, group) (c)
      refill(set, batch)                                       new inputs in place; before the first use of a set
      dispatch(set) (c) -> received(set) -> stage(set, partials) -> combine(set) (c) -> combined(set)      checks
      dispatch(set) (c) -> experts(set)  -> combine(set) (c)  ... many times                               timing
    describe() -> close() (c)

`dispatch` and `combine` alternate strictly. On return the work is done (CPU) or ordered on the current stream (GPU).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from epcross.harness.point import Point, Scalar
from epcross.harness.terms import BackendKind, Boundary, Domain, GraphSupport, Phase, Scope, WeightsBy

Bytes = NDArray[np.uint8]
Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
BF16Bits = NDArray[np.uint16]
"""BF16 values as their bits; numpy has no bf16 of its own."""


class Group(Protocol):
    """The ranks of one process group. No torch in it; `torch()` makes a torch group on demand."""

    rank: int
    size: int

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return when every rank has called it. Raises `GroupError` if a peer aborts or the time runs out."""
        ...

    def all_gather(self, data: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Every rank's `data`, in rank order. Raises as `barrier`."""
        ...

    def abort(self, reason: str) -> None:
        """Make every pending and later call of every rank raise `GroupError` with `reason` and this rank."""
        ...

    @property
    def shared_name(self) -> str:
        """A name of at most 40 characters, the same on all ranks and unique to this process group on this host:
        a stem for shared-memory segments and rendezvous keys."""
        ...

    def torch(self, backend: str) -> object:
        """A `torch.distributed` process group of the same ranks (`torch.distributed.ProcessGroup`)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's inputs of one set. T = tokens of this rank."""

    ids: Int32  # [T, top_k] slot ids; -1 = dropped, its weight is ignored; valid ids of a token are distinct
    weights: Float32  # [T, top_k]
    rows: Bytes  # [T, padded_row_bytes], padding zero
    scales: Bytes  # [T, padded_scale_bytes], padding zero; second dimension 0 when the format has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What a rank needs to prepare: who it is, how slots lie, and its batch of each set."""

    rank: int
    tokens: tuple[int, ...]  # of every rank
    slot_rank: Int32  # [num_slots], the rank that holds each slot
    batches: tuple[Batch, ...]  # one per set


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What a rank holds after dispatch, in any order: one row for each (source rank, token) sent to it.

    A backend that delivers a token once per expert folds the copies into one row here.
    """

    source: Int32  # [N] source rank
    token: Int32  # [N] token index on its source
    ids: Int32  # [N, top_k] slots of this rank in the token's own order; -1 where the selection is elsewhere or dropped
    weights: Float32  # [N, top_k]; 0 where ids is -1
    rows: Bytes  # [N, padded_row_bytes]
    scales: Bytes  # [N, padded_scale_bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How combine adds a token's partials. The oracle follows it bit for bit where `exact` is true."""

    order: str = "rank_ascending"  # partials of ranks 0, 1, 2, ... ; or "unordered"
    accumulate: str = "fp32"  # or "bf16"
    exact: bool = True  # outputs equal the declared arithmetic bit for bit


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What actually ran, for the row. Names are the library's own."""

    version: str  # of the backend: library version, or content hash of our own kernel sources
    transport: str  # such as "shared memory", "nvlink fd handles"
    algorithm: str = ""
    kernels: tuple[str, ...] = ()
    workspace_bytes: int = 0  # held by this rank for the exchange
    protocol_bytes: int | None = None  # flags, ids, padding, re-arm sent per pair, this rank, mean over sets; if known
    num_sms: int = 0
    libraries: Mapping[str, str] = field(default_factory=dict)  # name -> version


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractShape:
    """What the contract's cases are made of, where they are about something else than a shape.

    A backend whose kernels take no such shape names the smallest that they do: otherwise it would be refused every
    case, and nothing of it checked.
    """

    hidden: int = 128
    format_hidden: int = 160  # a partial scale block for fp8, scale rows that need padding for the others
    slots_multiple: int = 1  # of 1, 2 or 4: what the slots of a rank are a multiple of


class Backend(ABC):
    """A baseline on one rank."""

    name: ClassVar[str]
    kind: ClassVar[BackendKind] = BackendKind.EXCHANGE
    domains: ClassVar[frozenset[Domain]]
    scopes: ClassVar[frozenset[Scope]] = frozenset({Scope.SCALE_UP})
    """Whether its ranks must share one domain (NVLink, shared memory), as one-sided kernels do, or may span more."""
    phases: ClassVar[frozenset[Phase]] = frozenset({Phase.DISPATCH, Phase.COMBINE, Phase.ROUND_TRIP})
    boundary: ClassVar[Mapping[Phase, frozenset[Boundary]]]
    host_sync: ClassVar[bool]
    graph: ClassVar[GraphSupport] = GraphSupport.NO
    weights_by: ClassVar[WeightsBy] = WeightsBy.EXPERTS
    reduction: ClassVar[Reduction] = Reduction()
    stable_order: ClassVar[bool] = True
    """Whether the same inputs are received in the same order each time, so that timed outputs can be checked."""
    contract_shape: ClassVar[ContractShape] = ContractShape()

    def __init__(self, options: Mapping[str, Scalar]) -> None:
        """Keep the options; touch nothing else. Unknown options raise `ConfigError` from the loader."""
        self.options = dict(options)

    @classmethod
    def option_defaults(cls) -> Mapping[str, Scalar]:
        """Every option this backend takes, with its default. A YAML or override may name no other."""
        return {}

    @classmethod
    def option_problems(cls, options: Mapping[str, Scalar]) -> Sequence[str]:
        """Which values no machine and no shape could serve, each as "NAME=VALUE must be ...", with what is allowed.
        Wrong usage, found before anything is planned. `options` are all of them, each of the type of its default. What
        hangs on the shape is for `unsupported`, what hangs on the machine for `unavailable`."""
        return ()

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why it cannot be used on this machine, as one sentence with the next step; None if it can.
        May import vendor code. Never raises."""

    @abstractmethod
    def unsupported(self, point: Point) -> str | None:
        """Why `point` cannot run, as one sentence naming value and limit; None if it can. Pure and fast: it is asked
        where a run is planned too, in a process that may have loaded other libraries than the ranks will."""

    def refused_here(self, point: Point) -> str | None:
        """Why `point` cannot run with what this process has loaded, as `unsupported` would say it; None if it can.
        Asked of the ranks alone, in the backend's own interpreter and environment, after `unavailable`. Fast."""
        return None

    @abstractmethod
    def workspace_bytes(self, point: Point) -> int:
        """Bytes each rank will hold for the exchange at `point`: a pure function, used by `plan`."""

    def prebuild(self) -> None:
        """Compile what can be compiled ahead, outside every window. Raises `BuildError`."""
        return

    @abstractmethod
    def prepare(self, point: Point, shard: Shard, group: Group) -> None:
        """Allocate, compile, tune, register. Untimed, collective, called once per instance."""

    @abstractmethod
    def refill(self, set_index: int, batch: Batch) -> None:
        """Replace the inputs of one set in place. Local; the harness puts a barrier around it."""

    @abstractmethod
    def dispatch(self, set_index: int) -> None:
        """Send this set's rows; return when this rank's rows for this round are readable."""

    @abstractmethod
    def received(self, set_index: int) -> Received:
        """The rows of the last dispatch, as copies. Untimed."""

    @abstractmethod
    def stage(self, set_index: int, partials: BF16Bits) -> None:
        """Take the experts' output [N, hidden], in the order `received` returned, and keep it so that `experts`
        can write it again. Puts it where `combine` reads. Untimed."""

    @abstractmethod
    def experts(self, set_index: int) -> None:
        """Identity experts inside the timed pair: on the CPU read one byte of each cache line of every received row
        in place and copy the staged partials to where `combine` reads (`Boundary.EXPERTS_IDENTITY`), so that rows
        really move between caches. On a GPU landing buffers are device memory and this need not touch them; see
        `gpu.GpuBackend`, whose partials the harness stages so that nothing has to be written here."""

    @abstractmethod
    def combine(self, set_index: int) -> None:
        """Return each partial to its token's rank and add them; return when this rank's sums are complete."""

    @abstractmethod
    def combined(self, set_index: int) -> BF16Bits:
        """The sums of the last combine [T, hidden], as a copy. Untimed."""

    def poison(self) -> None:
        """Overwrite every output buffer as far as the protocol allows, so that stale outputs cannot pass."""
        return

    @abstractmethod
    def describe(self) -> Description:
        """What actually ran; valid after `prepare`."""

    def drain_timing(self) -> None:
        """Called after each timed series, outside its window, for backends that must release host state."""
        return

    @abstractmethod
    def close(self) -> None:
        """Release everything. Collective; idempotent; safe after a failed `prepare`."""
