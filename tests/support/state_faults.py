"""Faults in what calls leave behind: copies of torch.reference_cpu with state of their own, as kernels keep it in a module.

Each is right in a new process, and wrong after certain earlier calls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace

from attnfuzz.kernels.contract import Built, Config, Device, Inputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.torch.reference_cpu import ReferenceCpu

__all__ = ["FAULTS", "StateFault"]

State = dict[Any, Any]
_Forward = tuple[torch.Tensor, torch.Tensor]


@dataclass
class StateFault(ReferenceCpu):
    """A kernel that keeps `state` between calls.

    `builds` changes the Problem that code is built for, as a cache with a wrong key does; `ends` changes forward's outputs.
    """

    name: str  # type: ignore[misc]
    builds: Callable[[State, Problem], Problem] = lambda _, problem: problem
    ends: Callable[[State, Inputs, _Forward], _Forward] = lambda *arguments: arguments[-1]
    at_build: bool = False
    """The cache is filled when code is built, not when it is called."""
    state: State = field(default_factory=dict)
    capabilities = replace(ReferenceCpu.capabilities, dims=((16, 16), (32, 32), (7, 7)))

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        """Build it for what the state makes of the Problem."""
        built = super().build(problem, config, device)
        return _Stateful(built, self, self.builds(self.state, problem) if self.at_build else None)


@dataclass(frozen=True)
class _Stateful:
    built: Any
    kernel: StateFault
    problem: Problem | None

    def forward(self, inputs: Inputs) -> _Forward:
        problem = self.problem or self.kernel.builds(self.kernel.state, inputs.problem)
        changed = {name: getattr(problem, name) for name in ("causal", "softmax_scale")}
        outputs = self.built.forward(_with(inputs, replace(inputs.problem, **changed)))
        return self.kernel.ends(self.kernel.state, inputs, outputs)

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Any:
        return self.built.backward(inputs, o, lse)


def _with(inputs: Inputs, problem: Problem) -> Inputs:
    import dataclasses

    return dataclasses.replace(inputs, problem=problem)


def _keyed(*names: str) -> Callable[[State, Problem], Problem]:
    """Return a cache of compiled code whose key has only these parts of the Problem; scale and mask are compiled in."""

    def builds(state: State, problem: Problem) -> Problem:
        return state.setdefault(tuple(getattr(problem, name) for name in names), problem)

    return builds


def _scale_of_the_first(state: State, problem: Problem) -> Problem:
    """The default scale is computed once, whatever the head dim."""
    if problem.softmax_scale is not None:
        return problem
    return replace(problem, softmax_scale=state.setdefault("scale", problem.scale))


def _workspace(state: State, inputs: Inputs, outputs: _Forward) -> _Forward:
    """A workspace is cleared unless the shape has grown, as if it were new then: it holds what an older call has left."""
    o, lse = outputs
    size, used = o.numel(), state.get("used", 0)
    space = state.get("space", torch.zeros(0))
    if space.numel() < size:
        space = torch.zeros(size)
    elif size <= used:
        space[:size] = 0.0
    space[:size] += o.detach().flatten()
    state["space"], state["used"] = space, size
    return space[:size].view(o.shape).clone(), lse


def _tickets(state: State, inputs: Inputs, outputs: _Forward) -> _Forward:
    """Blocks take tickets, and the one with the last ticket writes the sum; the counter is not set back after odd numbers."""
    ticket = state.get("ticket", 0)
    state["ticket"] = (ticket + inputs.problem.heads) % 2
    return outputs if ticket == 0 else (outputs[0] * 0.5, outputs[1])


def _counter(state: State, inputs: Inputs, outputs: _Forward) -> _Forward:
    state["calls"] = state.get("calls", 0) + 1
    return (outputs[0] * 1.5, outputs[1]) if state["calls"] > 3 else outputs


def _fourth(state: State, inputs: Inputs, outputs: _Forward) -> _Forward:
    """Only the fourth call is wrong: the Case does not fail once more in the same process."""
    state["calls"] = state.get("calls", 0) + 1
    return (outputs[0] * 1.5, outputs[1]) if state["calls"] == 4 else outputs


def _table(state: State, inputs: Inputs, outputs: _Forward) -> _Forward:
    """A table of head numbers is kept by the number of query heads alone."""
    problem = inputs.problem
    groups = state.setdefault(problem.heads, problem.groups)
    return outputs if groups == problem.groups else (outputs[0].flip(-1) + 1.0, outputs[1])


def _too_small(state: State, inputs: Inputs, _: _Forward) -> bool:
    return inputs.problem.total_q > 4 * state.setdefault("rows", max(inputs.problem.total_q, 1))


def _raises(state: State, inputs: Inputs, outputs: _Forward) -> _Forward:
    """A workspace has the size of the first call."""
    if _too_small(state, inputs, outputs):
        raise RuntimeError("planted: the workspace is too small")
    return outputs


def _aborts(state: State, inputs: Inputs, outputs: _Forward) -> _Forward:
    """The same where nothing checks it."""
    if _too_small(state, inputs, outputs):
        os.write(2, b"planted: free(): invalid next size\n")
        os.abort()
    return outputs


def _nan(state: State, inputs: Inputs, outputs: _Forward) -> _Forward:
    """A flag of empty sequences stays set."""
    was = state.get("empty", False)
    state["empty"] = 0 in inputs.problem.seqlens_k
    return (outputs[0], outputs[1] * torch.nan) if was and not state["empty"] else outputs


def _packing(state: State, inputs: Inputs, outputs: _Forward) -> _Forward:
    """What the first call was like decides."""
    return (
        outputs
        if state.setdefault("packing", inputs.problem.packing) == inputs.problem.packing
        else (outputs[0] + 1.0, outputs[1])
    )


def _waits(state: State, inputs: Inputs, outputs: _Forward) -> _Forward:
    """A semaphore is not released after more than one sequence."""
    while state.get("held"):
        time.sleep(0.01)
    state["held"] = inputs.problem.batch > 1
    return outputs


def _sometimes(state: State, inputs: Inputs, outputs: _Forward) -> _Forward:
    """No state, but chance: a race."""
    return (outputs[0] * 1.5, outputs[1]) if os.urandom(1)[0] < 96 else outputs


def _always(state: State, inputs: Inputs, outputs: _Forward) -> _Forward:
    """No state: wrong beside three keys or more, in any process."""
    return (outputs[0] * 1.5, outputs[1]) if max(inputs.problem.seqlens_k) >= 3 else outputs


FAULTS = {
    each.name.partition(".")[2]: each
    for each in (
        StateFault("state.scale", _keyed("causal", "dim_qk", "seqlens_q", "seqlens_k"), at_build=True),
        StateFault("state.mask", _keyed("dim_qk", "heads", "kv_heads", "softmax_scale"), at_build=True),
        StateFault("state.dims", _scale_of_the_first),
        StateFault("state.workspace", ends=_workspace),
        StateFault("state.tickets", ends=_tickets),
        StateFault("state.counter", ends=_counter),
        StateFault("state.fourth", ends=_fourth),
        StateFault("state.table", ends=_table),
        StateFault("state.raises", ends=_raises),
        StateFault("state.aborts", ends=_aborts),
        StateFault("state.nan", ends=_nan),
        StateFault("state.packing", ends=_packing),
        StateFault("state.waits", ends=_waits),
        StateFault("state.sometimes", ends=_sometimes),
        StateFault("state.always", ends=_always),
    )
}
globals().update({name.upper(): kernel for name, kernel in FAULTS.items()})
