"""A function in a file as a kernel: by an adapter that is named, with what else that name says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from attnfuzz.kernels.adapters import Adapted, dense, paged, varlen
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.support.file_target import AdapterName, FileTarget, read_like

__all__ = ["adapt", "keywords_of", "likely"]

_ADAPTERS: Mapping[AdapterName, Callable[..., Adapted]] = {"dense": dense, "varlen": varlen, "paged": paged}
_DEVICES = ("cpu", "cuda")
_PAGE_SIZES = (16,)


def adapt(function: Any, target: FileTarget) -> Adapted:
    """Return the kernel that the adapter `target.like` makes of `function`.

    It is called "STEM.FUNCTION", declared for CPU and CUDA, and is else the plainest that the signature shows.

    Raises:
        BadArgument: it is no function of that signature, or the keywords do not fit.
    """
    place = replace(target, like=None).text
    if type(function).__module__.partition(".")[0] == "triton":
        reason = "it is a Triton function, which is launched on a grid"
        raise reject("kernel", place, reason, "name the Python function that launches it")
    if inspect.isclass(function) or not callable(function):
        kind = "a class" if inspect.isclass(function) else f"of type {type(function).__name__}, which cannot be called"
        raise reject("kernel", place, f"{target.path} is {kind}", "name a function of q, k and v")
    adapter, keywords = _ADAPTERS[read_like(target.like or "dense").adapter], keywords_of(target)
    try:
        return adapter(function, **keywords)
    except BadArgument as error:
        own = read_like(target.like or "dense").adapter
        other = likely(function)
        remedy = f"; did you mean --like {other}?" if other not in (None, own) else ""
        raise BadArgument(f"kernel={place!r}: --like {target.like} does not fit: {error}{remedy}") from None
    except (TypeError, ValueError, AttributeError) as error:
        remedy = "see attnfuzz.kernels.dense, varlen and paged"
        raise reject("like", target.like, f"{type(error).__name__}: {error}", remedy) from None


def keywords_of(target: FileTarget) -> dict[str, Any]:
    """Return the keywords with which `adapt` calls the adapter."""
    like = read_like(target.like or "dense")
    pages = {"page_sizes": _PAGE_SIZES} if like.adapter == "paged" else {}
    return {"name": target.name, "devices": _DEVICES, **pages, **like.keywords}


def likely(function: Any) -> AdapterName | None:
    """Return the adapter whose signature `function` has; None where it has none of them."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if len(parameters) < 3:
        return None
    if {"page_table", "block_table", "block_tables"} & set(parameters):
        return "paged"
    return "varlen" if "cu_seqlens_q" in parameters else "dense"
