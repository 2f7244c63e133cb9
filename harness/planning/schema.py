"""The values a configuration resolves to, besides those of `point.py`. Plain dataclasses: workers read them too."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from epcross.harness.point import Scalar
from epcross.harness.terms import Domain, Sharing, WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownIssue:
    """A known defect of some versions; rows of such a version carry the flag `known_issue` (see `known_issues.py`)."""

    versions: str  # a PEP 440 specifier, such as "<1.3" or "==2.0.*"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeConfig:
    """What `conf/compute/NAME.yaml` says: an expert stage for layers."""

    name: str
    target: str  # module:Class, of epcross.kernels.experts.compute.ExpertCompute
    label: str
    options: Mapping[str, Scalar] = field(default_factory=dict)
    folder: str = ""  # as of a backend


MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h", "d", "8")
"""Of points in figures, as matplotlib calls them: all filled, so that a filling can tell runs apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """What `conf/backend/NAME.yaml` says. `name` and `folder` come from the place of the file."""

    name: str
    target: str  # module:Class
    label: str  # in tables and figures
    color: str  # "#rrggbb"
    marker: str = ""  # of its points in figures, one of `MARKERS`; empty: any that is free
    options: Mapping[str, Scalar] = field(default_factory=dict)
    python: str | None = None  # interpreter of its workers; None: the one that runs the harness
    env: Mapping[str, str] = field(default_factory=dict)  # of its workers, set before they start
    known_issues: tuple[KnownIssue, ...] = ()
    engines: Mapping[str, str] | None = None  # how serving engines call it, in words
    compute: str = ""  # of a layer: the expert stage that it has unless compute= names another
    weight_format: WeightFormat | None = None  # of a layer: likewise; None: what goes with the activations
    folder: str = ""  # the --config-dir it came from; its module may lie there
    computes: Mapping[str, ComputeConfig] = field(default_factory=dict)  # those that the plan has it run; in no file

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values from which `from_json` rebuilds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "BackendConfig":
        """The configuration that `to_json` described."""
        weight_format = data["weight_format"]
        changed = {
            "known_issues": tuple(KnownIssue(**issue) for issue in data["known_issues"]),
            "weight_format": None if weight_format is None else WeightFormat(weight_format),
            "computes": {name: ComputeConfig(**compute) for name, compute in data["computes"].items()},
        }
        return cls(**{**data, **changed})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Where ranks run. All but name and note is for Slurm, and what is empty is left to the site."""

    name: str
    note: str = ""
    arch: str = ""  # of the nodes: x86_64 or aarch64
    gpus_per_node: int = 0
    cores_per_node: int = 0  # 0: not known; estimates take this host's
    nodes_per_domain: int = 1  # nodes whose GPUs share one NVLink domain
    ranks_per_node: int = 0  # most ranks of domain cpu on a node; 0: any number
    account: str = ""
    partition: str = ""
    qos: str = ""
    constraint: str = ""
    nodelist: str = ""
    exclude: str = ""
    exclusive: bool = False
    segment: bool = False  # ask for all nodes inside one block, `--segment`, where Slurm knows the topology
    time_min: int = 60  # time limit of one job; longer jobs are requeued and go on
    mem_gb_per_node: int = 0  # 0: the site's default
    cpus_per_rank: int = 0  # 0: the site's default
    sbatch: tuple[str, ...] = ()  # further options, each as on a #SBATCH line: --name=value
    setup: tuple[str, ...] = ()  # shell lines before the ranks start
    srun_args: tuple[str, ...] = ("--cpu-bind=none", "--kill-on-bad-exit=0")
    container: str = ""  # image for pyxis; `python` is then the one inside
    container_mounts: tuple[str, ...] = ()
    python: str = ""  # command on the compute nodes; empty: the interpreter that submits
    signal_delay_s: int = 120  # the warning comes this long before the time limit
    max_requeues: int = 20
    max_array_size: int = 1000
    max_jobs: int = 0  # jobs of one run that may be in the queue; 0: any number


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """How ranks are started."""

    name: str
    note: str = ""
    points_per_job: int = 0  # Slurm: split larger jobs into arrays, keeping what is compared together; 0: never


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a rank is, hence the domain of its rows."""

    domain: Domain
    sharing: Sharing = Sharing.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Points as a product: every axis of `grid` with every row of each zipped table, less what `exclude` matches."""

    grid: Mapping[str, Any] = field(default_factory=dict)  # factor -> value or list of values
    zip: tuple[Mapping[str, Any], ...] = ()  # each: factor -> list, all of one length, stepped together
    exclude: tuple[Mapping[str, Any], ...] = ()  # each: factor -> value or list; all must match


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """Makes a sweep a stress: cases are drawn at random from its product and soaked until the time is over."""

    seconds: float  # of the whole run
    case_s: float = 0.5  # that many seconds for each case: with `seconds`, how many are drawn
    seed: int = 1  # of the draw
    only: int | None = None  # this case alone, with all of the time


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What `sweeps/NAME.yaml` says. Each entry of `blocks` adds to the common grid, zip and exclude."""

    description: str
    timing: str = ""  # chosen options of these groups, unless the command line chooses
    cluster: str = ""
    launcher: str = ""
    grid: Mapping[str, Any] = field(default_factory=dict)
    zip: tuple[Mapping[str, Any], ...] = ()
    exclude: tuple[Mapping[str, Any], ...] = ()
    blocks: tuple[Block, ...] = ()
    floor_only: bool = False  # no backends: measure the floor at each EP size
    soak: Soak | None = None
    awaits: tuple[str, ...] = ()  # backends that may not be here yet: left out where there is none of the name

    def products(self) -> tuple[Block, ...]:
        """The blocks with the common part merged in; the sweep is their union, in order."""
        return tuple(
            Block(
                grid={**self.grid, **block.grid},
                zip=self.zip + block.zip,
                exclude=self.exclude + block.exclude,
            )
            for block in self.blocks or (Block(),)
        )
