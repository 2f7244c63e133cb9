"""Checksums beside tables: whoever writes tables writes them, and a table that was edited is refused."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from store_values import CONTEXT, full_after, make_point, make_unit

from epcross.harness import cli
from epcross.harness.errors import StoreError
from epcross.harness.storing import sealed
from epcross.harness.storing.checksums import CHECKSUMS_FILE, read_sums
from epcross.harness.storing.parquet import read_samples_table, read_stored_rows
from epcross.harness.storing.sealed import seal
from epcross.harness.storing.store import (
    RunDirectory,
    compact,
    create_run,
    load_rows,
    load_samples,
    merge,
    release,
    write_checksums,
    write_unit,
)

MEASURED = Path(__file__).parents[2] / "results" / "measured"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = create_run(tmp_path / "runs", "s", {}, {})
    write_unit(run, make_unit(make_point(), context=replace(CONTEXT, run_id=run.run_id)))
    release(run.path)
    return run


@pytest.fixture
def folder(run: RunDirectory, tmp_path: Path) -> Path:
    merge(tmp_path / "tables", [run.path])
    return tmp_path / "tables"


def edit(file: Path) -> Path:
    """Every number of the table a hundredth larger than it was: by its rules alone, any run may have left it."""
    table = pq.read_table(file)
    for name in ("latency_us", "latency_min_us", "latency_max_us", "value_us"):
        if name in table.column_names:
            number = table.schema.get_field_index(name)
            table = table.set_column(number, table.schema.field(number), pc.multiply(table[name], 1.01))
    pq.write_table(table, file)
    return file


def test_whoever_writes_tables_writes_their_checksums(run: RunDirectory, folder: Path) -> None:
    compact(run)
    for place in (run.path, folder):
        sums = read_sums(place)
        assert sums is not None
        assert {name: len(each) for name, each in sums.items()} == {"rows.parquet": 1, "samples.parquet": 1}
        assert len(load_rows(place / "rows.parquet")) == 4
        assert len(load_samples(place / "samples.parquet")) == 16


def test_every_committed_table_has_its_checksum() -> None:
    for folder in sorted(path.parent for path in MEASURED.glob("*/rows.parquet")):
        sums = read_sums(folder)
        assert sums is not None, f"{folder} has no {CHECKSUMS_FILE}; make it by store.write_checksums"
        assert sums.keys() == {"rows.parquet", "samples.parquet"}
        assert len(read_samples_table(folder)) > 0


@pytest.mark.parametrize("name", ["rows.parquet", "samples.parquet"])
def test_an_edited_table_is_refused(folder: Path, name: str) -> None:
    file = edit(folder / name)
    load = load_rows if name == "rows.parquet" else load_samples
    with pytest.raises(StoreError) as caught:
        load(folder)
    words = str(caught.value)
    assert words.startswith(f"{file} was changed since it was written: its SHA-256 is ")
    assert f"..., where {folder / CHECKSUMS_FILE} allows " in words
    assert "Restore it from a copy or from version control, or merge its runs again into a new folder. Numbers" in words
    assert "withdrawn by a withdrawn.json, never edited (results/README.md)" in words
    (folder / CHECKSUMS_FILE).unlink()  # as older folders are read
    assert len(load(folder)) > 0


def test_in_a_run_directory_tables_are_made_again(run: RunDirectory) -> None:
    edit(compact(run)[0])
    with pytest.raises(StoreError, match="Make it again from the run directory's units"):
        load_rows(run.path / "rows.parquet")
    compact(run)
    assert len(load_rows(run.path / "rows.parquet")) == 4


def test_a_damaged_table_without_units_is_not_made_again_from_them(folder: Path) -> None:
    (folder / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(StoreError, match=r"is damaged or no parquet file .* Restore it from a copy") as caught:
        load_rows(folder)
    assert "units" not in str(caught.value)


def test_a_link_is_checked_by_what_lies_beside_either_end(folder: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "r.parquet").symlink_to(folder / "rows.parquet")
    assert len(load_rows(linked / "r.parquet")) == 4
    edit(folder / "rows.parquet")
    with pytest.raises(StoreError, match=rf"where {folder / CHECKSUMS_FILE} allows"):
        load_rows(linked / "r.parquet")
    shutil.copy(folder / CHECKSUMS_FILE, linked / CHECKSUMS_FILE)
    (folder / CHECKSUMS_FILE).unlink()
    assert len(load_rows(linked / "r.parquet")) == 4  # a name that is not among the sums
    (linked / "r.parquet").rename(linked / "rows.parquet")
    with pytest.raises(StoreError, match=rf"where {linked / CHECKSUMS_FILE} allows"):
        load_rows(linked)


def test_older_folders_get_theirs_once_and_by_a_merge(run: RunDirectory, folder: Path, tmp_path: Path) -> None:
    before = (folder / CHECKSUMS_FILE).read_bytes()
    (folder / CHECKSUMS_FILE).unlink()
    assert read_sums(folder) is None
    assert write_checksums(folder).read_bytes() == before
    (folder / CHECKSUMS_FILE).unlink()
    other = create_run(tmp_path / "runs", "s", {}, {})
    write_unit(other, make_unit(make_point(tokens=8), context=replace(CONTEXT, run_id=other.run_id)))
    assert merge(folder, [other.path]).added == 4
    sums = read_sums(folder)
    assert sums is not None
    assert {len(each) for each in sums.values()} == {1}
    edit(folder / "rows.parquet")
    with pytest.raises(StoreError, match="was changed since it was written"):
        write_checksums(folder)
    with pytest.raises(StoreError, match="was changed since it was written"):
        merge(folder, [run.path])


def test_a_merge_that_is_broken_off_leaves_tables_that_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of its renames, as a kill would."""
    for renames in range(1, 9):
        other = create_run(tmp_path / "runs", "s", {}, {})
        point = make_point(tokens=8 * renames)
        write_unit(other, make_unit(point, context=replace(CONTEXT, run_id=other.run_id)))
        real, left = os.replace, renames

        def dying(source: Path, target: Path) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            real(source, target)  # noqa: B023 - used in this turn only

        before = len(load_rows(folder))
        with monkeypatch.context() as patch:
            patch.setattr(sealed.os, "replace", dying)
            with contextlib.suppress(KeyboardInterrupt):
                merge(folder, [other.path])
        assert len(load_rows(folder)) in (before, before + 4)
        assert len(load_samples(folder)) >= 4 * before
        assert merge(folder, [other.path]).added in (0, 4)
        assert len(load_rows(folder)) == before + 4


