"""Modifiers' trees as Triton source: files named by their content, whose functions a kernel takes as constants.

    score_mod(score, b, h, q_idx, kv_idx, sizes, tensors)                          the changed score times log2(e), fp32
    score_gradient(d_score, score, b, h, q_idx, kv_idx, sizes, tensors)            d_score times d score_mod / d score, natural
    mask_mod(b, h, q_idx, kv_idx, sizes, tensors)                                  whether the key is seen
    captured_gradients(d_score, score, b, h, q_idx, kv_idx, inside, sizes, tensors, gradients)
                                                                                   adds d_score times d score_mod / d load

`score`, `d_score` and `inside` are tiles, `q_idx` and `kv_idx` the int32 indices along their two axes, in range in every lane;
`sizes` is (batch, heads, kv_heads, seqlen_q, seqlen_k) as run-time numbers, so that no length is compiled in; `tensors` are the
captured ones, contiguous, in the order of `modified.tensors_of`; `gradients` are float32, one for each tensor that takes one.
`captured_gradients` needs queries along axis 0 and keys along axis 1: it sums a tile's shares of an element before it adds them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from attnfuzz.kernels.expressions.derivative import by_load, by_score
from attnfuzz.kernels.expressions.folding import folded
from attnfuzz.kernels.expressions.tree import Captured, Expression, const, number
from attnfuzz.kernels.support import cache

__all__ = ["load_source", "source", "taking_gradients"]

_LOG2_E = 1.4426950408889634
_SIZES = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k")
_LEAVES = ("score", "b", "h", "q_idx", "kv_idx")
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "le": "<=", "lt": "<", "ge": ">=", "gt": ">", "eq": "==", "ne": "!=", "and": "&",
    "or": "|", "mod": "%", "div": "//",
}  # fmt: skip
_TURNED = {"le": "ge", "ge": "le", "lt": "gt", "gt": "lt", "eq": "eq", "ne": "ne"}
_CALLS = {"exp": "tl.exp", "abs": "tl.abs", "min": "tl.minimum", "max": "tl.maximum", "where": "tl.where"}
_HEAD = "import triton\nimport triton.language as tl\n"
_PLACE = "b, h, q_idx, kv_idx"


def taking_gradients(tensors: tuple[Captured, ...]) -> tuple[Captured, ...]:
    """The tensors whose gradients a backward computes, in their order."""
    return tuple(each for each in tensors if each.gradient)


def source(score: Expression | None, mask: Expression | None, tensors: tuple[Captured, ...]) -> str:
    """Print a module with the functions of `score` and `mask`, without those whose tree is None.

    It has `captured_gradients` where a tensor of `tensors` takes a gradient.
    """
    parts = [_HEAD]
    if score is not None:
        parts += [_score_mod(score, tensors), _score_gradient(score, tensors)]
        if taking_gradients(tensors):
            parts.append(_captured_gradients(score, tensors))
    if mask is not None:
        parts.append(_mask_mod(mask, tensors))
    return "\n\n".join(parts)


def load_source(text: str) -> ModuleType:
    """Load `text` as a module, from a file named by its content, where Triton reads its functions' source."""
    name = f"attnfuzz_modifiers_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    path = cache.folder("triton") / f"{name}.py"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


def _score_mod(tree: Expression, tensors: tuple[Captured, ...]) -> str:
    # The softmax is in base 2: its factor is folded into a constant factor of the tree.
    body = _Body(tensors)
    tree = folded(tree * _LOG2_E)
    result = body.name_of(tree)
    # Checked after folding, which may have dropped the score.
    if not tree.scored:
        result = body.assigned(f"tl.where((q_idx >= 0) & (kv_idx >= 0), {result}, 0.0)")
    return body.function(f"score_mod(score, {_PLACE}, sizes, tensors)", f"return {result}")


def _score_gradient(tree: Expression, tensors: tuple[Captured, ...]) -> str:
    body = _Body(tensors)
    result = body.product("d_score", folded(by_score(tree)))
    return body.function(f"score_gradient(d_score, score, {_PLACE}, sizes, tensors)", f"return {result}")


def _mask_mod(tree: Expression, tensors: tuple[Captured, ...]) -> str:
    body = _Body(tensors)
    tree = folded(tree)
    everywhere = number(tree)
    # A constant has no shape, so the indices, which are never negative, provide it.
    result = body.name_of(tree) if everywhere is None else f"(q_idx {'>=' if everywhere else '<'} 0) & (kv_idx >= 0)"
    return body.function(f"mask_mod({_PLACE}, sizes, tensors)", f"return {result}")


