"""Run the list of checks of the adapter contract; each gives what is wrong and how to fix it.

Checks without a call of the kernel run in this process, all others in child processes: a kernel that crashes or hangs is a row.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from attnfuzz.harness.audit.conformance import declared, features
from attnfuzz.harness.audit.conformance.row import Row, failing, shortened
from attnfuzz.harness.core import environment
from attnfuzz.harness.core.signals import ending
from attnfuzz.harness.isolation.executors import InProcess
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.isolation.kernel_ref import shipped
from attnfuzz.harness.isolation.outcomes import Death, Reply, exception_of
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import OUTPUT_NAMES
from attnfuzz.kernels.support.process_setup import setup_of
from attnfuzz.strategies.case import Case

__all__ = ["Bed", "Conformance", "Row", "check_adapter", "hints", "probe_result"]

_PROBES = "attnfuzz.harness.audit.conformance.probes:run_probe"


@dataclass(frozen=True, slots=True)
class Conformance:
    """Results of every check of `kernel` on `device`; `interrupted`: by the user, so that the last row says what was not run."""

    kernel: str
    device: Device
    rows: tuple[Row, ...]
    seconds: float
    interrupted: bool = False

    @property
    def wrong(self) -> tuple[Row, ...]:
        """Rows that break the contract."""
        return tuple(row for row in self.rows if row.status == "wrong")

    @property
    def complete(self) -> bool:
        """Return whether every check could be run."""
        return all(row.status != "not run" for row in self.rows)


class Bed(Protocol):
    """Where a kernel is called: in child processes or in this one."""

    def trial(self, case: Case) -> Verdict:
        """Run a Trial."""

    def ask(self, probe: str, kernel: Kernel, case: Case, **more: Any) -> Any:
        """Return the result of a probe (harness/audit/conformance/probes.py); a str says why there is none."""

    def close(self) -> None:
        """Release processes and files."""


def check_adapter(
    target: str,
    device: Device,
    listener: Callable[[Row], None] = lambda _: None,
    *,
    in_process: bool = False,
    deadline: float | None = None,
    memory_check: bool = True,
) -> Conformance:
    """Run the conformance list on the kernel `target`.

    Args:
        target: its name, or "package.module:OBJECT".
        device: where it is called.
        listener: called with each row.
        in_process: call it in this process, for a debugger.
        deadline: seconds that a stage of a call may take, by default 60; in this process there is none.
        memory_check: check every memory access of interpreted kernels.

    Raises:
        BadArgument: there is no such kernel, or it cannot be imported.
    """
    start, rows = time.monotonic(), list[Row]()
    kernel = registry.find(target)
    interrupted = False
    here = functools.partial(_Here, device=device, memory_check=memory_check)
    apart = functools.partial(_Children, device=device, deadline=deadline, memory_check=memory_check)
    bed: Callable[[Kernel], Bed] = here if in_process else apart
    with contextlib.closing(_rows(target, kernel, device, bed)) as checks:
        try:
            for row in checks:
                rows.append(row)
                listener(row)
            ending()
        except KeyboardInterrupt:
            ending()
            interrupted = True
            rows.append(_not_run("all else", "interrupted"))
            listener(rows[-1])
    name = getattr(kernel, "name", target)
    seconds = time.monotonic() - start
    return Conformance(name if isinstance(name, str) else target, device, tuple(rows), seconds, interrupted)


def hints(
    kernel: Kernel,
    device: Device,
    seconds: float,
    wanted: Callable[[features.Feature], bool] = lambda _: True,
    *,
    in_process: bool = False,
) -> Generator[tuple[features.Feature, bool | None], None, None]:
    """Try each feature that a kernel does not declare, and yield it with whether it works; None: `seconds` were over before.

    Those that are not `wanted`, which is asked just before, are left out; without any time all are.
    """
    if seconds <= 0:
        return
    begin = time.monotonic()
    bed: Bed = (_Here if in_process else _Children)(kernel, device=device, deadline=seconds, memory_check=True)
    with contextlib.closing(bed):
        for each in features.features(kernel, device):
            if each.declared or not wanted(each):
                continue
            if time.monotonic() - begin >= seconds:
                yield each, None
            elif (row := features.undeclared_row(each, kernel, bed.ask)) is not None:
                yield each, row.status == "hint"


def probe_result(
    probe: str, kernel: Kernel, parcel: dict[str, Any], case: Case, device: Device, *, in_process: bool = False
) -> Any:
    """Return the result of a probe of a kernel that the registry need not know; a str says why there is none.

    Args:
        probe: its name, of harness/audit/conformance/probes.py.
        kernel: the kernel.
        parcel: by which a child process finds it (`isolation.kernel_ref`).
        case: what it is asked about.
        device: where it is called.
        in_process: ask in this process.
    """
    if in_process:
        return _Here(kernel, device=device, memory_check=True).ask(probe, kernel, case)
    with contextlib.closing(_Children(kernel, device=device, deadline=None, memory_check=True)) as bed:
        return bed.ask_of(parcel, probe, case)


def _rows(target: str, candidate: Any, device: Device, make: Callable[[Kernel], Bed]) -> Generator[Row, None, None]:
    wrong = False
    for row in declared.members(candidate):
        yield row
        wrong |= row.status == "wrong"
    if wrong:
        yield _not_run("all else", "the contract's members come first")
        return
    for row in declared.declarations(candidate, device):
        yield row
        wrong |= row.status == "wrong" and row.check in ("capabilities", "variants", "configs")
    # The registry refuses a kernel with values that no kernel can have.
    kernel = candidate if wrong else registry.get(target)
    reason = "nothing can be drawn from what is declared" if wrong else kernel.unavailable(device)
    if wrong or reason:
        yield _not_run("calls", str(reason), "use a machine, or a --device, where it runs" if not wrong else "fix that first")
        return
    bed = make(kernel)
    try:
        yield from _calls(kernel, device, bed)
    finally:
        bed.close()


def _calls(kernel: Kernel, device: Device, bed: Bed) -> Iterator[Row]:
    case, refusal = features.plain_case(kernel, device)
    if refusal:
        yield Row(
            "plain case", "wrong", shortened(refusal), "let supports take a plain Case of what is declared, or declare less"
        )
        yield _not_run("calls", "supports refuses every plain Case that was tried", "fix that first")
        return
    answer = bed.ask("identity", kernel, case)
    here = [kernel.name, kernel.compile_key(case.problem, case.config), [dict(each) for each in kernel.configs(case.problem)]]
    yield _identity(answer, here)
    if isinstance(answer, str):
        yield _not_run("calls", "a child process does not find the kernel", "fix that first")
        return
    if setup_of(kernel) is not None:
        remedy = "correct environment or set_up; what set_up changes of torch, it puts back"
        yield _probe_row("set-up of a process", bed.ask("process", kernel, case), remedy)
    plain = _plain(kernel, bed.trial(case))
    yield from plain
    by_value = any(row.status == "wrong" for row in plain if row.check in ("O and LSE", "gradients"))
    if by_value and (row := features.deviations_row(kernel, case, bed.ask)) is not None:
        yield row
    if any(row.status == "wrong" for row in plain if row.check not in ("O and LSE", "gradients")):
        yield _not_run("settings, repetition, features", "the plain case gives nothing that could be compared", "fix that first")
        return
    for probe, title, remedy in (
        ("settings", "independent of torch's settings", "give dtype= and device= to every new tensor; change no global state"),
        ("repeated", "deterministic as declared", "fix the kernel, or leave the output out of `deterministic`"),
        ("arguments", "wrong arguments raise", "let build raise a BadArgument wherever supports gives a reason"),
    ):
        yield _probe_row(title, bed.ask(probe, kernel, case), remedy)
    for each in features.features(kernel, device):
        if each.declared:
            yield features.declared_row(each, [bed.trial(case) for case in each.cases])
        elif (row := features.undeclared_row(each, kernel, bed.ask)) is not None:
            yield row


def _plain(kernel: Kernel, verdict: Verdict) -> list[Row]:
    """Split the plainest Case's Verdict into rows: first whether it ran at all."""
    by_form = [each for each in verdict.failures if each.kind in ("contract", "unwritten")]
    by_input = [each for each in verdict.failures if each.kind == "guard"]
    by_value = [each for each in verdict.failures if each.output and each not in by_form]
    rest = [each for each in verdict.failures if each not in by_form + by_input + by_value]
    runs = failing("runs", rest, "fix the kernel or its adapter", "forward and backward return")
    form = "shape, dtype, device and memory as attnfuzz.kernels.contract.Outputs has them"
    untouched = "no input changed, nothing written beyond"
    of_inputs = failing("inputs left alone", by_input, "write to tensors of your own only", untouched)
    if rest or by_input:
        # Outputs were not looked at then.
        return [runs, of_inputs] if by_input else [runs]
    forward = [each for each in by_value if each.output in ("o", "lse")]
    remedy = (
        "fix the kernel or its adapter (scale, layout; lse_base, lse_layout, lse_multiple of LSE), or declare what it does "
        "otherwise (deviations)"
    )
    return [
        runs,
        of_inputs,
        failing("form of outputs", by_form, f"give {form}", form),
        failing("O and LSE", forward, remedy, _figures(verdict, ("o", "lse"))),
        _gradients(kernel, verdict, [each for each in by_value if each not in forward]),
    ]


