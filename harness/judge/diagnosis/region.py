"""The region of wrong elements: sequences, heads, rows and columns, and how the rows lie on the kernel's tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnfuzz.harness.judge.diagnosis.model import Region, span_words, spans
from attnfuzz.harness.judge.failure import BY_QUERY
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.problem import OutputName, Problem

__all__ = ["Tiled", "Tokens", "on_tiles", "region", "tile_of", "tokens_of"]

_DENSE = 0.8
"""Share of a region's rows that must be wrong to give it a name: an element may be right by chance."""
_NEARLY = 0.9
_THIN = 0.5
"""Share of wrong elements below which a right row, head or column between wrong ones may be by chance."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The rows of an output over the batch, int64 on the CPU.

    `sequence`, `position`: `(tokens,)`. For each sequence, `(batch,)`: `lengths`, `others` (lengths of the other side, keys for
    queries), and `start` in the batch.
    """

    sequence: Tensor
    position: Tensor
    lengths: Tensor
    others: Tensor
    start: Tensor

    def ends(self, mask: Tensor, last: bool) -> Tensor:
        """Return the first (or last) position in `mask` of each sequence, -1 where it has none."""
        positions = torch.full_like(self.lengths, -1)
        reduce = "amax" if last else "amin"
        return positions.scatter_reduce_(0, self.sequence[mask], self.position[mask], reduce, include_self=False)


@dataclass(frozen=True, slots=True, eq=False)
class Tiled:
    """Rows that tiles explain, bool `(tokens,)`, and how in words."""

    mask: Tensor
    text: str


def tile_of(config: Config, name: OutputName) -> int:
    """Return the rows of this output in a tile of the Config; 1 if it has no such tile.

    For gradients, back_tile_m and back_tile_n come first, if the Config has them.
    """
    usual = config.tile("tile_m" if name in BY_QUERY else "tile_n")
    return usual if name in ("o", "lse") else config.tile("back_tile_m" if name in BY_QUERY else "back_tile_n", usual)


def tokens_of(problem: Problem, name: OutputName) -> Tokens:
    """Return the Tokens of an output."""
    lengths, others = problem.seqlens_q, problem.seqlens_k
    if name not in BY_QUERY:
        lengths, others = others, lengths
    n, m = torch.tensor(lengths), torch.tensor(others)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), n)
    start = n.cumsum(0) - n
    return Tokens(sequence=sequence, position=torch.arange(len(sequence)) - start[sequence], lengths=n, others=m, start=start)


