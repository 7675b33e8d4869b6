"""Check a kernel from a program, which may edit it and check it again: `check(kernel, seconds=10)`.

The kernel is imported in a process of its own at each call, as it is on disk then; this process imports neither it nor a backend.
Processes that have imported all else wait for the next call, until `Checker.close` or the end of this process.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.problem import OutputName
from attnfuzz.strategies.case import Case, case_from_object

if TYPE_CHECKING:
    from attnfuzz.harness.isolation.supervisor import Supervisor
    from attnfuzz.harness.judge.failure import Kind
    from attnfuzz.kernels.contract import ConfigValue, Device, Kernel

__all__ = ["CheckFailure", "CheckResult", "CheckedOutput", "Checker", "check"]

_GRACE = 120.0
"""Seconds beyond the budget and the time of shrinking after which a call ends the process that it waits for."""
_IMPORT = 60.0
"""Seconds that importing a kernel may take."""
_HERE = "attnfuzz.harness.audit.check_task"
_MEMORY = 1 << 50
"""Bytes: the processes of trials have limits of their own."""


@dataclass(frozen=True, slots=True)
class CheckedOutput:
    """One output over all Cases: in how many it was judged, could not be judged, was wrong; the worst error over its budget."""

    cases: int
    unjudged: int
    worst: float
    wrong: int


@dataclass(frozen=True, slots=True)
class CheckFailure:
    """One bug with its minimal Case.

    `id`: the same for the same bug in every run, on every machine and for every seed. `case`, `blob` (the Case as one word): None
    if the kernel's module cannot be imported. `path`: its case file; None without `out`. `text`: for people.
    """

    id: str
    kernel: str
    kind: Kind
    output: OutputName | None
    check: str
    message: str
    detail: str
    case: Case | None
    blob: str | None
    path: str | None
    minimal: bool
    text: str


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of `check`. It has no truth value: ask `ok`.

    `ok`: Cases were tried, every output was judged, and none failed; `reason` says why not. `never_drawn`: values that the
    kernel declares and no Case had, by what is drawn. `seconds`: of the call; `seconds_to_first`: until the first verdict.
    """

    ok: bool
    reason: str
    kernel: str
    device: Device
    seed: int
    failures: tuple[CheckFailure, ...]
    cases: int
    outputs: Mapping[OutputName, CheckedOutput]
    never_drawn: Mapping[str, tuple[str, ...]]
    seconds: float
    seconds_to_first: float | None

    def __bool__(self) -> bool:
        raise TypeError("a CheckResult has no truth value; ask result.ok")

    def to_object(self) -> dict[str, Any]:
        """The result as values that JSON has, with `format`, the version of this form (docs/reference/json.md)."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        plain["failures"] = [_plain(each) | {"case": each.case.to_object() if each.case else None} for each in self.failures]
        plain["outputs"] = {name: _plain(each) for name, each in self.outputs.items()}
        for each in plain["outputs"].values():
            each["worst"] = each["worst"] if math.isfinite(each["worst"]) else str(each["worst"])
        plain["never_drawn"] = {name: list(values) for name, values in self.never_drawn.items()}
        return {"format": 1, "command": "check", **plain}


class Checker:
    """Checks kernels, and keeps processes ready for the next call until it is closed: a context manager.

    Args:
        device: "auto" (CUDA if there is one), "cpu" or "cuda".

    Raises:
        BadArgument: there is no such device.
    """

    def __init__(self, device: Literal["auto", "cpu", "cuda"] = "auto") -> None:
        from attnfuzz.harness.core.environment import resolve_device

        self.device = resolve_device(device)
        self._lock = threading.Lock()
        self._supervisor: Supervisor | None = None
        self._backends: tuple[str, ...] = ("triton",)
        self._owner = os.getpid()

    def __enter__(self) -> Checker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(
        self,
        kernel: Kernel | Callable[..., Any] | str,
        seconds: float | None = 10.0,
        *,
        max_examples: int | None = None,
        max_failures: int | None = 1,
        seed: int = 0,
        configs: Sequence[Mapping[str, ConfigValue]] | None = None,
        out: str | os.PathLike[str] | None = None,
        deadline: float | None = None,
        in_process: bool = False,
        **declared: Any,
    ) -> CheckResult:
        """Try a kernel, as it is on disk now, and shrink what fails.

        Args:
            kernel: a name, "package.module:OBJECT", a Kernel, or a function with flash-attention's signature, which is called as
                varlen if it has cu_seqlens_q, and else as dense.
            seconds: time for drawn Cases, from the import of the kernel; None: only `max_examples` ends it. Shrinking a failure
                may take 10 s more.
            max_examples: distinct Cases at most.
            max_failures: bugs after which it ends; None: as many as there are.
            seed: the same Cases in the same order for the same seed.
            configs: only these Configs; of a function, the keywords that it is called with.
            out: folder of case files; None: none are written.
            deadline: seconds that each stage of a trial may take, by default 60.
            in_process: import nothing and try the object in this process, where a crash ends it and a hang blocks it.
            declared: of a function, what it can do: arguments of `attnfuzz.kernels.dense` or `varlen`, such as groups=None.

        Raises:
            BadArgument: an argument is wrong, there is no such kernel, or another process cannot import it.
        """
        start = time.monotonic()
        settings = self._settings(seconds, max_examples, max_failures, seed, out, deadline)
        with self._lock:
            if in_process:
                data = _here(kernel, self.device, configs, declared, {**settings, "in_process": True}, start)
            else:
                data = self._elsewhere(kernel, configs, declared, settings)
        return _result(data, self.device, seed, time.monotonic() - start)

    def close(self) -> None:
        """End the processes that wait for the next call."""
        if self._supervisor is not None and self._owner == os.getpid():
            self._supervisor.close()
        self._supervisor = None

    def prepare(self) -> None:
        """Start the process that the next call needs, without waiting for it."""
        with self._lock:
            self._ready()

    def _settings(
        self,
        seconds: float | None,
        max_examples: int | None,
        max_failures: int | None,
        seed: int,
        out: str | os.PathLike[str] | None,
        deadline: float | None,
    ) -> dict[str, Any]:
        from attnfuzz.harness.campaign.settings import Settings

        for name, value, kind in (
            ("seconds", seconds, float),
            ("max_examples", max_examples, int),
            ("max_failures", max_failures, int),
            ("seed", seed, int),
            ("deadline", deadline, float),
        ):
            number = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
            if (value is None and name == "seed") or (value is not None and not (number and math.isfinite(value))):
                raise reject(name, value, "it is not a finite number", "give a number" if kind is float else "give an integer")
        if seconds is None and max_examples is None:
            raise reject("seconds", seconds, "without max_examples it would not end", "give one of them")
        if seconds is not None and seconds <= 0:
            raise reject("seconds", seconds, "must be positive", "give a positive number")
        fields: dict[str, Any] = {
            "device": self.device,
            "budget": seconds,
            "max_examples": max_examples,
            "max_failures": max_failures,
            "seed": seed,
            "out": None if out is None else os.fspath(out),
            "deadline": deadline,
            "replay": False,
            "maps": False,
        }
        Settings(**fields)
        return fields

    def _elsewhere(self, kernel: Any, configs: Any, declared: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result from a process that imports the kernel."""
        from attnfuzz.harness.audit.check_task import load_failure, runs_here
        from attnfuzz.harness.audit.subject import reference, title
        from attnfuzz.harness.campaign.settings import Settings
        from attnfuzz.harness.isolation.outcomes import Death, Error, Task, death_failure, exception_of

        if runs_here():
            reason = "its module calls check while it is imported"
            raise reject("kernel", title(kernel), reason, 'put the call under `if __name__ == "__main__":`')
        path = [os.path.abspath(each) if os.path.exists(each) else each for each in sys.path]  # noqa: PTH100, PTH110
        if isinstance(kernel, str) and not sys.flags.safe_path and (here := str(Path.cwd())) not in path:
            # As `attnfuzz run` finds a module there; the other process itself has a safe path.
            path.insert(0, here)
        payload = {
            "kernel": reference(kernel),
            "title": title(kernel),
            "folder": str(Path.cwd()),
            "path": path,
            "device": self.device,
            "configs": None if configs is None else [dict(each) for each in configs],
            "declared": _as_json(declared),
            "settings": dict(settings),
        }
        checked = Settings(**settings)
        whole = math.inf if checked.seconds is None else checked.seconds + checked.grace + _GRACE
        task = Task(f"{_HERE}:run", payload, {"start": _IMPORT, "compile": _IMPORT, "judge": whole, "end": _GRACE})
        try:
            outcome = self._ready().run(task)
        except BaseException:
            # Ctrl-C: the process at work must not go on.
            self.close()
            raise
        if isinstance(outcome, Error):
            raise exception_of(outcome)
        if isinstance(outcome, Death):
            failure = death_failure(title(kernel), outcome)
            text = f"{failure.message} while its module was imported" if outcome.stage == "compile" else failure.message
            return {
                "kernel": title(kernel),
                "failures": [load_failure(title(kernel), failure.kind, text, failure.detail)],
                "cases": 0,
            }
        result: dict[str, Any] = outcome.result
        if (backend := result.get("backend")) == "tilelang" and backend not in self._backends:
            # Its import takes seconds, which the next call need not wait for.
            self._backends = (*self._backends, backend)
            self.close()
            self._ready()
        return result

    def _ready(self) -> Supervisor:
        """Return what starts the processes; it begins to import what they need."""
        from attnfuzz.harness.isolation.child_variables import child_variables
        from attnfuzz.harness.isolation.forkserver import Forkserver
        from attnfuzz.harness.isolation.supervisor import Supervisor
        from attnfuzz.harness.isolation.tasks import preloads
        from attnfuzz.kernels.triton import runtime

        if self._supervisor is None or self._owner != os.getpid():
            backends = [each for each in self._backends if each != "triton" or runtime.unavailable(self.device) is None]
            forkserver = Forkserver([*preloads(self.device, backends), _HERE], child_variables(self.device))
            self._supervisor, self._owner = Supervisor(forkserver, memory=_MEMORY, spares=0), os.getpid()
            forkserver.prepare()
        return self._supervisor


