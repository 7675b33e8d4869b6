"""JUnit XML of a gate: a suite for each kernel, a test case for each part, and one for the ledger."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as Xml

from attnfuzz.harness.core.text import printable
from attnfuzz.harness.gate.result import Gate, KernelGate, Part

__all__ = ["junit"]

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(done: Gate) -> str:
    """Return the report as XML text. Findings that the ledger lets through count as skipped, as pytest's expected failures do."""
    root = Xml.Element("testsuites", name="attnfuzz gate", time=f"{done.seconds:.3f}")
    for gated in done.kernels:
        suite = _suite(root, f"attnfuzz.{gated.kernel}", [_outcome(part) for part in gated.parts])
        suite.set("time", f"{sum(part.seconds for part in gated.parts):.3f}")
        for part in gated.parts:
            _case(suite, gated, part)
    if done.ledger is not None:
        suite = _suite(root, "attnfuzz.ledger", ["failure"] if done.stale else ["pass"])
        case = Xml.SubElement(suite, "testcase", classname="attnfuzz.ledger", name=Path(done.ledger).name, time="0")
        if done.stale:
            message = _clean("\n".join(text for text, _ in done.stale))
            Xml.SubElement(case, "failure", message=message.splitlines()[0]).text = message
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    Xml.indent(root)
    return Xml.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(root: Xml.Element, name: str, outcomes: list[str]) -> Xml.Element:
    kinds = (("failures", "failure"), ("errors", "error"), ("skipped", "skipped"))
    counts = {plural: str(outcomes.count(one)) for plural, one in kinds}
    return Xml.SubElement(root, "testsuite", {"name": _clean(name), "tests": str(len(outcomes)), **counts})


def _outcome(part: Part) -> str:
    return {"fail": "failure", "error": "error", "skipped": "skipped", "known": "skipped", "pass": "pass"}[part.outcome]


def _case(suite: Xml.Element, gated: KernelGate, part: Part) -> None:
    attributes = {"classname": _clean(f"attnfuzz.{gated.kernel}"), "name": part.name, "time": f"{part.seconds:.3f}"}
    if gated.file:
        attributes |= {"file": _clean(gated.file), "line": str(gated.line)}
    case = Xml.SubElement(suite, "testcase", attributes)
    kind = _outcome(part)
    if kind == "pass":
        return
    element = Xml.SubElement(case, kind, message=_clean(part.summary))
    lines = []
    for each in part.findings:
        lines.append(each.message + (f" (known: {each.waiver.issue}, until {each.waiver.expires})" if each.waiver else ""))
        lines += [f"  {name}: {value}" for name, value in each.described]
        lines += [f"  {name}: {line}" for name, line in each.again]
        lines += [each.detail] if each.detail else []
    element.text = _clean("\n".join(lines)) or None


def _clean(text: str) -> str:
    """Replace characters that XML 1.0 cannot hold: a kernel may print anything."""
    return _FORBIDDEN.sub("?", printable(text))
