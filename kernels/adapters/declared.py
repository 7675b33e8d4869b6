"""What the caller of an adapter gives, options and capabilities: types and smallest values, and what a pool of shapes shows."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import msgspec

from attnfuzz.kernels.contract import Capabilities
from attnfuzz.kernels.errors import reject

__all__ = ["check_options", "checked", "of_shapes"]

_LEAST = dict.fromkeys(
    ("multiple_q", "multiple_k", "batch_max", "heads_max", "length_max", "min_seqlen_k", "dim_multiple", "window_multiple"), 1
)
_LAYOUTS = ("bshd", "bhsd", "thd")


def check_options(
    *,
    name: object,
    backend: object,
    configs: object,
    files: object,
    layout: object,
    lse: object,
    backward: object,
    **flags: object,
) -> None:
    """Check the forms of an adapter's options; `flags` are True or False.

    Raises:
        BadArgument: one has another form than the adapter documents.
    """
    for option, text, remedy in (
        ("name", name, "give a dotted one, such as mine.flash"),
        ("backend", backend, 'leave it out, or give "triton" or "torch"'),
    ):
        if text is not None and not isinstance(text, str):
            raise reject(option, text, "it is no text", remedy)
    if layout not in _LAYOUTS:
        raise reject("layout", layout, "q has no such order", "use 'bshd' or 'bhsd'")
    if not (isinstance(lse, bool) or lse == "auto"):
        remedy = "say True where LSE always comes second in the result, False where it never does"
        raise reject("lse", lse, "it is neither True, False nor 'auto'", remedy)
    if backward is not None and not callable(backward):
        raise reject("backward", backward, "it cannot be called", "give a function of dO, q, k, v, o and LSE")
    for option, flag in flags.items():
        if not isinstance(flag, bool):
            raise reject(option, flag, "it is neither True nor False", "give one of them")
    if not isinstance(configs, Sequence):
        raise reject("configs", configs, "it is no sequence", "give a tuple of dicts, the default first: ({}, {'tile_m': 128})")
    if isinstance(files, str) or not (isinstance(files, Sequence) and all(isinstance(each, str | os.PathLike) for each in files)):
        raise reject("files", files, "it is no sequence of paths", "give a tuple of them: ('device.py',)")


def checked(declared: dict[str, Any]) -> dict[str, Any]:
    """Return the declared fields with lists as tuples.

    Raises:
        BadArgument: Capabilities have no such field, or a value is of another type or below the smallest one.
    """
    fields = _types()
    if unknown := sorted(declared.keys() - fields.keys()):
        raise reject("capabilities", unknown[0], "Capabilities have no such field", f"use one of {', '.join(fields)}")
    _check_pairs(declared)
    return {name: _converted(name, value, fields[name]) for name, value in declared.items()}


def of_shapes(shapes: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """Return the capabilities that a pool of shapes shows.

    Raises:
        BadArgument: a number is below 1, or kv_heads does not divide heads.
    """
    if not shapes:
        return {}
    for shape in shapes:
        if min(shape) < 1 or shape[1] % shape[2]:
            raise reject("shapes", shape, "each number is 1 or more, and kv_heads divides heads", "correct it")
    return {
        "groups": tuple(sorted({heads // kv_heads for _, heads, kv_heads, _, _ in shapes})),
        "unequal": any(n_q != n_k for *_, n_q, n_k in shapes),
    }


@functools.cache
def _types() -> dict[str, Any]:
    """Return the type of each field; cached, since msgspec evaluates the annotations at every call."""
    return {field.name: field.type for field in msgspec.structs.fields(Capabilities)}


def _check_pairs(declared: dict[str, Any]) -> None:
    """Check the fields whose form is most often mistaken, with a remedy for each."""
    for name, size, reason, remedy in (
        ("dims", 2, "each is a pair (dim_qk, dim_v)", "give pairs: ((64, 64), (128, 128))"),
        (
            *("shapes", 5, "each is five integers"),
            "give tuples (batch, heads, kv_heads, seqlen_q, seqlen_k), the smallest first",
        ),
    ):
        values = declared.get(name, ())
        if not (isinstance(values, tuple | list) and all(_integers(each, size) for each in values)):
            raise reject(name, values, reason, remedy)


def _integers(value: object, count: int) -> bool:
    return isinstance(value, tuple | list) and len(value) == count and all(type(n) is int for n in value)


def _converted(name: str, value: Any, kind: Any) -> Any:
    try:
        value = msgspec.convert(msgspec.to_builtins(value), kind)
    except (msgspec.ValidationError, TypeError) as error:
        reason = str(error)
        remedy = f"give what Capabilities.{name} is declared as"
        raise reject(name, value, reason[:1].lower() + reason[1:], remedy) from None
    if name in _LEAST and value is not None and value < _LEAST[name]:
        raise reject(name, value, f"it is {_LEAST[name]} or more", "correct it, or leave it out")
    return value
