"""What was run: on which machine, with which versions, and the command that does it again."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from epcross.harness.analysis.material import Material, Run
from epcross.harness.report.again import the_same_again
from epcross.harness.report.document import Block, Table


def what_was_run(material: Material) -> list[Block]:
    """For each run a table of facts and the command."""
    blocks: list[Block] = []
    for number, run in enumerate(material.runs):
        letter = f"Run {chr(ord('A') + number)}: " if len(material.runs) > 1 else ""
        name = f"run_{chr(ord('a') + number)}" if len(material.runs) > 1 else "run"
        facts = _facts(run)
        blocks += [
            Table(name=name, title=f"{letter}{run.run_id}", head=["what", "value"], rows=[[*fact] for fact in facts]),
            *the_same_again(run),
        ]
    return blocks


def _facts(run: Run) -> list[tuple[str, str]]:
    seen = run.directory.environment
    timing = run.plan.timing
    facts = [
        ("sweep", f"{run.directory.sweep}: {run.plan.description}".rstrip(": ")),
        ("created", run.directory.created),
        ("points", f"{len(run.plan.points)} planned, {len(run.plan.impossible)} of them known to be impossible there"),
        (
            "repeats",
            f"{timing.launches} launches x {timing.seeds} seeds x {timing.chains} chains; chains of "
            f"{timing.chain_ms:g} ms, entry series of {timing.iterations} iterations",
        ),
        *_machine(seen),
        ("epcross", _value(seen.get("epcross"))),
        ("commit", _commit(run)),
        ("python", _value(seen.get("python"))),
        ("compiler", _value(_at(seen, "compiler", "version"))),
        (
            "packages",
            ", ".join(f"{name} {version}" for name, version in (seen.get("packages") or {}).items() if version),
        ),
        ("backends", _versions(run)),
        ("measuring code", _distinct(run, "measure_hash")),
        ("machine hash", _distinct(run, "machine")),
    ]
    absent = seen.get("absent") or {}
    if absent:
        facts.append(("not readable", "; ".join(f"{name} ({why})" for name, why in absent.items())))
    return facts


def _machine(seen: Mapping[str, Any]) -> list[tuple[str, str]]:
    cores = _at(seen, "cpu", "cores_available")
    memory = _at(seen, "memory", "total_bytes")
    cache = _at(seen, "cpu", "last_cache_bytes")
    gpus = seen.get("gpus")
    return [
        ("host", _value(seen.get("hostname")) + (f", in {seen['container']}" if seen.get("container") else "")),
        ("processor", f"{_value(_at(seen, 'cpu', 'model'))}, {_value(_at(seen, 'cpu', 'architecture'))}"),
        ("cores", f"{len(cores)} available" if cores is not None else "unknown"),
        ("last cache", f"{cache / 2**20:g} MiB" if cache else "unknown"),
        ("memory", f"{memory / 2**30:.1f} GiB" if memory else "unknown"),
        ("load at start", _value(_at(seen, "clocks", "load_1min"))),
        ("kernel", _value(seen.get("kernel"))),
        ("GPUs", _gpus(gpus) if gpus else "none seen"),
    ]


def _gpus(gpus: Sequence[Mapping[str, Any]]) -> str:
    """How many of which product, with which driver."""
    kinds = Counter((str(gpu.get("name")), str(gpu.get("driver_version"))) for gpu in gpus)
    return ", ".join(f"{count} x {name}, driver {driver}" for (name, driver), count in kinds.items())


def _commit(run: Run) -> str:
    found = sorted({(row.git_sha, row.git_dirty) for row in run.records})
    words = [f"{sha}{', with uncommitted changes' if dirty else ''}" for sha, dirty in found if sha]
    return "; ".join(words) or "unknown: not run from a checkout"


def _versions(run: Run) -> str:
    found = sorted({(row.backend, row.backend_version or "version unknown") for row in run.records})
    return ", ".join(f"{name} {version}" for name, version in found) or "none reported"


def _distinct(run: Run, column: str) -> str:
    return ", ".join(sorted({str(getattr(row, column)) for row in run.records} - {""})) or "unknown"


def _at(seen: Mapping[str, Any], *names: str) -> Any:
    value: Any = seen
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _value(value: object) -> str:
    return "unknown" if value is None else str(value)
