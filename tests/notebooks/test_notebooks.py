"""Notebooks as a reader opens them: pairs that agree, without outputs or functions; all cells run without torch."""

import ast
import functools
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

jupytext = pytest.importorskip("jupytext", reason="needs jupytext: pip install -e '.[notebooks]'")
nbformat = pytest.importorskip("nbformat", reason="needs nbformat: pip install -e '.[notebooks]'")
pytest.importorskip("ipykernel", reason="needs a kernel: pip install -e '.[notebooks]'")

from epcross.harness.analysis import notebooks  # noqa: E402 - after the skips
from epcross.harness.verification.cases import cases  # noqa: E402

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "notebooks"
NAMES = notebooks.names(SOURCES)
ALL_S = 120.0
"""Processor time that all notebooks together may take: on an idle machine they take about as long."""

Executed = Callable[[str], Any]

NO_TORCH = "raise ImportError('a notebook must not need torch')\n"
TAKEN_S: dict[str, float] = {}


def code_cells(name: str) -> list[str]:
    return [cell.source for cell in jupytext.read(SOURCES / f"{name}.py").cells if cell.cell_type == "code"]


def test_they_are_all_here() -> None:
    assert NAMES == ["01_quickstart", "02_crossover", "03_published", "04_add_a_kernel"]


@pytest.mark.parametrize("name", NAMES)
def test_a_pair_agrees_and_holds_no_outputs(name: str) -> None:
    assert notebooks.disagreements(SOURCES, name) == []


def test_what_makes_a_pair_disagree_is_said(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_markdown_cell("# A"), nbformat.v4.new_code_cell("1 + 1")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    jupytext.write(notebook, tmp_path / "a.py", fmt="py:percent")
    assert notebooks.disagreements(tmp_path, "a") == [
        f"{tmp_path / 'a.ipynb'} is missing; `make notebooks-sync` makes the older one like the newer"
    ]
    jupytext.write(notebook, tmp_path / "a.ipynb")
    assert notebooks.disagreements(tmp_path, "a") == []
    cells[1].source = "1 + 2"
    cells[1].outputs = [nbformat.v4.new_output("stream", text="3\n")]
    cells.append(nbformat.v4.new_code_cell("2"))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "a.ipynb")
    differs, fewer, outputs = notebooks.disagreements(tmp_path, "a")
    assert differs.startswith("a: cell 2 differs between .py and .ipynb")
    assert fewer.startswith("a: 2 cells in .py, 3 in .ipynb")
    assert outputs == "a.ipynb holds outputs, which are not committed; clear them and save"


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_short_and_define_nothing(name: str) -> None:
    for source in code_cells(name):
        assert len(source.splitlines()) <= 16, source
        plain = re.sub(r"^!", "#", source, flags=re.MULTILINE)
        defines = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        assert not any(isinstance(node, defines) for node in ast.walk(ast.parse(plain))), source


