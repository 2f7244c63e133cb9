"""The two sides of a comparison: the rows of two subjects, group by group, in which each is one curve."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from epcross.harness.analysis.frame import CONDITIONS, FORMATS, INPUTS, SUBJECT, require_one_domain
from epcross.harness.errors import InputError

Subject = str | Mapping[str, Any]
"""A backend's name, or values of `SUBJECT` columns where the name alone is not one subject."""

Sides = tuple[pd.DataFrame, pd.DataFrame]
"""The rows of each of the two."""

_NEEDED = ("tokens_per_rank", "run_id", "launch", "seed", "chain", "latency_us", "allocation_id")


def require_two(a: Subject, b: Subject) -> None:
    """Refuse what is no subject, and a subject beside itself.

    Raises:
        InputError: with what was given and what may be.
    """
    for subject in (a, b):
        if not isinstance(subject, str | Mapping) or not subject:
            raise InputError(
                f"{subject!r} is no subject; give the name of a backend, such as 'shm_fence', or a mapping with values "
                f"of {', '.join(SUBJECT)}"
            )
    if _wanted(a) == _wanted(b):
        raise InputError(f"both subjects are {name_of(a)}, and nothing can be said of one beside itself; name two")


def name_of(subject: Subject) -> str:
    """The words for it in a result."""
    if isinstance(subject, str):
        return subject
    return " ".join(str(value) for value in subject.values())


def matched(
    rows: pd.DataFrame,
    frame: pd.DataFrame,
    subjects: tuple[Subject, Subject],
    by: list[str],
    *,
    mixed: bool,
    unlike: Collection[str],
) -> Iterator[tuple[dict[str, Any], Sides]]:
    """Each group of `rows` that holds both `subjects`: its values of `by`, and the rows of each subject.

    Args:
        rows: those of `frame` that may be used.
        mixed: allow several domains.
        unlike: conditions in which the two may differ, if each of them agrees with itself.

    Raises:
        InputError: a subject is unknown, domains are mixed, or a group mixes what must not be.
    """
    names = (name_of(subjects[0]), name_of(subjects[1]))
    needed = [*dict.fromkeys((*by, *SUBJECT, *CONDITIONS, *_NEEDED))]
    chosen = [_select(rows, frame, subject, needed) for subject in subjects]
    require_one_domain(*chosen, mixed=mixed)
    groups = [dict(iter(side.groupby(by, observed=True))) for side in chosen]
    for values in sorted(groups[0].keys() & groups[1].keys()):
        sides, key = (groups[0][values], groups[1][values]), dict(zip(by, values, strict=True))
        _require_one_curve(sides, names, key, mixed=mixed, unlike=unlike)
        yield key, sides


def formats_of(sides: Sides) -> str:
    """`fp8 x fp8 against fp8 x fp4`: activations by weights, of the two; empty if they are the same."""
    return _against([" x ".join(str(own[name].iloc[0]) for name in FORMATS) for own in sides])


def inputs_of(sides: Sides) -> str:
    """`staging inside against staged before`, of the two; empty if they are the same."""
    told = [{name: str(own[name].iloc[0]) for name in INPUTS} for own in sides]
    apart = [name for name in INPUTS if told[0][name] != told[1][name]]
    return _against([", ".join(each[name] for name in apart) for each in told])


def _against(told: list[str]) -> str:
    return "" if told[0] == told[1] else " against ".join(told)


def _select(rows: pd.DataFrame, frame: pd.DataFrame, subject: Subject, columns: list[str]) -> pd.DataFrame:
    """These columns of the rows of a subject. Only they are copied: a frame has three times as many."""
    wanted = _wanted(subject)
    if unknown := sorted(set(wanted) - set(SUBJECT)):
        raise InputError(f"{', '.join(unknown)} does not tell subjects apart; use {', '.join(SUBJECT)}")
    there, chosen = np.ones(len(frame), bool), np.ones(len(rows), bool)
    for column, value in wanted.items():
        there &= (frame[column] == value).to_numpy(bool)
        if not there.any():
            found = ", ".join(sorted(map(str, frame[column].unique())))
            raise InputError(f"no row with {column} {value} beside the values before it. There are: {found}")
        chosen &= (rows[column] == value).to_numpy(bool)
    return rows[columns][chosen]


def _wanted(subject: Subject) -> dict[str, Any]:
    return {"backend": subject} if isinstance(subject, str) else dict(subject)


def _require_one_curve(
    sides: Sides, names: tuple[str, str], key: Mapping[str, Any], *, mixed: bool, unlike: Collection[str]
) -> None:
    """A group must hold one curve of each subject, under the same conditions."""
    apart = {*unlike, *(("domain", "sharing", "machine", "measure_hash") if mixed else ())}
    problems = [
        (f"{column}: {', '.join(sorted(map(str, own[column].unique())))} ({name})", "")
        for own, name in zip(sides, names, strict=True)
        for column in (*SUBJECT, *unlike)
        if column not in key and own[column].nunique() > 1
    ]
    for column in CONDITIONS:
        if column not in key and column not in apart:
            values = sorted({str(value) for own in sides for value in own[column].unique()})
            asked = ", or ask for it by mixed_inputs=True" if column in INPUTS else ""
            problems += [(f"{column}: {', '.join(values)}", asked)] * (len(values) > 1)
    if problems:
        raise InputError(
            [f"{text} are mixed in one group; select one, or add the column to `by`{asked}" for text, asked in problems]
        )
