"""Frames, the parts of a batch whose scores are computed at once: several small sequences, padded, or rows of a long one.

A frame is a rectangle of scores `(Z, rows, keys)`: Z counts sequences x key/value heads, and rows are those of all query heads of
the group. Small sequences share a frame, since a launch costs more than their padding; a long one is cut into rows.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeAlias

import torch

from attnfuzz.kernels.contract import Inputs
from attnfuzz.kernels.problem import Dtype, Problem
from attnfuzz.oracles.attention import sees
from attnfuzz.oracles.modifiers import Leaves, Modifiers, leaves_of

__all__ = [
    "CHUNK",
    "FREE",
    "LEAN",
    "PADDING",
    "Frame",
    "Loaded",
    "Placed",
    "Placement",
    "Spread",
    "Steps",
    "Tokens",
    "frames",
    "key_range",
    "rows_seeing",
    "spread",
    "tokens_of",
    "within",
]

Steps: TypeAlias = float | torch.Tensor
"""One number for a frame, or one for each of its Z: `(Z, 1, 1)`."""

CHUNK = {"cpu": 1 << 20, "cuda": 1 << 23}
"""Scores of a frame: each float64 temporary stays under 8 MiB, within a cache, or under 64 MiB on a GPU."""
LEAN = 1 << 21
"""Limit on them where memory is short: a frame has some twenty tensors."""
_GOLDEN = (5**0.5 - 1) / 2
PADDING = 2.0
"""Scores of a frame, padding included, over the real ones."""
FREE = 8
"""A frame of a chunk divided by this costs hardly more than its launches, regardless of its padding."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Sequences, key/value heads, and ranges of rows and keys (positions in the sequence) of one frame."""

    problem: Problem
    sequences: tuple[int, ...]
    kv_heads: range
    rows: range
    keys: range

    @property
    def part(self) -> float:
        """Its share of the rows of its longest sequence."""
        return len(self.rows) / max(self.problem.seqlens_q[i] for i in self.sequences)

    @property
    def whole(self) -> bool:
        """Whether it has all rows of its sequences."""
        return self.part == 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Tensors of a batch, tokens one after the other without slack: `(tokens, heads, dim)`; d_lse `(heads, tokens)`."""

    problem: Problem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_o: torch.Tensor
    d_lse: torch.Tensor | None
    modifiers: Modifiers


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """Tensors of a frame, float64, 0 in padding: q, d_o, d_lse `(Z, rows, dim)`; k, v `(Z, keys, dim)`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_o: torch.Tensor
    d_lse: torch.Tensor | None


class Placement(Protocol):
    """What the budgets take from a frame: of one batch (`Placed`), or of several with their own masks and scales (slots.py)."""

    @property
    def dtype(self) -> Dtype:
        """The dtype of q, k and v."""

    @property
    def modifiers(self) -> Modifiers:
        """softcap, score_mod and mask_mod."""

    @property
    def scale(self) -> Steps:
        """The factor on q . k."""

    @property
    def n_k(self) -> Steps:
        """Keys of the sequence."""

    @property
    def terms_q(self) -> Steps:
        """Rows of the frame without padding, of all heads of the group."""

    @property
    def terms_k(self) -> Steps:
        """Keys of the frame without padding."""

    @property
    def rows_of_head(self) -> int:
        """Rows of the frame of each query head, with padding."""

    @property
    def part(self) -> float:
        """Share of the rows of the longest sequence in the frame."""

    @property
    def sinks(self) -> torch.Tensor | None:
        """(Z, rows, 1): the score of the last key, which is a sink; None without sinks."""

    def leaves(self) -> Leaves:
        """Return the coordinates of each score, for modifiers."""

    def visible(self) -> torch.Tensor:
        """Return which keys a row sees by lengths, causal mask, window: bool `(1 or Z, rows, keys)`."""


