"""What a short script compares with: attention in float64, by `scaled_dot_product_attention` or plain math."""

from __future__ import annotations

import math
from collections.abc import Mapping

from attnfuzz.harness.repro.script.lines import GRADIENTS, where
from attnfuzz.harness.repro.script.short_call import is_swapped
from attnfuzz.kernels.adapters import Adapted
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.problem import OutputName, Problem

__all__ = ["comparison_lines", "is_explicit", "reference_lines"]

_GOT = {"o": "o", "lse": "lse", "dq": "dq", "dk": "dk", "dv": "dv"}
_RIGHT = {"o": "expected", "lse": "expected_lse", "dq": "gradients[0]", "dk": "gradients[1]", "dv": "gradients[2]"}
_TITLES = {"o": "O", "lse": "LSE", "dq": "dQ", "dk": "dK", "dv": "dV"}


def reference_lines(kernel: Kernel, problem: Problem, limits: Mapping[OutputName, float], device: Device) -> list[str]:
    """Return the lines that compute what is expected, in the layout of the kernel's outputs."""
    backward, explicit = bool({*GRADIENTS} & {*limits}), is_explicit(problem, limits)
    lines = [f"exact = [x.detach().double(){'.requires_grad_()' if backward else ''} for x in (q, k, v)]"]
    if problem.packing == "ragged":
        lines += _ragged(problem, limits, device, explicit=explicit)
    else:
        lines += _dense(problem, limits, device, explicit=explicit, swapped=is_swapped(kernel))
    if "lse" in limits:
        if kernel.capabilities.deviations.lse_base2:
            lines.append(f"expected_lse = expected_lse / {math.log(2)!r}")
        if isinstance(kernel, Adapted):
            lines.append("lse = torch.where(lse == torch.inf, -torch.inf, lse)  # rows without keys")
    if backward:
        rows = f"do[:{problem.total_q}]" if problem.slack_q else "do"
        lines.append(f"gradients = torch.autograd.grad(expected, exact, {rows}.double())")
    return lines


def is_explicit(problem: Problem, limits: Mapping[OutputName, float]) -> bool:
    """Whether the reference is more than `scaled_dot_product_attention`."""
    return bool(problem.softcap) or "lse" in limits


def _ragged(problem: Problem, limits: Mapping[OutputName, float], device: Device, *, explicit: bool) -> list[str]:
    mask = _mask(problem, device, ("b - a", "d - c"), "d - c - b + a")
    lines = [
        "parts = []",
        "for (a, b), (c, d) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist())):",
        f"    {_HEADS} = (x.transpose(0, 1) for x in (exact[0][a:b], exact[1][c:d], exact[2][c:d]))",
        *([f"    {mask}"] if mask else []),
    ]
    if not explicit:
        lines.append(f"    parts.append(scaled_dot_product_attention({', '.join([_HEADS, *_options(problem)])}))")
        return [*lines, "expected = torch.cat(parts, 1).transpose(0, 1)"]
    *scores, o, lse = _explicit(problem)
    lines += [f"    {each}" for each in scores]
    if "lse" not in limits:
        return [*lines, f"    parts.append({o})", "expected = torch.cat(parts, 1).transpose(0, 1)"]
    lines.append(f"    parts.append(({o}, {lse}))")
    return [*lines, "expected, expected_lse = (torch.cat(x, 1) for x in zip(*parts))", "expected = expected.transpose(0, 1)"]


def _dense(problem: Problem, limits: Mapping[OutputName, float], device: Device, *, explicit: bool, swapped: bool) -> list[str]:
    n, m = problem.seqlens_q[0], problem.seqlens_k[0]
    mask = _mask(problem, device, (str(n), str(m)), str(m - n))
    given, back = ("*exact", "") if swapped else ("*(x.transpose(1, 2) for x in exact)", ".transpose(1, 2)")
    lines = [mask] if mask else []
    if not explicit:
        return [*lines, f"expected = scaled_dot_product_attention({', '.join([given, *_options(problem)])}){back}"]
    *scores, o, lse = _explicit(problem)
    lines = [f"{_HEADS} = {'exact' if swapped else given.removeprefix('*')}", *lines, *scores, f"expected = ({o}){back}"]
    return [*lines, *([f"expected_lse = {lse}"] if "lse" in limits else [])]


