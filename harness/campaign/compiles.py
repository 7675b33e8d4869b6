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

    def compiled(self, variants: Sequence[Variant], limits: Limits) -> tuple[Variant, ...]:
        """Compile `variants`, and ahead what drawn Cases are likely to need; returns the variants that can be tried."""
        start, can = time.monotonic(), self._kernel.capabilities
        keys = [self._kernel.compile_key(each.problem(can), each.config) for each in variants]
        cases: dict[str, Case] = {}
        for key, each in zip(keys, variants, strict=True):
            cases.setdefault(key, Case(kernel=self._kernel.name, problem=each.problem(can), config=each.config))
        failures: dict[Case, Failure] = {}
        for done in self._each([*cases.values(), *self._ahead(cases, variants, limits)]):
            self.compiles += 1
            error = done.failure.message if done.failure else None
            self._context.listener(CompileFinished(done.case.kernel, done.case.config.canonical(), done.seconds, error))
            if done.failure is not None:
                failures[done.case] = done.failure
        # Simplest first, whichever was compiled first: the first Case of an identity is the one that is kept. What was compiled
        # ahead and refused is found, and shrunk, when a trial draws it.
        for case in (each for each in cases.values() if each in failures):
            verdict = Verdict(status="fail", failures=(failures[case],))
            if (identity := self._findings.new_in(verdict)) is not None:
                self._findings.keep(Finding(identity, case, verdict), minimal=True)
        self.seconds = time.monotonic() - start
        usable = tuple(each for key, each in zip(keys, variants, strict=True) if cases[key] not in failures)
        # One failure may stand for many variants.
        self.refused = len(variants) - len(usable)
        return usable

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
                    self._findings.cannot_keep(case, error)

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
