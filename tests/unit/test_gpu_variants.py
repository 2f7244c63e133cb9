"""The script that measures variants: what it prints and takes, and that its blocks leave room, without a GPU."""

import argparse
from pathlib import Path
from typing import Any

import pytest
from tests._scripts import load

pytest.importorskip("torch", reason="torch is not installed, which the script is made of")

from epcross.kernels.errors import EpcrossError
from epcross.kernels.onesided import jit, plan

SCRIPT = Path(__file__).parents[1] / "benchmark" / "gpu_variants.py"


@pytest.fixture(scope="module")
def script() -> Any:
    return load(SCRIPT)


def test_a_table_has_a_line_for_each_number_of_threads_and_marks_the_least(script: Any) -> None:
    at = {"protocol": "fence", "ep_size": 2, "tokens": 8, "reason": "", "spans_us": {}}
    times = {("128", "narrow"): 5.0, ("128", "wide"): 6.25, ("row=512x1", "narrow"): 4.5, ("row=512x1", "wide"): None}
    lines = [{**at, "blocks": kind, "dispatch": v, "combine": "mid", "us": us} for (kind, v), us in times.items()]
    lines[2]["spans_us"] = {"dispatch": 2.04, "combine": 2.5}
    title, head, *rows = script.table(lines).rstrip().splitlines()
    assert title.startswith("fence, EP 2, 8 tokens")
    assert head.split() == ["blocks", "narrow/mid", "wide/mid"]
    assert [row.split() for row in rows] == [["128", "5.00", "6.25"], ["row=512x1", "4.50*", "-"], ["2.0+2.5"]]


def test_every_pair_is_measured_and_blocks_that_hold_a_row_are_fences_alone(script: Any) -> None:
    fence, sentinel = (script.pairs_of(protocol, []) for protocol in ("fence", "sentinel"))
    assert set(fence) - set(sentinel) == {("row", back) for back in ("narrow", "mid", "wide")}
    assert len(sentinel) == 9
    assert set(sentinel) < set(fence)
    assert script.pairs_of("fence", script.variants("wide/wide,row/wide")) == [("wide", "wide"), ("row", "wide")]
    assert script.pairs_of("sentinel", ["row/wide"]) == []
    with pytest.raises(argparse.ArgumentTypeError, match="wide/row is no pair"):
        script.variants("row/wide,wide/row")


def test_threads_are_whole_warps(script: Any) -> None:
    assert script.thread_counts("128,256,512") == [128, 256, 512]
    for wrong in ("100", "0", "2048"):
        with pytest.raises(argparse.ArgumentTypeError, match="whole warps"):
            script.thread_counts(wrong)


def test_kinds_of_blocks_are_those_of_variants_and_put_back(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "build", jit.build)
    monkeypatch.setattr(plan, "BLOCKS", dict(plan.BLOCKS))
    before = dict(plan.BLOCKS)
    script.use_blocks("row=512x1,wide=64x4", [])
    assert [(plan.BLOCKS[name].threads, plan.BLOCKS[name].per_sm) for name in ("row", "wide", "mid")] == [
        (512, 1), (64, 4), (128, None)
    ]  # fmt: skip
    script.use_blocks("256", [])
    assert plan.BLOCKS["wide"].threads == 256
    assert plan.BLOCKS["row"] == before["row"]
    script.use_blocks("128", [])
    assert before == plan.BLOCKS
    for wrong in ("row=512", "high=512x1", "row=x1", "row=512x0"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"no variant=THREADSxBLOCKS.* mid, wide, row and"):
            script.block_kind(wrong)


def test_blocks_have_no_more_threads_than_their_kernels_are_compiled_for(script: Any) -> None:
    assert script.too_large(["row=512x1,wide=128x4"], []) == ""
    assert script.too_large(["row=1024x1,wide=256x2"], []) == (
        "--block row=1024x1: row has at most 512 threads; "
        "--block wide=256x2: wide has at most 128 threads, or --define EPCROSS_MAX_THREADS=256"
    )
    assert script.too_large(["wide=256x2"], ["EPCROSS_MAX_THREADS=256"]) == ""
    kernels = next(path for path in jit.sources() if path.name == "kernels.cu").read_text()
    assert f"(fence_dispatch_row, {script.ROW_THREADS}, 1," in kernels
    assert f"#define EPCROSS_MAX_THREADS {script.plan_threads}\n" in kernels
    assert all(block.threads <= (script.ROW_THREADS if v == "row" else 128) for v, block in plan.BLOCKS.items())


def test_what_another_kernel_took_is_no_time_of_the_one_that_was_asked_for(script: Any) -> None:
    wanted = ["fence_dispatch_row", "fence_combine_mid"]
    script.check_kernels(wanted, wanted)
    with pytest.raises(EpcrossError, match="fence_dispatch_wide, fence_combine_mid ran in place of fence_dispatch_row"):
        script.check_kernels(["fence_dispatch_wide", "fence_combine_mid"], wanted)


@pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))
@pytest.mark.parametrize("threads", [256, 512])
def test_larger_blocks_compile_and_at_least_one_fits_on_a_multiprocessor(script: Any, threads: int) -> None:
    usage = jit.build("sm_90a", defines=script.defines(threads)).usage
    assert {kernel.name for kernel in usage} >= {n for p in plan.Protocol for n in plan.kernel_names(p).values()}
    variants = {name: v for p in plan.Protocol for (_, v), name in plan.kernel_names(p).items()}
    own = {v: threads if v in script.BOUNDED else block.threads for v, block in plan.BLOCKS.items()}
    assert all(kernel.registers * own[variants[kernel.name]] <= 65536 for kernel in usage)
    assert script.defines(plan.BLOCKS["wide"].threads) == {}  # the kernels that everybody runs, from the same cache
    assert script.defines(plan.BLOCKS["wide"].threads, ["EPCROSS_WIDE_BLOCKS=4"]) == {"EPCROSS_WIDE_BLOCKS": "4"}
