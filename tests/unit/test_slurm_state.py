"""What Slurm says, what it does not say, and how a run is judged from its files where it cannot be asked."""

import os
import signal
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from epcross.harness.errors import StoreError
from epcross.harness.planning.build import build
from epcross.harness.planning.plan import Plan
from epcross.harness.running.progress import ProgressLog
from epcross.harness.running.seat import Seat
from epcross.harness.running.session import Session, run_context
from epcross.harness.slurm import allocation, cancel, follow, submit
from epcross.harness.slurm.allocation import domain_refusal, find_piece, seat_problems
from epcross.harness.slurm.follow import PieceState, view
from epcross.harness.slurm.layout import pieces
from epcross.harness.slurm.start import Start, own_address, seated
from epcross.harness.slurm.state import STUCK, JobState, SlurmSilent, ask, queued
from epcross.harness.slurm.submit import Submitted
from epcross.harness.slurm.task import told_to_end
from epcross.harness.storing import environment
from epcross.harness.storing.run_directory import RunDirectory, create_run
from epcross.harness.storing.run_owner import owner_of, release
from epcross.harness.storing.units import read_units
from epcross.harness.terms import Status

CONF = Path(__file__).parents[1] / "slurm" / "conf"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for faked commands; they come before all others."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def fake(tools: Path, name: str, out: str = "", err: str = "", code: int = 0) -> None:
    (tools / name).write_text(f"#!/bin/sh\necho '{err}' >&2\nprintf '{out}'\nexit {code}\n")
    (tools / name).chmod(0o755)


def test_squeue_is_asked_first_and_accounting_for_the_rest(tools: Path) -> None:
    fake(tools, "squeue", r"12_0|RUNNING|None|n[1-2]\n12_1|PENDING|Resources|\n99|RUNNING|None|n9\n")
    fake(tools, "sacct", r"7|CANCELLED by 0|n3\n8|NODE_FAIL|n4\n")
    assert ask(["12_0", "12_1", "7", "8", "13"]) == {
        "12_0": JobState(word="RUNNING", nodes="n[1-2]"),
        "12_1": JobState(word="PENDING", reason="Resources"),
        "7": JobState(word="CANCELLED", nodes="n3"),
        "8": JobState(word="NODE_FAIL", nodes="n4"),
        "13": JobState(word="GONE"),
    }


def test_without_accounting_an_old_job_is_gone(tools: Path) -> None:
    fake(tools, "squeue", err="slurm_load_jobs error: Invalid job id specified", code=1)
    fake(tools, "sacct", err="Slurm accounting storage is disabled", code=1)
    assert ask(["5"]) == {"5": JobState(word="GONE")}
    (tools / "sacct").unlink()
    assert ask(["5"]) == {"5": JobState(word="GONE")}


