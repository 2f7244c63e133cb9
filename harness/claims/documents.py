"""Documents that people write, read strictly: what stands twice or reads as something else is refused."""

import re
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from epcross.harness.errors import InputError

LARGEST_BYTES = 8_000_000
"""A larger file is no list of claims or values."""

NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
"""A number as anyone reads it. Python takes 1_0 for 10, and YAML 010 for 8 and 1:30 for 90."""

_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|nan)", re.IGNORECASE)  # known for what they are, and refused where they are used

_HIDDEN = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""They turn the direction of what follows, so that a terminal shows other words than a file holds."""


class _Strict(yaml.SafeLoader):
    """PyYAML's safe loader, which knows no objects, without what hides mistakes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not read here; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for number, key in enumerate(keys) if key in keys[:number]]
        if twice:
            raise yaml.YAMLError(f"the key '{twice[0]}' stands twice (line {node.start_mark.line + 1} on)")
        return super().construct_mapping(node, deep)

    def construct_whole(self, node: yaml.ScalarNode) -> int:
        """A whole number in plain decimal digits."""
        return super().construct_yaml_int(_plainly(node, _WHOLE.fullmatch(node.value) is not None))

    def construct_number(self, node: yaml.ScalarNode) -> float:
        """A number with a point or an exponent, or one that is not finite."""
        plain = NUMBER.fullmatch(node.value) or _NOT_FINITE.fullmatch(node.value)
        return super().construct_yaml_float(_plainly(node, plain is not None))


_Strict.add_constructor("tag:yaml.org,2002:int", _Strict.construct_whole)
_Strict.add_constructor("tag:yaml.org,2002:float", _Strict.construct_number)


def _plainly(node: yaml.ScalarNode, plain: bool) -> yaml.ScalarNode:
    if plain:
        return node
    raise yaml.YAMLError(
        f"line {node.start_mark.line + 1} has the number {node.value[:40]}, which YAML reads as another one than it "
        "looks like; write it in plain decimal digits, or in quotes if it is text"
    )


def read_text(path: Path) -> str:
    """The text of a file that a person wrote.

    Raises:
        InputError: it is missing, too large or no UTF-8 text.
    """
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is no file")
        if path.stat().st_size > LARGEST_BYTES:
            raise InputError(f"{path} is larger than {LARGEST_BYTES // 1_000_000} MB; no table of a paper is")
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from None


def control_characters(text: str) -> bool:
    """Whether `text` holds any but tab and line feed: of a terminal, of lines or of direction, or half a character."""
    return any(
        one in _HIDDEN or unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp") for one in text if one not in "\t\n"
    )


def _texts(value: Any) -> Iterator[str]:
    """Every text of a document, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _texts(item)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Raises:
        InputError: it cannot be read, or holds something else.
    """
    text = read_text(path)
    try:
        document = yaml.load(text, _Strict)
    except Exception as error:  # besides its own, PyYAML lets those of numbers, dates and recursion through
        words = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(f"{path} is no YAML that can be used: {words}") from None
    if any(control_characters(text) for text in _texts(document)):
        raise InputError(f"{path} has control characters in a text; a terminal would obey them")
    if not isinstance(document, Mapping):
        raise InputError(f"{path} {_held(document)}, but must be a mapping of names to values")
    return dict(document)


def _held(document: Any) -> str:
    return "is empty" if document is None else f"holds {type(document).__name__}"
