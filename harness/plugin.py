"""The pytest plugin: options, one GPU per xdist worker, and differential tests of kernels, sharded over workers.

A kernel team gates its kernel with a test file of five lines:

    from attnfuzz.harness.plugin import fuzz
    from mypackage.attention import KERNEL

    test_kernel = fuzz(KERNEL)
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attnfuzz.harness.executors import Executor
    from attnfuzz.harness.settings import Settings
    from attnfuzz.kernels.contract import Kernel

__all__ = ["fuzz"]

_SHARDS = 2
_EXECUTORS: pytest.StashKey[dict[str, Executor]] = pytest.StashKey()
_PER_GPU = 4
"""Workers that share a GPU: small cases leave it idle most of the time, and every worker takes about a GiB of it."""


def _gpus() -> list[str]:
    """The GPUs that this process may use, asked of the driver's tool so that torch is not imported before the choice is made."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [each for each in chosen.split(",") if each.strip() not in ("", "-1")]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(index) for index, _ in enumerate(line for line in listed.splitlines() if line.startswith("GPU "))]


def _pin_worker(worker: str | None) -> None:
    """Give xdist worker "gwN" GPU number N mod the number of GPUs; must run before torch is imported."""
    if worker is None or not worker.startswith("gw"):
        return
    gpus = _gpus()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker[2:]) % len(gpus)]


