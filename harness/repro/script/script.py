"""Write a Case as one standalone Python file that holds its packed inputs and expected outputs.

The file's functions are the text of runtime.py. It holds the float64 reference of each element and the interval that the judge
allows, so its verdict on elements is the harness's.
"""

from __future__ import annotations

import base64
import keyword
import math
import zlib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from pprint import pformat

import torch

from attnfuzz.harness.campaign.corpus import CaseFile
from attnfuzz.harness.campaign.runner import tries
from attnfuzz.harness.isolation.kernel_ref import global_of
from attnfuzz.harness.judge.truth import Truth, Truths, flushed_sums
from attnfuzz.harness.report.describe import describe_case, needs_earlier
from attnfuzz.harness.repro.script import runtime
from attnfuzz.harness.repro.script.lines import head
from attnfuzz.harness.repro.script.runtime import PackedCase, Stored
from attnfuzz.harness.trial.bands import memory
from attnfuzz.harness.trial.checks.on_streams import beside
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.supports import with_config
from attnfuzz.harness.trial.trial import check_runnable
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device, Inputs, Kernel
from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.modified import tensors_of
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support.file_target import file_target
from attnfuzz.oracles.formats import Format, half_ulp, rounded
from attnfuzz.strategies.case import CALLS, RELATIONS, STREAMS
from attnfuzz.strategies.earlier_calls import earlier_problems

__all__ = ["Script", "kernel_lines", "script_of", "unshown"]

_MOST_BYTES = 16 << 20
"""Bytes of all tensors that a script may hold, before they are packed."""
_INPUTS = ("q", "k", "v", "d_o", "d_lse", "cu_seqlens_q", "cu_seqlens_k", "k_pages", "v_pages", "page_table", "seqlens_k")
_CHECKED = ("out-of-bounds", "outside-view", "duplicate-store", "race", "masked-load")
"""Kinds that the interpreter of Triton kernels on the CPU refuses by itself, in a script as well."""
_UNCHECKED = ("layout", "storage", "strides")
"""Checks of a tensor's form that are not in a script."""
_HEAD = """attnfuzz case {}, written by `attnfuzz repro CASE --script`.
Run it with Python where the kernel can be imported: exit code 0 is OK, 1 is FAILED, 2 is an error of the script itself.
The inputs and the expected outputs are packed at the end. They belong to this case alone: for other inputs, edit the case file
and write a script again."""
_INTERPRETED = """
import os

os.environ["TRITON_INTERPRET"] = "1"  # Triton on the CPU: set before anything imports it
"""


@dataclass(frozen=True, slots=True)
class Script:
    """The text of a script, and what of the Case's failure it cannot show."""

    text: str
    note: str | None


def script_of(stored: CaseFile, device: Device) -> Script:
    """Write the standalone script of a case file, for `device`. The kernel is not run.

    Raises:
        BadArgument: the kernel does not take the Case or cannot be imported by another process, or the Case is too large.
    """
    kernel, note = check_runnable(stored.case, device), unshown(stored, device)
    stored = replace(stored, case=with_config(kernel, stored.case))
    imported = kernel_lines(kernel)
    packed, data = _packed(stored, kernel, device)
    _, future, source = Path(runtime.__file__).read_text(encoding="utf-8").partition("from __future__ import annotations\n")
    # The repr of a Config writes its keys without quotes, where they would be code.
    arguments = {"kernel": "KERNEL", "device": repr(device), "config": f"Config({dict(packed.config)!r})"}
    arguments |= {each.name: pformat(getattr(packed, each.name), width=120, sort_dicts=False) for each in fields(packed)[3:-1]}
    case = "".join(f"\n    {name}={text}," for name, text in arguments.items())
    texts = "".join(f'\n    """\n{text}""",' for text in data)
    parts = [
        f"{_head(stored, note)}\n{future}{_INTERPRETED if device == 'cpu' else ''}{source.rstrip()}",
        f"{imported}\n\nCASE = PackedCase({case}\n)\nDATA = ({texts}\n)",
        'if __name__ == "__main__":\n    sys.exit(run(CASE, DATA))\n',
    ]
    return Script("\n\n\n".join(parts), note)


