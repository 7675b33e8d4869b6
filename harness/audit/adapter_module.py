"""A function of a file as a kernel: whether it has gradients, what more of it works, and the module that keeps it as one."""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnfuzz.harness.audit.conformance.check import hints, probe_result
from attnfuzz.harness.audit.conformance.features import Feature, plain_case
from attnfuzz.harness.core.signals import ending
from attnfuzz.harness.isolation.outcomes import ExecutionError
from attnfuzz.kernels import registry
from attnfuzz.kernels.adapters.like import adapt, keywords_of
from attnfuzz.kernels.contract import Capabilities, Device, Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.support.file_module import importable_name
from attnfuzz.kernels.support.file_target import FileTarget, Like, file_target, read_like

__all__ = ["AdapterModule", "adapter_module", "with_own_gradients"]

SECONDS = 20.0
"""For features that are not declared, each of which takes a launch or two."""
_WIDTH = 120
_REST = "further features"
_NOT_PASSED = ("packings", "dtypes_on", "outputs", "compiles_on")
"""Fields of Capabilities that a widened feature may change, and an adapter sets by itself."""


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """The lines of an adapter's module, the fields of it that one trial each suggests, and the other features.

    `failed`: those that were wrong or raised where they were tried once; `untried`: those that were not.
    """

    text: str
    suggestions: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


def with_own_gradients(target: str, device: Device, *, in_process: bool = False) -> tuple[str, bool]:
    """Find out whether a function's O has a graph of torch's autograd.

    The plainest Case is run forward, in a child process. A target that says itself what it has of gradients is left as it is,
    and so is one whose function fails, which a campaign reports.

    Returns:
        The target, with `gradients=False` where O has no graph, and whether that was added.

    Raises:
        BadArgument: there is no such kernel.
    """
    file = file_target(target)
    if file is None or file.like is None:
        return target, False
    like = read_like(file.like)
    if like.adapter == "paged" or {"gradients", "backward", "outputs"} & like.keywords.keys():
        return target, False
    kernel: Kernel = registry.find(target)
    if kernel.unavailable(device) is not None:
        return target, False
    case, refusal = plain_case(kernel, device)
    if refusal is not None:
        return target, False
    parcel = {"name": kernel.name, "target": target, "folder": str(Path.cwd())}
    if probe_result("graph", kernel, parcel, case, device, in_process=in_process) is not False:
        return target, False
    forward = replace(file, like=Like(like.adapter, {**like.keywords, "gradients": False}).text)
    return forward.text, True


def adapter_module(
    target: str, kernel: Kernel, device: Device, seconds: float = SECONDS, *, in_process: bool = False
) -> AdapterModule:
    """Write the module that makes the kernel at `target`, a function of a file, permanent.

    Args:
        target: as the kernel was asked for.
        kernel: what the adapter made of it.
        device: where features that are not declared are tried.
        seconds: for all of them; 0: none is tried.
        in_process: try them in this process.

    Ctrl-C, or an error of a child process's own, ends the trials: the rest counts as not tried.
    """
    file = file_target(target)
    if file is None or file.like is None:
        raise ValueError(f"{target} is not a function of a file")
    file = file.seen_from(str(Path.cwd()))
    keywords, untried, failed = keywords_of(file), [], []
    suggestions: dict[str, Any] = {}

    def may_be_declared(feature: Feature) -> bool:
        more = _more(kernel.capabilities, suggestions, feature.widened)
        return bool(more) and _accepts(file, {**keywords, **suggestions, **more})

    try:
        with closing(hints(kernel, device, seconds, may_be_declared, in_process=in_process)) as features:
            for feature, works in features:
                if works is None:
                    untried.append(feature.spelled)
                elif works:
                    suggestions |= _more(kernel.capabilities, suggestions, feature.widened)
                else:
                    failed.append(feature.spelled)
    except (KeyboardInterrupt, ExecutionError):
        # A campaign's result is at hand, and is not to be lost for what may be declared beside.
        ending()
        untried.append(_REST)
    return AdapterModule(
        _text(file, target, keywords, suggestions),
        tuple(_arguments(suggestions)),
        tuple(dict.fromkeys(untried)),
        tuple(dict.fromkeys(failed)),
    )


def _more(can: Capabilities, suggestions: dict[str, Any], widened: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a feature that works, joined with those of the others."""
    more: dict[str, Any] = {}
    for name, value in widened.items():
        if name in _NOT_PASSED or value == getattr(can, name):
            continue
        before = suggestions.get(name)
        more[name] = tuple(dict.fromkeys((*before, *value))) if isinstance(before, tuple) and isinstance(value, tuple) else value
    return more


def _accepts(file: FileTarget, keywords: dict[str, Any]) -> bool:
    """Return whether the adapter takes the keywords."""
    function = registry.object_at(replace(file, like=None).text)
    try:
        adapt(function, replace(file, like=Like(read_like(file.like or "dense").adapter, keywords).text))
    except BadArgument:
        return False
    return True


def _arguments(keywords: dict[str, Any]) -> Iterator[str]:
    for name, value in keywords.items():
        yield f"{name}={_literal(value)}"


def _literal(value: Any) -> str:
    """Return a value as Python code, with double quotes where that is simple."""
    text = repr(value)
    return text if '"' in text or "\\" in text else text.replace("'", '"')


def _text(file: FileTarget, target: str, keywords: dict[str, Any], suggestions: dict[str, Any]) -> str:
    like = read_like(file.like or "dense")
    keywords = {name: value for name, value in keywords.items() if name not in suggestions}
    module, folder = importable_name(Path(file.file))
    first, dot, rest = file.path.partition(".")
    if module is None or any(keyword.iskeyword(part) for part in (*module.split("."), *file.path.split("."))):
        whole = replace(file_target(target) or file, like=Like(like.adapter, {**like.keywords, **suggestions}).text)
        note = "no module can import a file of that name"
        return f"from attnfuzz.kernels import get\n\nKERNEL = get({_literal(whole.text)})  # {note}"
    # The adapter's own name, or that of the kernel, would hide the function.
    alias = "function" if first in (like.adapter, "KERNEL") else first
    import_of = first if alias == first else f"{first} as {alias}"
    lines = [f"from attnfuzz.kernels import {like.adapter}", f"from {module} import {import_of}  # in {folder}", ""]
    plain = f"KERNEL = {like.adapter}({alias}{dot}{rest}, {', '.join(_arguments(keywords))}"
    if not suggestions:
        return "\n".join([*lines, f"{plain})"])
    more = ", ".join(_arguments(suggestions))
    if len(plain) + len(more) + 3 <= _WIDTH:
        return "\n".join([*lines, f"{plain}, {more})"])
    return "\n".join([*lines, f"{plain},", f"    {more})"])
