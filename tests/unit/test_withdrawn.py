"""Numbers of a committed run that turned out to be wrong are flagged wherever rows are read."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from store_values import CONTEXT, make_point, make_unit

from epcross.harness.analysis import frame
from epcross.harness.errors import StoreError
from epcross.harness.storing.store import RunDirectory, create_run, load_rows, merge, release, write_unit
from epcross.harness.storing.withdrawn import WITHDRAWN_FILE, Withdrawal, read_withdrawn
from epcross.harness.terms import Regime

ENTRY = {"backend": "shm_fence", "regime": "entry", "reason": "its clock was wrong"}


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
    """The same as tables, with `ENTRY` withdrawn."""
    merge(tmp_path / "tables", [run.path])
    (tmp_path / "tables" / WITHDRAWN_FILE).write_text(json.dumps([ENTRY]))
    return tmp_path / "tables"


def test_what_is_withdrawn_is_flagged_and_nothing_else(folder: Path) -> None:
    assert read_withdrawn(folder) == (Withdrawal(**ENTRY),)
    for source in (folder, folder / "rows.parquet"):
        rows = load_rows(source)
        flags = {key: set(own["flags"]) for key, own in rows.groupby(["backend", "regime"])}
        assert flags == {
            ("shm_fence", "entry"): {"known_issue within_launch"},
            ("shm_fence", "steady"): {"within_launch"},
            ("gloo", "entry"): {""},
            ("gloo", "steady"): {""},
        }
    shown = frame.headline(frame.load(folder))
    assert shown.left_out == {"known_issue": 12}
    assert len(shown.rows) == 20


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
    with pytest.raises(StoreError, match="12 keys have two different rows"):  # these were not withdrawn there
        merge(tmp_path / "older", [folder])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "is no JSON"),
        ("\xff", "is no JSON"),
        ("{}", "holds dict in place of a list"),
        ("[1]", "entry 0 has int; write a list of objects with backend, regime, reason"),
        ('[{"backend": "shm_fence", "regime": "entry"}]', "entry 0 has backend, regime; write"),
        (json.dumps([ENTRY, {**ENTRY, "regime": 3}]), "entry 1: regime is 3; write"),
        (json.dumps([{**ENTRY, "reason": " "}]), "entry 0: reason is ' '; write"),
        (
            json.dumps([{**ENTRY, "regime": "spans"}]),
            "withdraws rows of shm_fence spans, and no row is of these",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_with_its_path(folder: Path, text: str, words: str) -> None:
    (folder / WITHDRAWN_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(StoreError) as caught:
        load_rows(folder)
    assert words in str(caught.value)
    assert str(folder / WITHDRAWN_FILE) in str(caught.value)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_something_else_in_its_place_is_refused(folder: Path, make: Callable[[Path], None]) -> None:
    (folder / WITHDRAWN_FILE).unlink()
    make(folder / WITHDRAWN_FILE)
    with pytest.raises(StoreError, match=rf"{WITHDRAWN_FILE} cannot be read: it is "):
        load_rows(folder)
