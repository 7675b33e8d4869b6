"""The supply of a worker's Cases of one kernel: drawn ahead, asked to be compiled, given out once they can run."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping

from hypothesis import strategies as st

from attnfuzz.harness.campaign.backlog import Backlog
from attnfuzz.harness.campaign.context import Batch
from attnfuzz.harness.campaign.drawer import Drawer, Drawn
from attnfuzz.harness.campaign.plan import KernelPlan
from attnfuzz.harness.campaign.worker_link import Campaign
from attnfuzz.harness.trial.supports import problems_of, why_not_case
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.variants import Variant

__all__ = ["Supply"]

_FEW, _BATCHES, _MANY = 20, 4, 600
"""A round is drawn where fewer Cases can run than that, or than in so many batches, unless there are many that wait."""
_MIXED = 2
"""Rounds of a kernel that are drawn from all variants: short runs see all kinds of Cases. Such a round has few Cases of a kind,
which make small batches."""
_ASK_EVERY = 0.2
"""Seconds between questions whether code is compiled now."""
_ALL = ""
"""The key of all Cases where nothing is compiled."""


class Supply:
    """Draws Cases of one kernel in rounds that the campaign gives out.

    Args:
        kernel: what the Cases are of.
        plan: what they are drawn from.
        strategy: makes the strategy of Cases of some variants.
        campaign: gives out rounds, and has code compiled.
        device: where they run.
        background: draw while Cases run.
        growing: draw from the variants that are compiled when a round begins; else from all.
        together: Cases of a batch are judged together, which takes those of one kind: where variants grow, each round after the
            first ones has one dtype and dims, so that batches are full.
    """

    def __init__(
        self,
        kernel: Kernel,
        plan: KernelPlan,
        strategy: Callable[[tuple[Variant, ...]], st.SearchStrategy[Case]],
        campaign: Campaign,
        device: Device,
        *,
        background: bool,
        growing: bool,
        together: bool = False,
    ) -> None:
        self._kernel, self._plan, self._campaign, self._device = kernel, plan, campaign, device
        self._growing, self._by_kind = growing and plan.compiled, growing and together
        self._keys = {each: plan.key(kernel, each) for each in plan.variants} if self._growing else {}
        self._backlog = Backlog(lambda number: campaign.end_round(kernel.name, number), plan.compiles(kernel))
        self._drawer = Drawer(strategy, plan.seed, background=background, values=plan.values, takes=self._takes)
        self._asked, self._fruitless = -math.inf, False

    def _takes(self, case: Case) -> bool:
        return why_not_case(self._kernel, case, self._device) is None

    @property
    def ready(self) -> int:
        """Cases that can run; a round that is being drawn counts as one."""
        return self._backlog.ready + self._drawer.busy

    @property
    def waiting(self) -> int:
        """Cases that wait for a compiler."""
        return len(self._backlog) - self._backlog.ready

    @property
    def full(self) -> bool:
        """Whether no more are drawn until some of those that wait for a compiler can run."""
        return not self.ready and len(self._backlog) >= _MANY

    def ask_again(self) -> None:
        """Have the next `take` ask for compiles, however short ago that was: a turn is given because one has ended."""
        self._asked = -math.inf

    def take(self, batch: Batch) -> list[Case]:
        """Return Cases that can run together; none where none can run now. Draws ahead meanwhile."""
        self._ask_for_compiles()
        if (drawn := self._drawer.take(wait=False)) is not None:
            self._add(drawn)
        few = self._backlog.ready < max(_FEW, _BATCHES * batch.most if batch.together else 0) and len(self._backlog) < _MANY
        if few and not self._drawer.busy and (next_round := self._campaign.round(self._kernel.name)) is not None:
            self._drawer.request(next_round, self._variants(next_round.number))
        return self._backlog.take(batch)

    def _variants(self, number: int) -> tuple[Variant, ...]:
        """Return what round number `number` is drawn from."""
        variants = self._plan.variants
        if self._growing:
            ready = self._campaign.ready(self._kernel.name, set(self._keys.values()))
            variants = tuple(each for each in variants if self._keys[each] in ready) or variants
        # After a round without a new Case, perhaps of a kind that has no more: a kernel ends after several of them.
        if not self._by_kind or number < _MIXED or self._fruitless:
            return variants
        kinds = sorted({(each.dtype, each.dims) for each in variants})
        # Each kind once in as many rounds, in an order by chance, since shards have every n-th round.
        turn, place = divmod(number, len(kinds))
        kind = random.Random(turn).sample(kinds, len(kinds))[place]
        return tuple(each for each in variants if (each.dtype, each.dims) == kind)

    def tried(self, case: Case) -> None:
        """Note that a Case that was given out has been tried."""
        self._backlog.tried(case)

    def put_back(self) -> None:
        """Take back Cases that were given out and not tried, since time was over first."""
        self._backlog.put_back()

    def wait(self, until: float | None = None) -> bool:
        """Wait for the round that is being drawn, at most `until` (time.monotonic); returns False where none has come."""
        drawn = self._drawer.take(wait=True, until=until)
        if drawn is not None:
            self._add(drawn)
        return drawn is not None

    def _add(self, drawn: Drawn) -> None:
        number = drawn.round.number
        new = [drawn.cases[index] for index in self._campaign.drawn(self._kernel.name, number, drawn.ids)]
        self._fruitless = not new
        self._backlog.add(number, [(self._compiles(each), each) for each in new])
        if self._plan.compiled:
            self.ask_again()
            self._ask_for_compiles()
        else:
            self._backlog.mark([_ALL])

    def _compiles(self, case: Case) -> Mapping[str, Case]:
        """Return the compile keys of all launches of a Case, each with a Case to compile."""
        if not self._plan.compiled:
            return {_ALL: case}
        compiles: dict[str, Case] = {}
        for each in problems_of(self._kernel, case, self._device):
            one = case if each == case.problem else Case(kernel=case.kernel, problem=each, config=case.config)
            compiles.setdefault(self._kernel.compile_key(each, case.config), one)
        return compiles

    def _ask_for_compiles(self) -> None:
        now = time.monotonic()
        if now - self._asked < _ASK_EVERY or not (waiting := self._backlog.waiting):
            return
        self._asked = now
        states = self._campaign.want(self._kernel.name, waiting)
        self._backlog.mark(key for key, state in states.items() if state == "ready")
        self._backlog.drop([key for key, state in states.items() if state == "failed"])
