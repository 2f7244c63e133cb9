"""The script that reads the GPU's counters: what it asks for and what it makes of Nsight Compute's table."""

from pathlib import Path
from typing import Any

import pytest
from tests._scripts import load

SCRIPT = Path(__file__).parents[1] / "benchmark" / "gpu_counters.py"


@pytest.fixture(scope="module")
def script() -> Any:
    return load(SCRIPT)


def printed(script: Any) -> str:
    stall = script.STALL.format("long_scoreboard")
    names = [
        "ID",
        "Kernel Name",
        script.TIME,
        "dram__bytes_read.sum",
        "lts__t_bytes.sum",
        stall,
        "dram__bytes_write.sum",
    ]
    units = ["", "", "ns", "Kbyte", "Gbyte", "", "byte"]
    kernel = ["0", "fence_dispatch_wide(Exchange, Call)", "33,400", "1,500.5", "0.25", "12.5", "n/a"]
    lines = [",".join(f'"{cell}"' for cell in row) for row in (names, units, kernel)]
    return "\n".join(["==PROF== Connected to process 17", *lines]) + "\n"


def test_numbers_come_in_microseconds_and_megabytes(script: Any) -> None:
    (kernel,) = script.read(printed(script))
    assert kernel["kernel"] == "fence_dispatch_wide"
    assert kernel["us"] == pytest.approx(33.4)
    assert kernel["memory read MB"] == pytest.approx(1.5005)
    assert kernel["L2 MB"] == pytest.approx(250.0)
    assert kernel["written MB"] is None  # a counter that this GPU lacks
    assert kernel["stalls"] == {"long_scoreboard": 12.5}


def test_the_table_names_what_warps_wait_for(script: Any) -> None:
    title, head, line, *_ = script.table("fence, EP 2", script.read(printed(script))).splitlines()
    assert title == "fence, EP 2"
    assert head.endswith("waits for, per issue")
    assert line.startswith("fence_dispatch_wide")
    assert line.endswith("long_scoreboard 12.5")
    assert "33.4" in line


def test_what_ncu_says_instead_of_a_table_is_handed_on(script: Any) -> None:
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        script.read("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")


def test_clocks_and_caches_are_left_alone(script: Any) -> None:
    words = script.command("ncu", 8, 512, "fence")
    assert words[words.index("--clock-control") + 1] == "none"
    assert words[words.index("--cache-control") + 1] == "none"
    assert words[words.index("--launch-skip") + 1] == str(2 * script.WARM_PAIRS)
    assert words[-6:] == ["--ep", "8", "--tokens", "512", "--protocols", "fence"]
