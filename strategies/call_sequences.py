"""Sequences of calls of one kernel, one after the other in one process, as a state machine of Hypothesis.

A kernel that keeps something between calls (compiled code, a workspace, a plan) may take it for a call that it does not fit. Each
rule makes the next call: another one, or one that differs from the call before in one part alone, or one that was made before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import replace

from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import LAYOUTS, Layout
from attnfuzz.strategies.case import Case, Check
from attnfuzz.strategies.cases import Limits, cases
from attnfuzz.strategies.earlier_calls import other_problems
from attnfuzz.strategies.layouts import layouts, of_pages
from attnfuzz.strategies.stream_checks import stream_checks
from attnfuzz.strategies.variants import Variant

__all__ = ["call_machine"]

_SEEDS = st.integers(0, 9)


def call_machine(
    kernel: Kernel,
    *,
    device: Device,
    limits: Limits,
    variants: Sequence[Variant],
    begin: Callable[[], None],
    call: Callable[[Case], None],
) -> type[RuleBasedStateMachine]:
    """Return the state machine of calls of `kernel`.

    Args:
        kernel: what is called.
        device: where it runs.
        limits: on the size of each call.
        variants: of the calls: dtypes, dims, masks and Configs.
        begin: called before the first call of each sequence: it must run in a process that has run nothing.
        call: runs a Case in the same process as those before it; raises to end the sequence. Its check is "oracle", or one of
            STREAMS where such apply.

    Raises:
        BadArgument: the kernel declares nothing that can be drawn.
    """
    drawn = cases(kernel, device=device, limits=limits, variants=variants)

    class Calls(RuleBasedStateMachine):
        """Calls so far; the last one comes last."""

        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Case] = []

        @initialize(case=drawn)
        def first(self, case: Case) -> None:
            """Make a call in a new process."""
            begin()
            self._make(case)

        @rule(case=drawn)
        def another(self, case: Case) -> None:
            """Make a call with other lengths, heads, dtype, dims, mask and Config."""
            self._make(case)

        @rule()
        def again(self) -> None:
            """Make the same call once more."""
            self._make(self.calls[-1])

        @rule(data=st.data())
        def back(self, data: st.DataObject) -> None:
            """Make a call that was made before."""
            self._make(data.draw(st.sampled_from(list(dict.fromkeys(self.calls)))))

        @rule(seed=_SEEDS)
        def other_values(self, seed: int) -> None:
            """Change the values alone."""
            last = self.calls[-1]
            self._make(replace(last, recipe=replace(last.recipe, seed=seed)))

        @precondition(lambda self: self._others("other_shape"))
        @rule(data=st.data())
        def other_lengths(self, data: st.DataObject) -> None:
            """Change the lengths alone."""
            self._change("other_shape", data)

        @precondition(lambda self: self._others("other_scale"))
        @rule(data=st.data())
        def other_scale(self, data: st.DataObject) -> None:
            """Change the softmax scale alone."""
            self._change("other_scale", data)

        @precondition(lambda self: self._others("other_mask"))
        @rule(data=st.data())
        def other_mask(self, data: st.DataObject) -> None:
            """Change the mask alone."""
            self._change("other_mask", data)

        @precondition(lambda _: kernel.capabilities.layouts)
        @rule(data=st.data())
        def other_layouts(self, data: st.DataObject) -> None:
            """Change the memory layouts alone, to contiguous ones where the last call had those that are drawn."""
            last = self.calls[-1]
            # Of the last call's own packing and dtype: others would not fit it, and the sequence would end or stay as it is.
            drawn = data.draw(layouts(kernel.capabilities, last.problem.packing, last.problem.dtype, plain=False))
            changes = dict.fromkeys(LAYOUTS, Layout()) | (of_pages(drawn) if last.problem.page_size else drawn)
            if all(getattr(last.problem, name) == layout for name, layout in changes.items()):
                changes = dict.fromkeys(LAYOUTS, Layout())
            try:
                problem = replace(last.problem, **changes)
            except BadArgument:
                return
            if kernel.supports(problem, last.config, device) is None:
                self._make(replace(last, problem=problem))

        def _others(self, which: Check) -> tuple[Case, ...]:
            if not self.calls:
                return ()
            last = self.calls[-1]
            return tuple(replace(last, problem=each) for each in other_problems(kernel, which, last.problem, last.config, device))

        def _change(self, which: Check, data: st.DataObject) -> None:
            self._make(data.draw(st.sampled_from(self._others(which))))

        def _make(self, case: Case) -> None:
            self.calls.append(case)
            call(case)

    if not (checks := stream_checks(kernel, device)):
        return Calls

    class CallsElsewhere(Calls):
        """The same, and calls on other streams or in CUDA graphs."""

        @rule(check=st.sampled_from(checks))
        def elsewhere(self, check: Check) -> None:
            """Make the same call once more, on another stream, beside another one or in a CUDA graph."""
            call(replace(self.calls[-1], check=check))

    return CallsElsewhere
