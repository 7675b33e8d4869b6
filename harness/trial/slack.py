"""What a launch left in the slack rows of its outputs, where the kernel declares that."""

from __future__ import annotations

import torch

from attnfuzz.harness.core.text import counted
from attnfuzz.harness.judge.contract import broken_contract, slack_rows
from attnfuzz.harness.judge.failure import OUTPUT_TITLES, Failure
from attnfuzz.harness.trial.poison import POISON
from attnfuzz.harness.trial.reading import Reading
from attnfuzz.kernels.contract import Outputs, SlackRows
from attnfuzz.kernels.problem import Problem

__all__ = ["Slack"]

_MUST = {"zero": "hold 0", "untouched": "keep what the memory held"}


class Slack:
    """The check of one launch's slack rows: begun when this is made, finished by `failure`, or by `reading` with others.

    Args:
        kernel: its name.
        problem: of the launch.
        outputs: its results; memory that was not written is filled with the poison (poison.py).
        declared: what the slack rows must hold, "zero" or "untouched".
        device: the inputs' device.
    """

    def __init__(self, kernel: str, problem: Problem, outputs: Outputs, declared: SlackRows, device: torch.device) -> None:
        self._kernel, self._declared = kernel, declared
        self._rows = [
            (name, rows)
            for name in problem.needs.outputs
            # One that breaks the contract is judged by that.
            if broken_contract(kernel, problem, name, output := getattr(outputs, name), device) is None
            and (rows := slack_rows(problem, name, output.detach())).numel()
        ]
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