def test_a_silent_slurm_is_told_from_a_job_that_is_gone(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tools, "squeue", err="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    with pytest.raises(SlurmSilent, match="Unable to contact slurm controller"):
        ask(["5"])
    monkeypatch.setenv("PATH", str(tools))
    (tools / "squeue").unlink()
    with pytest.raises(SlurmSilent, match="squeue: No such file or directory"):
        ask(["5"])


@pytest.mark.parametrize(
    "out", ["<html>502 Bad gateway</html>\\n", "a|b|c|d|e\\n", r"\211\377|\n", "12_0 RUNNING None n1\\n"]
)
def test_an_answer_that_is_no_list_of_jobs_is_no_answer(tools: Path, out: str) -> None:
    """Taken for an empty queue, it would have a running job submitted a second time."""
    fake(tools, "squeue", out)
    with pytest.raises(SlurmSilent, match="squeue answers no list of jobs: "):
        ask(["12_0"])


def test_what_accounting_stammers_is_left_out(tools: Path) -> None:
    fake(tools, "squeue", "a banner of this site\\n7|RUNNING|None|n1|/runs/a/slurm/x.sh\\n")
    fake(tools, "sacct", r"8|\211\n9|<b>\n")
    assert ask(["7", "8", "9"]) == {
        "7": JobState(word="RUNNING", nodes="n1"),
        "8": JobState(word="GONE"),
        "9": JobState(word="GONE"),
    }


def test_what_a_person_set_for_squeue_hides_no_job(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With SQUEUE_PARTITION=other, or SLURM_CLUSTERS of an interactive job, a running job would seem to be gone."""
    for name in ("squeue", "sacct", "scancel"):
        (tools / name).write_text(f"#!/bin/sh\nenv > {tools}/{name}.env\n")
        (tools / name).chmod(0o755)
    mine = ("SQUEUE_PARTITION", "SQUEUE_STATES", "SACCT_FORMAT", "SLURM_CLUSTERS", "SCANCEL_PARTITION", "SLURM_JOB_ID")
    for name in mine:
        monkeypatch.setenv(name, "other")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    assert ask(["5"]) == {"5": JobState(word="GONE")}
    cancel._scancel(["5"])
    for name in ("squeue", "sacct", "scancel"):
        names = {line.partition("=")[0] for line in (tools / f"{name}.env").read_text().splitlines()}
        assert names & set(mine) == set()
        assert "SLURM_CONF" in names


def test_jobs_of_a_run_are_known_by_their_script(tools: Path) -> None:
    fake(
        tools,
        "squeue",
        r"7|RUNNING|None|n1|/runs/a-12/slurm/x.sh\n8_1|PENDING|Priority||/runs/a-12/slurm/y.sh\n"
        r"9|RUNNING|None|n1|/runs/a-123/slurm/z.sh\n10|RUNNING|None|n1|bash\n",
    )
    assert list(queued("a-12")) == ["7", "8_1"]


def test_pending_jobs_have_a_hint() -> None:
    assert JobState(word="PENDING", reason="ReqNodeNotAvail, UnavailableNodes:n1").hint.startswith("nodes are down")
    assert JobState(word="PENDING", reason="Unheard").hint == ""
    assert all(words == words.strip() and words for words in STUCK.values())


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of two points whose job is number 5."""
    plan = build(["sweep=grid", "launcher=slurm", "tokens_per_rank=1,2", f"output_dir={tmp_path / 'runs'}"], [CONF])
    run = create_run(plan.output_dir, plan.sweep, plan.to_json(), environment.collect())
    (run.path / "slurm").mkdir()
    job = Submitted(
        piece="cpu_ep2", job_id="5", nodes=1, ranks_per_node=2, time_min=60, submitted_at="2026-01-31T12:00:00"
    )
    submit._remember(run, [job])
    return run


def judged(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, said: JobState | None, now: datetime | None = None
) -> follow.PieceView:
    def answer(_ids: list[str]) -> dict[str, JobState]:
        if said is None:
            raise SlurmSilent("squeue: no answer within 20 s")
        return {"5": said}

    monkeypatch.setattr(follow, "ask", answer)
    monkeypatch.setattr(follow, "queued", lambda _run_id: {})
    seen = view(run, Plan.from_json(run.plan), read_units(run)[0], now)
    assert seen.silent == ("" if said else "squeue: no answer within 20 s")
    (piece,) = seen.pieces
    return piece


def start_of(run: RunDirectory) -> ProgressLog:
    log = ProgressLog(run.path, "cpu_ep2")
    log.note("session", units=2, done=0, job_id="5", restart=0, nodes=["n1"])
    return log


@pytest.mark.parametrize(
    ("said", "state", "words"),
    [
        (JobState(word="PENDING", reason="Resources"), PieceState.PENDING, "Resources"),
        (JobState(word="RUNNING", nodes="n1"), PieceState.RUNNING, "its ranks have not met yet"),
        (JobState(word="NODE_FAIL"), PieceState.ENDED, "NODE_FAIL; its log is"),
        (
            JobState(word="GONE"),
            PieceState.ENDED,
            "Slurm no longer knows job 5, and its ranks left no word; its log is",
        ),
        (None, PieceState.PENDING, "Slurm cannot be asked, and no rank has started yet"),
    ],
)
def test_before_any_rank_started(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, said: JobState | None, state: PieceState, words: str
) -> None:
    piece = judged(run, monkeypatch, said)
    assert piece.state is state
    assert piece.why.startswith(words)


def test_the_log_s_last_word_is_told_where_there_is_no_other(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = run.path / "slurm" / "5_0_log.out"
    log.write_bytes(
        b"x" * 10000 + b"\nslurmstepd-n1: error: execve(): /no/python: \xff No such file\n"
        b"srun: error: n1: tasks 0-1: Exited with exit code 2\n\n"
    )
    why = judged(run, monkeypatch, JobState(word="FAILED")).why
    assert why == (
        f"FAILED; its log is {log}, which ends with: slurmstepd-n1: error: execve(): /no/python: \ufffd No such file"
    )


def test_a_job_that_nobody_noted_is_found(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between sbatch and the note: the job would be submitted a second time, and two write to one folder."""
    (run.path / "slurm" / submit.JOBS_FILE).unlink()
    found = {"5": JobState(word="RUNNING"), "4": JobState(word="COMPLETED")}
    monkeypatch.setattr(follow, "queued", lambda run_id: found if run_id == run.run_id else {})
    (piece,) = view(run, Plan.from_json(run.plan), []).pieces
    assert piece.state is PieceState.NOT_SUBMITTED
    assert piece.why == "its submission was cut short, and of this run there is job 5 (RUNNING) that was not noted"
    assert piece.next_step == f"wait for it, or epcross cancel {run.path}; then epcross run --resume {run.path}"


def test_two_that_resume_do_not_both_find_the_queue_empty(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    release(run.path)
    owners: list[str | None] = []

    def look(one: RunDirectory) -> dict[str, JobState]:
        owners.append(owner_of(one.path))
        return {"5": JobState(word="PENDING")}

    monkeypatch.setattr(submit, "need_slurm", lambda: None)
    monkeypatch.setattr(submit, "alive_jobs", look)
    with pytest.raises(StoreError, match=r"its job 5 is PENDING\. Wait for it"):
        submit.resume(run.path)
    assert owners[0] is not None
    assert str(os.getpid()) in owners[0]
    assert owner_of(run.path) is None


def test_what_compilers_fail_at_when_the_start_is_told_to_end_is_no_result(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's signal ends the compilers as well, perhaps before the rank hears of it."""
    plan = Plan.from_json(run.plan)
    configs = {name: config.to_json() for name, config in plan.backends.items()}
    orders = {"run": str(run.path), "piece": "cpu_ep2", "configs": configs}
    monkeypatch.setattr(allocation, "prebuild", lambda configs, *_, **__: dict.fromkeys(configs, "status -15"))
    monkeypatch.setattr(allocation, "TOLD_LATE_S", 0.3)
    failed = dict.fromkeys(configs, "on n1: status -15")
    assert allocation.prepare_node(orders, "n1") == (None, failed)
    asked = iter([None, None, "told to end by SIGTERM", "told to end by SIGTERM"])
    assert allocation.prepare_node(orders, "n1", lambda: next(asked)) == (None, {})


def test_signals_are_noted_and_handed_on() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _frame: heard.append(number))
    try:
        with told_to_end() as told:
            assert told() is None
            signal.raise_signal(signal.SIGUSR2)  # at once, whoever else could take it
            assert told() == "told to end by SIGUSR2"
        signal.raise_signal(signal.SIGUSR2)
        assert heard == [signal.SIGUSR2] * 2
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_silent_slurm_is_replaced_by_our_own_deadline(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    start_of(run)
    now = datetime.now(UTC)
    running = judged(run, monkeypatch, None, now + timedelta(minutes=69))
    assert (running.state, running.starts, running.nodes) == (PieceState.RUNNING, 1, "n1")
    assert running.why.startswith("by its files; Slurm cannot be asked. It must end by ")
    over = judged(run, monkeypatch, None, now + timedelta(minutes=71))
    assert over.state is PieceState.ENDED
    assert over.why.startswith("its time was over at ")
    assert over.next_step == f"epcross run --resume {run.path}"


def test_what_the_ranks_said_last_is_the_reason(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    start_of(run).note("end", end="failed", reason="n1: /dev/shm has 1 bytes free")
    assert judged(run, monkeypatch, JobState(word="FAILED")).why == "FAILED: n1: /dev/shm has 1 bytes free"
    assert judged(run, monkeypatch, None).why == "n1: /dev/shm has 1 bytes free"


def test_a_whole_piece_is_finished_whatever_slurm_says(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.from_json(run.plan)
    session = Session(run=run, plan=plan, context=run_context(run, environment.collect(), "slurm-5"))
    done: set[tuple[str, int]] = set()
    for point in plan.points:
        session.give_up(point, Status.UNAVAILABLE, "for a test", done)
    for said in (JobState(word="FAILED"), JobState(word="GONE"), None):
        piece = judged(run, monkeypatch, said)
        assert (piece.state, piece.done, piece.planned, piece.next_step) == (PieceState.FINISHED, 2, 2, "")


def test_a_damaged_list_of_jobs_is_named(run: RunDirectory) -> None:
    path = run.path / "slurm" / "jobs.json"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(StoreError, match=r"jobs.json cannot be read .*squeue --me"):
        submit.read_jobs(run)


def seats(*nodes: str, per_node: int = 2, gpus: int = 0) -> tuple[Seat, ...]:
    found = [
        {
            **Seat(
                rank=number * per_node + local,
                node=node,
                local_rank=local,
                local_size=0,
                domain=node,
                gpus=tuple(map(str, range(gpus))),
            ).to_json()
        }
        for number, node in enumerate(nodes)
        for local in range(per_node)
    ]
    return seated(found)


def test_the_rank_map_counts_ranks_of_a_node() -> None:
    assert [
        seat.local_size for seat in seated([seat.to_json() for seat in (*seats("a"), seats("b", per_node=1)[0])])
    ] == [2, 2, 1]


def test_seats_are_held_against_the_plan() -> None:
    plan = build(["sweep=grid", "launcher=slurm"], [CONF])
    (piece,) = pieces(plan)
    assert seat_problems(seats("a"), piece) == []
    assert domain_refusal(seats("a"), piece) is None
    assert seat_problems(seats("a", "b", per_node=1), piece) == [
        "the ranks lie on 2 nodes (a, b), and 1 were planned",
        "domain=cpu does not span nodes: its ranks share memory",
    ]
    assert seat_problems(seats("a", per_node=3), piece) == ["Slurm started 3 tasks, and 2 were planned"]
    with pytest.raises(StoreError, match="no piece 'cpu_ep9'"):
        find_piece(plan, "cpu_ep9")


def test_ranks_in_several_domains_are_named() -> None:
    gpus = ("sweep=grid", "device=cuda", "backend=spanning", "launcher=slurm", "cluster=gb200_nvl72", "ep_size=8")
    (piece,) = pieces(build(gpus, [CONF]))
    two = seats("a", "b", per_node=4, gpus=4)
    assert "spread over 2 nvlink domains (ranks 0-3 in a; ranks 4-7 in b); scope=scale_up needs one" in (
        domain_refusal(two, piece) or ""
    )
    one = tuple(replace(seat, domain="rack1.0") for seat in two)
    assert domain_refusal(one, piece) is None
    (out,) = pieces(build([*gpus, "scope=scale_out"], [CONF]))
    assert domain_refusal(two, out) is None
    assert "scope=scale_out would be wrong" in (domain_refusal(one, out) or "")
    hidden = seats("a", "b", per_node=4, gpus=1)
    assert len(seat_problems(hidden, piece)) == 8
    assert (
        "rank 7 on b sees 1 GPU(s) (CUDA_VISIBLE_DEVICES=0), and 4 ranks share the node"
        in seat_problems(hidden, piece)[7]
    )


def start(*nodes: str) -> Start:
    return Start(job_id="5", restart=0, rank=0, size=2, local_rank=0, nodes=nodes, node="n1", gpus=())


def test_a_node_is_reached_where_it_reaches_the_others_from() -> None:
    assert own_address(start("n1")) == "127.0.0.1"
    assert own_address(start("n1", "localhost")) == "127.0.0.1"


def test_names_that_do_not_resolve_are_told() -> None:
    from epcross.harness.errors import EpcrossError

    with pytest.raises(EpcrossError, match=r"n1 cannot reach nosuch\.invalid: their names do not resolve"):
        own_address(start("n1", "nosuch.invalid"))
