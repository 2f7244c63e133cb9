"""The documents against the product: links resolve, and every command in a `sh` block is one that exists."""

import ast
import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

import epcross
from epcross.harness.cli import cli
from epcross.harness.planning.build import build
from epcross.harness.terms import Flag, Status
from epcross.harness.verification.cases import cases

ROOT = Path(__file__).parents[2]
SKIPPED = {"build", "dist", "node_modules"}
DOCUMENTS = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if not any(part.startswith(".") or part in SKIPPED for part in path.relative_to(ROOT).parts)
    and path.relative_to(ROOT).parts[:1] != ("src",)
]
MAKE_TARGETS = set(re.findall(r"^([a-z0-9_-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """The lines of the `sh` blocks, continuations joined, comments dropped."""
    lines = "\n".join(SHELL_BLOCK.findall(text)).replace("\\\n", " ").splitlines()
    return [bare for line in lines if (bare := line.split(" #")[0].strip()) and not bare.startswith("#")]


def problem(command: str) -> str | None:
    """Why a command cannot be what a reader types; None if target or verb, and every option, exist."""
    program, *words = shlex.split(command)
    if program == "make":
        unknown = {word for word in words if "=" not in word} - MAKE_TARGETS
        return f"no such target: {sorted(unknown)}" if unknown else None
    if Path(program).name != "epcross" or not words:
        return "neither make nor epcross with a verb"
    context = click.Context(cli)
    if words[0] not in cli.list_commands(context):
        return f"no verb; there are {cli.list_commands(context)}"
    verb = cli.get_command(context, words[0])
    assert verb is not None
    verb = getattr(verb, "commands", {}).get(words[1] if len(words) > 1 else "", verb)  # such as `claims add`
    if words[0] in ("run", "plan", "check") and (loose := _loose(verb, words[1:])):
        return f"neither an option nor KEY=VALUE: {loose}"
    known = {option for parameter in verb.params for option in parameter.opts}
    unknown = {word for word in words[1:] if word.startswith("-") and " " not in word} - known
    return f"no such option: {sorted(unknown)}" if unknown else None


def _loose(verb: click.Command, words: list[str]) -> list[str]:
    """Words that stand for nothing: prose behind a command, that a reader would type as well."""
    takes_value = {
        option
        for parameter in verb.params
        if isinstance(parameter, click.Option) and not parameter.is_flag
        for option in parameter.opts
    }
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if not word.startswith("-") and "=" not in word and before not in takes_value
    ]


def in_tables(text: str) -> list[str]:
    """Commands that stand in the cells of tables."""
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    return re.findall(r"`((?:make|\.venv/bin/epcross) [^`]*)`", rows)


def anchors(path: Path) -> set[str]:
    """GitHub's anchors of a document's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_documents_are_found() -> None:
    some = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "ARTIFACT.md", "docs/evidence.md", "results/README.md"}
    assert some <= {str(path.relative_to(ROOT)) for path in DOCUMENTS}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(path: Path) -> None:
    broken = []
    for target in LINK.findall(path.read_text()):
        file, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        found = path.parent / file if file else path
        if not found.exists() or (anchor and found.suffix == ".md" and anchor not in anchors(found)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(path: Path) -> None:
    text = path.read_text()
    assert {c: found for c in [*commands(text), *in_tables(text)] if (found := problem(c))} == {}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_of_code_are_code(path: Path) -> None:
    for language, block in BLOCK.findall(path.read_text()):
        if language == "python":
            ast.parse(block)
        elif language in ("yaml", "json"):
            assert yaml.safe_load(block) is not None
        else:
            assert language in ("sh", "text", ""), f"blocks in {language} are not tested"


def test_commands_that_do_not_exist_are_found() -> None:
    shell = "make quickstart\nmake quickstrat # typo\nepcross frobnicate\nepcross plan --quick"
    shell += "\nepcross plan sweep=smoke   a small one\nepcross run --resume RUN sweep=smoke # goes on"
    text = f"```sh\n{shell}\n```\n```text\nmake nothing\n```\n"
    wrong = [command for command in commands(text) if problem(command)]
    assert wrong[:3] == ["make quickstrat", "epcross frobnicate", "epcross plan --quick"]
    assert wrong[3:] == ["epcross plan sweep=smoke   a small one"]
    assert in_tables("| a | `make b` then `.venv/bin/epcross c` |\n`make d`\n") == ["make b", ".venv/bin/epcross c"]


PLANS = sorted(
    {
        command
        for path in DOCUMENTS
        for command in commands(path.read_text())
        if Path(shlex.split(command)[0]).name == "epcross" and shlex.split(command)[1] == "plan"
    }
)


@pytest.mark.parametrize("command", PLANS)
def test_plans_of_the_documents_have_points_that_a_backend_supports(command: str) -> None:
    plan = build(shlex.split(command)[2:])
    assert plan.points
    unsupported = {item.point: item.reason for item in plan.impossible if item.status == Status.UNSUPPORTED}
    assert len(unsupported) < len(plan.points), set(unsupported.values())


def test_readme_and_ci_call_the_same_test_command() -> None:
    assert "make test" in commands((ROOT / "README.md").read_text())
    script = (ROOT / ".ci" / "run").read_text()
    assert script.rstrip().splitlines()[-1] == "make test"
    assert re.search(r"^export CI=true\b", script, re.MULTILINE)


def test_the_quickstart_of_the_readme_names_every_backend() -> None:
    table = set(re.findall(r"^\| `(\w+)` \| `\w+`[^|]* \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert table == {path.stem for path in (ROOT / "conf" / "backend").glob("*.yaml")}


def test_the_citation_is_valid_and_of_this_version() -> None:
    """Required keys and types of the Citation File Format 1.2.0, https://citation-file-format.github.io."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
    assert citation.keys() <= {
        *("cff-version", "message", "title", "authors", "type", "version", "license", "abstract", "keywords"),
        *("date-released", "doi", "url", "repository-code"),
    }
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert citation["version"] == epcross.__version__
    assert citation["license"] == "Apache-2.0"
    assert citation["authors"]
    for author in citation["authors"]:
        assert set(author) <= {"name"} or set(author) >= {"family-names", "given-names"}
    assert all(isinstance(citation[key], str) for key in ("message", "title", "abstract"))


def test_the_artifact_page_counts_the_cases_of_a_check() -> None:
    (count,) = re.findall(r"`(\d+) passed`", (ROOT / "ARTIFACT.md").read_text())
    assert int(count) == len(cases(2))


def test_the_flag_of_the_debugging_page_exists() -> None:
    assert f"`{Flag.PROFILED}`" in (ROOT / "docs" / "debugging.md").read_text()
