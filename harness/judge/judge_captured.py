"""Gradients of captured tensors against their budgets: of whole tensors, which belong to no token or head."""

from __future__ import annotations

import torch

from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.judge.truth import Truth, Truths
from attnfuzz.kernels.contract import Inputs, Outputs
from attnfuzz.kernels.modified import shape_of, tensors_of
from attnfuzz.oracles.formats import Format, half_ulp

__all__ = ["wrong_captured"]

_SINGLE = Format.of("float32")


def wrong_captured(kernel: str, inputs: Inputs, outputs: Outputs, expected: Truths) -> list[Failure]:
    """A Failure for each captured tensor whose gradient breaks the contract or its budget."""
    problem = inputs.problem
    tensors = tensors_of(problem)
    if not any(each.gradient for each in tensors) or not {"dq", "dk", "dv"} & set(problem.needs.outputs):
        return []
    if len(outputs.d_captured) != len(tensors):
        message = (
            f"the backward returned {len(outputs.d_captured)} gradients of captured tensors where {len(tensors)} are expected"
        )
        return [Failure(kernel=kernel, kind="contract", check="d captured", message=message)]
    found = []
    for tensor, got in zip(tensors, outputs.d_captured, strict=True):
        if not tensor.gradient:
            continue
        check, title = f"d {tensor.name}", f"the gradient of {tensor.name}"
        shape = shape_of(problem, tensor)
        if not isinstance(got, torch.Tensor) or (tuple(got.shape), got.dtype) != (shape, torch.float32):
            told = f"{tuple(got.shape)} {got.dtype}" if isinstance(got, torch.Tensor) else type(got).__name__
            message = f"{title} is {told} where {shape} {torch.float32} is expected"
            found.append(Failure(kernel=kernel, kind="contract", check=check, message=message))
        elif failure := _beyond(
            kernel, check, title, got, expected.captured[tensor.name], any(expected.budgets.doubted.values())
        ):
            found.append(failure)
    return found


def _beyond(kernel: str, check: str, title: str, got: torch.Tensor, true: Truth, in_doubt: bool) -> Failure | None:
    """The Failure of a gradient with elements outside their intervals, at its worst one."""
    got = got.to(true.expected.device).double()
    allowed = true.allowed + half_ulp(true.expected, _SINGLE)
    error = (got - true.expected).abs()
    # Where scores are lost nothing is judged, but NaN is wrong, unless a mask is in doubt and nothing bounds what that does.
    wrong = ~((error <= allowed) | (allowed == torch.inf)) if in_doubt else ~(error <= allowed)
    if not wrong.any():
        return None
    broken = wrong & ~torch.isfinite(got)
    ratio = torch.where(broken, torch.inf, error / allowed)
    at = int(torch.where(wrong, ratio, -1.0).flatten().argmax())
    where = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(at), got.shape))
    one, truth, most = (float(x.flatten()[at]) for x in (got, true.expected, allowed))
    times = "" if broken.any() else f", {float(ratio.flatten()[at]):.3g} x its budget"
    message = (
        f"{title}: {int(wrong.sum())} of {got.numel()} elements are wrong; worst at [{where}]: got {one:.9g}, "
        f"expected {truth:.9g}, allowed error {most:.3g}{times}"
    )
    return Failure(kernel=kernel, kind="nonfinite" if broken.any() else "mismatch", check=check, message=message)
