"""The two sides of a comparison: child processes with the checkout's files, and others with those of the base commit.

Both run the same attnfuzz, Python and packages; only modules of the checkout differ. If attnfuzz itself is gated, its contract
stays the checkout's.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attnfuzz.harness.gate.base import finder
from attnfuzz.harness.gate.base.checkout import Changes, Checkout
from attnfuzz.harness.isolation.isolated import Isolated
from attnfuzz.harness.isolation.outcomes import Death, Error, death_failure, exception_of

__all__ = ["BrokenSideError", "Side", "base_environment"]

_SITE = '''

def _begin():
    """Install the finder, then run any other sitecustomize."""
    import importlib.util as util

    here = os.path.dirname(os.path.abspath(__file__))
    install()
    spec = PathFinder.find_spec("sitecustomize", [each for each in sys.path if os.path.abspath(each or ".") != here])
    if spec is not None and spec.loader is not None:
        module = util.module_from_spec(spec)
        spec.loader.exec_module(module)


_begin()
'''


class BrokenSideError(Exception):
    """An exception from a kernel's own code, or the end of its process; the text says which."""


@contextmanager
def base_environment(checkout: Checkout, changes: Changes, files: Path) -> Iterator[dict[str, str]]:
    """Yield variables with which Python imports the checkout's modules from `files`, those of the base commit."""
    with tempfile.TemporaryDirectory(prefix="attnfuzz-gate-site-") as folder:
        source = Path(finder.__file__).read_text(encoding="utf-8") + _SITE
        Path(folder, "sitecustomize.py").write_text(source, encoding="utf-8")
        trees = {
            "head": str(checkout.root),
            "base": str(files),
            "renamed": dict(changes.renamed),
            "new": sorted(changes.new),
        }
        path = os.environ.get("PYTHONPATH")
        yield {
            "PYTHONPATH": os.pathsep.join([folder, *([path] if path else [])]),
            finder.VARIABLE: json.dumps(trees),
        }


class Side:
    """Runs tasks for a kernel in children of one side. `target`: a name or package.module:OBJECT."""

    def __init__(self, executor: Isolated, target: str, name: str) -> None:
        self._executor, self._payload = executor, {"target": target, "device": executor.device}
        self._name = name

    def fresh(self) -> None:
        """Run the next task in a new process."""
        self._executor.fresh()

    def ask(self, task: str, **payload: Any) -> dict[str, Any]:
        """Run a task of harness/gate/tasks.py and return its result.

        Raises:
            BrokenSideError: the kernel's code ended the process, or raised.
            BadArgument: there is no such kernel.
            ExecutionError: the harness itself failed.
        """
        outcome = self._executor.ask(f"attnfuzz.harness.gate.tasks:{task}", {**self._payload, **payload})
        if isinstance(outcome, Death):
            raise BrokenSideError(death_failure(self._name, outcome).message)
        if isinstance(outcome, Error):
            raise exception_of(outcome)
        result: dict[str, Any] = outcome.result
        if broken := result.get("broken"):
            raise BrokenSideError(broken)
        return result
