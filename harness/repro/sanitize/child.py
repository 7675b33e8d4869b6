"""The child process under NVIDIA's compute-sanitizer: it runs only the launches of one Case on the GPU.

Inputs are made on the CPU and copied. There is no oracle, no poison and no guard band: each tensor is an allocation of its own,
whose ends the sanitizer knows, and memory that the kernel does not write stays uninitialised.

    python -m attnfuzz.harness.repro.sanitize.child TASK.json RESULT.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from attnfuzz.harness.core import environment
from attnfuzz.harness.isolation.kernel_ref import unpacked
from attnfuzz.harness.trial.build import build_kernel
from attnfuzz.harness.trial.errors import describe_exception, format_traceback, mark_as_child
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels.contract import Device, Inputs, Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import CALLS, Case, case_from_json
from attnfuzz.strategies.earlier_calls import earlier_problems

__all__ = ["main", "run_launches"]


def main(arguments: list[str]) -> None:
    """Run the task; the result file holds the last stage: "started", "launched", "raised", "refused", "broken" or "done"."""
    task, result = json.loads(Path(arguments[0]).read_text()), Path(arguments[1])
    mark_as_child()

    def say(stage: str, text: str = "") -> None:
        result.write_text(json.dumps({"stage": stage, "text": text}))

    say("started")
    try:
        environment.prepare(task["device"])
        kernel, case = unpacked(task["kernel"]), case_from_json(task["case"])
        run_launches(kernel, case, task["device"], say)
    except BadArgument as error:
        say("refused", str(error))
    except _KernelError as error:
        say("raised", str(error))
    except BaseException as error:  # the parent reports any error
        say("broken", format_traceback(error))
    else:
        say("done")


class _KernelError(Exception):
    """Holds the text of what the kernel raised."""


def run_launches(kernel: Kernel, case: Case, device: Device, say: Any) -> None:
    """Run forward and backward of the Case, after its earlier Cases and the earlier calls of its check.

    Raises:
        BadArgument: the kernel cannot take the Case.
        _KernelError: it raised.
    """
    for each in case.after:
        # As elsewhere, a Case that raises does not end the sequence.
        with contextlib.suppress(_KernelError):
            run_launches(kernel, each, device, say)
    before = earlier_problems(kernel, case, device) if case.check in CALLS else ()
    for problem in (*before, case.problem):
        ready = build_kernel(kernel, problem, case.config, device)
        inputs = _on(device, materialise(problem, case.recipe, "cpu")).for_kernel()
        say("launched")
        _launch(ready, inputs, problem, device)


def _on(device: Device, inputs: Inputs) -> Inputs:
    values = {each.name: getattr(inputs, each.name) for each in dataclasses.fields(inputs)}
    moved = {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(inputs, **moved, captured=tuple(each.to(device) for each in inputs.captured))


def _launch(ready: Any, inputs: Inputs, problem: Problem, device: Device) -> None:
    try:
        with torch.no_grad():
            o, lse = ready.forward(inputs)
            environment.synchronise(device)
            if {"dq", "dk", "dv"} & set(problem.needs.outputs):
                gradients = ready.backward(inputs, o, lse)
                environment.synchronise(device)
                del gradients
    except BaseException as error:  # a kernel may raise anything
        raise _KernelError(describe_exception(error)) from error


if __name__ == "__main__":
    main(sys.argv[1:])