def region(problem: Problem, config: Config, name: OutputName, bad: Tensor) -> Region:
    """Return the Region of the wrong elements `bad`, bool `(heads, tokens[, dim])`, at least one of them true."""
    by_row = bad.any(-1) if bad.dim() == 3 else bad
    heads = by_row.any(1).nonzero().flatten().tolist()
    columns = bad.any(0).any(0).nonzero().flatten().tolist() if bad.dim() == 3 else []
    tokens = tokens_of(problem, name)
    thin = int(torch.count_nonzero(bad)) < _THIN * len(heads) * int(by_row.any(0).sum()) * max(1, len(columns))
    rows = _rows(problem, name, tokens, by_row.any(0).cpu(), tile_of(config, name), thin)
    sequences = tokens.sequence[rows.mask].unique().tolist()
    in_heads, in_columns = spans(heads, thin), spans(columns, thin)
    wide = sum(map(len, in_heads)), sum(map(len, in_columns))
    size = wide[0] * int(rows.mask.sum()) * max(1, wide[1])
    area = Region(
        sequences=spans(sequences),
        heads=in_heads,
        rows=spans(tokens.position[rows.mask].unique().tolist()),
        columns=in_columns,
        share=int(torch.count_nonzero(bad)) / size,
        rows_are=rows.are,
        tiles=rows.tiles,
    )
    dims = bad.shape[2] if bad.dim() == 3 else 0
    words = _words(problem, name, area, tokens, rows, heads=(wide[0], bad.shape[0]), dims=(wide[1], dims))
    return Region(**{**{field: getattr(area, field) for field in Region.__struct_fields__}, "text": words})


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows of the region, bool `(tokens,)`; `whole`: all rows of their sequences; `are`, `tiles`: as in Region."""

    mask: Tensor
    whole: bool
    are: tuple[str, ...] = ()
    tiles: str = ""


def _rows(problem: Problem, name: OutputName, tokens: Tokens, bad: Tensor, tile: int, thin: bool) -> _Rows:
    touched = torch.zeros(len(tokens.lengths), dtype=torch.bool)
    touched[tokens.sequence[bad]] = True
    inside = touched[tokens.sequence]
    if torch.equal(bad, inside):
        return _Rows(inside, whole=True)
    named = [(text, mask & inside) for text, mask in _known(problem, name, tokens)]
    fitting = [(text, mask) for text, mask in named if not torch.equal(mask, inside) and _fits(tokens, bad, mask)]
    # Keep the descriptions with the fewest rows; two that cover the same rows are both reported.
    fewest = min((int(mask.sum()) for _, mask in fitting), default=0)
    fitting = [(text, mask) for text, mask in fitting if int(mask.sum()) == fewest]
    are = tuple(text for text, _ in fitting[:2])
    tiled = on_tiles(tokens, bad, inside, tile, "row" if name in BY_QUERY else "key", _DENSE)
    if tiled is not None and (not fitting or int(tiled.mask.sum()) <= fewest):
        return _Rows(tiled.mask, whole=False, are=are if int(tiled.mask.sum()) == fewest else (), tiles=tiled.text)
    if fitting:
        return _Rows(fitting[0][1], whole=False, are=are)
    positions = torch.zeros(int(tokens.lengths.max()), dtype=torch.bool)
    positions[tokens.position[bad]] = True
    listed = spans(positions.nonzero().flatten().tolist(), thin)
    covered = torch.zeros_like(positions)
    for each in listed:
        covered[each.start : each.stop : each.step] = True
    mask = covered[tokens.position] & inside
    return _Rows(mask, whole=torch.equal(mask, inside))


def _fits(tokens: Tokens, bad: Tensor, mask: Tensor) -> bool:
    """Whether `mask` describes the wrong rows: none outside, most inside, and the first and last of each sequence wrong."""
    if not mask.any() or (bad & ~mask).any() or int(bad.sum()) < _DENSE * int(mask.sum()):
        return False
    return all(torch.equal(tokens.ends(bad, last), tokens.ends(mask, last)) for last in (False, True))


def _known(problem: Problem, name: OutputName, tokens: Tokens) -> list[tuple[str, Tensor]]:
    """Return rows with a name, most special first."""
    row, other = ("row", "seqlen_k") if name in BY_QUERY else ("key", "seqlen_q")
    blind = _blind(problem, name, tokens)
    length, beyond = tokens.lengths[tokens.sequence], tokens.others[tokens.sequence]
    each = " of each sequence" if problem.batch > 1 else ""
    partner = "see no key" if name in BY_QUERY else "no query sees"
    return [
        (f"{row}s that {partner}", blind),
        (f"{row}s that {partner.replace('no ', 'a ')}", ~blind),
        (f"{row}s beyond {other}", tokens.position >= beyond),
        (f"the last {row}{each}", tokens.position == length - 1),
        (f"the first {row}{each}", tokens.position == 0),
        (f"all {row}s but the last{each}", tokens.position < length - 1),
        (f"all {row}s but the first{each}", tokens.position > 0),
    ]


def _blind(problem: Problem, name: OutputName, tokens: Tokens) -> Tensor:
    """Return rows without a partner under the mask: bool `(tokens,)`. Query i sees key j if lo <= j - i - shift <= hi."""
    far = 1 << 40
    left, right = problem.window or (None, None)
    lo, hi = -far if left is None else -left, far if right is None else right
    hi = min(hi, 0) if problem.causal is not None else hi
    n, m = tokens.lengths[tokens.sequence], tokens.others[tokens.sequence]
    sign = 1 if name in BY_QUERY else -1
    shift = torch.zeros_like(n) if problem.causal == "top_left" else sign * (m - n)
    if name in BY_QUERY:
        first, last = tokens.position + shift + lo, tokens.position + shift + hi
    else:
        first, last = tokens.position - shift - hi, tokens.position - shift - lo
    return torch.minimum(last, m - 1) < first.clamp(min=0)


def _words(
    problem: Problem,
    name: OutputName,
    area: Region,
    tokens: Tokens,
    rows: _Rows,
    heads: tuple[int, int],
    dims: tuple[int, int],
) -> str:
    noun, batch = "row" if name in BY_QUERY else "key", problem.batch
    count, full = sum(map(len, area.sequences)), int((tokens.lengths > 0).sum())
    every = count == full
    parts = []
    sequences = span_words("sequence", area.sequences, batch) + _special(problem, tokens, area)
    if rows.whole:
        parts.append("" if every else sequences)
    else:
        listed = area.rows_are[0] if area.rows_are and not area.tiles else span_words(noun, area.rows)
        if len(area.rows_are) > 1 and not area.tiles:
            listed += f" ({area.rows_are[1]})"
        if every:
            inside = "" if batch == 1 or "each sequence" in listed else " of each sequence" if count == batch else ""
        else:
            inside = f" of {sequences}"
            listed = listed.replace(" of each sequence", "")
        notes = [*([area.tiles] if area.tiles else []), *(area.rows_are if area.tiles else ())]
        parts.append(f"{listed}{inside}" + (f" ({'; '.join(notes)})" if notes else ""))
    kind = "head" if name in BY_QUERY else "kv head"
    if heads[0] < heads[1]:
        parts.append(span_words(kind, area.heads, heads[1]))
    elif heads[1] > 1 and parts[0]:
        parts.append(f"all {kind}s")
    if dims[0] < dims[1]:
        parts.append(span_words("dim", area.columns, dims[1]))
    where = ", ".join(part for part in parts if part) or "everywhere"
    if area.share >= _NEARLY:
        return where
    return f"{where} ({_percent(area.share)} of the elements{'' if where == 'everywhere' else ' there'})"


def _special(problem: Problem, tokens: Tokens, area: Region) -> str:
    """Describe what only the wrong sequences have in common; kinds without an empty side need two sequences in and out."""
    wrong = {index for each in area.sequences for index in range(each.start, each.stop, each.step)}
    able = {index for index, length in enumerate(tokens.lengths.tolist()) if length}
    pairs = list(zip(problem.seqlens_q, problem.seqlens_k, strict=True))
    kinds = [
        ("without queries", {i for i in able if pairs[i][0] == 0}, 1),
        ("without keys", {i for i in able if pairs[i][1] == 0}, 1),
        ("with seqlen_q > seqlen_k", {i for i in able if pairs[i][0] > pairs[i][1]}, 2),
        ("with seqlen_q < seqlen_k", {i for i in able if pairs[i][0] < pairs[i][1]}, 2),
        ("with seqlen_q != seqlen_k", {i for i in able if pairs[i][0] != pairs[i][1]}, 2),
    ]
    for text, group, least in kinds:
        if group == wrong != able and len(wrong) >= least and len(able - wrong) >= least:
            return f", {'the one' if len(wrong) == 1 else 'those'} {text}"
    return ""


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def on_tiles(tokens: Tokens, bad: Tensor, inside: Tensor, tile: int, noun: str, dense: float) -> Tiled | None:
    """Return how the wrong rows `bad` lie on tiles of `tile` rows, None where that does not show.

    `inside`: all rows of the sequences that have wrong ones. `dense`: the share of a tile's rows that must be wrong, its first
    and last among them. Tiles start with each sequence, or, where that does not fit, with the batch.
    """
    if tile <= 1:
        return None
    number = tokens.position // tile
    tiled = _whole(tokens, bad, inside, tile, number, dense) or _periodic(tokens, bad, inside, tile, noun)
    if tiled is not None or not (tokens.start % tile).any():
        return tiled
    token = torch.arange(len(bad))
    mask = _union(token // tile, bad, torch.ones_like(bad), dense)
    # A tile of one or more whole sequences is better described by those sequences.
    if mask is None or torch.equal(mask, inside):
        return None
    count = int((token // tile)[mask].unique().numel())
    many = f"{count} whole tiles" if count > 1 else "one whole tile"
    return Tiled(mask, f"{many} of {tile} counted from the start of the batch")


def _union(number: Tensor, bad: Tensor, inside: Tensor, dense: float) -> Tensor | None:
    """Return the rows of all tiles with wrong rows, if `dense` of each tile are wrong, its first and last row among them."""
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
    """Recognise the same run of rows in each tile, wrong in at least two tiles of one sequence."""
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