def _captured_gradients(tree: Expression, tensors: tuple[Captured, ...]) -> str:
    body = _Body(tensors)
    slots = {each: slot for slot, each in enumerate(taking_gradients(tensors))}
    for load in tree.walk():
        if load.op != "load" or load.value not in slots:
            continue
        assert isinstance(load.value, Captured)
        term = body.product("d_score", folded(by_load(tree, load)))
        # After folding, which may have dropped an index from the address.
        place = folded(load)
        target = f"gradients[{slots[load.value]}] + {body.index(place)}"
        reads = {each.op for each in place.walk()}
        # The score is a tile, and so is an address computed from it.
        along = [axis for axis, leaf in ((1, "kv_idx"), (0, "q_idx")) if not reads & {leaf, "score"}]
        if not along:
            body.lines.append(f'tl.atomic_add({target}, {term}, mask=inside, sem="relaxed")')
            continue
        total = f"tl.where(inside, {term}, 0.0)"
        for axis in along:
            # Without both axes the element's address has no shape either.
            total = f"tl.sum({total}, {axis}{'' if len(along) == 2 else ', keep_dims=True'})"
        body.lines.append(f'tl.atomic_add({target}, {total}, sem="relaxed")')
    return body.function(
        f"captured_gradients(d_score, score, {_PLACE}, inside, sizes, tensors, gradients)", "" if body.lines else "pass"
    )


@dataclass
class _Body:
    """Statements of one function: one per node, each node once."""

    tensors: tuple[Captured, ...]
    lines: list[str] = field(default_factory=list)
    names: dict[Expression, str] = field(default_factory=dict)

    def function(self, signature: str, last: str) -> str:
        statements = [*self.lines, *([last] if last else [])]
        return "@triton.jit\n" + f"def {signature}:\n" + "".join(f"    {line}\n" for line in statements)

    def assigned(self, text: str) -> str:
        name = f"t{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def name_of(self, tree: Expression) -> str:
        """The name or literal of `tree` in a statement."""
        if tree not in self.names:
            self.names[tree] = self._name(tree)
        return self.names[tree]

    def product(self, name: str, factor: Expression) -> str:
        """`name`, a tile, times `factor`."""
        value = number(factor)
        if value == 1.0:
            return name
        if value == 0.0:
            return self.assigned(f"tl.where(q_idx < 0, {name}, 0.0)")
        return self.assigned(f"{name} * {self.name_of(factor)}")

    def index(self, load: Expression) -> str:
        """The element that `load` reads, as a sum that begins with the outermost dimension; int64 for several dimensions.

        The sum is added to an address from left to right, so that terms common to all lanes are added once.
        """
        assert isinstance(load.value, Captured)
        if len(load.args) == 1:
            return self.name_of(load.args[0])
        flat: str | int = ""
        for place, (arg, size) in enumerate(zip(load.args, load.value.sizes, strict=True)):
            value = number(arg)
            now: str | int = int(value) if value is not None else self.name_of(arg)
            flat = now if place == 0 else _plus(_times(flat, self._size(size)), now)
        return str(flat)

    def _size(self, size: int | str) -> str | int:
        if isinstance(size, int):
            return size
        # Without queries or keys there is no tile that reads.
        return "(sizes[3] + sizes[4] - 1)" if size == "offsets" else f"sizes[{_SIZES.index(size)}]"

    def _name(self, x: Expression) -> str:
        value = number(x)
        if value is not None:
            return f"({value!r})" if not isinstance(value, bool) and value < 0 else repr(value)
        if x.op in _LEAVES:
            return x.op
        if x.op in _SIZES:
            return f"sizes[{_SIZES.index(x.op)}]"
        return self.assigned(self._text(x))

    def _text(self, x: Expression) -> str:
        if x.op == "load":
            assert isinstance(x.value, Captured)
            return f"tl.load(tensors[{self.tensors.index(x.value)}] + {self.index(x)})"
        if x.op == "sigmoid":
            return f"1.0 / (1.0 + {self._power(x.args[0], -_LOG2_E)})"
        if x.op == "tanh":
            # Beyond the range of exp this is 1 or -1; near 0 its error is some 2^-24, absolute, not relative.
            return f"2.0 / (1.0 + {self._power(x.args[0], -2 * _LOG2_E)}) - 1.0"
        a = [self.name_of(each) for each in x.args]
        if x.op in _TURNED and number(x.args[0]) is not None:
            return f"{a[1]} {_INFIX[_TURNED[x.op]]} {a[0]}"
        if x.op in _INFIX:
            return f"{a[0]} {_INFIX[x.op]} {a[1]}"
        if x.op in _CALLS:
            return f"{_CALLS[x.op]}({', '.join(a)})"
        match x.op:
            case "neg":
                return f"-{a[0]}"
            case "not":
                return f"~{a[0]}"
            case "float":
                return f"{a[0]}.to(tl.float32)"
        raise AssertionError(x.op)

    def _power(self, x: Expression, factor: float) -> str:
        """2 to the power of `factor` times `x`."""
        return f"tl.math.exp2({self.name_of(folded(x * const(factor)))})"


def _times(flat: str | int, size: str | int) -> Any:
    if isinstance(flat, int) and isinstance(size, int):
        return flat * size
    # A literal has no type to widen.
    wide, other = (size, flat) if isinstance(flat, int) else (flat, size)
    return f"({wide}).to(tl.int64) * {other}"


def _plus(flat: str | int, now: str | int) -> Any:
    return flat + now if isinstance(flat, int) and isinstance(now, int) else f"{flat} + {now}"
