"""Text of a short script: tensors in plain torch, the call, a float64 reference, and the comparison.

Data is written by repr only, and names only where they are identifiers.
"""

from __future__ import annotations

import base64
import keyword
import math
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any

import msgspec
import torch

from attnfuzz.harness.isolation.kernel_ref import global_of
from attnfuzz.harness.repro.script.script import kernel_lines
from attnfuzz.kernels import registry
from attnfuzz.kernels.adapters import Adapted
from attnfuzz.kernels.contract import Config, Device, Inputs, Kernel
from attnfuzz.kernels.problem import LAYOUTS, Layout, Needs, OutputName, Problem

__all__ = ["GRADIENTS", "LINES", "Values", "body", "once_of", "turned"]

LINES, _WIDTH = 40, 120
_FEW = 16
"""Values of a tensor that are written as numbers; more are packed."""
GRADIENTS: tuple[OutputName, ...] = ("dq", "dk", "dv")
_GOT = {"o": "o", "lse": "lse", "dq": "dq", "dk": "dk", "dv": "dv"}
_RIGHT = {"o": "expected", "lse": "expected_lse", "dq": "gradients[0]", "dk": "gradients[1]", "dv": "gradients[2]"}
_TITLES = {"o": "O", "lse": "LSE", "dq": "dQ", "dk": "dK", "dv": "dV"}
_OWN = {
    "Config", "Inputs", "KERNEL", "Layout", "Needs", "Problem", "a", "allowed", "attention", "attention_varlen", "b",
    "base64", "built", "c", "cu_seqlens_k", "cu_seqlens_q", "d", "data", "dk", "do", "dq", "dv", "error", "exact",
    "exit", "expected", "expected_lse", "expected_of", "failed", "float", "get", "got", "gradients", "inputs",
    "isinstance", "k", "list", "lse", "map", "mask", "name", "o", "pairwise", "parts", "print", "problem", "q",
    "right", "runtime", "scaled_dot_product_attention", "scores", "slice", "sys", "torch", "tuple", "v", "values",
    "weights", "wrong", "x", "zip", "zlib",
}  # fmt: skip
"""Names of the script itself, which an imported function may not replace."""


@dataclass(frozen=True, slots=True)
class Values:
    """The tensors of a script: its lines that make them, by name, and the same tensors as the kernel gets them.

    `random`: from `torch.randn`; `filled`: memory from `torch.empty` is NaN while the script runs.
    """

    inputs: Inputs
    random: bool
    filled: bool
    scales: Mapping[str, float]
    """Factors on random tensors, by name."""


@dataclass(frozen=True, slots=True)
class _Call:
    """The call: what it imports, and its lines, which define o, lse and dq, dk, dv as far as they are needed."""

    imports: tuple[str, ...]
    lines: tuple[str, ...]


def turned(kernel: Kernel, x: torch.Tensor) -> torch.Tensor:
    """`x` in the layout of the function that the script calls: an adapter may swap heads and tokens."""
    if not (isinstance(kernel, Adapted) and _functions(kernel) and kernel.call.layout == "bhsd"):
        return x
    swapped = x.transpose(1, 2)
    return swapped if kernel.capabilities.layouts else swapped.contiguous()


def body(kernel: Kernel, config: Config, values: Values, limits: Mapping[OutputName, float], device: Device) -> str:
    """Return the script without its head.

    Args:
        kernel: what is called.
        config: its choices.
        values: the tensors.
        limits: the outputs that are compared, with the largest error that a right kernel has.
        device: where it runs.

    Raises:
        BadArgument: the kernel cannot be imported by a script.
    """
    problem = values.inputs.problem
    swapped = isinstance(kernel, Adapted) and _functions(kernel) and kernel.call.layout == "bhsd"
    explicit = bool(problem.softcap) or "lse" in limits
    tensors, packed = _tensors(kernel, values, limits, device)
    call = _call(kernel, config, values.inputs, limits, device)
    standard = ["import sys"]
    if packed:
        standard = ["import base64", "import sys", "import zlib"]
    if problem.packing == "ragged":
        standard.append("from itertools import pairwise")
    third = ["import torch"]
    if not explicit:
        third.append("from torch.nn.functional import scaled_dot_product_attention")
    return "\n\n".join(
        "\n".join(part)
        for part in (
            standard,
            third,
            (*call.imports, *(_FILLED if values.filled else ())),
            (*tensors, *call.lines),
            () if _inline(problem, explicit=explicit) else ("", *_reference(problem, explicit=explicit, device=device), ""),
            _applied(kernel, problem, limits, device, swapped=swapped),
            _comparison(problem, limits),
        )
        if part
    )


