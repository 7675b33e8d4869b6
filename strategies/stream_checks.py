"""Checks of calls on other CUDA streams than torch's default one, and in CUDA graphs: where they apply. No Hypothesis here."""

from __future__ import annotations

from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.strategies.case import STREAMS, Case, Check

__all__ = ["stream_checks", "why_not_streams"]


def stream_checks(kernel: Kernel, device: Device) -> tuple[Check, ...]:
    """Return those of STREAMS that are drawn for `kernel` on `device`: none on a CPU; graph where the kernel declares it."""
    return tuple(each for each in STREAMS if _why_not(kernel, each, device) is None)


def why_not_streams(kernel: Kernel, case: Case, device: Device) -> str | None:
    """Return why the Case's check, one of STREAMS, does not apply to its kernel on `device`, or None."""
    assert case.check in STREAMS
    return _why_not(kernel, case.check, device)


def _why_not(kernel: Kernel, check: Check, device: Device) -> str | None:
    if device != "cuda":
        return f"check={check!r}: a CPU has no CUDA streams; give device cuda"
    if check == "graph" and "forward" not in kernel.capabilities.cuda_graphs:
        return f"check={check!r}: {kernel.name} does not declare that it can be captured (cuda_graphs=('forward',))"
    return None
