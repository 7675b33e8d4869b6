"""Run one Case under NVIDIA's compute-sanitizer (memcheck, racecheck or initcheck), in a child process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from attnfuzz.harness.core import environment
from attnfuzz.harness.isolation.kernel_ref import shipped
from attnfuzz.harness.repro.sanitize.log import Finding, SanitizerLog, read_log
from attnfuzz.harness.trial.supports import why_not_case, with_config
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.strategies.case import Case

__all__ = ["DEADLINE", "TOOLS", "Sanitized", "sanitize", "sanitizer_program"]

TOOLS: Final[dict[str, tuple[str, ...]]] = {
    # Room between allocations, or what is written past one lands in the next. Failed API calls are what the access leads to.
    "memcheck": ("--padding=65536", "--report-api-errors=no"),
    "racecheck": ("--racecheck-report=analysis",),
    "initcheck": ("--report-api-errors=no",),
}
"""Options of each tool; an installed version that lacks one runs without it."""
DEADLINE = 600.0
"""Seconds by default: under a sanitizer a launch takes a hundred times as long, and so does loading torch."""
_PROGRAM, _TOOLKITS = "compute-sanitizer", Path("/usr/local")
_FINDINGS = 86
"""Exit code of a sanitizer with findings."""
_LIMIT = 1000
_HELP_SECONDS = 60.0
_TAIL = 4000


@dataclass(frozen=True, slots=True)
class Sanitized:
    """Result of a run: `findings`, or what ended the process before the Case was done."""

    tool: str
    device: Device
    findings: tuple[Finding, ...]
    seconds: float
    command: tuple[str, ...]
    raised: str | None = None
    """What the kernel raised, or how its process ended."""
    late: bool = False
    """The deadline passed; there may be more to find."""
    notes: tuple[str, ...] = field(default=())

    @property
    def clean(self) -> bool:
        """Whether nothing was reported and the Case was done."""
        return not self.findings and self.raised is None and not self.late


def sanitizer_program() -> str:
    """Path of compute-sanitizer.

    Raises:
        BadArgument: it is not installed; the text names the folders and the remedy.
    """
    roots = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    roots += sorted(_TOOLKITS.glob("cuda*"), reverse=True)
    folders = [str(root / part) for root in roots for part in ("bin", "compute-sanitizer")]
    program = shutil.which(_PROGRAM) or shutil.which(_PROGRAM, path=os.pathsep.join(folders) or os.devnull)
    if program is None:
        raise BadArgument(
            "sanitize: compute-sanitizer is not on PATH, in CUDA_HOME/bin or in /usr/local/cuda*/bin; "
            "install the CUDA toolkit's compute-sanitizer, or set CUDA_HOME to a toolkit that has it"
        )
    return program


def sanitize(case: Case, tool: str, device: str = "auto", *, deadline: float | None = None) -> Sanitized:
    """Run `case` under `tool`.

    Args:
        case: what to run.
        tool: memcheck, racecheck or initcheck.
        device: auto or cuda; auto must resolve to CUDA.
        deadline: seconds for all of it; None: 600.

    Raises:
        BadArgument: no such tool, no CUDA device, no compute-sanitizer, a Case that cannot run here, a sanitizer that does not
            start, or a deadline that passed without a finding.
    """
    if tool not in TOOLS:
        raise reject("sanitize", tool, "compute-sanitizer has no such tool", f"use one of {', '.join(TOOLS)}")
    if device == "cpu" or environment.resolve_device("cuda" if device == "cuda" else device) != "cuda":
        raise reject("device", device, "compute-sanitizer watches a GPU", "use a machine with one, and --device cuda")
    kernel = registry.get(case.kernel)
    if reason := kernel.unavailable("cuda"):
        raise BadArgument(f"kernel={kernel.name!r}: it cannot run on cuda here: {reason}")
    case = with_config(kernel, case)
    if reason := why_not_case(kernel, case, "cuda"):
        raise reject("case", case.id, f"{kernel.name} does not support it: {reason}", "give a Case within its capabilities")
    with tempfile.TemporaryDirectory(prefix="attnfuzz-sanitize-") as folder:
        return _watched(case, tool, sanitizer_program(), Path(folder), DEADLINE if deadline is None else deadline)


def _watched(case: Case, tool: str, program: str, folder: Path, deadline: float) -> Sanitized:
    task, result, output = folder / "task.json", folder / "result.json", folder / "output"
    task.write_text(json.dumps({"kernel": shipped(case.kernel), "case": case.canonical(), "device": "cuda"}))
    command = (
        *(program, f"--tool={tool}", "--target-processes=all", f"--error-exitcode={_FINDINGS}", f"--print-limit={_LIMIT}"),
        *(f"--log-file={folder}/log.%p", *_known(program, TOOLS[tool])),
        *(sys.executable, "-m", "attnfuzz.harness.repro.sanitize.child", str(task), str(result)),
    )
    start = time.monotonic()
    code = _ended(command, output, deadline)
    printed = output.read_text(errors="replace")
    log = read_log("\n".join([printed, *(each.read_text(errors="replace") for each in sorted(folder.glob("log.*")))]))
    stage, text = _result(result)
    findings = log.findings
    if not findings and (log.errors or code == _FINDINGS):
        # An unreadable report must never pass for clean.
        findings = (Finding(kind=f"{log.errors or 'some'} errors in a form that is not known here"),)
    raised = _trouble(case, tool, stage, text, code, printed, log) if code is not None and not findings else None
    if code is None and not findings:
        raise reject(
            "deadline", f"{deadline:g}s", f"the Case was not done under {tool}", "give more time, such as --deadline 30m"
        )
    return Sanitized(tool, "cuda", findings, time.monotonic() - start, command, raised, late=code is None, notes=log.notes)


def _known(program: str, options: tuple[str, ...]) -> tuple[str, ...]:
    """The `options` that the installed sanitizer has."""
    try:
        done = subprocess.run([program, "--help"], capture_output=True, text=True, check=False, timeout=_HELP_SECONDS)
    except subprocess.TimeoutExpired:
        reason = f"its --help printed nothing within {_HELP_SECONDS:g} s"
        raise reject("compute-sanitizer", program, reason, "check this installation") from None
    return tuple(each for each in options if each.split("=")[0] in done.stdout + done.stderr)


def _ended(command: tuple[str, ...], output: Path, deadline: float) -> int | None:
    """Exit code of the command; None if the deadline passed. Its process group is killed in both cases."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Each tensor needs an allocation of its own: within one large block nothing is out of bounds.
    variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    with output.open("wb") as sink:
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(deadline)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _result(path: Path) -> tuple[str, str]:
    """(stage, text) that the child wrote last; "" if it wrote nothing."""
    try:
        content = json.loads(path.read_text())
        return content["stage"], content["text"]
    except (OSError, ValueError):
        return "", ""


def _trouble(case: Case, tool: str, stage: str, text: str, code: int, printed: str, log: SanitizerLog) -> str | None:
    """What went wrong without a finding; None if the Case was done.

    Raises:
        BadArgument: the kernel was not launched at all.
    """
    if stage == "done":
        return None if code == 0 else f"the process ended with exit code {code} after the kernel had run"
    if stage == "raised":
        return f"the kernel raised {text}"
    if stage == "launched":
        return f"the process died while the kernel ran (exit code {code})"
    if stage == "refused":
        raise BadArgument(text)
    last = "\n".join(filter(None, (*log.notes, text, printed[-_TAIL:].strip())))
    raise BadArgument(
        f"sanitize={tool!r}: compute-sanitizer ended with code {code} before {case.kernel} was launched; "
        f"see what it says, and whether it supports this GPU and driver:\n{last}"
    )
