"""The two sides of a comparison: child processes with the checkout's files, and others with those of the commit before.

Both run the same attnfuzz, the same Python and the same packages; only what the checkout itself holds differs. attnfuzz' own
contract stays the checkout's where attnfuzz is what is gated.
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
    """Install the finder, then give way to whatever other sitecustomize there is."""
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
    """The kernel's own code ended a task, or raised where nothing but it ran: the text says how."""


@contextmanager
def base_environment(checkout: Checkout, changes: Changes, files: Path) -> Iterator[dict[str, str]]:
    """Variables with which every Python process imports the checkout's modules from `files`, the other commit's."""
    with tempfile.TemporaryDirectory(prefix="attnfuzz-gate-site-") as folder:
        source = Path(finder.__file__).read_text(encoding="utf-8") + _SITE
        Path(folder, "sitecustomize.py").write_text(source, encoding="utf-8")
        trees = {
            "head": str(checkout.root),
            "base": str(files),
            "renamed": dict(changes.renamed),
            "new": sorted(changes.new),
        }
        before = os.environ.get("PYTHONPATH")
        yield {
            "PYTHONPATH": os.pathsep.join([folder, *([before] if before else [])]),
            finder.VARIABLE: json.dumps(trees),
        }


class Side:
    """Asks children of one side about a kernel. `asked`: as harness/gate/subjects.py loads it."""

    def __init__(self, executor: Isolated, asked: str, name: str) -> None:
        self._executor, self._payload = executor, {"asked": asked, "device": executor.device}
        self._name = name

    def fresh(self) -> None:
        """The next task has a process of its own."""
        self._executor.fresh()

    def ask(self, what: str, **payload: Any) -> dict[str, Any]:
        """The result of the task `what` of harness/gate/tasks.py.

        Raises:
            BrokenSideError: the kernel's code ended the process, or raised.
            BadArgument: there is no such kernel.
            ExecutionError: the harness itself failed.
        """
        outcome = self._executor.ask(f"attnfuzz.harness.gate.tasks:{what}", {**self._payload, **payload})
        if isinstance(outcome, Death):
            raise BrokenSideError(death_failure(self._name, outcome).message)
        if isinstance(outcome, Error):
            raise exception_of(outcome)
        found: dict[str, Any] = outcome.result
        if broken := found.get("broken"):
            raise BrokenSideError(broken)
        return found