_HEADS = "q64, k64, v64"


def _explicit(problem: Problem) -> list[str]:
    """Return the lines up to the scores, and the expressions of O and LSE, heads first."""
    groups, cap = problem.groups, problem.softcap
    lines = [f"k64, v64 = k64.repeat_interleave({groups}, -3), v64.repeat_interleave({groups}, -3)"] if groups > 1 else []
    lines.append(f"scores = {problem.scale!r} * q64 @ k64.transpose(-1, -2)")
    lines += [f"scores = {cap!r} * torch.tanh(scores / {cap!r})"] if cap else []
    if not _masked(problem):
        return [*lines, "scores.softmax(-1) @ v64", "scores.logsumexp(-1)"]
    lines.append("scores = scores.masked_fill(~mask, -torch.inf)")
    return [*lines, "torch.where(mask.any(-1, keepdim=True), scores.softmax(-1), 0.0) @ v64", "scores.logsumexp(-1)"]


def _options(problem: Problem) -> list[str]:
    """Keywords of `scaled_dot_product_attention`."""
    options = ["attn_mask=mask"] if _masked(problem) else []
    options += [] if problem.softmax_scale is None else [f"scale={problem.softmax_scale!r}"]
    return [*options, *(["enable_gqa=True"] if problem.groups > 1 else [])]


def _masked(problem: Problem) -> bool:
    return problem.causal is not None or (problem.window or (None, None)) != (None, None)


def _mask(problem: Problem, device: Device, sizes: tuple[str, str], shift: str) -> str | None:
    """Return the line that makes the mask of `sizes` queries and keys, or None; `shift`: the bottom-right diagonal."""
    if not _masked(problem):
        return None
    left, right = problem.window or (None, None)
    if problem.causal is not None:
        right = 0 if right is None else min(right, 0)
    shift = "0" if problem.causal == "top_left" else shift

    def diagonal(side: int) -> str:
        return shift if not side else f"{shift} {'+' if side > 0 else '-'} {abs(side)}"

    parts = f".tril({diagonal(right)})" if right is not None else ""
    parts += f".triu({diagonal(-left)})" if left is not None else ""
    return f"mask = torch.ones({sizes[0]}, {sizes[1]}, dtype=torch.bool{where(device)}){parts}"


def comparison_lines(problem: Problem, limits: Mapping[OutputName, float]) -> list[str]:
    """Return the lines that compare each output with what is expected, and end the script."""
    rows = []
    for name, limit in limits.items():
        by_query = name in ("o", "lse", "dq")
        slack = problem.slack_q if by_query else problem.slack_k
        count = problem.total_q if by_query else problem.total_k
        cut = "" if not slack else f"[..., :{count}]" if name == "lse" else f"[:{count}]"
        rows.append((_TITLES[name], f"{_GOT[name]}{cut}", _RIGHT[name] + (cut if name in GRADIENTS else ""), limit))
    # -inf equals -inf in rows without keys, and their difference is NaN.
    form = "torch.where({0} == {1}, 0.0, {0}.double() - {1})" if "lse" in limits else "({0}.double() - {1})"
    if len(rows) == 1:
        title, got, right, limit = rows[0]
        return [
            f"error, allowed = {form.format(got, right)}.abs().max().item(), {limit!r}",
            f'print(f"{title}: max error {{error:.3g}}, at most {{allowed:.3g}} is expected")',
            "sys.exit(not error <= allowed)  # NaN is wrong",
            "",
        ]
    return [
        "wrong = 0",
        "for name, got, right, allowed in (",
        *(f'    ("{title}", {got}, {right}, {limit!r}),' for title, got, right, limit in rows),
        "):",
        f"    error = {form.format('got', 'right')}.abs().max().item()",
        "    wrong += not error <= allowed  # NaN is wrong",
        "    print(f\"{name}: max error {error:.3g}, at most {allowed:.3g} is expected{'' if error <= allowed else ' WRONG'}\")",
        "sys.exit(wrong > 0)",
        "",
    ]
