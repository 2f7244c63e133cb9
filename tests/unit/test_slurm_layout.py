"""Nodes, ranks and arrays: how planned jobs become Slurm jobs, and what is refused before anything is submitted."""

from pathlib import Path

import pytest

from epcross.harness.errors import ConfigError
from epcross.harness.planning.build import build
from epcross.harness.planning.plan import Plan
from epcross.harness.slurm import layout, submit
from epcross.harness.slurm.layout import Piece

CONF = Path(__file__).parents[1] / "slurm" / "conf"
GPUS = ("sweep=grid", "device=cuda", "backend=spanning", "model=deepseek_v3", "launcher=slurm")


def plan(*words: str) -> Plan:
    return build(words, [CONF])


def shape(*words: str) -> list[tuple[str, int, int, int, int]]:
    """Name, nodes, ranks per node, GPUs per node asked for and paid."""
    return [
        (
            piece.name,
            piece.layout.nodes,
            piece.layout.ranks_per_node,
            piece.layout.gpus_per_node,
            piece.layout.paid_gpus_per_node,
        )
        for piece in layout.pieces(plan(*words))
    ]


def test_trays_of_one_domain_hold_every_ep_size() -> None:
    assert shape(*GPUS, "cluster=gb200_nvl72", "ep_size=2,4,8,16,32,64") == [
        ("nvlink_ep2", 1, 2, 2, 4),
        ("nvlink_ep4", 1, 4, 4, 4),
        ("nvlink_ep8", 2, 4, 4, 4),
        ("nvlink_ep16", 4, 4, 4, 4),
        ("nvlink_ep32", 8, 4, 4, 4),
        ("nvlink_ep64", 16, 4, 4, 4),
    ]
    assert shape(*GPUS, "cluster=gb200_nvl72", "ep_size=72", "placement=replicated") == [("nvlink_ep72", 18, 4, 4, 4)]


def test_ranks_are_even_over_nodes() -> None:
    six = ("model.num_experts=24", "ep_size=6")
    assert shape(*GPUS, *six, "cluster=gb200_nvl72") == [("nvlink_ep6", 2, 3, 3, 4)]
    assert shape(*GPUS, *six, "cluster=gb200_nvl72", "cluster.exclusive=false") == [("nvlink_ep6", 2, 3, 3, 3)]
    ten = plan(*GPUS, "model.num_experts=20", "ep_size=10", "cluster=gb200_nvl72")
    with pytest.raises(ConfigError, match=r"ep_size=10 needs 3 nodes of at most 4 .* take ep_size=9 or 12"):
        layout.pieces(ten)


def test_an_8_gpu_node_is_a_domain_and_no_more() -> None:
    assert shape(*GPUS, "cluster=h200_x8", "ep_size=8") == [("nvlink_ep8", 1, 8, 8, 8)]
    assert submit.problems(plan(*GPUS, "cluster=h200_x8", "ep_size=16,32")) == [
        "ep_size=16 needs 2 nodes, and one NVLink domain of cluster=h200_x8 has 1 of 8 GPUs; lower ep_size, or take "
        "scope=scale_out with a backend that spans domains",
        "ep_size=32 needs 4 nodes, and one NVLink domain of cluster=h200_x8 has 1 of 8 GPUs; lower ep_size, or take "
        "scope=scale_out with a backend that spans domains",
    ]
    out = ("cluster=h200_x8", "scope=scale_out")
    assert shape(*GPUS, *out, "ep_size=16") == [("nvlink_scale_out_ep16", 2, 8, 8, 8)]
    assert shape(*GPUS, *out, "ep_size=8") == [("nvlink_scale_out_ep8", 2, 4, 4, 8)]  # straddling is what is asked for


def test_one_sided_kernels_are_not_scaled_out() -> None:
    made = plan("sweep=grid", "backend=shm_fence,gloo,spanning", "scope=scale_out", "launcher=slurm", "cluster=ci")
    reasons = {item.point.backend: item.reason for item in made.impossible}
    assert reasons == {
        "shm_fence": "shm_fence needs all ranks in one domain; scope=scale_out is for backends that span several"
    }
    entry = plan("sweep=grid", "backend=spanning", "scope=scale_out", "regime=entry", "launcher=slurm")
    assert "regime=entry needs one clock" in entry.impossible[0].reason
    here = plan("sweep=grid", "backend=spanning", "scope=scale_out")
    assert (here.impossible[0].status, here.jobs) == ("unavailable", ())