class Placed:
    """A frame of a batch: loads the batch's tensors and stores results back."""

    sinks: torch.Tensor | None = None

    def __init__(self, tokens: Tokens, frame: Frame) -> None:
        self.tokens, self.frame = tokens, frame
        device = tokens.q.device
        problem = tokens.problem
        self._rows = _Side(frame, problem.seqlens_q, frame.rows, problem.groups, device)
        self._keys = _Side(frame, problem.seqlens_k, frame.keys, 1, device)
        self.dtype, self.modifiers = problem.dtype, tokens.modifiers
        self.scale: Steps = problem.scale
        self.n_k: Steps = self._keys.counts
        self.terms_q: Steps = self._rows.counts * problem.groups
        self.terms_k: Steps = self._keys.counts
        if len(frame.sequences) == 1:
            self.terms_q, self.terms_k = float(len(frame.rows) * problem.groups), float(len(frame.keys))
        self.rows_of_head, self.part = len(frame.rows), frame.part

    def load(self) -> Loaded:
        """Return the frame's tensors."""
        x = self.tokens
        d_lse = None if x.d_lse is None else self.rows(x.d_lse.T[:, :, None])
        return Loaded(self.rows(x.q), self.keys(x.k), self.keys(x.v), self.rows(x.d_o), d_lse)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x (tokens, heads, dim)` on the frame: float64 `(Z, rows of all heads of the group, dim)`, 0 as padding."""
        return self._rows.load(x)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x (tokens, kv_heads, dim)` on the frame: float64 `(Z, keys, dim)`, 0 as padding."""
        return self._keys.load(x)

    def store_rows(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """Store `part (Z, rows of all heads of the group, n)` in `out (heads, tokens, n)`."""
        self._rows.store(out, part)

    def sums(self, out: torch.Tensor) -> torch.Tensor:
        """Return where to add `(Z, keys, n)` for `out (kv_heads, tokens, n)`: a view of it, or zeros for `store_sums`."""
        return self._keys.sums(out)

    def store_sums(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """Store the tensor from `sums` in `out`, unless it is a view of it."""
        if len(self.frame.sequences) > 1:
            self._keys.store(out, part)

    def sampled(self, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return up to about `most` rows and keys with partners, spread evenly: indices into `(Z x rows)` and `(Z x keys)`."""
        frame, problem = self.frame, self.tokens.problem
        rows = [within(rows_seeing(problem, i), frame.rows) for i in frame.sequences]
        keys = [within(key_range(problem, i, seeing), frame.keys) for i, seeing in zip(frame.sequences, rows, strict=True)]
        heads = len(frame.kv_heads)
        at_rows, at_keys = _places(rows, frame.rows, heads * problem.groups, most), _places(keys, frame.keys, heads, most)
        at = torch.cat([at_rows, at_keys]).to(self.tokens.q.device, non_blocking=True)
        return at[: len(at_rows)], at[len(at_rows) :]

    def leaves(self) -> Leaves:
        """Return batch, head, query, key and lengths of each score, for modifiers: integers that broadcast over the frame."""
        frame, groups, device = self.frame, self.tokens.problem.groups, self.tokens.q.device
        of_z = torch.tensor([(b, kv) for b in frame.sequences for kv in frame.kv_heads]).to(device, non_blocking=True)
        rows, keys = (torch.arange(each.start, each.stop, device=device) for each in (frame.rows, frame.keys))
        member = torch.arange(groups, device=device).repeat_interleave(len(rows))
        pairs = [(self.tokens.problem.seqlens_q[b], self.tokens.problem.seqlens_k[b]) for b in frame.sequences]
        lengths = torch.tensor(pairs).to(device, non_blocking=True).repeat_interleave(len(frame.kv_heads), 0)
        return leaves_of(
            of_z[:, 0, None, None],
            of_z[:, 1, None, None] * groups + member[:, None],
            rows.repeat(groups)[:, None],
            keys[None, :],
            lengths[:, 0, None, None],
            lengths[:, 1, None, None],
        )

    def visible(self) -> torch.Tensor:
        """Return which keys a row sees by lengths, causal mask, window: bool `(1 or Z, rows of all heads of the group, keys)`."""
        frame, problem, device = self.frame, self.tokens.problem, self.tokens.q.device
        i = torch.arange(frame.rows.start, frame.rows.stop, device=device)[:, None]
        j = torch.arange(frame.keys.start, frame.keys.stop, device=device)[None, :]
        if len(frame.sequences) == 1:
            (index,) = frame.sequences
            visible = sees(problem, i, j, problem.seqlens_q[index], problem.seqlens_k[index])[None]
            return visible.repeat(1, problem.groups, 1) if problem.groups > 1 else visible
        visible = sees(problem, i, j, self._rows.lengths[:, None, None], self._keys.lengths[:, None, None])
        return visible.repeat(1, problem.groups, 1).repeat_interleave(len(frame.kv_heads), 0)


