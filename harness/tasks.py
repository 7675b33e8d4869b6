"""What a child is asked to do. Each takes a payload of JSON values and a way to say its stage; returns (result, replace me)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import msgspec

from attnfuzz.harness import environment
from attnfuzz.harness.shipping import unpacked
from attnfuzz.kernels.contract import Config, Kernel
from attnfuzz.kernels.problem import BadArgument, Problem
from attnfuzz.strategies.case import case_from_json

__all__ = ["BACKENDS", "compile_variant", "load_tilelang", "load_torch", "load_triton", "trial", "warm"]

_Done = tuple[Any, bool]
_Enter = Callable[[str], None]

BACKENDS = {"triton": "attnfuzz.harness.tasks:load_triton", "tilelang": "attnfuzz.harness.tasks:load_tilelang"}
"""What a process on the CPU imports for a backend's kernels."""


def load_torch() -> None:
    """Everything that a Trial on the CPU needs but a backend."""
    importlib.import_module("attnfuzz.harness.trial").rehearse("cpu")


def load_triton() -> None:
    """Triton, interpreted."""
    importlib.import_module("attnfuzz.kernels.triton.runtime").load("cpu")


def load_tilelang() -> None:
    """TileLang, whose own import of Triton needs the right mode."""
    importlib.import_module("tilelang")


def warm(payload: dict[str, Any], enter: _Enter) -> _Done:  # noqa: ARG001 - every task's signature
    """Make this process ready for its first Trial; the result says what it runs on. `payload`: device."""
    device = payload["device"]
    importlib.import_module("attnfuzz.harness.trial").rehearse(device)
    return environment.describe(device), False


def trial(payload: dict[str, Any], enter: _Enter) -> _Done:
    """One Trial. `payload`: kernel (as shipped), case (canonical JSON), device. The result is a Verdict."""
    from attnfuzz.harness.lost import DeviceLost
    from attnfuzz.harness.trial import run_trial
    from attnfuzz.harness.verdict import Verdict

    _kernel(payload)
    case, device = case_from_json(payload["case"]), payload["device"]
    try:
        verdict = run_trial(case, device, enter)
    except DeviceLost as lost:
        versions = environment.versions()
        verdict = Verdict(status="fail", failures=(lost.failure,), device=payload["device_name"], versions=versions)
        return msgspec.to_builtins(verdict), True
    return msgspec.to_builtins(verdict), any(each.kind == "out-of-memory" for each in verdict.failures)


def compile_variant(payload: dict[str, Any], enter: _Enter) -> _Done:
    """One compile, left in the backend's cache. `payload`: kernel (as shipped), problem, config, device."""
    from attnfuzz.harness.builds import compile_here

    kernel = _kernel(payload)
    problem = msgspec.convert(payload["problem"], Problem)
    enter("compile")
    seconds, error = compile_here(kernel, problem, Config(payload["config"]), payload["device"])
    return {"seconds": seconds, "error": error}, False


def _kernel(payload: dict[str, Any]) -> Kernel:
    environment.prepare(payload["device"])
    try:
        return unpacked(payload["kernel"])
    except BadArgument:
        raise
    except Exception as error:  # somebody else's module: its error is the reason
        name = payload["kernel"]["name"]
        raise BadArgument(f"kernel={name!r}: a child process cannot import it: {type(error).__name__}: {error}") from error