_checkers: dict[str, Checker] = {}


def check(
    kernel: Kernel | Callable[..., Any] | str,
    seconds: float | None = 10.0,
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    **options: Any,
) -> CheckResult:
    """Try a kernel, as it is on disk now, and shrink what fails: `Checker(device).check(kernel, seconds, **options)`.

    The processes that it keeps ready end with this one; a Checker of your own can be closed. It prints nothing, and
    leaves nothing else behind.

    Raises:
        BadArgument: as `Checker.check`.
    """
    if device not in _checkers:
        _checkers[device] = Checker(device)
        atexit.register(_checkers[device].close)
    return _checkers[device].check(kernel, seconds, **options)


def _here(
    kernel: Any, device: Device, configs: Any, declared: Mapping[str, Any], settings: Mapping[str, Any], start: float
) -> dict[str, Any]:
    """Return the result of the object itself, tried in this process, which is left as it was."""
    from attnfuzz.harness.audit.check_task import result_of
    from attnfuzz.harness.audit.subject import as_kernel
    from attnfuzz.harness.campaign.settings import Settings
    from attnfuzz.harness.isolation.executors import InProcess
    from attnfuzz.kernels import registry

    thing = registry.find(kernel) if isinstance(kernel, str) else kernel
    subject = as_kernel(thing, device, configs, declared)
    with _unchanged(subject.name):
        registry.register(subject)
        return result_of(subject, Settings(**settings), InProcess(device), start)


