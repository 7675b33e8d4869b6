"""How wrong rows lie on a kernel's tiles: whole tiles, the tail tile, the same rows of each tile. Said only where rows tell."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnfuzz.harness.judge.diagnosis.model import spans

__all__ = ["Tiled", "Tokens", "on_tiles"]


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The rows of an output over the batch, int64 on the CPU: `sequence`, `position` `(tokens,)`; per sequence `lengths`,
    `others` (the lengths on the other side, keys for queries) and `start` in the batch `(batch,)`."""

    sequence: Tensor
    position: Tensor
    lengths: Tensor
    others: Tensor
    start: Tensor

    def ends(self, mask: Tensor, last: bool) -> Tensor:
        """The first (or last) position in `mask` of each sequence, -1 where it has none."""
        found = torch.full_like(self.lengths, -1)
        reduce = "amax" if last else "amin"
        return found.scatter_reduce_(0, self.sequence[mask], self.position[mask], reduce, include_self=False)


@dataclass(frozen=True, slots=True, eq=False)
class Tiled:
    """Rows that tiles tell, bool `(tokens,)`, and how."""

    mask: Tensor
    text: str


def on_tiles(tokens: Tokens, bad: Tensor, inside: Tensor, tile: int, noun: str, dense: float) -> Tiled | None:
    """How the wrong rows `bad` lie on tiles of `tile` rows, None where that does not show.

    `inside`: all rows of the sequences that have wrong ones. `dense`: the share of a tile's rows that must be wrong, its first
    and last among them. Tiles start with each sequence, or, where that does not fit, with the batch.
    """
    if tile <= 1:
        return None
    number = tokens.position // tile
    found = _whole(tokens, bad, inside, tile, number, dense) or _periodic(tokens, bad, inside, tile, noun)
    if found is not None or not (tokens.start % tile).any():
        return found
    token = torch.arange(len(bad))
    mask = _union(token // tile, bad, torch.ones_like(bad), dense)
    # A tile that is one whole sequence, or more of them, may as well be those sequences.
    if mask is None or torch.equal(mask, inside):
        return None
    count = int((token // tile)[mask].unique().numel())
    many = f"{count} whole tiles" if count > 1 else "one whole tile"
    return Tiled(mask, f"{many} of {tile} counted from the start of the batch")


def _union(number: Tensor, bad: Tensor, inside: Tensor, dense: float) -> Tensor | None:
    """The rows of all tiles with wrong rows, if those tiles are wrong from first to last row and others are not at all."""
    _, tile_of = number.unique(return_inverse=True)
    count = int(tile_of.max()) + 1
    ones = torch.ones(len(bad))
    rows = torch.zeros(count).index_add_(0, tile_of[inside], ones[inside])
    wrong = torch.zeros(count).index_add_(0, tile_of[bad], ones[bad])
    hit = wrong > 0
    if (wrong < dense * rows)[hit].any():
        return None
    border = torch.ones_like(bad)
    border[1:-1] = (tile_of[1:-1] != tile_of[:-2]) | (tile_of[1:-1] != tile_of[2:])
    mask = hit[tile_of] & inside
    return None if (border & mask & ~bad).any() else mask


def _whole(tokens: Tokens, bad: Tensor, inside: Tensor, tile: int, number: Tensor, dense: float) -> Tiled | None:
    own = tokens.sequence * (int(tokens.lengths.max()) // tile + 1) + number
    mask = _union(own, bad, inside, dense)
    if mask is None or torch.equal(mask, inside):
        return None
    tiles = own[mask].unique().numel()
    length = tokens.lengths[tokens.sequence]
    last, partial = number == (length - 1) // tile, (number + 1) * tile > length
    each = " of each sequence" if tokens.sequence[mask].unique().numel() > 1 else ""
    if partial[mask].all():
        return Tiled(mask, f"the tail tile{each}, the last and partial one of {tile}")
    if tiles == 1:
        return Tiled(mask, f"one whole tile of {tile}{', the last' if last[mask].all() else ''}")
    if each and last[mask].all():
        return Tiled(mask, f"the last tile{each}, of {tile}")
    if each and (number[mask] == 0).all():
        return Tiled(mask, f"the first tile{each}, of {tile}")
    (span, *more) = spans(number[mask].unique().tolist())
    if span.step > 1 and not more:
        return Tiled(mask, f"whole tiles of {tile}, {span.words()}")
    return Tiled(mask, f"{tiles} whole tiles of {tile}")


def _periodic(tokens: Tokens, bad: Tensor, inside: Tensor, tile: int, noun: str) -> Tiled | None:
    """The same run of rows in each tile, seen in at least two tiles of one sequence."""
    offset = tokens.position % tile
    hit = torch.zeros(tile, dtype=torch.bool)
    hit[offset[bad]] = True
    mask = hit[offset] & inside
    runs = spans(hit.nonzero().flatten().tolist())
    if len(runs) != 1 or runs[0].step > 1 or not torch.equal(mask, bad):
        return None
    per_sequence = torch.zeros_like(tokens.lengths).index_add_(0, tokens.sequence[mask], torch.ones_like(offset)[mask])
    if len(runs[0]) > tile // 2 or not (per_sequence > len(runs[0])).any():
        return None
    if len(runs[0]) == 1 and runs[0].start in (0, tile - 1):
        which = f"the {'first' if runs[0].start == 0 else 'last'} {noun}"
    else:
        which = f"{noun}s {runs[0].words()}"
    return Tiled(mask, f"{which} of each tile of {tile}")
