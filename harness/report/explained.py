"""Explanations in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attnfuzz.harness.campaign.explain import Common, Explanation, Part

__all__ = ["explanation_rows"]

_MOST_VALUES = 4
_MOST_LENGTHS = 6
_BOTH = "both lengths"


def explanation_rows(explanation: Explanation | None) -> list[tuple[str, str]]:
    """Return (title, text) rows: what matters, what does not, what fails otherwise, what failing Cases have in common."""
    if explanation is None:
        return []
    parts = _without_repetition(explanation.parts)
    matters = [_matters(each) for each in parts if each.passes]
    same = _grouped((each.part, _listed((each.value, *each.fails))) for each in parts if each.fails and not each.passes)
    otherwise = _grouped((each.part, _listed(each.otherwise)) for each in parts if each.otherwise and not each.passes)
    rows = [("matters", "; ".join(matters))] if matters else []
    if same:
        rows.append(("does not matter", f"fails alike with each value tried of {', '.join(same)}"))
    if otherwise:
        rows.append(("fails otherwise", f"with other values of {', '.join(otherwise)}"))
    rows += [("in common", _common(each)) for each in explanation.common]
    if explanation.ended:
        rows.append(("explained in part" if parts else "not explained", explanation.ended))
    return rows


def _without_repetition(parts: Sequence[Part]) -> list[Part]:
    """Return the parts without both lengths at once, where each side alone says as much."""
    alone = any(each.part in ("seqlen_q", "seqlen_k") for each in parts)
    return [each for each in parts if each.part != _BOTH or not alone]


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return "name (values)", names of equal values together."""
    names: dict[str, list[str]] = {}
    for name, values in pairs:
        names.setdefault(values, []).append(name)
    return [f"{' and '.join(each)} ({values})" for values, each in names.items()]


def _matters(part: Part) -> str:
    """Return the part's value, the rules that hold, and what was tried."""
    rules = f": {' and '.join(part.rules)}" if part.rules else ""
    most = _MOST_LENGTHS if part.part.startswith("seqlen") else _MOST_VALUES
    tried = [f"passes {_with(part.passes, most)}"]
    if part.fails:
        tried.append(f"fails alike {_with(part.fails, most)}")
    if part.otherwise:
        tried.append(f"fails otherwise {_with(part.otherwise, most)}")
    name = part.part if part.part == "config" else f"{part.part}={part.value}"
    return f"{name}{rules} ({', '.join(tried)})"


def _with(values: Sequence[str], most: int) -> str:
    """Return "with A, B", or "without" where that alone is meant."""
    return "without" if tuple(values) == ("none",) else f"with {_listed(values, most)}"


def _listed(values: Sequence[str], most: int = _MOST_VALUES) -> str:
    """Return the first values; of many, how many more were tried."""
    values = list(dict.fromkeys(values))
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(values[:most]) + more


def _common(common: Common) -> str:
    every = common.failing == common.of_failing
    failing = f"all {common.of_failing} failing cases" if every else f"{common.failing} of {common.of_failing} failing cases"
    passing = "none" if not common.passing else "all" if common.passing == common.of_passing else str(common.passing)
    together = ""
    if common.failing_together is not None:
        together = (
            f"; with what stands above as well: {common.failing_together} failed, {common.passing_together or 'none'} passed"
        )
    return f"{failing} have {common.property}; of {common.of_passing} that passed, {passing}{together}"
