"""`epcross check`: does a backend do what the contract says, on this machine, in processes as in a run?"""

import contextlib
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.text import Text

from epcross.harness.commands import WIDTH, Number, config_dir_option
from epcross.harness.errors import NOTHING_SHOWN, EpcrossError

if TYPE_CHECKING:
    from epcross.harness.running.check_ranks import CaseEnd, CheckRanks
    from epcross.harness.running.check_request import CheckRequest
    from epcross.harness.running.gpu_lock import GpuLocks
    from epcross.harness.verification.cases import Case

LIMIT_S = 20.0
MOST_S = 86_400.0
MOST_HANGS = 2
MOST_PROBLEMS = 4


@click.command("check")
@click.argument("words", nargs=-1, metavar="backend=NAME [KEY=VALUE]...")
@click.option(
    "--limit-s",
    default=LIMIT_S,
    show_default=True,
    type=Number(min=1, max=MOST_S),
    help="Seconds for each case.",
)
@config_dir_option
def command(words: tuple[str, ...], limit_s: float, config_dirs: tuple[Path, ...]) -> int:
    """Hold a backend to the contract: small cases that go wrong elsewhere, each verified bit by bit on every rank, in
    processes as in a run. Takes about a minute; nothing is timed or stored.

    Words: backend=NAME, ep_size=2, device=NAME, case=NAME and seed=N for one case alone, backend.options.NAME=VALUE;
    compute=NAME for the experts of a layer. On a GPU it is refused beside a run, whose numbers it would spoil.
    Where no device is named, the ranks are processes on the CPU if the backend runs there, else one GPU has all of
    them. A failure names case, seed, and the first wrong rank, token and column, and the line that runs it again.

    \b
    Exit code: 0 every case passes, or is refused with a reason, and one passes
               1 a case does not, or the check was refused
               2 wrong usage
               3 nothing was shown: the backend cannot be used here, or refuses every case
               130 interrupted
    \b
    Example: epcross check backend=shm_fence ep_size=4
    """
    from epcross.harness.backends import loader
    from epcross.harness.backends.answers import WrongBackend
    from epcross.harness.commands.attended import interrupting
    from epcross.harness.running.check_ranks import CheckRanks
    from epcross.harness.running.check_request import read_request
    from epcross.harness.running.mps import MpsRefused, mps_environment
    from epcross.harness.running.prebuild import prebuild
    from epcross.harness.running.room import room_for_check
    from epcross.harness.terms import Sharing
    from epcross.kernels.shm.segment import remove_stale

    request = read_request(words, config_dirs)
    try:
        if why := loader.unavailable(request.config, request.compute):
            raise Unavailable(request.config.name, [why])
    except WrongBackend as error:  # before any case can be tried
        click.echo(f"failed    declarations\n          {error}\n1 failed, {len(request.cases)} not tried")
        return 1
    room_for_check(request)
    locks = _gpu_locks(request)  # first: who is refused leaves nothing behind
    console = Console(width=WIDTH if not sys.stdout.isatty() else None, highlight=False)
    with contextlib.closing(locks), interrupting(), _words_kept(console) as folder, contextlib.ExitStack() as around:
        remove_stale()
        config = request.config
        _announce(console, request)
        if failures := prebuild({config.name: replace(config, options=dict(request.options))}, folder, folder):
            raise EpcrossError(f"{config.name} cannot be checked: {failures[config.name]}")
        env = {}
        if request.device.sharing is Sharing.PROCESSES:
            try:
                env = around.enter_context(mps_environment())
            except MpsRefused as error:
                raise Unavailable(config.name, [str(error)]) from error
        ranks = around.enter_context(
            CheckRanks(
                config,
                request.options,
                request.ep_size,
                folder,
                limit_s,
                device=request.device,
                env=env,
                kind=request.kind,
                compute=request.compute,
                compute_options=request.compute_options,
            )
        )
        code = _Report(console, request).run(ranks)
        if code == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return code


class Unavailable(EpcrossError):
    """The backend cannot be used on this machine, so nothing is shown of it."""

    exit_code = NOTHING_SHOWN

    def __init__(self, name: str, reasons: Sequence[str]) -> None:
        super().__init__(f"{name} cannot be used here: {'; '.join(reasons)}")


@contextlib.contextmanager
def _words_kept(console: Console) -> Iterator[Path]:
    """A folder for what the ranks write. Unless it was removed, the person is told of it, however the check ended; it
    goes if nothing was written."""
    folder = Path(tempfile.mkdtemp(prefix="epcross-check-"))
    try:
        yield folder
    finally:
        if any(log.stat().st_size for log in folder.glob("*.log")):
            console.print(f"What the ranks wrote: {folder}", soft_wrap=True, markup=False)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _announce(console: Console, request: "CheckRequest") -> None:
    """What will run, before it does."""
    from epcross.harness.planning.estimate import usable_cores
    from epcross.harness.point import processes
    from epcross.harness.terms import Domain

    size, cores = processes(request.ep_size, request.device.sharing), usable_cores()
    where = f"{size} process{'es' * (size > 1)}"
    if request.device.domain is Domain.CPU:
        where += f" on {cores} core{'s' * (cores > 1)}"
        if size > cores:
            where += f", which takes about {size / cores:.0f} times as long as with a core for each"
    cases, seeds = len(request.cases), len(request.seeds)
    console.print(
        f"{request.config.name}, EP {request.ep_size}: {cases} case{'s' * (cases > 1)}, {seeds} seed{'s' * (seeds > 1)}"
        f" each, in {where}; building what can be built ahead",
        soft_wrap=True,
        markup=False,
    )


