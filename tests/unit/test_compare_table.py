"""A comparison in a terminal: what lines share is said once, above them, and all of it fits."""

import re
from pathlib import Path

import pandas as pd
from analysis_values import write
from rich.console import Console
from test_layer_rows import early, late, layer_rows

from epcross.harness.analysis.compare import compare
from epcross.harness.analysis.compare_table import compare_table
from epcross.harness.analysis.frame import load
from epcross.harness.terms import BackendKind, WeightFormat

INSIDE, BEFORE = (("staging", True),), (("sms", 24), ("staging", False))


def lines_of(frame: pd.DataFrame) -> list[str]:
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture:
        console.print(compare_table(compare(frame, frame), frame, frame))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert max(map(len, lines)) <= 100
    return lines


def layers(folder: Path, *more) -> pd.DataFrame:
    rows = layer_rows("layer_onesided", WeightFormat.FP8, early, comm=20.0, options=INSIDE)
    rows += layer_rows("megamoe", WeightFormat.FP8, late, kind=BackendKind.FUSED, compute="", options=INSIDE)
    return load(write(folder, [*rows, *more]))


def test_what_all_lines_share_stands_above_them_once(tmp_path: Path) -> None:
    lines = lines_of(layers(tmp_path / "rows"))
    above = (
        "all lines: EP 2, steady, model=tiny, routing=uniform, placement=contiguous, fp8 out, bf16 back, fp8 weights, "
        "domain=cpu "
    )
    assert " ".join(lines).count(above) == 1
    table = [line for line in lines if re.match(r" (layer_onesided|megamoe) ", line)]
    assert len(table) == 3 * 4
    assert not any(re.search("fp8|model|steady|gather_gemm|staging|varied", line) for line in table)
    assert not any("varied" in line for line in lines)


def test_a_line_says_only_what_is_not_usual(tmp_path: Path) -> None:
    bf16 = layer_rows("layer_onesided", WeightFormat.BF16, early, options=INSIDE)
    before = layer_rows("megamoe", WeightFormat.FP8, early, kind=BackendKind.FUSED, compute="", options=BEFORE)
    lines = lines_of(layers(tmp_path / "rows", *bf16, *before))
    assert "where a line says nothing else: fp8 weights" in lines
    table = [line for line in lines if re.match(r" (layer_onesided|megamoe) ", line)]
    assert len(table) == 5 * 4  # a line each, unbroken
    told = [re.sub(r" +", " ", re.sub(r"\d.*", "", line.strip().replace("bf16", "bf.."))).strip() for line in table]
    assert sorted(set(told)) == [
        "layer_onesided layer",
        "layer_onesided layer bf.. weights",
        "layer_onesided layer_comm",
        "megamoe layer staged before, sms=",
        "megamoe layer staging inside",
    ]