class _Side:
    """The rows, or the keys, of a frame."""

    def __init__(self, frame: Frame, lengths: tuple[int, ...], along: range, groups: int, device: torch.device) -> None:
        self._along, self._groups = along, groups
        self._kv_heads, self._sequences = len(frame.kv_heads), len(frame.sequences)
        self._heads = slice(frame.kv_heads.start * groups, frame.kv_heads.stop * groups)
        before = [0, *accumulate(lengths)]
        starts, counts = [before[i] for i in frame.sequences], [lengths[i] for i in frame.sequences]
        self.counts: float | torch.Tensor
        if self._sequences == 1:
            self._at = slice(starts[0] + along.start, starts[0] + along.stop)
            self.counts = float(counts[0])
            return
        # One copy to the device; the indices of real tokens are computed on the host, so that nothing waits for the device.
        real = [n * len(along) + t for n, count in enumerate(counts) for t in range(count)]
        sent = torch.tensor([*starts, *counts, *real], dtype=torch.int64).to(device, non_blocking=True)
        begins, self.lengths, self._real = sent.split([len(starts), len(counts), len(real)])
        step = torch.arange(len(along), device=device)[None, :]
        self._inside = step < self.lengths[:, None]
        self._index = torch.where(self._inside, begins[:, None] + step, 0)
        self.counts = self.lengths.to(torch.float64).repeat_interleave(self._kv_heads)[:, None, None]

    def load(self, x: torch.Tensor) -> torch.Tensor:
        if self._sequences == 1:
            part = x[self._at, self._heads].to(torch.float64)[None]
        else:
            part = x[:, self._heads][self._index].to(torch.float64).masked_fill_(~self._inside[..., None, None], 0.0)
        # (sequences, tokens, heads, dim) -> (sequences x kv heads, group's heads x tokens, dim)
        part = part.transpose(1, 2).unflatten(1, (self._kv_heads, self._groups))
        return part.flatten(2, 3).flatten(0, 1)

    def sums(self, out: torch.Tensor) -> torch.Tensor:
        if self._sequences == 1:
            return out[self._heads, self._at]
        return out.new_zeros((self._sequences * self._kv_heads, len(self._along), out.shape[-1]))

    def store(self, out: torch.Tensor, part: torch.Tensor) -> None:
        part = part.unflatten(1, (self._groups, len(self._along))).unflatten(0, (self._sequences, self._kv_heads))
        if self._sequences == 1:
            out[self._heads, self._at] = part[0].flatten(0, 1)
            return
        # (sequences, kv heads, group, tokens, n) -> (heads, sequences x tokens, n), real tokens only
        flat = part.permute(1, 2, 0, 3, 4).flatten(0, 1).flatten(1, 2)
        out[self._heads, self._index.flatten()[self._real]] = flat[:, self._real]


