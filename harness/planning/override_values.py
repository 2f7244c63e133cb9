"""From one parsed override of Hydra's grammar to the values it stands for."""

from itertools import islice
from typing import Any

from epcross.harness.planning.factors import GROUPS
from epcross.harness.planning.library import Library
from epcross.harness.planning.typed import Mismatch

MOST_VALUES = 10_000
"""That one word may stand for: more would be points beyond counting."""


def override_values(override: Any, key: str, library: Library) -> list[Any]:
    """The values that a parsed override of `key` stands for, in order.

    Raises:
        Mismatch: it is a kind of value that has no use here, or stands for too many.
    """
    from hydra.core.override_parser.types import ChoiceSweep, Glob, RangeSweep

    raw = override.value()
    if isinstance(raw, Glob):
        if key not in GROUPS:
            raise Mismatch(f"uses glob(), which selects options of {', '.join(GROUPS)}")
        names = raw.filter(library.names(key))
        if not names:
            raise Mismatch(f"selects nothing; allowed: {', '.join(library.names(key)) or 'nothing'}")
        return names
    if isinstance(raw, ChoiceSweep | RangeSweep):
        if raw.shuffle:
            raise Mismatch("uses shuffle(), but points keep a stable order; leave it out")
        return _listed(override)
    if override.is_sweep_override():
        raise Mismatch("is an interval; list values, or use range(start,stop,step)")
    return [_plain(raw)]


def _listed(override: Any) -> list[Any]:
    """The values of a list or range, as long as there are not too many."""
    try:
        values = [_plain(value) for value in islice(override.sweep_iterator(), MOST_VALUES + 1)]
    except Exception as error:  # whatever Hydra makes of a range without an end, or a sort of unlike values
        raise Mismatch(f"cannot be listed: {error or type(error).__name__}") from error
    if len(values) > MOST_VALUES:
        raise Mismatch(f"stands for more than {MOST_VALUES} values; give fewer, or a range with larger steps")
    return values


def _plain(value: Any) -> Any:
    from hydra.core.override_parser.types import QuotedString

    if isinstance(value, QuotedString):
        return value.text
    return [_plain(item) for item in value] if isinstance(value, list) else value
