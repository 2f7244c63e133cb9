"""What the doctor found, for people and as JSON."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from epcross.harness.doctor.facts import Facts
from epcross.harness.doctor.findings import Finding, Severity, in_words

_STYLES = {Severity.STOPS: "bold red", Severity.COSTS: "yellow", Severity.NOTE: "green"}


def verdict(found: Sequence[Finding]) -> str:
    """One line."""
    count = Counter(finding.severity for finding in found)
    if count[Severity.STOPS]:
        return f"Not ready: {count[Severity.STOPS]} finding(s) stop the sweep."
    if count[Severity.COSTS]:
        return f"Ready, at a cost: {count[Severity.COSTS]} finding(s) cost numbers or baselines."
    return "Ready."


def is_ready(found: Sequence[Finding]) -> bool:
    """Whether nothing stops the sweep."""
    return not any(finding.severity is Severity.STOPS for finding in found)


def show(facts: Sequence[Facts], found: Sequence[Finding], out: Console) -> None:
    """Print ranks, baselines, findings and the verdict."""
    out.print(_ranks_table(facts))
    for line in _common_lines(facts):
        out.print(Text(line), soft_wrap=True)
    out.print(_baselines_table(facts))
    for finding in found:
        line = Text(f"{finding.severity}: ", style=_STYLES[finding.severity])
        line.append(f"{finding.subject}: {finding.text}", style="")
        out.print(line, soft_wrap=True)
        if finding.next_step:
            out.print(Text(f"    next: {finding.next_step}"), soft_wrap=True)
    out.print(Text(verdict(found), style="bold"))


def document(facts: Sequence[Facts], found: Sequence[Finding]) -> dict[str, Any]:
    """Everything, as plain JSON values."""
    return {
        "ready": is_ready(found),
        "verdict": verdict(found),
        "findings": [
            {"severity": str(f.severity), "subject": f.subject, "text": f.text, "next": f.next_step} for f in found
        ],
        "ranks": [{**fact.to_json(), "domain": fact.domain} for fact in facts],
    }


def _ranks_table(facts: Sequence[Facts]) -> Table:
    gpus = any(fact.gpus for fact in facts)
    table = Table(expand=True, title="Ranks", title_justify="left")
    table.add_column("rank", justify="right")
    table.add_column("node", ratio=1)
    if gpus:
        table.add_column("GPU", ratio=2)
        for heading in ("links", "fabric", "domain", "IMEX", "MHz", "free"):
            table.add_column(heading, ratio=1 if heading == "domain" else None)
    else:
        table.add_column("cores", justify="right")
    table.add_column("/dev/shm", justify="right")
    for fact in facts:
        cells = [str(fact.seat.rank), fact.seat.node, *(_gpu_cells(fact) if gpus else [str(fact.cores)])]
        cells.append("-" if fact.shm_free_bytes is None else f"{fact.shm_free_bytes / 1e9:.1f} GB")
        table.add_row(*map(Text, cells))
    return table


def _gpu_cells(fact: Facts) -> list[str]:
    gpu = fact.gpu
    if gpu is None:
        return ["none of its own", *["-"] * 6]
    marks = " MIG" if gpu.mig else ""
    fabric = gpu.fabric.state if not gpu.fabric.is_absent else "none"
    return [
        f"{gpu.index} {gpu.name} {gpu.uuid[:12]}{marks}{' MPS' if fact.mps else ''}",
        str(gpu.links),
        fabric,
        fact.domain if fact.domain != fact.seat.node else "node",
        str(fact.imex_channels),
        f"{gpu.sm_mhz}/{gpu.max_sm_mhz}",
        f"{gpu.free_bytes / 1e9:.0f} GB",
    ]


def _common_lines(facts: Sequence[Facts]) -> list[str]:
    """What is usually the same everywhere."""
    first = facts[0]
    lines = [f"{first.arch}, container {first.container}, epcross {first.version}, kernel cache {first.cache}"]
    if first.cache_disk:
        lines[0] += f" ({first.cache_disk})"
    if any(fact.gpus for fact in facts):
        nccl = f"{first.nccl} ({first.nccl_version or 'version unknown'})" if first.nccl else "none found"
        pairs = [word for row in first.peers for word in row if word != "X"]
        peers = f"{pairs.count('OK')} of {len(pairs)} pairs" if pairs else "not known"
        lines.append(f"driver {first.driver}, CUDA {first.cuda}, libnccl {nccl}")
        lines.append(f"peer access on {first.seat.node}: {peers}")
    return lines


def _baselines_table(facts: Sequence[Facts]) -> Table:
    table = Table(expand=True, title="Baselines", title_justify="left")
    table.add_column("backend")
    table.add_column("usable")
    table.add_column("why not", ratio=1)
    asked = [fact for fact in facts if fact.backends]
    for name in asked[0].backends if asked else ():
        refused = [fact for fact in asked if fact.backends.get(name) is not None]
        if not refused:
            table.add_row(Text(name), Text("yes", style="green"), "")
        else:
            where = "" if len(refused) == len(asked) else f" ({in_words(refused)})"
            table.add_row(Text(name), Text("no", style="yellow"), Text(f"{refused[0].backends[name]}{where}"))
    return table
