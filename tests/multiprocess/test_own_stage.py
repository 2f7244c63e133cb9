"""The expert stage of docs/layers.md: taken from the page as it stands, checked on the CPU, its commands followed."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed; make torch")

from tests._scripts import load
from tests.contract.test_layer_contract import in_one_launch, visit_stage

from _command import epcross
from epcross.harness.errors import NOTHING_SHOWN

PAGE = (Path(__file__).parents[2] / "docs" / "layers.md").read_text()
SECTION = PAGE[PAGE.index("## Another expert stage, or another layer") :]
FILES = dict(re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL))
(COMMANDS,) = (block.splitlines() for block in re.findall(r"^```sh\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL))
(VISITS,) = re.findall(r"^```python\n(from .*?)^```", SECTION, re.MULTILINE | re.DOTALL)
BF16 = [case for case in in_one_launch() if case.name.endswith("_bf16_bf16")]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert list(FILES) == ["my_folder/my_experts.py", "my_folder/compute/my_experts.yaml"]
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_it_passes_the_cases_on_the_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder / "my_folder")
    try:
        exec(VISITS, {})
    finally:
        sys.modules.pop("my_experts", None)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("made.float() * weight", "made.float()"),
        ("self.shape.first_slot + expert", "expert"),
        ("range(self.shape.num_local_experts)", "range(self.shape.num_local_experts - 1)"),
        ("(gate) * up", "(up) * gate"),
    ],
)
def test_a_change_that_makes_it_wrong_is_found(folder: Path, right: str, wrong: str) -> None:
    """Of what the cases above would otherwise not look at."""
    path = folder / "my_folder" / "my_experts.py"
    text = path.read_text()
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong))
    case = next(case for case in BF16 if case.name.startswith("plain_"))
    assert any("wrong" in text for text in visit_stage(load(path).MyExperts, case))


def test_few_rows_at_a_time_change_nothing(folder: Path) -> None:
    stage = load(folder / "my_folder" / "my_experts.py").MyExperts
    small = type("Small", (stage,), {"__init__": lambda self: stage.__init__(self, at_once=3)})
    assert [visit_stage(small, case) for case in BF16] == [[]] * len(BF16)


def test_its_commands(folder: Path) -> None:
    """Where there is no GPU, they say so and nothing else."""
    import torch

    assert [line.split()[1] for line in COMMANDS] == ["backends", "check", "run"]
    for line in COMMANDS:
        program, verb, *words = line.split()
        assert program == ".venv/bin/epcross"
        ended = epcross(folder, verb, *words, limit_s=300.0)
        if verb == "backends":
            assert re.search(r"my_experts\s*│ my experts\s*│ yes", ended.stdout), ended.stderr
        expected = NOTHING_SHOWN if verb != "backends" and not torch.cuda.is_available() else 0
        assert ended.returncode == expected, ended.stdout + ended.stderr
        assert "my_experts'" not in ended.stdout + ended.stderr  # no word of the stage itself


def test_an_option_that_serves_nobody_is_told(folder: Path) -> None:
    words = ("backend=layer_onesided", "compute=my_experts", "compute.options.at_once=0", "--config-dir=my_folder")
    ended = epcross(folder, "check", *words)
    assert (ended.returncode, ended.stderr) == (
        2,
        "epcross: compute 'my_experts': option at_once=0 must be above 0\n",
    )
