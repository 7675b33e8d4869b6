"""The pytest plugin: options, one GPU per xdist worker, and differential tests of kernels, sharded over workers.

A kernel team gates its kernel with a test file of three lines:

    from attnfuzz.harness import fuzz
    from mypackage.attention import KERNEL

    test_kernel = fuzz(KERNEL)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from attnfuzz.harness.core.github import shown
from attnfuzz.harness.core.text import counted, one_line
from attnfuzz.harness.plugin import cases as stored_cases
from attnfuzz.harness.plugin import statistics
from attnfuzz.harness.plugin.calls import run_calls
from attnfuzz.harness.plugin.cases import MARK
from attnfuzz.harness.plugin.gpus import pin_worker, pytest_xdist_auto_num_workers
from attnfuzz.harness.plugin.options import (
    pytest_addoption,
    pytest_cmdline_main,
    pytest_configure,
    pytest_configure_node,
    pytest_report_header,
    session_seed,
)
from attnfuzz.harness.plugin.reports import pytest_runtest_makereport
from attnfuzz.harness.plugin.run import (
    COUNT,
    begin_session,
    close_executors,
    drop_shared,
    hear_again,
    hear_no_more,
    run_shard,
    run_stored,
)

if TYPE_CHECKING:
    from attnfuzz.kernels.contract import Kernel

__all__ = [
    "default_shards",
    "fuzz",
    "fuzz_calls",
    "pytest_addoption",
    "pytest_cmdline_main",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_configure_node",
    "pytest_generate_tests",
    "pytest_report_collectionfinish",
    "pytest_report_header",
    "pytest_runtest_makereport",
    "pytest_sessionfinish",
    "pytest_sessionstart",
    "pytest_terminal_summary",
    "pytest_testnodedown",
    "pytest_unconfigure",
    "pytest_xdist_auto_num_workers",
]

_FEWEST_SHARDS, _CASES_PER_SHARD = 2, 10
"""A shard of fewer Cases would spend its time on starting a child."""

_INTERRUPTS = "attnfuzz-interrupts"
_PARTS = "_attnfuzz_parts"
"""An attribute of a test function: its Cases, its shards, and its stored Cases."""

# As soon as pytest imports this: torch is not imported yet.
pin_worker(os.environ.get("PYTEST_XDIST_WORKER"))


def fuzz(
    kernel: Kernel | str,
    *,
    max_examples: int = 60,
    shards: int | None = None,
    cases: Sequence[str] = (),
    seed: int | None = None,
) -> Callable[..., None]:
    """Return a test function that fuzzes `kernel` (an object, or the name of an installed one).

    Args:
        kernel: anything that fulfils `attnfuzz.kernels.contract.Kernel`.
        max_examples: distinct Cases over all shards, unless --attnfuzz-budget or --attnfuzz-max-examples say otherwise.
        shards: number of tests, so that xdist's workers share the work; by default one for each worker, of at least ten Cases
            each, and at least two. Each number of shards draws Cases of its own.
        cases: earlier failures, as blobs (AF1-...) or paths of case files: each is its own test, run every time.
        seed: from which the Cases are drawn, the same ones in every session, unless --attnfuzz-seed says otherwise; by default
            each session draws a new one, and prints it.

    Returns:
        A function to assign to a name that starts with `test_`.
    """

    for name, value in (("max_examples", max_examples), ("shards", shards)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value!r}: nothing would be tried; give 1 or more")
    _check_seed(seed)
    if isinstance(cases, str):
        raise ValueError(f"cases={cases!r}: one case; give a list of cases")  # noqa: TRY004 - of the same kind as the others
    _register(kernel)

    def test(shard: tuple[int, int] | str, request: pytest.FixtureRequest) -> None:
        if isinstance(shard, str):
            run_stored(kernel, shard, request)
        else:
            run_shard(kernel, *shard, max_examples, request, seed=seed)

    setattr(test, MARK, kernel if isinstance(kernel, str) else kernel.name)
    setattr(test, _PARTS, (max_examples, shards, tuple(cases)))
    return test


def fuzz_calls(
    kernel: Kernel | str, *, max_examples: int = 20, max_calls: int = 10, seed: int | None = None
) -> Callable[..., None]:
    """Return a test function that tries sequences of calls of `kernel` in one process: what one leaves must not change the next.

    Each sequence has a process of its own. A call is another one, the one before it, or one that differs from that in its values,
    lengths, scale, mask or memory layouts alone; each is judged as `fuzz` does. The first failure is shrunk, with the calls that
    it needs.

    Args:
        kernel: as for `fuzz`.
        max_examples: sequences, unless --attnfuzz-budget or --attnfuzz-max-examples say otherwise.
        max_calls: calls of a sequence, at most.
        seed: as for `fuzz`.

    Returns:
        A function to assign to a name that starts with `test_`.

    Raises:
        ValueError: a number is out of range.
    """
    for name, value, least in (("max_examples", max_examples, 1), ("max_calls", max_calls, 2)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name}={value!r}: nothing would be tried; give a whole number, {least} or more")
    _check_seed(seed)
    _register(kernel)

    def test(shard: tuple[int, int], request: pytest.FixtureRequest) -> None:  # noqa: ARG001 - as of `fuzz`
        run_calls(kernel, max_examples, max_calls, request, seed=seed)

    setattr(test, MARK, kernel if isinstance(kernel, str) else kernel.name)
    setattr(test, _PARTS, (max_examples, 1, ()))
    return test


def _check_seed(seed: int | None) -> None:
    if seed is not None and seed < 0:
        raise ValueError(f"seed={seed!r}: must not be negative; give 0 or more")


def _register(kernel: Kernel | str) -> None:
    if isinstance(kernel, str):
        return
    from attnfuzz.kernels import registry
    from attnfuzz.kernels.errors import BadArgument

    try:
        registry.register(kernel)
    except BadArgument as error:
        # pytest prints it as it is: what a kernel says of itself is foreign text.
        raise BadArgument(shown(str(error))) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each shard and each stored case of what `fuzz` returned."""
    parts = getattr(metafunc.function, _PARTS, None)
    if parts is None:
        return
    most, shards, cases = parts
    count = shards or default_shards(metafunc.config, most)
    drawn = [pytest.param((number, count), id=str(number)) for number in range(count)]
    stored = [pytest.param(each, id=f"case{number}") for number, each in enumerate(cases)]
    metafunc.parametrize("shard", drawn + stored)


