"""A test of a kernel: fuzz one shard, or run stored Cases again, and report failures."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from attnfuzz.harness.core.github import shown
from attnfuzz.harness.core.signals import drop_interrupts, interrupted_once
from attnfuzz.harness.plugin.cases import takes
from attnfuzz.harness.plugin.options import session_name, settings_of
from attnfuzz.harness.plugin.statistics import keep_figures

if TYPE_CHECKING:
    from attnfuzz.harness.campaign.corpus import CaseFile
    from attnfuzz.harness.campaign.events import CampaignFinished, Finding
    from attnfuzz.harness.campaign.settings import Settings
    from attnfuzz.harness.campaign.shared_failures import SharedFailures
    from attnfuzz.harness.isolation.executors import Executor
    from attnfuzz.harness.report.recorder import Recorder
    from attnfuzz.kernels.contract import Kernel

__all__ = [
    "COUNT",
    "close_executors",
    "drop_shared",
    "executor_of",
    "hear_again",
    "hear_no_more",
    "message_of",
    "run_cases",
    "run_shard",
    "run_stored",
    "subject_of",
]

COUNT: pytest.StashKey[int] = pytest.StashKey()
"""How many tests of the session fuzz a shard."""
_EXECUTORS: pytest.StashKey[dict[str, Executor]] = pytest.StashKey()
_sessions: list[pytest.Config] = []
"""Sessions of this process that have not ended, the outermost first."""
_RESTORE: pytest.StashKey[Callable[[], None]] = pytest.StashKey()


def run_shard(
    kernel: Kernel | str, shard: int, shards: int, most: int, request: pytest.FixtureRequest, *, seed: int | None = None
) -> None:
    """Fuzz one shard; with --attnfuzz-case, run those Cases in the first one that is selected. `seed`: the test's own."""
    if cases := request.config.getoption("--attnfuzz-case"):
        run_cases(kernel, cases, request)
        return
    subject, settings = subject_of(kernel, request.config, shard, shards, most, seed=seed)
    with interrupted_once():
        _fuzz(subject, settings, request)


def _fuzz(subject: Kernel, settings: Settings, request: pytest.FixtureRequest) -> None:
    from attnfuzz.harness.campaign.campaign import run_campaign
    from attnfuzz.kernels.errors import BadArgument

    try:
        with _recorder(settings, _again(subject, request)) as recorder:
            executor, shared = executor_of(request.config, subject, settings), _shared(request, settings)
            finished = run_campaign([subject], settings, recorder, executor, shared=shared)
    except BadArgument as error:
        pytest.fail(str(error), pytrace=False)
    if finished.interrupted:
        hear_no_more(request.config)
        if not (finished.findings or finished.elsewhere):
            raise KeyboardInterrupt
        # pytest shows no test that a KeyboardInterrupt ends: this one has failed, and is the last.
        request.session.shouldfail = "interrupted by Ctrl-C: no other test was run"
    _record(request, finished, settings)
    keep_figures(request.node, finished, settings)
    if finished.findings or finished.elsewhere or finished.lost:
        rest = "\n".join(filter(None, (_elsewhere(finished, shared, request), finished.lost)))
        pytest.fail(message_of(finished.findings, subject, request, rest), pytrace=False)
    if finished.not_kept:
        remedy = "make room, or choose another --attnfuzz-out"
        pytest.fail(f"cases could not be kept on disk: {finished.not_kept}; {remedy}", pytrace=False)
    if finished.untried and not settings.may_be_empty:
        pytest.fail("; ".join(f"{name}: {reason}" for name, reason in finished.untried), pytrace=False)


def _shared(request: pytest.FixtureRequest, settings: Settings) -> SharedFailures | None:
    """Return what the shards of a test share; None: the test has one only, or keeps no files."""
    from attnfuzz.harness.campaign.shared_failures import shared_failures

    if settings.shards == 1 or settings.out is None:
        return None
    test = request.node.nodeid
    return shared_failures(settings.out, session_name(request.config), _without_shard(test), test)


def run_stored(kernel: Kernel | str, case: str, request: pytest.FixtureRequest) -> None:
    """Run a Case that the test file names: a case file or a blob."""
    if request.config.getoption("--attnfuzz-case"):
        pytest.skip("--attnfuzz-case names the cases to run")
    subject, settings = subject_of(kernel, request.config, 0, 1, 1)
    stored = _stored(case)
    if stored.case.kernel != subject.name:
        pytest.fail(f"case={str(stored.path)!r}: it is one of {stored.case.kernel}, not of {subject.name}", pytrace=False)
    _run_again(stored, settings)


def hear_no_more(config: pytest.Config) -> None:
    """Drop Ctrl-C until pytest has ended: another would cost the failures that it is about to print."""
    if _RESTORE not in config.stash:
        config.stash[_RESTORE] = drop_interrupts()


def begin_session(config: pytest.Config) -> None:
    """Note a session: another may run within one of its tests."""
    _sessions.append(config)