_FILLED = ("", "torch.use_deterministic_algorithms(True, warn_only=True)  # memory from torch.empty is NaN")


# --- tensors


def _tensors(kernel: Kernel, values: Values, limits: Mapping[OutputName, float], device: Device) -> tuple[list[str], bool]:
    """Return the lines that make the tensors, and whether they hold packed values."""
    inputs, problem = values.inputs, values.inputs.problem
    wanted = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **({"do": inputs.d_o} if set(GRADIENTS) & {*limits} else {})}
    lines: list[str] = ["torch.manual_seed(0)"] if values.random else []
    pack = _Pack()
    made = []
    for name, x in wanted.items():
        rows = problem.total_q if name in ("q", "do") else problem.total_k
        slack = (problem.slack_q if name in ("q", "do") else problem.slack_k) and problem.packing == "ragged"
        x = turned(kernel, x)
        once = once_of(x)
        factor = values.scales.get(name, 1.0)
        if values.random and not (name == "do" and problem.layout_do.expanded):
            times = "" if factor == 1 else f"{factor!r} * "
            text = f"{times}torch.randn({_sizes(once.shape)}, dtype={x.dtype})"
        else:
            text = pack.text(once[:rows] if slack else once, once.shape)
        made += _placed(name, x, once, text, device)
        if slack:
            made.append(f"{name}[{rows}:] = torch.nan  # rows of no sequence")
    lines += pack.lines(inputs.q.dtype) + made
    if problem.packing == "ragged":
        for name, lengths in (("cu_seqlens_q", problem.seqlens_q), ("cu_seqlens_k", problem.seqlens_k)):
            ends = [0, *accumulate(lengths)]
            lines += _wrapped(f"{name} = torch.tensor(", [repr(ends), f"dtype=torch.int32{_where(device)}"], ")")
    return lines, bool(pack.content)


def _where(device: Device) -> str:
    return ', device="cuda"' if device == "cuda" else ""


def _sizes(shape: Iterable[int]) -> str:
    return ", ".join(map(str, shape))


def once_of(x: torch.Tensor) -> torch.Tensor:
    """`x` without the copies that stride 0 shows."""
    for axis, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size > 1 and stride == 0:
            x = x.narrow(axis, 0, 1)
    return x


def _placed(name: str, x: torch.Tensor, once: torch.Tensor, text: str, device: Device) -> list[str]:
    """Return the lines that put values into memory with the strides of `x`."""
    if x.is_contiguous() and (x.storage_offset() == 0 or not x.numel()):
        return [f"{name} = {text}{'.cuda()' if device == 'cuda' else ''}"]
    count = x.storage_offset() + 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    place = f"as_strided({tuple(once.shape)}, {once.stride()}, {x.storage_offset()})"
    more = "" if once.shape == x.shape else f".expand({_sizes(x.shape)})"
    lines = [f"{name} = torch.full(({count},), torch.nan, dtype={x.dtype}{_where(device)}).{place}"]
    copy = f"{name} = {name}.copy_({text}){more}" if more else f"{name}.copy_({text})"
    return [*lines, copy]


class _Pack:
    """Exact values: few as numbers, equal ones as one, all others in one packed text."""

    def __init__(self) -> None:
        self.content = b""
        self._width = 0

    def text(self, x: torch.Tensor, shape: torch.Size) -> str:
        """Return an expression of shape `shape`; `x` may lack its last rows."""
        full = torch.zeros(shape, dtype=x.dtype)
        full[: x.shape[0]] = x.detach().cpu()
        flat = full.flatten()
        if not flat.numel():
            return f"torch.zeros({_sizes(shape)}, dtype={x.dtype})"
        if bool((flat == flat[0]).all()) and not bool((flat == 0).all() and flat.signbit().any()):
            return f"torch.full(({_sizes(shape)}{',' if len(shape) == 1 else ''}), {flat[0].item()!r}, dtype={x.dtype})"
        if flat.numel() <= _FEW:
            return f"torch.tensor({flat.tolist()!r}, dtype={x.dtype}).reshape({_sizes(shape)})"
        self._width = flat.element_size()
        begin = len(self.content) // self._width
        self.content += bytes(flat.contiguous().view(torch.uint8).tolist())
        return f"values[{begin}:{begin + flat.numel()}].reshape({_sizes(shape)})"

    def lines(self, dtype: torch.dtype) -> list[str]:
        """Return the lines that unpack."""
        if not self.content:
            return []
        text = base64.b64encode(zlib.compress(self.content, 9)).decode()
        return [
            f"data = {_literal(text)}",
            f"values = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(data))), dtype={dtype})",
        ]


