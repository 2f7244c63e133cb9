"""Damaged YAML files and override words: a plan, or a `ConfigError` that says what is wrong."""

import random
from pathlib import Path

import pytest
from _mutate import SECONDS, damaged, fuzz

from epcross.harness.errors import ConfigError
from epcross.harness.planning.build import build
from epcross.harness.planning.config import resolve

YAML_WORDS = [
    b"&a ", b"*a", b"<<: *a", b"!!python/object/apply:os.getcwd []", b"!!binary x", b"${oc.env:HOME}", b"${missing}",
    b"${.}", b"${oc.decode:x}", b"???", b"defaults: [x]\n", b"- ", b"? ", b": ", b"\t", b"{", b"}", b"[", b"]", b"|\n",
    b"off", b"2001-01-01", b"0x1f", b"1_0", b"~", b"null", b"---\n", b"...\n", b"%YAML 9\n",
    b"# @package _global_\n", b"@", b"`", b"'", b"hydra: {}\n", b"{from: 1, to: 99999}", b"grid:",
    b"soak: {seconds: 1}\n", b"3: 4\n", b"true: 1\n",
]  # fmt: skip

SWEEP = b"""description: A sweep to be damaged.
timing: smoke
grid: {backend: [fuzzed, shm_fence], model: [tiny, mine], ep_size: 2, regime: steady}
zip: [{tokens_per_rank: [1, 2], dispatch_format: [bf16, fp8]}]
exclude: [{model: mine, tokens_per_rank: 2}]
blocks:
  - grid: {routing: [uniform, zipf]}
  - grid: {routing: hot_expert, routing.hot_fraction: [0.1, 0.5]}
"""
BACKEND = b"""target: epcross.harness.backends.shm:ShmFence
label: fuzzed
color: "#123456"
options: {wait_limit_s: 3.0}
env: {NAME: value}
known_issues: [{versions: "<1.0", reason: old}]
"""
MODEL = b"""name: mine
num_experts: 8
top_k: 2
hidden: 64
intermediate: 32
source: none
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for group, name, text in (("sweep", "mine", SWEEP), ("backend", "fuzzed", BACKEND), ("model", "mine", MODEL)):
        (tmp_path / group).mkdir()
        (tmp_path / group / f"{name}.yaml").write_bytes(text)
    return tmp_path


@pytest.mark.parametrize("damage", ["sweep/mine", "backend/fuzzed", "model/mine"])
@pytest.mark.parametrize("seconds", SECONDS)
def test_a_damaged_yaml_file(folder: Path, damage: str, seconds: float) -> None:
    path = folder / f"{damage}.yaml"
    good = path.read_bytes()
    assert len(build(["sweep=mine"], [folder]).points) > 4

    def case(drawn: random.Random) -> None:
        path.write_bytes(damaged(good, drawn, YAML_WORDS))
        build(["sweep=mine"], [folder])

    assert fuzz(seconds, case, (ConfigError,)) > 3


WORDS = [
    b"sweep=smoke", b"tokens_per_rank=1,8", b"model=qwen3_235b", b"timing.launches=3", b"routing.exponent=0.8,1.2",
    b"backend.options.wait_limit_s=5", b"tokens_per_rank=[3,1]", b"backend=glob(shm*)", b"ep_size=range(1,4)",
    b"output_dir='a,b=c'", b"soak.seconds=3", b"regime=steady", b"timing=quick", b"tokens_per_rank={from:1,to:3}",
]  # fmt: skip
GRAMMAR = [
    b"=", b",", b"[", b"]", b"{", b"}", b"(", b")", b"'", b'"', b"\\", b"~", b"+", b"++", b"@", b"${",
    b"${oc.env:HOME}", b"range(", b"range(0,1,0)", b"range(1,1e12)", b"choice(", b"sort(", b"shuffle(", b"glob(",
    b"glob([", b"interval(0,1)",
    b"int(", b"float(x)", b"str(", b"json_str(", b"tag(a,", b":", b"null", b"\xc3\xa9", b" ", b"/", b"hydra.", b"///",
    b"*",
]  # fmt: skip


@pytest.mark.parametrize("seconds", SECONDS)
def test_damaged_words(seconds: float) -> None:
    def case(drawn: random.Random) -> None:
        words = [drawn.choice(WORDS) for _ in range(drawn.randint(1, 3))]
        at = drawn.randrange(len(words))
        words[at] = damaged(words[at], drawn, GRAMMAR)
        resolve([word.decode("utf-8", "surrogateescape") for word in words])

    assert fuzz(seconds, case, (ConfigError,)) > 5


@pytest.mark.parametrize(
    "word",
    [
        "tokens_per_rank=range(1,1000000000)",
        "routing.exponent=range(0,1,1e-12)",
        "ep_size=range(0,1,0)",
        "timing.launches='${oc.env:HOME}'",
        "timing.launches='${timing.launches}'",
        "output_dir='${oc.env:NO_SUCH_VARIABLE}'",
        "output_dir='\0'",
        "timing=\udcff",
        "tokens_per_rank=" + "[" * 2000 + "]" * 2000,
        "=" * 5000,
    ],
)
def test_words_that_ask_for_too_much_or_for_nothing(word: str) -> None:
    with pytest.raises(ConfigError):
        build(["sweep=smoke", "backend=shm_fence", word])
