"""What was done to the inputs of a row before its window opened, and the words for it in every title, legend and table.

A window that leaves out a step is shorter for that: such rows are of other work, whoever was measured.
"""

import json
from functools import cache

from epcross.harness.terms import BackendKind

STAGING = "staging"
"""The option of layers that says whether their inputs are staged inside the window."""

LAYOUT = "layout"
"""The option of expert stages that says how their rows lie: by expert, somebody has done part of the work before."""

STAGED_WORDS = {True: "staged before", False: "staging inside"}
"""By whether inputs were quantised and staged before the window."""

NOT_STAGED, NO_LAYOUT = "none", "none"
"""Stand in the columns `staging` and `layout` of a frame for rows that have no such option by nature."""


@cache  # a run has some hundred rows of each
def staged_before(options: str) -> bool:
    """Whether the inputs of a layer with these options (JSON) were quantised and staged before the window."""
    return _option(options, STAGING) is False


def staging_of(kind: str | None, options: str) -> str:
    """`staged before` or `staging inside` of a layer; empty of what is none."""
    return STAGED_WORDS[staged_before(options)] if kind in (BackendKind.LAYER, BackendKind.FUSED) else ""


def layout_of(kind: str | None, options: str) -> str:
    """How the rows of an expert stage lay; empty of what is none."""
    return str(_option(options, LAYOUT) or "") if kind == BackendKind.EXPERTS else ""


def option_words(name: str, value: object) -> str:
    """An option of a backend, or of an expert stage, wherever people read one: `sms=24`, and of these two the words of
    titles."""
    if name == STAGING:
        return STAGED_WORDS[value is False]
    return f"{name} {value}" if name == LAYOUT else f"{name}={value}"


def _option(options: str, name: str) -> object:
    try:
        found = json.loads(options)
    except ValueError:  # of rows that something else wrote
        return None
    return found.get(name) if isinstance(found, dict) else None
