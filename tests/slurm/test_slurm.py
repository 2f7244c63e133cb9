"""Runs on a real Slurm: submitted, followed, cut short, resumed. Every planned row is there once in the end. And what
comes before and after: the doctor on compute nodes, and a rehearsal of the whole way from statement to verdict.

All in one file, for it is one worker's (`make test`), which starts one Slurm.
"""

import json
import time
from pathlib import Path

import pytest
from _cluster import until
from _shell import HERE, Shell

SMALL = ("sweep=grid",)
FENCE = SMALL
TWO_NODES = (*SMALL, "backend=spanning", "ep_size=4", "scope=scale_out", "timing.launches=2")
SLOW = (*TWO_NODES, "tokens_per_rank=range(1,5)", "backend.options.sleep_s=1.0")
CONF = ("--config-dir", str(HERE / "conf"))


def test_a_run_is_submitted_followed_and_whole(shell: Shell) -> None:
    run = shell.submit("sweep=smoke", "model=tiny")
    assert run.jobs.keys() == {"cpu_ep2"}
    status = run.wait("finished")
    (job,) = status["jobs"]
    assert (
        job["units"]
        == job["planned_units"]
        == status["planned_units"]
        == len(run.notes("cpu_ep2")) - len([note for note in run.notes("cpu_ep2") if note["event"] != "unit"])
    )
    assert job["starts"] == 1
    run.check_rows()
    records = [record for unit in run.results() for record in unit.records]
    assert {record.allocation_id for record in records} == {f"slurm-{run.job_id}"}
    assert (run.path / "floor.json").exists()
    assert shell("cancel", str(run.path)) == f"{run.path} has no job in the queue; nothing to cancel.\n"
    again = json.loads(shell("run", "--resume", str(run.path), "--json"))
    assert again["jobs"] == {}
    assert shell("report", str(run.path), limit_s=240).strip().endswith(".html")


def test_ranks_meet_across_nodes_and_the_map_is_recorded(shell: Shell) -> None:
    run = shell.submit(*TWO_NODES, "tokens_per_rank=3")
    until(lambda: run.notes("cpu_scale_out_ep4"), 60)
    run.wait("finished")
    run.check_rows()
    seats = run.directory.environment["slurm"]["seats"]
    assert [(seat["rank"], seat["local_rank"], seat["local_size"]) for seat in seats] == [
        (0, 0, 2),
        (1, 1, 2),
        (2, 0, 2),
        (3, 1, 2),
    ]
    nodes = [seat["node"] for seat in seats]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert set(nodes) <= set(shell.cluster.nodes)
    assert {record.scope for unit in run.results() for record in unit.records} == {"scale_out"}


def test_gloo_is_measured_across_nodes(shell: Shell) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make torch")
    run = shell.submit(*SMALL, "backend=gloo", "ep_size=2", "scope=scale_out", "tokens_per_rank=2")
    run.wait("finished")
    run.check_rows()


def test_many_points_become_arrays_within_the_site_s_limit(shell: Shell) -> None:
    words = (*SMALL, "backend=shm_fence,shm_sentinel", "tokens_per_rank=range(1,6)")
    run = shell.submit(*words, "launcher.points_per_job=2", "cluster.max_array_size=3")
    ids = list(run.jobs.values())
    assert [job_id.partition("_")[2] for job_id in ids] == ["0", "1", "2", "0", "1"]
    assert len({job_id.partition("_")[0] for job_id in ids}) == 2
    run.wait("finished")
    run.check_rows()
    by_point: dict[int, set[str]] = {}
    for unit in run.results():
        for record in unit.records:
            by_point.setdefault(record.tokens_per_rank, set()).add(record.allocation_id)
    assert {len(allocations) for allocations in by_point.values()} == {1}  # both backends of a point share it
    floor = json.loads((run.path / "floor.json").read_text())["content"]
    assert list(floor) == ["cpu_ep2"]


def test_two_hundred_points_killed_twice_leave_one_row_each(shell: Shell) -> None:
    run = shell.submit(*FENCE, "tokens_per_rank=range(1,201)", "timing.chain_ms=1.0")
    stored = 0
    for _ in range(2):
        stored = until(lambda least=stored + 20: n if (n := run.units()) > least else 0, 60)
        assert stored < 180, "too fast to be killed in the middle"
        run.kill()
        until(lambda: run.slurm_says("JobState") != "RUNNING", 30)
    status = run.wait("finished", limit_s=120)
    assert status["units"] == 200
    assert status["jobs"][0]["starts"] == 3
    run.check_rows()
    records = [record for unit in run.results() for record in unit.records]
    assert {record.allocation_id for record in records} == {f"slurm-{run.job_id}{tail}" for tail in ("", "+1", "+2")}
    # the unit in flight was begun again, and says so
    retried = [record for record in records if record.attempt]
    assert 0 < len(retried) <= 2
    assert all("retried" in record.flags.split() for record in retried)


