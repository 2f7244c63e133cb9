"""Backends that declare or answer one thing that the contract does not allow, and the same with a right value.

A class is named after what it says: `Wrong_domains`, `Right_domains`, so that a YAML's `target` can name it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tests.broken_backends import ReferenceBackend

from epcross.harness.backends.base import ContractShape, Description, Reduction
from epcross.harness.point import Scalar
from epcross.harness.terms import BackendKind, Boundary, Domain, GraphSupport, Phase, Scope, WeightsBy

TOLD = Description(version="1", transport="all-gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A wrong value, the right one, and what is said of the wrong one."""

    wrong: Any
    right: Any
    words: str


DECLARED = {
    "name": Said(wrong=None, right="mine", words="name is None, but must be text that is not empty"),
    "kind": Said(
        wrong="layers", right=BackendKind.EXCHANGE, words="kind is 'layers', but must be BackendKind.EXCHANGE"
    ),
    "domains": Said(wrong=None, right={Domain.CPU}, words="domains is None, but must be a set of Domain, such as"),
    "scopes": Said(wrong=Scope.SCALE_UP, right=(Scope.SCALE_UP,), words="but must be a set of Scope"),
    "phases": Said(wrong=frozenset(), right=[Phase.ROUND_TRIP], words="but must be a set of Phase"),
    "boundary": Said(
        wrong={Phase.DISPATCH: Boundary.PACK},
        right={Phase.DISPATCH: {Boundary.PACK}},
        words="but must be a mapping of Phase to sets of Boundary",
    ),
    "host_sync": Said(wrong="no", right=False, words="host_sync is 'no', but must be True or False"),
    "graph": Said(wrong="maybe", right=GraphSupport.NO, words="graph is 'maybe', but must be GraphSupport.NO or"),
    "weights_by": Said(
        wrong="combine", right=WeightsBy.EXPERTS, words="weights_by is 'combine', but must be WeightsBy."
    ),
    "reduction": Said(
        wrong=Reduction(order="downwards"),
        right=Reduction(order="unordered", exact=False),
        words="but must be a Reduction",
    ),
    "stable_order": Said(wrong=1, right=True, words="stable_order is 1, but must be True or False"),
    "contract_shape": Said(
        wrong=ContractShape(hidden=0),
        right=ContractShape(hidden=256),
        words="a ContractShape of whole numbers of at least",
    ),
}
"""Class attributes. Those of a right value here and there are of another type than usual, and as good."""

ANSWERED = {
    "unavailable": Said(
        wrong=5, right=None, words="is 5, but must be None, or a sentence that says why it cannot be used"
    ),
    "unsupported": Said(wrong=" ", right=None, words="is ' ', but must be None, or a sentence that says why the point"),
    "refused_here": Said(wrong=False, right=None, words="is False, but must be None, or a sentence that says why"),
    "workspace_bytes": Said(wrong=-7, right=np.int64(7), words="is -7, but must be a whole number from 0 to"),
    "describe": Said(wrong="1.0", right=TOLD, words="is '1.0', but must be a Description with a version"),
}
"""Methods, with what they return."""

DESCRIBED = {
    "version": Said(wrong=1, right="1", words="version is 1, but must be text that is not empty"),
    "transport": Said(wrong="\udc80", right="", words="transport is '\\udc80', but must be text"),
    "algorithm": Said(wrong=None, right="ring", words="algorithm is None, but must be text"),
    "kernels": Said(wrong="one", right=["one"], words="kernels is 'one', but must be a tuple of names"),
    "workspace_bytes": Said(
        wrong=2**63, right=np.int64(7), words="workspace_bytes is 9223372036854775808, but must be"
    ),
    "protocol_bytes": Said(wrong=0.5, right=None, words="protocol_bytes is 0.5, but must be None, or a whole number"),
    "num_sms": Said(wrong=True, right=np.int32(3), words="num_sms is True, but must be a whole number"),
    "libraries": Said(wrong={"nccl": 2}, right={"nccl": "2"}, words="libraries is {'nccl': 2}, but must be a mapping"),
}
"""Fields of `describe()`; named Wrong_told_version and so on."""


class Picky(ReferenceBackend):
    """Right, with an option of which some values could serve nobody."""

    @classmethod
    def option_defaults(cls) -> Mapping[str, Scalar]:
        return {"chunk": 4, "algorithm": "ring"}

    @classmethod
    def option_problems(cls, options: Mapping[str, Scalar]) -> Sequence[str]:
        return [] if options["chunk"] else ["chunk=0 must be above 0"]


class Talks(Picky):
    @classmethod
    def option_problems(cls, options: Mapping[str, Scalar]) -> Sequence[str]:
        return "no"


class Forgets(Picky):
    def __init__(self, options: Mapping[str, Scalar]) -> None:
        self.options = {}


class Unplain(Picky):
    @classmethod
    def option_defaults(cls) -> Mapping[str, Scalar]:
        return {"chunk": [4]}  # pyright: ignore[reportReturnType]


def __getattr__(name: str) -> type[ReferenceBackend]:
    """The class of that name."""
    kind, _, what = name.partition("_")
    if kind == "Leaves":
        return _child(name, what, _leave)
    told = {f"told_{field}": said for field, said in DESCRIBED.items()}
    said = {**DECLARED, **ANSWERED, **told}.get(what) if kind in ("Wrong", "Right") else None
    if said is None:
        raise AttributeError(name)
    value = said.wrong if kind == "Wrong" else said.right
    if what in told:
        what, value = "describe", replace(TOLD, **{what.removeprefix("told_"): value})
    return _child(name, what, value if what in DECLARED else lambda *given: value)


def _child(name: str, what: str, value: object) -> type[ReferenceBackend]:
    return type(name, (ReferenceBackend,), {what: value, "__module__": __name__})


def _leave(*given: object) -> object:
    """As a library does that calls `sys.exit`."""
    raise SystemExit(0)
