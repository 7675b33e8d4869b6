"""Relations between the sizes of a Case: lengths to tiles, queries to keys, heads to heads, dims to dims.

Kernels break at relations between sizes, not at sizes: `size_relations` names those of a Case, `possible_relations` all that a
kernel's Cases can have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from attnfuzz.kernels.contract import Capabilities, Config
from attnfuzz.strategies.case import DEFAULT_TILE, Case

if TYPE_CHECKING:
    # To import Hypothesis takes longer than commands that draw nothing.
    from attnfuzz.strategies.cases import Limits
    from attnfuzz.strategies.variants import Variant

__all__ = ["AROUND", "at_tile", "possible_relations", "size_relations", "tiles_of"]

AROUND = frozenset({"tile - 1", "tile", "tile + 1", "n tiles - 1", "n tiles", "n tiles + 1"})
"""Classes of lengths that lie at a multiple of the tile, or next to one."""
_AT_TILE = ("0", "1", "tile - 1", "tile", "tile + 1", "n tiles - 1", "n tiles", "n tiles + 1", "within a tile", "between tiles")
_RESIDUES = 32
_ORDERED = ("<", "=", ">")
_UNEQUAL = ("< within a tile", "< by a tile or more", "> within a tile", "> by a tile or more")
_EMPTY = ("the first", "a middle one", "the last", "several in a row", "all")


def tiles_of(config: Config) -> tuple[int, int]:
    """Return the rows of queries and of keys in a tile, as the strategies take them."""
    return config.tile("tile_m", DEFAULT_TILE), config.tile("tile_n", DEFAULT_TILE)


def at_tile(length: int, tile: int) -> str:
    """Return the class of a length beside a tile: "0", "1", "tile - 1", "n tiles + 1", "between tiles", ..."""
    if length < 2:
        return str(length)
    count, rest = divmod(length + 1, tile)
    if tile > 2 and count and rest < 3:
        off = ("- 1", "", "+ 1")[rest]
        return f"{'tile' if count == 1 else 'n tiles'} {off}".rstrip()
    return "within a tile" if length < tile else "between tiles"


def size_relations(case: Case) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of every relation between sizes, each once per Case."""
    p = case.problem
    tile_m, tile_n = tiles_of(case.config)
    sequences = dict.fromkeys(zip(p.seqlens_q, p.seqlens_k, strict=True))
    for name, lengths, tile in (("queries", p.seqlens_q, tile_m), ("keys", p.seqlens_k, tile_n)):
        distinct = dict.fromkeys(lengths)
        yield from _each_once(f"{name} at the tile", (at_tile(n, tile) for n in distinct))
        yield from _each_once(f"{name} mod {_RESIDUES}", (str(n % _RESIDUES) for n in distinct if n))
        yield from _each_once(f"empty {name}", _empty_places(lengths))
    yield from _each_once("queries : keys", (_by(n_q, n_k, tile_n) for n_q, n_k in sequences))
    yield from _each_once("tiles of queries x keys", (_grid(n_q, n_k, tile_m, tile_n) for n_q, n_k in sequences if n_q and n_k))
    if "tile_m" in case.config and "tile_n" in case.config:
        yield "tile_m : tile_n", _order(tile_m, tile_n)
    yield "groups : kv_heads", _order(p.groups, p.kv_heads)
    yield "dim_qk : dim_v", _order(p.dim_qk, p.dim_v)
    yield "dims", _dims(p.dim_qk, p.dim_v)