# --- the call


def _functions(kernel: Adapted) -> tuple[tuple[str, str], ...] | None:
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


def _plain_call(kernel: Kernel, problem: Problem) -> bool:
    """Whether `attnfuzz.kernels.attention` or `attention_varlen` makes the same call."""
    plain = problem.window is None and not problem.softcap
    contiguous = all(getattr(problem, name) == Layout() for name in LAYOUTS)
    return plain and (contiguous or bool(getattr(kernel, "any_strides", False)))


def _call(kernel: Kernel, config: Config, inputs: Inputs, limits: Mapping[OutputName, float], device: Device) -> _Call:
    backward = bool({*GRADIENTS} & {*limits})
    if isinstance(kernel, Adapted) and (places := _functions(kernel)):
        return _adapted(kernel, places, config, inputs, device, backward=backward)
    if _plain_call(kernel, inputs.problem):
        return _public(kernel, config, inputs.problem, backward=backward, lse="lse" in limits)
    return _contract(kernel, config, inputs.problem, device, backward=backward)


def _adapted(
    kernel: Adapted, places: Sequence[tuple[str, str]], config: Config, inputs: Inputs, device: Device, *, backward: bool
) -> _Call:
    """Call a user's own function."""
    imports, names = [], []
    if kernel.backend == "triton" and device == "cpu":
        imports += ["from attnfuzz.kernels.triton import runtime", "", 'runtime.load("cpu")  # Triton\'s interpreter, mended']
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
        lines += _wrapped(f"o, lse, *_ = {names[0]}(", arguments, ")")
    else:
        lines += _wrapped(f"o = {names[0]}(", arguments, ")")
        lines += ["o = o[0] if isinstance(o, (tuple, list)) else o"] if call.signature.option("return_lse") else []
    if graph:
        lines.append("dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)")
    elif backward:
        flag = call.signature.option("return_lse")
        kept = [f"{name}={text}" for name, text in given.items() if name != flag]
        lse = "lse" if call.gives_lse else "None"
        lines += _wrapped(f"dq, dk, dv = {names[1]}(", ["do", "q", "k", "v", "o", lse, *kept], ")")
    return _Call(tuple(imports), ("", *lines))


def _named(kernel: Kernel) -> bool:
    """Whether the registry finds the kernel by its name alone, in any process."""
    name = kernel.name
    target = None if registry.is_local(name) or registry.origin(name) else registry.target(name)
    return not registry.is_local(name) and registry.origin(name) is None and (target is None or target.startswith("attnfuzz."))


def _kernel(kernel: Kernel) -> tuple[list[str], str]:
    """Return the lines that import a kernel, and its expression."""
    if _named(kernel):
        return [], _literal(kernel.name)
    return [each for each in kernel_lines(kernel).splitlines() if each], "KERNEL"


def _config(config: Config) -> str:
    return f"Config({{{', '.join(f'{_literal(name)}: {_literal(value)}' for name, value in config.items())}}})"


def _literal(value: object) -> str:
    """Return the repr of a value, in double quotes where that changes nothing else."""
    plain = isinstance(value, str) and value.isascii() and value.isprintable() and not {*value} & {'"', "'", "\\"}
    return f'"{value}"' if plain else repr(value)


def _public(kernel: Kernel, config: Config, problem: Problem, *, backward: bool, lse: bool) -> _Call:
    """Call the public function for a dense or a ragged batch."""
    function = "attention" if problem.packing == "dense" else "attention_varlen"
    own, value = _kernel(kernel)
    imports = [f"from attnfuzz.kernels import {'Config, ' if config else ''}{function}", *own]
    arguments = ["q", "k", "v", *(("cu_seqlens_q", "cu_seqlens_k") if problem.packing == "ragged" else ())]
    arguments.append(f"kernel={value}")
    arguments += [] if problem.causal is None else [f"causal={_literal(problem.causal)}"]
    arguments += [] if problem.softmax_scale is None else [f"softmax_scale={problem.softmax_scale!r}"]
    arguments += [f"config={_config(config)}"] if config else []
    arguments += ["return_lse=True"] if lse else []
    lines = ["q, k, v = (x.requires_grad_() for x in (q, k, v))"] if backward else []
    lines += _wrapped(f"{'o, lse' if lse else 'o'} = {function}(", arguments, ")")
    lines += ["dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)"] if backward else []
    return _Call(tuple(imports), ("", *lines))


