"""What Slurm says of jobs: squeue first, then accounting where there is any. Cluster without accounting are common."""

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from epcross.harness.errors import EpcrossError
from epcross.harness.slurm.variables import own

ASK_LIMIT_S = 20.0

PENDING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
RUNNING = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING", "RESIZING"})
ALIVE = PENDING | RUNNING
"""States from which a job goes on by itself."""

GONE = "GONE"
"""Slurm does not know the job any more, and there is no accounting to ask."""

STUCK = {
    "AssocGrpBillingMinutes": "the account has used up its time: ask for more, or take another account",
    "AssocGrpGRES": "the account's GPUs are all in use: wait, or take another account",
    "BadConstraints": "no node fits cluster.constraint, cluster.nodelist or the GPUs asked for",
    "BeginTime": "it starts again in a moment: Slurm waits after a requeue",
    "DependencyNeverSatisfied": "a job that it waits for has failed",
    "InvalidAccount": "cluster.account is none of yours: sacctmgr show associations user=$USER",
    "InvalidQOS": "cluster.qos is none of yours: sacctmgr show associations user=$USER",
    "JobHeldAdmin": "an administrator holds it: ask them",
    "JobHeldUser": "it is held: scontrol release JOB",
    "JobHoldMaxRequeue": "it was requeued too often and is held: look at its log, then scontrol release JOB",
    "MaxGRESPerAccount": "the account's limit of GPUs is below what this job asks for",
    "NodeDown": "a node that it needs is down: sinfo -R says why; take another nodelist",
    "PartitionNodeLimit": "the partition has or allows fewer nodes than this EP size needs",
    "PartitionTimeLimit": "cluster.time_min is above the partition's limit: scontrol show partition",
    "Priority": "others come first: squeue --start says when",
    "QOSMaxGRESPerUser": "your limit of GPUs is below what this job asks for, or in use",
    "ReqNodeNotAvail": "nodes are down, drained or reserved: sinfo -R says why",
    "Resources": "it is next: squeue --start says when",
}
"""Reasons of a pending job, and what to do. Source: squeue(1), JOB REASON CODES."""


_SQUEUE_LINE = re.compile(r"(\d[\d_+]*)\|([A-Z_]+)\|([^|]*)\|([^|]*)\|?(.*)")
_WORD = re.compile(r"[A-Z]")
_SHOWN = 200  # characters of an answer that is none


class SlurmSilent(EpcrossError):
    """Slurm's commands are absent or give no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """One job, as Slurm sees it."""

    word: str  # Slurm's own, such as PENDING, or `GONE`
    reason: str = ""  # why it is pending
    nodes: str = ""
    script: str = field(default="", compare=False)  # where the script that was submitted lay

    @property
    def hint(self) -> str:
        """What to do about a pending job; empty if nothing is known."""
        return next((words for name, words in STUCK.items() if self.reason.startswith(name)), "")


def ask(job_ids: Sequence[str]) -> dict[str, JobState]:
    """The state of each job.

    Raises:
        SlurmSilent: squeue is absent or does not answer.
    """
    if not job_ids:
        return {}
    wanted = ",".join(dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids))
    found = {job_id: state for job_id, state in _squeue(f"--jobs={wanted}").items() if job_id in job_ids}
    finished = [job_id for job_id in job_ids if job_id not in found]
    if finished:
        found |= _sacct(finished)
    return {job_id: found.get(job_id, JobState(word=GONE)) for job_id in job_ids}


def queued(run_id: str) -> dict[str, JobState]:
    """Our jobs whose script lies in the folder of a run, noted there or not: a submission may have been cut short.

    Raises:
        SlurmSilent: as `ask`.
    """
    found = _squeue(f"--user={os.getuid()}")
    return {job_id: state for job_id, state in found.items() if f"/{run_id}/" in state.script}


def _squeue(which: str) -> dict[str, JobState]:
    command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r|%N|%o", which]
    try:
        result = run(command)
    except (OSError, subprocess.TimeoutExpired) as error:
        words = error.strerror if isinstance(error, OSError) else f"no answer within {ASK_LIMIT_S:g} s"
        raise SlurmSilent(f"squeue: {words}") from error
    if result.returncode and "Invalid job id" not in result.stderr:
        raise SlurmSilent(f"squeue: {' '.join(result.stderr.split()) or f'exit status {result.returncode}'}")
    found: dict[str, JobState] = {}
    for line in result.stdout.splitlines():
        if not (match := _SQUEUE_LINE.fullmatch(line.strip())):
            continue
        job_id, word, reason, nodes, script = (part.strip() for part in match.groups())
        found[job_id] = JobState(word=word, reason="" if reason == "None" else reason, nodes=nodes, script=script)
    if result.stdout.strip() and not found:  # to take it for an empty queue would be to submit a second time
        raise SlurmSilent(f"squeue answers no list of jobs: {' '.join(result.stdout.split())[:_SHOWN]}")
    return found


def _sacct(job_ids: Sequence[str]) -> dict[str, JobState]:
    """Of finished jobs; nothing where there is no accounting."""
    command = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State,NodeList"]
    try:
        result = run([*command, f"--jobs={','.join(job_ids)}"])
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found: dict[str, JobState] = {}
    for line in result.stdout.splitlines() if result.returncode == 0 else ():
        job_id, word, nodes = [*(part.strip() for part in line.split("|")), "", ""][:3]
        if job_id in job_ids and _WORD.match(word):
            found[job_id] = JobState(word=word.split()[0], nodes=nodes)  # "CANCELLED by 0"
    return found


def run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """One of Slurm's commands, in which what a person has set for their own use of it counts for nothing.

    Raises:
        OSError: it is absent.
        TimeoutExpired: it gives no answer.
    """
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=ASK_LIMIT_S,
        check=False,
        stdin=subprocess.DEVNULL,
        env=own(),
    )