def test_where_nothing_could_be_written_nothing_is_left(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "empty"
    target.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(sealed.os, "write", full_after(4))
        with pytest.raises(StoreError, match="No space left on device"):
            merge(target, [run.path])
    assert not (target / CHECKSUMS_FILE).exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{}", "is damaged (cut or changed"),
        (seal([1]), "holds no SHA-256 sums by the names of files"),
        (seal({"rows.parquet": "ab"}), "holds no SHA-256 sums by the names of files"),
        (seal({"rows.parquet": []}), "holds no SHA-256 sums by the names of files"),
        (seal({"rows.parquet": ["ab"]}), "holds no SHA-256 sums by the names of files"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_with_its_path(folder: Path, content: bytes, words: str) -> None:
    (folder / CHECKSUMS_FILE).write_bytes(content)
    with pytest.raises(StoreError) as caught:
        load_rows(folder)
    assert words in str(caught.value)
    assert str(folder / CHECKSUMS_FILE) in str(caught.value)
    assert "Restore it and the tables beside it" in str(caught.value)


def test_a_sum_that_was_edited_is_noticed(folder: Path) -> None:
    path = folder / CHECKSUMS_FILE
    document = json.loads(path.read_bytes())
    document["content"]["rows.parquet"] = ["0" * 64]
    path.write_text(json.dumps(document))
    with pytest.raises(StoreError, match="is damaged"):
        load_rows(folder)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_something_else_in_its_place_is_refused(folder: Path, make: Callable[[Path], None]) -> None:
    (folder / CHECKSUMS_FILE).unlink()
    make(folder / CHECKSUMS_FILE)
    with pytest.raises(StoreError, match=rf"{CHECKSUMS_FILE} cannot be read: it is "):
        load_rows(folder)


def test_a_link_to_nothing_is_not_taken_for_no_file(folder: Path) -> None:
    (folder / CHECKSUMS_FILE).unlink()
    (folder / CHECKSUMS_FILE).symlink_to(folder / "gone.json")
    with pytest.raises(StoreError, match=rf"{CHECKSUMS_FILE} is a link to nothing"):
        load_rows(folder)


@pytest.mark.parametrize("verb", ["status", "cancel", "report", "crossover", "compare", "claims", "run --resume"])
@pytest.mark.parametrize("there", [False, True])
def test_what_is_typed_and_is_no_run_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, there: bool
) -> None:
    path = tmp_path / "typed"
    if there:
        path.mkdir()
    paths = [str(path)] * (2 if verb == "compare" else 1)
    assert cli.run([*verb.split(), *paths]) == 2
    assert str(path) in capsys.readouterr().err


RUN = MEASURED / "20261130-191311-baselines_nvlink-79d1"


def doubled(rows: pa.Table) -> pa.Table:
    return pa.concat_tables([rows, rows])


def halved(rows: pa.Table) -> pa.Table:
    """The latencies of Fence, below their own smallest samples."""
    fence = pc.equal(rows["backend"], "onesided_fence")
    number = rows.schema.get_field_index("latency_us")
    half = pc.if_else(fence, pc.divide(rows["latency_us"], 2), rows["latency_us"])
    return rows.set_column(number, rows.schema.field(number), half)


def fewer_tokens(rows: pa.Table) -> pa.Table:
    number = rows.schema.get_field_index("tokens_per_rank")
    return rows.set_column(number, rows.schema.field(number), pc.negate(rows["tokens_per_rank"]))


def renamed(rows: pa.Table) -> pa.Table:
    """As the library of another."""
    number = rows.schema.get_field_index("backend")
    names = pc.if_else(pc.equal(rows["backend"], "onesided_fence"), "ghost", rows["backend"])
    return rows.set_column(number, rows.schema.field(number), names)


@pytest.mark.parametrize("change", [doubled, halved, fewer_tokens, renamed])
@pytest.mark.parametrize("summed", [True, False])
def test_no_command_believes_an_edited_copy_of_a_committed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[pa.Table], pa.Table], summed: bool
) -> None:
    copy = tmp_path / RUN.name
    shutil.copytree(RUN, copy)
    pq.write_table(change(read_stored_rows(copy)), copy / "rows.parquet")
    if not summed:
        (copy / CHECKSUMS_FILE).unlink()
    for arguments, code in (
        (["crossover", str(copy)], 1),
        (["claims", str(copy)], 2),
        (["compare", str(RUN), str(copy)], 2),
        (["report", str(copy)], 1),
    ):
        assert cli.run(arguments) == code
        assert f"{copy / 'rows.parquet'} was changed: " in capsys.readouterr().err
