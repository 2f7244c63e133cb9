"""Every machine that a field report tells of, and what the doctor says of it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO

import pytest
from doctor_nodes import Node, ranks_of
from rich.console import Console

from epcross.harness.doctor.facts import Facts, disk_of
from epcross.harness.doctor.findings import Finding, Severity, Wanted
from epcross.harness.doctor.gpu_rules import handles
from epcross.harness.doctor.gpus import parse_peers, parse_query
from epcross.harness.doctor.rules import examine
from epcross.harness.doctor.view import document, is_ready, show, verdict
from epcross.harness.terms import Domain, Scope

CLUSTER = "9f0c1b5e-0000-4000-8000-000000000001"
NVL = {"cluster": CLUSTER, "channels": ("channel0",), "product": "NVIDIA GB200"}


def stops(facts: Sequence[Facts], wanted: Wanted | None = None) -> dict[str, Finding]:
    """What stops a sweep, by subject; each has a next step."""
    found = [f for f in examine(facts, wanted or Wanted()) if f.severity is Severity.STOPS]
    assert all(finding.next_step for finding in found)
    return {finding.subject: finding for finding in found}


def costs(facts: Sequence[Facts], wanted: Wanted | None = None) -> dict[str, Finding]:
    found = [f for f in examine(facts, wanted or Wanted()) if f.severity is Severity.COSTS]
    assert all(finding.next_step for finding in found)
    return {finding.subject: finding for finding in found}


def test_a_good_8_gpu_node_is_ready() -> None:
    facts = ranks_of(Node(gpus=8), per_node=8)
    found = examine(facts, Wanted())
    assert verdict(found) == "Ready."
    assert [f.text for f in found] == [
        "all ranks share n1: ranks 0-7 on n1",
        "file descriptors, within one host (no NVLink fabric beyond the node at ranks 0-7 on n1)",
    ]
    gpu = facts[3].gpu
    assert gpu is not None
    assert (gpu.index, gpu.uuid, gpu.links, gpu.dead_links, gpu.sm_mhz) == (3, "GPU-n1-3", 18, 0, 1980)
    assert gpu.throttle == ()  # idle is no reason
    assert (facts[0].nccl, facts[0].nccl_version) == ("/site/nvidia/nccl/lib/libnccl.so.2", "2.28.9+cuda13.0")


def test_trays_of_one_clique_are_one_domain() -> None:
    facts = ranks_of(*(Node(name=f"tray{n}", gpus=4, arch="aarch64", **NVL) for n in range(2)), per_node=4)
    found = examine(facts, Wanted(arch="aarch64"))
    assert is_ready(found)
    assert handles(facts) == ("fabric", {})
    assert {fact.domain for fact in facts} == {f"{CLUSTER}.0"}


@pytest.mark.parametrize("empty", ["", "N/A", "00000000-0000-0000-0000-000000000000"])
def test_an_empty_cluster_id_is_a_domain_of_one_node(empty: str) -> None:
    facts = ranks_of(Node(cluster=empty, product="NVIDIA H100"))
    assert {fact.domain for fact in facts} == {"n1"}
    assert is_ready(examine(facts, Wanted()))
    assert handles(facts)[0] == "fd"


@pytest.mark.parametrize(("state", "status"), [("In Progress", "N/A"), ("Not Started", ""), ("Completed", "Failure")])
def test_a_fabric_that_is_not_there_yet_names_its_service(state: str, status: str) -> None:
    found = stops(ranks_of(Node(state=state, status=status)))
    assert found.keys() == {"fabric"}
    assert f"state {state}" in found["fabric"].text
    assert "nvidia-fabricmanager" in found["fabric"].next_step


def test_mixed_answers_are_one_answer_for_all() -> None:
    """One rank says fabric, the other cannot: alone each would wait for the other's kind of handle."""
    mixed = ranks_of(Node(name="a", **NVL), replace(Node(name="b", **NVL), channels=()))
    kind, missing = handles(mixed)
    assert (kind, missing) == ("none", {"no IMEX channel": [2, 3]})
    found = stops(mixed)
    assert found.keys() == {"memory of peers"}
    assert "no IMEX channel at ranks 2-3 on b" in found["memory of peers"].text
    assert "nvidia-imex says: NOT READY" in found["memory of peers"].text
    assert "systemctl status nvidia-imex" in found["memory of peers"].next_step
    on_one_host = [mixed[0], replace(mixed[1], imex_channels=0)]
    assert handles(on_one_host) == ("fd", {"no IMEX channel": [1]})


