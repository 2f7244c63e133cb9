"""Rows that several of the given places hold: each counts once, and copies that differ are refused."""

import pandas as pd

from epcross.harness.errors import InputError
from epcross.harness.storing.table_rules import ROW_KEY
from epcross.harness.storing.withdrawn import WITHDRAWN_FILE
from epcross.harness.terms import Flag

_ROW_KEY = list(ROW_KEY)


def without_copies(frame: pd.DataFrame) -> pd.DataFrame:
    """Stored rows, each once: a run may be given alone and inside a merged folder.

    Raises:
        InputError: a row is there twice with different values.
    """
    if not frame.duplicated(_ROW_KEY).any():  # as mostly; to set all columns of all rows side by side takes long
        return frame.reset_index(drop=True)
    frame = frame.drop_duplicates(ignore_index=True)
    twice = frame[frame.duplicated(_ROW_KEY)]
    if len(twice):
        first = ", ".join(f"{name} {twice.iloc[0][name]}" for name in _ROW_KEY)
        since = (
            f"One copy withdraws them by its {WITHDRAWN_FILE} and the other does not: give that one only, or put the "
            "same file beside both"
        )
        apart = "Two copies of one run have come apart: give the whole one only"
        raise InputError(
            f"{len(twice)} rows are there twice with different values, the first: {first}. "
            f"{since if _differ_by_withdrawal(frame) else apart}"
        )
    return frame


def _differ_by_withdrawal(frame: pd.DataFrame) -> bool:
    """Whether copies differ in nothing but the flag of what is withdrawn."""
    plain = [" ".join(flag for flag in own.split() if flag != Flag.KNOWN_ISSUE) for own in frame["flags"]]
    return not frame.assign(flags=plain).drop_duplicates().duplicated(_ROW_KEY).any()
