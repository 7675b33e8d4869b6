"""The parts of a Case, and neighbours of a Case: Cases that differ from it in one part alone.

To explain a failure, each part of its minimal Case is varied on its own (harness/campaign/explainer.py). Neighbours are Cases
that a campaign could draw: patterns, scales and lengths from the same sets, within the same limits. Whether the kernel takes one
is for `supports` to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from attnfuzz.kernels.contract import Capabilities, Config, Device, Kernel, shape_fields
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.expressions.tree import KV, Q, S, parse, to_data
from attnfuzz.kernels.problem import LAYOUTS, Layout, Problem
from attnfuzz.strategies.case import CALLS, DEFAULT_TILE, SINK_VALUES, Case, Pattern, with_check, with_problem

if TYPE_CHECKING:
    # Its module imports hypothesis, and every command imports this one.
    from attnfuzz.strategies.cases import Limits

__all__ = ["LENGTHS", "PARTS", "differences", "in_room", "neighbours", "tiles_for", "tiles_of", "value_of", "with_lengths"]

LENGTHS: Final = ("seqlen_q", "seqlen_k", "both lengths")
"""The parts that are lengths: of queries, of keys, and of both at once."""
PARTS: Final = (
    *("check", "causal", "config", "dtype", *LENGTHS, "batch", "groups", "kv_heads", "window", "softcap", "sinks", "score_mod"),
    *("mask_mod", "dims", "seed", "pattern", "softmax_scale", "q_scale", "k_scale", "v_scale", "do_scale", "sink_values"),
    *("packing", "page_size", "slack_q", "slack_k", "layouts", "needs"),
)
"""All parts, in the order in which they are varied and shown."""
_SHAPE_PARTS: Final = (*LENGTHS, "batch", "groups", "kv_heads")
_SCALES = ("q_scale", "k_scale", "v_scale", "do_scale")
_PATTERNS: tuple[Pattern, ...] = ("normal", "uniform01", "negative", "large_logits")
"""Patterns that leave no output constant, so that a pass says something."""
_MOST_CONFIGS, _MOST_OTHERS = 6, 3
_ADDED: dict[str, Any] = {
    "softcap": 20.0,
    "score_mod": to_data(S * 0.5),
    "mask_mod": to_data(KV <= Q),
    "softmax_scale": 0.25,
    "slack_q": 3,
    "slack_k": 3,
}
"""Values of parts of a Problem that are at their default in the Case."""


def parts_of(case: Case) -> dict[str, object]:
    """Return the value of each part; together they are the Case."""
    p, recipe = case.problem, case.recipe
    return {
        "check": case.check,
        "config": case.config,
        "groups": p.groups,
        "kv_heads": p.kv_heads,
        "seqlen_q": p.seqlens_q,
        "seqlen_k": p.seqlens_k,
        "dims": (p.dim_qk, p.dim_v),
        "layouts": tuple(getattr(p, name) for name in LAYOUTS),
        **{name: getattr(p, name) for name in ("dtype", "causal", "packing", "needs", "sinks", "page_size", "window", *_ADDED)},
        "sink_values": recipe.sinks,
        **{name: getattr(recipe, name) for name in ("seed", "pattern", *_SCALES)},
    }


def differences(case: Case, other: Case) -> tuple[str, ...]:
    """Return the parts in which two Cases of one kernel differ: other numbers of sequences are "batch", not their lengths."""
    now, then = parts_of(case), parts_of(other)
    names = {name for name, value in now.items() if then[name] != value}
    if "sinks" in names:
        # Where there are none, they have no values.
        names.discard("sink_values")
    if case.problem.batch != other.problem.batch:
        names = names - {"seqlen_q", "seqlen_k"} | {"batch"}
    elif names >= {"seqlen_q", "seqlen_k"}:
        names = names - {"seqlen_q", "seqlen_k"} | {"both lengths"}
    return tuple(name for name in PARTS if name in names)


def value_of(case: Case, part: str) -> str:
    """Return a part's value in words."""
    p = case.problem
    match part:
        case "seqlen_q" | "seqlen_k":
            return " + ".join(map(str, p.seqlens_q if part == "seqlen_q" else p.seqlens_k))
        case "both lengths":
            return " + ".join(f"{n_q}x{n_k}" for n_q, n_k in zip(p.seqlens_q, p.seqlens_k, strict=True))
        case "batch":
            alike = len(set(zip(p.seqlens_q, p.seqlens_k, strict=True))) == 1 < p.batch
            return f"{p.batch} times {p.seqlens_q[0]}x{p.seqlens_k[0]}" if alike else value_of(case, "both lengths")
        case "config":
            return str(case.config) or "none"
        case "score_mod" | "mask_mod":
            data = getattr(p, part)
            return "none" if data is None else str(parse(data))
        case "softcap":
            return f"{p.softcap:g}" if p.softcap else "none"
        case "softmax_scale":
            return f"{p.dim_qk}^-0.5" if p.softmax_scale is None else f"{p.softmax_scale:g}"
        case "dims":
            return f"{p.dim_qk} x {p.dim_v}"
        case "layouts":
            return _layouts(p)
        case "sinks":
            return "with sinks" if p.sinks else "without sinks"
        case "needs":
            return "with dLSE" if p.needs.dlse else "without dLSE"
        case _:
            value = parts_of(case)[part]
            return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


