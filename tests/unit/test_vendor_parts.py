"""What adapters of vendors' libraries share: what is loaded, what a call takes, whose a row is, which sums count."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from epcross.harness.backends import vendor
from epcross.harness.backends.device_inputs import OwnedByLibrary
from epcross.harness.backends.landing import fold
from epcross.harness.backends.replays import capturing
from epcross.harness.planning.library import PACKAGE_CONF

torch = pytest.importorskip("torch", reason="torch is not installed; make torch")

ROOT = Path(__file__).parents[2]
OURS = {"onesided_auto", "onesided_fence", "onesided_sentinel", "shm_fence", "shm_sentinel", "shm_two_sided", "gloo"}
EVERY = {path.stem for path in (PACKAGE_CONF / "backend").glob("*.yaml")}
LAYERS = {name for name in EVERY if name.startswith(("layer_", "megamoe", "experts_"))}
PEERS = sorted(EVERY - OURS - LAYERS)


def test_every_loaded_nccl_is_named_with_its_path():
    line = "7f00-7f01 r-xp 00000000 00:00 1    "
    maps = "\n".join(
        line + path for path in ("/a/libnccl.so.2", "/usr/lib/libc.so.6", "/b c/libnccl.so.2.30.7", "/x/libncclx.so")
    )
    assert vendor.loaded_nccl(maps) == {
        "nccl": "unknown version /a/libnccl.so.2 and unknown version /b c/libnccl.so.2.30.7"
    }
    assert vendor.loaded_nccl("") == {}
    assert vendor.nccl_version("2.28.9 /a/libnccl.so.2") == (2, 28, 9)
    assert vendor.nccl_version("unknown version /a") == ()


def test_a_parameter_that_is_not_there_is_named():
    def dispatch(x, *, num_sms=0): ...

    def anything(**options): ...

    assert vendor.lacks("dispatch", dispatch, "x", "num_sms") is None
    assert vendor.lacks("dispatch", anything, "x") is None
    assert (vendor.lacks("Buffer.dispatch", dispatch, "x", "do_cpu_sync") or "").startswith(
        "Buffer.dispatch takes no do_cpu_sync: "
    )


def test_a_module_that_fails_at_import_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "angry_vendor.py").write_text("raise AssertionError('Duplicate NCCL\\nruntime')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert vendor.no_module("angry_vendor", "do this") == (
        "importing angry_vendor fails with AssertionError: Duplicate NCCL runtime; do this"
    )
    assert vendor.no_module("no_such_vendor", "do this") == "no_such_vendor is not installed; do this"
    assert vendor.no_module("json", "do this") is None


class Graph:
    """As a captured graph: a replay writes what the capture allocated, and runs no Python but the calls with it."""

    def __init__(self, sums, *sets):
        self.own = {number: torch.zeros(2) for number in sets}
        with capturing() as self.calls:
            for number, tensor in self.own.items():
                sums.put(number, torch.zeros(2))  # of an earlier pair in this graph
                sums.put(number, tensor)

    def replay(self, value):
        for tensor in self.own.values():
            tensor.fill_(value)
        for call in self.calls.values():
            call()


def test_sums_are_those_of_the_last_combine_eager_or_replayed():
    sums, eager = OwnedByLibrary(), torch.ones(2)
    sums.put(0, eager)
    assert sums.get(0) is eager
    first, second = Graph(sums, 0, 1), Graph(sums, 0)
    assert sums.get(0) is eager  # a capture runs nothing
    second.replay(3)
    assert sums.get(0) is second.own[0]
    first.replay(4)  # captured before the other, replayed after it: as a series of a later seed
    assert (sums.get(0), sums.get(1)) == (first.own[0], first.own[1])
    sums.poison()
    assert all(tensor.isnan().all() for tensor in (*first.own.values(), *second.own.values()))
    first.replay(5)
    assert sums.get(0).tolist() == [5, 5]
    sums.put(0, eager)
    assert sums.get(0) is eager


def test_what_is_replayed_alone_is_what_counts_after_a_poison():
    sums = OwnedByLibrary()
    first, second = Graph(sums, 0), Graph(sums, 0)
    second.replay(1)
    sums.poison()
    first.replay(2)
    assert sums.get(0) is first.own[0]
    assert second.own[0].isnan().all()


def test_folding_hides_no_copy():
    source, token = torch.tensor([0, 0, 1, 0, 1]), torch.tensor([4, 4, 4, 2, 4])
    slot = torch.tensor([0, 1, 0, 1, 0])  # the last is a second copy of the third
    contents = torch.tensor([[1], [2], [3], [4], [3]], dtype=torch.uint8)  # and the second differs from the first
    folded = fold(source, token, slot, contents, stride=8)
    rows = list(zip(folded.source.tolist(), folded.token.tolist(), strict=True))
    assert sorted(rows) == [(0, 2), (0, 4), (1, 4), (1, 4)]
    assert contents[folded.representative[rows.index((0, 4))]].item() == 2
    assert folded.row_of[0] == folded.row_of[1]
    assert folded.row_of[2] != folded.row_of[4]


SOURCES = {
    "vllm": {"vllm/config/parallel.py at 00193b82b0e2"},
    "sglang": {
        "python/sglang/srt/layers/moe/utils.py at 004813e1dd46",
        "token_dispatcher/flashinfer.py at 008b79d2358b",
    },
    "tensorrt_llm": {"communication_factory.py at 03c36d6222ad"},
}
"""Where switches of an engine were read, in one state of its sources for all exchanges."""


@pytest.mark.parametrize("name", sorted(EVERY - LAYERS))
def test_an_exchange_says_which_engines_select_it_and_where_that_was_read(name):
    engines = yaml.safe_load((PACKAGE_CONF / "backend" / f"{name}.yaml").read_text())["engines"]
    assert engines.keys() == SOURCES.keys()
    for engine, words in engines.items():
        found = re.fullmatch(r"(.+) \((\S+\.py at [0-9a-f]{12})(?:: \w+)?\)", words)
        assert found, words
        switch, source = found.groups()
        assert source in SOURCES[engine]
        assert switch.startswith("none: ") or "--" in switch or "TRTLLM_FORCE_COMM_METHOD=" in switch


@pytest.mark.parametrize("name", PEERS)
def test_the_page_of_semantics_has_it(name):
    assert f"`{name}`" in (ROOT / "docs" / "semantics.md").read_text()


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_the_page_of_layers_has_it(name):
    assert f"`{name}`" in (ROOT / "docs" / "layers.md").read_text()


def test_the_environment_in_a_file_is_one_that_make_builds():
    built = set(re.findall(r"^env-(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        found[1]
        for path in (PACKAGE_CONF / "backend").glob("*.yaml")
        if (found := re.search(r"envs/(\w+)/bin", yaml.safe_load(path.read_text()).get("python", "")))
    }
    assert named == built == {"deepep_v1", "deepep_v2", "nccl_ep", "deepgemm"}


@pytest.mark.parametrize("name", ["deepep_v1", "deepep_v2", "nccl_ep", "deepgemm"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_lock_has_what_was_asked_for_and_a_hash_for_each(name, machine):
    envs = ROOT / "locks" / "envs"
    lock = (envs / f"{name}.{machine}.lock").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==(\S+) \\$", lock, re.MULTILINE))
    blocks = re.split(r"^(?=[\w.-]+==)", lock, flags=re.MULTILINE)[1:]
    assert all("--hash=sha256:" in block for block in blocks)
    asked = (envs / f"{name}.in").read_text() + (envs / "worker.in").read_text()
    for package, version in re.findall(r"^([\w.-]+)==([\w.]+)$", asked, re.MULTILINE):
        assert locked[package.replace("_", "-")] == version
    assert locked.keys() >= {"numpy", "ml-dtypes", "torch", "cuda-core"}
    assert np.all([len(found) == 64 for found in re.findall(r"sha256:(\w+)", lock)])
