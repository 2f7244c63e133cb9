"""The closed lists: every word that code, rows, figures and documents share, defined once.

All are `StrEnum`s, so a value prints, sorts and serialises as its own word.
"""

from enum import StrEnum

from epcross.kernels.experts.formats import WeightFormat as WeightFormat
from epcross.kernels.formats import RowFormat as RowFormat


class Domain(StrEnum):
    """Where a row was taken. Rows of different domains are never compared in a verdict."""

    CPU = "cpu"  # one process per rank, shared memory of one host
    NVLINK = "nvlink"  # one rank per GPU
    SHARED_GPU = "shared_gpu"  # several ranks on one GPU
    PREDICTED = "predicted"
    PUBLISHED = "published"


class Sharing(StrEnum):
    """How ranks share a GPU; `NONE` outside `Domain.SHARED_GPU`."""

    NONE = "none"
    ONE_LAUNCH = "one_launch"
    PROCESSES = "processes"


class Scope(StrEnum):
    """Whether the group stays inside one NVLink (or shared-memory) domain."""

    SCALE_UP = "scale_up"
    SCALE_OUT = "scale_out"


class BackendKind(StrEnum):
    """What a backend does, hence what is timed of it."""

    EXCHANGE = "exchange"  # dispatch and combine; the experts are the harness's own and do nothing
    LAYER = "layer"  # an exchange with an expert stage (`compute`) between
    FUSED = "fused"  # a layer whose exchange and experts are one kernel
    EXPERTS = "experts"  # an expert stage alone, on rows that are in place


class Phase(StrEnum):
    """What a latency covers. `ROUND_TRIP`, `LAYER` and `EXPERTS` are headlines, each of its own kind of backend."""

    STAGE = "stage"
    DISPATCH = "dispatch"
    COMBINE = "combine"
    ROUND_TRIP = "round_trip"
    LAYER = "layer"
    LAYER_COMM = "layer_comm"  # what of a layer is communication; how it was told apart depends on the regime
    EXPERTS = "experts"


class Regime(StrEnum):
    """How a phase is timed; numbers of two regimes are never mixed."""

    STEADY = "steady"  # period of a chain of pairs, back to back
    ENTRY = "entry"  # one pair from a common start, maximum over ranks
    SPANS = "spans"  # kernel spans; diagnostics only


PHASES: dict[BackendKind, dict[Regime, tuple[Phase, ...]]] = {
    BackendKind.EXCHANGE: {
        Regime.STEADY: (Phase.ROUND_TRIP,),
        Regime.ENTRY: (Phase.DISPATCH, Phase.COMBINE, Phase.ROUND_TRIP),
        Regime.SPANS: (Phase.DISPATCH, Phase.COMBINE),
    },
    BackendKind.LAYER: {
        Regime.STEADY: (Phase.LAYER, Phase.LAYER_COMM),  # the latter: less the period of the layer on rows in place
        Regime.ENTRY: (Phase.LAYER,),
        Regime.SPANS: (Phase.DISPATCH, Phase.COMBINE, Phase.LAYER, Phase.LAYER_COMM),  # the last: the first two, added
    },
    BackendKind.FUSED: dict.fromkeys(Regime, (Phase.LAYER,)),
    BackendKind.EXPERTS: dict.fromkeys(Regime, (Phase.EXPERTS,)),
}
"""The phases that a regime times of a kind of backend, and therefore plans."""

HEADLINES = (Phase.ROUND_TRIP, Phase.LAYER, Phase.EXPERTS)
"""The phase of each kind that users of it ask for first."""


class Status(StrEnum):
    """How a planned row ended. Latency fields are filled if and only if `OK`."""

    OK = "ok"
    INCORRECT = "incorrect"  # ran, and the outputs were wrong
    UNSUPPORTED = "unsupported"  # the point is impossible for this backend
    UNAVAILABLE = "unavailable"  # the library or the hardware is absent
    NO_TIMING = "no_timing"  # ran and verified, and the clock gave nothing usable
    ERROR = "error"  # raised, crashed or lost its process
    TIMEOUT = "timeout"  # passed its wall limit or a bounded wait
    SKIPPED = "skipped"  # not tried


class Flag(StrEnum):
    """Marks beside the status. Flagged rows stay; headlines leave them out and say so, but for `CAPTIONED`."""

    OVERSUBSCRIBED = "oversubscribed"  # more ranks than cores
    UNPINNED = "unpinned"  # a rank could not be bound to a core of its own
    THROTTLED = "throttled"  # heat, a fault or another's limit held a clock down
    POWER_CAPPED = "power_capped"  # the GPU's own power limit did, and nothing else: as such work runs there
    WITHIN_LAUNCH = "within_launch"  # fewer than five launches: the interval misses launch variance
    CROSS_ALLOCATION = "cross_allocation"
    KNOWN_ISSUE = "known_issue"  # of the version, as its YAML says; or found since, as `withdrawn.json` says
    WARM_L2 = "warm_l2"
    LATE_START = "late_start"  # a rank missed the common start of an entry iteration
    PROFILED = "profiled"  # taken under a profiler or another wrapper, which costs time
    NOT_ALONE = "not_alone"  # another process, none of the run's, was on a rank's GPU, or another run on its core
    RETRIED = "retried"  # the point was measured after an earlier attempt was interrupted


CAPTIONED = frozenset({Flag.WITHIN_LAUNCH, Flag.POWER_CAPPED})
"""Flags that keep no row out of a headline: captions say them."""


class Boundary(StrEnum):
    """What may lie inside a timed phase. Each backend declares its set for each phase."""

    LAYOUT = "layout"  # computing who gets what from the ids
    PACK = "pack"  # gathering rows into a send buffer
    COUNT_EXCHANGE = "count_exchange"  # sizes are exchanged before rows
    TRANSFER = "transfer"
    COPY_OUT = "copy_out"  # the receiver copies rows out of the landing buffer
    EXPERTS_IDENTITY = "experts_identity"  # received rows are read and partials written by identity experts
    EXPERTS = "experts"  # both products of every selected expert, activation and weighting
    REDUCE = "reduce"
    STAGE = "stage"  # inputs are copied to where the library reads them
    QUANTISE = "quantise"  # activations are quantised
    REARM = "rearm"  # sentinel words are restored


class GraphSupport(StrEnum):
    """Whether the backend's calls can be captured in a CUDA graph."""

    NO = "no"
    CACHED = "cached"
    YES = "yes"


class WeightsBy(StrEnum):
    """Who multiplies the routing weights. Exactly one party does."""

    EXPERTS = "experts"  # the expert stage; combine is an unweighted sum
    COMBINE = "combine"  # the library's combine


class RoutingKind(StrEnum):
    """How the experts of a token are chosen."""

    UNIFORM = "uniform"
    PERFECT = "perfect"
    ZIPF = "zipf"
    HOT_EXPERT = "hot_expert"
    ALL_TO_ONE = "all_to_one"
    LOCAL_ONLY = "local_only"
    TRACE = "trace"
    MATRIX = "matrix"


class PlacementKind(StrEnum):
    """How experts are laid on ranks."""

    CONTIGUOUS = "contiguous"
    STRIDED = "strided"
    REPLICATED = "replicated"


class Stage(StrEnum):
    """The life cycle of a unit on one rank; a failure names the stage it happened in."""

    START = "start"
    PREPARE = "prepare"
    VERIFY_BEFORE = "verify_before"
    TIME = "time"
    VERIFY_AFTER = "verify_after"
    CLOSE = "close"
    STORE = "store"
