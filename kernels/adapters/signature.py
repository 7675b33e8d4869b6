"""Signature of a function: which of flash-attention's parameters it has, their names, and its source file."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnfuzz.kernels.adapters.reached import innermost
from attnfuzz.kernels.errors import reject

__all__ = ["Signature", "read", "source_files"]

_NAMES = {
    "softmax_scale": ("softmax_scale", "scale", "sm_scale"),
    "causal": ("causal", "is_causal"),
    "window_size": ("window_size",),
    "softcap": ("softcap",),
    "sinks": ("sinks", "sink", "s_aux", "learnable_sink"),
    "page_table": ("page_table", "block_table", "block_tables"),
    "seqlens_k": ("seqlens_k", "cache_seqlens", "seqused_k"),
    "return_lse": ("return_lse", "return_softmax_lse", "return_attn_probs"),
}
"""Each option's names in the libraries that have it; the first is flash-attention's."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Names of a function's keyword parameters after q, k and v."""

    name: str
    parameters: tuple[str, ...]
    required: tuple[str, ...]
    """Parameters without a default."""
    never_passed: tuple[str, ...] = ()
    """Parameters that the adapters do not know: they keep their defaults, unless a Config names them."""

    def option(self, name: str) -> str | None:
        """The function's own name for the option `name`; None where it has no such option."""
        return next((each for each in _NAMES[name] if each in self.parameters), None)


def read(function: Callable[..., Any], needed: Sequence[str], optional: Sequence[str] = ()) -> Signature:
    """Read the signature of `function(q, k, v, ...)`, which must have the parameters `needed`, and may have `optional` ones.

    Raises:
        BadArgument: it cannot be read, takes fewer than three tensors, lacks one of `needed`, or requires a parameter that the
            adapters never pass.
    """
    if not callable(function):
        raise reject("function", function, "it cannot be called", "give the function itself")
    name = _name(function)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise reject(
            "function", name, f"its signature cannot be read ({error})", "wrap it in a def with named parameters"
        ) from None
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 3:
        raise reject(
            "function",
            f"{name}{inspect.signature(function)}",
            "q, k and v come first, one after the other",
            "wrap it in such a def",
        )
    rest = [each for each in parameters if each not in positional[:3]]
    named = tuple(each.name for each in rest if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))
    if missing := [each for each in needed if each not in named]:
        raise reject("function", name, f"it has no parameter {missing[0]}", "wrap it in a def that has, or use adapters.dense")
    passed = {*needed, *optional, *(alias for aliases in _NAMES.values() for alias in aliases)}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for each in rest:
        if each.default is each.empty and each.kind not in variadic and each.name not in passed:
            raise reject("function", name, f"its parameter {each.name} has no default", "bind it with functools.partial")
    required = tuple(each.name for each in rest if each.name in named and each.default is each.empty)
    return Signature(name, named, required, tuple(each for each in named if each not in passed))


def source_files(function: Callable[..., Any]) -> list[str]:
    """The source file of `function` beneath partials and decorators, or of its class; empty where it is unknown."""
    inner = innermost(function)
    try:
        file = inspect.getsourcefile(inner)
    except TypeError:
        return []
    return [str(Path(file).absolute())] if file and Path(file).is_file() else []


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
