"""A time limit, a preemption, a dead node: minutes each, so `make test-slow`. No row is lost, none is there twice."""

import pytest
from _cluster import until
from _shell import Shell, SlurmRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

LONG = (
    *("sweep=grid", "backend=spanning", "ep_size=4", "scope=scale_out", "timing.launches=2"),
    *("tokens_per_rank=range(1,9)", "backend.options.sleep_s=4.0"),
)


def check_resumed(run: SlurmRun, kinds: set[str], starts: int = 2) -> None:
    """The run is whole, was started again, and says why the earlier starts ended."""
    status = run.wait("finished", limit_s=300)
    assert status["jobs"][0]["starts"] >= starts
    run.check_rows()
    stopped = [note for note in run.notes("cpu_scale_out_ep4") if note["event"] == "stopped"]
    assert {note["kind"] for note in stopped} <= kinds
    records = [record for unit in run.results() for record in unit.records]
    assert len({record.allocation_id for record in records}) >= starts


def test_a_time_limit_is_gone_over_by_a_requeue(shell: Shell) -> None:
    """8 points of 4 s in 2 launches are more than a minute; a start has one, and is warned well before its end."""
    run = shell.submit(*LONG, "cluster.time_min=1", "cluster.signal_delay_s=20")
    check_resumed(run, {"preempted"})
    log = (run.path / "slurm" / f"{run.job_id}_0_log.out").read_text()
    assert "Caught signal SIGUSR2" in log
    assert int(run.slurm_says("Restarts")) >= 1


def test_a_preempted_run_goes_on_where_it_was(shell: Shell) -> None:
    run = shell.submit(*LONG)
    until(lambda: run.units() >= 2, 90)
    high = ["--partition=high", "--nodes=4", "--ntasks-per-node=8", "--wrap=sleep 5", "--output=/dev/null"]
    job_id = shell.cluster.command("sbatch", "--parsable", *high).strip()
    until(lambda: "RUNNING" in shell.cluster.command("scontrol", "show", "job", job_id), 90)
    assert run.status()["state"] == "pending"
    check_resumed(run, {"preempted"})


def test_a_dead_node_costs_the_unit_in_flight(shell: Shell) -> None:
    run = shell.submit(*LONG)
    until(lambda: run.units() >= 2, 90)
    node = run.directory.environment["slurm"]["seats"][-1]["node"]
    shell.cluster.kill_node(node)
    try:
        until(lambda: "PENDING" in run.status()["jobs"][0]["slurm"] or run.status()["jobs"][0]["starts"] > 1, 150)
    finally:
        shell.cluster.start_node(node)
    check_resumed(run, {"lost"})