def unshown(stored: CaseFile, device: Device) -> str | None:
    """Say what of a Case's failure a script for `device` cannot show, or None."""
    identity, case = stored.finding.identity, stored.case
    kind, check = (identity.kind, identity.check) if identity else (None, None)
    if case.after:
        return f"the Case {needs_earlier(case)}, and this script makes its own calls alone: only `attnfuzz repro` shows more"
    if case.check in RELATIONS or kind == "relation":
        return f"the Case compares related calls (check {case.check}); this script makes one: only `attnfuzz repro` shows more"
    if case.check == "protocol":
        return "the Case runs as warp roles under a schedule; this script makes a plain call: only `attnfuzz repro` shows more"
    if kind == "aggregate":
        return "no element is beyond its own budget, only all of them together: only `attnfuzz repro` shows that"
    if kind == "uninitialised" or (kind in _CHECKED and device == "cuda"):
        return f"a failure of kind {kind} is seen by attnfuzz's memory checker; this script shows only what follows of it"
    if kind == "contract" and check in _UNCHECKED:
        return f"this script checks the type, shape, dtype and device of an output, not its {check}"
    return None


def kernel_lines(kernel: Kernel) -> str:
    """Return the import of a kernel as KERNEL."""
    name, origin = kernel.name, registry.origin(kernel.name)
    target = origin.target if origin else None if registry.is_local(name) else registry.target(name)
    if target is None and registry.is_local(name):
        place = global_of(kernel)
        if place is None or place[0] == "__main__":
            raise reject("script", name, "the kernel is not a global of a module that a script could import", "make it one")
        target = ":".join(place)
    elif target is None or target.startswith("attnfuzz.") or file_target(target) is not None:
        name = target if target is not None and file_target(target) is not None else name
        return f"from attnfuzz.kernels.registry import get\n\nKERNEL = get({name!r})"
    module, _, path = target.partition(":")
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in f"{module}.{path}".split(".")):
        raise reject("script", name, f"{target!r} cannot be written as an import", "give module and kernel Python identifiers")
    first, dot, rest = path.partition(".")
    lines = f"from {module} import {first}{'' if first == 'KERNEL' else ' as KERNEL'}"
    # A target may also name what makes the kernel.
    value = f"KERNEL{dot}{rest}{'' if registry.object_at(target) is kernel else '()'}"
    return lines if value == "KERNEL" else f"{lines}\n\nKERNEL = {value}"


def _head(stored: CaseFile, note: str | None) -> str:
    lines = [f"   {name:<20} {value}" for name, value in describe_case(stored.case)]
    if stored.finding.message:
        lines.append(f"   {'found':<20} {stored.finding.message}")
    if rate := stored.rate:
        lines.append(f"It failed in {rate[0]} of {rate[1]} runs: it is run up to {tries(rate)} times, until it fails.")
    kind = stored.finding.identity.kind if stored.finding.identity else None
    if kind in ("crash", "hang", "out-of-memory", "illegal-access"):
        lines.append(f"The kernel ended or blocked its process ({kind}). It does the same to this script until it is fixed.")
    lines += [f"NOTE: {note}."] if note else []
    first, second, *more = _HEAD.format(stored.case.id).splitlines()
    return head(first, second, [*more, *lines])


def _packed(stored: CaseFile, kernel: Kernel, device: Device) -> tuple[PackedCase, list[str]]:
    """Return the Case as data and the text of each allocation. A Case that is too large is refused."""
    case, p, pack = stored.case, stored.case.problem, _Pack()
    rows, keys = p.heads * p.total_q, p.kv_heads * p.total_k
    count = {"o": rows * p.dim_v, "lse": rows, "dq": rows * p.dim_qk, "dk": keys * p.dim_qk, "dv": keys * p.dim_v}
    # A lower bound, before anything large is allocated.
    _check_size(16 * sum(count[name] for name in p.needs.outputs))
    elsewhere = case.check if case.check in STREAMS else ""
    calls = (*(earlier_problems(kernel, case, device) if case.check in CALLS else ()), *([p] if elsewhere else []), p)
    inputs = [materialise(each, case.recipe, "cpu") for each in calls]
    tables = tuple((each.problem, pack.inputs(each)) for each in inputs)
    others = pack.inputs(materialise(p, beside(case.recipe), "cpu")) if elsewhere == "two_streams" else {}
    truths = Truths(inputs[-1], kernel.capabilities.deviations, device)
    truths.count_ties()
    in_doubt = any(truths.budgets.doubted.values())
    outputs = {str(name): pack.interval(name, true, p, skip=True) for name, true in truths.items()}
    outputs |= {f"d {name}": pack.interval(f"d {name}", true, p, skip=in_doubt) for name, true in truths.captured.items()}
    reorder = {}
    if p in calls[:-1]:
        errors = {name: true.order_error(flushed_sums(p, name)) for name, true in truths.items()}
        reorder = {str(name): pack.tensor(f"{name} reorder", _as_returned(p, name, x)) for name, x in errors.items()}
    _check_size(sum(len(content) for _, content in pack.allocations))
    exact = kernel.capabilities.deterministic
    packed = PackedCase(kernel, device, case.config, tables, outputs, reorder, exact, tries(stored.rate), elsewhere, others)
    return packed, [base64.encodebytes(zlib.compress(content, 9)).decode() for _, content in pack.allocations]


