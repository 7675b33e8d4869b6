"""Base as a commit of the same checkout: its files in a temporary worktree, run by separate processes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from attnfuzz.harness.gate.base.base import BaseKernel, Progress
from attnfuzz.harness.gate.base.checkout import Changes, changes_since, checkout_at, first_changed_line, worktree
from attnfuzz.harness.gate.measured import Errors, measurements
from attnfuzz.harness.gate.parts.compiles import compile_table
from attnfuzz.harness.gate.side import BrokenSideError, Side, base_environment
from attnfuzz.harness.gate.subjects import Subject, files_of
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.problem import OutputName
from attnfuzz.strategies.case import Case

__all__ = ["Commit"]


class Commit:
    """The merge base of a git checkout and `ref`: its files in a temporary worktree, run by separate processes."""

    def __init__(self, folder: Path, ref: str, device: Device, backends: Sequence[str] = (), memory: int | None = None) -> None:
        self._checkout = checkout_at(folder)
        self._changes: Changes = changes_since(self._checkout, ref)
        self._device, self._backends, self._memory = device, list(backends), memory
        self._stack = contextlib.ExitStack()
        self._variables: dict[str, str] | None = None
        self._executor: Isolated | None = None
        self._described: dict[str, dict[str, Any]] = {}
        self.root: Path | None = self._checkout.root
        self.label = self._changes.label
        self._folder = folder

    def __enter__(self) -> Commit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def preload(self, backends: Sequence[str]) -> None:
        """Fork children from a process that has imported `backends`."""
        self._backends = list(backends)

    def why_changed(self, subject: Subject) -> str | None:
        """Say which file of the kernel changed; None: none."""
        files = self._relative(subject)
        changed = [each for each in files if each in self._changes.changed]
        if not changed:
            return None
        declared = {self._inside(Path(each).resolve()) for each in subject.kernel.files}
        how = "renamed" if changed[0] in self._changes.renamed else "new" if changed[0] in self._changes.new else "changed"
        by = "" if changed[0] in declared else ", which it imports,"
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return f"{changed[0]}{by} is {how}{more}"

    def place(self, subject: Subject) -> tuple[str, int]:
        """Return the first of its files that changed, and the first line that did."""
        files = self._relative(subject)
        changed = next((each for each in files if each in self._changes.changed), None)
        if changed is None:
            return (files[0] if files else "", 1)
        return changed, first_changed_line(self._checkout, self._changes, changed)

    def has(self, target: str) -> bool:
        """Whether base can load it."""
        return "name" in self._describe(target, target)

    def kernel(self, subject: Subject) -> BaseKernel:
        """Describe the kernel in a process of base."""
        kernel = self._describe(subject.target, subject.name)
        if absent := kernel.get("absent"):
            return BaseKernel(missing=f"it is new: in {self.label}, {absent}", new=True)
        if broken := kernel.get("broken"):
            return BaseKernel(missing=f"in {self.label} it cannot be loaded: {broken}")
        if kernel["name"] != subject.name:
            return BaseKernel(missing=f"in {self.label} its name is {kernel['name']}")
        if kernel["unavailable"]:
            return BaseKernel(missing=f"in {self.label} it cannot run here: {kernel['unavailable']}")
        if kernel["extensions"]:
            reason = "is compiled in place and in no commit, so that both sides would run the same"
            return BaseKernel(missing=f"{kernel['extensions'][0]} {reason}")
        return BaseKernel(deterministic=tuple(kernel["deterministic"]))

    def errors(
        self, subject: Subject, cases: Sequence[Case], *, memory_check: bool, progress: Progress
    ) -> Mapping[Case, Mapping[OutputName, Errors]]:
        """Measure the errors in processes of base."""
        side = self.side(subject)
        side.fresh()
        results = measurements(side, cases, memory_check=memory_check, progress=progress)
        return {each.case: each.errors for each in results if each.errors and not each.failures}

    def sample(self, subject: Subject) -> tuple[Case, ...] | None:  # noqa: ARG002 - the protocol's signature
        """Return None: any Case can be measured."""
        return None

    def table(self, subject: Subject, architectures: Sequence[str]) -> list[dict[str, Any]] | None:
        """Compile base's kernel."""
        return compile_table(subject.target, architectures, self._folder, self._environment())

    def side(self, subject: Subject) -> Side:
        """Return the processes of base."""
        return Side(self._started(), subject.target, subject.name)

    def _describe(self, target: str, name: str) -> dict[str, Any]:
        if target not in self._described:
            try:
                side = Side(self._started(), target, name)
                side.fresh()
                self._described[target] = side.ask("describe")
            except BrokenSideError as error:
                self._described[target] = {"broken": str(error)}
        return self._described[target]

    def _started(self) -> Isolated:
        if self._executor is None:
            self._executor = Isolated(self._device, backends=self._backends, memory=self._memory, variables=self._environment())
            self._stack.callback(self._executor.close)
        return self._executor

    def _environment(self) -> dict[str, str]:
        if self._variables is None:
            files = self._stack.enter_context(worktree(self._checkout, self._changes.base))
            self._variables = self._stack.enter_context(base_environment(self._checkout, self._changes, files))
        return self._variables

    def _relative(self, subject: Subject) -> list[str]:
        files = (self._inside(each) for each in files_of(subject.kernel, self._checkout.root))
        return [each for each in files if each is not None]

    def _inside(self, file: Path) -> str | None:
        root = self._checkout.root
        return file.relative_to(root).as_posix() if file.is_relative_to(root) else None
