"""What a launch left in the slack rows of its outputs, where the kernel declares that."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from attnfuzz.harness.core.text import counted
from attnfuzz.harness.judge.contract import broken_contract, slack_rows
from attnfuzz.harness.judge.failure import BY_QUERY, OUTPUT_TITLES, Failure
from attnfuzz.harness.trial import guard_kernel
from attnfuzz.harness.trial.guard_kernel import Pieces, doubled
from attnfuzz.harness.trial.poison import POISON
from attnfuzz.harness.trial.reading import Reading
from attnfuzz.harness.trial.runs import runs
from attnfuzz.kernels.contract import Outputs, SlackRows
from attnfuzz.kernels.problem import Problem

__all__ = ["Slack"]

_MOST_RUNS = 128
"""Parts of memory that are checked by a launch of our own: two launches."""

_MUST = {"zero": "hold 0", "untouched": "keep what the memory held"}


class Slack:
    """The check of one launch's slack rows: begun when this is made, finished by `failure`, or by `reading` with others.

    Args:
        kernel: its name.
        problem: of the launch.
        outputs: its results; memory that was not written is filled with the poison (poison.py).
        declared: what the slack rows must hold, "zero" or "untouched".
        device: the inputs' device.
        checks: gets the check, for a launch of the caller's, where rows that are untouched are in few parts.
    """

    def __init__(
        self,
        kernel: str,
        problem: Problem,
        outputs: Outputs,
        declared: SlackRows,
        device: torch.device,
        checks: Pieces | None = None,
    ) -> None:
        self._kernel, self._declared = kernel, declared
        self._rows = [
            (name, rows)
            for name in problem.needs.outputs
            if (problem.slack_q if name in BY_QUERY else problem.slack_k)
            # One that breaks the contract is judged by that.
            and broken_contract(kernel, problem, name, output := getattr(outputs, name), device) is None
            and (rows := slack_rows(problem, name, output.detach())).numel()
        ]
        if declared == "untouched" and guard_kernel.takes(device):
            every = ((rows, *run) for _, rows in self._rows for run in runs(rows))
            parts = list(itertools.islice(every, _MOST_RUNS + 1))
            if 0 < len(parts) <= _MOST_RUNS:
                pieces = Pieces(device) if checks is None else checks
                self.reading = Reading([pieces.check()], [0])
                _check_poison(parts, pieces)
                if checks is None:
                    pieces.launch()
                return
        # Outputs of one dtype by the same operations.
        alike: dict[tuple[torch.dtype, bool], list[torch.Tensor]] = {}
        for name, rows in self._rows:
            alike.setdefault((rows.dtype, name == "lse"), []).append(rows.reshape(-1))
        wrong = [self._wrong(torch.cat(each), of_lse=of_lse).any() for (_, of_lse), each in alike.items()]
        self.reading = Reading([each.to(torch.int64)[None] for each in wrong], [0] * len(wrong))

    def _wrong(self, rows: torch.Tensor, *, of_lse: bool) -> torch.Tensor:
        if self._declared == "zero":
            return (rows != 0) & ~rows.isinf() if of_lse else rows != 0
        words, bits = POISON[rows.dtype]
        return rows.view(words) != bits

    def failure(self) -> Failure | None:
        """Wait for the device; return the first output whose slack rows hold something else, or None."""
        if self.reading.as_expected():
            return None
        for name, rows in self._rows:
            wrong = self._wrong(rows.contiguous(), of_lse=name == "lse")
            if not (count := int(wrong.sum())):
                continue
            at = [int(i) for i in torch.unravel_index(wrong.flatten().int().argmax(), rows.shape)]
            message = (
                f"{OUTPUT_TITLES[name]}: {count} of {counted(rows.numel(), 'element')} of slack rows "
                f"{'is' if count == 1 else 'are'} wrong, which must {_MUST[self._declared]} by slack_rows={self._declared!r}; "
                f"the first is {float(rows[tuple(at)]):.9g}, at {at} of them"
            )
            return Failure(kernel=self._kernel, kind="contract", output=name, check="slack rows", message=message)
        return None


def _check_poison(parts: Sequence[tuple[torch.Tensor, int, int]], pieces: Pieces) -> None:
    """Check that all of them hold the poison of their dtype."""
    for rows, start, size in parts:
        words, bits = POISON[rows.dtype]
        pieces.holds(start, size, bits if words is torch.int32 else doubled(bits))
