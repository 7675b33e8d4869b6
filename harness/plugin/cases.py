"""Which tests run the Cases of --attnfuzz-case, and the usage error where none does: nothing would be tried."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attnfuzz.harness.campaign.corpus import CaseFile

__all__ = ["MARK", "check_worker", "choose_tests", "end_session", "note_tests", "takes", "untaken_lines"]

MARK = "_attnfuzz_kernel"
"""An attribute of a test function: the name of the kernel that it fuzzes."""
_CHOSEN: pytest.StashKey[set[str]] = pytest.StashKey()
"""Ids of the tests that run the Cases: the first one of each test function that is selected."""
_BEFORE: pytest.StashKey[set[str]] = pytest.StashKey()
"""Kernels of all fuzz tests, before any were deselected."""
_UNTAKEN: pytest.StashKey[list[str]] = pytest.StashKey()
"""Of the controller of xdist: why no test takes a Case, as its workers say."""
_OUTPUT = "attnfuzz_untaken"


def note_tests(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Note the kernels that have tests, before -k, -m and others deselect any."""
    if config.getoption("--attnfuzz-case"):
        config.stash[_BEFORE] = {_name_of(kernel) for kernel in filter(None, map(_kernel_of, items))}


def choose_tests(session: pytest.Session) -> None:
    """Choose the tests that run the Cases of --attnfuzz-case.

    Raises:
        pytest.UsageError: no selected test is of a Case's kernel; a worker of xdist leaves that to its controller.
    """
    config = session.config
    cases = config.getoption("--attnfuzz-case")
    if not cases:
        return
    kernels: dict[str, str] = {}
    chosen: dict[str, str] = {}
    for item in session.items:
        kernel = _kernel_of(item)
        if kernel is not None and isinstance(_shard_of(item), tuple):
            function = item.nodeid.rpartition("[")[0]
            chosen.setdefault(function, item.nodeid)
            kernels[function] = _name_of(kernel)
    config.stash[_CHOSEN] = set(chosen.values())
    only = {_name_of(each) for each in config.getoption("--attnfuzz-kernel")}
    tried = {each for each in kernels.values() if not only or each in only}
    untaken = [_why(each, tried, config.stash.get(_BEFORE, set())) for each in _read(cases) if each.case.kernel not in tried]
    output: dict[str, Any] | None = getattr(config, "workeroutput", None)
    if output is not None:
        output[_OUTPUT] = untaken
    elif untaken:
        raise pytest.UsageError("\n".join(untaken))


def takes(item: pytest.Item) -> bool:
    """Whether this test is the one of its function that runs the Cases."""
    return item.nodeid in item.config.stash.get(_CHOSEN, set())


def check_worker(node: Any) -> None:
    """Take over what a worker of xdist says at its end."""
    if untaken := getattr(node, "workeroutput", {}).get(_OUTPUT):
        node.config.stash[_UNTAKEN] = untaken


def end_session(session: pytest.Session) -> None:
    """Make it a usage error where xdist's workers had no test for a Case."""
    if session.config.stash.get(_UNTAKEN, []) and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.USAGE_ERROR


def untaken_lines(config: pytest.Config) -> list[str]:
    """Return why no test takes a Case, for the summary of xdist's controller."""
    return config.stash.get(_UNTAKEN, [])


def _kernel_of(item: pytest.Item) -> str | None:
    return getattr(getattr(item, "function", None), MARK, None)


def _shard_of(item: pytest.Item) -> Any:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("shard")


def _name_of(kernel: str) -> str:
    """Return the kernel's own name, which its Cases hold; a test may name it by target."""
    from attnfuzz.kernels import registry
    from attnfuzz.kernels.errors import BadArgument

    try:
        return registry.get(kernel).name
    except BadArgument:  # its test says so
        return kernel


def _read(cases: Sequence[str]) -> list[CaseFile]:
    from attnfuzz.harness.campaign.blob import stored_case

    return [stored_case(each) for each in cases]


def _why(stored: CaseFile, tried: set[str], before: set[str]) -> str:
    kernel = stored.case.kernel
    if kernel in before:
        why, remedy = "its tests are deselected (-k, -m, --deselect, --attnfuzz-kernel)", "select one of them"
    else:
        here = ", ".join(sorted(before or tried)) or "no kernel"
        why, remedy = f"the tests here are of {here}", f"run those of {kernel}, or run the case by attnfuzz repro"
    return f"attnfuzz-case={str(stored.path)!r}: no test takes this case of {kernel}: {why}; {remedy}"