def test_submitit_s_checkpoint_requeues_and_the_run_goes_on(shell: Shell) -> None:
    """What a time limit or a preemption does: SIGUSR2 to every process of the job."""
    run = shell.submit(*SLOW)
    until(lambda: run.units() >= 2, 60)
    shell.cluster.command("scancel", "--signal=USR2", run.job_id)
    run.wait("pending", limit_s=30)
    status = run.wait("finished", limit_s=90)
    assert status["jobs"][0]["starts"] == 2
    run.check_rows()
    stopped = [note for note in run.notes("cpu_scale_out_ep4") if note["event"] == "stopped"]
    assert {note["kind"] for note in stopped} <= {"preempted"}  # a note that Slurm may cut off


def test_cancel_and_resume(shell: Shell) -> None:
    run = shell.submit(*SLOW)
    until(lambda: run.units() >= 1, 60)
    refused = shell("run", "--resume", str(run.path), code=1)
    assert f"its job {run.job_id} is RUNNING. Wait for it" in refused
    begin = time.monotonic()
    told = shell("cancel", str(run.path))
    assert time.monotonic() - begin < 20
    assert told == f"{run.path} has ended. Go on with: epcross run --resume {run.path}\n"
    status = run.status()
    assert status["state"] == "interrupted"
    assert "cancelled" in status["jobs"][0]["why"]
    assert status["jobs"][0]["next"] == f"epcross run --resume {run.path}"
    stored = run.units()
    assert stored < 8
    run.jobs = json.loads(shell("run", "--resume", str(run.path), "--json"))["jobs"]
    run.wait("finished")
    run.check_rows()


def test_an_end_while_kernels_are_built_costs_nothing(shell: Shell) -> None:
    """Slurm signals the compilers, too: their end says nothing of a backend, and no row may say it does."""
    run = shell.submit(*TWO_NODES, "tokens_per_rank=1", "backend.options.build_s=60")
    building = lambda: len(list(run.path.glob("logs/*/prebuild.spanning.log"))) == 2  # noqa: E731
    until(building, 60)
    time.sleep(0.5)
    shell.cluster.command("scancel", run.job_id)
    status = run.wait("interrupted", limit_s=60)
    assert run.units() == status["units"] == 0
    for log in run.path.glob("logs/*/prebuild.spanning.log"):
        log.unlink()
    run.jobs = json.loads(shell("run", "--resume", str(run.path), "--json"))["jobs"]
    until(building, 60)
    assert "has ended" in shell("cancel", str(run.path))
    assert run.units() == 0
    assert run.notes("cpu_scale_out_ep4")[-1]["end"] == "cancelled"  # in good order: before Slurm was told
    assert run.slurm_says("JobState") == "COMPLETED"


def test_a_submission_that_was_cut_short_is_not_made_twice(shell: Shell) -> None:
    run = shell.submit(*FENCE, "tokens_per_rank=1", "cluster.sbatch=['--hold']")
    (run.path / "slurm" / "jobs.json").unlink()  # as if killed after sbatch had answered
    status = run.status()
    assert f"there is job {run.job_id} (PENDING) that was not noted" in status["jobs"][0]["why"]
    refused = shell("run", "--resume", str(run.path), code=1)
    assert f"its job {run.job_id} is PENDING. Wait for it" in refused
    assert "has ended" in shell("cancel", str(run.path))
    assert run.slurm_says("JobState") == "CANCELLED"


def test_a_python_that_is_not_there_is_named(shell: Shell) -> None:
    run = shell.submit(*FENCE, "tokens_per_rank=1", "cluster.python=/nowhere/python")
    status = run.wait("interrupted")
    assert "/nowhere/python: No such file or directory" in status["jobs"][0]["why"]


def test_a_pending_job_says_why_and_is_cancelled(shell: Shell) -> None:
    run = shell.submit(*FENCE, "tokens_per_rank=1", "cluster.sbatch=['--hold']")
    status = run.wait("pending")
    assert status["jobs"][0]["next"] == "it is held: scontrol release JOB"
    text = shell("status", str(run.path))
    assert "JobHeldUser" in text
    assert "next: it is held: scontrol release JOB" in text
    assert "has ended" in shell("cancel", str(run.path))
    assert run.status()["state"] == "interrupted"


