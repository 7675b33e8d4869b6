"""What nvidia-smi says of the GPUs while a command runs: how busy they are, and how much of their memory is in use."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable
from typing import Self

__all__ = ["Gpu", "sample"]

SAMPLE_MS = 200


def sample(line: str) -> tuple[float, float] | None:
    """Return (busy %, MiB in use) of a line such as "97, 5120"; None where the driver does not say."""
    parts = [part.strip() for part in line.split(",")]
    try:
        busy, used = map(float, parts)
    except ValueError:
        return None
    return busy, used


class Gpu:
    """Samples the GPUs that this process may see while the block runs; nothing where nvidia-smi is missing.

    Args:
        wanted: False samples nothing.
    """

    def __init__(self, wanted: bool) -> None:
        self._samples: list[tuple[float, float, float]] = []
        self._tool = shutil.which("nvidia-smi") if wanted else None
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._tool is not None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            command = [self._tool, "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
            command += [f"--id={visible}"] * bool(visible) + ["-lms", str(SAMPLE_MS)]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            assert self._process.stdout is not None
            self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
            self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._reader is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join(5.0)

    def busy(self, begin: float, end: float) -> float | None:
        """Mean busy %, over all GPUs, between two times of `time.monotonic`; None without samples."""
        inside = [busy for at, busy, _ in self._samples if begin <= at <= end]
        return statistics.fmean(inside) if inside else None

    @property
    def peak(self) -> float | None:
        """Most memory in use on one GPU, in MiB, by all its processes; None without samples."""
        return max((used for _, _, used in self._samples), default=None)

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            if (values := sample(line)) is not None:
                self._samples.append((time.monotonic(), *values))
