"""Before any rank starts: building ahead, and room in shared memory."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests._points import small_point

from _spawn import config
from epcross.harness.errors import EpcrossError, StoreError
from epcross.harness.planning.build import build
from epcross.harness.record import UnitResult
from epcross.harness.running import room, session
from epcross.harness.running.prebuild import builds, prebuild
from epcross.harness.storing import environment as environment_facts
from epcross.harness.storing.rows import failed_records
from epcross.harness.storing.store import merge, open_run, owner_of, release, write_unit
from epcross.harness.terms import Domain, Status

pytestmark = pytest.mark.beside


def test_each_backend_is_built_in_a_process_of_its_own(tmp_path: Path) -> None:
    backends = {
        "fine": config("fine"),
        "broken": config("broken", target="_spawn:FailsAtImport"),
        "lost": config("lost", python="/nonexistent/python"),
    }
    failures = prebuild(backends, tmp_path, tmp_path)
    assert failures.keys() == {"broken", "lost"}
    assert failures["broken"].startswith("building it ahead failed: ")
    assert "libfancy.so.3: cannot open shared object file" in failures["broken"]
    assert failures["lost"] == "its interpreter /nonexistent/python cannot be started: No such file or directory"


def test_a_backend_is_built_with_the_options_of_its_points() -> None:
    plain, other = (replace(small_point(), backend=name) for name in ("fixed", "other"))
    tuned = replace(plain, options=(("chunk", 4),))
    again = replace(tuned, tokens_per_rank=9, tokens=(9, 9))
    backends = {"fixed": config("fixed"), "other": config("other")}
    found = builds([plain, tuned, other, again], backends)
    assert [found[point][0] for point in (plain, tuned, other, again)] == ["fixed", "fixed-2", "other", "fixed-2"]
    assert [found[point][1].options for point in (plain, tuned)] == [dict(plain.options), {"chunk": 4}]
    assert found[tuned][1].target == backends["fixed"].target


def test_a_build_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 1000\n")
    python.chmod(0o755)
    begin = time.monotonic()
    failures = prebuild({"slow": config("slow", python=str(python))}, tmp_path, tmp_path, limit_s=0.3)
    assert time.monotonic() - begin < 5
    assert "it took longer than 0.3 s" in failures["slow"]


def test_a_plan_that_shared_memory_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = build(["sweep=smoke", f"output_dir={tmp_path}"])
    monkeypatch.setattr(room, "free_shm_bytes", lambda: 4096)
    with pytest.raises(EpcrossError, match=r"/dev/shm has 4096 bytes free and EP 2 of this sweep needs \d+: lower"):
        session.start(plan)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("change", "words"), [("measure_hash", "other code"), ("machine", "another kind of machine")])
def test_a_run_measured_by_other_code_or_elsewhere_is_not_resumed(tmp_path: Path, change: str, words: str) -> None:
    plan = build(["sweep=smoke", f"output_dir={tmp_path}"])
    first = session.start(plan)
    point = plan.points[0]
    context = replace(first.context, **{change: "f" * 16, "git_sha": "c0ffee" * 6 + "c0ff"})
    records = failed_records(point, plan.timing, 0, context, Status.ERROR, "it fell over")
    write_unit(first.run, UnitResult(point_id=point.point_id, launch=0, records=records))
    release(first.run.path)
    with pytest.raises(StoreError, match=rf"{words}.*ffffffffffff.*go back to commit c0ffeec0ffee"):
        session.resume(first.run.path)
    assert owner_of(first.run.path) is None  # refused, and nobody is kept out by it


def _with_gpus(facts: dict[str, Any], listed: Sequence[str], usable: Sequence[str] = ()) -> dict[str, Any]:
    software = {"gpus": [{"uuid": uuid} for uuid in usable]} if usable else None
    kind = {"name": "NVIDIA H200", "driver_version": "580", "memory.total": 143771}
    return {**facts, "gpus": [{"uuid": f"GPU-{uuid}", **kind} for uuid in listed], "gpu_software": software}


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        ((["a", "b"], ["a"]), (["a", "b"], ["a"]), ""),
        ((["a", "b"], []), (["b", "a"], ["b"]), ""),  # torch told nothing then: what the driver lists is compared
        ((["a", "b"], []), (["a", "c"], []), "on GPUs a and b, and here are a and c"),
        ((["a", "b"], ["a"]), (["a", "b"], ["b"]), "on GPUs a, and here are b"),
        (([], []), ([], []), "on GPUs that nobody told the UUIDs of"),
    ],
)
def test_a_run_goes_on_only_with_the_gpus_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: Any, now: Any, refused: str
) -> None:
    collect = environment_facts.collect
    monkeypatch.setattr(environment_facts, "collect", lambda: _with_gpus(collect(), *before))
    plan = build(["sweep=smoke", f"output_dir={tmp_path}"])
    first = session.start(plan)
    point = plan.points[0]
    records = failed_records(point, plan.timing, 0, first.context, Status.ERROR, "it fell over")
    records = tuple(replace(record, domain=str(Domain.NVLINK)) for record in records)
    write_unit(first.run, UnitResult(point_id=point.point_id, launch=0, records=records))
    release(first.run.path)
    monkeypatch.setattr(environment_facts, "collect", lambda: _with_gpus(collect(), *now))
    if refused:
        with pytest.raises(StoreError, match=refused):
            session.resume(first.run.path)
        assert owner_of(first.run.path) is None
    else:
        assert session.resume(first.run.path).run.environment["gpus"] == first.run.environment["gpus"]
        release(first.run.path)


def test_a_run_that_measured_nothing_goes_on_with_other_gpus_and_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = environment_facts.collect
    plan = build(["sweep=smoke", f"output_dir={tmp_path}"])
    first = session.start(plan)
    release(first.run.path)
    monkeypatch.setattr(environment_facts, "collect", lambda: _with_gpus(collect(), ["c"]))
    session.resume(first.run.path)
    assert [gpu["uuid"] for gpu in open_run(first.run.path).environment["gpus"]] == ["GPU-c"]
    release(first.run.path)


@pytest.mark.parametrize("change", ["point", "launch", "run"])
def test_units_of_another_run_are_named_and_not_counted(tmp_path: Path, change: str) -> None:
    plan = build(["sweep=smoke", f"output_dir={tmp_path}"])
    first = session.start(plan)
    point, launch, context = plan.points[0], 0, first.context
    if change == "point":
        point = replace(point, tokens_per_rank=9, tokens=(9, 9))
    if change == "launch":
        launch = plan.timing.launches
    if change == "run":
        context = replace(context, run_id="20260101-000000-other-0000")
    records = failed_records(point, plan.timing, launch, context, Status.ERROR, "it fell over")
    write_unit(first.run, UnitResult(point_id=point.point_id, launch=launch, records=records))
    release(first.run.path)
    with pytest.raises(StoreError, match=rf"what this run did not measure: {point.point_id}\.{launch}\. Move them out"):
        session.resume(first.run.path)
    assert owner_of(first.run.path) is None


def test_the_copy_of_a_run_beside_its_packed_rows_is_not_resumed(tmp_path: Path) -> None:
    plan = build(["sweep=smoke", f"output_dir={tmp_path}"])
    first = session.start(plan)
    point = plan.points[0]
    records = failed_records(point, plan.timing, 0, first.context, Status.ERROR, "it fell over")
    write_unit(first.run, UnitResult(point_id=point.point_id, launch=0, records=records))
    release(first.run.path)
    merge(tmp_path / "packed", [first.run.path])
    copy = tmp_path / "packed" / "runs" / first.run.run_id
    before = sorted(copy.iterdir())
    with pytest.raises(StoreError, match="it is the copy of a run whose rows lie in"):
        session.resume(copy)
    assert sorted(copy.iterdir()) == before


def test_a_resume_finds_its_way_in_a_tidied_folder(tmp_path: Path) -> None:
    first = session.start(build(["sweep=smoke", f"output_dir={tmp_path}"]))
    release(first.run.path)
    for folder in ("logs", "attempts", "units"):
        (first.run.path / folder).rmdir()
    (first.run.path / session.CANCEL_FILE).touch()  # came too late for the first session
    again = session.resume(first.run.path)
    assert all(folder.is_dir() for folder in (again.run.logs, again.run.attempts, again.run.units))
    assert not (first.run.path / session.CANCEL_FILE).exists()
    release(first.run.path)


def test_a_cancel_that_comes_before_the_first_turn_is_heard(tmp_path: Path) -> None:
    started = session.start(build(["sweep=smoke", f"output_dir={tmp_path}"]))
    cancel = started.run.path / session.CANCEL_FILE
    cancel.touch()
    end = started.execute()
    assert (end.end, end.reason) == ("cancelled", f"cancelled by {cancel}")
    assert not cancel.exists()
    assert owner_of(started.run.path) is None
