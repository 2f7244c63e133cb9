"""Rules about GPUs, their NVLink domain, and how ranks come to each other's memory. Pure."""

import errno
from collections.abc import Iterator, Sequence

from epcross.harness.doctor.facts import Facts
from epcross.harness.doctor.findings import Finding, Severity, Wanted, differ, grouped, in_words
from epcross.harness.measuring.gpu_state import slowed
from epcross.harness.terms import Domain, Scope


def handles(facts: Sequence[Facts]) -> tuple[str, dict[str, list[int]]]:
    """How ranks can map each other's memory: `fabric`, `fd` (one host) or `none`; and what keeps whom from fabric.

    One answer for all: a rank that cannot take fabric handles decides for the others, lest they wait for each other.
    """
    missing: dict[str, list[int]] = {}
    for fact in facts:
        fabric = fact.gpu.fabric if fact.gpu else None
        if fabric is None or fabric.is_absent or not fabric.cluster:
            missing.setdefault("no NVLink fabric beyond the node", []).append(fact.seat.rank)
        elif not fabric.is_ready:
            missing.setdefault("its fabric is not ready", []).append(fact.seat.rank)
        elif not fact.imex_channels:
            missing.setdefault("no IMEX channel", []).append(fact.seat.rank)
    if not missing:
        return "fabric", {}
    return ("fd" if len({fact.seat.node for fact in facts}) == 1 else "none"), missing


def _gpus(facts: Sequence[Facts], _wanted: Wanted) -> Iterator[Finding]:
    for reason, members in grouped([f for f in facts if not f.gpus], lambda f: f.absent.get("gpus", "")).items():
        yield Finding(
            severity=Severity.STOPS,
            subject="GPUs",
            text=f"none seen at {in_words(members)}{reason and ': '}{reason}",
            next_step="name a cluster or partition with GPUs; on a host with GPUs, install the driver's nvidia-smi",
        )
    for fact in facts:
        if not fact.gpus or fact.gpu is not None:
            continue
        if fact.visible is not None and len(fact.visible_gpus) < fact.seat.local_size:
            yield Finding(
                severity=Severity.STOPS,
                subject="visible GPUs",
                text=f"{in_words([fact])} sees {len(fact.visible_gpus)} (CUDA_VISIBLE_DEVICES={fact.visible}), and is "
                f"rank {fact.seat.local_rank} of {fact.seat.local_size} there",
                next_step="ask for GPUs by node, without --gpus-per-task and --gpu-bind: ranks must see their peers'",
            )
        else:
            yield Finding(
                severity=Severity.STOPS,
                subject="GPUs",
                text=f"{in_words([fact])}: {len(fact.gpus)} GPUs for {fact.seat.local_size} ranks of the node",
                next_step="lower ep_size, or correct cluster.gpus_per_node",
            )
    mig = [fact for fact in facts if fact.gpu and fact.gpu.mig]
    if mig:
        yield Finding(
            severity=Severity.STOPS,
            subject="MIG",
            text=f"enabled at {in_words(mig)}: slices have no peer access",
            next_step="take GPUs without MIG, or have an administrator disable it (nvidia-smi -mig 0)",
        )


def _one_gpu_each(facts: Sequence[Facts], wanted: Wanted) -> Iterator[Finding]:
    if wanted.domain is not Domain.NVLINK:
        return
    for uuid, members in grouped([f for f in facts if f.gpu], lambda f: f.gpu.uuid if f.gpu else "").items():
        if len(members) > 1:
            yield Finding(
                severity=Severity.STOPS,
                subject="one GPU a rank",
                text=f"{in_words(members)} have the same GPU {uuid}",
                next_step="give each rank its own: check CUDA_VISIBLE_DEVICES, and that no node is named twice",
            )


def _peers(facts: Sequence[Facts], wanted: Wanted) -> Iterator[Finding]:
    if wanted.domain is not Domain.NVLINK:
        return
    for node, members in grouped(facts, lambda f: f.seat.node).items():
        used = sorted({fact.gpu.index for fact in members if fact.gpu})
        matrix = members[0].peers
        bad = [
            f"{a}-{b} {matrix[a][b]}"
            for a in used
            for b in used
            if a < b and b < len(matrix) and matrix[a][b] not in ("OK", "X")
        ]
        if bad:
            yield Finding(
                severity=Severity.STOPS if wanted.scope is Scope.SCALE_UP else Severity.COSTS,
                subject="peer access",
                text=f"not between these GPUs of {node}: {', '.join(bad)}",
                next_step="take GPUs that NVLink connects (nvidia-smi topo -m): bridged pairs are islands of their own",
            )