def hear_again(config: pytest.Config) -> None:
    """Handle Ctrl-C as before `hear_no_more`; where pytest's own process ends now, ignore it: it would replace the exit code."""
    if config in _sessions:
        _sessions.remove(config)
    program = Path(sys.argv[0])
    ends = not _sessions and (program.name in ("pytest", "py.test") or program.parts[-2:] == ("pytest", "__main__.py"))
    if (restore := config.stash.get(_RESTORE, None)) is None:
        return
    if ends:
        # Python puts the default back in place of any other handler before it has ended.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:
        restore()


def drop_shared(config: pytest.Config) -> None:
    """Remove what the shards of this session have shared, once all of its processes have ended."""
    out = config.getoption("--attnfuzz-out")
    if not hasattr(config, "workerinput") and out and Path(out).is_dir():
        from attnfuzz.harness.campaign.shared_failures import drop_shared_failures

        drop_shared_failures(out, session_name(config))


def close_executors(config: pytest.Config) -> None:
    """End the child processes."""
    for executor in config.stash.get(_EXECUTORS, {}).values():
        executor.close()


def subject_of(
    kernel: Kernel | str,
    config: pytest.Config,
    shard: int,
    shards: int,
    most: int,
    *,
    seed: int | None = None,
    must_run: bool = False,
) -> tuple[Kernel, Settings]:
    """The kernel and the settings of a test; skipped where the kernel is not to run, or cannot, failed where it `must_run`."""
    from attnfuzz.kernels import registry
    from attnfuzz.kernels.errors import BadArgument
    from attnfuzz.kernels.targets import why_not_on

    try:
        subject = registry.get(kernel) if isinstance(kernel, str) else kernel
        only = [registry.get(name).name for name in config.getoption("--attnfuzz-kernel")]
        settings = settings_of(config, shard=shard, shards=shards, most=most, seed=seed)
        if settings.budget is not None:
            settings = replace(settings, budget=settings.budget * _share(config))
        reason = why_not_on(subject, settings.device)
    except BadArgument as error:
        pytest.fail(str(error), pytrace=False)
    if only and subject.name not in only:
        pytest.skip(f"--attnfuzz-kernel names {', '.join(only)}")
    if reason is not None:
        text = f"{subject.name} cannot run on {settings.device} here: {reason}"
        if must_run:
            pytest.fail(
                f"{text}; the case was not tried: run it where it can, or choose another --attnfuzz-device", pytrace=False
            )
        pytest.skip(text)
    return subject, settings


def _share(config: pytest.Config) -> float:
    """One test's part of the session's time: xdist's workers run as many tests at once."""
    count, workers = config.stash.get(COUNT, 1), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return min(workers, count) / count


def _without_shard(test: str) -> str:
    return test.rsplit("[", 1)[0]


def _line_of_test(request: pytest.FixtureRequest) -> str:
    return f"pytest {shlex.quote(_without_shard(request.node.nodeid))} --attnfuzz-case"


def _again(kernel: Kernel, request: pytest.FixtureRequest) -> str | None:
    """The command that takes a Case of a kernel that only its test file knows; None: `attnfuzz repro` does."""
    from attnfuzz.kernels import registry

    line = _line_of_test(request)
    return line if registry.is_local(kernel.name) else None


def _recorder(settings: Settings, again: str | None) -> Recorder:
    """Keeps what `attnfuzz report` shows; `again` and a path run a case file, or `attnfuzz repro` does."""
    from attnfuzz.harness.campaign.corpus import quoted, repro_line
    from attnfuzz.harness.report.recorder import Recorder

    def line(path: str, kernel: str) -> str:
        return f"{again} {quoted(path)}" if again else repro_line(path, kernel)

    return Recorder(
        settings.out or ".attnfuzz", lambda text: warnings.warn(pytest.PytestWarning(shown(text)), stacklevel=2), line
    )


def executor_of(config: pytest.Config, kernel: Kernel, settings: Settings) -> Executor:
    """One executor for all tests of this process on the same device, which share its children."""
    from attnfuzz.harness.campaign.executor import executor_for

    known = config.stash.setdefault(_EXECUTORS, {})
    if settings.device not in known:
        known[settings.device] = executor_for([kernel], settings)
    return known[settings.device]


def _stored(text: str) -> CaseFile:
    from attnfuzz.harness.campaign.blob import stored_case
    from attnfuzz.kernels.errors import BadArgument

    try:
        return stored_case(text)
    except BadArgument as error:
        pytest.fail(str(error), pytrace=False)


def run_cases(kernel: Kernel | str, cases: Sequence[str], request: pytest.FixtureRequest) -> None:
    """The Cases of --attnfuzz-case that are this kernel's, in the first selected shard of its test."""
    from attnfuzz.kernels import registry
    from attnfuzz.kernels.errors import BadArgument

    try:
        name = (registry.get(kernel) if isinstance(kernel, str) else kernel).name
    except BadArgument as error:
        pytest.fail(str(error), pytrace=False)
    stored = [_stored(each) for each in cases]
    own = [each for each in stored if each.case.kernel == name]
    if not own:
        pytest.skip(f"--attnfuzz-case is of {', '.join(dict.fromkeys(each.case.kernel for each in stored))}")
    if not takes(request.node):
        pytest.skip("--attnfuzz-case is run by another shard of this test")
    _, settings = subject_of(kernel, request.config, 0, 1, 1, must_run=True)
    request.node.user_properties.append(("attnfuzz.kernel", name))
    for each in own:
        _run_again(each, settings)