def _gradients(kernel: Kernel, verdict: Verdict, failures: list[Failure]) -> Row:
    if not {"dq", "dk", "dv"} & set(kernel.capabilities.outputs):
        return Row("gradients", "ok", "declared absent")
    remedy = "fix the backward, declare what it does otherwise (deviations), or outputs without them"
    return failing("gradients", failures, remedy, _figures(verdict, ("dq", "dk", "dv")))


def _figures(verdict: Verdict, names: tuple[str, ...]) -> str:
    worst = [f"{name} {verdict.figures[name].worst:.2f}" for name in OUTPUT_NAMES if name in names and name in verdict.figures]
    return f"error over budget: {', '.join(worst)}" if worst else "not judged: an output is not of the contract's form"


def _identity(answer: Any, here: list[Any]) -> Row:
    check = "found by a child process"
    if isinstance(answer, str):
        remedy = "make it a global of a module that can be imported, without lambdas, or give it an entry point"
        return Row(check, "wrong", shortened(answer), remedy)
    for what, there, this in zip(("name", "compile_key", "configs"), answer, here, strict=True):
        if there != this:
            text = f"{what} is {there!r} there and {this!r} here"
            return Row(check, "wrong", shortened(text), "build it from the Problem and the Config alone: no id(), no hash()")
    return Row(check, "ok", "same name, compile_key and configs there")


