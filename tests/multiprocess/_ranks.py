"""Run one function as the ranks of a group, each a process of its own, and show what failed first."""

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _files_group import FilesGroup

_SERVER = multiprocessing.get_context("forkserver")
"""Where ranks come from: a process of one thread that has imported what they need, and nothing else has happened in."""
_SERVER.set_forkserver_preload(["pytest", "_exchange_case", "epcross.harness.measuring.floor"])


def run_ranks(size: int, body: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
    """`body(group, *arguments)` on each rank; returns what each returned. Raises with the first rank's traceback."""
    with tempfile.TemporaryDirectory(prefix="epcross-test-") as directory:
        pipes = [_SERVER.Pipe(duplex=False) for _ in range(size)]
        processes = [
            _SERVER.Process(target=_rank, args=(pipes[rank][1], directory, rank, size, body, arguments), daemon=True)
            for rank in range(size)
        ]
        try:
            for process in processes:
                process.start()
            for _, sender in pipes:
                sender.close()
            return _results([receiver for receiver, _ in pipes], timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for receiver, _ in pipes:
                receiver.close()


def _results(receivers: list[Connection], timeout_s: float) -> list[Any]:
    results: list[Any] = [None] * len(receivers)
    waiting = set(range(len(receivers)))
    deadline = time.monotonic() + timeout_s
    while waiting:
        assert time.monotonic() < deadline, f"ranks {sorted(waiting)} did not end in {timeout_s:g} s"
        for rank in sorted(waiting):
            if not receivers[rank].poll(0.005):
                continue
            try:
                ok, value = receivers[rank].recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word") from None
            assert ok, f"rank {rank} failed:\n{value}"
            results[rank] = value
            waiting.discard(rank)
    return results


def _rank(
    sender: Connection, directory: str, rank: int, size: int, body: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    group = FilesGroup(Path(directory), rank, size)
    try:
        sender.send((True, body(group, *arguments)))
    except BaseException:
        group.abort("failed")
        sender.send((False, traceback.format_exc()))
