"""From a request to facts and findings."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from epcross.harness.doctor import ranks
from epcross.harness.doctor.facts import Facts
from epcross.harness.doctor.findings import Finding
from epcross.harness.doctor.rules import examine
from epcross.harness.doctor.wanted import read_request
from epcross.harness.errors import ConfigError
from epcross.harness.terms import Domain


def examine_request(
    words: Sequence[str], config_dirs: tuple[Path, ...], nodes: int | None, folder: Path, wait_s: float
) -> tuple[list[Facts], list[Finding]]:
    """Look at the ranks that `words` ask for, and judge.

    Raises:
        EpcrossError: the request cannot be read, or the cluster gives no answer.
    """
    request = read_request(words, config_dirs, nodes)
    wanted = request.wanted
    if request.layout is not None:
        facts = ranks.on_cluster(request.plan.cluster, request.layout, folder, config_dirs, wait_s)
        return facts, examine(facts, wanted)
    if nodes is not None:
        raise ConfigError("--nodes is for a cluster; add cluster=NAME")
    size = max((job.ep_size for job in request.plan.jobs), default=1) if _has_sweep(words) else 1
    facts = ranks.here(size, config_dirs)
    seen = facts[0].visible_gpus
    if not _has_sweep(words) and seen:  # a host with GPUs: all of them, one rank each
        wanted = dataclasses.replace(wanted, domain=Domain.NVLINK)
        facts = ranks.spread(facts[0], len(seen))
    return facts, examine(facts, wanted)


def _has_sweep(words: Sequence[str]) -> bool:
    return any(word.startswith("sweep=") for word in words)
