"""Failures of one likely cause: they count one by one, and are shown to belong together."""

from __future__ import annotations

from collections.abc import Sequence

from attnfuzz.harness.campaign.events import Finding

__all__ = ["described", "groups_of"]

_WHOLE_AND_PARTS = {"aggregate", "mismatch"}
"""Kinds by which one output is wrong as a whole, or element by element."""


def groups_of(findings: Sequence[Finding]) -> list[int]:
    """Return for each finding the index of the first one that likely has the same cause: its own where there is none before.

    A cause is likely the same where a kernel fails on one minimal Problem in several ways, such as dK and dV unwritten, or where
    one output is wrong in single elements and as a whole.
    """
    groups: list[int] = []
    for number, each in enumerate(findings):
        before = (groups[other] for other in range(number) if _why(findings[other], each))
        groups.append(min(before, default=number))
    return groups


def described(findings: Sequence[Finding]) -> list[str]:
    """Return a line for each group of several findings, which are numbered from 1."""
    groups = groups_of(findings)
    lines = []
    for first in dict.fromkeys(groups):
        members = [number for number, group in enumerate(groups) if group == first]
        if len(members) > 1:
            pairs = ((findings[one], findings[other]) for other in members for one in members if one < other)
            reasons = dict.fromkeys(why for pair in pairs if (why := _why(*pair)))
            *others, last = (str(each + 1) for each in members)
            both = "both" if len(members) == 2 else "all of them"
            lines.append(f"{', '.join(others)} and {last}: {both} may be one bug ({'; '.join(reasons)})")
    return lines


def _why(one: Finding, other: Finding) -> str | None:
    """Return why two findings likely have one cause; None where they need not."""
    if one.case.kernel != other.case.kernel:
        return None
    if one.case.problem == other.case.problem:
        return "the same minimal Problem" if one.minimal and other.minimal else "the same Problem"
    kinds = {one.identity.kind, other.identity.kind}
    if kinds == _WHOLE_AND_PARTS and one.identity.output == other.identity.output:
        return "one output, in single elements and as a whole"
    return None
