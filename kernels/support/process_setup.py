"""What a kernel needs of each process before its first launch: variables of the environment, and a function that runs once.

An allocator, a workspace or a plan is made there, before a process makes its first tensor on the device. A process has the
variables of one kernel at a time: those of the kernel before are as they were again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from attnfuzz.kernels.capabilities import Device
from attnfuzz.kernels.errors import reject

__all__ = ["ProcessSetup", "enter", "setup_of", "why_not_set_up"]


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """The member `process` of a Kernel that has one."""

    environment: tuple[tuple[str, str], ...] = ()
    set_up: Callable[[Device], None] | None = None
    """Called once a process and device, with the variables in place; a global of a module."""

    @staticmethod
    def of(environment: Mapping[str, str] | None, set_up: Callable[[Device], None] | None) -> ProcessSetup | None:
        """Return it for an adapter's arguments; None where there is nothing to do.

        Raises:
            BadArgument: a name or a value that no variable can have, or a set_up that cannot be called.
        """
        if environment is not None and not isinstance(environment, Mapping):
            raise reject("environment", environment, "it is no mapping", 'give names and values: {"ACME_TUNE": "0"}')
        for name, value in (environment or {}).items():
            texts = isinstance(name, str) and isinstance(value, str)
            if not texts or not name or "=" in name or "\0" in name + value:
                reason = "a variable has a name without '=' and a text as its value"
                raise reject("environment", {name: value}, reason, 'write it as in {"ACME_TUNE": "0"}')
        if set_up is not None and not callable(set_up):
            raise reject("set_up", set_up, "it cannot be called", "give a function of the device")
        return ProcessSetup(tuple((environment or {}).items()), set_up) if environment or set_up else None


@dataclass(slots=True)
class _Process:
    """What this process has done."""

    pid: int
    kernel: str | None = None
    """Whose variables are in place."""
    before: tuple[tuple[str, str | None], ...] = ()
    """These variables' values without them."""
    errors: dict[tuple[str, Device], str | None] = field(default_factory=dict)
    """By kernel and device, why set_up failed; None: it did not."""


_process = _Process(0)


def setup_of(kernel: object) -> ProcessSetup | None:
    """Return what a kernel needs of each process, or None."""
    setup = getattr(kernel, "process", None)
    return setup if isinstance(setup, ProcessSetup) else None


def enter(kernel: object, device: Device) -> None:
    """Set the variables of `kernel`, or none, and call its set_up the first time; what that raises is kept, not raised."""
    setup, name, process = setup_of(kernel), getattr(kernel, "name", ""), _here()
    if process.kernel not in (None, name):
        for variable, value in process.before:
            _set(variable, value)
        process.kernel, process.before = None, ()
    if setup is None:
        return
    if process.kernel is None:
        process.before = tuple((variable, os.environ.get(variable)) for variable, _ in setup.environment)
        process.kernel = name
        for variable, value in setup.environment:
            _set(variable, value)
    if setup.set_up is None or (name, device) in process.errors:
        return
    process.errors[name, device] = None
    try:
        setup.set_up(device)
    except (Exception, SystemExit) as error:  # a third party's code
        process.errors[name, device] = f"{type(error).__name__}: {error}"


def why_not_set_up(kernel: object, device: Device) -> str | None:
    """Return what set_up of `kernel` raised in this process, or None."""
    return _here().errors.get((getattr(kernel, "name", ""), device))


def _here() -> _Process:
    """Return what this process has done: nothing yet, where it is a fork."""
    global _process
    if _process.pid != os.getpid():
        _process = _Process(os.getpid(), _process.kernel, _process.before, {})
    return _process


def _set(variable: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value