def _check_size(count: int) -> None:
    if count > _MOST_BYTES:
        reason = f"a script holds at most {_MOST_BYTES} bytes of them"
        raise reject(
            "case", f"{count} bytes of inputs and expected outputs", reason, "shrink it first: attnfuzz repro CASE --shrink"
        )


class _Pack:
    """Allocations by (first tensor in it, content), each stored once: equal calls share theirs."""

    def __init__(self) -> None:
        self.allocations: dict[tuple[str, bytes], int] = {}

    def tensor(self, owner: str, x: torch.Tensor) -> Stored:
        """Keep the whole allocation of `x`."""
        _check_size(x.untyped_storage().nbytes())
        content = bytes(memory(x, 0, x.untyped_storage().nbytes()).tolist())
        number = self.allocations.setdefault((owner, content), len(self.allocations))
        return Stored(number, str(x.dtype).removeprefix("torch."), tuple(x.shape), x.stride(), int(x.storage_offset()))

    def inputs(self, inputs: Inputs) -> dict[str, Stored]:
        """Keep all inputs; tensors that share an allocation still share it."""
        tensors = {name: x for name in _INPUTS if (x := getattr(inputs, name)) is not None}
        tensors |= {f"captured {each.name}": x for each, x in zip(tensors_of(inputs.problem), inputs.captured, strict=True)}
        owners: dict[int, str] = {}
        return {name: self.tensor(owners.setdefault(x.untyped_storage().data_ptr(), name), x) for name, x in tensors.items()}

    def interval(self, name: str, true: Truth, problem: Problem, *, skip: bool) -> tuple[Stored, ...]:
        """Expected value, budget, and ends of the interval, rounded as an output is. `skip`: an infinite budget allows NaN."""
        endless, exact = true.expected.isinf(), name == "lse" or name.startswith("d ")
        centre = true.expected.masked_fill(endless, 0.0)
        error = true.allowed + half_ulp(centre, Format.of("float32")) if name.startswith("d ") else true.allowed
        low, high = centre - error, centre + error
        form, dtype = Format.of(problem.dtype), torch.float32 if exact else getattr(torch, problem.dtype)
        low, high = (_upward(low), -_upward(-high)) if exact else (rounded(low, form), rounded(high, form))
        low, high = (torch.where(endless, true.expected, each.double()).to(dtype) for each in (low, high))
        low = low.masked_fill(true.allowed.isinf(), math.nan) if skip else low
        parts = {"expected": true.expected, "allowed": true.allowed.float(), "lowest": low, "highest": high}
        return tuple(self.tensor(f"{name} {part}", _as_returned(problem, name, x)) for part, x in parts.items())


def _as_returned(problem: Problem, name: str, x: torch.Tensor) -> torch.Tensor:
    """Turn (heads, tokens[, dim]) into a kernel's shape, NaN in slack rows; the gradient of a captured tensor is copied."""
    if name.startswith("d "):
        return x.clone()
    if problem.packing == "dense":
        x = x.unflatten(1, (problem.batch, x.shape[1] // problem.batch)).transpose(0, 1)
    at, slack = (-1, problem.slack_q) if name == "lse" else (-2, problem.slack_k if name in ("dk", "dv") else problem.slack_q)
    x = torch.cat([x, x.new_full((*x.shape[:at], slack, *x.shape[at:][1:]), math.nan)], at)
    return (x if name == "lse" else x.transpose(-3, -2)).contiguous()


def _upward(x: torch.Tensor) -> torch.Tensor:
    """The smallest float32 that is not below each float64."""
    y = x.float()
    return torch.where(y.double() < x, torch.nextafter(y, torch.tensor(torch.inf)), y)