def _contract(kernel: Kernel, config: Config, problem: Problem, device: Device, *, backward: bool) -> _Call:
    """Call the kernel by its contract, which takes every Problem."""
    own, value = _kernel(kernel)
    fields = {each.name: getattr(problem, each.name) for each in msgspec.structs.fields(problem) if _differs(problem, each)}
    parts = [name for name, kind in (("Layout", Layout), ("Needs", Needs)) if any(isinstance(x, kind) for x in fields.values())]
    names = ["Config", "Inputs", *parts, "Problem", *(["get"] if not own else [])]
    imports = [f"from attnfuzz.kernels import {', '.join(names)}", *own]
    longest = (max(problem.seqlens_q), max(problem.seqlens_k))
    starts = ["cu_seqlens_q", "cu_seqlens_k"]
    if problem.packing == "dense":
        starts = [f"torch.arange({problem.batch + 1}, dtype=torch.int32{_where(device)}) * {n}" for n in longest]
    arguments = [
        "problem=problem", "q=q", "k=k", "v=v", f"d_o={'do' if backward else 'torch.zeros(())'}", f"cu_seqlens_q={starts[0]}",
        f"cu_seqlens_k={starts[1]}", f"max_seqlen_q={longest[0]}", f"max_seqlen_k={longest[1]}",
    ]  # fmt: skip
    built = f"{f'get({value})' if not own else value}.build(problem, {_config(config)}, {_literal(device)})"
    lines = [
        *_wrapped("problem = Problem(", [f"{name}={_literal(x)}" for name, x in fields.items()], ")"),
        *_wrapped("inputs = Inputs(", arguments, ")"),
        f"built = {built}",
        "o, lse = built.forward(inputs)",
        *(["dq, dk, dv, *_ = built.backward(inputs, o, lse)"] if backward else []),
    ]
    return _Call(tuple(imports), ("", *lines))


def _differs(problem: Problem, field: Any) -> bool:
    return field.default is msgspec.NODEFAULT or getattr(problem, field.name) != field.default


def _wrapped(begin: str, arguments: Sequence[str], end: str) -> list[str]:
    """Return a call on one line, on three, or with one argument a line."""
    if len(line := f"{begin}{', '.join(arguments)}{end}") <= _WIDTH:
        return [line]
    if len(line := f"    {', '.join(arguments)}") <= _WIDTH:
        return [begin, line, end]
    return [begin, *(f"    {each}," for each in arguments), end]


# --- the reference and the comparison


def _reference(problem: Problem, *, explicit: bool, device: Device) -> list[str]:
    """Return the function that computes one sequence or a dense batch in float64, heads first."""
    mask, lines = _mask(problem, device), []
    if mask:
        lines.append(mask)
    groups = problem.groups
    if not explicit:
        lines.append(f"return scaled_dot_product_attention({', '.join(['q', 'k', 'v', *_options(problem)])})")
    else:
        if groups > 1:
            lines.append(f"k, v = k.repeat_interleave({groups}, -3), v.repeat_interleave({groups}, -3)")
        lines.append(f"scores = {problem.scale!r} * q @ k.transpose(-1, -2)")
        if problem.softcap:
            lines.append(f"scores = {problem.softcap!r} * torch.tanh(scores / {problem.softcap!r})")
        if mask:
            lines.append("scores = scores.masked_fill(~mask, -torch.inf)")
        weights = "scores.softmax(-1)"
        if mask:
            weights = "torch.where(mask.any(-1, keepdim=True), scores.softmax(-1), 0.0)"
        lines.append(f"return {weights} @ v, scores.logsumexp(-1)")
    return ["def expected_of(q, k, v):  # float64, (..., heads, tokens, dim)", *(f"    {each}" for each in lines)]


def _options(problem: Problem) -> list[str]:
    """Keywords of `scaled_dot_product_attention`."""
    options = ["attn_mask=mask"] if _masked(problem) else []
    options += [] if problem.softmax_scale is None else [f"scale={problem.softmax_scale!r}"]
    return [*options, *(["enable_gqa=True"] if problem.groups > 1 else [])]


