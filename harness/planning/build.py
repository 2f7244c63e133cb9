"""From a resolved configuration, or from a point of another plan, to a plan. Runs nothing."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from epcross.harness.errors import ConfigError
from epcross.harness.planning.assemble import Assembler, assignments
from epcross.harness.planning.checks import MAX_EP_SIZE, same_labels
from epcross.harness.planning.config import Config, resolve
from epcross.harness.planning.draw import drawn_points
from epcross.harness.planning.impossible import impossible_points
from epcross.harness.planning.paths import absolute
from epcross.harness.planning.plan import SLURM, Impossible, Job, Plan, SoakPlan
from epcross.harness.planning.schema import BackendConfig, Launcher
from epcross.harness.point import Point, Timing
from epcross.harness.terms import Domain, Scope, Sharing


def build(overrides: Sequence[str] = (), config_dirs: Sequence[Path] = ()) -> Plan:
    """The plan that `overrides` ask for, such as ["sweep=quickstart", "tokens_per_rank=1,8"].

    Raises:
        ConfigError: with every problem found.
    """
    config = resolve(overrides, config_dirs)
    points, soak = planned_points(config)
    backends = {name: _with_computes(config, name, points) for name in dict.fromkeys(p.backend for p in points)}
    if problems := same_labels(backends.values()):
        raise ConfigError(problems)
    impossible = impossible_points(points, backends, here=config.launcher.name != SLURM)
    return Plan(
        sweep=config.sweep,
        description=config.description,
        points=points,
        impossible=tuple(impossible.values()),
        jobs=_floor_jobs(config) if config.floor_only else _jobs(points, impossible, config.cluster.name),
        timing=config.timing,
        launcher=config.launcher,
        cluster=config.cluster,
        output_dir=absolute(config.output_dir),
        backends=backends,
        config=_resolved(config),
        soak=soak,
    )


def planned_points(config: Config) -> tuple[tuple[Point, ...], SoakPlan | None]:
    """The points of a configuration, and which cases they are if it is a soak.

    Raises:
        ConfigError: with every problem of every assignment.
    """
    if config.soak is not None:
        drawn = drawn_points(config, config.soak)
        soak = SoakPlan(seconds=config.soak.seconds, seed=config.soak.seed, cases=tuple(drawn.values()))
        return tuple(drawn), soak
    return () if config.floor_only else tuple(Assembler(config).points(config)), None


def alone(plan: Plan, point: Point, *, timing: Timing, output_dir: Path, note: str) -> Plan:
    """A plan of one point of `plan`, with its own backend's configuration; `note` says what for, and is kept.

    Raises:
        ConfigError: the backend cannot be loaded, as when its folder has gone.
    """
    backends = {point.backend: plan.backends[point.backend]}
    impossible = impossible_points([point], backends)
    return replace(
        plan,
        sweep="point",
        description=note,
        points=(point,),
        impossible=tuple(impossible.values()),
        jobs=_jobs([point], impossible, plan.cluster.name),
        launcher=Launcher(name="local"),  # wherever the run was
        timing=timing,
        output_dir=output_dir.absolute(),
        backends=backends,
        config={**plan.config, "note": note},
    )


def _with_computes(config: Config, name: str, points: Sequence[Point]) -> BackendConfig:
    """A backend's configuration with those of the expert stages that `points` have it run."""
    named = dict.fromkeys(point.compute for point in points if point.backend == name and point.compute)
    return replace(
        config.library.get("backend", name), computes={each: config.library.get("compute", each) for each in named}
    )


def _jobs(points: Sequence[Point], impossible: Mapping[Point, Impossible], cluster: str) -> tuple[Job, ...]:
    groups: dict[tuple[int, Domain, Sharing, Scope], list[Point]] = {}
    for point in points:
        if point not in impossible:
            groups.setdefault((point.ep_size, point.domain, point.sharing, point.scope), []).append(point)
    return tuple(
        Job(
            ep_size=ep_size,
            domain=domain,
            sharing=sharing,
            scope=scope,
            cluster=cluster,
            backends=tuple(dict.fromkeys(point.backend for point in members)),
            points=tuple(members),
        )
        for (ep_size, domain, sharing, scope), members in groups.items()
    )


def _floor_jobs(config: Config) -> tuple[Job, ...]:
    groups = dict.fromkeys((values["ep_size"], values["device"]) for values in assignments(config))
    wrong = [f"ep_size={n} must lie between 1 and {MAX_EP_SIZE}" for n, _ in groups if not 1 <= n <= MAX_EP_SIZE]
    if wrong:
        raise ConfigError(wrong)
    devices = {name: config.library.get("device", name) for _, name in groups}
    return tuple(
        Job(
            ep_size=ep_size,
            domain=devices[name].domain,
            sharing=devices[name].sharing,
            scope=Scope.SCALE_UP,
            cluster=config.cluster.name,
            backends=(),
            points=(),
        )
        for ep_size, name in groups
    )


def _resolved(config: Config) -> dict[str, Any]:
    resolved = {
        "sweep": config.sweep,
        "overrides": list(config.overrides),
        "config_dirs": [str(folder) for folder in config.library.folders],
        "timing": config.timing_name,
        "blocks": [asdict(block) for block in config.blocks],
        "defaults": dict(config.defaults),
        "absent_backends": list(config.absent),
    }
    return json.loads(json.dumps(resolved))  # tuples and enums as JSON has them, so that a stored plan equals this one