def test_a_failing_rank_costs_one_unit_and_not_the_job(shell: Shell) -> None:
    run = shell.submit(*TWO_NODES, "tokens_per_rank=1,2", "backend.options.die_rank=-1,3")
    run.wait("finished")
    run.check_rows({"ok", "error", "skipped"})
    failed = [r for unit in run.results() for r in unit.records if r.status == "error"]
    assert {(r.failed_rank, r.failed_stage) for r in failed} == {(3, "prepare")}
    assert all("killed by SIGKILL" in (r.reason or "") for r in failed)
    until(lambda: run.slurm_says("JobState") == "COMPLETED", 30)  # whole first, and over a moment later


def test_a_lost_task_ends_the_job_and_leaves_it_resumable(shell: Shell) -> None:
    run = shell.submit(*SLOW)
    until(lambda: run.units() >= 1, 60)
    shell.cluster.kill_task(run.job_id, rank=2)
    status = run.wait("interrupted", limit_s=60)
    assert "supervisor of rank 2" in status["jobs"][0]["why"]
    run.jobs = json.loads(shell("run", "--resume", str(run.path), "--json"))["jobs"]
    run.wait("finished")
    run.check_rows()


def test_names_that_do_not_resolve_end_the_job_at_once(shell: Shell) -> None:
    with shell.cluster.without_names():
        run = shell.submit(*TWO_NODES, "tokens_per_rank=1")
        status = run.wait("interrupted", limit_s=60)
    assert "their names do not resolve there" in status["jobs"][0]["why"]


def test_without_accounting_the_files_and_squeue_are_enough(shell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sacct").write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n")
    (folder / "sacct").chmod(0o755)
    shell.path = str(folder)
    run = shell.submit(*FENCE, "tokens_per_rank=1,2")
    run.wait("finished")
    run.check_rows()


def test_variables_of_another_job_do_not_leak_in(shell: Shell) -> None:
    """A submission from inside an allocation, as from an interactive shell on a compute node."""
    run = shell.submit(
        *FENCE,
        "tokens_per_rank=1",
        SLURM_CPUS_PER_TASK="7",
        SLURM_NTASKS="9",
        SLURM_JOB_ID="1",
        SLURM_CPU_BIND="quiet,mask_cpu:0x80",
        SBATCH_PARTITION="nowhere",
        SLURM_NODELIST="nowhere",
        RANK="5",
    )
    run.wait("finished")
    run.check_rows()


def test_what_slurm_refuses_is_said_in_its_words(shell: Shell) -> None:
    words = ("run", *FENCE, "launcher=slurm", "cluster.partition=nowhere", *CONF)
    text = shell(*words, code=1)
    assert "Slurm does not take the job epcross-cpu_ep2-" in text
    assert "invalid partition specified: nowhere" in text


def test_the_doctor_looks_at_compute_nodes(shell: Shell) -> None:
    words = ("doctor", "sweep=grid", "backend=spanning", "ep_size=4", "scope=scale_out", "cluster=ci", *CONF)
    seen = json.loads(shell(*words, "--json"))
    assert seen["ready"], seen["findings"]
    assert [(rank["seat"]["rank"], rank["seat"]["local_rank"]) for rank in seen["ranks"]] == [
        (0, 0),
        (1, 1),
        (2, 0),
        (3, 1),
    ]
    nodes = [rank["seat"]["node"] for rank in seen["ranks"]]
    assert nodes[0] == nodes[1] != nodes[2]
    assert set(nodes) <= set(shell.cluster.nodes)
    assert seen["ranks"][2]["backends"]["spanning"] is None


def test_a_node_without_gpus_stops_a_sweep_that_needs_them(shell: Shell) -> None:
    text = shell("doctor", "cluster=ci", *CONF, code=1)
    assert "stops: GPUs: none seen at ranks 0-1 on " in text
    assert "nvidia-smi is not installed" in text
    assert "Not ready: " in text


def test_a_doctor_s_job_that_does_not_start_is_told(shell: Shell) -> None:
    text = shell("doctor", "sweep=grid", "cluster=ci", "cluster.sbatch=['--hold']", *CONF, "--wait", "2", code=1)
    assert "has not answered within 2 s (PENDING JobHeldUser: it is held: scontrol release JOB)" in text


def test_a_rehearsal_walks_from_statement_to_verdict(shell: Shell) -> None:
    begin = time.monotonic()
    words = ("reproduce", "P01", "P07", "cluster=ci", "--rehearse", *CONF)
    document = json.loads(shell(*words, "--json", limit_s=300))
    assert time.monotonic() - begin < 300
    assert [run["missing_rows"] for run in document["runs"]] == [0, 0]
    assert {row["claim"] for row in document["verdicts"]} == {"P01", "P07"}
    again = json.loads(shell("reproduce", "P01", "P07", "--rehearse", "--collect", "--json"))
    assert again == document