def test_two_hosts_without_a_shared_fabric_are_refused_by_a_table() -> None:
    facts = ranks_of(Node(name="a"), Node(name="b"))
    text = stops(facts)["NVLink domain"].text
    assert text == (
        "the ranks are in 2 domains (a: ranks 0-1 on a; b: ranks 2-3 on b); one-sided kernels cannot reach across"
    )
    assert "scope=scale_out" in stops(facts)["NVLink domain"].next_step
    assert stops(facts, Wanted(scope=Scope.SCALE_OUT)) == {}
    cliques = ranks_of(Node(name="a", **NVL), replace(Node(name="b", **NVL), clique="1"))
    assert f"{CLUSTER}.0: ranks 0-1 on a; {CLUSTER}.1: ranks 2-3 on b" in stops(cliques)["NVLink domain"].text


def test_scaling_out_inside_one_domain_is_no_scaling_out() -> None:
    assert stops(ranks_of(Node()), Wanted(scope=Scope.SCALE_OUT)).keys() == {"NVLink domain"}


def test_containers_without_rights() -> None:
    refused = stops(ranks_of(Node(taking=1)))
    assert refused.keys() == {"rights"}
    assert "EPERM from pidfd_getfd" in refused["rights"].text
    assert "SYS_PTRACE" in refused["rights"].next_step
    apart = ranks_of(Node())
    apart[1] = replace(apart[1], pid_namespace="pid:[1]")
    assert "--pid=host" in stops(apart)["PID namespace"].next_step
    assert stops(ranks_of(Node(taking=1, **NVL), Node(name="n2", taking=1, **NVL))) == {}  # fabric handles need neither


def test_ranks_that_see_one_gpu_each_are_told_what_slurm_did() -> None:
    facts = [
        replace(fact, visible=str(fact.seat.local_rank), seat=replace(fact.seat, local_size=4))
        for fact in ranks_of(Node(gpus=4), per_node=4)
    ]
    found = stops(facts)
    assert "visible GPUs" in found
    text = "rank 3 on n1 sees 1 (CUDA_VISIBLE_DEVICES=3), and is rank 3 of 4 there"
    assert text in [f.text for f in examine(facts, Wanted())]
    assert "--gpus-per-task" in found["visible GPUs"].next_step


def test_visible_devices_are_read_as_cuda_reads_them() -> None:
    (fact, _) = ranks_of(Node(gpus=4))
    assert [gpu.index for gpu in replace(fact, visible="2,0").visible_gpus] == [2, 0]
    assert [gpu.index for gpu in replace(fact, visible="GPU-n1-3,1").visible_gpus] == [3, 1]
    assert [gpu.index for gpu in replace(fact, visible="1,9,0").visible_gpus] == [
        1
    ]  # all after an unknown one are hidden
    assert replace(fact, visible="").visible_gpus == ()


def test_two_ranks_on_one_gpu() -> None:
    facts = ranks_of(Node(uuids=("GPU-same", "GPU-same")))
    assert "ranks 0-1 on n1 have the same GPU GPU-same" in stops(facts)["one GPU a rank"].text
    assert stops(facts, Wanted(domain=Domain.SHARED_GPU)) == {}


def test_more_ranks_than_gpus() -> None:
    assert "2 GPUs for 3 ranks" in stops(ranks_of(Node(gpus=2), per_node=3))["GPUs"].text


def test_bridged_pairs_are_islands() -> None:
    facts = ranks_of(Node(gpus=4, bad_pairs=((0, 2), (0, 3), (1, 2), (1, 3))), per_node=4)
    assert "0-2 CNS, 0-3 CNS, 1-2 CNS, 1-3 CNS" in stops(facts)["peer access"].text
    pair = ranks_of(Node(gpus=4, bad_pairs=((0, 2), (0, 3), (1, 2), (1, 3))))
    assert stops(pair) == {}  # ranks 0 and 1 are on one island


def test_links_that_are_down() -> None:
    fewer = costs(ranks_of(Node(links=(18, 12))))
    assert fewer["NVLink"].text.startswith("12 links are up at rank 1 on n1, 18 elsewhere")
    assert "nvidia-fabricmanager" in stops(ranks_of(Node(links=(0, 0))))["NVLink"].next_step


def test_mig_mps_heat_and_strangers() -> None:
    assert stops(ranks_of(Node(mig="Enabled"))).keys() == {"MIG"}
    assert "quit | nvidia-cuda-mps-control" in costs(ranks_of(Node(has_mps=True)))["MPS"].next_step
    assert "hw_thermal_slowdown" in costs(ranks_of(Node(thermal="Active")))["clocks"].text
    assert "4711" in costs(ranks_of(Node(pids=(4711,))))["other processes"].text


def test_a_gpu_that_somebody_measures_on_is_named_with_the_run() -> None:
    facts = ranks_of(Node(held={"GPU-n1-1": ["run results/runs/one (process 12, since 10:05)"]}))
    found = stops(facts)
    assert found.keys() == {"GPU in use"}
    assert found["GPU in use"].text == "by run results/runs/one (process 12, since 10:05), at rank 1 on n1"
    assert [Facts.from_json(json.loads(json.dumps(fact.to_json()))) for fact in facts] == facts
    spoilt = stops(ranks_of(Node(lock_problem="/tmp/epcross-gpu-a.lock cannot be used: it is no file")))
    assert spoilt.keys() == {"GPU lock"}
    assert "it is no file (at ranks 0-1 on n1)" in spoilt["GPU lock"].text


