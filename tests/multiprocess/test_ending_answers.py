"""Backends and expert stages that end their process when they are asked: each costs its own points, and no command."""

import json
from pathlib import Path

import pytest

from _command import epcross, rows_of
from epcross.harness.backends import computes
from epcross.harness.backends.answers import WrongBackend
from epcross.harness.planning.schema import ComputeConfig

pytestmark = pytest.mark.beside

TRIED = "as it was tried in a process of its own"
OWN = """
import os
import sys

from tests.broken_backends import ReferenceBackend


class Asked(ReferenceBackend):
    def unavailable(self):
        sys.stderr.write("no driver\\n")
        sys.stderr.flush()
        os._exit(0)


class AtPoint(ReferenceBackend):
    def unsupported(self, point):
        if point.tokens_per_rank > 3:
            os._exit(4)


class AtBytes(ReferenceBackend):
    def workspace_bytes(self, point):
        os.abort()
"""
CORRECT = f"{TRIED}; correct own, which must return or raise"
SAID = {
    "Asked": f"unavailable() of own:Asked ends the process with status 0 (no driver), {CORRECT}",
    "AtPoint": f"unsupported() of own:AtPoint for ep_size=2, tokens_per_rank=4 ends the process with status 4, "
    f"{CORRECT}",
    "AtBytes": f"workspace_bytes() of own:AtBytes for ep_size=2, tokens_per_rank=3 ends the process by SIGABRT, "
    f"{CORRECT}",
}
FAILED = {
    "AtPoint": "its process ended with exit status 4",
    "AtBytes": "in workspace_bytes: its process was killed by SIGABRT",
}
"""By a check, whose ranks are processes."""
SWEEP = """
description: backends that end their process, beside a right one
timing: smoke
grid: {backend: [Asked, AtPoint, AtBytes, Right], ep_size: 2, model: tiny, tokens_per_rank: [3, 4], regime: steady}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ending")
    for name in ("backend", "compute", "sweep"):
        (folder / name).mkdir()
    (folder / "own.py").write_text(OWN)
    (folder / "sweep" / "ending.yaml").write_text(SWEEP)
    targets = {name: f"own:{name}" for name in SAID} | {"Right": "tests.broken_backends:ReferenceBackend"}
    for name, target in targets.items():
        (folder / "backend" / f"{name}.yaml").write_text(f'target: {target}\nlabel: {name}\ncolor: "#777777"\n')
    (folder / "compute" / "EndsAtPoint.yaml").write_text("target: tests.broken_stages:EndsAtPoint\nlabel: ends\n")
    return folder


def test_a_run_has_a_row_for_each_and_goes_on(folder: Path) -> None:
    ended = epcross(folder, "run", "sweep=ending", f"output_dir={folder}/runs", f"--config-dir={folder}")
    assert ended.returncode == 1, ended.stderr
    (run_path,) = (folder / "runs").iterdir()
    told = {(record.backend, record.status, record.reason) for record in rows_of(run_path)}
    assert told == {*((name, "error", words) for name, words in SAID.items()), ("Right", "ok", None)}


def test_a_list_and_a_check_say_so(folder: Path) -> None:
    ended = epcross(folder, "backends", "--json", f"--config-dir={folder}")
    found = {entry["name"]: entry["unavailable"] for entry in json.loads(ended.stdout)}
    assert [found[name] for name in (*SAID, "Right")] == [SAID["Asked"], None, None, None]
    ended = epcross(folder, "check", "backend=Asked", "case=plain", "seed=0", f"--config-dir={folder}")
    assert (ended.returncode, ended.stderr) == (1, "")
    assert ended.stdout.startswith(f"failed    declarations\n          {SAID['Asked']}\n")


@pytest.mark.parametrize("name", FAILED)
def test_a_check_of_one_that_ends_at_a_point_fails_in_its_ranks(folder: Path, name: str) -> None:
    ended = epcross(folder, "check", f"backend={name}", "case=plain", "seed=0", f"--config-dir={folder}")
    assert ended.returncode == 1
    assert "\nfailed    plain\n" in ended.stdout
    assert ended.stdout.count(FAILED[name]) == 2


def test_a_stage_that_ends_its_process_is_named() -> None:
    asked = ComputeConfig(name="EndsAsked", target="tests.broken_stages:EndsAsked", label="ends")
    with pytest.raises(WrongBackend, match=r"^compute 'EndsAsked': unavailable\(\) of tests.broken_stages:EndsAsked"):
        computes.unavailable(asked, computes.maker(asked, {})())


def test_a_layer_whose_stage_ends_the_process_at_a_point_has_a_row(folder: Path) -> None:
    words = ("backend=layer_onesided", "compute=EndsAtPoint", "device=cuda_one_launch", "model=tiny", "ep_size=2")
    runs = folder / "layers"
    ended = epcross(folder, "run", *words, "tokens_per_rank=3", f"output_dir={runs}", f"--config-dir={folder}")
    assert ended.returncode == 1, ended.stderr
    (run_path,) = runs.iterdir()
    ((status, reason),) = {(record.status, record.reason) for record in rows_of(run_path)}
    assert (status, reason) == (
        "error",
        "unsupported() of epcross.harness.backends.layer_onesided:LayerOneSided with tests.broken_stages:EndsAtPoint "
        f"for ep_size=2, tokens_per_rank=3 ends the process with status 4, {TRIED}; correct tests.broken_stages, which "
        "must return or raise",
    )
