"""Probes: calls of a kernel other than Trials, in a child process or in this one."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec
import torch

from attnfuzz.harness.core import environment
from attnfuzz.harness.isolation.tasks import kernel_of
from attnfuzz.harness.judge.failure import OUTPUT_TITLES, Failure
from attnfuzz.harness.judge.judge import judge
from attnfuzz.harness.judge.truth import truth
from attnfuzz.harness.trial.bands import Bands
from attnfuzz.harness.trial.build import build_kernel
from attnfuzz.harness.trial.errors import describe_exception, may_catch
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.launch import copied, launch, split
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.adapters.call import Running
from attnfuzz.kernels.contract import BuildError, Built, Capabilities, Config, Device, Inputs, Kernel, Outputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support import process_setup
from attnfuzz.strategies.case import Case, case_from_json

__all__ = ["probed", "run_probe"]

_RUNS = 4
_CLEAN = (ValueError, TypeError, NotImplementedError, RuntimeError, BuildError)


def run_probe(payload: dict[str, Any], enter: Callable[[str], None]) -> tuple[Any, bool]:
    """Run a child's task. `payload`: probe, kernel (as shipped), case (canonical JSON), device, and the probe's own arguments."""
    kernel, case = kernel_of(payload), case_from_json(payload["case"])
    enter("kernel")
    return msgspec.to_builtins(probed(payload["probe"], kernel, case, payload["device"], payload)), False


def probed(probe: str, kernel: Kernel, case: Case, device: Device, more: dict[str, Any]) -> Any:
    """Return the result of `probe`."""
    environment.prepare(device)
    if probe == "identity":
        return [kernel.name, kernel.compile_key(case.problem, case.config), [dict(each) for each in kernel.configs(case.problem)]]
    if probe == "widened":
        return _widened(kernel, case, device, more["widened"])
    if probe == "graph":
        return _has_graph(kernel, case, device)
    probes = {"process": _process, "settings": _settings, "repeated": _repeated, "arguments": _arguments}
    wrong, right = probes[probe](kernel, case, device)
    return {"wrong": wrong, "right": right}


def _has_graph(kernel: Kernel, case: Case, device: Device) -> bool | None:
    """Return whether the O of an adapted function has a graph of autograd's; None where its forward fails."""
    try:
        ready = build_kernel(kernel, case.problem, case.config, device)
        ready.forward(materialise(case.problem, case.recipe, device).for_kernel())
    except BaseException as error:  # a Trial reports it
        if not may_catch(error):
            raise
        return None
    return ready.has_graph if isinstance(ready, Running) else None


def _process(kernel: Kernel, _: Case, device: Device) -> tuple[list[str], str]:
    """Check that this process is set up as the kernel's `process` has it, and that torch is as it was before."""
    setup = process_setup.setup_of(kernel)
    assert setup is not None
    process_setup.enter(kernel, device)
    wrong = [f"{name} is not {value!r}" for name, value in setup.environment if os.environ.get(name) != value]
    if reason := process_setup.why_not_set_up(kernel, device):
        wrong.append(f"set_up({device!r}) raised {reason}")
    state = _state()
    if changed := [what for what, value in _FRESH.items() if not _same(value, state[what])]:
        wrong.append(f"set_up changes {', '.join(changed)}")
    parts = [f"variables: {', '.join(name for name, _ in setup.environment)}"] if setup.environment else []
    return wrong, "; ".join([*parts, *(["set_up ran once"] if setup.set_up else [])])


def _settings(kernel: Kernel, case: Case, device: Device) -> tuple[list[str], str]:
    """Check that results do not depend on torch's settings, and that the kernel leaves these as they are."""
    ready = build_kernel(kernel, case.problem, case.config, device)
    inputs = materialise(case.problem, case.recipe, device)
    expected = truth(inputs, kernel.capabilities.deviations, device)
    wrong = []
    for name, setting in _SETTINGS.items():
        copies = copied(inputs, Bands())
        with setting():
            before = _state()
            try:
                outputs = _called(ready, copies, device)
            except BaseException as error:  # that is the result
                if not may_catch(error):
                    raise
                wrong.append(f"with {name} it raised {describe_exception(error)}")
                continue
            changed = [what for what, value in _state().items() if not _same(value, before[what])]
        if changed:
            wrong.append(f"it changes {', '.join(changed)}")
        verdict = judge(kernel.name, inputs, outputs, expected, case.config)
        if verdict.failure is not None:
            wrong.append(f"with {name}: {verdict.failure.message}")
    return list(dict.fromkeys(wrong)), f"{', '.join(_SETTINGS)}: as before"


@contextmanager
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _generator() -> Iterator[None]:
    state = torch.get_rng_state()
    torch.manual_seed(20210)
    try:
        yield
    finally:
        torch.set_rng_state(state)


_SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "set_default_dtype(float64)": _default_dtype,
    "set_default_device('meta')": lambda: torch.device("meta"),
    "another seed of torch's generator": _generator,
    "enable_grad()": torch.enable_grad,
    "no_grad()": torch.no_grad,
}


def _state() -> dict[str, Any]:
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": str(torch.get_default_device()),
        "whether torch records gradients": torch.is_grad_enabled(),
        "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "the state of torch's generator": torch.get_rng_state(),
    }


_FRESH: dict[str, Any] = {
    "torch's default dtype": torch.float32,
    "torch's default device": "cpu",
    "whether torch records gradients": True,
    "torch's deterministic mode": False,
}
"""The state of a process that has changed nothing."""


def _same(one: Any, other: Any) -> bool:
    return bool(torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other)


def _called(ready: Built, inputs: Inputs, device: Device) -> Outputs:
    """Run forward and backward, with nothing poisoned and torch as it is set."""
    inputs = inputs.for_kernel()
    o, lse = ready.forward(inputs)
    dq = dk = dv = None
    if {"dq", "dk", "dv"} & set(inputs.problem.needs.outputs):
        (dq, dk, dv), _ = split(ready.backward(inputs, o, lse))
    environment.synchronise(device)
    return Outputs(o=o, lse=lse, dq=dq, dk=dk, dv=dv)


def _repeated(kernel: Kernel, case: Case, device: Device) -> tuple[list[str], str]:
    """Compare outputs declared deterministic bit for bit over several launches."""
    names = [name for name in kernel.capabilities.deterministic if name in case.problem.needs.outputs]
    if not names:
        return [], "no output is declared deterministic"
    ready = build_kernel(kernel, case.problem, case.config, device)
    inputs = materialise(case.problem, case.recipe, device)
    results = [launch(case, ready, inputs, device) for _ in range(_RUNS)]
    if broken := [each for each in results if isinstance(each, Failure)]:
        return [broken[0].message], ""
    first, *others = (each for each in results if isinstance(each, Outputs))
    wrong = [
        f"{OUTPUT_TITLES[name]} differs between {_RUNS} runs"
        for name in names
        if any(not torch.equal(getattr(first, name), getattr(each, name)) for each in others)
    ]
    return wrong, f"{', '.join(OUTPUT_TITLES[name] for name in names)}: the same bits in {_RUNS} runs"


def _arguments(kernel: Kernel, case: Case, device: Device) -> tuple[list[str], str]:
    """Check that `build` refuses, with a message, what `supports` refuses."""
    wrong, tried = [], []
    for what, problem, config in _refused(kernel, case):
        if kernel.supports(problem, config, device) is None:
            continue
        tried.append(what)
        try:
            kernel.build(problem, config, device)
        except _CLEAN as error:
            if not str(error).strip():
                wrong.append(f"for {what} build raised {type(error).__name__} without a message")
        except BaseException as error:  # that is the result
            if not may_catch(error):
                raise
            wrong.append(f"for {what} build raised {describe_exception(error)}")
        else:
            wrong.append(f"build takes {what}, which supports refuses")
    return wrong, f"build refuses {', '.join(tried)}"


def _refused(kernel: Kernel, case: Case) -> Iterator[tuple[str, Problem, Config]]:
    can, problem = kernel.capabilities, case.problem
    replace = msgspec.structs.replace
    yield "an unknown Config", problem, Config(no_such_choice=12345)
    yield "dims 511/7", replace(problem, dim_qk=511, dim_v=7), case.config
    for dtype in ("float32", "bfloat16", "float16"):
        if dtype not in can.dtypes:
            yield f"dtype {dtype}", replace(problem, dtype=dtype), case.config
    if not can.softcap:
        yield "a softcap", replace(problem, softcap=2.0), case.config


def _widened(kernel: Kernel, case: Case, device: Device, fields: dict[str, Any]) -> dict[str, Any]:
    """Run a Trial of a copy of the kernel that also declares `fields`; return {"wrong": [message], "right": ""}."""
    can = msgspec.convert({**msgspec.to_builtins(kernel.capabilities), **fields}, Capabilities)
    try:
        wide = copy.copy(kernel)
        object.__setattr__(wide, "capabilities", can)
    except Exception:  # a property, a class that refuses to be copied: then it is not tried
        return {"wrong": [], "right": "untried"}
    local = registry.is_local(kernel.name)
    registry.register(wide)
    try:
        if reason := wide.supports(case.problem, case.config, device):
            return {"wrong": [reason], "right": ""}
        verdict = run_trial(case, device)
    except BaseException as error:  # beyond what is declared, an error breaks nothing
        if not may_catch(error):
            raise
        return {"wrong": [describe_exception(error)], "right": ""}
    finally:
        if local:
            registry.register(kernel)
        else:
            registry.unregister(kernel.name)
    return {"wrong": [each.message for each in verdict.failures], "right": ""}
