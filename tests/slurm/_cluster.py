"""A real Slurm on this machine: controller, node daemons and accounting, started and stopped by their own process ids.

Four "nodes" are four slurmd of one host, each with a name of its own. Works on Debian 12 (Slurm 22.05) as root;
everything lies in one folder and listens on the loopback (slurmdbd on every interface: it knows no other way).
"""

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

DAEMONS = ("munged", "slurmctld", "slurmd", "slurmdbd", "mariadbd")
NODES = 4
GPUS = 4
HOSTS = Path("/etc/hosts")
MARK = "# a Slurm of the tests"


def missing() -> str | None:
    """Why no Slurm can be started here, as a sentence that says what to do; None if it can."""
    absent = [name for name in DAEMONS if daemon(name) is None]
    if absent:
        return (
            f"no Slurm can be started: {', '.join(absent)} absent. Debian: "
            "apt install slurm-wlm slurmdbd munge mariadb-server"
        )
    return None if os.geteuid() == 0 else "a Slurm of its own starts as root only; this is another user"


def daemon(name: str) -> str | None:
    return shutil.which(name, path="/usr/sbin:/sbin:" + os.environ.get("PATH", ""))


class SlurmCluster:
    """The daemons. `with SlurmCluster(folder) as cluster:`; then commands find it through `SLURM_CONF`."""

    def __init__(self, root: Path, *, accounting: bool = True) -> None:
        self.root, self.accounting = root, accounting
        self.prefix = f"ep{os.getpid()}n"
        self.nodes = [f"{self.prefix}{n}" for n in range(1, NODES + 1)]
        self.conf = root / "etc" / "slurm.conf"
        self._ports = free_ports(NODES + 3)

    def __enter__(self) -> "SlurmCluster":
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def command(self, *words: str, limit_s: float = 30.0) -> str:
        """Standard output of one of Slurm's commands, which must succeed."""
        result = subprocess.run(
            words,
            env={**os.environ, "SLURM_CONF": str(self.conf)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert result.returncode == 0, f"{words}: {result.stderr}"
        return result.stdout

    def clear(self) -> None:
        """End every job and wait for idle nodes."""
        self.command("scancel", "--full", "--user=root")
        until(lambda: not self.command("squeue", "--noheader").strip(), 60)
        until(self._all_idle, 60)

    def start_node(self, name: str) -> None:
        quietly(require("slurmd"), "-N", name, "-f", str(self.conf))

    def kill_node(self, name: str) -> None:
        """As if its power went: its daemon and everything of its jobs end at once, without a word to the controller."""
        tasks = [pid for pid in every_pid() if f"SLURMD_NODENAME={name}" in environment_of(pid)]
        steps = {parent for pid in tasks if "slurmstepd" in name_of(parent := parent_of(pid))}
        daemon_pid = pid_in(self._pid_file(name))
        for pid in [*filter(None, [daemon_pid]), *steps, *tasks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def without_names(self) -> Iterator[None]:
        """The nodes' names resolve nowhere meanwhile."""
        whole = HOSTS.read_text()
        HOSTS.write_text("".join(line for line in whole.splitlines(keepends=True) if f" {self.prefix}" not in line))
        try:
            yield
        finally:
            with HOSTS.open("a") as hosts:
                hosts.write("".join(f"127.0.0.1 {node} {MARK}\n" for node in self.nodes))

    def kill_task(self, job_id: str, rank: int) -> None:
        """SIGKILL to the process that Slurm started for one rank."""
        for pid in every_pid():
            variables = environment_of(pid)
            own = {f"SLURM_JOB_ID={job_id}", f"SLURM_PROCID={rank}"} <= set(variables)
            if own and "slurmstepd" in name_of(parent_of(pid)):
                os.kill(pid, signal.SIGKILL)

    def _pid_file(self, node: str) -> Path:
        return self.root / "run" / f"slurmd.{node}.pid"

    def _start(self) -> None:
        for folder in ("etc", "log", "run", "state", "gpu", "munge", *(f"spool.{node}" for node in self.nodes)):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o755)
        with HOSTS.open("a") as hosts:  # ranks find each other by the names of nodes
            hosts.write("".join(f"127.0.0.1 {node} {MARK}\n" for node in self.nodes))
        self._munge()
        self._write_conf()
        if self.accounting:
            self._database()
        quietly(require("slurmctld"), "-f", str(self.conf))
        for node in self.nodes:
            self.start_node(node)
        until(self._all_idle, 30)

    def _all_idle(self) -> bool:
        words = self.command(
            "sinfo", "--noheader", "--partition=main", "--states=idle", "--Node", "--format=%N"
        ).split()
        return len(words) == NODES

    def _munge(self) -> None:
        folder = self.root / "munge"
        folder.chmod(0o755)
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        names = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        words = [f"--{option}={folder / name}" for option, name in names.items()]
        quietly(require("munged"), "--force", *words)
        until(lambda: (folder / "sock").exists(), 10)

    def _write_conf(self) -> None:
        host, sock = socket.gethostname().partition(".")[0], self.root / "munge" / "sock"
        control, database, _, *ports = self._ports
        gpus = self._make_gpus()
        accounting = (
            f"AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=localhost\n"
            f"AccountingStoragePort={database}\nAccountingStoragePass={sock}"
            if self.accounting
            else "AccountingStorageType=accounting_storage/none"
        )
        gres = f"Gres=gpu:{GPUS}" if gpus else ""
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=8000 {gres}"
            for node, port in zip(self.nodes, ports, strict=True)
        )
        self.conf.write_text(
            f"""ClusterName=ci
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={sock},cred_expire=5
CredType=cred/munge
StateSaveLocation={self.root}/state
SlurmdSpoolDir={self.root}/spool.%n
SlurmctldPidFile={self.root}/run/slurmctld.pid
SlurmdPidFile={self.root}/run/slurmd.%n.pid
SlurmctldLogFile={self.root}/log/slurmctld.log
SlurmdLogFile={self.root}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=10000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
JobRequeue=1
KillWait=3
MinJobAge=3600
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout=15
TCPTimeout=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
JobAcctGatherType=jobacct_gather/none
{accounting}
{"GresTypes=gpu" if gpus else ""}
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20 DefMemPerNode=100
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""
        )
        if gpus:
            lines = [f"NodeName={node} Name=gpu File={self.root}/gpu/nv[0-{GPUS - 1}]" for node in self.nodes]
            (self.root / "etc" / "gres.conf").write_text("\n".join(lines) + "\n")

    def _make_gpus(self) -> bool:
        """Device files for Slurm to count: copies of /dev/null. False where none can be made."""
        try:
            for number in range(GPUS):
                os.mknod(self.root / "gpu" / f"nv{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            return False
        return True

    def _database(self) -> None:
        folder, port = self.root / "mysql", self._ports[2]
        (folder / "data").mkdir(parents=True)
        for path in (folder, folder / "data"):
            shutil.chown(path, "mysql")
        install = ["mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={folder}/data"]
        quietly(*install, "--auth-root-authentication-method=normal", "--skip-test-db")
        options = {
            "user": "mysql",
            "datadir": folder / "data",
            "socket": folder / "sock",
            "pid-file": folder / "pid",
            "port": port,
            "bind-address": "127.0.0.1",
            "innodb-buffer-pool-size": "64M",
            "innodb-lock-wait-timeout": "900",
            "innodb-flush-log-at-trx-commit": "0",
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        none = subprocess.DEVNULL
        self._mariadb = subprocess.Popen(
            [require("mariadbd"), "--no-defaults", *words],
            stdin=none,
            stdout=none,
            stderr=none,
            start_new_session=True,
        )
        client = ["mariadb", "--no-defaults", "-S", str(folder / "sock"), "-uroot"]
        until(lambda: quietly(*client, "-e", "select 1", check=False) == 0, 30)
        grants = "".join(
            f"create user 'slurm'@'{host}' identified by 'slurm'; grant all on slurm_acct_db.* to 'slurm'@'{host}';"
            for host in ("localhost", "127.0.0.1")
        )
        quietly(*client, "-e", f"create database slurm_acct_db; {grants}")
        path = self.root / "etc" / "slurmdbd.conf"
        path.touch(mode=0o600)
        path.write_text(
            f"""AuthType=auth/munge
AuthInfo=socket={self.root}/munge/sock,cred_expire=5
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={self._ports[1]}
SlurmUser=root
PidFile={self.root}/run/slurmdbd.pid
LogFile={self.root}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={port}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
"""
        )
        quietly(require("slurmdbd"), SLURM_CONF=str(self.conf))
        until(
            lambda: "ci" in self._sacctmgr("-i", "add", "cluster", "ci") + self._sacctmgr("-n", "show", "cluster"), 30
        )

    def _sacctmgr(self, *words: str) -> str:
        environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        with contextlib.suppress(subprocess.TimeoutExpired):
            return subprocess.run(
                ["sacctmgr", *words], env=environment, capture_output=True, text=True, timeout=5, check=False
            ).stdout
        return ""

    def _stop(self) -> None:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired, TimeoutError):
            if pid_in(self.root / "run" / "slurmctld.pid"):
                self.command("scancel", "--full", "--user=root", limit_s=10)
                until(lambda: not self.command("squeue", "--noheader", limit_s=5).strip(), 15)
        run = self.root / "run"
        for files in (
            [self._pid_file(node) for node in self.nodes],
            [run / "slurmctld.pid"],
            [run / "slurmdbd.pid"],
            [self.root / "mysql" / "pid"],
            [self.root / "munge" / "pid"],
        ):
            end([pid for file in files if (pid := pid_in(file))])
        if hasattr(self, "_mariadb"):
            self._mariadb.wait(10)
        others = [line for line in HOSTS.read_text().splitlines(keepends=True) if f" {self.prefix}" not in line]
        HOSTS.write_text("".join(others))  # and of no other cluster that runs now


def quietly(*words: str, check: bool = True, **variables: str) -> int:
    """Run a command that has nothing to say; its exit status."""
    none = subprocess.DEVNULL
    return subprocess.run(
        words, env={**os.environ, **variables}, stdin=none, stdout=none, stderr=none, check=check
    ).returncode


def require(name: str) -> str:
    path = daemon(name)
    assert path is not None, name
    return path


T = TypeVar("T")


def until(condition: Callable[[], T], limit_s: float) -> T:
    """The first true value of `condition`; raises after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so within {limit_s:g} s")
        time.sleep(0.1)
    return value


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]


def pid_in(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def alive(pid: int) -> bool:
    """Whether a process lives; a zombie, which PID 1 reaps late, does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX"


def end(pids: list[int], limit_s: float = 20.0) -> None:
    """SIGTERM, wait, SIGKILL."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        until(lambda: not any(map(alive, pids)), limit_s)
    for pid in filter(alive, pids):
        os.kill(pid, signal.SIGKILL)


def every_pid() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def environment_of(pid: int) -> list[str]:
    """The variables a process was started with; of kernels that show them."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return []


def parent_of(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text()
    return ""