def _gpu_locks(request: "CheckRequest") -> "GpuLocks":
    """Shared with other checks: what is not timed may run beside its like, and beside no measurement."""
    from epcross.harness.point import processes
    from epcross.harness.running.gpu_lock import GpuLocks, gpus_here, gpus_of_ranks
    from epcross.harness.storing import environment
    from epcross.harness.terms import Domain

    device = request.device
    uuids = [] if device.domain is Domain.CPU else gpus_here(environment.collect())
    used = gpus_of_ranks(device.domain, processes(request.ep_size, device.sharing), uuids)
    return GpuLocks(used, f"epcross check backend={request.config.name}", shared=True)


class _Report:
    """Runs every case and prints a line for each, as it ends."""

    def __init__(self, console: Console, request: "CheckRequest") -> None:
        self.console, self.request = console, request
        self.counts: Counter[str] = Counter()

    def run(self, ranks: "CheckRanks") -> int:
        """The exit code. Raises `Unavailable` if the ranks find that the backend cannot be used here."""
        from epcross.harness.planning.impossible import ONLY_ON_GPUS
        from epcross.harness.running.check_ranks import End
        from epcross.harness.terms import BackendKind, Domain

        begin = time.monotonic()
        left = len(self.request.cases)
        for case in self.request.cases:
            end = self._visit(ranks, case)
            if end.end is End.UNAVAILABLE:
                raise Unavailable(self.request.config.name, end.problems)
            self.counts[end.end] += 1
            left -= 1
            if end.end is End.NO_START or (self.counts[End.HUNG] == MOST_HANGS and left):
                break
        bad = sum(self.counts[end] for end in (End.FAILED, End.HUNG, End.NO_START))
        passed, refused = self.counts[End.PASSED], self.counts[End.REFUSED]
        words = [f"{passed} passed", *([f"{refused} refused"] if refused else []), *([f"{bad} failed"] if bad else [])]
        if left:
            words.append(f"{left} not tried")
        self.console.print(
            f"{', '.join(words)} in {time.monotonic() - begin:.0f} s "
            f"(EP {self.request.ep_size}, seed {', '.join(map(str, self.request.seeds))})",
            soft_wrap=True,
        )
        if self.request.kind is not BackendKind.EXCHANGE and self.request.device.domain is Domain.CPU:
            self.console.print(f"epcross run refuses it on a CPU: {ONLY_ON_GPUS}", soft_wrap=True)
        if bad or left:
            return 1
        return 0 if passed else NOTHING_SHOWN

    def _visit(self, ranks: "CheckRanks", case: "Case") -> "CaseEnd":
        """The case with each seed, up to one with which it does not pass."""
        from epcross.harness.running.check_ranks import End

        *first, last = self.request.seeds
        for seed in (*first, last):
            started = time.monotonic()
            with self.console.status(f"{case.name}, seed {seed}"):
                end = ranks.visit(case.name, seed, lambda text, seed=seed: self._waits(case, seed, text))
            if end.end is End.UNAVAILABLE:
                return end
            if end.end is not End.PASSED or seed == last:
                self._print(case, seed, end, time.monotonic() - started)
                return end
        raise AssertionError("a check has at least one seed")

    def _waits(self, case: "Case", seed: int, text: str) -> None:
        """Say what the case waits for; nothing is wrong yet."""
        line = Text.assemble(("waiting ", "dim"), f"  {case.name}, seed {seed}: {text}")
        self.console.print(line, soft_wrap=True)

    def _print(self, case: "Case", seed: int, end: "CaseEnd", wall_s: float) -> None:
        from epcross.harness.running.check_ranks import End

        style = {End.PASSED: "green", End.REFUSED: "yellow"}.get(end.end, "red")
        line = Text.assemble((f"{end.end:8}", style), f"  {case.name}")
        if end.end is End.REFUSED:
            line.append(f": {end.problems[0]}")
        self.console.print(line, soft_wrap=True)
        if end.end in (End.PASSED, End.REFUSED):
            return
        indent = " " * 10
        lines = [f"seed {seed}, after {wall_s:.1f} s; about the case: {case.why}"]
        lines += end.problems[:MOST_PROBLEMS]
        if len(end.problems) > MOST_PROBLEMS:
            lines.append(f"and {len(end.problems) - MOST_PROBLEMS} more problems")
        lines.append(f"again: {self.request.again(case.name, seed)}")
        for text in lines:
            self.console.print(Text(indent + text), soft_wrap=True)
