"""How it is said that a run is left out because a newer one answers the same question in another way."""

from collections.abc import Mapping

_HASHES = frozenset({"machine", "measure_hash", "backend_version"})
_HASH_SHOWN = 12  # digits of a hash, which are enough to tell two apart


def shown(name: str, value: object) -> str:
    """The value of a column as it is set beside another one: of a hash the first digits."""
    text = str(value)
    return text[:_HASH_SHOWN] if name in _HASHES else text


def differs_from(newer: str, own: Mapping[str, str], there: Mapping[str, str], *, as_old: bool = False) -> str:
    """In what an older run, with its `own` values, differs from the run `newer` and those `there`; empty if in none.
    Of two that are as old as each other the name decides."""
    apart = [f"{name} ({value}, there {there[name]})" for name, value in own.items() if value != there[name]]
    order = "of the same time and later by name" if as_old else "which is newer"
    return f"it differs from {newer}, {order}, in {', '.join(apart)}" if apart else ""