def _inline(problem: Problem, *, explicit: bool) -> bool:
    """Whether the reference is one call, which needs no function."""
    return problem.packing == "dense" and not explicit


def _masked(problem: Problem) -> bool:
    return problem.causal is not None or (problem.window or (None, None)) != (None, None)


def _mask(problem: Problem, device: Device, sizes: tuple[str, str] = ("q.shape[-2]", "k.shape[-2]")) -> str | None:
    """Return the line that makes the mask of `sizes` queries and keys, or None."""
    left, right = problem.window or (None, None)
    if problem.causal is not None:
        right = 0 if right is None else min(right, 0)
    if not _masked(problem):
        return None
    rows, keys = sizes
    shift = "" if problem.causal == "top_left" else f"{keys} - {rows}"

    def diagonal(side: int) -> str:
        sign = f" + {side}" if side > 0 else f" - {-side}"
        return (f"{shift}{sign}" if side else shift) if shift else str(side) if side else ""

    parts = f".tril({diagonal(right)})" if right is not None else ""
    parts += f".triu({diagonal(-left)})" if left is not None else ""
    return f"mask = torch.ones({rows}, {keys}, dtype=torch.bool{_where(device)}){parts}"


def _applied(kernel: Kernel, problem: Problem, limits: Mapping[OutputName, float], device: Device, *, swapped: bool) -> list[str]:
    """Return the lines that compute what is expected, in the layout of the kernel's outputs."""
    backward, explicit = bool({*GRADIENTS} & {*limits}), bool(problem.softcap) or "lse" in limits
    grad = ".requires_grad_()" if backward else ""
    lines = [f"exact = [x.detach().double(){grad} for x in (q, k, v)]"]
    result = "expected, expected_lse" if "lse" in limits else "expected, _" if explicit else "expected"
    if problem.packing == "ragged":
        lines += [
            "parts = []",
            "for (a, b), (c, d) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist())):",
            "    parts.append(expected_of(*(x.transpose(0, 1) for x in (exact[0][a:b], exact[1][c:d], exact[2][c:d]))))",
        ]
        joined = "(torch.cat(x, 1) for x in zip(*parts))" if explicit else "torch.cat(parts, 1).transpose(0, 1)"
        lines.append(f"{result} = {joined}")
        lines += ["expected = expected.transpose(0, 1)"] if explicit else []
    elif _inline(problem, explicit=explicit):
        if mask := _mask(problem, device, (str(problem.seqlens_q[0]), str(problem.seqlens_k[0]))):
            lines.append(mask)
        given, back = ("*exact", "") if swapped else ("*(x.transpose(1, 2) for x in exact)", ".transpose(1, 2)")
        call = f"scaled_dot_product_attention({', '.join([given, *_options(problem)])}){back}"
        lines.append(f"expected = {call}")
    elif swapped:
        lines.append(f"{result} = expected_of(*exact)")
    else:
        call = "expected_of(*(x.transpose(1, 2) for x in exact))"
        lines.append(f"{result} = {call}{'' if explicit else '.transpose(1, 2)'}")
        lines += ["expected = expected.transpose(1, 2)"] if explicit else []
    if "lse" in limits:
        if getattr(kernel.capabilities.deviations, "lse_base2", False):
            lines.append(f"expected_lse = expected_lse / {math.log(2)!r}")
        if isinstance(kernel, Adapted):
            lines.append("lse = torch.where(lse == torch.inf, -torch.inf, lse)  # rows without keys")
    if backward:
        rows = f"do[:{problem.total_q}]" if problem.slack_q else "do"
        lines.append(f"gradients = torch.autograd.grad(expected, exact, {rows}.double())")
    return lines


def _comparison(problem: Problem, limits: Mapping[OutputName, float]) -> list[str]:
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
        "failed = False",
        "for name, got, right, allowed in (",
        *(f'    ("{title}", {got}, {right}, {limit!r}),' for title, got, right, limit in rows),
        "):",
        f"    error = {form.format('got', 'right')}.abs().max().item()",
        "    wrong = not error <= allowed  # NaN is wrong",
        "    failed |= wrong",
        "    print(f\"{name}: max error {error:.3g}, at most {allowed:.3g} is expected{' WRONG' if wrong else ''}\")",
        "sys.exit(failed)",
        "",
    ]
