"""The rules by which other suites accept a kernel's outputs, and one Case under a rule, in a child process.

- `twice`: the largest error is at most twice that of attention in the kernel's own dtype, plus twice what adding and taking away
  0.3 does to the reference (flash-attention, hopper/test_flash_attn.py and tests/cute/test_flash_attn.py; the older
  tests/test_flash_attn.py has no such floor, and three times for gradients).
- `close`: `torch.testing.assert_close` with rtol and atol 1e-2 (TileLang, examples/flash_attention/example_gqa_bwd.py).
- `mean`: the mean error against float64 is at most 1.1 times that of uncompiled flex attention, 10 times in float32; NaN fails
  (PyTorch, test/inductor/test_flex_attention.py, `_check_out_and_grad`).
- `tolerance`: every error against float64 is at most one number for each dtype, and NaN fails (arXiv 2606.20128 and 2606.27396;
  the numbers are those that its tool gpuemu documents for a flash attention kernel, documentation/docs/concepts/validation.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from support.verdict.other_rules import Compared, close, twice

from attnfuzz.harness.isolation.tasks import kernel_of
from attnfuzz.harness.judge.contract import heads_first
from attnfuzz.harness.trial.errors import describe_exception
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.kernels.contract import Inputs, Kernel, Outputs
from attnfuzz.kernels.problem import OUTPUT_NAMES, Dtype, OutputName
from attnfuzz.kernels.support import memory
from attnfuzz.strategies.case import Case, case_from_json
from detection.references import GRADED, eager, exact, stepwise

__all__ = ["RULES", "broken_outputs", "judged"]

_TYPES: Final[dict[Dtype, torch.dtype]] = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_FUDGE: Final[dict[Dtype, float]] = {"float16": 1.1, "bfloat16": 1.1, "float32": 10.0}
# bfloat16 has no number of its own there: it is rounded eight times as coarsely as float16.
_TOLERANCE: Final[dict[Dtype, float]] = {"float16": 1e-2, "bfloat16": 8e-2, "float32": 1e-4}
_Rule = Callable[[Inputs, Outputs], list[OutputName]]
_Enter = Callable[..., None]


def _got(inputs: Inputs, outputs: Outputs, name: OutputName) -> torch.Tensor:
    return heads_first(inputs.problem, name, getattr(outputs, name)).double()


def _compared(inputs: Inputs, outputs: Outputs) -> dict[OutputName, Compared]:
    """Return each output beside float64 and attention in its own dtype."""
    dtype, true, low = _TYPES[inputs.problem.dtype], exact(inputs), stepwise(inputs)
    return {
        name: Compared(dtype, _got(inputs, outputs, name), true[name], true[name].to(dtype).double(), low[name], low[name])
        for name in GRADED
    }


def _not_twice(inputs: Inputs, outputs: Outputs) -> list[OutputName]:
    return [name for name, each in _compared(inputs, outputs).items() if not twice(each)]


def _not_close(inputs: Inputs, outputs: Outputs) -> list[OutputName]:
    return [name for name, each in _compared(inputs, outputs).items() if not close(each)]


def _not_mean(inputs: Inputs, outputs: Outputs) -> list[OutputName]:
    true, low, fudge = exact(inputs), eager(inputs), _FUDGE[inputs.problem.dtype]

    def mean(x: torch.Tensor) -> float:
        return float(x.abs().mean()) if x.numel() else 0.0

    # A NaN makes the comparison false.
    return [
        name
        for name in GRADED
        if not mean(_got(inputs, outputs, name) - true[name]) <= fudge * mean(low[name] - true[name])
    ]  # fmt: skip


def _not_within_tolerance(inputs: Inputs, outputs: Outputs) -> list[OutputName]:
    true, most = exact(inputs), _TOLERANCE[inputs.problem.dtype]

    def within(name: OutputName) -> bool:
        got, expected = _got(inputs, outputs, name), true[name]
        return bool(((got == expected) | ((got - expected).abs() <= most)).all())

    return [name for name in OUTPUT_NAMES if not within(name)]


RULES: Final[dict[str, _Rule]] = {
    "twice": _not_twice,
    "close": _not_close,
    "mean": _not_mean,
    "tolerance": _not_within_tolerance,
}


def broken_outputs(rule: str, kernel: Kernel, case: Case, enter: _Enter = lambda *_: None) -> str:
    """Run the kernel forward and backward as a test does, without the harness's own checks; return what breaks the rule.

    An empty text: nothing does. What the kernel raises, or outputs that cannot be compared, fail a test as well.
    """
    enter("inputs")
    inputs = materialise(case.problem, case.recipe, "cpu")
    enter("kernel")
    try:
        with torch.no_grad():
            built = kernel.build(case.problem, case.config, "cpu")
            o, lse = built.forward(inputs)
            outputs = Outputs(o, lse, *built.backward(inputs, o, lse))
    except Exception as error:
        return f"exception: {describe_exception(error)[:200]}"
    enter("judge")
    try:
        wrong = RULES[rule](inputs, outputs)
    except RuntimeError as error:  # tensors of other shapes
        return f"outputs that cannot be compared: {str(error)[:200]}"
    return ", ".join(wrong)


def judged(payload: dict[str, Any], enter: _Enter) -> tuple[dict[str, str], bool]:
    """Judge one Case in a child process. `payload`: kernel (as shipped), case (canonical JSON), device, rule."""
    torch.set_num_threads(1)
    memory.check(False)
    return {"broken": broken_outputs(payload["rule"], kernel_of(payload), case_from_json(payload["case"]), enter)}, False
