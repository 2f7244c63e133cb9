"""What is checked: the protocols at the sizes that must hold, and the faults that must be found."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a run of the checker ends."""

    HOLDS = "holds"
    LOST = "a word is overwritten, or wiped out by a late re-arming"
    WRONG = "a reader finds another word than was sent"
    AHEAD = "a rank is two dispatches ahead"
    STUCK = "a rank waits for ever"
    TWICE = "two stores of a rank to one word of a peer are under way at once"
    OVERFLOW = "the model's buffers are too small"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One exhaustive search. `defines` select size and fault in the Promela source."""

    name: str
    protocol: str  # fence or sentinel; with _gpu as the kernels of onesided have it, else as shm has it
    ranks: int
    tokens: int
    rounds: int
    payload: int  # words of a row; a header follows
    expects: Verdict = Verdict.HOLDS
    defines: tuple[str, ...] = ()

    @property
    def size(self) -> str:
        """Ranks, tokens, rounds."""
        return f"{self.ranks} x {self.tokens} x {self.rounds}"

    @property
    def slug(self) -> str:
        """Name of the trace file."""
        return f"{self.protocol}-{self.name.replace(' ', '-')}"

    def arguments(self) -> list[str]:
        """Options of spin. Epochs have two bits and start with the last one: they wrap after the first round."""
        values = {
            "RANKS": self.ranks,
            "TOKENS": self.tokens,
            "ROUNDS": self.rounds,
            "PAYLOAD": self.payload,
            "EPOCHS": 4,
            "FIRST_EPOCH": 3,
        }
        return [f"-D{name}={value}" for name, value in values.items()] + [f"-D{define}" for define in self.defines]


def _two(protocol: str, name: str, *defines: str, payload: int = 2) -> Run:
    return Run(name=name, protocol=protocol, ranks=2, tokens=2, rounds=4, payload=payload, defines=defines)


def _three(protocol: str, name: str, *defines: str) -> Run:
    return Run(name=name, protocol=protocol, ranks=3, tokens=1, rounds=3, payload=1, defines=defines)


def _fault(protocol: str, name: str, expects: Verdict, *defines: str) -> Run:
    return Run(name=name, protocol=protocol, ranks=2, tokens=2, rounds=4, payload=1, expects=expects, defines=defines)


PROOFS = (
    _three("sentinel_gpu", "all scenarios", "FULL", "ALONE"),
    _three("sentinel", "all scenarios"),
    _two("sentinel", "all scenarios"),
    _two("sentinel", "no reduction", "LITERAL", "FIRST_SCENARIO=1", payload=1),
    _three("fence", "all scenarios"),
    _two("fence", "all scenarios"),
    _two("sentinel_gpu", "no reduction", "LITERAL", payload=1),
    _three("sentinel_gpu", "strict fences", "STRICT", "ALONE"),
    _two("sentinel_gpu", "all scenarios", "ALONE"),
    _two("sentinel_gpu", "strict fences", "STRICT", "ALONE"),
    _three("fence_gpu", "all scenarios", "FULL", "ALONE"),
    _two("fence_gpu", "all scenarios", "ALONE"),
)
"""Long ones first."""

LONG = (
    _three("sentinel", "every token to all", "FULL", "FIRST_SCENARIO=3"),
    _two("sentinel", "no reduction, all", "LITERAL", payload=1),
)
"""Minutes, and 1.6 GB: only on demand."""

FAULTS = (
    _fault("sentinel", "one landing set", Verdict.LOST, "ONE_SET"),
    _fault("sentinel", "re-arm too early", Verdict.WRONG, "EARLY_REARM"),
    _fault("sentinel", "no release fence", Verdict.LOST, "NO_RELEASE"),
    _fault("sentinel", "no acquire fence", Verdict.LOST, "NO_ACQUIRE", "ENTRIES=60"),
    _fault("sentinel", "epoch not advanced", Verdict.LOST, "EPOCH_STUCK"),
    _fault("sentinel", "escape not carried", Verdict.WRONG, "NO_ESCAPE"),
    _fault("sentinel", "sentinel sent raw", Verdict.STUCK, "RAW_SENTINEL"),
    _fault("fence", "no release", Verdict.WRONG, "NO_RELEASE"),
    _fault("fence", "no acquire", Verdict.WRONG, "NO_ACQUIRE"),
    _fault("fence", "flag before data", Verdict.WRONG, "FLAG_FIRST"),
    _fault("fence", "epoch not advanced", Verdict.WRONG, "EPOCH_STUCK"),
    _fault("fence", "idle ranks not awaited", Verdict.STUCK, "SKIP_IDLE"),
    _fault("sentinel_gpu", "one landing set", Verdict.LOST, "ONE_SET"),
    _fault("sentinel_gpu", "one set of headers", Verdict.STUCK, "ONE_HEADER_SET"),
    _fault("sentinel_gpu", "header without epoch", Verdict.WRONG, "NO_HEADER_EPOCH"),
    _fault("sentinel_gpu", "epoch not advanced", Verdict.WRONG, "EPOCH_STUCK"),
    _fault("sentinel_gpu", "no header from an idle rank", Verdict.STUCK, "IDLE_SILENT"),
    _fault("sentinel_gpu", "records re-armed in dispatch", Verdict.WRONG, "EARLY_REARM"),
    _fault("sentinel_gpu", "returns re-armed before read", Verdict.STUCK, "RETURNS_REARMED_EARLY"),
    _fault("sentinel_gpu", "returns re-armed in dispatch", Verdict.LOST, "RETURNS_REARMED_LATE"),
    _fault("sentinel_gpu", "no boundary", Verdict.LOST, "NO_BOUNDARY", "FIRST_SCENARIO=2", "ENTRIES=60"),
    _fault("sentinel_gpu", "kernel does not wait", Verdict.LOST, "EARLY_KERNEL"),
    _fault("sentinel_gpu", "bitmap not awaited", Verdict.WRONG, "BITMAP_NOT_AWAITED"),
    _fault("sentinel_gpu", "bitmap not sent", Verdict.STUCK, "NO_BITMAP"),
    _fault("sentinel_gpu", "bitmap not re-armed", Verdict.LOST, "BITMAP_NOT_REARMED"),
    _fault("sentinel_gpu", "sentinel sent raw", Verdict.STUCK, "RAW_SENTINEL"),
    _fault("fence_gpu", "no release", Verdict.WRONG, "NO_RELEASE"),
    _fault("fence_gpu", "flag before data", Verdict.WRONG, "FLAG_FIRST"),
    _fault("fence_gpu", "first flag only", Verdict.WRONG, "FIRST_FLAG_ONLY"),
    _fault("fence_gpu", "experts do not wait", Verdict.WRONG, "EARLY_EXPERTS"),
    _fault("fence_gpu", "combine does not wait", Verdict.WRONG, "EARLY_COMBINE"),
    _fault("fence_gpu", "epoch not advanced", Verdict.WRONG, "EPOCH_STUCK"),
    _fault("fence_gpu", "idle ranks not awaited", Verdict.WRONG, "SKIP_IDLE"),
)
