"""Triton's interpreter, corrected for bfloat16 and fast enough for fuzzing. Tested with Triton 3.6 and 3.9.

As shipped it keeps a bfloat16 as its 16 bits in a `uint16`, computes with those integers, and truncates in conversions to
bfloat16. Here every bfloat16 operation goes through float32 and rounds to nearest, ties to even.

As shipped it also patches the language again for every launch and every nested call. Here that happens once. Shortcuts past
Triton's type checker are in `shortcuts`, the checks of memory accesses in `memory`.
"""

from __future__ import annotations

import builtins
import functools
import inspect
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

from attnfuzz.kernels.support.absent import Absent

try:
    import numpy as np
    import triton.language as tl
    import triton.runtime.interpreter as shipped
except ImportError:
    np = tl = shipped = Absent("triton")  # type: ignore[assignment]


from attnfuzz.kernels.support.memory import MemoryFault
from attnfuzz.kernels.triton.interpreter import memory, shortcuts

__all__ = ["bfloat16_to_float32", "float32_to_bfloat16", "install"]

Array = np.ndarray[Any, np.dtype[Any]]

_Handle: Any = shipped.TensorHandle
_Builder: Any = shipped.InterpreterBuilder
_installed = False


def install() -> None:
    """Repair the interpreter of this process; calls after the first do nothing.

    The language stays in its interpreted form from now on: a process that interprets never compiles.
    """
    global _installed
    if _installed:
        return
    _installed = True
    _install_bfloat16()
    _install_min_max()
    _install_language()
    _install_launch()
    shortcuts.install()
    memory.install()


