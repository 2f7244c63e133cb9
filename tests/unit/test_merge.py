from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from store_values import CONTEXT, full_after, make_point, make_unit

from epcross.harness.errors import StoreError
from epcross.harness.record import UnitResult
from epcross.harness.storing import sealed
from epcross.harness.storing.store import (
    MergeSummary,
    RunDirectory,
    create_run,
    load_rows,
    load_samples,
    merge,
    write_unit,
)

MakeRun = Callable[..., RunDirectory]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(*, machine: str = "beef", tokens: tuple[int, ...] = (4,), latency_us: float = 10.0) -> RunDirectory:
        run = create_run(tmp_path / "runs", "s", {}, {"machine": machine})
        for count in tokens:
            point = make_point(tokens=count)
            context = replace(CONTEXT, run_id=run.run_id, machine=machine)
            write_unit(run, make_unit(point, context=context, latency_us=latency_us))
        return run

    return make


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_runs_of_two_machines_and_of_other_points_come_together(make_run: MakeRun, tmp_path: Path):
    runs = [make_run(), make_run(machine="f00d"), make_run(tokens=(8, 16))]
    target = tmp_path / "a" / "merged"
    assert merge(target, [run.path for run in runs]) == MergeSummary(added=16, present=0)
    rows = load_rows(target)
    assert len(rows) == 16
    assert set(rows["run_id"]) == {run.run_id for run in runs}
    samples = load_samples(target)
    assert len(samples) == 16 * 4
    one = samples[(samples["run_id"] == runs[1].run_id) & (samples["repeat"] == 2) & (samples["rank"] == 0)]
    assert one["value_us"].tolist() == [12.0, 11.0]
    for run in runs:
        for name in ("run.json", "plan.json", "environment.json"):
            assert (target / "runs" / run.run_id / name).read_bytes() == (run.path / name).read_bytes()


def test_merging_again_changes_nothing(make_run: MakeRun, tmp_path: Path):
    first, second = make_run(), make_run(tokens=(8,))
    target = tmp_path / "merged"
    merge(target, [first.path, first.path, second.path])
    before = tree(target)
    for sources in ([first.path], [target], [second.path, first.path, target]):
        summary = merge(target, sources)
        assert summary.added == 0
        assert summary.present == len(load_rows(list(sources)))
        assert tree(target) == before


def test_merging_a_run_with_itself_changes_nothing(make_run: MakeRun):
    run = make_run()
    before = tree(run.path)
    assert merge(run.path, [run.path, run.path]) == MergeSummary(added=0, present=8)
    assert tree(run.path) == before
    with pytest.raises(StoreError, match=r"is a run directory .* 4 rows are not its own. Merge into a new folder"):
        merge(run.path, [make_run(tokens=(8,)).path])
    assert tree(run.path) == before


def test_the_order_of_merging_does_not_matter(make_run: MakeRun, tmp_path: Path):
    runs = [make_run(tokens=(count,)).path for count in (4, 8, 16)]
    merge(tmp_path / "at_once", runs)
    for path in reversed(runs):
        merge(tmp_path / "one_by_one", [path])
    merge(tmp_path / "of_merged", [tmp_path / "one_by_one", runs[0]])
    keys = ["point_id", "repeat"]
    frames = [
        load_rows(tmp_path / n).sort_values(keys, ignore_index=True) for n in ("at_once", "one_by_one", "of_merged")
    ]
    assert frames[0].equals(frames[1])
    assert frames[0].equals(frames[2])
    lines = [*keys, "rank", "iteration"]
    samples = [load_samples(tmp_path / n).astype({"point_id": str}) for n in ("at_once", "one_by_one", "of_merged")]
    values = [s.sort_values(lines)["value_us"].tolist() for s in samples]
    assert len(values[0]) == 12 * 4
    assert values[0] == values[1] == values[2]
    assert sorted(p.name for p in (tmp_path / "of_merged" / "runs").iterdir()) == sorted(p.name for p in runs)


def test_clashes_are_named_and_nothing_is_merged(make_run: MakeRun, tmp_path: Path):
    first, clashing = make_run(), make_run(tokens=(8, 4), latency_us=20.0)
    target = tmp_path / "merged"
    merge(target, [first.path])
    before = tree(target)
    with pytest.raises(StoreError) as caught:
        merge(target, [make_run(tokens=(32,)).path, clashing.path])
    text = str(caught.value)
    assert "4 keys have two different rows. Nothing was merged" in text
    for repeat in range(4):
        assert f"point_id {make_point().point_id}, phase round_trip, repeat {repeat}, backend_version None, " in text
    assert f"run {first.run_id} and run {clashing.run_id} differ in run_id, latency_us, latency_min_us" in text
    assert tree(target) == before
    with pytest.raises(StoreError, match="4 keys"):
        merge(tmp_path / "new", [first.path, clashing.path])
    assert not (tmp_path / "new").exists()


def test_of_many_clashes_the_first_are_named(make_run: MakeRun, tmp_path: Path):
    first, clashing = make_run(tokens=(4, 8)), make_run(tokens=(4, 8), latency_us=20.0)
    with pytest.raises(StoreError, match="8 keys have two different rows") as caught:
        merge(tmp_path / "new", [first.path, clashing.path])
    head, *named, more = str(caught.value).splitlines()
    assert head.endswith("put the runs that clash into folders of their own:")
    assert "withdrawn" not in head
    assert [line.startswith("  - point_id ") for line in named] == [True] * 5
    assert more == "  - and 3 more"


def test_another_backend_version_is_another_key(make_run: MakeRun, tmp_path: Path):
    old, new = make_run(), make_run(tokens=())
    unit = make_unit(make_point(), latency_us=5.0)
    records = tuple(replace(r, backend_version="2", run_id=new.run_id) for r in unit.records)
    write_unit(new, UnitResult(point_id=unit.point_id, launch=0, records=records))
    assert merge(tmp_path / "merged", [old.path, new.path]).added == 8


@pytest.mark.parametrize("writes", range(0, 7))
def test_a_full_disk_leaves_the_target_as_it_was(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
):
    first, second = make_run(), make_run(tokens=(8,))
    target, new = tmp_path / "merged", tmp_path / "deep" / "new"
    merge(target, [first.path])
    rows, samples = load_rows(target), load_samples(target)
    for folder in (target, new):
        with monkeypatch.context() as patch:
            patch.setattr(sealed.os, "write", full_after(writes))
            if writes == 6:  # three documents, checksums and two tables: enough
                assert merge(folder, [second.path]).added == 4
                continue
            with pytest.raises(StoreError, match="No space left on device"):
                merge(folder, [second.path])
    if writes < 6:
        assert load_rows(target).equals(rows)
        assert not (tmp_path / "deep").exists()
        assert merge(target, [second.path]).added == 4  # and it can be done afterwards
    lines = load_samples(target)
    assert len(lines) == len(samples) * 2
    assert not lines.duplicated().any()


def test_what_holds_no_rows_is_refused(tmp_path: Path):
    with pytest.raises(StoreError, match=r"rows.parquet does not exist"):
        merge(tmp_path / "new", [tmp_path])
    assert not (tmp_path / "new").exists()
