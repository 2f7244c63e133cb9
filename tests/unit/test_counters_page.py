"""What kernels/README.md says of the GPU's counters is what results/counters holds."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STORED = ROOT / "results" / "counters" / "onesided_h200.json"


def line(case: dict[str, Any], kernel: dict[str, Any]) -> str:
    moved = kernel["memory read MB"] + kernel["written MB"]
    waits, cycles = max(kernel["stalls"].items(), key=lambda item: item[1])
    return (
        f"| {case['ep_size']} | {case['tokens']} | `{kernel['kernel']}` | {kernel['us']:.1f} | {moved:.0f},"
        f" {kernel['of peak %']:.0f} % | {kernel['L2 MB']:.0f}, {kernel['L2 of peak %']:.0f} % |"
        f" {kernel['warps %']:.0f} % | {kernel['issue %']:.0f} % | {waits}, {cycles:.0f} |"
    )


def test_the_table_of_counters_is_that_of_the_stored_ones() -> None:
    page, stored = (ROOT / "kernels" / "README.md").read_text(), json.loads(STORED.read_text())
    assert stored["command"] in page
    assert stored["gpu"].split(",")[0] in page
    lines = [line(case, kernel) for case in stored["cases"] for kernel in case["kernels"]]
    assert len(lines) == 16
    missing = [each for each in lines if each not in page]
    assert not missing, "kernels/README.md lacks:\n" + "\n".join(missing)
