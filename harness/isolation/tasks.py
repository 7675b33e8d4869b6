"""Child processes' tasks. Each takes a payload of JSON values and a function to announce its stage; returns (result, replace)."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from attnfuzz.harness.core import environment
from attnfuzz.harness.isolation.kernel_ref import unpacked
from attnfuzz.harness.trial.errors import describe_exception, mark_as_child
from attnfuzz.kernels.contract import Config, Device, Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support import process_setup
from attnfuzz.strategies.case import case_from_json

__all__ = ["compile_variant", "kernel_of", "map_case", "preloads", "trial", "trials", "warm"]

_NICE = 10
"""Priority of compiles that Trials need not wait for: a ninth of the processor time of a Trial, where both want a core."""
_Done = tuple[Any, bool]
_Enter = Callable[..., None]


def preloads(device: Device, backends: Collection[str]) -> list[str]:
    """Return what a process imports before it is forked for kernels of `backends`. None of it may open a CUDA context."""
    targets = [f"{__name__}:load_torch_for_{device}"]
    if "triton" in backends:
        targets.append(f"{__name__}:load_triton_for_{device}")
    if "tilelang" in backends:
        # After Triton's mode is settled: TileLang imports Triton.
        targets.append("tilelang")
    return targets


def load_torch_for_cpu() -> None:
    """Import everything that a Trial needs except a backend."""
    environment.prepare("cpu")
    _load_torch()


def load_torch_for_cuda() -> None:
    """Import everything that a Trial needs except a backend."""
    _load_torch()


def _load_torch() -> None:
    bands = importlib.import_module("attnfuzz.harness.trial.bands")
    poison = importlib.import_module("attnfuzz.harness.trial.poison")
    torch = importlib.import_module("torch")
    importlib.import_module("attnfuzz.harness.trial.trial")
    # The first tensor in such a mode imports more. A backward pass here would open the CUDA driver.
    with torch.no_grad(), poison.PoisonEmpty(bands.Bands()):
        torch.empty(1)


def load_triton_for_cpu() -> None:
    """Load Triton, interpreted."""
    importlib.import_module("attnfuzz.kernels.triton.runtime").load("cpu")


def load_triton_for_cuda() -> None:
    """Load Triton, compiled."""
    runtime = importlib.import_module("attnfuzz.kernels.triton.runtime")
    runtime.load("cuda")
    runtime.hash_own_files()


def warm(payload: dict[str, Any], enter: _Enter) -> _Done:  # noqa: ARG001 - every task's signature
    """Prepare this process for its first Trial; the result describes the device and the versions.

    `payload`: device; optionally kernel, for which the process is set up, and case, whose compiled code is loaded.
    """
    device = payload["device"]
    if "kernel" in payload:
        # Before the first tensor on the device.
        kernel_of(payload)
    environment.prepare(device)
    when_free = importlib.import_module("attnfuzz.harness.trial.gpu_memory").when_free
    when_free(lambda: importlib.import_module("attnfuzz.harness.trial.trial").rehearse(device), device)
    if "case" in payload:
        case = case_from_json(payload["case"])
        build = importlib.import_module("attnfuzz.harness.trial.build")
        when_free(lambda: build.build_kernel(kernel_of(payload), case.problem, case.config, device), device)
    # Each full collection would go through all that was imported: 0.2 seconds.
    gc.freeze()
    return environment.describe(device), False


def trial(payload: dict[str, Any], enter: _Enter) -> _Done:
    """Run one Trial. `payload`: kernel (as shipped), case (canonical JSON), device, memory_check. The result is a Verdict."""
    from attnfuzz.harness.judge.verdict import Verdict
    from attnfuzz.harness.trial.errors import DeviceLost
    from attnfuzz.harness.trial.gpu_memory import is_out_of_memory, trim, when_free
    from attnfuzz.harness.trial.sequence import run_earlier
    from attnfuzz.harness.trial.trial import run_trial
    from attnfuzz.kernels.support import memory

    kernel_of(payload)
    memory.check(payload["memory_check"])
    case, device = case_from_json(payload["case"]), payload["device"]
    try:
        run_earlier(case, device, enter)
        verdict = when_free(lambda: run_trial(case, device, enter), device)
        trim(device)
    except Exception as error:
        if is_out_of_memory(error):
            raise MemoryError(describe_exception(error)) from error
        raise
    except DeviceLost as lost:
        versions = environment.versions()
        verdict = Verdict(status="fail", failures=(lost.failure,), device=payload["device_name"], versions=versions)
        return msgspec.to_builtins(verdict), True
    return msgspec.to_builtins(verdict), any(each.kind == "out-of-memory" for each in verdict.failures)


def trials(payload: dict[str, Any], enter: _Enter) -> _Done:
    """Run the Trials of a batch. `payload` as of `trial`, with `cases` in place of `case`. The result is a list of Verdicts.

    `known` of the payload, which may be missing: failures as those of `run_batch`.
    What breaks the device or fills the memory ends the whole batch: its Cases have to run again, fewer at once.
    """
    from attnfuzz.harness.judge.failure import Identity
    from attnfuzz.harness.trial.batch import run_batch
    from attnfuzz.harness.trial.gpu_memory import trim
    from attnfuzz.kernels.support import memory

    kernel_of(payload)
    memory.check(payload["memory_check"])
    cases = [case_from_json(each) for each in payload["cases"]]
    known = msgspec.convert(payload["known"], list[Identity]) if "known" in payload else None
    verdicts = run_batch(cases, payload["device"], enter, lambda number: enter("inputs", number), known)
    trim(payload["device"])
    return [msgspec.to_builtins(each) for each in verdicts], False


def compile_variant(payload: dict[str, Any], enter: _Enter) -> _Done:
    """Compile one variant into the backend's cache. `payload`: kernel (as shipped), problem, config, device, later.

    `later`: it is not the kernel's first, and yields to Trials; so do the compiles that follow in this process. None do where the
    kernel sets its processes up: what that changed would change other kernels' code.
    """
    from attnfuzz.harness.trial.build import compile_here

    if payload["later"] and os.getpriority(os.PRIO_PROCESS, 0) < _NICE:
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)

    kernel = kernel_of(payload)
    problem = msgspec.convert(payload["problem"], Problem)
    enter("compile")
    seconds, error = compile_here(kernel, problem, Config(payload["config"]), payload["device"])
    return {"seconds": seconds, "error": error}, process_setup.setup_of(kernel) is not None


def kernel_of(payload: dict[str, Any]) -> Kernel:
    """Register the kernel that a payload ships in this child, set the process up for it, and return it.

    Raises:
        BadArgument: it cannot be imported here.
    """
    mark_as_child()
    environment.prepare(payload["device"])
    try:
        kernel = unpacked(payload["kernel"])
    except BadArgument:
        raise
    except BaseException as error:  # a third party's module: its error is the reason
        name = payload["kernel"]["name"]
        raise BadArgument(f"kernel={name!r}: a child process cannot import it: {describe_exception(error)}") from error
    process_setup.enter(kernel, payload["device"])
    return kernel


def map_case(payload: dict[str, Any], enter: _Enter) -> _Done:
    """Make error maps of one Case, with the payload of a Trial: {"maps": ErrorMaps} or {"reason": text}."""
    from attnfuzz.harness.trial.errormaps import error_maps
    from attnfuzz.harness.trial.sequence import run_earlier
    from attnfuzz.kernels.support import memory

    kernel_of(payload)
    memory.check(payload["memory_check"])
    case = case_from_json(payload["case"])
    run_earlier(case, payload["device"], enter)
    maps = error_maps(case, payload["device"], enter)
    return ({"reason": maps} if isinstance(maps, str) else {"maps": msgspec.to_builtins(maps)}), False
