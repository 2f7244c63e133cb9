"""The stored crossover: read, written, and an error where there is none."""

import json
from pathlib import Path

import pytest

from epcross.kernels.formats import RowFormat
from epcross.kernels.onesided.crossover import Crossovers, NoCrossover, Setting, machine_name

HERE = Setting(
    machine=machine_name("NVIDIA H200", "posix_fd", 1), ep_size=2, hidden=7168, dispatch_format=RowFormat.BF16
)
ENTRY = {
    "machine": "NVIDIA H200, posix_fd, 1 rank a GPU",
    "ep_size": 2,
    "hidden": 7168,
    "dispatch_format": "bf16",
    "sentinel_up_to_tokens": 96,
    "source": "run-1",
}


def test_an_entry_is_found_by_all_of_its_setting(tmp_path: Path) -> None:
    path = tmp_path / "crossover.json"
    path.write_text(json.dumps({"crossovers": [ENTRY]}))
    assert Crossovers.load(path).sentinel_up_to(HERE) == 96


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    other = Setting(
        machine=machine_name("NVIDIA H200", "local", 8), ep_size=8, hidden=64, dispatch_format=RowFormat.FP8
    )
    saved = Crossovers({HERE: (96, "run-1"), other: (0, "run-2")})
    saved.save(tmp_path / "file.json")
    assert Crossovers.load(tmp_path / "file.json").entries == saved.entries
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]
    assert other.machine == "NVIDIA H200, local, 8 ranks a GPU"


@pytest.mark.parametrize(
    "change", [{"ep_size": 4}, {"machine": "NVIDIA B200"}, {"hidden": 4096}, {"dispatch_format": "fp8"}]
)
def test_another_setting_is_an_error_with_the_next_step(change: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "crossover.json"
    path.write_text(json.dumps({"crossovers": [ENTRY | change]}))
    with pytest.raises(NoCrossover, match=r"crossover\.json has no crossover for machine='NVIDIA H200.*measure both"):
        Crossovers.load(path).sentinel_up_to(HERE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        '{"crossovers": [{}]}',
        json.dumps({"crossovers": [ENTRY | {"sentinel_up_to_tokens": -1}]}),
        json.dumps({"crossovers": [ENTRY | {"sentinel_up_to_tokens": True}]}),
        json.dumps({"crossovers": [ENTRY | {"dispatch_format": "int4"}]}),
        json.dumps({"crossovers": [ENTRY, ENTRY | {"sentinel_up_to_tokens": 8}]}),
    ],
)
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "crossover.json"
    path.write_text(text)
    with pytest.raises(NoCrossover, match=r"crossover\.json is no crossover file: .*choose protocol='fence'"):
        Crossovers.load(path)
    with pytest.raises(NoCrossover, match="FileNotFoundError"):
        Crossovers.load(tmp_path / "absent.json")


def test_what_is_no_path_is_named() -> None:
    with pytest.raises(NoCrossover, match=r"^5 is no crossover file: TypeError"):
        Crossovers.load(5)  # pyright: ignore[reportArgumentType]


def test_a_saved_file_can_be_read_by_everybody_and_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    saved = Crossovers({HERE: (96, "run-1")})
    saved.save(tmp_path / "file.json")
    assert (tmp_path / "file.json").stat().st_mode & 0o777 == 0o644
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        saved.save(tmp_path / "folder")
    assert {path.name for path in tmp_path.iterdir()} == {"file.json", "folder"}