def tokens_of(inputs: Inputs) -> Tokens:
    """Return the batch without slack, tokens one after the other."""
    p = inputs.problem

    def flat(x: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        return x[:, : lengths[0]].flatten(0, 1) if p.packing == "dense" else x[: sum(lengths)]

    d_lse = inputs.d_lse
    if d_lse is not None:
        d_lse = d_lse[:, :, : p.seqlens_q[0]].transpose(0, 1).flatten(1, 2) if p.packing == "dense" else d_lse[:, : p.total_q]
    return Tokens(
        problem=p, q=flat(inputs.q, p.seqlens_q), k=flat(inputs.k, p.seqlens_k), v=flat(inputs.v, p.seqlens_k),
        d_o=flat(inputs.d_o, p.seqlens_q), d_lse=d_lse, modifiers=Modifiers.of(p, inputs.captured),
    )  # fmt: skip


def frames(problem: Problem, chunk: int) -> Iterator[Frame]:
    """Yield frames of about `chunk` scores at most that cover every sequence with queries and keys."""
    sizes = {i: n_q * n_k for i, (n_q, n_k) in enumerate(zip(problem.seqlens_q, problem.seqlens_k, strict=True)) if n_q * n_k}
    together: list[int] = []
    longest, real = (0, 0), 0
    for index in sorted(sizes, key=lambda i: (sizes[i], i)):
        n_q, n_k = problem.seqlens_q[index], problem.seqlens_k[index]
        both = (max(longest[0], n_q), max(longest[1], n_k))
        if together and not _fit(problem, both, len(together) + 1, real + sizes[index], chunk):
            yield from _cut(problem, together, chunk)
            together, both, real = [], (n_q, n_k), 0
        together.append(index)
        longest, real = both, real + sizes[index]
    if together:
        yield from _cut(problem, together, chunk)


def key_range(problem: Problem, index: int, rows: range) -> range:
    """Return the keys of sequence `index` that some of `rows` may see."""
    n_q, n_k = problem.seqlens_q[index], problem.seqlens_k[index]
    offset = 0 if problem.causal == "top_left" else n_k - n_q
    left, right = problem.window or (None, None)
    limits = [n_k]
    if problem.causal is not None:
        limits.append(rows.stop + offset)
    if right is not None:
        limits.append(rows.stop + offset + right)
    start = 0 if left is None else rows.start + offset - left
    stop = max(0, min(limits))
    return range(min(max(0, start), stop), stop)


def rows_seeing(problem: Problem, index: int) -> range:
    """Return the rows of sequence `index` that see some key: contiguous under every mask."""
    n_q, n_k = problem.seqlens_q[index], problem.seqlens_k[index]
    offset = 0 if problem.causal == "top_left" else n_k - n_q
    left, right = problem.window or (None, None)
    right = 0 if problem.causal is not None else right
    start = 0 if right is None else max(0, -offset - right)
    stop = n_q if left is None else min(n_q, n_k + left - offset)
    return range(start, max(start, stop) if n_k else start)


def within(part: range, whole: range) -> range:
    """Return the tokens of `part` that are in `whole`."""
    start, stop = max(part.start, whole.start), min(part.stop, whole.stop)
    return range(start, max(start, stop))


class Spread(NamedTuple):
    """Tokens of several parts, of each up to as many as there are columns: tensors `(parts, columns)` on the host.

    `kept`: whether there is such a token; the others are any. `sequence`: the number of the part's range that it is of.
    """

    kept: torch.Tensor
    sequence: torch.Tensor
    head: torch.Tensor
    token: torch.Tensor


def spread(parts: Sequence[Sequence[range]], heads: Sequence[int], most: int) -> Spread:
    """Return about `most` tokens of each of `parts`, each of which has one range a sequence, over all of its `heads`."""
    width = max(map(len, parts))
    # Sequences that a part lacks have no tokens.
    ranges = [each for part in parts for each in (*part, *[range(0)] * (width - len(part)))]
    numbers = array("q", [n for each in ranges for n in (each.start, len(each))])
    start, length = torch.frombuffer(numbers, dtype=torch.int64).view(len(parts), width, 2).unbind(2)
    of_heads = torch.tensor(heads)[:, None]
    ends = (length * of_heads).cumsum(1)
    total = ends[:, -1:]
    # Not every n-th: where n is a multiple of the tokens, that would be the same token of every head.
    shares = torch.tensor([at * _GOLDEN % 1.0 for at in range(most)], dtype=torch.float64)
    at = torch.where(total <= most, torch.arange(most), (total * shares).to(torch.int64).sort(1)[0])
    kept = at < total
    kept[:, 1:] &= at[:, 1:] != at[:, :-1]
    at = torch.where(kept, at, 0)
    sequence = torch.where(kept, (at[:, :, None] >= ends[:, None]).sum(2), 0)
    own = length.gather(1, sequence)
    at = at - (ends.gather(1, sequence) - own * of_heads)
    own = own.clamp(min=1)
    head = at // own
    return Spread(kept, sequence, head, at - head * own + start.gather(1, sequence))


def _places(parts: list[range], along: range, heads: int, most: int) -> torch.Tensor:
    """Return the tokens of `spread` as indices into (sequences x heads x along)."""
    x = spread([parts], [heads], most)
    return ((x.sequence * heads + x.head) * len(along) + x.token - along.start)[x.kept]


def _fit(problem: Problem, longest: tuple[int, int], count: int, real: int, chunk: int) -> bool:
    """Whether `count` sequences of `real` scores a head fit one frame; `longest`: the most queries and keys of one."""
    padded = longest[0] * longest[1] * count * problem.heads
    return padded <= chunk and padded <= max(chunk // FREE, PADDING * real * problem.heads)


def _cut(problem: Problem, together: list[int], chunk: int) -> Iterator[Frame]:
    n_q, n_k = (max(lengths[i] for i in together) for lengths in (problem.seqlens_q, problem.seqlens_k))
    sequences, scores = tuple(together), n_q * n_k * problem.groups
    if len(together) > 1:
        yield Frame(problem, sequences, range(problem.kv_heads), range(n_q), range(n_k))
        return
    at_once = max(1, min(problem.kv_heads, chunk // scores))
    # At least two rows a part: equal rows are recognised within a part.
    parts = 1 if scores <= chunk else min(math.ceil(n_q * n_k * problem.groups / chunk), max(1, n_q // 2))
    for head in range(0, problem.kv_heads, at_once):
        kv_heads = range(head, min(head + at_once, problem.kv_heads))
        for part in range(parts):
            rows = range(n_q * part // parts, n_q * (part + 1) // parts)
            keys = range(n_k) if len(rows) == n_q else key_range(problem, together[0], rows)
            if keys:
                yield Frame(problem, sequences, kv_heads, rows, keys)
