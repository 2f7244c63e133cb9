"""The command line: what it prints, where, and with which exit code; never a traceback of ours."""

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from planning import FIXTURES, plan_of
from rich.console import Console

from epcross import __version__
from epcross.harness import cli
from epcross.harness.errors import ConfigError, StoreError
from epcross.harness.planning.plan import Plan

HERE = ("--config-dir", str(FIXTURES))


def test_help_says_what_each_verb_does_with_an_example(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["--help"]) == 0
    overview = capsys.readouterr().out
    for verb in cli.cli.list_commands(click.Context(cli.cli)):
        assert verb in overview
        assert cli.run([verb, "--help"]) == 0
        text = capsys.readouterr().out
        assert f"Example: epcross {verb}" in text


def test_version(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_plan_prints_points_reasons_jobs_and_need(capsys: pytest.CaptureFixture[str]):
    code = cli.run(["plan", "sweep=crossover", "backend=plain,small,absent", "tokens_per_rank=8,128", *HERE])
    out = capsys.readouterr().out
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100
    flat = " ".join(out.split())
    assert "12 points, 6 of them impossible" in flat
    assert "max_tokens_per_rank=128 is above its limit 64" in flat
    assert "libabsent is not installed" in flat
    assert "plain, small" in flat
    assert "/dev/shm: " in flat
    assert "Time in all about" in flat


def test_two_thousand_points_are_a_page(capsys: pytest.CaptureFixture[str]):
    words = ["sweep=crossover", "backend=plain,small", "tokens_per_rank=range(1,501)", *HERE]
    assert cli.run(["plan", *words]) == 0
    out = capsys.readouterr().out
    assert "2000 points" in out
    assert "(500 values)" in " ".join(out.replace("│", " ").split())
    assert "more reasons" in out
    assert len(out.splitlines()) < 80


def test_plan_as_json_is_the_plan(capsys: pytest.CaptureFixture[str]):
    words = ["sweep=crossover", "backend=plain,absent", "tokens_per_rank=8"]
    assert cli.run(["plan", *words, "--json", *HERE]) == 0
    document = json.loads(capsys.readouterr().out)
    assert Plan.from_json(document) == plan_of(*words)
    assert len(document["need"]) == len(document["jobs"]) == 1
    assert document["points"][0]["point_id"] == plan_of(*words).points[0].point_id


def test_too_little_shared_memory_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("epcross.harness.planning.estimate.free_shm_bytes", lambda: 1000)
    assert cli.run(["plan", "sweep=crossover", "backend=plain", *HERE]) == 0
    assert "/dev/shm is too small: 102 kB needed, 1.0 kB free." in " ".join(capsys.readouterr().out.split())


def test_a_wrong_word_goes_to_stderr_with_code_2(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["plan", "sweep=quikstart", "regime=x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("epcross: 2 problems:\n  - ")
    assert "Traceback" not in captured.err


def test_unknown_verbs_and_options(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["pln"]) == 2
    assert "unknown verb 'pln'; did you mean 'plan'?" in capsys.readouterr().err
    assert cli.run(["plan", "--jsn"]) == 2
    assert "--json" in capsys.readouterr().err
    assert cli.run(["plan", "--config-dir", "/no/such/folder"]) == 2
    assert "/no/such/folder" in capsys.readouterr().err
    assert cli.run([]) == 2
    assert "Example: epcross plan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (ConfigError("wrong word"), 2, "epcross: wrong word"),
        (StoreError("disk is full"), 1, "epcross: disk is full"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (click.Abort(), 130, "interrupted"),
    ],
)
def test_exit_codes(
    raised: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr("epcross.harness.planning.build.build", fail)
    assert cli.run(["plan"]) == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("limit_s", ["nan", "inf", "1e300", "0"])
def test_a_limit_that_is_no_time_is_refused(limit_s: str, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["check", "backend=shm_fence", "case=plain", "--limit-s", limit_s]) == 2
    assert "is not in the range 1<=x<=86400" in capsys.readouterr().err


def test_backends_fit_a_page_and_give_reasons(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["backends", *HERE]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.startswith("│")}
    assert "yes" in rows["plain"]
    assert "no: the library libabsent is not installed" in rows["absent"]
    assert "nvlink" in rows["gpu"]


@pytest.mark.parametrize("columns", [60, 80])
def test_a_narrow_terminal_cuts_nothing(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for verb in ("backends", "plan"):
        narrow = Console(width=columns, highlight=False)
        monkeypatch.setattr(f"epcross.harness.commands.{verb}.console", lambda narrow=narrow: narrow)
        words = ["sweep=crossover", "backend=plain,small"] if verb == "plan" else []
        assert cli.run([verb, *words, *HERE]) == 0
        out = capsys.readouterr().out
        assert "…" not in out
        framed = [line for line in out.splitlines() if line.startswith(("│", "┃"))]
        assert all(line.endswith(("│", "┃")) and len(line) <= columns for line in framed)
        cells = [cell for line in framed for cell in line.replace("┃", "│").strip("│").split("│")]
        assert min(map(len, cells)) >= 4  # two letters and a space on either side


def test_backends_as_json_lists_faulty_ones_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "backend").mkdir()
    (tmp_path / "backend" / "no_class.yaml").write_text("target: fixture_backends:Plane\nlabel: X\ncolor: '#000000'\n")
    (tmp_path / "backend" / "no_label.yaml").write_text("target: fixture_backends:Plain\ncolor: '#000000'\n")
    assert cli.run(["backends", "--json", *HERE, "--config-dir", str(tmp_path)]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert entries["plain"]["unavailable"] is None
    assert entries["plain"]["domains"] == ["cpu"]
    assert "did you mean 'Plain'?" in entries["no_class"]["unavailable"]
    assert "label is missing" in entries["no_label"]["unavailable"]
    assert entries["from_environment"]["unavailable"] is None


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from epcross.harness import cli; cli.run(['plan', '--help']); "
        "print({'hydra', 'omegaconf', 'numpy', 'pandas', 'torch'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines()[-1] == "set()", ran.stdout + ran.stderr


@pytest.mark.parametrize("form", [["--json"], []], ids=["json", "text"])
def test_a_reader_that_stops_early_is_no_error(form: list[str]):
    words = ["plan", "sweep=crossover", "backend=plain", *form, "--config-dir", str(FIXTURES)]
    command = [sys.executable, "-m", "epcross.harness.cli", *words, "tokens_per_rank=range(1,500)"]
    assert _read_a_little(command) == (0, b"")


@pytest.mark.parametrize("prints", ["rich.console.Console().print", "click.echo", "print"])
def test_a_reader_that_stops_early_changes_no_exit_code(prints: str):
    verb = f"import click, rich.console; cli.run = lambda words: [{prints}('x ' * 10**6), 3][1]"
    assert _read_a_little([sys.executable, "-c", f"from epcross.harness import cli; {verb}; cli.main([])"]) == (3, b"")


def _read_a_little(command: list[str]) -> tuple[int, bytes]:
    """Exit code and standard error of a command whose output is read like `head` does."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    code, said = process.wait(60), process.stderr.read()
    process.stderr.close()
    return code, said


@pytest.mark.parametrize(
    "words",
    [["cancel", "RUN", "--wait"], ["doctor", "--wait"], ["check", "--limit-s"], ["compare", "A", "B", "--margin"]],
    ids=lambda words: words[0],
)
def test_nan_is_no_number(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert cli.run([*words, "nan"]) == 2
    assert f"Invalid value for '{words[-1]}': nan is not in the range" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("redirect", "code", "says"),
    [
        (">&-", 0, ""),  # nobody wants the output
        ("<&- >&- 2>&-", 0, ""),
        (">/dev/full", 1, "epcross: the output cannot be read or written: No space left on device\n"),
    ],
)
def test_output_that_goes_nowhere_is_no_traceback(redirect: str, code: int, says: str):
    command = f"exec {sys.executable} -m epcross.harness.cli plan sweep=smoke {redirect}"
    ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (code, says)
