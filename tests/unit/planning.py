"""What the tests of configuration, plan and command line share."""

from pathlib import Path

import pytest

from epcross.harness.errors import ConfigError
from epcross.harness.planning.build import build
from epcross.harness.planning.config import resolve
from epcross.harness.planning.library import Library
from epcross.harness.planning.plan import Plan

FIXTURES = Path(__file__).parent.parent / "fixtures" / "config"


def plan_of(*words: str, more: tuple[Path, ...] = ()) -> Plan:
    """The plan of `words`, with the fixture backends in reach."""
    return build(words, [FIXTURES, *more])


def problems_of(*words: str, more: tuple[Path, ...] = ()) -> tuple[str, ...]:
    """The problems that `words` are refused with."""
    with pytest.raises(ConfigError) as caught:
        build(words, [FIXTURES, *more])
    return caught.value.problems


def the_problem(*words: str, more: tuple[Path, ...] = ()) -> str:
    """The only problem that `words` are refused with."""
    problems = problems_of(*words, more=more)
    assert len(problems) == 1, problems
    return problems[0]


def sweep_file(folder: Path, text: str, name: str = "mine") -> Path:
    """A config folder below `folder` with one sweep in it."""
    path = folder / "config" / "sweep" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return folder / "config"


def library() -> Library:
    """The package's own options and the fixture backends."""
    return Library([FIXTURES])


__all__ = ["FIXTURES", "library", "plan_of", "problems_of", "resolve", "sweep_file", "the_problem"]
