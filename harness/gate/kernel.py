"""One kernel's gate: run replay, campaign, accuracy, determinism, compile table and speed, in this order."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from attnfuzz.harness.campaign import events as campaign_events
from attnfuzz.harness.campaign.corpus import CaseFile, Corpus
from attnfuzz.harness.core.text import counted
from attnfuzz.harness.gate.base.base import Base, BaseKernel
from attnfuzz.harness.gate.ledger import Entry, part_through
from attnfuzz.harness.gate.measured import Errors, Measurement, measurements
from attnfuzz.harness.gate.parts.accuracy import accuracy, determinism
from attnfuzz.harness.gate.parts.compiles import CompileTableError, NoSuchTableError, compare_tables, compile_table
from attnfuzz.harness.gate.parts.correctness import InterruptedCampaignError, findings_of, fixed_campaign, replay
from attnfuzz.harness.gate.parts.sample import accuracy_cases, speed_cases
from attnfuzz.harness.gate.parts.speed import speed
from attnfuzz.harness.gate.plan import Plan
from attnfuzz.harness.gate.result import Finding, Listener, Part, PartFinished, PartName, PartProgress
from attnfuzz.harness.gate.side import BrokenSideError, Side
from attnfuzz.harness.gate.subjects import Subject
from attnfuzz.harness.isolation.child import ChildError
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.isolation.outcomes import ExecutionError
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import OutputName
from attnfuzz.kernels.targets import why_not_on
from attnfuzz.strategies.case import Case

__all__ = ["KernelGateRun"]

_BROKEN = (BadArgument, ExecutionError, ChildError, BrokenSideError)


@dataclass(slots=True)
class KernelGateRun:
    """Runs one kernel's parts. `parts` holds those that have ended, also after Ctrl-C."""

    subject: Subject
    plan: Plan
    base: Base
    executor: Isolated
    stored: Sequence[CaseFile]
    in_force: Sequence[Entry]
    """Entries of the ledger that have not expired."""
    listener: Listener
    parts: list[Part] = field(default_factory=list)
    _measured: tuple[Measurement, ...] = ()
    _base_kernel: BaseKernel | None = None
    _ended: bool = False

    def run(self) -> None:
        """Run all parts; after one shows wrong values, the figures of the others would mean nothing, and they are skipped."""
        kernel = self.subject.kernel
        if reason := why_not_on(kernel, self.plan.device):
            self.parts.append(Part("load", "skipped", f"it cannot run on {self.plan.device} here: {reason}"))
            self._ended = True
            return
        # What one kernel leaves behind in a process must not affect the next.
        self.executor.fresh()
        for name, step in self._steps:
            wrong = next((each.name for each in self.parts if each.outcome in ("fail", "error") and _decides(each)), None)
            if wrong is not None:
                self._keep(Part(name, "skipped", f"not run: {wrong} failed"), 0.0)
            else:
                self._step(name, step)
        self._ended = True

    def skip_the_rest(self) -> None:
        """Mark the parts that did not end as skipped, after Ctrl-C."""
        if self._ended:
            return
        ended = {each.name for each in self.parts}
        self.parts += [Part(name, "skipped", "not run: interrupted") for name, _ in self._steps if name not in ended]

    @property
    def _steps(self) -> tuple[tuple[PartName, Callable[[], Part]], ...]:
        return (
            ("replay", self._replay),
            ("campaign", self._campaign),
            ("accuracy", self._accuracy),
            ("determinism", self._determinism),
            ("compile", self._compile),
            ("speed", self._speed),
        )

    def _step(self, name: PartName, step: Callable[[], Part]) -> None:
        start = time.monotonic()
        self.listener(PartProgress(self.subject.name, name))
        try:
            part = step()
        except InterruptedCampaignError as interrupted:
            self._keep(interrupted.part, time.monotonic() - start)
            raise
        except _BROKEN as error:
            part = Part(name, "error", str(error))
        self._keep(part, time.monotonic() - start)

    def _keep(self, part: Part, seconds: float) -> None:
        part = part_through(dataclasses.replace(part, seconds=seconds), self.in_force)
        self.parts.append(part)
        self.listener(PartFinished(self.subject.name, part))

    def _note(self, part: PartName) -> Callable[[str], None]:
        return lambda note: self.listener(PartProgress(self.subject.name, part, note))

    def _counted(self, part: PartName, what: str, most: int) -> Callable[[int], None]:
        return lambda done: self.listener(PartProgress(self.subject.name, part, f"{what}: {done} of {most}"))

    def _replay(self) -> Part:
        return replay(self.subject.kernel, self.plan.device, self.stored, self.executor, self._note("replay"))

    def _campaign(self) -> Part:
        return fixed_campaign(self.subject.kernel, self.plan.settings(), self.executor, self._note("campaign"))

    def _accuracy(self) -> Part:
        name, base = self.subject.name, self._at_base()
        self._measured = self._head()
        wrong = self._wrong_in_sample()
        if wrong is not None and part_through(wrong, self.in_force).outcome == "fail":
            return wrong
        if base.missing:
            return wrong or Part("accuracy", "skipped", f"nothing to compare with: {base.missing}")
        theirs: Mapping[Case, Mapping[OutputName, Errors]] = self.base.errors(
            self.subject,
            [each.case for each in self._measured if each.errors],
            memory_check=self.plan.memory_check,
            progress=self._counted("accuracy", "base", len(self._measured)),
        )
        done = accuracy(name, self._measured, theirs, self.plan.accuracy_threshold)
        if wrong is None:
            return done
        # The ledger lets the wrong Cases through: the right ones are compared with base.
        return dataclasses.replace(
            wrong, summary=f"{wrong.summary}; {done.summary}", findings=wrong.findings + done.findings, figures=done.figures
        )

    def _head(self) -> tuple[Measurement, ...]:
        self.listener(PartProgress(self.subject.name, "accuracy", "drawing the sample"))
        chosen = self.base.sample(self.subject)
        if not chosen:
            chosen = accuracy_cases(self.subject.kernel, self.plan.device, self.plan.sample, self.plan.seed)
        side = Side(self.executor, self.subject.target, self.subject.name)
        side.fresh()
        progress = self._counted("accuracy", "head", len(chosen))
        return measurements(side, chosen, memory_check=self.plan.memory_check, progress=progress)

    def _wrong_in_sample(self) -> Part | None:
        """Report wrong Cases of the sample as failures, and keep their case files."""
        wrong = [each for each in self._measured if each.failures]
        if not wrong:
            return None
        described = self.executor.describe()
        findings: list[Finding] = []
        reported, not_kept = set[Identity](), ""
        for each in wrong:
            verdict = Verdict(status="fail", failures=each.failures, device=described["device"], versions=described["versions"])
            if all(failure.identity in reported for failure in each.failures):
                continue
            path: str | None = None
            try:
                wrong_case = campaign_events.Finding(each.failures[0].identity, each.case, verdict)
                path = str(Corpus(self.plan.out).write(wrong_case, self.plan.seed))
            except OSError as error:
                not_kept = f"{error.strerror or error} ({self.plan.out})"
            findings += findings_of("accuracy", each.case, verdict, path, reported=reported)
        summary = (
            f"{len(wrong)} of the sample's {counted(len(self._measured), 'Case')} {'is' if len(wrong) == 1 else 'are'} wrong"
        )
        summary += f"; not all could be kept on disk: {not_kept}" if not_kept else ""
        return Part("accuracy", "fail", summary, tuple(findings), not_kept=not_kept)

    def _determinism(self) -> Part:
        declared = self.subject.kernel.capabilities.deterministic
        return determinism(self.subject.name, self._measured, declared, self._at_base().deterministic)

    def _compile(self) -> Part:
        if self.plan.compile == "off":
            return Part("compile", "skipped", "it is off (--compile off)")
        if not self.subject.kernel.capabilities.compiles_on:
            return Part("compile", "skipped", "this kernel is not compiled")
        try:
            head = compile_table(self.subject.target, self.plan.architectures, self.plan.folder)
            base = None if self._at_base().missing else self.base.table(self.subject, self.plan.architectures)
        except (NoSuchTableError, CompileTableError) as error:
            if self.plan.compile == "on" or isinstance(error, CompileTableError):
                return Part("compile", "error", str(error))
            return Part("compile", "skipped", str(error))
        return compare_tables(self.subject.name, head, base)

    def _speed(self) -> Part:
        if not self.plan.times:
            why = "it is off (--speed off)" if self.plan.speed == "off" else "a CPU's times say nothing of a GPU's"
            return Part("speed", "skipped", why)
        if missing := self._at_base().missing:
            return Part("speed", "skipped", f"nothing to compare with: {missing}")
        base = self.base.side(self.subject)
        if base is None:
            return Part("speed", "skipped", "times of two runs do not compare: give --base REF")
        cases = speed_cases(self.subject.kernel, self.plan.device)
        side = Side(self.executor, self.subject.target, self.subject.name)
        side.fresh()
        base.fresh()
        progress = self._counted("speed", "rounds", len(cases) * (self.plan.rounds + 1))
        return speed(
            self.subject.name,
            side,
            base,
            cases,
            threshold=self.plan.speed_threshold,
            rounds=self.plan.rounds,
            progress=progress,
        )

    def _at_base(self) -> BaseKernel:
        if self._base_kernel is None:
            self._base_kernel = self.base.kernel(self.subject)
        return self._base_kernel


def _decides(part: Part) -> bool:
    """Whether a failed part shows that the kernel's values are wrong, so that later parts are pointless."""
    return part.name in ("replay", "campaign") or any(each.kind is not None and each.part == "accuracy" for each in part.findings)
