"""Numbers of a committed run that turned out to be wrong are flagged wherever rows are read."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store_values import CONTEXT, make_point, make_unit

from epcross.harness.analysis import frame
from epcross.harness.errors import InputError, StoreError
from epcross.harness.storing.store import (
    RunDirectory,
    compact,
    create_run,
    load_rows,
    merge,
    read_units,
    release,
    write_unit,
)
from epcross.harness.storing.withdrawn import WITHDRAWN_FILE, Withdrawal, read_withdrawn
from epcross.harness.terms import Regime

NAMED = {"backend": "shm_fence", "regime": "entry", "reason": "its clock was wrong"}
FLAGS = {
    ("shm_fence", "entry"): {"known_issue within_launch"},
    ("shm_fence", "steady"): {"within_launch"},
    ("gloo", "entry"): {""},
    ("gloo", "steady"): {""},
}
"""Of rows of which what is `NAMED` is withdrawn."""


def flags_at(path: Path) -> dict[Any, set[str]]:
    return {key: set(own["flags"]) for key, own in load_rows(path).groupby(["backend", "regime"])}


def withdraw(folder: Path, run: RunDirectory, **changes: Any) -> Path:
    (folder / WITHDRAWN_FILE).write_text(json.dumps([{"run_id": run.run_id, **NAMED, **changes}]))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Two backends, each with four repeats of a phase in steady state and of three in entry: 32 rows."""
    run = create_run(tmp_path / "runs", "s", {}, {})
    for backend in ("shm_fence", "gloo"):
        for regime in (Regime.STEADY, Regime.ENTRY):
            unit = make_unit(make_point(backend=backend, regime=regime), context=replace(CONTEXT, run_id=run.run_id))
            flags = "within_launch" if backend == "shm_fence" else ""
            write_unit(run, replace(unit, records=tuple(replace(row, flags=flags) for row in unit.records)))
    release(run.path)
    return run


@pytest.fixture
def folder(run: RunDirectory, tmp_path: Path) -> Path:
    """The same as tables, with what is `NAMED` withdrawn."""
    merge(tmp_path / "tables", [run.path])
    return withdraw(tmp_path / "tables", run)


def test_what_is_withdrawn_is_flagged_and_nothing_else(run: RunDirectory, folder: Path) -> None:
    assert read_withdrawn(folder) == (Withdrawal(run_id=run.run_id, **NAMED),)
    for source in (folder, folder / "rows.parquet"):
        assert flags_at(source) == FLAGS
    shown = frame.headline(frame.load(folder))
    assert shown.left_out == {"known_issue": 12}
    assert shown.note == "12 of 32 rows left out: 12 known_issue"
    assert len(shown.rows) == 20
    kept = frame.headline(frame.load(folder), keep=["known_issue", "throttled"])
    assert (len(kept.rows), kept.note) == (32, "flagged rows kept: 12 known_issue")


def test_units_of_a_run_are_withdrawn_likewise(run: RunDirectory) -> None:
    withdraw(run.path, run)
    assert flags_at(run.path) == FLAGS
    units, problems = read_units(run)
    assert sum(row.flags == "known_issue within_launch" for unit in units for row in unit.records) == 12
    assert problems == []
    compact(run)
    assert flags_at(run.path / "rows.parquet") == FLAGS
    (run.path / WITHDRAWN_FILE).unlink()
    assert set(load_rows(run.path / "rows.parquet")["flags"]) == {"", "within_launch"}  # as they were measured


def test_units_that_are_damaged_may_be_those_that_an_entry_names(run: RunDirectory) -> None:
    withdraw(run.path, run)
    (unit,) = (u for u in read_units(run)[0] if (u.records[0].backend, u.records[0].regime) == ("shm_fence", "entry"))
    (run.units / f"{unit.point_id}.{unit.launch}.json").write_text("")
    units, problems = read_units(run)
    assert (len(units), len(problems)) == (3, 1)
    (run.units / f"{unit.point_id}.{unit.launch}.json").unlink()
    with pytest.raises(StoreError, match=f"withdraws rows of shm_fence entry of {run.run_id}, and no row is of these"):
        read_units(run)


