"""A sweep for each quoted statement: it plans, says what it assumes, and measures what its claims need."""

import re
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from planning import plan_of, problems_of, sweep_file

from epcross.harness.claims.book import read_book
from epcross.harness.claims.claim import Claim, Quantity
from epcross.harness.claims.sources import SHIPPED
from epcross.harness.cli import run as cli
from epcross.harness.planning.build import build
from epcross.harness.planning.library import PACKAGE_CONF, Library
from epcross.harness.planning.plan import Plan
from epcross.harness.terms import BackendKind

BOOK = read_book([SHIPPED])
SWEEPS = sorted({claim.sweep for claim in BOOK.claims if claim.sweep} - {"soak"})
EXCHANGED = ("dispatch", "combine", "round_trip")
STAND_IN = 'target: epcross.harness.backends.shm:ShmFence\nlabel: stand-in\ncolor: "#123456"\n'


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config folder with a stand-in for each backend that a sweep is about and that this package has not."""
    folder = tmp_path_factory.mktemp("everything")
    library = Library()
    named = {name for sweep in SWEEPS for name in library.get("sweep", sweep).awaits}
    (folder / "backend").mkdir()
    for name in named - set(library.names("backend")):
        (folder / "backend" / f"{name}.yaml").write_text(STAND_IN)
    if "cuda" not in library.names("device"):
        (folder / "device").mkdir()
        (folder / "device" / "cuda.yaml").write_text("domain: nvlink\n")
    return folder


@cache
def planned(sweep: str, everything: Path) -> Plan:
    return build([f"sweep={sweep}"], [everything])


@pytest.mark.parametrize("sweep", SWEEPS)
def test_it_says_what_it_is_about_and_what_it_assumes(sweep: str) -> None:
    text = (PACKAGE_CONF / "sweep" / f"{sweep}.yaml").read_text()
    head = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))
    claims = [claim.id for claim in BOOK.claims if claim.sweep == sweep]
    assert set(re.findall(r"\b[PBD]\d\d\b", head)) == set(claims)
    assert "Assumed, since not stated:" in head
    assert "Quoted:" in text


@pytest.mark.parametrize("sweep", SWEEPS)
def test_it_plans_with_every_backend(sweep: str, everything: Path) -> None:
    plan = planned(sweep, everything)
    assert plan.config["absent_backends"] == []
    assert {point.domain for point in plan.points} == {"nvlink"}
    assert {point.backend for point in plan.points} == set(Library([everything]).get("sweep", sweep).awaits)
    assert plan.timing.launches >= 5


def _values(wanted: Any) -> list[Any]:
    if isinstance(wanted, dict):
        return list(wanted.values())
    return list(wanted) if isinstance(wanted, list | tuple) else [wanted]


def _factors(claim: Claim) -> dict[str, list[Any]]:
    """What must be planned: every stated value, and at least one of each open factor."""
    stated = {name: _values(wanted) for name, wanted in claim.where.items()}
    if claim.change:
        stated[claim.change.factor] = [claim.change.base, *claim.change.to]
    return {name: values for name, values in stated.items() if name not in ("scope", "placement", "token_spread")}


@pytest.mark.parametrize("claim", [one for one in BOOK.claims if one.sweep in SWEEPS], ids=lambda one: one.id)
def test_it_measures_what_its_claims_need(claim: Claim, everything: Path) -> None:
    factors = _factors(claim)
    stated = list(product(*factors.values()))
    for actor in filter(None, (claim.subject, claim.baseline)):
        shown = BOOK.actors[actor]
        wanted = {one if isinstance(one, str) else one.backend for one in (*shown.reproduces, *shown.replicates)}
        for values in stated:
            found = [
                point
                for point in planned(claim.sweep, everything).points
                if point.backend in wanted
                and all(_of(point, name) == value for name, value in zip(factors, values, strict=True))
                and all(_of(point, name) in allowed for name, allowed in claim.open.items())
            ]
            assert {point.backend for point in found} == wanted, values
            measured = [point for point in found if point.kind is not BackendKind.EXCHANGE or claim.phase in EXCHANGED]
            assert all(claim.phase in point.phases for point in measured if claim.phase)
            if claim.quantity is Quantity.SPREAD:
                assert len({point.tokens_per_rank for point in planned(claim.sweep, everything).points}) > 3


def _of(point: Any, name: str) -> Any:
    if name == "model":
        return point.model.name
    if name == "routing":
        return point.routing.kind
    return getattr(point, name)


SWEEP = """
description: Two backends, one of which nobody has.
awaits: ${.grid.backend}
grid: {backend: [plain, nobody_has_this], model: tiny, ep_size: 2, tokens_per_rank: [1, 2]}
"""


def test_a_backend_that_is_not_here_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = sweep_file(tmp_path, SWEEP)
    plan = plan_of("sweep=mine", more=(more,))
    assert {point.backend for point in plan.points} == {"plain"}
    assert plan.config["absent_backends"] == ["nobody_has_this"]
    assert Plan.from_json(plan.to_json()).config == plan.config
    from planning import FIXTURES

    assert cli(["plan", "sweep=mine", "--config-dir", str(FIXTURES), "--config-dir", str(more)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Left out, since there is no such backend: nobody_has_this." in out


def test_it_joins_once_it_is_there(tmp_path: Path) -> None:
    more = sweep_file(tmp_path, SWEEP)
    (more / "backend").mkdir()
    (more / "backend" / "nobody_has_this.yaml").write_text(STAND_IN)
    plan = plan_of("sweep=mine", more=(more,))
    assert {point.backend for point in plan.points} == {"plain", "nobody_has_this"}
    assert plan.config["absent_backends"] == []


def test_a_backend_that_is_not_awaited_is_a_mistake(tmp_path: Path) -> None:
    more = sweep_file(tmp_path, SWEEP.replace("awaits: ${.grid.backend}\n", ""))
    assert any("unknown backend 'nobody_has_this'" in text for text in problems_of("sweep=mine", more=(more,)))
    named = sweep_file(tmp_path, SWEEP)
    words = ("sweep=mine", "backend=nobody_has_this")
    assert any("unknown backend 'nobody_has_this'" in text for text in problems_of(*words, more=(named,)))


def test_a_sweep_without_any_backend_is_refused_by_name(tmp_path: Path) -> None:
    more = sweep_file(tmp_path, SWEEP.replace("plain, ", ""))
    (problem,) = problems_of("sweep=mine", more=(more,))
    assert problem.startswith("sweep 'mine' is about nobody_has_this, and there is no backend of these names")
    assert plan_of("sweep=mine", "backend=plain", more=(more,)).points


def test_blocks_without_a_backend_are_gone(tmp_path: Path) -> None:
    blocks = (
        "blocks:\n  - grid: {backend: nobody_has_this, regime: entry}\n  - grid: {backend: plain, regime: steady}\n"
    )
    text = f"description: x\nawaits: [nobody_has_this]\ngrid: {{model: tiny, ep_size: 2, tokens_per_rank: 1}}\n{blocks}"
    plan = plan_of("sweep=mine", more=(sweep_file(tmp_path, text),))
    assert [(point.backend, point.regime) for point in plan.points] == [("plain", "steady")]
