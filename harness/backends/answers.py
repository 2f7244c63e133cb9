"""What a backend, or an expert stage, declares and answers, held to the contract where it enters the harness.

Backends are other people's code. Each is asked through these functions, so that a wrong value ends as a sentence about
that backend, and as its own rows, instead of as an exception somewhere else.
"""

import inspect
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from enum import StrEnum
from typing import Any, TypeVar

from epcross.harness.backends.base import Backend, ContractShape, Description, Reduction
from epcross.harness.errors import EpcrossError
from epcross.harness.point import Point, Scalar
from epcross.harness.terms import BackendKind, Boundary, Domain, GraphSupport, Phase, Scope, WeightsBy
from epcross.kernels.experts.compute import ExpertCompute

CONTRACT = "epcross/harness/backends/base.py"
STAGE_CONTRACT = "epcross/kernels/experts/compute.py"

FAILURES = (Exception, SystemExit)
"""What somebody else's code may end with and the harness goes on. A library that calls `sys.exit` ends nobody else."""

MOST_BYTES = 2**63 - 1
"""Of a whole number in a row."""

_ORDERS, _SUMS = ("rank_ascending", "unordered"), ("fp32", "bf16")
_SHOWN = 80  # characters of a wrong value

B = TypeVar("B", bound=Backend)


class WrongBackend(EpcrossError):
    """A backend, or an expert stage, breaks the contract; the message names value, what is allowed and where to correct
    it."""


def failure(error: BaseException) -> str:
    """What somebody else's code ended with, as words that can be shown and stored."""
    try:
        words = str(error)
    except FAILURES:
        words = ""
    name = type(error).__name__
    return f"{name}: {words}".encode(errors="replace").decode() if words else name


def class_problems(found: type[Backend]) -> list[str]:
    """What is wrong with the declarations that are read where there is no instance yet, as sentences."""
    return _problems(found, {"kind": _RULES["kind"], "domains": _RULES["domains"]})


def option_defaults(found: type[Backend]) -> dict[str, Scalar]:
    """Every option and its default. Raises `WrongBackend`."""
    defaults = _asked(found, "option_defaults", found.option_defaults)
    if not isinstance(defaults, Mapping) or not all(map(_is_text, defaults)):
        raise _wrong(found, "option_defaults()", defaults, "a mapping of names to defaults, such as {'chunk': 4}")
    for name, value in defaults.items():
        if not (value is None or isinstance(value, int | float) or _is_text(value)):
            raise _wrong(found, f"the default of option '{name}'", value, "text, a number, true, false or None")
    return dict(defaults)


def stage_defaults(found: type[ExpertCompute]) -> dict[str, Scalar]:
    """The options of an expert stage: arguments of its constructor whose default is a plain value. Raises
    `WrongBackend`."""
    parameters = _asked(found, "the signature of __init__", lambda: inspect.signature(found)).parameters.values()
    return {p.name: p.default for p in parameters if isinstance(p.default, bool | int | float | str)}


def stage_made(found: type[ExpertCompute], options: Mapping[str, Scalar]) -> ExpertCompute:
    """An instance of an expert stage. Raises `WrongBackend`."""
    must = "only keep its options: load what may be missing in prepare(), and name it in unavailable()"
    return _asked(found, "__init__", lambda: found(**options), must)


def stage_problems(stage: ExpertCompute) -> list[str]:
    """Which options of an expert stage could serve nobody. Raises `WrongBackend`."""
    return _sentences(type(stage), stage.option_problems)


def option_problems(found: type[Backend], options: Mapping[str, Scalar]) -> list[str]:
    """Which values could serve nobody. Raises `WrongBackend`."""
    return _sentences(found, lambda: found.option_problems(options))