@pytest.mark.parametrize("given", ["folder", "rows.parquet", "r.parquet", "copy.parquet", "units"])
@pytest.mark.parametrize("beside", ["link", "target"])
def test_links_and_other_names_hide_nothing(run: RunDirectory, tmp_path: Path, given: str, beside: str) -> None:
    """Rows that are linked to from another folder, with the list beside the one or the other."""
    merge(tmp_path / "tables", [run.path])
    linked = tmp_path / "linked"
    linked.mkdir()
    if given == "units":
        for name in ("run", "plan", "environment"):
            (linked / f"{name}.json").write_bytes((run.path / f"{name}.json").read_bytes())
        (linked / "units").symlink_to(run.units)
        path, target = linked, run.path
    else:
        name = "rows.parquet" if given == "folder" else given
        path, target = linked if given == "folder" else linked / name, tmp_path / "tables"
        if given == "copy.parquet":
            (linked / name).write_bytes((target / "rows.parquet").read_bytes())
            target = linked
        else:
            (linked / name).symlink_to(target / "rows.parquet")
    withdraw(linked if beside == "link" else target, run)
    assert flags_at(path) == FLAGS


def test_rows_of_another_run_that_come_later_are_not_touched(run: RunDirectory, folder: Path, tmp_path: Path) -> None:
    other = create_run(tmp_path / "runs", "s", {}, {})
    point = make_point(backend="shm_fence", regime=Regime.ENTRY, tokens=8)
    write_unit(other, make_unit(point, context=replace(CONTEXT, run_id=other.run_id)))
    assert merge(folder, [other.path]).added == 12
    rows = load_rows(folder)
    assert set(rows[rows["run_id"] == other.run_id]["flags"]) == {""}
    assert (rows["flags"] == "known_issue within_launch").sum() == 12


def test_rows_without_such_a_file_stay_as_they_are(run: RunDirectory, folder: Path) -> None:
    (folder / WITHDRAWN_FILE).unlink()
    assert read_withdrawn(folder) == ()
    assert set(load_rows(folder)["flags"]) == {"", "within_launch"}
    assert set(load_rows(run.path)["flags"]) == {"", "within_launch"}


def test_a_run_is_merged_again_and_stays_withdrawn(run: RunDirectory, folder: Path, tmp_path: Path) -> None:
    before = (folder / "rows.parquet").read_bytes()
    for source in (run.path, folder):
        assert merge(folder, [source]).added == 0
    other = create_run(tmp_path / "runs", "s", {}, {})
    write_unit(other, make_unit(make_point(tokens=8), context=replace(CONTEXT, run_id=other.run_id)))
    assert merge(folder, [other.path, run.path]).added == 4
    assert (load_rows(folder)["flags"] == "known_issue within_launch").sum() == 12
    (folder / WITHDRAWN_FILE).unlink()
    assert set(load_rows(folder)["flags"]) == {"", "within_launch"}  # they stand as they were measured
    assert before != (folder / "rows.parquet").read_bytes()


def test_merged_elsewhere_they_carry_the_flag_along(run: RunDirectory, folder: Path, tmp_path: Path) -> None:
    merge(tmp_path / "more", [folder])
    assert (load_rows(tmp_path / "more")["flags"] == "known_issue within_launch").sum() == 12
    merge(tmp_path / "older", [run.path])
    with pytest.raises(StoreError, match="12 keys have two different rows") as caught:  # not withdrawn there
        merge(tmp_path / "older", [folder])
    first, *named, more = str(caught.value).splitlines()
    assert "12 of them differ only in that a withdrawn.json withdraws one and not the other: put the same" in first
    assert [line.endswith(" differ in flags") for line in named] == [True] * 5
    assert more == "  - and 7 more"
    withdraw(tmp_path / "older", run)
    assert merge(tmp_path / "older", [folder]).present == 32