_pin_worker(os.environ.get("PYTEST_XDIST_WORKER"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """The CLI's options, as --attnfuzz-..."""
    group = parser.getgroup("attnfuzz", "fuzz testing of attention kernels")
    group.addoption("--attnfuzz-kernel", action="append", default=[], metavar="NAME", help="only these kernels (may be repeated)")
    group.addoption("--attnfuzz-device", default="auto", metavar="auto|cpu|cuda", help="where kernels run")
    group.addoption("--attnfuzz-profile", default="quick", metavar="quick|gate|nightly", help="how large Cases may be")
    group.addoption("--attnfuzz-budget", default=None, metavar="60s", help="time for trials of each kernel, over all its shards")
    group.addoption(
        "--attnfuzz-max-examples", default=None, type=int, metavar="N", help="Cases of each kernel, over all its shards"
    )
    group.addoption("--attnfuzz-case", default=None, metavar="FILE", help="run just this case file, in its kernel's tests")
    group.addoption("--attnfuzz-seed", default=0, type=int, metavar="N", help="same seed, same Cases")
    group.addoption(
        "--attnfuzz-deadline", default=None, metavar="60s", help="time that a stage of a trial may take before it hangs"
    )
    group.addoption(
        "--attnfuzz-in-process", action="store_true", help="no child processes, for a debugger: a crash ends the tests"
    )
    group.addoption(
        "--attnfuzz-no-memory-check", action="store_true", help="do not check every access to memory of interpreted kernels"
    )
    group.addoption("--attnfuzz-out", default=".attnfuzz", metavar="DIR", help="folder of case files")


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto` on a GPU node: a few workers per GPU, not one per core. None (xdist's own choice) without a GPU."""
    if config.getoption("--attnfuzz-device") == "cpu":
        return None
    gpus = len(_gpus())
    return gpus * max(1, min(_PER_GPU, len(os.sched_getaffinity(0)) // gpus)) if gpus else None


def pytest_configure(config: pytest.Config) -> None:
    """Refuse wrong options before anything runs."""
    from attnfuzz.kernels.problem import BadArgument

    try:
        _check_options(config)
    except BadArgument as error:
        raise pytest.UsageError(str(error)) from None


def _check_options(config: pytest.Config) -> None:
    from attnfuzz.harness import settings as options
    from attnfuzz.kernels.problem import reject

    budget, most, device, deadline = (
        config.getoption(f"--attnfuzz-{name}") for name in ("budget", "max-examples", "device", "deadline")
    )
    options.Settings(
        profile=options.profile(config.getoption("--attnfuzz-profile")).name,
        budget=None if budget is None else options.duration(budget),
        max_examples=most,
        seed=config.getoption("--attnfuzz-seed"),
        deadline=None if deadline is None else options.duration(deadline, "deadline"),
    )
    if device not in ("auto", "cpu", "cuda"):
        raise reject("device", device, "no such device", "use auto, cpu or cuda")
    if device == "cuda":
        from attnfuzz.harness.environment import resolve_device

        resolve_device(device)


def pytest_report_header(config: pytest.Config) -> str | None:
    """The options that differ from their defaults."""
    defaults: dict[str, Any] = {
        "kernel": [],
        "device": "auto",
        "profile": "quick",
        "budget": None,
        "max-examples": None,
        "seed": 0,
        "out": ".attnfuzz",
        "deadline": None,
        "in-process": False,
        "no-memory-check": False,
    }
    values = {name: config.getoption(f"--attnfuzz-{name}") for name in defaults}
    changed = " ".join(f"{name}={value}" for name, value in values.items() if value != defaults[name])
    return f"attnfuzz: {changed}" if changed else None


def fuzz(kernel: Kernel | str, *, max_examples: int = 60, shards: int = _SHARDS) -> Callable[..., None]:
    """A test function that fuzzes `kernel` (an object, or the name of an installed one).

    Args:
        kernel: anything that fulfils `attnfuzz.kernels.contract.Kernel`.
        max_examples: distinct Cases over all shards, unless --attnfuzz-budget or --attnfuzz-max-examples say otherwise.
        shards: how many tests it becomes, so that xdist's workers share the work.

    Returns:
        A function to assign to a name that starts with `test_`.
    """

    for name, value in (("max_examples", max_examples), ("shards", shards)):
        if value < 1:
            raise ValueError(f"{name}={value!r}: nothing would be tried; give 1 or more")

    if not isinstance(kernel, str):
        from attnfuzz.kernels import registry

        registry.register(kernel)

    @pytest.mark.parametrize("shard", range(shards))
    def test(shard: int, request: pytest.FixtureRequest) -> None:
        _run_shard(kernel, shard, shards, max_examples, request)

    return test


def _run_shard(kernel: Kernel | str, shard: int, shards: int, most: int, request: pytest.FixtureRequest) -> None:
    from attnfuzz.harness.campaign import campaign
    from attnfuzz.kernels import registry
    from attnfuzz.kernels.problem import BadArgument

    config = request.config
    subject = registry.get(kernel) if isinstance(kernel, str) else kernel
    only = [registry.get(name).name for name in config.getoption("--attnfuzz-kernel")]
    if only and subject.name not in only:
        pytest.skip(f"--attnfuzz-kernel names {', '.join(only)}")
    settings = _settings(config, shard, shards, most)
    if settings.device not in subject.capabilities.devices:
        pytest.skip(f"{subject.name} declares no {settings.device}")
    if reason := subject.unavailable(settings.device):
        pytest.skip(f"{subject.name} cannot run on {settings.device} here: {reason}")
    if case := config.getoption("--attnfuzz-case"):
        _run_case(subject, case, shard, settings)
        return
    try:
        finished = campaign([subject], settings, lambda _: None, _executor(config, subject, settings))
    except BadArgument as error:
        pytest.fail(str(error), pytrace=False)
    if finished.interrupted:
        raise KeyboardInterrupt
    if finished.found or finished.lost:
        again = (
            f"pytest {shlex.quote(request.node.nodeid.rsplit('[', 1)[0])} --attnfuzz-case"
            if registry.is_local(subject.name)
            else None
        )
        pytest.fail(_message(finished, again), pytrace=False)
    if finished.not_kept:
        pytest.fail(
            f"cases could not be kept on disk: {finished.not_kept}; make room, or choose another --attnfuzz-out", pytrace=False
        )


def _executor(config: pytest.Config, kernel: Kernel, settings: Settings) -> Executor:
    """One for all tests of this process that run on the same device: children are not started anew for each."""
    from attnfuzz.harness.campaign import executor_for

    known = config.stash.setdefault(_EXECUTORS, {})
    if settings.device not in known:
        known[settings.device] = executor_for([kernel], settings)
    return known[settings.device]


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the child processes."""
    for executor in config.stash.get(_EXECUTORS, {}).values():
        executor.close()


def _run_case(kernel: Kernel, path: str, shard: int, settings: Settings) -> None:
    """One case file again, in the first shard of its kernel's test."""
    from attnfuzz.harness.corpus import read_case
    from attnfuzz.harness.report.describe import describe_case, describe_verdict
    from attnfuzz.harness.reproduce import reproduce

    stored = read_case(path)
    case = stored.case
    if case.kernel != kernel.name or shard:
        pytest.skip(f"--attnfuzz-case is one of {case.kernel}, run in its first shard")
    done = reproduce(
        case,
        settings.device,
        rate=stored.rate,
        in_process=settings.in_process,
        deadline=settings.deadline,
        memory_check=settings.memory_check,
    )
    if done.verdict.failures:
        told = [f"   {name:<20} {value}" for name, value in describe_case(case)]
        pytest.fail("\n".join([f"FAILED {path}", *told, *describe_verdict(done.verdict)]), pytrace=False)


def _settings(config: pytest.Config, shard: int, shards: int, most: int) -> Settings:
    from attnfuzz.harness import settings as options
    from attnfuzz.harness.environment import resolve_device

    budget, asked = config.getoption("--attnfuzz-budget"), config.getoption("--attnfuzz-max-examples")
    deadline = config.getoption("--attnfuzz-deadline")
    most = -(-(most if asked is None else asked) // shards)
    return options.Settings(
        device=resolve_device(config.getoption("--attnfuzz-device")),
        profile=options.profile(config.getoption("--attnfuzz-profile")).name,
        budget=None if budget is None else options.duration(budget),
        max_examples=None if budget is not None and asked is None else most,
        seed=config.getoption("--attnfuzz-seed"),
        shard=shard,
        shards=shards,
        out=config.getoption("--attnfuzz-out"),
        in_process=config.getoption("--attnfuzz-in-process"),
        memory_check=not config.getoption("--attnfuzz-no-memory-check"),
        deadline=None if deadline is None else options.duration(deadline, "deadline"),
    )


def _message(finished: Any, again: str | None) -> str:
    """Each failure: identity, minimal Case, what was seen, and the line that runs it again."""
    from io import StringIO

    from rich.console import Console

    from attnfuzz.harness.report.terminal import show_found

    text = StringIO()
    console = Console(file=text, width=160)
    for number, found in enumerate(finished.found, 1):
        show_found(console, number, found, again)
    return text.getvalue().strip() or str(finished.lost)