def bfloat16_to_float32(bits: Array) -> Array:
    """The float32 values of bfloat16 `bits` (uint16): exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: Array) -> Array:
    """The bfloat16 bits (uint16) nearest to float32 `values`, ties to even; every NaN becomes 0x7fc0."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _is_bfloat16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def _widened(handle: Any) -> Any:
    """A bfloat16 handle as float32; any other handle unchanged."""
    return _Handle(bfloat16_to_float32(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _narrowed(values: Array) -> Any:
    """The handle of a bfloat16 operation's float32 result; a comparison's result stays boolean."""
    if values.dtype == np.bool_:
        return _Handle(values, tl.int1)
    return _Handle(float32_to_bfloat16(values), tl.bfloat16)


def _install_bfloat16() -> None:
    """Correct the builder's bfloat16 casts, arithmetic, dot products and sums. Loads and stores move bits and need no change."""
    shipped_cast = _Builder.cast_impl
    shipped_fp_to_fp = _Builder.create_fp_to_fp
    shipped_binary = _Builder.binary_op
    shipped_unary = _Builder.unary_op
    shipped_fma = _Builder.create_fma
    shipped_dot = _Builder.create_dot
    shipped_sum = shipped.ReduceOps.sum

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == target.scalar:
            return source
        if target.scalar == tl.bfloat16:
            return _Handle(float32_to_bfloat16(source.data), tl.bfloat16)
        return shipped_cast(self, _widened(source), target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if tl.bfloat16 in (source.dtype.scalar, target.scalar):
            return cast_impl(self, source, target)
        return shipped_fp_to_fp(self, source, target, rounding)

    def binary_op(self: Any, left: Any, right: Any, op: Callable[..., Array]) -> Any:
        if _is_bfloat16(left) and _is_bfloat16(right):
            return _narrowed(op(bfloat16_to_float32(left.data), bfloat16_to_float32(right.data)))
        return shipped_binary(self, left, right, op)

    def unary_op(self: Any, operand: Any, op: Callable[..., Array]) -> Any:
        if _is_bfloat16(operand):
            return _narrowed(op(bfloat16_to_float32(operand.data)))
        return shipped_unary(self, operand, op)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if _is_bfloat16(z):
            # Exact products and one float64 sum, rounded to float32 and then to bfloat16: nearly always one rounding.
            wide = [bfloat16_to_float32(operand.data).astype(np.float64) for operand in (x, y, z)]
            return _narrowed((wide[0] * wide[1] + wide[2]).astype(np.float32))
        return shipped_fma(self, x, y, z)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return shipped_dot(self, _dot_operand(a), _dot_operand(b), d, *options)

    def reduce_sum(self: Any, operand: Any) -> Any:
        if _is_bfloat16(operand.handle):
            total = np.sum(bfloat16_to_float32(operand.handle.data), axis=self.axis, keepdims=self.keep_dims)
            return self.to_tensor(float32_to_bfloat16(total), tl.bfloat16)
        return shipped_sum(self, operand)

    _Builder.cast_impl = cast_impl
    _Builder.create_fp_to_fp = create_fp_to_fp
    _Builder.binary_op = binary_op
    _Builder.unary_op = unary_op
    _Builder.create_fma = create_fma
    _Builder.create_dot = create_dot
    shipped.ReduceOps.sum = reduce_sum


def _dot_operand(handle: Any) -> Any:
    """A half-precision operand as float32: exact, and NumPy's float32 product is fast."""
    if handle.dtype.scalar == tl.float16:
        return _Handle(handle.data.astype(np.float32), tl.float32)
    return _widened(handle)


def _install_min_max() -> None:
    """Drop NaN in min and max reductions, as the language specifies, without NumPy's warning where all are NaN."""
    shipped_min_max = shipped.ReduceOps.min_max
    quiet = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}

    def min_max(self: Any, operand: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        return shipped_min_max(self, operand, quiet.get(val_reduce_op, val_reduce_op), idx_reduce_op)

    shipped.ReduceOps.min_max = min_max


def _install_language() -> None:
    """Put the language into its interpreted form permanently, and make nested calls plain calls."""
    shipped._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    # Triton 3.6 converts an array of one element here, which NumPy 2.4 refuses.
    tl.tensor.__index__ = lambda self: int(self.handle.data.reshape(-1)[0])
    shipped._patch_lang = lambda _function: shipped._LangPatchScope()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    shipped.InterpretedFunction.__call__ = call
    # Only debug builds report an overflow; the check costs several operations for each addition.
    shipped.interpreter_builder.options = shipped.InterpreterOptions(sanitize_overflow=False)


def _of_blocks(builtin: Callable[..., Any], elementwise: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return `builtin`, min or max, as the language has it: of blocks it is taken element by element.

    Python's own compares the blocks as a whole, and returns one of them.
    """

    @functools.wraps(builtin)
    def pick(*args: Any, **named: Any) -> Any:
        if len(args) > 1 and any(isinstance(each, tl.tensor) and each.type.is_block() for each in args):
            return functools.reduce(elementwise, args)
        return builtin(*args, **named)

    return pick


def _install_launch() -> None:
    """Launch over CPU tensors in place, without copies of their storage, and inspect each signature once."""
    shipped_launch = shipped.GridExecutor.__call__
    signatures: dict[Any, inspect.Signature] = {}
    of_blocks = _of_blocks(min, tl.minimum), _of_blocks(max, tl.maximum)

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if hasattr(value, "data_ptr")]
        if any(tensor.device.type != "cpu" for tensor in tensors) or self.pre_run_hooks:
            shipped_launch(self, *args, **kwargs)
            return
        signature = signatures.get(self.fn)
        if signature is None:
            signature = signatures[self.fn] = inspect.signature(self.fn)
        # Compile options such as num_warps mean nothing here.
        bound = signature.bind(*args, **{name: value for name, value in kwargs.items() if name in signature.parameters})
        bound.apply_defaults()
        arguments = {
            name: value if name in self.constexprs else shipped._implicit_cvt(value) for name, value in bound.arguments.items()
        }
        grid = self.grid(arguments) if callable(self.grid) else self.grid
        builder = shipped.interpreter_builder
        sizes = (*grid, 1, 1)[:3]
        builder.set_grid_dim(*sizes)
        before = builtins.min, builtins.max
        builtins.min, builtins.max = of_blocks
        try:
            # GPUs have no floating-point warnings.
            with np.errstate(all="ignore"):
                for indices in product(*(range(size) for size in sizes)):
                    builder.set_grid_idx(*indices)
                    self.fn(**arguments)
        except MemoryFault:
            raise
        except Exception as error:
            raise shipped.InterpreterError(repr(error)) from error
        finally:
            builtins.min, builtins.max = before

    shipped.GridExecutor.__call__ = launch
