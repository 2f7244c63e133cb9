"""Rows against the plan of their run, where that lies beside them: whether each point and repeat is planned, and
whether what follows from a point is what the plan has.

A plan lies in `runs/<run_id>/` of a merged folder, and beside the rows of a run directory or of an unpacked deposit.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from epcross.harness.errors import StoreError
from epcross.harness.point import Routing
from epcross.harness.record import Record
from epcross.harness.storing.regular_file import read_regular, seats
from epcross.harness.storing.rows import canonical_json
from epcross.harness.storing.sealed import DamagedFile, read_sealed, unseal

Json = Mapping[str, Any]

FACTORS: Mapping[str, Callable[[Json], Any]] = {
    "backend": lambda point: point["backend"],
    "options": lambda point: _options(point["options"]),
    "domain": lambda point: point["domain"],
    "sharing": lambda point: point["sharing"],
    "scope": lambda point: point["scope"],
    "model": lambda point: point["model"]["name"],
    "num_experts": lambda point: point["model"]["num_experts"],
    "num_slots": lambda point: point["placement"]["num_slots"],
    "top_k": lambda point: point["model"]["top_k"],
    "hidden": lambda point: point["model"]["hidden"],
    "intermediate": lambda point: point["model"]["intermediate"],
    "ep_size": lambda point: point["ep_size"],
    "tokens_per_rank": lambda point: point["tokens_per_rank"],
    "tokens_min": lambda point: min(point["tokens"], default=0),
    "tokens_total": lambda point: sum(point["tokens"]),
    "max_tokens_per_rank": lambda point: point["max_tokens_per_rank"],
    "routing": lambda point: point["routing"]["kind"],
    "routing_params": lambda point: _routing_params(point["routing"]),
    "placement": lambda point: point["placement"]["kind"],
    "dispatch_format": lambda point: point["dispatch_format"],
    "combine_format": lambda point: point["combine_format"],
    "regime": lambda point: point["regime"],
    "kind": lambda point: point.get("kind", "exchange"),  # plans of earlier versions have only exchanges
    "compute": lambda point: point.get("compute", ""),
    "compute_options": lambda point: _options(point.get("compute_options", ())),
    "weight_format": lambda point: point.get("weight_format"),
}
"""Column -> its value at a point, as a plan describes that: what `rows.base_record` makes of a `Point`, without the
milliseconds that making hundreds of them takes."""

_NEEDED = ["run_id", "point_id", "schema_version", "launch", "seed", "chain", "repeat", *FACTORS]
_SINCE = {column.name: column.metadata["since"] for column in fields(Record)}
_ROUTING = asdict(Routing())
_NAMED = 3  # points that are not planned, as an error names them


class _Planned(NamedTuple):
    """What a plan says of its rows."""

    points: pa.Table  # point_id and the columns of `FACTORS`
    timing: Json


def plan_problems(table: pa.Table, path: Path) -> list[str]:
    """How the rows of `table`, which stand in the file at `path`, differ from the plans beside it, as sentences.

    Raises:
        StoreError: such a plan was cut or changed, or cannot be read.
    """
    problems = []
    rows, runs = table.select(_NEEDED), pc.unique(table["run_id"]).to_pylist()
    for run_id in runs:
        for seat in seats(path):
            if planned := _plan_of(seat.parent, run_id):
                own = rows if len(runs) == 1 else rows.filter(pc.equal(rows["run_id"], run_id))
                problems += [f"{problem} (plan of {run_id})" for problem in _problems(own, planned)]
                break
    return problems


def _problems(rows: pa.Table, planned: _Planned) -> list[str]:
    place = pc.index_in(rows["point_id"], planned.points["point_id"].combine_chunks())
    if place.null_count:
        unknown = sorted(set(pc.unique(rows["point_id"].filter(pc.is_null(place))).to_pylist()))
        return [f"point_id is {', '.join(unknown[:_NAMED])}, where only those of the plan's points are allowed"]
    problems = []
    for name in FACTORS:
        wanted = planned.points[name].take(place)
        alike = pc.equal(rows[name], wanted)
        if alike.null_count or _SINCE[name] > 1:
            both_null = pc.and_(pc.is_null(rows[name]), pc.is_null(wanted))
            older = pc.less(rows["schema_version"], _SINCE[name])
            alike = pc.or_(pc.or_(pc.fill_null(alike, False), both_null), older)
        if not pc.all(alike).as_py() and len(rows):
            wrong = pc.invert(alike)
            values, right = (column.filter(wrong).slice(0, 1).to_pylist()[0] for column in (rows[name], wanted))
            point_id = rows["point_id"].filter(wrong).slice(0, 1).to_pylist()[0]
            problems.append(f"{name} is {values!r} in rows of point {point_id}, where only {right!r} is allowed")
    return problems or _repeat_problems(rows, planned.timing)


def _repeat_problems(rows: pa.Table, timing: Json) -> list[str]:
    """Launch, seed and chain must be planned, and the repeat be their number."""
    numbers = {name: rows[name].to_numpy() for name in ("launch", "seed", "chain", "repeat")}
    problems = []
    for name, limit in (("launch", "launches"), ("seed", "seeds"), ("chain", "chains")):
        if (most := numbers[name].max(initial=0)) >= timing[limit]:
            problems.append(f"{name} is {most}, where only numbers below {timing[limit]} are allowed")
    right = (numbers["launch"] * timing["seeds"] + numbers["seed"]) * timing["chains"] + numbers["chain"]
    (wrong,) = np.nonzero(numbers["repeat"] != right)
    if wrong.size:
        first = wrong[0]
        launch, seed, chain, repeat = (numbers[name][first] for name in ("launch", "seed", "chain", "repeat"))
        problems.append(
            f"repeat is {repeat} at launch {launch}, seed {seed}, chain {chain}, where only {right[first]} is allowed"
        )
    return problems


def _plan_of(folder: Path, run_id: str) -> _Planned | None:
    """What the plan of this run says, if it lies in `folder` and names its points; plans of mere tests do not."""
    home = folder / "runs" / run_id
    try:
        if not (home / "plan.json").exists():
            if not (folder / "run.json").exists() or read_sealed(folder / "run.json").get("run_id") != run_id:
                return None
            home = folder
        return _planned(read_regular(home / "plan.json"))
    except DamagedFile as error:
        raise StoreError(f"{home} holds a damaged plan ({error}), so its rows cannot be checked. {_MEND}") from None
    except (LookupError, TypeError, ValueError, AttributeError, pa.ArrowException) as error:
        raise StoreError(f"{home / 'plan.json'} is no plan that this epcross can read ({error!r}). {_MEND}") from error
    except OSError as error:
        raise StoreError(f"{error.filename} cannot be read: {error.strerror}. {_MEND}") from error


@lru_cache(maxsize=16)
def _planned(raw: bytes) -> _Planned | None:
    plan = unseal(raw)
    points = plan.get("points") or ()
    if not points or any("point_id" not in point for point in points):
        return None
    columns = {"point_id": [point["point_id"] for point in points]}
    columns |= {name: [of(point) for point in points] for name, of in FACTORS.items()}
    return _Planned(pa.table(columns), plan["timing"])


def _options(pairs: Any) -> str:
    return canonical_json(dict(pairs))


def _routing_params(routing: Json) -> str:
    """As `rows.base_record` has them: what is not at its default; a file counts by its content."""
    told = {k: v for k, v in routing.items() if k not in ("kind", "path") and v != _ROUTING[k]}
    return canonical_json(told) if told else "{}"


_MEND = "Restore it from a copy or from version control"