def default_shards(config: pytest.Config, most: int) -> int:
    """Return the shards of a kernel of which `most` Cases are tried, the same in all of xdist's workers."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    examples = config.getoption("--attnfuzz-max-examples")
    if examples is None and config.getoption("--attnfuzz-budget") is not None:
        return max(_FEWEST_SHARDS, workers)
    return max(_FEWEST_SHARDS, min(workers, (examples or most) // _CASES_PER_SHARD))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note which kernels have tests, before any test is deselected."""
    stored_cases.note_tests(config, items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker of xdist says of the Cases of --attnfuzz-case."""
    stored_cases.check_worker(node)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Make a session a usage error that had no test for a Case of --attnfuzz-case; remove what shards have shared."""
    stored_cases.end_session(session)
    drop_shared(session.config)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what each fuzz test has tried, and why no test takes a Case of --attnfuzz-case."""
    statistics.show_statistics(terminalreporter, config)
    for line in stored_cases.untaken_lines(config):
        terminalreporter.write_line(f"ERROR: {line}", red=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count the tests that share the session's budget, and choose those that run the Cases of --attnfuzz-case."""
    stored_cases.choose_tests(session)
    fuzzing = sum(hasattr(getattr(item, "function", None), MARK) for item in session.items)
    session.config.stash[COUNT] = max(1, fuzzing)
    if fuzzing and not session.config.pluginmanager.hasplugin(_INTERRUPTS):
        session.config.pluginmanager.register(_Interrupts(session.config), _INTERRUPTS)


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> str | None:
    """Return what will be fuzzed and how, None where nothing is."""
    names = [getattr(getattr(item, "function", None), MARK, None) for item in items]
    kernels = list(dict.fromkeys(name for name in names if name))
    if not kernels:
        return None
    values = {name: config.getoption(f"--attnfuzz-{name}") for name in ("device", "profile", "budget", "max-examples")}
    budget = values["budget"] or (
        f"{counted(values['max-examples'], 'case')} a kernel" if values["max-examples"] else "as the tests say"
    )
    settings = f"device={values['device']} profile={values['profile']} seed={session_seed(config)} budget={budget}"
    return shown(f"attnfuzz: {', '.join(map(one_line, kernels))} in {counted(sum(map(bool, names)), 'test')}; {settings}")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Note which session is the outermost."""
    begin_session(session.config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the child processes."""
    close_executors(config)
    hear_again(config)


class _Interrupts:
    """Has pytest end undisturbed after Ctrl-C, where it fuzzes."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_keyboard_interrupt(self) -> None:
        """Drop the Ctrl-C that follow."""
        hear_no_more(self._config)
