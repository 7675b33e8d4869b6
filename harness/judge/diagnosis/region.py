"""Where the wrong elements lie: sequences, heads, rows and columns, and how the rows lie on the kernel's tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnfuzz.harness.judge.diagnosis.model import Region, span_words, spans
from attnfuzz.harness.judge.diagnosis.tiles import Tokens, on_tiles
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.problem import OutputName, Problem

__all__ = ["BY_QUERY", "region", "tile_of", "tokens_of"]

BY_QUERY = ("o", "lse", "dq")
_DENSE = 0.8
"""Rows of a region that must be wrong for it to be called by a name: an element may be right by luck."""
_NEARLY = 0.9
_THIN = 0.5
"""Share of wrong elements below which a right row, head or column between wrong ones is no sign of anything."""


def tile_of(config: Config, name: OutputName) -> int:
    """Rows of this output that a tile of the Config holds; 1 where it has no such tile.

    Gradients have tiles of their own where the Config names them so: back_tile_m, back_tile_n.
    """
    usual = config.tile("tile_m" if name in BY_QUERY else "tile_n")
    return usual if name in ("o", "lse") else config.tile("back_tile_m" if name in BY_QUERY else "back_tile_n", usual)


def tokens_of(problem: Problem, name: OutputName) -> Tokens:
    """Sequence, position and length of each row of an output, on the CPU."""
    lengths, others = problem.seqlens_q, problem.seqlens_k
    if name not in BY_QUERY:
        lengths, others = others, lengths
    n, m = torch.tensor(lengths), torch.tensor(others)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), n)
    start = n.cumsum(0) - n
    return Tokens(sequence=sequence, position=torch.arange(len(sequence)) - start[sequence], lengths=n, others=m, start=start)


def region(problem: Problem, config: Config, name: OutputName, bad: Tensor) -> Region:
    """The region of the wrong elements `bad`, bool `(heads, tokens[, dim])`, at least one of them true."""
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
    found = Region(
        sequences=spans(sequences),
        heads=in_heads,
        rows=spans(tokens.position[rows.mask].unique().tolist()),
        columns=in_columns,
        share=int(torch.count_nonzero(bad)) / size,
        rows_are=rows.are,
        tiles=rows.tiles,
    )
    dims = bad.shape[2] if bad.dim() == 3 else 0
    words = _words(problem, name, found, tokens, rows, heads=(wide[0], bad.shape[0]), dims=(wide[1], dims))
    return Region(**{**{field: getattr(found, field) for field in Region.__struct_fields__}, "text": words})


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows of the region, bool `(tokens,)`: all of those sequences or not, what they are, how they lie on tiles."""

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
    # Two readings that hold the same rows are both told; of those that differ, the one that holds the fewest.
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
    """Whether the rows of `mask` are the wrong ones: none outside, most inside, and the first and last of each sequence wrong."""
    if not mask.any() or (bad & ~mask).any() or int(bad.sum()) < _DENSE * int(mask.sum()):
        return False
    return all(torch.equal(tokens.ends(bad, last), tokens.ends(mask, last)) for last in (False, True))


def _known(problem: Problem, name: OutputName, tokens: Tokens) -> list[tuple[str, Tensor]]:
    """Rows that are special by themselves, most special first."""
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
    """Rows that the mask leaves no partner: bool `(tokens,)`. Query i and key j meet where lo <= j - i - shift <= hi."""
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
    found: Region,
    tokens: Tokens,
    rows: _Rows,
    heads: tuple[int, int],
    dims: tuple[int, int],
) -> str:
    noun, batch = "row" if name in BY_QUERY else "key", problem.batch
    count, full = sum(map(len, found.sequences)), int((tokens.lengths > 0).sum())
    every = count == full
    parts = []
    sequences = span_words("sequence", found.sequences, batch) + _special(problem, tokens, found)
    if rows.whole:
        parts.append("" if every else sequences)
    else:
        listed = found.rows_are[0] if found.rows_are and not found.tiles else span_words(noun, found.rows)
        if len(found.rows_are) > 1 and not found.tiles:
            listed += f" ({found.rows_are[1]})"
        if every:
            inside = "" if batch == 1 or "each sequence" in listed else " of each sequence" if count == batch else ""
        else:
            inside = f" of {sequences}"
            listed = listed.replace(" of each sequence", "")
        notes = [*([found.tiles] if found.tiles else []), *(found.rows_are if found.tiles else ())]
        parts.append(f"{listed}{inside}" + (f" ({'; '.join(notes)})" if notes else ""))
    kind = "head" if name in BY_QUERY else "kv head"
    if heads[0] < heads[1]:
        parts.append(span_words(kind, found.heads, heads[1]))
    elif heads[1] > 1 and parts[0]:
        parts.append(f"all {kind}s")
    if dims[0] < dims[1]:
        parts.append(span_words("dim", found.columns, dims[1]))
    where = ", ".join(part for part in parts if part) or "everywhere"
    if found.share >= _NEARLY:
        return where
    return f"{where} ({_percent(found.share)} of the elements{'' if where == 'everywhere' else ' there'})"


def _special(problem: Problem, tokens: Tokens, found: Region) -> str:
    """What the wrong sequences have in common that the others have not; two of each kind are asked for where no length is 0."""
    wrong = {index for each in found.sequences for index in range(each.start, each.stop, each.step)}
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