@contextlib.contextmanager
def _unchanged(name: str) -> Iterator[None]:
    """Restore what a trial in this process changes: torch's threads, environment variables, the kernel of that name."""
    import torch

    from attnfuzz.harness.core.environment import prepare
    from attnfuzz.kernels import registry

    # torch sets some as well, at its first use of what it loads late.
    threads, variables = torch.get_num_threads(), dict(os.environ)
    known = registry.get(name) if registry.is_local(name) else None
    prepare.cache_clear()
    try:
        yield
    finally:
        prepare.cache_clear()
        torch.set_num_threads(threads)
        registry.unregister(name)
        if known is not None:
            registry.register(known)
        for added in os.environ.keys() - variables.keys():
            os.environ.pop(added, None)
        for variable, value in variables.items():
            if os.environ.get(variable) != value:
                os.environ[variable] = value


def _as_json(declared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an adapter for another process.

    Raises:
        BadArgument: one is no plain value.
    """
    import msgspec

    for name, value in declared.items():
        try:
            msgspec.json.encode(value)
        except (TypeError, ValueError):
            remedy = "make a kernel of the function by attnfuzz.kernels.dense or varlen, and give that"
            raise reject(name, value, "it cannot be passed to another process", remedy) from None
    return dict(msgspec.to_builtins(declared))


def _result(data: Mapping[str, Any], device: Device, seed: int, seconds: float) -> CheckResult:
    failures = tuple(
        CheckFailure(**{**each, "case": case_from_object(each["case"]) if each["case"] else None}) for each in data["failures"]
    )
    reason = data.get("not_tried", "")
    if failures:
        reason = f"{len(failures)} failure{'s' * (len(failures) > 1)}: {', '.join(each.id for each in failures)}"
    return CheckResult(
        ok=not reason,
        reason=reason,
        kernel=data["kernel"],
        device=device,
        seed=seed,
        failures=failures,
        cases=data["cases"],
        outputs={name: CheckedOutput(**each) for name, each in data.get("outputs", {}).items()},
        never_drawn={name: tuple(values) for name, values in data.get("never_drawn", {}).items()},
        seconds=seconds,
        seconds_to_first=data.get("seconds_to_first"),
    )


def _plain(each: Any) -> dict[str, Any]:
    return {field.name: getattr(each, field.name) for field in fields(each)}
