"""Draw the Cases of a kernel as a run would, count what they reach, and run some of them for the lines that they reach."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from attnfuzz.harness.audit.coverage.lines import LineCoverage, check_lines, lines_of
from attnfuzz.harness.audit.coverage.pairs import PairCoverage, Pairs
from attnfuzz.harness.campaign.coverage import Tally
from attnfuzz.harness.campaign.drawer import draw_round
from attnfuzz.harness.campaign.plan import KernelPlan, cases_of, every_variant, plan_of
from attnfuzz.harness.campaign.rounds import Rounds
from attnfuzz.harness.campaign.settings import PROFILES, Settings
from attnfuzz.harness.campaign.size_relations import possible_relations
from attnfuzz.harness.campaign.undrawn import models_left_out, never_drawn
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.strategies.case import Case

__all__ = ["Coverage", "Listener", "measure"]

Listener = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What Cases of a kernel reach. `never`: values that they could have had and none had, by what is drawn."""

    kernel: str
    device: Device
    profile: str
    seed: int
    tally: Tally
    never: dict[str, tuple[str, ...]]
    pairs: PairCoverage
    lines: LineCoverage | None
    draw_seconds: float
    compiled: int | None
    """Variants that a run compiles and draws from; None: it draws from all, as was done here."""


def measure(kernel: Kernel, settings: Settings, lines: int = 0, listener: Listener = lambda *_: None) -> Coverage:
    """Return what `settings.max_examples` Cases of all variants reach; `lines`: number of them to run for their lines.

    Raises:
        BadArgument: the kernel declares nothing that can be drawn, or no lines can be recorded on this device.
    """
    if lines:
        check_lines(kernel, settings.device)
    plan = plan_of(kernel, settings)
    compiled = len(plan.variants) if plan.compiled else None
    plan = replace(plan, variants=every_variant(kernel, settings))
    tally, pairs, cases = Tally(), Pairs(kernel, settings.device, plan.variants), list[Case]()
    most, seconds = settings.max_examples or 1, 0.0
    drawing = time.perf_counter()
    for case in _drawn(kernel, plan, settings):
        seconds += time.perf_counter() - drawing
        tally.count_drawn(case)
        pairs.add(case)
        if len(cases) < lines:
            cases.append(case)
        listener("drawing", tally.cases, most)
        drawing = time.perf_counter()
    return Coverage(
        kernel=kernel.name,
        device=settings.device,
        profile=settings.profile,
        seed=settings.seed,
        tally=tally,
        never=_never(kernel, plan, settings, tally),
        pairs=pairs.result(lambda number, count: listener("looking for pairs that are possible", number, count)),
        lines=lines_of(kernel, cases, settings.device, lambda n: listener("running", n, len(cases))) if lines else None,
        draw_seconds=seconds,
        compiled=compiled,
    )


def _drawn(kernel: Kernel, plan: KernelPlan, settings: Settings) -> Iterator[Case]:
    """Yield the Cases of the rounds that a run with these settings draws."""
    strategy = cases_of(kernel, plan, settings)

    def takes(case: Case) -> bool:
        return why_not_case(kernel, case, settings.device) is None

    rounds = Rounds(settings.max_examples)
    while (round_ := rounds.take()) is not None:
        cases = draw_round(strategy, plan.seed, round_, plan.values, takes)
        for index in rounds.drawn(round_.number, [each.id for each in cases]):
            yield cases[index]
        rounds.finish(round_.number)


def _never(kernel: Kernel, plan: KernelPlan, settings: Settings, tally: Tally) -> dict[str, tuple[str, ...]]:
    """Return the declared values that no Case had, and the relations of sizes; of models those that the kernel does not take."""
    if PROFILES[settings.profile].models:
        return models_left_out(kernel, settings.device, plan.limits.length)
    relations = possible_relations(kernel.capabilities, plan.variants, plan.limits)
    unmet = {name: tuple(each for each in values if each not in tally.drawn.get(name, {})) for name, values in relations.items()}
    declared = never_drawn(kernel.capabilities, settings.device, plan.variants, tally)
    return declared | {name: values for name, values in unmet.items() if values}
