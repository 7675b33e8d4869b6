"""Times of work on a GPU at the clocks that the work itself brings about, and those clocks.

A GPU's clocks follow its power some tens of milliseconds behind: a call measured alone has the clocks of what ran before it. So
each contestant runs back to back for `SETTLE_MS` before it is measured, and then as long again. Where the host takes longer to
launch a call than the GPU to compute it, the host's time is what is measured.
"""

from __future__ import annotations

import random
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import click

SETTLE_MS = 150.0
SAMPLE_MS = 20

Times = dict[str, tuple[float, float]]
"""Milliseconds of forward and backward, by name."""
Clocked = dict[str, tuple[float | None, float | None]]
"""MHz during forward and backward, by name; None where unknown."""


class Clocks:
    """What nvidia-smi says of a GPU's SM clock while the block runs; nothing where it is missing.

    Args:
        gpu: what `nvidia-smi --id` takes: an index or "GPU-..." of a UUID.
    """

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu
        self._samples: list[tuple[float, float]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Clocks:
        tool = shutil.which("nvidia-smi")
        if tool is not None:
            asked = ("--query-gpu=clocks.sm", "--format=csv,noheader,nounits", f"--loop-ms={SAMPLE_MS}", f"--id={self._gpu}")
            self._process = subprocess.Popen([tool, *asked], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def between(self, begin: float, end: float) -> list[float]:
        """MHz of each sample that came between two times of `time.monotonic`."""
        return [mhz for at, mhz in self._samples if begin <= at <= end]

    def _read(self, lines: Any) -> None:
        for line in lines:
            text = line.strip()
            if text.replace(".", "", 1).isdigit():
                self._samples.append((time.monotonic(), float(text)))


@dataclass
class Measured:
    """One contestant's forward or backward: milliseconds of a call and the clock's samples in MHz, round after round."""

    name: str
    run: Callable[[], Any]
    ms: list[float] = field(default_factory=list)
    mhz: list[list[float]] = field(default_factory=list)

    def measure(self, clocks: Clocks) -> None:
        """Run until the clocks have settled, then as often again between two events."""
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.run()
        end.record()
        end.synchronize()
        times = max(3, int(SETTLE_MS / max(begin.elapsed_time(end), 0.001)))
        for _ in range(times):
            self.run()
        begin.record()
        for _ in range(times):
            self.run()
        end.record()
        end.synchronize()
        now, took = time.monotonic(), begin.elapsed_time(end)
        self.ms.append(took / times)
        self.mhz.append(clocks.between(now - took / 1e3, now))


def timed(contestants: Sequence[Any], rounds: int) -> tuple[Times, Clocked]:
    """Median milliseconds and MHz of contestants, of which each has `name`, `forward` and `backward`.

    Each round has another order; one before them, which warms the GPU, does not count. What raises is told and left out.
    """
    import torch

    found: list[Measured] = []
    for each in contestants:
        try:
            kept = each.forward()
            each.backward(kept)
            torch.cuda.synchronize()
            found.append(Measured(each.name, each.forward))
            found.append(Measured(each.name, partial(each.backward, kept)))
        except Exception as error:
            click.echo(f"{each.name}: left out: {type(error).__name__}: {str(error)[:300]}", err=True)
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    with Clocks(f"GPU-{getattr(gpu, 'uuid', 'unknown')}") as clocks:
        for number in range(rounds + 1):
            for measured in random.Random(number).sample(found, len(found)):
                measured.measure(clocks)
    return medians(found)


def medians(found: Sequence[Measured]) -> tuple[Times, Clocked]:
    """Of all rounds but the first. `found` has a forward and then a backward of each name."""
    ms: Times = {}
    mhz: Clocked = {}
    for forward, backward in zip(found[::2], found[1::2], strict=True):
        ms[forward.name] = (statistics.median(forward.ms[1:]), statistics.median(backward.ms[1:]))
        mhz[forward.name] = (_clock(forward), _clock(backward))
    return ms, mhz


def _clock(measured: Measured) -> float | None:
    samples = [mhz for each in measured.mhz[1:] for mhz in each]
    return statistics.median(samples) if samples else None
