"""What rows of an older schema say in the words of today. Files stay as they are; this is done where they are read."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from epcross.harness.measuring.gpu_state import slowed
from epcross.harness.storing.rows import join_words
from epcross.harness.terms import Flag

_POWER_CAPPED_SINCE = 8
"""Schema version from which a GPU at its own power limit is no longer flagged as others that are held back."""


def as_now(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row; whatever they hold, as nobody has checked them yet."""
    version, flags, reasons = (row.get(name) for name in ("schema_version", "flags", "throttle_reasons"))
    if not isinstance(version, int) or version >= _POWER_CAPPED_SINCE or not isinstance(flags, str):
        return dict(row)
    return {**row, "flags": _flags(flags, reasons)}


def table_as_now(table: pa.Table) -> pa.Table:
    """As `as_now`, for a table of rows."""
    if not len(table) or pc.min(table["schema_version"]).as_py() >= _POWER_CAPPED_SINCE:
        return table
    columns = [table[name].to_pylist() for name in ("schema_version", "flags", "throttle_reasons")]
    flags = [
        _flags(own, reasons) if version < _POWER_CAPPED_SINCE else own
        for version, own, reasons in zip(*columns, strict=True)
    ]
    place = table.column_names.index("flags")
    return table.set_column(place, table.schema.field("flags"), pa.array(flags, table.schema.field("flags").type))


def _flags(flags: str, reasons: object) -> str:
    words = flags.split()
    if Flag.THROTTLED not in words or not isinstance(reasons, str) or slowed(reasons.split()) is not Flag.POWER_CAPPED:
        return flags
    return join_words(Flag.POWER_CAPPED if word == Flag.THROTTLED else word for word in words)
