"""The doctor on compute nodes, and a rehearsal of the whole way from statement to verdict."""

import json
import time

from _shell import HERE, Shell

CONF = ("--config-dir", str(HERE / "conf"))


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
