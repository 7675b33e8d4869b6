"""Time spent in each stage of a trial."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Clock"]


@dataclass(slots=True)
class Clock:
    """Seconds spent in each stage; `enter` is called with the name of each as it begins."""

    enter: Callable[[str], None] | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block as part of stage `name`."""
        if self.enter is not None:
            self.enter(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
