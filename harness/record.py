"""The row: one dataclass whose field order, names and doc strings are the column dictionary.

`results/README.md` is checked against it. A new column, or a change of a column's meaning, raises `SCHEMA_VERSION`;
rows of an older version are read with null in the columns they lack.
"""

from dataclasses import dataclass, field, fields
from typing import Any

SCHEMA_VERSION = 8


def column(doc: str, default: Any = None, *, since: int = 1) -> Any:
    """A field of `Record` with its documentation, and the schema version that it came with."""
    return field(default=default, metadata={"doc": doc, "since": since})


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One (run, point, phase, repeat). Every planned one exists exactly once, whatever happened."""

    schema_version: int = column("Version of this dictionary.", SCHEMA_VERSION)
    run_id: str = column("The run that took the row.", "")
    point_id: str = column("Hash of every factor of the point.", "")
    phase: str = column("What the latency covers (closed list).", "")
    repeat: int = column("Number of this (launch, seed, chain).", 0)
    launch: int = column("Which fresh process group.", 0)
    seed: int = column("Which routing seed.", 0)
    chain: int = column("Which timed series of that seed.", 0)
    status: str = column("How it ended (closed list).", "")
    reason: str | None = column("Why it is not ok, as a sentence; null if and only if ok.")
    flags: str = column(
        "Flags, sorted, joined by a space; empty if none. Up to schema version 7 throttled was power_capped, too.", ""
    )
    failed_rank: int | None = column("Rank that failed first, where one did.")
    failed_stage: str | None = column("Life-cycle stage it failed in.")

    backend: str = column("Name of the backend (a file in conf/backend).", "")
    options: str = column("Backend options as canonical JSON.", "{}")
    backend_version: str | None = column("Library version, or content hash of our own kernel sources.")
    transport: str | None = column("What carried the rows, as the backend reports it.")
    algorithm: str | None = column("Algorithm the backend reports it chose.")
    kernels: str | None = column("Kernel names seen or launched, joined by a space.")
    libraries: str | None = column(
        "Libraries of the backend as loaded, name to version (and path where several may be), as canonical JSON.",
        since=3,
    )
    boundary: str | None = column("What lies inside the window, sorted, joined by a space (closed list).")
    weights_by: str | None = column("Who multiplies the routing weights.")
    tuned: bool = column("Whether the backend was tuned within the common budget.", False)

    domain: str = column("cpu, nvlink, shared_gpu, predicted or published.", "")
    sharing: str = column("How ranks share a GPU.", "none")
    scope: str = column("scale_up or scale_out.", "scale_up")
    model: str = column("Name of the MoE shape.", "")
    num_experts: int = column("Logical experts.", 0)
    num_slots: int = column("Physical experts after replication.", 0)
    top_k: int = column("Experts chosen per token.", 0)
    hidden: int = column("Values per row.", 0)
    intermediate: int = column("Width of an expert.", 0)
    ep_size: int = column("Ranks of the expert-parallel group.", 0)
    tokens_per_rank: int = column("Nominal tokens per rank.", 0)
    tokens_min: int = column("Fewest tokens on a rank.", 0)
    tokens_total: int = column("Tokens over all ranks.", 0)
    max_tokens_per_rank: int = column("Capacity, group-wide.", 0)
    routing: str = column("Kind of routing.", "")
    routing_params: str = column("Its parameters as canonical JSON.", "{}")
    placement: str = column("Kind of expert placement.", "")
    dispatch_format: str = column("Row format of dispatch.", "")
    combine_format: str = column("Row format of combine.", "")
    regime: str = column("steady, entry or spans.", "")

    kind: str | None = column("What the backend does: exchange, layer, fused or experts (closed list).", since=4)
    compute: str | None = column(
        "Expert stage of the layer (a file in conf/compute); empty where there is none to choose.", since=4
    )
    compute_options: str | None = column("Its options as canonical JSON.", since=4)
    compute_version: str | None = column("Version of the expert stage, as it reports it.", since=4)
    weight_format: str | None = column(
        "Format of the expert weights; null for an exchange. Activations are in dispatch_format.", since=4
    )
    expert_weight_bytes: int | None = column(
        "Bytes of the weights of the experts hit, scales included: what a layer reads at least once; largest over "
        "ranks, mean over sets.",
        since=4,
    )
    experts_hit: float | None = column("Slots of a rank that some token chose, mean over ranks and sets.", since=4)
    tokens_per_expert_min: int | None = column("Fewest selections of any slot of the group, over all sets.", since=4)
    tokens_per_expert_mean: float | None = column("Selections of a slot, mean over slots and sets.", since=4)
    tokens_per_expert_max: int | None = column("Most selections of any slot, over all sets.", since=4)
    error_ratio: float | None = column(
        "Largest over verified tokens of a layer's error over that of a plain grouped GEMM in the same formats, which "
        "adds in fp32. No bound: in fp8 what tensor cores lose is allowed on top, and right rows may be far above 2; "
        "error_share says how near the bound is. Null in incorrect rows up to schema version 7.",
        since=4,
    )
    error_share: float | None = column(
        "Largest error of a layer over what is allowed, by every rule that holds outputs against the oracle: of "
        "verified tokens, of 128 of their columns, and of sums over an expert's tokens. 1 is the bound; above it the "
        "row is incorrect. Null if it is no finite number, as where outputs are NaN; no ok row of a layer or expert "
        "stage lacks it.",
        since=8,
    )

    latency_us: float | None = column("Estimate of this repeat, in microseconds; see estimator.")
    latency_min_us: float | None = column("Smallest sample over ranks and iterations.")
    latency_max_us: float | None = column("Largest sample over ranks and iterations.")
    estimator: str | None = column("How latency_us follows from the samples.")
    n_samples: int = column("Samples per rank behind latency_us.", 0)
    pairs: int = column("Pairs timed per rank in this series (fill excluded).", 0)
    verified_rounds: int | None = column("Rounds of the unit whose every output was compared, on every rank.")
    start_skew_us: float | None = column("Median over iterations of last minus first start over ranks (entry).")
    start_skew_error_us: float | None = column("By how much the ranks' clocks may differ beside that (entry).", since=2)
    enqueued: str | None = column(
        "How pairs were issued: host (a loop on the CPU), graph (a CUDA graph, replayed) or eager (a loop, for a GPU).",
        since=2,
    )
    enqueue_us: float | None = column(
        "What the host takes to enqueue one pair by a graph, in microseconds, the slowest rank's (steady).", since=5
    )
    graph_pairs: int | None = column(
        "Pairs of one graph. Steady: a millisecond of them, or a tenth where the chain is faster in shorter graphs. "
        "Entry, since schema version 7: 20, or 1 where pairs are faster in graphs of one.",
        since=5,
    )
    held: bool | None = column(
        "Whether each graph was timed by itself behind a common start, the GPU being held until it was enqueued "
        "(steady): where the host takes longer to enqueue a pair than the GPU to run it, a chain would time the host.",
        since=5,
    )
    instrumentation_us: float | None = column("An empty pair through the same timing path; never subtracted.")

    ids_hash: str | None = column("Hash of all ranks' slot ids of the sets used.")
    fan_out: float | None = column("Mean number of destination ranks of a token, own rank included.")
    imbalance: float | None = column("Largest over mean number of selections a slot's rank receives.")
    gini: float | None = column("Gini coefficient of selections over ranks.")
    selections_sum: int | None = column("Valid (token, expert) selections over all ranks, mean over sets.")
    selections_remote_sum: int | None = column("Those whose expert is on another rank.")
    pairs_sum: int | None = column("(token, destination rank) pairs over all ranks, mean over sets.")
    pairs_remote_sum: int | None = column("Those whose destination is another rank.")
    selections_sent_max: int | None = column("Most selections any rank sends.")
    selections_received_max: int | None = column("Most selections any rank receives.")
    pairs_sent_max: int | None = column("Most pairs any rank sends.")
    pairs_sent_remote_max: int | None = column("Most pairs any rank sends to other ranks.")
    pairs_received_max: int | None = column("Most pairs any rank receives.")
    pairs_received_remote_max: int | None = column("Most pairs any rank receives from other ranks.")
    row_bytes: int = column("Bytes of a dispatch row, unpadded.", 0)
    scale_bytes: int = column("Bytes of its scale row, unpadded.", 0)
    padded_bytes: int = column("Row and scale row as they travel.", 0)
    combine_row_bytes: int = column("Bytes of a combine row as it travels.", 0)
    metadata_bytes: int = column("Ids and weights that travel with a row.", 0)
    protocol_bytes: int | None = column(
        "Flags, padding and re-arm per pair, largest over ranks; null where the library does not tell."
    )
    nvlink_tx_bytes: int | None = column(
        "Bytes that one pair sends over NVLink, all ranks together, by NVML's counters over a chain of its own "
        "(steady); to be set beside nvlink_wire_bytes.",
        since=4,
    )
    nvlink_rx_bytes: int | None = column("Bytes that arrive over NVLink, likewise.", since=4)
    nvlink_pairs: int | None = column("Pairs of each rank that they were counted over.", since=4)
    nvlink_wire_bytes: float | None = column(
        "Bytes that had to cross in one of those pairs, mean over their sets and seeds: the view wire_bytes of a round "
        "trip, before pairs_remote_sum was rounded.",
        since=7,
    )
    nvlink_note: str | None = column(
        "Why there are no such counts, or what they hold where they differ from nvlink_wire_bytes by more than 3 %.",
        since=4,
    )
    workspace_bytes: int | None = column("Held per rank for the exchange, largest over ranks.")
    num_sms: int = column("SMs used by the backend; 0 on the CPU, or where its library does not tell.", 0)
    sm_clock_mhz: int | None = column("Lowest SM clock of any rank's GPU, read before and after timing.", since=2)
    memory_clock_mhz: int | None = column("Lowest memory clock, likewise.", since=2)
    gpu_temperature_c: int | None = column(
        "Highest temperature of any rank's GPU, likewise, in degrees Celsius.", since=2
    )
    throttle_reasons: str | None = column(
        "What held clocks down then, sorted, joined by a space; empty if nothing did.", since=2
    )
    other_processes: int | None = column(
        "Processes on the ranks' GPUs that are none of the run's, most of any GPU before or after timing; null where"
        " NVML does not tell.",
        since=6,
    )

    measure_hash: str = column("Hash of the sources that can change a number, of backends in a --config-dir, too.", "")
    machine: str = column("Hash of what makes two machines comparable; see environment.json.", "")
    allocation_id: str = column("What was held while it ran: a job, or one local run.", "")
    git_sha: str = column("Commit of the harness; empty outside a checkout.", "")
    git_dirty: bool = column("Whether the checkout had uncommitted changes.", False)
    attempt: int = column("How often this unit had been started before, 0 for the first.", 0)
    position: int = column("Place of the backend's process group in the launch (ABBA order).", 0)
    started_at: str = column("UTC, ISO 8601.", "")
    wall_s: float | None = column("Wall time of the unit on rank 0.")


COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(Record))


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples behind one record: `values_us[rank][iteration]`."""

    phase: str
    repeat: int
    values_us: list[list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitResult:
    """Everything one unit leaves: what the store writes as one atomic file."""

    point_id: str
    launch: int
    records: tuple[Record, ...]
    samples: tuple[Samples, ...] = ()