def made(found: type[B], options: Mapping[str, Scalar]) -> B:
    """An instance whose declarations are as the contract has them. Raises `WrongBackend`."""
    backend = _asked(found, "__init__", lambda: found(options))
    if getattr(backend, "options", None) != options:
        kept = getattr(backend, "options", None)
        raise _wrong(found, "options after __init__", kept, f"{dict(options)}: call super().__init__(options)")
    if problems := _problems(backend, _RULES):
        raise WrongBackend(f"{_named(found)} breaks the contract of {CONTRACT}: {'; '.join(problems)}")
    return backend


def unavailable(asked: Any) -> str | None:
    """Why a backend, or an expert stage, cannot be used here. Raises `WrongBackend`, and what it raises itself."""
    return _reason(asked, "unavailable()", asked.unavailable(), "why it cannot be used here")


def unsupported(backend: Backend, point: Point) -> str | None:
    """Why `point` cannot run. Raises as `unavailable`."""
    return _reason(backend, "unsupported()", backend.unsupported(point), "why the point cannot run")


def refused_here(backend: Backend, point: Point) -> str | None:
    """Why `point` cannot run with what this process has loaded. Raises as `unavailable`."""
    return _reason(backend, "refused_here()", backend.refused_here(point), "why the point cannot run here")


def workspace_bytes(backend: Backend, point: Point) -> int:
    """Bytes of each rank. Raises as `unavailable`."""
    value = backend.workspace_bytes(point)
    if (number := _whole(value)) is None:
        raise _wrong(type(backend), "workspace_bytes()", value, _WHOLE)
    return number


def described(backend: Backend) -> Description:
    """What ran, with plain numbers and texts. Raises as `unavailable`."""
    told = backend.describe()
    if not isinstance(told, Description):
        raise _wrong(type(backend), "describe()", told, "a Description with a version")
    numbers = {name: getattr(told, name) for name in ("workspace_bytes", "protocol_bytes", "num_sms")}
    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        "version": (_is_sentence, "text that is not empty, such as '1.2.0' or a hash of your sources"),
        "transport": (_is_text, "text, such as 'shared memory'"),
        "algorithm": (_is_text, "text, empty if there is but one"),
        "kernels": (lambda v: isinstance(v, list | tuple) and all(map(_is_text, v)), "a tuple of names"),
        "workspace_bytes": (lambda v: _whole(v) is not None, _WHOLE),
        "protocol_bytes": (lambda v: v is None or _whole(v) is not None, f"None, or {_WHOLE}"),
        "num_sms": (lambda v: _whole(v) is not None, _WHOLE),
        "libraries": (
            lambda v: isinstance(v, Mapping) and all(map(_is_text, (*v, *v.values()))),
            "a mapping of names to versions, both text",
        ),
    }
    if problems := _problems(told, rules):
        raise WrongBackend(f"describe() of {_named(type(backend))} breaks the contract: {'; '.join(problems)}")
    plain = {name: None if value is None else operator.index(value) for name, value in numbers.items()}
    return replace(told, kernels=tuple(told.kernels), libraries=dict(told.libraries), **plain)


def compute_version(backend: Backend, told: Any) -> str | None:
    """The version that a layer's `compute_description()` tells of its experts. Raises `WrongBackend`."""
    if told is not None and not _is_sentence(getattr(told, "version", None)):
        raise _wrong(type(backend), "compute_description()", told, "None, or a ComputeDescription with a version")
    return None if told is None else told.version


def _sentences(found: type, call: Callable[[], Any]) -> list[str]:
    problems = _asked(found, "option_problems", call)
    if not isinstance(problems, list | tuple) or not all(map(_is_sentence, problems)):
        raise _wrong(found, "option_problems()", problems, "a list of sentences, empty if every value can be used")
    return list(problems)


def _asked(found: type, what: str, call: Callable[[], Any], must: str = "return") -> Any:
    """The answer of a call that the contract forbids to fail."""
    try:
        return call()
    except EpcrossError:
        raise
    except FAILURES as error:
        raise WrongBackend(
            f"{what} of {_named(found)} raised {failure(error)}; it must {must}, as {_contract(found)} says"
        ) from error