def _run_again(stored: CaseFile, settings: Settings) -> None:
    from attnfuzz.harness.report.describe import describe_case, describe_verdict
    from attnfuzz.harness.repro.reproduce import Where, reproduce
    from attnfuzz.kernels.errors import BadArgument

    try:
        where = Where(settings.device, settings.in_process, settings.deadline, settings.memory_check)
        done = reproduce(stored.case, where, rate=stored.rate)
    except BadArgument as error:
        pytest.fail(f"ERROR {stored.path}: {error}", pytrace=False)
    if done.verdict.failures:
        rows = [f"   {name:<20} {value}" for name, value in describe_case(stored.case)]
        pytest.fail("\n".join([f"FAILED {stored.path}", *rows, *describe_verdict(done.verdict)]), pytrace=False)
    if done.outcome == "UNJUDGED":
        lines = describe_verdict(done.verdict)
        pytest.fail("\n".join([f"UNJUDGED {stored.path}: nothing failed, but nothing was judged either", *lines]), pytrace=False)


def _elsewhere(finished: CampaignFinished, shared: SharedFailures | None, request: pytest.FixtureRequest) -> str:
    """Describe each failure that another shard shrinks, with the Case that showed it here, should that shard not end."""
    from attnfuzz.harness.campaign.corpus import quoted
    from attnfuzz.harness.report.describe import describe_verdict

    lines = []
    for number, finding in enumerate(finished.elsewhere, len(finished.findings) + 1):
        assert shared is not None
        claim = shared.latest(finding.identity)
        how, path = (f"by {claim.test}", claim.path) if claim else ("by another shard", None)
        shrunk = claim is None or claim.shrunk
        file = "" if path is None else f": {quoted(path)}" if shrunk else f", from {quoted(path)}"
        lines.append(f"{number}. {finding.identity} ({'shrunk' if shrunk else 'being shrunk'} {how}{file})")
        lines += [f"   {line}" for line in describe_verdict(finding.verdict)[:1]]
        lines.append(f"   its case here:       {_line_of_test(request)} {_blob(finding)}")
    return "\n".join(lines)


def _record(request: pytest.FixtureRequest, finished: CampaignFinished, settings: Settings) -> None:
    """The figures of a shard as properties of its test: JUnit has them, and xdist carries them."""
    properties: list[tuple[str, Any]] = [("device", settings.device), ("seed", settings.seed), ("shard", settings.shard)]
    for row in finished.summaries:
        properties += [("kernel", row.kernel), ("cases", row.cases), ("shrink_cases", row.shrink_cases)]
        properties += [("seconds", round(row.seconds, 3)), ("compiles", row.compiles), ("processes_replaced", row.replaced)]
        properties.append(("not_replayed", row.not_replayed))
        for name, each in row.outputs.items():
            properties += [(f"{name}.judged", each.cases), (f"{name}.worst_error_over_budget", f"{each.worst:.4g}")]
            properties.append((f"{name}.wrong", each.failures))
    properties += [("failures", len(finished.findings)), ("failures_elsewhere", len(finished.elsewhere))]
    for finding in (*finished.findings, *finished.elsewhere):
        properties += [("failure", str(finding.identity)), ("failure.case", finding.path or _blob(finding))]
    request.node.user_properties.extend((f"attnfuzz.{name}", str(value)) for name, value in properties)


def _blob(finding: Finding) -> str:
    from attnfuzz.harness.campaign.blob import blob_of

    return blob_of(finding.case, finding.rate)


def message_of(findings: Sequence[Finding], kernel: Kernel, request: pytest.FixtureRequest, rest: str | None = None) -> str:
    """Each failure: identity, minimal Case, what was seen, the line that runs it again, and the Case to paste."""
    from io import StringIO

    from attnfuzz.harness.report import groups
    from attnfuzz.harness.report.console import SafeConsole
    from attnfuzz.harness.report.terminal import show_finding
    from attnfuzz.kernels import registry

    again = _line_of_test(request)
    text = StringIO()
    console = SafeConsole(file=text, width=160)
    for number, finding in enumerate(findings, 1):
        show_finding(console, number, finding, again if registry.is_local(kernel.name) else None)
        # Without the file, on another machine, or for good.
        blob = _blob(finding)
        console.print(f"   without that file:   {again} {blob}", highlight=False, soft_wrap=True, markup=False)
        console.print(f'   to keep it:          fuzz(..., cases=["{blob}"])', highlight=False, soft_wrap=True, markup=False)
    together = "\n".join(groups.described(findings))
    return "\n".join(filter(None, (text.getvalue().strip(), together, rest)))
