"""Where a launch wrote: past the ends of its tensors, to its inputs, or between their rows.

A few device operations find out whether there is anything wrong; which tensor and how much is computed only then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from attnfuzz.harness.judge.failure import Failure
from attnfuzz.harness.trial import guard_kernel
from attnfuzz.harness.trial.bands import Bands, memory, reach
from attnfuzz.harness.trial.guard_kernel import Pieces
from attnfuzz.harness.trial.reading import Reading
from attnfuzz.harness.trial.slack import Slack

__all__ = ["Suspicion", "Writes", "overstepped", "suspicion_of"]

_LARGE = 1 << 22
"""16-bit words of an input above which it is compared by itself."""


class Writes:
    """The check that one launch wrote only where it may: begun when this is made, finished by `failure` or `later`.

    Args:
        kernel: its name.
        bands: those of all tensors of the launch.
        before: the inputs.
        after: their copies, which the kernel got.
        slack: the check of the outputs' slack rows.
        checks: what else is to be checked by the same launch.
    """

    def __init__(
        self,
        kernel: str,
        bands: Bands,
        before: Mapping[str, torch.Tensor],
        after: Mapping[str, torch.Tensor],
        slack: Slack | None = None,
        checks: Pieces | None = None,
    ) -> None:
        self._kernel, self._bands, self._before, self._after, self._slack = kernel, bands, before, after, slack
        if checks is None and (device := _device_of(before)) is not None and guard_kernel.takes(device):
            checks = Pieces(device)
        self._edges = bands.edges(checks)
        self._same = None if self._edges is None else _same(before, after, checks)
        if checks is not None:
            checks.launch()

    def failure(self) -> Failure | None:
        """Wait for the device; return what was written where it may not be, or None."""
        if self._edges is not None and self._same is not None and self._edges.as_expected() and self._same.as_expected():
            return None
        return overstepped(self._kernel, self._bands) or _changed_input(self._kernel, self._before, self._after)

    def slack_failure(self) -> Failure | None:
        """Wait for the device; return what slack rows hold that is not declared, or None: the other rows may still be right."""
        return self._slack.failure() if self._slack is not None else None

    def later(self) -> tuple[Suspicion, ...]:
        """Return the checks without any of the launch's tensors, to be read with those of other launches."""
        checks = [
            suspicion_of(self._kernel, "bounds", self._edges),
            Suspicion(self._same, _unclear(self._kernel, "input", "the kernel wrote to one of its inputs")),
        ]
        if self._slack is not None:
            message = "slack rows of an output do not hold what is declared"
            checks.append(Suspicion(self._slack.reading, _unclear(self._kernel, "slack rows", message)))
        return tuple(checks)


@dataclass(frozen=True, slots=True, eq=False)
class Suspicion:
    """A check of writes whose tensors are gone: `failure()` says that something is wrong, but neither where nor how much."""

    reading: Reading | None
    """None: wrong without any reading."""
    _failure: Failure

    def failure(self) -> Failure | None:
        """Return the Failure, or None if nothing is wrong; waits for the device unless the numbers were read before."""
        return None if self.reading is not None and self.reading.as_expected() else self._failure


def suspicion_of(kernel: str, check: str, edges: Reading | None) -> Suspicion:
    """Return the check of bands whose edges are being computed."""
    return Suspicion(edges, _unclear(kernel, check, "2-byte words were written outside the kernel's tensors"))


def _unclear(kernel: str, check: str, message: str) -> Failure:
    return Failure(
        kernel=kernel, kind="guard", check=check, message=f"{message}, in a launch after others, and not when run alone"
    )


def overstepped(kernel: str, bands: Bands) -> Failure | None:
    """Check that the kernel wrote only within its tensors."""
    message = bands.broken()
    return Failure(kernel=kernel, kind="guard", check="bounds", message=message) if message else None


def _device_of(tensors: Mapping[str, torch.Tensor]) -> torch.device | None:
    """Return the device of all tensors with elements, or None where there are several or none."""
    devices = {tensor.device for tensor in tensors.values() if tensor.numel()}
    return devices.pop() if len(devices) == 1 else None


def _same(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], checks: Pieces | None) -> Reading | None:
    """Begin to compare inputs with their copies, and the memory between their rows; None: a copy has another form now.

    `checks`: gets them if they are on its device.
    """
    flag = checks.check() if checks is not None and _device_of(before) == checks.device else None
    for name, tensor in before.items():
        copy, size = after[name], _bytes(tensor)
        if not _alike(tensor, copy) or _lacks(copy, size):
            return None
        if flag is not None and checks is not None:
            checks.equal(copy.data_ptr(), tensor.data_ptr(), size)
    if flag is not None:
        return Reading([flag], [0])
    pairs = [(_words(tensor), _words(after[name])) for name, tensor in before.items() if tensor.numel()]
    # Large tensors are not copied once more to be compared together.
    groups = [[pair] for pair in pairs if pair[0].numel() > _LARGE]
    groups += [small] if (small := [pair for pair in pairs if pair[0].numel() <= _LARGE]) else []
    changed = [_gathered([one for one, _ in each]).ne(_gathered([other for _, other in each])).any() for each in groups]
    return Reading([each.to(torch.int64)[None] for each in changed], [0] * len(changed))


def _gathered(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or one.device != other.device:
        return False
    return not one.numel() or one.stride() == other.stride()


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the last."""
    return reach(tensor) * tensor.element_size() if tensor.numel() else 0


def _lacks(tensor: torch.Tensor, size: int) -> bool:
    """Whether the allocation ends before so many bytes from the first element on; of an empty tensor nothing is needed."""
    begin = tensor.storage_offset() * tensor.element_size() if size else 0
    return bool(tensor.untyped_storage().nbytes() < begin + size)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return all memory from the first element to the last, as 16-bit words."""
    return tensor.as_strided((reach(tensor),), (1,)).view(torch.int16)


def _changed_input(kernel: str, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> Failure | None:
    """Check that the kernel left its inputs unchanged bit by bit (slack rows are NaN), and the memory between their rows."""
    for change in (_taken, _written, _written_between):
        for name in before:
            if verb := change(before[name], after[name]):
                message = f"the kernel {verb} its input {name}"
                return Failure(kernel=kernel, kind="guard", check=f"input {name}", message=message)
    return None


def _taken(before: torch.Tensor, after: torch.Tensor) -> str | None:
    return "took away the memory of" if _lacks(after, _bytes(before)) else None


def _written(before: torch.Tensor, after: torch.Tensor) -> str | None:
    words = torch.int16 if before.element_size() == 2 else torch.int32
    same = before.dtype == after.dtype and torch.equal(before.view(words), after.view(words))
    return None if same else "wrote to"


def _written_between(before: torch.Tensor, after: torch.Tensor) -> str | None:
    """Check the memory between the rows of a tensor with gaps; the elements themselves were checked before."""
    if not before.numel() or memory(before).numel() <= before.numel() * before.element_size():
        return None
    return None if torch.equal(memory(before), memory(after)) else "wrote between the rows of"