def _layouts(p: Problem) -> str:
    """Return the layouts that are not contiguous, and of which tensors: "pitch=8 in q, k"."""
    names: dict[Layout, list[str]] = {}
    for name in LAYOUTS:
        names.setdefault(getattr(p, name), []).append(name.removeprefix("layout_"))
    names.pop(Layout(), None)
    parts = (f"{str(layout).removeprefix('Layout(').removesuffix(')')} in {', '.join(of)}" for layout, of in names.items())
    return "; ".join(parts) or "contiguous"


def tiles_of(config: Config) -> dict[str, int]:
    """Return the choices of a Config that are sizes of tiles or blocks."""
    sizes = {name: value for name, value in config.items() if isinstance(value, int) and not isinstance(value, bool)}
    return {name: size for name, size in sizes.items() if size > 1 and ("tile" in name.lower() or "block" in name.lower())}


def tiles_for(config: Config, part: str) -> list[tuple[str, int]]:
    """Return the tiles that cut the queries or the keys, by their names; all tiles where no name says so."""
    tiles = tiles_of(config)
    letters = {"seqlen_q": ("_m", "_q"), "seqlen_k": ("_n", "_k")}.get(part)
    own = [each for each in tiles.items() if letters is not None and each[0].lower().endswith(letters)]
    return own or list(tiles.items())


def in_room(case: Case, limits: Limits, of: Case) -> bool:
    """Whether `case` is as small as drawn Cases are, or no larger than `of`."""
    return all(now <= most for now, most in zip(_sizes(case), _most(limits, _sizes(of)), strict=True))


