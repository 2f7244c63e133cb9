"""Which known issues of a backend's YAML concern the version that was measured.

Versions are compared as PEP 440 says: "==2.11.0" and "<=2.11.0" hold for the local version 2.11.0+cu130, "<1.3" does
not hold for the pre-release 1.3rc1. Source: https://packaging.python.org/en/latest/specifications/version-specifiers/
"""

import re
from collections.abc import Iterable

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from epcross.harness.planning.schema import KnownIssue

_HASH = re.compile("[0-9a-f]{12,}")
"""Of our kernels' sources. Some read as versions: of digits alone, or digits around one letter, as 12c3 is 12rc3."""


def version_in(told: str | None) -> Version | None:
    """The version in what a backend says of itself (`backend_version`): its last word, as in "flashinfer-python 0.7.4"
    or "2.11.0+cu130". None where that is no version, and of a hash of kernel sources."""
    words = (told or "").split()
    if not words or (len(words) == 1 and _HASH.fullmatch(words[0])):
        return None
    try:
        return Version(words[-1])
    except InvalidVersion:
        return None


def issues_of(told: str | None, issues: Iterable[KnownIssue]) -> tuple[KnownIssue, ...]:
    """Those of `issues` that concern the version `told`; none where it tells no version. What is no specifier concerns
    none: a YAML with it is refused, plans that were stored before may hold it."""
    version = version_in(told)
    return () if version is None else tuple(issue for issue in issues if _concerns(issue, version))


def issue_problems(issue: KnownIssue) -> list[str]:
    """What of a known issue cannot be used, as sentences."""
    problems = [] if issue.reason.strip() else ["known_issues: reason is empty; say what is wrong with these versions"]
    if _specifier(issue.versions) is None:
        problems.append(
            f"known_issues: versions is {issue.versions!r}, but must be a PEP 440 specifier, such as "
            '"<1.3", "==2.0.*" or ">=1.1,<1.3"; ">=0" is every version'
        )
    return problems


def _concerns(issue: KnownIssue, version: Version) -> bool:
    specifier = _specifier(issue.versions)
    # what was measured is a fact, be it a pre-release: it is not passed over as by an installer
    return specifier is not None and specifier.contains(version, prereleases=True)


def _specifier(text: str) -> SpecifierSet | None:
    try:
        found = SpecifierSet(text)
    except InvalidSpecifier:
        return None
    return found if len(found) else None  # an empty one would hold for every version