def _links(facts: Sequence[Facts], _wanted: Wanted) -> Iterator[Finding]:
    with_links = [fact for fact in facts if fact.gpu and (fact.gpu.links or fact.gpu.dead_links)]
    most = max((fact.gpu.links for fact in with_links if fact.gpu), default=0)
    fewer = [fact for fact in with_links if fact.gpu and fact.gpu.links < most]
    if fewer:
        counts = ", ".join(str(fact.gpu.links) for fact in fewer if fact.gpu)
        yield Finding(
            severity=Severity.COSTS,
            subject="NVLink",
            text=f"{counts} links are up at {in_words(fewer)}, {most} elsewhere: these ranks are slower",
            next_step="have an administrator look at the links (nvidia-smi nvlink --status), or exclude the node",
        )
    none = [fact for fact in facts if fact.gpu and not fact.gpu.links and fact.gpu.dead_links]
    if none:
        yield Finding(
            severity=Severity.STOPS,
            subject="NVLink",
            text=f"all links are down at {in_words(none)}",
            next_step="is nvidia-fabricmanager running there? systemctl status nvidia-fabricmanager",
        )


def _fabric(facts: Sequence[Facts], _wanted: Wanted) -> Iterator[Finding]:
    for fact in facts:
        fabric = fact.gpu.fabric if fact.gpu else None
        if fabric is None or fabric.is_absent or fabric.is_ready:
            continue
        status = f", status {fabric.status}" if fabric.status else ""
        yield Finding(
            severity=Severity.STOPS,
            subject="fabric",
            text=f"{in_words([fact])}: the GPU has not joined its NVLink fabric (state {fabric.state}{status}); CUDA "
            'answers "system not yet initialized" there',
            next_step="wait if it is in progress; else nvidia-fabricmanager (8-GPU node) or the rack's NMX controller "
            "is down: have an administrator start it, or exclude the node",
        )


def _domains(facts: Sequence[Facts], wanted: Wanted) -> Iterator[Finding]:
    if wanted.domain is not Domain.NVLINK:
        return
    groups = grouped(facts, lambda f: f.domain)
    table = "; ".join(f"{name}: {in_words(members)}" for name, members in groups.items())
    if len(groups) > 1 and wanted.scope is Scope.SCALE_UP:
        yield Finding(
            severity=Severity.STOPS,
            subject="NVLink domain",
            text=f"the ranks are in {len(groups)} domains ({table}); one-sided kernels cannot reach across",
            next_step="take nodes of one domain (cluster.segment=true, cluster.nodelist), or scope=scale_out with a "
            "backend that spans domains, such as gloo with device=cpu",
        )
    if len(groups) == 1 and wanted.scope is Scope.SCALE_OUT:
        yield Finding(
            severity=Severity.STOPS,
            subject="NVLink domain",
            text=f"all ranks are in one domain ({table}), so nothing would be scaled out",
            next_step="take nodes of several domains (cluster.nodelist), or scope=scale_up",
        )
    if len(groups) == 1 and wanted.scope is Scope.SCALE_UP and len(facts) > 1:
        yield Finding(severity=Severity.NOTE, subject="NVLink domain", text=f"all ranks share {table}")


def _handles(facts: Sequence[Facts], wanted: Wanted) -> Iterator[Finding]:
    if wanted.domain is not Domain.NVLINK or wanted.scope is Scope.SCALE_OUT or len(facts) < 2:
        return
    kind, missing = handles(facts)
    by_rank = {fact.seat.rank: fact for fact in facts}
    why = "; ".join(f"{reason} at {in_words([by_rank[r] for r in ranks])}" for reason, ranks in missing.items())
    if kind == "none":
        imex = next((fact.imex for fact in facts if fact.imex), "")
        yield Finding(
            severity=Severity.STOPS,
            subject="memory of peers",
            text=f"the ranks lie on several hosts, and not all can take fabric handles: {why}"
            + (f" (nvidia-imex says: {imex})" if imex else ""),
            next_step="nvidia-imex must run on every node and give the job a channel: systemctl status nvidia-imex; "
            "ls /dev/nvidia-caps-imex-channels; in a container, pass that folder in",
        )
    else:
        text = "fabric handles" if kind == "fabric" else f"file descriptors, within one host ({why})"
        yield Finding(severity=Severity.NOTE, subject="memory of peers", text=text)


