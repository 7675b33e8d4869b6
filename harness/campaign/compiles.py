"""Compiles of a kernel's variants before its trials."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from attnfuzz.harness.campaign.context import CampaignContext
from attnfuzz.harness.campaign.events import CompileFinished, Finding
from attnfuzz.harness.campaign.findings import Findings
from attnfuzz.harness.campaign.journal import Journal
from attnfuzz.harness.isolation.executors import Compiled
from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.contract import Kernel
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.cases import Limits, cases_by_compile_key
from attnfuzz.strategies.shapes import Variant

__all__ = ["VariantCompiler"]

_MOST_AHEAD = 3
"""Upper bound on speculative compiles, as a multiple of the variants."""


class VariantCompiler:
    """Compiles variants in child processes; a compile that fails is a finding with its smallest Case."""

    def __init__(self, kernel: Kernel, context: CampaignContext, findings: Findings) -> None:
        self._kernel, self._context, self._findings = kernel, context, findings
        self.compiles, self.seconds, self.refused = 0, 0.0, 0
        self._variants: Sequence[Variant] = ()
        self._cases: dict[str, Case] = {}
        self._likely: list[Case] = []

    def plan(self, variants: Sequence[Variant], limits: Limits) -> int:
        """Choose what to compile: `variants`, and ahead what drawn Cases are likely to need; returns the number of compiles."""
        self._variants = variants
        if self._context.settings.device in self._kernel.capabilities.compiles_on:
            for each in variants:
                case = Case(kernel=self._kernel.name, problem=each.problem(self._kernel.capabilities), config=each.config)
                self._cases.setdefault(self._key(each), case)
            self._likely = self._ahead(self._cases, variants, limits)
        return len(self._cases) + len(self._likely)

    def compile(self) -> tuple[Variant, ...]:
        """Compile as planned; returns the variants that can be tried. Refused ones are findings, also where Ctrl-C ends this."""
        if not self._cases:
            return tuple(self._variants)
        start, failures = time.monotonic(), dict[Case, Failure]()
        try:
            for done in self._each([*self._cases.values(), *self._likely]):
                self.compiles += 1
                error = done.failure.message if done.failure else None
                self._context.listener(CompileFinished(done.case.kernel, done.case.config.canonical(), done.seconds, error))
                if done.failure is not None:
                    failures[done.case] = done.failure
        finally:
            # Simplest first, whichever was compiled first: the first Case of an identity is the one that is kept. A refused Case
            # that was compiled ahead is found, and shrunk, when a trial draws it.
            for case in (each for each in self._cases.values() if each in failures):
                verdict = Verdict(status="fail", failures=(failures[case],))
                self._findings.keep(Finding(failures[case].identity, case, verdict), minimal=True)
            self.seconds = time.monotonic() - start
            # One failure may stand for many variants.
            usable = tuple(each for each in self._variants if self._cases[self._key(each)] not in failures)
            self.refused = len(self._variants) - len(usable)
        return usable

    def _key(self, variant: Variant) -> str:
        return self._kernel.compile_key(variant.problem(self._kernel.capabilities), variant.config)

    def _ahead(self, cases: dict[str, Case], variants: Sequence[Variant], limits: Limits) -> list[Case]:
        """Cases of other compile keys that trials are likely to draw: a compile within a trial would take the trial's time."""
        settings = self._context.settings
        likely = cases_by_compile_key(self._kernel, device=settings.device, limits=limits, variants=variants, seed=settings.seed)
        return [case for key, case in likely.items() if key not in cases][: _MOST_AHEAD * len(variants)]

    def _each(self, cases: Sequence[Case]) -> Iterator[Compiled]:
        """Compile, each Case in a journal of its own meanwhile: a compiler may take the machine down as well."""
        settings, in_flight = self._context.settings, dict[Case, Journal]()

        def starting(case: Case) -> None:
            if settings.out and self._findings.not_kept is None:
                in_flight[case] = Journal(settings.out)
                try:
                    in_flight[case].launch(case)
                except OSError as error:
                    in_flight.pop(case).discard()
                    self._findings.announce_not_kept(case, error)

        try:
            for done in self._context.executor.compiled(cases, settings.jobs, starting):
                if done.case in in_flight:
                    in_flight.pop(done.case).discard()
                yield done
        except (KeyboardInterrupt, GeneratorExit):
            for journal in in_flight.values():
                journal.discard()
            raise
        except BaseException:
            for journal in in_flight.values():
                journal.abandon()
            raise