def test_a_node_without_a_folder_for_locks_is_named() -> None:
    facts = ranks_of(Node(), Node(name="n2", no_locks="EPCROSS_LOCKS=/shared cannot hold the locks"))
    for wanted in (Wanted(scope=Scope.SCALE_OUT), Wanted(domain=Domain.CPU)):
        found = {finding.subject: finding for finding in examine(facts, wanted)}["locks"]
        assert found.severity is Severity.STOPS
        assert found.text == "EPCROSS_LOCKS=/shared cannot hold the locks (at ranks 2-3 on n2)"
    assert [Facts.from_json(json.loads(json.dumps(fact.to_json()))) for fact in facts] == facts


def test_memory_against_what_the_sweep_needs() -> None:
    wanted = Wanted(gpu_bytes=10**10, shm_bytes=10**9)
    assert stops(ranks_of(Node()), wanted) == {}
    assert "0.1 GB are free" in stops(ranks_of(Node(free_mib=100)), wanted)["GPU memory"].text
    assert (
        "64 MB are free at ranks 0-1 on n1, and 1000 MB are needed"
        in stops(ranks_of(Node(shm_free=64 * 10**6)), wanted)["/dev/shm"].text
    )
    assert "--shm-size" in costs(ranks_of(Node(shm_free=64 << 20)))["/dev/shm"].next_step  # Docker's default


def test_the_kernel_cache() -> None:
    assert "EPCROSS_CACHE_DIR" in costs(ranks_of(Node(disk="nfs4")))["kernel cache"].next_step
    assert "cannot be written" in stops(ranks_of(Node(can_write=False)))["kernel cache"].text
    assert disk_of("a / ext4 rw\nb /home nfs rw\nc /home/me\\040too xfs rw", "/home/me too/x") == "xfs"
    assert disk_of("a / ext4 rw\nb /home nfs rw", "/homework") == "ext4"


def test_nodes_that_differ() -> None:
    facts = ranks_of(
        Node(name="a", **NVL), replace(Node(name="b", **NVL), driver="1.2", cuda="11.0", nccl=b"NCCL version 2.20.1")
    )
    found = costs(facts)
    assert found.keys() == {"driver", "CUDA", "libnccl"}
    assert found["libnccl"].text == (
        "not the same everywhere: 2.28.9+cuda13.0 at ranks 0-1 on a; 2.20.1 at ranks 2-3 on b"
    )
    assert stops([facts[0], replace(facts[2], measure_hash="beef")]).keys() == {"code"}
    assert stops(ranks_of(Node(name="a", **NVL), Node(name="b", **{**NVL, "product": "NVIDIA B200"}))).keys() == {
        "GPUs"
    }
    assert stops(facts[:2], Wanted(arch="aarch64")).keys() == {"architecture"}


def test_no_gpu_at_all() -> None:
    found = stops(ranks_of(Node(gpus=0)))
    assert found["GPUs"].text == "none seen at ranks 0-1 on n1: nvidia-smi is not installed"
    assert stops(ranks_of(Node(gpus=0)), Wanted(domain=Domain.CPU)) == {}
    crowded = costs(ranks_of(Node(gpus=0), per_node=64), Wanted(domain=Domain.CPU))
    assert crowded["cores"].text.startswith("32 for 64 ranks")


def test_facts_travel_as_json() -> None:
    for fact in ranks_of(Node(pids=(1,), **NVL)):
        assert Facts.from_json(json.loads(json.dumps(fact.to_json()))) == fact


def test_what_the_tools_write_when_they_are_broken() -> None:
    with pytest.raises(ValueError, match="wrote no XML"):
        parse_query("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    with pytest.raises(ValueError, match="no matrix"):
        parse_peers("")

    class Broken(Node):
        def output(self, command: Sequence[str], timeout_s: float) -> str:
            return "NVIDIA-SMI has failed"

    facts = ranks_of(Broken())
    assert "wrote no XML" in facts[0].absent["gpus"]
    assert "wrote no XML" in stops(facts)["GPUs"].text


def test_the_page_and_the_document_say_the_same() -> None:
    facts = ranks_of(Node(name="a"), Node(name="b"))
    found = examine(facts, Wanted())
    out = StringIO()
    show(facts, found, Console(file=out, width=100))
    page = out.getvalue()
    assert "Not ready: 2 finding(s) stop the sweep." in page
    assert "stops: NVLink domain: the ranks are in 2 domains" in page
    plain = document(facts, found)
    assert (plain["ready"], len(plain["ranks"])) == (False, 4)
    assert json.loads(json.dumps(plain)) is not None
