"""From the facts of all ranks to findings: what is wrong, whom it stops, and the next step. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from epcross.harness.doctor import gpu_rules
from epcross.harness.doctor.facts import Facts, is_network
from epcross.harness.doctor.findings import Finding, Severity, Wanted, differ, grouped, in_words

SHM_LEAST_BYTES = 256 << 20
"""For NCCL and the workers of a node; Docker's default is 64 MiB."""


def examine(facts: Sequence[Facts], wanted: Wanted) -> list[Finding]:
    """Everything that the facts tell, worst first."""
    rules: list[Callable[[Sequence[Facts], Wanted], Iterable[Finding]]] = [_alike, _room, _caches, _locks]
    if wanted.gpus:
        rules += gpu_rules.RULES
    else:
        rules += [_cores]
    found = [finding for rule in rules for finding in rule(facts, wanted)]
    return sorted(dict.fromkeys(found), key=lambda finding: list(Severity).index(finding.severity))


def _alike(facts: Sequence[Facts], wanted: Wanted) -> Iterator[Finding]:
    stops, costs = Severity.STOPS, Severity.COSTS
    yield from differ(facts, "epcross", lambda f: f.version, stops, "install one version on every node")
    yield from differ(facts, "code", lambda f: f.measure_hash[:12], stops, "let every node see the same checkout")
    yield from differ(facts, "driver", lambda f: f.driver, costs, "take nodes with one driver (cluster.constraint)")
    yield from differ(facts, "CUDA", lambda f: f.cuda, costs, "take nodes with one driver (cluster.constraint)")
    if wanted.gpus:
        yield from differ(
            facts, "GPUs", lambda f: f.gpu.name if f.gpu else "", stops, "take nodes of one kind (cluster.constraint)"
        )
    wrong = [fact for fact in facts if wanted.arch and fact.arch != wanted.arch]
    if wrong:
        yield Finding(
            severity=stops,
            subject="architecture",
            text=f"{wrong[0].arch} at {in_words(wrong)}, and the cluster's file says {wanted.arch}",
            next_step="correct cluster.arch, or take other nodes",
        )


def _cores(facts: Sequence[Facts], _wanted: Wanted) -> Iterator[Finding]:
    few = [fact for fact in facts if 0 < fact.cores < fact.seat.local_size]
    if few:
        yield Finding(
            severity=Severity.COSTS,
            subject="cores",
            text=f"{few[0].cores} for {few[0].seat.local_size} ranks at {in_words(few)}; rows are oversubscribed",
            next_step="lower ep_size, or ask for more (cluster.cpus_per_rank=1, cluster.exclusive=true)",
        )


def _room(facts: Sequence[Facts], wanted: Wanted) -> Iterator[Finding]:
    needed = max(wanted.shm_bytes, SHM_LEAST_BYTES if wanted.gpus else 0)
    small = [fact for fact in facts if fact.shm_free_bytes is not None and fact.shm_free_bytes < needed]
    if small:
        least = min(fact.shm_free_bytes or 0 for fact in small)
        yield Finding(
            severity=Severity.STOPS if least < wanted.shm_bytes else Severity.COSTS,
            subject="/dev/shm",
            text=f"{least / 1e6:.0f} MB are free at {in_words(small)}, and {needed / 1e6:.0f} MB are needed",
            next_step="docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm; or lower max_tokens_per_rank",
        )


def _caches(facts: Sequence[Facts], _wanted: Wanted) -> Iterator[Finding]:
    closed = [fact for fact in facts if not fact.cache_writable]
    if closed:
        yield Finding(
            severity=Severity.STOPS,
            subject="kernel cache",
            text=f"{closed[0].cache} cannot be written at {in_words(closed)}",
            next_step="set EPCROSS_CACHE_DIR to a writable folder on the node's own disk (cluster.setup)",
        )
    shared = [fact for fact in facts if is_network(fact.cache_disk)]
    if shared:
        yield Finding(
            severity=Severity.COSTS,
            subject="kernel cache",
            text=f"{shared[0].cache} is on {shared[0].cache_disk} at {in_words(shared)}: slow, and stale for others",
            next_step="cluster.setup: export EPCROSS_CACHE_DIR=/tmp/epcross-$USER",
        )


def _locks(facts: Sequence[Facts], _wanted: Wanted) -> Iterator[Finding]:
    for problem, members in grouped(facts, lambda f: f.locks_refused).items():
        if problem:
            yield Finding(
                severity=Severity.STOPS,
                subject="locks",
                text=f"{problem} (at {in_words(members)})",
                next_step="export EPCROSS_LOCKS=FOLDER before the command, or in cluster.setup",
            )
