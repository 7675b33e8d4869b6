"""Attention sinks in the budgets: a frame with one more key, and the budget of the sinks' gradient, for one batch or several."""

from __future__ import annotations

import dataclasses

import torch

from attnfuzz.kernels.problem import SINKS
from attnfuzz.oracles.formats import EPS, TINY
from attnfuzz.oracles.frames import Frame, Loaded, Placed, Tokens
from attnfuzz.oracles.modifiers import Leaves
from attnfuzz.oracles.slots import SlotFrame, Slots

__all__ = ["PlacedWithSinks", "SinkSums", "SlotSinks"]


class PlacedWithSinks(Placed):
    """A frame whose last key is the sink: its score is the sink itself, and k and v are 0 there.

    All formulas hold for it as for any key: dP is 0, dS = -P D, and nothing is added to O and dQ. Its rows of dK and dV are left
    out of the batch's.
    """

    def __init__(self, tokens: Tokens, frame: Frame) -> None:
        super().__init__(tokens, frame)
        groups, kv_heads = tokens.problem.groups, len(frame.kv_heads)
        heads = slice(frame.kv_heads.start * groups, frame.kv_heads.stop * groups)
        of_heads = tokens.modifiers.tensors[SINKS][heads].double().view(kv_heads, groups, 1)
        self.sinks: torch.Tensor = of_heads.expand(-1, -1, len(frame.rows)).flatten(1).repeat(len(frame.sequences), 1)[..., None]
        self.n_k, self.terms_k = self.n_k + 1, self.terms_k + 1

    def load(self) -> Loaded:
        """Return the frame's tensors, with 0 behind k and v."""
        x = super().load()
        k, v = (torch.cat([each, each.new_zeros(each.shape[0], 1, each.shape[2])], 1) for each in (x.k, x.v))
        return dataclasses.replace(x, k=k, v=v)

    def visible(self) -> torch.Tensor:
        """Return which keys a row sees, the sink among them unless it is -inf: bool `(Z, rows, keys + 1)`."""
        keys = super().visible()
        shown = self.sinks > -torch.inf
        if len(self.frame.sequences) > 1:
            i = torch.arange(self.frame.rows.start, self.frame.rows.stop, device=shown.device)
            inside = (i < self._rows.lengths[:, None]).repeat(1, self.tokens.problem.groups)
            shown = shown & inside.repeat_interleave(len(self.frame.kv_heads), 0)[..., None]
        return torch.cat([keys.expand(*shown.shape[:2], keys.shape[-1]), shown], -1)

    def leaves(self) -> Leaves:
        """Return the coordinates of each score; the sink's are those of the last key, and of no meaning."""
        leaves = super().leaves()
        at = leaves["kv_idx"]
        return {**leaves, "kv_idx": torch.cat([at, at[..., -1:]], -1)}

    def sums(self, out: torch.Tensor) -> torch.Tensor:
        """Return where to add `(Z, keys + 1, n)` for `out (kv_heads, tokens, n)`: a copy, for `store_sums`."""
        own = super().sums(out)
        return torch.cat([own, own.new_zeros(own.shape[0], 1, own.shape[2])], 1)

    def store_sums(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """Store the tensor from `sums` in `out`, without the sink's row."""
        if len(self.frame.sequences) > 1:
            super().store_sums(out, part[:, :-1])
        else:
            super().sums(out).copy_(part[:, :-1])

    def sampled(self, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows and keys as `Placed.sampled`; keys index into `(Z x (keys + 1))`."""
        rows, keys = super().sampled(most)
        count = len(self.frame.keys)
        return rows, keys // count * (count + 1) + keys % count


class SinkSums:
    """Sums over the rows of a batch that give the budget of the sinks' gradient, d sink = -sum P D, D less dLSE.

    M = sum slack + 6 eps sqrt(n) sum |P D| + n tiny, as of a captured tensor: slack bounds the error of P D in a row, n counts
    rows. Rows without keys are in no frame: their P is 1 and their D is -dLSE, which adds 16 eps sum |dLSE| at most.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._problem = tokens.problem
        self._sums = torch.zeros((3, tokens.problem.heads), dtype=torch.float64, device=tokens.q.device)
        self.sinks = tokens.modifiers.tensors[SINKS].double()
        if tokens.d_lse is not None:
            self._sums[0] = 16 * EPS * tokens.d_lse.double().abs().sum(1)

    @property
    def lse_without_keys(self) -> torch.Tensor:
        """M_LSE of rows that are in no frame, `(heads, 1, 1)`: their LSE is the sink."""
        return _lse_without_keys(self.sinks)[:, None, None]

    def add(self, placed: Placed, d_s: torch.Tensor, slack: torch.Tensor) -> None:
        """Add one frame's rows, each `(Z, rows, 1)`."""
        frame, groups = placed.frame, self._problem.groups
        heads = slice(frame.kv_heads.start * groups, frame.kv_heads.stop * groups)
        for total, term in zip(self._sums, _terms(d_s, slack), strict=True):
            of_rows = term.view(len(frame.sequences), len(frame.kv_heads), groups, len(frame.rows))
            total[heads] += of_rows.sum((0, 3)).flatten()

    def allowed(self) -> torch.Tensor:
        """Return M, float64 `(heads,)`."""
        return _allowed(self._sums)


class SlotSinks:
    """The gradient of the sinks and its M, as of `SinkSums`, for several batches; heads without sinks have any value."""

    def __init__(self, slots: Slots, sinks: torch.Tensor, outside: torch.Tensor, d_lse: torch.Tensor | None) -> None:
        """Begin with the rows in no frame: `outside (rows,)`, which see no key; `d_lse (rows + 1, 1)`."""
        self._slots, self._sinks, self._outside = slots, sinks, outside
        self._sums = torch.zeros((4, len(sinks)), dtype=torch.float64, device=sinks.device)
        if d_lse is not None:
            of_row = d_lse[:-1, 0].to(torch.float64)
            self._sums[0].index_add_(0, slots.head_of_row, 16 * EPS * of_row.abs())
            seen = outside & (sinks[slots.head_of_row] > -torch.inf)
            self._sums[3].index_add_(0, slots.head_of_row, torch.where(seen, of_row, 0.0))

    def add(self, frame: SlotFrame, d_s: torch.Tensor, slack: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add one frame's rows, each `(Z, rows, 1)`; `gradient`: the reference's."""
        assert frame.at_heads is not None
        self._sums.index_add_(1, frame.at_heads, torch.stack([*_terms(d_s, slack), gradient]).flatten(1))

    def of_lse(self, lse: torch.Tensor, m_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return LSE and its budget, `(rows, 1)`, with those of rows in no frame."""
        own, outside = self._sinks[self._slots.head_of_row][:, None], self._outside[:, None]
        return torch.where(outside, own, lse), torch.where(outside, _lse_without_keys(own), m_lse)

    def gradient(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient and M, float64 `(heads,)`."""
        return self._sums[3, :-1], _allowed(self._sums[:3, :-1])


def _terms(d_s: torch.Tensor, slack: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what of each row is summed for M: slack, |P D|, and 1 where there is either."""
    size = d_s.abs()
    return slack, size, (size + slack > 0).double()


def _allowed(sums: torch.Tensor) -> torch.Tensor:
    off, size, count = sums
    return off + 6 * EPS * count.sqrt() * size + count * TINY


def _lse_without_keys(sinks: torch.Tensor) -> torch.Tensor:
    return (16 * EPS * (sinks.abs() + 1)).masked_fill(sinks == -torch.inf, 0.0)