@pytest.mark.parametrize("name", NAMES)
def test_cells_import_nothing_but_what_analyses(name: str) -> None:
    ours = set()
    for source in code_cells(name):
        for node in ast.walk(ast.parse(re.sub(r"^!", "#", source, flags=re.MULTILINE))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("epcross"):
                ours.add(node.module)
            assert not (isinstance(node, ast.Import) and any(a.name.startswith("epcross") for a in node.names))
    assert ours <= {"epcross.harness.analysis", "epcross.harness.claims"}


def processor_s() -> float:
    """Of all processes that this one waited for, and that they waited for: the kernel, and the ranks of its runs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def execute(name: str, folder: Path) -> Any:
    """The executed notebook; in a process of its own, as `make notebooks` runs it, where torch cannot be imported."""
    (folder / "torch.py").write_text(NO_TORCH)
    env = {
        **os.environ,
        "PYTHONPATH": f"{folder}:{ROOT / 'src'}",
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_DATA_DIR": str(folder / "jupyter"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    begin_s = processor_s()
    ended = subprocess.run(
        [sys.executable, "-m", "epcross.harness.analysis.notebooks", name, "-o", str(folder)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    TAKEN_S[name] = processor_s() - begin_s
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout + ended.stderr
    return nbformat.read(folder / f"{name}.ipynb", as_version=4)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Executed:
    """Each notebook, executed when a test first asks for it."""
    return functools.cache(lambda name: execute(name, tmp_path_factory.mktemp(name)))


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def html(notebook: Any) -> str:
    return "\n".join(output.get("data", {}).get("text/html", "") for output in outputs(notebook))


def text_of(notebook: Any, beginning: str) -> str:
    """What the one cell with a line that begins so printed."""
    (cell,) = [cell for cell in notebook.cells if re.search(rf"^{re.escape(beginning)}", cell.source, re.MULTILINE)]
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_runs_and_nothing_complains(executed: Executed, name: str) -> None:
    notebook = executed(name)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    # standard error of a cell would be a warning: of pandas, of matplotlib, or of ours about damaged units
    assert [output.text for output in outputs(notebook) if output.get("name") == "stderr"] == []
    assert "left out, because" not in html(notebook)


@pytest.mark.parametrize(("name", "figures"), [("01_quickstart", 5), ("02_crossover", 11), ("04_add_a_kernel", 1)])
def test_figures_are_drawn_with_their_captions(executed: Executed, name: str, figures: int) -> None:
    page = html(executed(name))
    assert page.count('src="data:image/svg+xml;base64,') == figures
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page, re.DOTALL)
    assert len(captions) == figures
    for caption in captions:  # estimator, n and run
        assert re.search(r"n = \d+(?: to \d+)? repeats", caption)
        assert re.search(r"run \d{8}-\d{6}-\w+-[0-9a-f]{4}", caption)
        assert "median" in caption
        assert len(re.findall(r"domain (?:cpu|nvlink|shared_gpu); run", caption)) == 1  # never two in one figure


def test_the_crossover_between_gpus_is_shown_with_its_interval_and_state(executed: Executed) -> None:
    """Medians of the committed run: 185 us against 187 at 2048 tokens, 366 against 365 at 4096."""
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", html(executed("02_crossover")), re.DOTALL)
    domains = [re.findall(r"domain (\w+); run", caption)[0] for caption in captions]
    assert domains == ["cpu"] * 4 + ["nvlink"] * 5 + ["shared_gpu"] * 2
    assert "1 to 3 launches x 3 seeds x 3 chains" in captions[-1]
    (table,) = [
        output["data"]["text/plain"]
        for cell in executed("02_crossover").cells
        if cell.source.startswith("pair = frame.load(NVLINK)")
        for output in cell.outputs
    ]
    assert "none in range" in table
    assert "onesided_sentinel" in table
    assert "ambiguous" in table  # without a margin: a crossing is there, and four launches do not call it
    assert "1024.0" in table


def test_published_values_stand_beside_measured_ones_with_verdicts(executed: Executed) -> None:
    page = html(executed("03_published"))
    curves, beside, verdicts = re.findall(r"<figcaption>(.*?)</figcaption>", page, re.DOTALL)
    assert "domain published: single values as aiconfigurator_deepep_ll, trtllm_blog18 state them" in curves
    for domain in ("cpu", "nvlink"):
        assert len(re.findall(rf"domain {domain}: medians of n = \d+(?: to \d+)? repeats; run \d{{8}}-", beside)) == 1
    assert "domain published: single values" in beside
    assert "rows of two domains are not compared" in beside
    assert re.search(r"judged by \d+ rows of domain nvlink in \d{8}-", verdicts)
    (table,) = [
        output["data"]["text/html"]
        for cell in executed("03_published").cells
        if cell.source.startswith("without = ")
        for output in cell.outputs
    ]
    assert "<th>not measured</th>" in table or 'valign="top">not measured</th>' in table


def test_a_kernel_is_really_added(executed: Executed) -> None:
    notebook = executed("04_add_a_kernel")
    assert re.search(r"my_kernel\s*│ my kernel\s*│ cpu\s*│ yes", text_of(notebook, "!{EPCROSS} backends"))
    broken = text_of(notebook, 'wrong = right.replace("sums')
    assert "0 passed, 1 failed" in broken
    assert re.search(r"rank 0: a wrong combined sum \(source 0, token 0, column 0\)", broken)
    assert f"{len(cases(2))} passed in" in text_of(notebook, "KERNEL.write_text(right)")
    assert "27 of 27 units: 81 ok" in text_of(notebook, 'RUNS = FOLDER / "runs"')
    (folder,) = re.findall(r"/\S*/my_kernel-\w+", text_of(notebook, 'RUNS = FOLDER / "runs"'))[:1]
    assert not Path(folder).exists()


def test_the_kernel_is_the_one_of_the_page() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    files = dict(re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    assert (SOURCES / "my_kernel" / "my_kernel.py").read_text() == files["harness/backends/my_kernel.py"]
    assert (SOURCES / "my_kernel" / "backend" / "my_kernel.yaml").read_text() == files[
        "my_folder/backend/my_kernel.yaml"
    ]


def test_together_they_take_less_than_two_minutes(executed: Executed) -> None:
    assert all(executed(name) for name in NAMES)
    assert sorted(TAKEN_S) == NAMES
    assert min(TAKEN_S.values()) > 1  # kernels are counted
    assert sum(TAKEN_S.values()) < ALL_S, TAKEN_S


def test_a_cell_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "wrong.py").write_text("# %%\nx = 1\n\n# %%\nx / 0\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "IPYTHONDIR": str(tmp_path / "ipython"),
           "JUPYTER_DATA_DIR": str(tmp_path / "jupyter")}  # fmt: skip
    command = [sys.executable, "-m", "epcross.harness.analysis.notebooks"]
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "epcross: notebooks/wrong.py: " in ended.stderr
    assert "x / 0" in ended.stderr
    assert "ZeroDivisionError" in ended.stderr
    assert "\x1b" not in ended.stderr
    ended = subprocess.run(
        [*command, "rihgt"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (1, "epcross: there is no notebook rihgt; there are wrong\n")
