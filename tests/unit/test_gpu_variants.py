"""The script that measures variants: what it prints and takes, and that its blocks leave room, without a GPU."""

import argparse
from pathlib import Path
from typing import Any

import pytest
from tests._scripts import load

pytest.importorskip("torch", reason="torch is not installed, which the script is made of")

from epcross.kernels.onesided import jit, plan

SCRIPT = Path(__file__).parents[1] / "benchmark" / "gpu_variants.py"


@pytest.fixture(scope="module")
def script() -> Any:
    return load(SCRIPT)


def test_a_table_has_a_line_for_each_number_of_threads_and_marks_the_least(script: Any) -> None:
    at = {"protocol": "fence", "ep_size": 2, "tokens": 8, "reason": ""}
    times = {(128, "narrow"): 5.0, (128, "wide"): 6.25, (512, "narrow"): 4.5, (512, "wide"): None}
    lines = [{**at, "threads": t, "dispatch": v, "combine": "mid", "us": us} for (t, v), us in times.items()]
    title, head, *rows = script.table(lines).rstrip().splitlines()
    assert title.startswith("fence, EP 2, 8 tokens")
    assert head.split() == ["threads", "narrow/mid", "wide/mid"]
    assert [row.split() for row in rows] == [["128", "5.00", "6.25"], ["512", "4.50*", "-"]]


def test_every_pair_is_measured_and_pushing_is_fences_alone(script: Any) -> None:
    fence, sentinel = (script.pairs_of(protocol, []) for protocol in ("fence", "sentinel"))
    assert set(fence) - set(sentinel) == {(there, "push") for there in ("narrow", "mid", "wide")}
    assert len(sentinel) == 9
    assert set(sentinel) < set(fence)
    assert script.pairs_of("fence", script.variants("wide/wide,wide/push")) == [("wide", "wide"), ("wide", "push")]
    assert script.pairs_of("sentinel", ["wide/push"]) == []
    with pytest.raises(argparse.ArgumentTypeError, match="push/wide is no pair"):
        script.variants("wide/push,push/wide")


def test_threads_are_whole_warps(script: Any) -> None:
    assert script.thread_counts("128,256,512") == [128, 256, 512]
    for wrong in ("100", "0", "2048"):
        with pytest.raises(argparse.ArgumentTypeError, match="whole warps"):
            script.thread_counts(wrong)


@pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))
@pytest.mark.parametrize("threads", [256, 512])
def test_larger_blocks_compile_and_at_least_one_fits_on_a_multiprocessor(script: Any, threads: int) -> None:
    usage = jit.build("sm_90a", defines=script.defines(threads)).usage
    assert {kernel.name for kernel in usage} >= {n for p in plan.Protocol for n in plan.kernel_names(p).values()}
    assert all(kernel.registers * threads <= 65536 for kernel in usage)
    assert script.defines(plan.BLOCK_THREADS) == {}  # the kernels that everybody runs, from the same cache
    assert script.defines(plan.BLOCK_THREADS, ["EPCROSS_PUSH_TOKENS=4"]) == {"EPCROSS_PUSH_TOKENS": "4"}