def _sizes(case: Case) -> tuple[int, int, int, int]:
    p = case.problem
    tile_m, tile_n = (case.config.tile(name, DEFAULT_TILE) for name in ("tile_m", "tile_n"))
    tiles = sum(-(-n_q // tile_m) * -(-n_k // tile_n) for n_q, n_k in zip(p.seqlens_q, p.seqlens_k, strict=True))
    return p.batch, p.heads, max(p.seqlens_q + p.seqlens_k), p.heads * tiles


def _most(limits: Limits, sizes: tuple[int, int, int, int]) -> tuple[int, ...]:
    bounds = (limits.batch, limits.heads, limits.length, limits.tiles)
    return tuple(max(pair) for pair in zip(bounds, sizes, strict=True))


def neighbours(kernel: Kernel, case: Case, device: Device) -> dict[str, list[Case]]:
    """Return neighbours of `case` by the part in which they differ from it, those to try first first.

    A neighbour may be outside of the kernel's capabilities: check `supports`.
    """
    makers: dict[str, Callable[[], Iterator[Case]]] = {
        "check": lambda: _other_checks(case),
        "config": lambda: _other_configs(kernel, case),
        "batch": lambda: _other_batches(case),
        **{name: lambda name=name: _other_lengths(case, name, kernel.capabilities) for name in LENGTHS},  # type: ignore[misc]
        "seed": lambda: (_recipe(case, seed=seed) for seed in range(4) if seed != case.recipe.seed),
        "sink_values": lambda: (_recipe(case, sinks=name) for name in SINK_VALUES if case.problem.sinks),
        "pattern": lambda: (_recipe(case, pattern=name) for name in _PATTERNS if name != case.recipe.pattern),
        **{name: lambda name=name: _other_scales(case, name) for name in _SCALES},  # type: ignore[misc]
    }
    by_part = {name: list(makers[name]() if name in makers else _other_problems(kernel.capabilities, case, device, name))
               for name in PARTS}  # fmt: skip
    for name in _SHAPE_PARTS if kernel.capabilities.shapes else ():
        # What a pool has no other shape for cannot be varied.
        by_part[name] = [other for shape in kernel.capabilities.shapes for other in _problem(case, **shape_fields(shape))]
    # A replaced value may be spelled as the Case's own, or leave no room for another part.
    return {name: unique for name, cases in by_part.items()
            if (unique := [each for each in dict.fromkeys(cases) if differences(case, each) == (name,)])}  # fmt: skip


def _problem(case: Case, **changes: object) -> Iterator[Case]:
    """Yield `case` with changes to its Problem, if that is valid."""
    try:
        yield with_problem(case, replace(case.problem, **changes))
    except BadArgument:
        return


def _recipe(case: Case, **changes: object) -> Case:
    return replace(case, recipe=replace(case.recipe, **changes))


def _other_checks(case: Case) -> Iterator[Case]:
    # A Case against the oracle alone needs no relation to fail; one with calls may fail with other calls too.
    for check in ("oracle", *CALLS) if case.check in CALLS else ("oracle",):
        yield with_check(case, check)


def _other_scales(case: Case, name: str) -> Iterator[Case]:
    # With a larger scale all of V would be clamped to the dtype's largest number.
    if case.recipe.pattern != "near_overflow":
        yield _recipe(case, **{name: 4.0 if getattr(case.recipe, name) == 1.0 else 1.0})


def _other_configs(kernel: Kernel, case: Case) -> Iterator[Case]:
    """Yield the nearest Configs of each choice, those that differ in one choice alone first."""
    own = case.config
    configs = [each for each in kernel.configs(case.problem) if each != own and each.keys() == own.keys()]
    configs.sort(key=lambda each: sum(each[name] != own[name] for name in own))
    new: list[Config] = []
    values = {(name, own[name]) for name in own}
    for each in configs:
        if not set(each.items()) <= values:
            values |= set(each.items())
            new.append(each)
    for each in [*new, *(each for each in configs if each not in new)][:_MOST_CONFIGS]:
        yield replace(case, config=each)


def _other_batches(case: Case) -> Iterator[Case]:
    p = case.problem
    yield from _problem(case, seqlens_q=p.seqlens_q * 2, seqlens_k=p.seqlens_k * 2)
    for i in range(p.batch) if p.batch > 1 else ():
        yield from _problem(case, seqlens_q=(p.seqlens_q[i],), seqlens_k=(p.seqlens_k[i],))


def _other_lengths(case: Case, part: str, can: Capabilities) -> Iterator[Case]:
    """Yield other lengths of each of the first sequences: one more and one less, and around multiples of the tiles.

    Instead of by one they differ by the multiple that the kernel declares.
    """
    p, step = case.problem, {"seqlen_q": can.multiple_q, "seqlen_k": can.multiple_k}.get(part, math.lcm(*can.multiples))
    tiles = sorted({size for _, size in tiles_for(case.config, part)}) or [DEFAULT_TILE]
    for i in range(1 if p.packing == "dense" else min(p.batch, 2)):
        n_q, n_k = p.seqlens_q[i], p.seqlens_k[i]
        if part == "both lengths":
            lengths = [min(n_q, n_k) + step, *tiles, *(tile - step for tile in tiles)]
        else:
            n, other = (n_q, n_k) if part == "seqlen_q" else (n_k, n_q)
            edges = (tile + by for tile in tiles for by in (0, -step, step, tile))
            lengths = [n + step, n - step, *edges, other, other + step, other - step]
        if p.batch > 1 and p.packing == "ragged":
            lengths = [*lengths[:2], tiles[0]]
        for length in dict.fromkeys(each for each in lengths if each >= 0):
            yield from with_lengths(case, part, i, length)


def with_lengths(case: Case, part: str, i: int, length: int) -> Iterator[Case]:
    """Yield `case` with another length of sequence `i`; of both lengths, the shorter one is `length`."""
    p = case.problem
    n_q, n_k = p.seqlens_q[i], p.seqlens_k[i]
    by = length - min(n_q, n_k)
    n_q, n_k = (length, n_k) if part == "seqlen_q" else (n_q, length) if part == "seqlen_k" else (n_q + by, n_k + by)
    if p.packing == "dense":
        yield from _problem(case, seqlens_q=(n_q,) * p.batch, seqlens_k=(n_k,) * p.batch)
        return
    q, k = list(p.seqlens_q), list(p.seqlens_k)
    q[i], k[i] = n_q, n_k
    yield from _problem(case, seqlens_q=tuple(q), seqlens_k=tuple(k))


def _other_problems(can: Capabilities, case: Case, device: Device, part: str) -> Iterator[Case]:
    for changes in _changes(can, case.problem, device, part):
        yield from _problem(case, **changes)


def _changes(can: Capabilities, p: Problem, device: Device, part: str) -> Iterator[dict[str, Any]]:
    """Yield changes to a Problem that vary one part."""
    match part:
        case "dtype":
            yield from ({"dtype": each} for each in can.dtypes_for(device))
        case "causal":
            yield from ({"causal": each} for each in sorted(can.causal, key=lambda each: each is not None))
        case "dims":
            others = [each for each in can.dims if each != (p.dim_qk, p.dim_v)]
            yield from ({"dim_qk": dim_qk, "dim_v": dim_v} for dim_qk, dim_v in others[:_MOST_OTHERS])
        case "kv_heads":
            yield from ({"heads": p.groups * kv, "kv_heads": kv} for kv in (1, 2, 3) if kv != p.kv_heads)
        case "groups":
            groups = [each for each in can.groups or (1, 2, 3) if each != p.groups]
            yield from ({"heads": p.kv_heads * each} for each in groups[:_MOST_OTHERS])
        case "packing":
            yield from ({"packing": each} for each in can.packings)
        case "layouts":
            if any(getattr(p, name) != Layout() for name in LAYOUTS):
                yield dict.fromkeys(LAYOUTS, Layout())
            elif can.layouts:
                yield dict.fromkeys(LAYOUTS, Layout(pitch=8))
        case "page_size":
            yield from ({"page_size": each} for each in can.page_sizes)
        case "sinks":
            yield {"sinks": not p.sinks}
        case "needs":
            yield {"needs": replace(p.needs, dlse=not p.needs.dlse)}
        case _:
            plain = 0 if part.startswith("slack") else 0.0 if part == "softcap" else None
            added = can.least_window if part == "window" else _ADDED[part]
            yield {part: added if getattr(p, part) == plain else plain}
