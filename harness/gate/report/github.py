"""GitHub Actions: annotations on files (workflow commands), and the job's summary."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from attnfuzz.harness.core.text import printable
from attnfuzz.harness.gate.result import Finding, Gate, KernelGate
from attnfuzz.kernels.errors import reject

__all__ = ["annotation", "annotation_lines", "append_summary", "summary_file"]


def summary_file() -> Path | None:
    """Return the file whose Markdown GitHub shows on the job's page, if there is one."""
    name = os.environ.get("GITHUB_STEP_SUMMARY")
    return Path(name) if name else None


def append_summary(file: Path, text: str) -> None:
    """Append `text` to the summary of earlier steps.

    Raises:
        BadArgument: it cannot be written.
    """
    try:
        with file.open("a", encoding="utf-8") as opened:
            opened.write(text)
    except OSError as error:
        raise reject("GITHUB_STEP_SUMMARY", str(file), f"it cannot be written ({error.strerror})", "unset it") from None


def annotation(level: str, message: str, *, file: str = "", line: int = 1, title: str = "") -> str:
    """Format one workflow command: `::error file=...,line=...,title=...::message`, escaped as GitHub's own toolkit does."""
    values = {"file": file, "line": str(line) if file else "", "title": title}
    properties = ",".join(f"{name}={_property(value)}" for name, value in values.items() if value)
    return f"::{level}{' ' if properties else ''}{properties}::{_data(message)}"


def annotation_lines(done: Gate) -> Iterator[str]:
    """Yield every finding on its kernel's file (a notice if the ledger lets it through), and the ledger's own errors."""
    for gated in done.kernels:
        for finding in gated.findings:
            yield _of_finding(gated, finding)
        for part in gated.parts:
            if part.outcome == "error" or (part.outcome == "fail" and not part.findings):
                yield annotation("error", f"{part.name}: {part.summary}", file=gated.file, line=gated.line, title=gated.kernel)
    for text, line in done.stale:
        yield annotation("error", text, file=_from_here(done.ledger), line=max(1, line), title="attnfuzz ledger")
    for note in done.notes:
        yield annotation("warning", note, file=_from_here(done.ledger), title="attnfuzz ledger")


def _of_finding(gated: KernelGate, finding: Finding) -> str:
    lines = [finding.message, *(f"{name}: {value}" for name, value in finding.described)]
    lines += [f"{name}: {line}" for name, line in finding.again]
    if finding.waiver:
        lines.append(f"known: {finding.waiver.issue}, until {finding.waiver.expires}")
    title = f"{gated.kernel}: {finding.kind or finding.part}"
    level = "notice" if finding.waiver else "error"
    return annotation(level, "\n".join(lines), file=gated.file, line=gated.line, title=title)


def _from_here(path: str | None) -> str:
    """Return `path` relative to the checkout, which a job runs in, as GitHub expects."""
    file = Path(path or "")
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file) if path else ""


def _data(text: str) -> str:
    return printable(text).replace("##[", "#\\#[").replace("%", "%25").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