def _probe_row(check: str, answer: Any, remedy: str) -> Row:
    """Make a row of a probe's answer: {"wrong": [...], "right": what was tried}."""
    if isinstance(answer, str):
        return Row(check, "wrong", shortened(answer), "fix the kernel")
    wrong = answer["wrong"]
    return Row(check, "wrong", shortened("; ".join(wrong)), remedy) if wrong else Row(check, "ok", answer["right"])


def _not_run(check: str, reason: str, remedy: str = "") -> Row:
    return Row(check, "not run", reason, remedy)


class _Children:
    """Calls in child processes."""

    def __init__(self, kernel: Kernel, *, device: Device, deadline: float | None, memory_check: bool) -> None:
        self._executor = Isolated(device, backends=[kernel.backend], deadline=deadline, memory_check=memory_check)
        self._device = device

    def trial(self, case: Case) -> Verdict:
        return self._executor.trial(case)

    def ask(self, probe: str, kernel: Kernel, case: Case, **more: Any) -> Any:
        try:
            parcel = shipped(kernel.name)
        except BadArgument as error:
            return str(error)
        return self.ask_of(parcel, probe, case, **more)

    def ask_of(self, parcel: dict[str, Any], probe: str, case: Case, **more: Any) -> Any:
        """Ask of the kernel that `parcel` describes."""
        payload = {"probe": probe, "kernel": parcel, "case": case.canonical(), "device": self._device, **more}
        outcome = self._executor.ask(_PROBES, payload)
        if isinstance(outcome, Reply):
            return outcome.result
        if isinstance(outcome, Death):
            how = f"{outcome.signal or outcome.why} after {outcome.seconds:.1f} s"
            return f"it ended its process: {how} {shortened(outcome.output)}".strip()
        reason = exception_of(outcome)
        if isinstance(reason, BadArgument):
            return str(reason)
        raise reason

    def close(self) -> None:
        self._executor.close()


class _Here:
    """Calls in this process."""

    def __init__(self, _: Kernel, *, device: Device, memory_check: bool, deadline: float | None = None) -> None:  # noqa: ARG002
        self._executor = InProcess(device, memory_check=memory_check)
        self._device = device

    def trial(self, case: Case) -> Verdict:
        self._executor.begin(case)
        return self._executor.finish()

    def ask(self, probe: str, kernel: Kernel, case: Case, **more: Any) -> Any:
        from attnfuzz.harness.audit.conformance.probes import probed

        environment.prepare(self._device)
        return msgspec.to_builtins(probed(probe, kernel, case, self._device, more))

    def close(self) -> None:
        self._executor.close()
