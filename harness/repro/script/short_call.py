"""The call in a short script: a user's own function, the public function of a built-in kernel, or the kernel's contract."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import msgspec

from attnfuzz.harness.isolation.kernel_ref import global_of
from attnfuzz.harness.repro.script.lines import GRADIENTS, literal, where, wrapped
from attnfuzz.harness.repro.script.script import kernel_lines
from attnfuzz.kernels import registry
from attnfuzz.kernels.adapters import Adapted
from attnfuzz.kernels.contract import Config, Device, Inputs, Kernel
from attnfuzz.kernels.problem import LAYOUTS, Layout, Needs, OutputName, Problem

__all__ = ["Call", "call_lines", "is_swapped"]

_OWN = {
    "Config", "Inputs", "KERNEL", "Layout", "Needs", "Problem", "a", "allowed", "attention", "attention_varlen", "b",
    "base64", "built", "c", "cu_seqlens_k", "cu_seqlens_q", "d", "data", "dk", "do", "dq", "dv", "error", "exact",
    "exit", "expected", "expected_lse", "float", "get", "got", "gradients", "inputs",
    "isinstance", "k", "list", "lse", "map", "mask", "name", "o", "pairwise", "parts", "print", "problem", "q",
    "q64", "k64", "v64",
    "right", "runtime", "scaled_dot_product_attention", "scores", "slice", "sys", "torch", "tuple", "v", "values",
    "weights", "wrong", "x", "zip", "zlib",
}  # fmt: skip
"""Names of the script itself, which an imported function may not replace."""


@dataclass(frozen=True, slots=True)
class Call:
    """The call: what it imports, and its lines, which define o, lse and dq, dk, dv as far as they are needed."""

    imports: tuple[str, ...]
    lines: tuple[str, ...]


def is_swapped(kernel: Kernel) -> bool:
    """Whether the script calls a function with heads before tokens."""
    return isinstance(kernel, Adapted) and kernel.call.layout == "bhsd" and functions_of(kernel) is not None


def functions_of(kernel: Adapted) -> tuple[tuple[str, str], ...] | None:
    """(module, name) of an adapter's function, and of its own backward; None if a script cannot import them."""
    functions = [each for each in (kernel.call.function, kernel.call.own_backward) if each is not None]
    places = [_place_of(each) for each in functions]
    return None if None in places else tuple(each for each in places if each is not None)


def _place_of(function: Any) -> tuple[str, str] | None:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str) and module in sys.modules:
        holder: Any = sys.modules[module]
        if reduce(lambda x, part: getattr(x, part, None), name.split("."), holder) is function:
            return _importable((module, name))
    return _importable(global_of(function))


def _importable(place: tuple[str, str] | None) -> tuple[str, str] | None:
    if place is None or place[0] == "__main__":
        return None
    parts = f"{place[0]}.{place[1]}".split(".")
    return place if all(part.isidentifier() and not keyword.iskeyword(part) for part in parts) else None


def _is_plain_call(kernel: Kernel, problem: Problem) -> bool:
    """Whether `attnfuzz.kernels.attention` or `attention_varlen` makes the same call."""
    plain = problem.window is None and not problem.softcap
    contiguous = all(getattr(problem, name) == Layout() for name in LAYOUTS)
    return plain and (contiguous or bool(getattr(kernel, "any_strides", False)))


def needs_interpreter(kernel: Kernel, device: Device) -> bool:
    """Whether the call is of a user's function that launches Triton functions on the CPU."""
    return isinstance(kernel, Adapted) and kernel.backend == "triton" and device == "cpu" and bool(functions_of(kernel))


def imported_from(kernel: Kernel) -> list[str]:
    """Return a comment on the packages of a user's functions: where a script has to be run."""
    places = (functions_of(kernel) or ()) if isinstance(kernel, Adapted) else ()
    names = " and ".join(dict.fromkeys(module.partition(".")[0] for module, _ in places))
    return [f"Python must find {names}: put this file beside it, or name its folder in PYTHONPATH."] if names else []


def call_lines(
    kernel: Kernel, config: Config, inputs: Inputs, outputs: Collection[OutputName], device: Device, *, alone: bool = False
) -> Call:
    """Return the call that gives `outputs`; `alone`: with Triton's interpreter as it is, not as attnfuzz corrects it."""
    backward = bool({*GRADIENTS} & {*outputs})
    if isinstance(kernel, Adapted) and (places := functions_of(kernel)):
        return _adapted(kernel, places, config, inputs, device, backward=backward, alone=alone)
    if _is_plain_call(kernel, inputs.problem):
        return _public(kernel, config, inputs.problem, backward=backward, lse="lse" in outputs)
    return _contract(kernel, config, inputs.problem, device, backward=backward)


