"""From a plain mapping to one dataclass, strictly, with every problem reported at once.

Nothing is converted behind the user's back: a string is no number, a boolean is no name.
"""

import difflib
import math
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

_YAML_BOOLEAN_HINT = "YAML reads on, off, yes and no as booleans: put a name in quotes"


class Mismatch(ValueError):
    """A value that does not fit; the message says what was given and what is allowed."""

    def __init__(self, message: str, *, wanted: str = "", hint: str = "") -> None:
        """`message` starts with a verb. With `wanted` it is "is VALUE, but must be WANTED", then the hint."""
        super().__init__(f"{message}, but must be {wanted}{hint}" if wanted else message)
        self.wanted = wanted
        self.hint = hint


def suggest(name: str, allowed: Iterable[str]) -> str:
    """A tail for an error message: the nearest allowed word, if one is near, and all allowed words."""
    words = list(allowed)
    near = [w for w in words if name and w.startswith(name)] or difflib.get_close_matches(name, words, n=1, cutoff=0.6)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"{hint} Allowed: {', '.join(words)}" if hint else f"; allowed: {', '.join(words) or 'nothing'}"


@cache
def field_types(cls: type) -> dict[str, Any]:
    """The resolved annotation of each field of a dataclass, in order."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def convert(value: Any, annotation: Any) -> Any:
    """`value` as `annotation`: a scalar, an enum, a list as a tuple, a mapping, a dataclass, or a union of these.

    Raises:
        Mismatch: it does not fit.
    """
    if annotation is Any:
        return value
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _one_of(value, get_args(annotation))
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise Mismatch(f"is {value!r}", wanted="a list")
        kinds = get_args(annotation)
        if kinds[-1] is Ellipsis:
            return tuple(_item(item, kinds[0]) for item in value)
        if len(value) != len(kinds):
            raise Mismatch(f"is {value!r}", wanted=f"a list of {len(kinds)}")
        return tuple(_item(item, kind) for item, kind in zip(value, kinds, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise Mismatch(f"is {value!r}", wanted="a mapping of names to values")
        return {_name(key): convert(item, get_args(annotation)[1]) for key, item in value.items()}
    if isinstance(annotation, type) and hasattr(annotation, "__dataclass_fields__"):
        problems: list[str] = []
        result = build(annotation, value, "", problems)
        if result is None:
            raise Mismatch("has problems: " + "; ".join(problems))
        return result
    return _scalar(value, annotation)


def build(cls: type[T], data: Any, where: str, problems: list[str], unlisted: Collection[str] = ()) -> T | None:
    """An instance of the dataclass `cls` from `data`, or None after adding every problem to `problems`.

    `where` names the place in messages, such as "model 'tiny'"; `unlisted` are fields that nobody writes there.
    """
    before = len(problems)
    prefix = f"{where}: " if where else ""
    kinds = field_types(cls)
    listed = [name for name in kinds if name not in unlisted]
    if not isinstance(data, Mapping):
        problems.append(f"{prefix}is {data!r}, but must be a mapping with {', '.join(listed)}")
        return None
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in kinds:
            problems.append(f"{prefix}unknown key '{key}'{suggest(str(key), listed)}")
            continue
        try:
            values[key] = convert(value, kinds[key])
        except Mismatch as error:
            problems.append(f"{prefix}{key} {error}")
    problems += [
        f"{prefix}{spec.name} is missing"
        for spec in fields(cast(Any, cls))
        if spec.name not in data and spec.default is MISSING and spec.default_factory is MISSING
    ]
    return cls(**values) if len(problems) == before else None


def _name(key: Any) -> str:
    if not isinstance(key, str):
        raise Mismatch(f"has the key {key!r}, but keys must be text; {_YAML_BOOLEAN_HINT}")
    return key


def _item(value: Any, annotation: Any) -> Any:
    try:
        return convert(value, annotation)
    except Mismatch as error:
        raise Mismatch(f"has an item that {error}") from None


def _one_of(value: Any, options: Sequence[Any]) -> Any:
    if value is None and types.NoneType in options:
        return None
    failed: list[Mismatch] = []
    # an exact type first, so that True stays a boolean and 1 an integer where both are allowed
    for option in sorted((o for o in options if o is not types.NoneType), key=lambda o: type(value) is not o):
        try:
            return convert(value, option)
        except Mismatch as error:
            failed.append(error)
    if all(error.wanted for error in failed):
        wanted = " or ".join(error.wanted for error in failed)
        raise Mismatch(f"is {value!r}", wanted=wanted, hint=next((e.hint for e in failed if e.hint), ""))
    raise failed[-1]  # a list of the right kind with a wrong item in it, say


def _scalar(value: Any, kind: type) -> Any:
    if kind is types.NoneType and value is None:
        return None
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        if isinstance(value, str) and value in list(kind):
            return kind(value)
        hint = f" ({_YAML_BOOLEAN_HINT})" if isinstance(value, bool) else ""
        raise Mismatch(f"is {value!r}{suggest(str(value), [str(member) for member in kind])}{hint}")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is float and isinstance(value, float) and not math.isfinite(value):
        raise Mismatch(f"is {value!r}", wanted="a finite number")
    if type(value) is kind:
        return value
    raise Mismatch(f"is {value!r}", wanted=_WORDS.get(kind, str(kind)), hint=_hint(value, kind))


_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


def _hint(value: Any, kind: type) -> str:
    if kind is str:
        return (
            f"; {_YAML_BOOLEAN_HINT}" if isinstance(value, bool) else "; put it in quotes" if value is not None else ""
        )
    if isinstance(value, str) and kind in (int, float):
        if "," in value:
            return "; several values are a list, [1, 2], or unquoted on the command line, key=1,2"
        return "; leave out the quotes" if value.replace(".", "", 1).isdigit() else ""
    return ""