def _rights(facts: Sequence[Facts], wanted: Wanted) -> Iterator[Finding]:
    if wanted.domain is not Domain.NVLINK or handles(facts)[0] == "fabric":
        return
    refused = [fact for fact in facts if fact.take_descriptor and fact.seat.local_size > 1]
    if refused:
        code = refused[0].take_descriptor
        name = errno.errorcode.get(code, f"error {code}")
        yield Finding(
            severity=Severity.STOPS,
            subject="rights",
            text=f"a rank may not take the memory of its peer ({name} from pidfd_getfd) at {in_words(refused)}, "
            f"container {refused[0].container}",
            next_step="kernel.yama.ptrace_scope=0, and in a container --cap-add=SYS_PTRACE or a seccomp profile with "
            "pidfd_getfd",
        )
    for host, members in grouped(facts, lambda f: f.seat.host or f.seat.node).items():
        if len(spaces := grouped(members, lambda f: f.pid_namespace)) > 1:
            table = "; ".join(in_words(group) for group in spaces.values())
            yield Finding(
                severity=Severity.STOPS,
                subject="PID namespace",
                text=f"ranks of {host} number processes each for itself ({table}), so they cannot find each other",
                next_step="run the ranks of a node in one container, or with --pid=host",
            )


def _clocks(facts: Sequence[Facts], _wanted: Wanted) -> Iterator[Finding]:
    slow = [fact for fact in facts if fact.gpu and fact.gpu.throttle]
    if slow:
        reasons = sorted({reason for fact in slow if fact.gpu for reason in fact.gpu.throttle})
        flag = slowed(reasons)
        yield Finding(
            severity=Severity.COSTS,
            subject="clocks",
            text=f"held back at {in_words(slow)} by {', '.join(reasons)}; rows taken so carry "
            + (f"the flag {flag}" if flag else "no flag for it"),
            next_step="let the node cool down, or ask for its power cap",
        )
    busy = [fact for fact in facts if fact.gpu and fact.gpu.processes]
    if busy:
        pids = sorted({pid for fact in busy if fact.gpu for pid in fact.gpu.processes})
        yield Finding(
            severity=Severity.COSTS,
            subject="other processes",
            text=f"somebody else's are on the GPUs of {in_words(busy)}: {', '.join(map(str, pids))}; rows taken beside "
            "them carry the flag not_alone",
            next_step="take whole nodes (cluster.exclusive=true), or have them ended",
        )


def _in_use(facts: Sequence[Facts], _wanted: Wanted) -> Iterator[Finding]:
    for holder, members in grouped(facts, lambda f: " and ".join(f.gpu.holders) if f.gpu else "").items():
        if holder:
            yield Finding(
                severity=Severity.STOPS,
                subject="GPU in use",
                text=f"by {holder}, at {in_words(members)}",
                next_step="wait until it has ended: a second run is refused, for each would spoil the other's numbers",
            )
    for problem, members in grouped(facts, lambda f: f.absent.get("locks", "")).items():
        if problem:
            yield Finding(
                severity=Severity.STOPS,
                subject="GPU lock",
                text=f"{problem} (at {in_words(members)})",
                next_step="a run needs it to keep others from the GPU: have what lies there deleted",
            )


def _memory(facts: Sequence[Facts], wanted: Wanted) -> Iterator[Finding]:
    small = [fact for fact in facts if fact.gpu and 0 < fact.gpu.free_bytes < wanted.gpu_bytes]
    if small:
        least = min(fact.gpu.free_bytes for fact in small if fact.gpu)
        yield Finding(
            severity=Severity.STOPS,
            subject="GPU memory",
            text=f"{least / 1e9:.1f} GB are free at {in_words(small)}; a rank needs {wanted.gpu_bytes / 1e9:.1f} GB",
            next_step="lower max_tokens_per_rank, raise ep_size, or free the GPU",
        )


def _mps(facts: Sequence[Facts], wanted: Wanted) -> Iterator[Finding]:
    running = [fact for fact in facts if fact.mps]
    if running and wanted.domain is Domain.NVLINK:
        yield Finding(
            severity=Severity.COSTS,
            subject="MPS",
            text=f"runs at {in_words(running)}; launches go through its server",
            next_step="stop it for this job: echo quit | nvidia-cuda-mps-control",
        )


def _nccl(facts: Sequence[Facts], _wanted: Wanted) -> Iterator[Finding]:
    yield from differ(
        facts, "libnccl", lambda f: f.nccl_version or f.nccl, Severity.COSTS, "let every node load the same one"
    )


RULES = [
    _gpus,
    _one_gpu_each,
    _peers,
    _links,
    _fabric,
    _domains,
    _handles,
    _rights,
    _clocks,
    _in_use,
    _memory,
    _mps,
    _nccl,
]
"""All of them."""
