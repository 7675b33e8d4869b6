"""Reference values and budgets of several batches at once: slots of different batches share a frame, and its launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from attnfuzz.kernels.contract import Deviations, Inputs
from attnfuzz.kernels.problem import SINKS, OutputName
from attnfuzz.oracles.attention import Reference, reference_of_heads
from attnfuzz.oracles.budgets.backward import backward
from attnfuzz.oracles.budgets.batch_repeats import BatchRepeats
from attnfuzz.oracles.budgets.bounds import PARTS, SUMS, Budget, of_sums, parts_of_rows, steps_of_rows
from attnfuzz.oracles.budgets.delta import delta_error
from attnfuzz.oracles.budgets.forward import Forward, forward
from attnfuzz.oracles.budgets.roundings import Rounding
from attnfuzz.oracles.budgets.score_gradient import Gradients
from attnfuzz.oracles.budgets.scores import Scores, scores
from attnfuzz.oracles.budgets.sinks import SlotSinks
from attnfuzz.oracles.budgets.sums import Sums
from attnfuzz.oracles.slots import Flat, SlotFrame, Slots, flat, reals_sent, sinks_of

__all__ = ["BatchTruth", "truth_of_batches"]


@dataclass(frozen=True, slots=True, eq=False)
class BatchTruth:
    """Reference values and budgets of the rows and keys of `slots`, `(rows or keys, dim)`; LSE's budget has only `allowed`.

    `sinks`: the gradient of the sinks of all heads and its M, `(heads,)`; None where no batch has any.
    """

    slots: Slots
    expected: dict[OutputName, torch.Tensor]
    budgets: dict[OutputName, Budget]
    repeats: BatchRepeats
    sinks: tuple[torch.Tensor, torch.Tensor] | None = None


def truth_of_batches(
    batches: Sequence[Inputs], deviations: Deviations, device: str, chunk: int, generic: Sequence[int], *, ties: bool = False
) -> BatchTruth:
    """Compute them for batches of equal dims and dtype, without modifiers, in frames of at most `chunk` scores.

    Args:
        batches: the inputs; of equal groups where half_partials is declared.
        deviations: what the kernel declares.
        device: "cpu" or "cuda", for deviations declared for one of them.
        chunk: scores of a frame; a slot with more has one of its own.
        generic: numbers of the batches whose values are searched for repeats.
        ties: whether to count equal values (tau), in half precision.
    """
    where = batches[0].q.device
    with torch.inference_mode(mode=False), torch.no_grad():
        partials = deviations.half_partials and batches[0].problem.groups > 1
        slots = Slots([each.problem for each in batches], chunk, where, even=partials, sinks=sinks_of(batches))
        x = flat(slots, batches)
        totals = _Totals(slots, BatchRepeats(slots, generic, where), where, x, ties=ties)
        for number, frame in enumerate(slots.frames):
            loaded = frame.take(x)
            keys = slice(None if frame.sinks is None else -1)
            k, v, visible = loaded.k[:, keys], loaded.v[:, keys], frame.visible()[..., keys]
            with torch.enable_grad():
                of = reference_of_heads(loaded.q, k, v, loaded.d_o, loaded.d_lse, visible, frame.scale, frame.sinks)
            with torch.inference_mode():
                t = scores(frame, loaded, deviations, device, ties=ties)
                f, of_p = forward(t, ties=ties)
                delta = delta_error(t, f, of_p, deviations)
                del of_p
                dk, dv = totals.sums(number, frame)
                g = backward(t, f, delta, totals.of_dk(dk), totals.of_dv(dv), deviations, ties=ties)
                totals.add(number, frame, of, t, f, g)
                frame.release()
                del loaded, k, v, visible, of, t, f, delta, g, dk, dv
        with torch.inference_mode():
            return totals.finished(Rounding.of(batches[0].problem.dtype, deviations, device), partials=partials)


class _Totals:
    """Collects the results of all frames: one tensor for rows, one for keys, with padding."""

    def __init__(self, slots: Slots, repeats: BatchRepeats, device: torch.device, x: Flat, *, ties: bool) -> None:
        self._slots, self._repeats = slots, repeats
        self._of_dk = (*SUMS, *(("tau2",) if ties else ()))
        self._of_dv = (*self._of_dk, "noise")
        p = slots.problems[0]
        self._qk, self._v = p.dim_qk, p.dim_v
        of_row = 2 + (1 + PARTS) * (self._qk + self._v)
        of_key = (1 + len(self._of_dk)) * self._qk + (1 + len(self._of_dv)) * self._v
        starts = [list(accumulate((z * shape[at] for z, *shape in (x.shape for x in slots.frames)), initial=0)) for at in (0, 1)]
        self._row_starts, self._key_starts = starts
        self._rows, self._keys = (
            torch.empty((start[-1] + 1, width), dtype=torch.float64, device=device)
            for start, width in zip(starts, (of_row, of_key), strict=True)
        )
        # Rows and keys of sequences in no frame.
        for whole in (self._rows, self._keys):
            whole[-1].zero_()
        # An assignment of a number would wait for the device.
        self._rows[-1, 0].fill_(-torch.inf)
        self._sinks = None
        if slots.sinks is not None:
            self._sinks = SlotSinks(slots, slots.sinks, slots.framed_rows == starts[0][-1], x.d_lse)

    def sums(self, number: int, frame: SlotFrame) -> tuple[torch.Tensor, torch.Tensor]:
        """Return zeros for the sums of dK and of dV."""
        z, _, keys = frame.shape
        own = self._keys[self._key_starts[number] : self._key_starts[number + 1]].view(z, keys, -1)
        sums = own[..., self._qk + self._v :].zero_()
        dk, dv = sums.split([len(self._of_dk) * self._qk, len(self._of_dv) * self._v], -1)
        return dk, dv

    def of_dk(self, whole: torch.Tensor) -> Sums:
        """Return the sums of dK within a tensor of all."""
        return Sums.within(whole, self._of_dk)

    def of_dv(self, whole: torch.Tensor) -> Sums:
        """Return the sums of dV within a tensor of all."""
        return Sums.within(whole, self._of_dv)

    def add(self, number: int, frame: SlotFrame, of: Reference, t: Scores, f: Forward, g: Gradients) -> None:
        """Store one frame's results; those of `sums` are there."""
        o, dq = parts_of_rows(f, g)
        z, rows, keys = frame.shape
        own = self._rows[self._row_starts[number] : self._row_starts[number + 1]].view(z, rows, -1)
        torch.cat([of.lse[..., None], t.m_lse, of.o, of.dq, *o, *dq], -1, out=own)
        own = self._keys[self._key_starts[number] : self._key_starts[number + 1]].view(z, keys, -1)
        own = own[:, : of.dk.shape[1]]
        own[..., : self._qk].copy_(of.dk)
        own[..., self._qk : self._qk + self._v].copy_(of.dv)
        if self._sinks is not None:
            assert g.sinks is not None
            self._sinks.add(frame, *g.sinks, of.captured[SINKS])
        self._repeats.add(number, t, f, g)

    def finished(self, rounding: Rounding, *, partials: bool) -> BatchTruth:
        """Return the results of all batches."""
        qk, v = self._qk, self._v
        # Rows of a batch lie together, heads first: `Slots`.
        rows, keys = self._rows.index_select(0, self._slots.framed_rows), self._keys.index_select(0, self._slots.framed_keys)
        lse, m_lse, o, dq, of_o, of_dq = rows.split([1, 1, v, qk, PARTS * v, PARTS * qk], -1)
        dk, dv, of_dk, of_dv = keys.split([qk, v, len(self._of_dk) * qk, len(self._of_dv) * v], -1)
        if self._sinks is not None:
            lse, m_lse = self._sinks.of_lse(lse, m_lse)
        steps = self._steps()
        return BatchTruth(
            self._slots,
            {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv},
            {
                "o": Budget(*of_o.chunk(PARTS, -1)),
                "lse": Budget(m_lse),
                "dq": Budget(*of_dq.chunk(PARTS, -1)),
                "dk": of_sums(self.of_dk(of_dk), steps, rounding, partials=partials),
                "dv": of_sums(self.of_dv(of_dv), steps, rounding, partials=partials),
            },
            self._repeats,
            None if self._sinks is None else self._sinks.gradient(),
        )

    def _steps(self) -> torch.Tensor:
        """Return the matrix steps of rows that sum to dK and dV, of each key, `(keys, 1)`."""
        steps: list[int] = []
        keys: list[int] = []
        for p in self._slots.problems:
            steps += steps_of_rows(p) * p.kv_heads
            keys += p.seqlens_k * p.kv_heads
        of_part, counts = reals_sent([steps, keys], self._keys.device)
        return of_part.repeat_interleave(counts.long(), output_size=sum(keys))[:, None]