def test_the_cpu_device_stays_on_one_node() -> None:
    cpu = ("sweep=grid", "launcher=slurm", "cluster=ci", "backend=shm_fence")
    assert shape(*cpu, "ep_size=4") == [("cpu_ep4", 1, 4, 0, 0)]
    assert submit.problems(plan(*cpu, "ep_size=8")) == [
        "domain=cpu keeps its ranks on one node, whose memory they share: ep_size=8 is above cluster.ranks_per_node=4. "
        "Lower ep_size, or take scope=scale_out with a backend that spans nodes, such as gloo"
    ]


def test_gpus_need_a_cluster_that_has_some() -> None:
    (problem,) = submit.problems(plan(*GPUS, "cluster=local", "ep_size=2"))
    assert problem.startswith("cluster=local has no GPUs (gpus_per_node=0), and domain=nvlink needs them")


def names(found: tuple[Piece, ...]) -> list[str]:
    return [piece.name for piece in found]


def test_long_jobs_are_cut_where_nothing_that_is_compared_is_torn() -> None:
    words = ("sweep=grid", "launcher=slurm", "backend=shm_fence,shm_sentinel", "tokens_per_rank=range(1,1201)")
    made = plan(*words, "launcher.points_per_job=3")
    found = layout.pieces(made)
    assert len(found) == 1200  # two backends each: a third point would tear a pair
    assert all({point.backend for point in piece.job.points} == {"shm_fence", "shm_sentinel"} for piece in found)
    assert all(len({point.tokens_per_rank for point in piece.job.points}) == 1 for piece in found)
    assert [len(array) for array in layout.arrays(found, 1000)] == [1000, 200]
    assert sum(len(piece.job.points) for piece in layout.pieces(plan(*words, "launcher.points_per_job=100"))) == 2400
    assert names(layout.pieces(plan(*words))) == ["cpu_ep2"]


def test_more_jobs_than_the_site_takes_are_refused() -> None:
    words = ("sweep=grid", "launcher=slurm", "tokens_per_rank=range(1,9)", "launcher.points_per_job=1")
    assert submit.problems(plan(*words, "cluster.max_jobs=8")) == []
    (problem,) = submit.problems(plan(*words, "cluster.max_jobs=7"))
    assert problem.startswith("the sweep makes 8 jobs, and cluster=local takes cluster.max_jobs=7 of one user")


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("cluster.time_min=0", "cluster.time_min=0 must be at least 1"),
        ("cluster.signal_delay_s=3600", "no less than the time limit of 60 min"),
        ("cluster.arch=arm", "cluster.arch is 'arm', but must be x86_64 or aarch64"),
        (
            "cluster.sbatch=['--gpus-per-task=1']",
            "may not give --gpus-per-task: ranks must see the GPUs of their peers",
        ),
        ("cluster.sbatch=['--nodes=3']", "may not give --nodes"),
        ("cluster.sbatch=['-p gpu']", "has '-p gpu', but each must be one option, such as --switches=1"),
        ("cluster.sbatch=['--nodes 3']", "has '--nodes 3', but each must be one option"),
        ("cluster.sbatch=['--node=3']", "may not give --nodes"),
        ("cluster.sbatch=['--gpus=8']", "may not give --gpus"),
        ("cluster.sbatch=['--parsable']", "may not give --parsable: sbatch must answer"),
        ("cluster.sbatch=['--wait']", "may not give --wait"),
        ("cluster.srun_args=['--gpu-bind=single:1']", "may not give --gpu-bind: ranks must see"),
        ("cluster.srun_args=['--gpus-per-task=1']", "may not give --gpus-per-task: ranks must see"),
        ("cluster.srun_args=['--tres-bind=gres/gpu:single:1']", "may not give --tres-bind: ranks must see"),
        ("cluster.srun_args=['']", "cluster.srun_args has ''"),
        ("cluster.container_mounts=['/a:/a']", "cluster.container is empty"),
        ("cluster.max_array_size=0", "must be at least 1"),
    ],
)
def test_a_cluster_that_cannot_be_used_says_why(word: str, words: str) -> None:
    (problem,) = submit.problems(plan("sweep=grid", "launcher=slurm", word))
    assert words in problem


def test_a_soak_is_not_for_slurm() -> None:
    assert submit.problems(build(["sweep=soak", "launcher=slurm"])) == [
        "a soak runs on one host: leave out launcher=slurm"
    ]