def possible_relations(can: Capabilities, variants: Sequence[Variant], limits: Limits) -> dict[str, tuple[str, ...]]:
    """Return every value of each relation that Cases of `variants` can have within `limits`; none for a pool of shapes."""
    if can.shapes:
        return {}
    longest = min(limits.length, can.length_max or limits.length)
    tiles = [tiles_of(each.config) for each in variants]
    most = min(limits.heads, can.heads_max or limits.heads)
    sizes, batch = range(1, most + 1), min(limits.batch, can.batch_max or limits.batch)
    heads = [(groups, kv) for groups in can.groups or sizes for kv in sizes if groups * kv <= most]
    possible = {
        "queries : keys": ("=", *(_UNEQUAL if can.unequal else ())),
        "tile_m : tile_n": _orders([tiles_of(each.config) for each in variants if {"tile_m", "tile_n"} <= each.config.keys()]),
        "groups : kv_heads": _orders(heads),
        "dim_qk : dim_v": _orders([each.dims for each in variants]),
        "dims": tuple(dict.fromkeys(_dims(*each.dims) for each in variants)),
        "tiles of queries x keys": _grids(longest, tiles, unequal=can.unequal),
    }
    for name, at, zero in (("queries", 0, can.zero_q), ("keys", 1, can.zero_k)):
        least, step = can.min_seqlen_k if at or not can.unequal else 1, can.multiples[at]
        empty = zero and (can.unequal or (can.zero_q and can.zero_k))
        lengths = [*([0] if empty else []), *(n for n in range(least, longest + 1) if n % step == 0)]
        residues = {n % _RESIDUES for n in lengths if n}
        met = {at_tile(n, pair[at]) for n in lengths for pair in dict.fromkeys(tiles)}
        possible[f"{name} at the tile"] = tuple(each for each in _AT_TILE if each in met)
        possible[f"{name} mod {_RESIDUES}"] = tuple(map(str, sorted(residues)))
        several = "ragged" in can.packings and batch > 1
        if empty:
            places = _EMPTY if several else ("all",)
            possible[f"empty {name}"] = tuple(each for each in places if each != "a middle one" or batch > 2)
    if can.unequal and can.zero_q:
        possible["queries : keys"] += ("no queries",)
    if can.unequal and can.zero_k:
        possible["queries : keys"] += ("no keys",)
    return possible


def _each_once(name: str, values: Iterator[str]) -> Iterator[tuple[str, str]]:
    for value in dict.fromkeys(values):
        yield name, value


def _order(one: int, other: int) -> str:
    return _ORDERED[(one > other) - (one < other) + 1]


def _orders(pairs: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    met = {_order(*pair) for pair in pairs}
    return tuple(each for each in _ORDERED if each in met)


def _by(n_q: int, n_k: int, tile: int) -> str:
    """Return the relation of a sequence's queries to its keys."""
    if n_q == n_k:
        return "="
    if not (n_q and n_k):
        return "no queries" if n_k else "no keys"
    return f"{_order(n_q, n_k)} {'within a tile' if abs(n_q - n_k) < tile else 'by a tile or more'}"


def _grid(n_q: int, n_k: int, tile_m: int, tile_n: int) -> str:
    return f"{'1' if n_q <= tile_m else 'n'} x {'1' if n_k <= tile_n else 'n'}"


def _grids(longest: int, tiles: Sequence[tuple[int, int]], *, unequal: bool) -> tuple[str, ...]:
    met = {_grid(n, n, *pair) for pair in tiles for n in (1, longest, *pair) if n <= longest}
    if unequal:
        met |= {_grid(n_q, n_k, *pair) for pair in tiles for n_q, n_k in ((1, longest), (longest, 1))}
    return tuple(sorted(met))


def _empty_places(lengths: Sequence[int]) -> Iterator[str]:
    """Yield where a batch has empty sequences."""
    if not any(lengths):
        yield "all"
        return
    if lengths[0] == 0:
        yield "the first"
    if lengths[-1] == 0:
        yield "the last"
    if 0 in lengths[1:-1]:
        yield "a middle one"
    if any(one == other == 0 for one, other in pairwise(lengths)):
        yield "several in a row"


def _dims(dim_qk: int, dim_v: int) -> str:
    """Return the class of a pair of dims, by which a kernel pads them."""
    if all(dim & (dim - 1) == 0 for dim in (dim_qk, dim_v)):
        return "powers of two"
    return next((f"multiples of {step}" for step in (16, 8) if dim_qk % step == dim_v % step == 0), "others")