def _reason(asked: Any, what: str, answer: object, why: str) -> str | None:
    if answer is None:
        return None
    if not _is_sentence(answer):
        raise _wrong(type(asked), what, answer, f"None, or a sentence that says {why}")
    return str(answer)


def _wrong(found: type, what: str, value: object, allowed: str) -> WrongBackend:
    return WrongBackend(
        f"{what} of {_named(found)} is {_shown(value)}, but must be {allowed}; correct it as {_contract(found)} says"
    )


def _contract(found: type) -> str:
    return STAGE_CONTRACT if issubclass(found, ExpertCompute) else CONTRACT


def _problems(of: Any, rules: Mapping[str, tuple[Callable[[Any], bool], str]]) -> list[str]:
    found = []
    for name, (holds, allowed) in rules.items():
        try:
            value = getattr(of, name)
            fits = holds(value)
        except FAILURES as error:  # a property of somebody else's, or a comparison
            found.append(f"{name} cannot be read: {failure(error)}")
            continue
        if not fits:
            found.append(f"{name} is {_shown(value)}, but must be {allowed}")
    return found


def _named(found: type) -> str:
    return f"{found.__module__}:{found.__qualname__}"


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except FAILURES:
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_text(value: object) -> bool:
    """Whether it can be stored."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # a file name of no encoding, say
        return False
    return True


def _is_sentence(value: object) -> bool:
    return _is_text(value) and bool(str(value).strip())


def _whole(value: Any) -> int | None:
    """`value` as a plain whole number, such as numpy's; None of anything else."""
    if isinstance(value, bool):
        return None
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if 0 <= number <= MOST_BYTES else None


def _one_of(kind: type[StrEnum]) -> tuple[Callable[[Any], bool], str]:
    return lambda value: isinstance(value, kind), " or ".join(map(_member, kind))


def _some_of(kind: type[StrEnum]) -> tuple[Callable[[Any], bool], str]:
    return (
        lambda value: _are(value, kind) and len(value) > 0,
        f"a set of {kind.__name__}, such as frozenset({{{_member(next(iter(kind)))}}})",
    )


def _member(member: StrEnum) -> str:
    return f"{type(member).__name__}.{member.name}"


def _are(values: Any, kind: type[StrEnum]) -> bool:
    return isinstance(values, Collection) and not isinstance(values, str) and all(isinstance(v, kind) for v in values)


def _is_boundary(value: Any) -> bool:
    return (
        isinstance(value, Mapping) and _are(value, Phase) and all(_are(inside, Boundary) for inside in value.values())
    )


def _is_reduction(value: Any) -> bool:
    return (
        isinstance(value, Reduction)
        and value.order in _ORDERS
        and value.accumulate in _SUMS
        and isinstance(value.exact, bool)
        and not (value.exact and value.order == "unordered")
    )


def _is_contract_shape(value: Any) -> bool:
    return isinstance(value, ContractShape) and all(_whole(getattr(value, f.name)) for f in fields(value))


_WHOLE = "a whole number from 0 to 2**63 - 1"
_FLAG: tuple[Callable[[Any], bool], str] = (lambda value: isinstance(value, bool), "True or False")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (_is_sentence, "text that is not empty"),
    "kind": _one_of(BackendKind),
    "domains": _some_of(Domain),
    "scopes": _some_of(Scope),
    "phases": _some_of(Phase),
    "boundary": (
        _is_boundary,
        "a mapping of Phase to sets of Boundary, such as {Phase.DISPATCH: frozenset({Boundary.TRANSFER})}",
    ),
    "host_sync": _FLAG,
    "graph": _one_of(GraphSupport),
    "weights_by": _one_of(WeightsBy),
    "reduction": (
        _is_reduction,
        f"a Reduction with order {' or '.join(_ORDERS)}, accumulate {' or '.join(_SUMS)} and exact True or False, "
        "False where the order is none",
    ),
    "stable_order": _FLAG,
    "contract_shape": (_is_contract_shape, "a ContractShape of whole numbers of at least 1"),
}
"""Every declaration of `Backend`: whether a value is allowed, and what is."""
