"""The documents against the product: links resolve, and every command in a `sh` block is one that exists."""

import re
from pathlib import Path

import click
import pytest

from epcross.harness.cli import cli

ROOT = Path(__file__).parents[2]
SKIPPED = {"build", "dist", "node_modules"}
DOCUMENTS = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if not any(part.startswith(".") or part in SKIPPED for part in path.relative_to(ROOT).parts)
    and path.relative_to(ROOT).parts[:1] != ("src",)
]
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SHELL_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """The lines of the `sh` blocks, continuations joined, comments dropped."""
    lines = "\n".join(SHELL_BLOCK.findall(text)).replace("\\\n", " ").splitlines()
    return [bare for line in lines if (bare := line.split(" #")[0].strip()) and not bare.startswith("#")]


def problem(command: str) -> str | None:
    """Why a command cannot be what a reader types; None if target or verb, and every option, exist."""
    program, *words = command.split()
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
    known = {option for parameter in verb.params for option in parameter.opts}
    unknown = {word for word in words[1:] if word.startswith("-")} - known
    return f"no such option: {sorted(unknown)}" if unknown else None


def anchors(path: Path) -> set[str]:
    """GitHub's anchors of a document's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_documents_are_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= {str(path.relative_to(ROOT)) for path in DOCUMENTS}


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
    assert {c: found for c in commands(path.read_text()) if (found := problem(c))} == {}


def test_commands_that_do_not_exist_are_found() -> None:
    shell = "make quickstart\nmake quickstrat # typo\nepcross frobnicate\nepcross plan --quick"
    text = f"```sh\n{shell}\n```\n```text\nmake nothing\n```\n"
    wrong = [command for command in commands(text) if problem(command)]
    assert wrong == ["make quickstrat", "epcross frobnicate", "epcross plan --quick"]


def test_readme_and_ci_call_the_same_test_command() -> None:
    assert "make test" in commands((ROOT / "README.md").read_text())
    script = (ROOT / ".ci" / "run").read_text()
    assert script.rstrip().splitlines()[-1] == "make test"
    assert re.search(r"^export CI=true\b", script, re.MULTILINE)


def test_the_quickstart_of_the_readme_names_every_backend() -> None:
    table = set(re.findall(r"^\| `(\w+)` \| `\w+` \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert table == {path.stem for path in (ROOT / "conf" / "backend").glob("*.yaml")}