def test_a_withdrawn_copy_and_an_older_one_are_told_from_copies_that_came_apart(
    run: RunDirectory, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"12 rows are there twice .* One copy withdraws them by its withdrawn.json"):
        frame.load(folder, run.path)
    withdraw(run.path, run)
    assert len(frame.load(folder, run.path)) == 32
    changed = create_run(tmp_path / "other", "s", {}, {})
    for unit in read_units(run)[0]:
        rows = tuple(replace(row, reason=None, hidden=row.hidden * 2) for row in unit.records)
        write_unit(changed, replace(unit, records=rows))
    with pytest.raises(InputError, match="Two copies of one run have come apart"):
        frame.load(folder, changed.path)


RIGHT = {"run_id": "r", **NAMED}


@pytest.mark.parametrize("of", ["tables", "run"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "is no JSON"),
        ("\xff", "is no JSON"),
        ("{}", "holds dict in place of a list"),
        ("[1]", "entry 0 has int; write a list of objects with run_id, backend, regime, reason"),
        ('[{"backend": "shm_fence", "regime": "entry"}]', "entry 0 has backend, regime; write"),
        (json.dumps([NAMED]), "entry 0 has backend, reason, regime; write"),
        (json.dumps([RIGHT, {**RIGHT, "regime": 3}]), "entry 1: regime is 3; write"),
        (json.dumps([{**RIGHT, "reason": " "}]), "entry 0: reason is ' '; write"),
        (json.dumps([{**RIGHT, "reason": "a\nb"}]), r"entry 0: reason is 'a\nb', which pages cannot hold"),
        (json.dumps([{**RIGHT, "reason": "a\x1b[2J"}]), "which pages cannot hold; write one line without control"),
        (json.dumps([{**RIGHT, "reason": "a\u2028b"}]), "which pages cannot hold"),
        (json.dumps([{**RIGHT, "reason": "a\ud800"}]), "which pages cannot hold"),
        (json.dumps([{**RIGHT, "reason": "a <!-- /evidence -->"}]), "which pages cannot hold"),
        (json.dumps([{**RIGHT, "reason": "a --> b"}]), "which pages cannot hold"),
        (json.dumps([RIGHT]), "withdraws rows of shm_fence entry of r, and no row is of these; correct the entry"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_with_its_path(
    run: RunDirectory, folder: Path, of: str, text: str, words: str
) -> None:
    place = {"tables": folder, "run": run.path}[of]
    (place / WITHDRAWN_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(StoreError) as caught:
        load_rows(place)
    assert words in str(caught.value)
    assert str(place / WITHDRAWN_FILE) in str(caught.value)


def test_an_entry_must_name_rows_of_its_regime(run: RunDirectory, folder: Path) -> None:
    withdraw(folder, run, regime="spans")
    there = ", ".join(f"{backend} {regime} of {run.run_id}" for backend, regime in sorted(FLAGS))
    with pytest.raises(StoreError, match=f"shm_fence spans of {run.run_id}, and no row .* There are {there}$"):
        load_rows(folder)


def test_a_reason_in_other_letters_is_read(run: RunDirectory, folder: Path) -> None:
    withdraw(folder, run, reason="l’horloge était fausse (10 µs), a->b")
    assert flags_at(folder) == FLAGS


def test_a_link_to_nothing_is_not_taken_for_no_file(folder: Path) -> None:
    (folder / WITHDRAWN_FILE).unlink()
    (folder / WITHDRAWN_FILE).symlink_to(folder / "gone.json")
    with pytest.raises(StoreError, match=rf"{WITHDRAWN_FILE} is a link to nothing"):
        load_rows(folder)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_something_else_in_its_place_is_refused(folder: Path, make: Callable[[Path], None]) -> None:
    (folder / WITHDRAWN_FILE).unlink()
    make(folder / WITHDRAWN_FILE)
    with pytest.raises(StoreError, match=rf"{WITHDRAWN_FILE} cannot be read: it is "):
        load_rows(folder)