def _adapted(
    kernel: Adapted,
    places: Sequence[tuple[str, str]],
    config: Config,
    inputs: Inputs,
    device: Device,
    *,
    backward: bool,
    alone: bool,
) -> Call:
    """Call a user's own function."""
    imports, names = [], []
    if needs_interpreter(kernel, device) and alone:
        imports += ["import os", "", 'os.environ["TRITON_INTERPRET"] = "1"  # Triton on the CPU, before it is imported', ""]
    elif needs_interpreter(kernel, device):
        imports += ["from attnfuzz.kernels.triton import runtime", "", 'runtime.load("cpu")  # Triton\'s interpreter, corrected']
    for number, (module, path) in enumerate(places):
        first, dot, rest = path.partition(".")
        alias = first if first not in _OWN and first not in names else ("attention_function", "backward_function")[number]
        imports.append(f"from {module} import {first}{'' if alias == first else f' as {alias}'}")
        names.append(f"{alias}{dot}{rest}")
    call, tensors = kernel.call, ("cu_seqlens_q", "cu_seqlens_k")
    given = {name: name if name in tensors else repr(value) for name, value in call.keywords(inputs, config).items()}
    arguments = ["q", "k", "v", *(f"{name}={text}" for name, text in given.items())]
    graph = backward and call.own_backward is None
    lines = ["q, k, v = (x.requires_grad_() for x in (q, k, v))"] if graph else []
    if call.gives_lse:
        lines += wrapped(f"o, lse, *_ = {names[0]}(", arguments, ")")
    else:
        lines += wrapped(f"o = {names[0]}(", arguments, ")")
        lines += ["o = o[0] if isinstance(o, (tuple, list)) else o"] if call.signature.option("return_lse") else []
    if graph:
        lines.append("dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)")
    elif backward:
        flag = call.signature.option("return_lse")
        kept = [f"{name}={text}" for name, text in given.items() if name != flag]
        lse = "lse" if call.gives_lse else "None"
        lines += wrapped(f"dq, dk, dv = {names[1]}(", ["do", "q", "k", "v", "o", lse, *kept], ")")
    return Call(tuple(imports), tuple(lines))


def _named(kernel: Kernel) -> bool:
    """Whether the registry finds the kernel by its name alone, in any process."""
    name = kernel.name
    target = None if registry.is_local(name) or registry.origin(name) else registry.target(name)
    return not registry.is_local(name) and registry.origin(name) is None and (target is None or target.startswith("attnfuzz."))


def _kernel(kernel: Kernel) -> tuple[list[str], str]:
    """Return the lines that import a kernel, and its expression."""
    if _named(kernel):
        return [], literal(kernel.name)
    return [each for each in kernel_lines(kernel).splitlines() if each], "KERNEL"


def _config(config: Config) -> str:
    return f"Config({{{', '.join(f'{literal(name)}: {literal(value)}' for name, value in config.items())}}})"


def _public(kernel: Kernel, config: Config, problem: Problem, *, backward: bool, lse: bool) -> Call:
    """Call the public function for a dense or a ragged batch."""
    function = "attention" if problem.packing == "dense" else "attention_varlen"
    own, value = _kernel(kernel)
    imports = [f"from attnfuzz.kernels import {'Config, ' if config else ''}{function}", *own]
    arguments = ["q", "k", "v", *(("cu_seqlens_q", "cu_seqlens_k") if problem.packing == "ragged" else ())]
    arguments.append(f"kernel={value}")
    arguments += [] if problem.causal is None else [f"causal={literal(problem.causal)}"]
    arguments += [] if problem.softmax_scale is None else [f"softmax_scale={problem.softmax_scale!r}"]
    arguments += [f"config={_config(config)}"] if config else []
    arguments += ["return_lse=True"] if lse else []
    lines = ["q, k, v = (x.requires_grad_() for x in (q, k, v))"] if backward else []
    lines += wrapped(f"{'o, lse' if lse else 'o'} = {function}(", arguments, ")")
    lines += ["dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)"] if backward else []
    return Call(tuple(imports), tuple(lines))


def _contract(kernel: Kernel, config: Config, problem: Problem, device: Device, *, backward: bool) -> Call:
    """Call the kernel by its contract, which takes every Problem."""
    own, value = _kernel(kernel)
    fields = {each.name: getattr(problem, each.name) for each in msgspec.structs.fields(problem) if _differs(problem, each)}
    parts = [name for name, kind in (("Layout", Layout), ("Needs", Needs)) if any(isinstance(x, kind) for x in fields.values())]
    names = ["Config", "Inputs", *parts, "Problem", *(["get"] if not own else [])]
    imports = [f"from attnfuzz.kernels import {', '.join(names)}", *own]
    longest = (max(problem.seqlens_q), max(problem.seqlens_k))
    starts = ["cu_seqlens_q", "cu_seqlens_k"]
    if problem.packing == "dense":
        starts = [f"torch.arange({problem.batch + 1}, dtype=torch.int32{where(device)}) * {n}" for n in longest]
    arguments = [
        "problem=problem", "q=q", "k=k", "v=v", f"d_o={'do' if backward else 'torch.zeros(())'}", f"cu_seqlens_q={starts[0]}",
        f"cu_seqlens_k={starts[1]}", f"max_seqlen_q={longest[0]}", f"max_seqlen_k={longest[1]}",
    ]  # fmt: skip
    built = f"{f'get({value})' if not own else value}.build(problem, {_config(config)}, {literal(device)})"
    lines = [
        *wrapped("problem = Problem(", [f"{name}={literal(x)}" for name, x in fields.items()], ")"),
        *wrapped("inputs = Inputs(", arguments, ")"),
        f"built = {built}",
        "o, lse = built.forward(inputs)",
        *(["dq, dk, dv, *_ = built.backward(inputs, o, lse)"] if backward else []),
    ]
    return Call(tuple(imports), tuple(lines))


def _differs(problem: Problem, field: Any) -> bool:
    return field.default is msgspec.NODEFAULT or getattr(problem, field.name) != field.default
