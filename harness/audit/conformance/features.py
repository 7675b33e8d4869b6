"""Features that a kernel may declare, each with Cases that need it: what is declared must work, the rest may."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from attnfuzz.harness.audit.conformance.limits import limits
from attnfuzz.harness.audit.conformance.row import Row, failing
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.kernels.contract import Capabilities, Deviations, Device, Kernel, WindowForm, why_unsupported, window_of
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.expressions.tree import KV, Q, S, to_data, to_float
from attnfuzz.kernels.problem import Dtype, Layout, Problem
from attnfuzz.strategies.case import SINK_VALUES, Case, Recipe, SinkValues
from attnfuzz.strategies.variants import Variant, all_variants

__all__ = ["Feature", "declared_row", "features", "plain_case", "undeclared_row"]

_DTYPES: tuple[Dtype, ...] = ("float16", "bfloat16", "float32")
_OTHER_DIMS = ((32, 32), (64, 64), (96, 96), (128, 128))
_TILE = 64
_LENGTHS = (64, 128, 32, 16, 256, 512, 1024, 8, 4, 2, 1)
"""Lengths to try where the usual one is not supported."""


@dataclass(frozen=True, slots=True)
class Feature:
    """One thing that capabilities may declare, and Cases that need it: where it is declared, each must pass."""

    name: str
    spelled: str
    """How it is declared."""
    declared: bool
    cases: tuple[Case, ...]
    widened: dict[str, Any] = field(default_factory=dict)
    """The fields of Capabilities that would declare it."""


def plain_case(kernel: Kernel, device: Device) -> tuple[Case, str | None]:
    """Return a Case of a little more than a tile of queries and keys, one head, normal values, and why it is refused, or None.

    A kernel may take less than it declares, beside the one token by which its variants are asked for: the first Case of some
    lengths that it supports is chosen.
    """
    variants = all_variants(kernel, device)
    first = _case(kernel, variants[0], {})
    for variant in variants:
        for n in (None, *_LENGTHS):
            case = _case(kernel, variant, {} if n is None else {"seqlens_q": (n,), "seqlens_k": (n,)})
            if kernel.supports(case.problem, case.config, device) is None:
                return case, None
    return first, kernel.supports(first.problem, first.config, device)


def features(kernel: Kernel, device: Device) -> Iterator[Feature]:
    """Yield every feature whose Cases need nothing else that is undeclared."""
    can, variants = kernel.capabilities, all_variants(kernel, device)
    for make in (_variants, _packings, _heads, _masks, _scales, _lengths, limits, _memory):
        for name, spelled, declared, widened, changes in make(can, variants[0]):
            wide = replace(can, **widened)
            candidates = (_changed(kernel, variants, each) for each in changes)
            cases = tuple(
                case
                for case in candidates
                if case is not None and _hides(case.problem) and why_unsupported(wide, case.problem, device) is None
            )
            if cases and not (declared and any(kernel.supports(case.problem, case.config, device) for case in cases)):
                yield Feature(name, spelled, declared, cases, widened)


def declared_row(feature: Feature, verdicts: Sequence[Verdict]) -> Row:
    """Check that a declared feature works."""
    failures = [failure for verdict in verdicts for failure in verdict.failures]
    return failing(feature.name, failures, f"fix the kernel, or do not declare {feature.spelled}", "declared, and works")


def undeclared_row(feature: Feature, kernel: Kernel, ask: Callable[..., Any]) -> Row | None:
    """Check whether an undeclared feature works, where that can be tried."""
    for case in feature.cases:
        answer = ask("widened", kernel, case, widened=msgspec.to_builtins(feature.widened))
        if isinstance(answer, str) or answer["wrong"]:
            return Row(feature.name, "absent", "not declared, and does not work")
        if answer["right"] == "untried":
            return None
    return Row(feature.name, "hint", "not declared, but works in what was tried", f"declare {feature.spelled}, and fuzz it")


def deviations_row(kernel: Kernel, case: Case, ask: Callable[..., Any]) -> Row | None:
    """Return a hint with the undeclared deviations with which `case`, whose values are wrong, would pass; None: with none."""
    declared, names = kernel.capabilities.deviations, list[str]()
    for name in (each for each in Deviations.__struct_fields__ if getattr(declared, each) is False):
        widened = {"deviations": msgspec.to_builtins(replace(declared, **{name: True}))}
        answer = ask("widened", kernel, case, widened=widened)
        if not isinstance(answer, str) and not answer["wrong"] and answer["right"] != "untried":
            names.append(name)
    if not names:
        return None
    remedy = "declare one in deviations=Deviations(...) if the kernel's code does that on purpose, and fuzz it"
    return Row("deviations", "hint", f"the plain case passes with {' or '.join(names)}, which is not declared", remedy)


_Tried = tuple[str, str, bool, dict[str, Any], list[dict[str, Any]]]
"""Name, how it is declared, whether it is, the fields that would declare it, and changes of the plain Problem that need it."""


def _variants(can: Capabilities, plain: Variant) -> Iterator[_Tried]:
    device = can.devices[0]
    for dtype in _DTYPES:
        dtypes = can.dtypes_for(device)
        widened = {"dtypes": tuple(dict.fromkeys((*can.dtypes, dtype))), "dtypes_on": {}}
        yield (
            f"dtype {dtype}",
            f"{dtype!r} in dtypes",
            dtype in dtypes,
            widened if dtype not in dtypes else {},
            [{"dtype": dtype}],
        )
    for dims in dict.fromkeys((*can.dims, *(() if can.dim_multiple else _OTHER_DIMS))):
        change = {"dim_qk": dims[0], "dim_v": dims[1], "dtype": plain.dtype}
        yield f"dims {dims[0]}/{dims[1]}", f"{dims} in dims", dims in can.dims, {"dims": (*can.dims, dims)}, [change]
    if can.dim_multiple:
        multiple = can.dim_multiple
        odd = multiple * max(1, min(can.dim_max, plain.dims[0] + multiple) // multiple)
        yield f"dims of {multiple}", f"dim_multiple={multiple}", True, {}, [{"dim_qk": odd, "dim_v": odd}]


def _packings(can: Capabilities, plain: Variant) -> Iterator[_Tried]:
    for packing in ("ragged", "dense"):
        n, long = _length(can, plain)
        q, k = ((n, n), (n, n)) if packing == "dense" else ((n, long), (n, long))
        change = {"packing": packing, "seqlens_q": q, "seqlens_k": k, "heads": 2, "kv_heads": 2}
        yield (
            f"{packing} batch", f"{packing!r} in packings", packing in can.packings,
            {"packings": tuple(dict.fromkeys((*can.packings, packing)))}, [_grouped(can, change, 2)],
        )  # fmt: skip


def _heads(can: Capabilities, _: Variant) -> Iterator[_Tried]:
    declared = (2, 3) if can.groups is None else tuple(g for g in can.groups if g > 1)[:4]
    for groups in declared:
        yield f"groups of {groups}", f"{groups} in groups", True, {}, [{"heads": 2 * groups, "kv_heads": 2}]
    if can.groups is not None:
        changes = [{"heads": 2 * groups, "kv_heads": 2} for groups in (2, 3)]
        yield "groups of any number", "groups=None", False, {"groups": None}, changes


def _masks(can: Capabilities, plain: Variant) -> Iterator[_Tried]:
    n, long = _length(can, plain)
    unequal = [{"seqlens_q": (n,), "seqlens_k": (long,)}] if can.unequal else []
    for kind in ("bottom_right", "top_left"):
        changes: list[dict[str, Any]] = [{"causal": kind, **each} for each in ({}, *unequal)]
        # With equal lengths both masks are one, and show nothing of the kernel.
        distinct = kind in can.causal or bool(unequal) or not any(can.causal)
        if distinct and (kind in can.causal or not (any(can.causal) and not unequal)):
            widened = {"causal": tuple(dict.fromkeys((*can.causal, kind)))}
            yield f"causal {kind}", f"{kind!r} in causal", kind in can.causal, widened, changes
    yield from _windows(can, plain)
    if "bottom_right" in can.causal and can.unequal:
        empty = {"causal": "bottom_right", "seqlens_q": (long,), "seqlens_k": (n,)}
        yield "rows that see no key", "unequal=True beside causal", True, {}, [empty]


def _windows(can: Capabilities, plain: Variant) -> Iterator[_Tried]:
    """Yield a window of the plainest form, of each other one without a mask, and limits beside the multiples."""
    sides, lengths = _window_sizes(can, plain)
    first = next(each for each in ("both", "equal", "left", "right") if each in can.window_forms)
    of_first = window_of(first, *sides)
    yield "window", "window=True", can.window, {"window": True}, [{"window": of_first, **each} for each in lengths]
    if not can.window:
        return
    for form, where in _FORMS.items() if None in can.causal else ():
        if form != first:
            changes = [{"causal": None, "window": window_of(form, *sides), **each} for each in lengths]
            widened: dict[str, Any] = {"window_forms": (*can.window_forms, form)}
            declared = form in can.window_forms
            yield f"window {where}", f"{form!r} in window_forms", declared, {} if declared else widened, changes
    if can.window_multiple > 1:
        changes = [{"window": window_of(first, sides[0] + 1, sides[1] + 1), **each} for each in lengths]
        yield "window beside multiples", "no window_multiple", False, {"window_multiple": 1}, changes


def _window_sizes(can: Capabilities, plain: Variant) -> tuple[tuple[int, int], list[dict[str, Any]]]:
    """Return limits of a window, in multiples, and lengths: the plain ones, and such among which both limits hide keys."""
    (n, long), step, of_length = _length(can, plain), can.window_multiple, math.lcm(*can.multiples)
    sides = (5 * step, 3 * step) if 10 * step < n else (2 * step, step)
    more = 0 if 2 * sides[0] < n else -(-sides[0] // of_length) * of_length
    pairs = [(n, n)] * bool(more) + [(n, long)] * can.unequal
    return sides, [{}, *({"seqlens_q": (q + more,), "seqlens_k": (k + more,)} for q, k in pairs)]


def _hides(problem: Problem) -> bool:
    """Whether each limit of the Problem's window hides keys of its first sequence, where it has one: else it shows nothing."""
    left, right = problem.window or (None, None)
    n_q, n_k = problem.seqlens_q[0], problem.seqlens_k[0]
    shift = 0 if problem.causal == "top_left" else n_k - n_q
    on_right = right is None or problem.causal is not None or shift + right < n_k - 1
    return on_right and (left is None or n_q - 1 + shift > left)


_FORMS: Final[dict[WindowForm, str]] = {"both": "on both sides", "left": "on the left", "right": "on the right"}


def _scales(can: Capabilities, _: Variant) -> Iterator[_Tried]:
    yield "softcap", "softcap=True", can.softcap, {"softcap": True}, [{"softcap": 2.0}]
    yield "softmax_scale", "scale_given=True", can.scale_given, {"scale_given": True}, [{"softmax_scale": 0.3}]
    # A mask before the scale shows only in both together.
    masked = [{"causal": kind} for kind in can.causal if kind][:1]
    changes = [{"softmax_scale": scale, **each} for scale in (-0.125, 0.0) for each in ({}, *masked)]
    yield "scale of 0 or less", "scale_any=True", can.scale_any, {"scale_any": True}, changes
    for size in filter(None, can.page_sizes):
        yield f"pages of {size}", f"{size} in page_sizes", True, {}, [{"page_size": size}, *_decoding(can, size)]
    for values in SINK_VALUES if can.sinks else ():
        yield f"sinks, {values}", "sinks=True", True, {}, [{"sinks": True, "sink_values": values}, *_masked_sinks(can, values)]
    if can.score_mod:
        yield "score_mod", "score_mod=True", True, {}, [{"score_mod": to_data(S + to_float(Q - KV) * 0.125)}]
    if can.mask_mod:
        yield "mask_mod", "mask_mod=True", True, {}, [{"mask_mod": to_data(KV <= Q + 2)}]
    if {"lse", "dq"} <= set(can.outputs):
        yield "gradient of LSE", "dlse=True", can.dlse, {"dlse": True}, [{"dlse": True}]


def _decoding(can: Capabilities, size: int) -> Iterator[dict[str, Any]]:
    """Yield one query against one page, a page and a token, and two sequences of several pages."""
    if can.unequal:
        yield {"page_size": size, "seqlens_q": (1,), "seqlens_k": (size,)}
        yield {"page_size": size, "seqlens_q": (1, 2), "seqlens_k": (size + 1, 3 * size - 1)}


def _masked_sinks(can: Capabilities, values: SinkValues) -> Iterator[dict[str, Any]]:
    """Yield sinks with groups and with a mask, where they are declared."""
    if can.groups is None or 2 in can.groups:
        yield {"sinks": True, "sink_values": values, "heads": 4, "kv_heads": 2}
    yield from ({"sinks": True, "sink_values": values, "causal": kind} for kind in can.causal if kind)


def _lengths(can: Capabilities, plain: Variant) -> Iterator[_Tried]:
    n, long = _length(can, plain)
    more = [{"seqlens_q": (n,), "seqlens_k": (long,)}, {"seqlens_q": (long,), "seqlens_k": (n,)}]
    yield "unequal lengths", "unequal=True", can.unequal, {"unequal": True}, more
    yield "several tiles", "length_max", True, {}, [{"seqlens_q": (long,), "seqlens_k": (long,)}]
    least = -(-can.min_seqlen_k // (step := math.lcm(*can.multiples))) * step
    yield f"{least} keys", "min_seqlen_k", True, {}, [{"seqlens_q": (least,), "seqlens_k": (least,)}]
    if can.unequal:
        for name, q, k in (("zero_q", 0, n), ("zero_k", n, 0)):
            what = f"sequences without {'queries' if name == 'zero_q' else 'keys'}"
            ragged: dict[str, Any] = {"seqlens_q": (n, q, n), "seqlens_k": (n, k, n)}
            # In a dense batch all sequences are alike.
            changes = [ragged] if "ragged" in can.packings else [{"seqlens_q": (q, q), "seqlens_k": (k, k)}]
            yield what, f"{name}=True", getattr(can, name), {name: True}, changes
    both = can.zero_q and can.zero_k
    yield (
        "empty batch",
        "zero_q=True, zero_k=True",
        both,
        {"zero_q": True, "zero_k": True},
        [{"seqlens_q": (0, 0), "seqlens_k": (0, 0)}],
    )


def _memory(can: Capabilities, _: Variant) -> Iterator[_Tried]:
    yield "slack rows", "slack=True", can.slack, {"slack": True}, [{"slack_q": 3, "slack_k": 5}]
    changes: list[dict[str, Any]] = [
        {"layout_q": Layout(pitch=8), "layout_k": Layout(offset=8), "layout_do": Layout(pitch=16)},
        {"layout_q": Layout(packed=True), "layout_k": Layout(packed=True), "layout_v": Layout(packed=True)},
        {"layout_do": Layout(expanded=True)},
    ]
    yield "any strides", "layouts=True", can.layouts, {"layouts": True}, changes


def _length(can: Capabilities, plain: Variant) -> tuple[int, int]:
    """Return lengths of a little over one tile and three tiles, as far as they are declared: common multiples of both sides."""
    tile, step = plain.config.tile("tile_m", _TILE), math.lcm(*can.multiples)
    most = can.length_max or 1 << 20
    n, long = max(tile + 3, can.min_seqlen_k), 3 * tile + 5
    return min(-(-n // step) * step, most // step * step), min(-(-long // step) * step, most // step * step)


def _grouped(can: Capabilities, change: dict[str, Any], kv_heads: int) -> dict[str, Any]:
    groups = min(can.groups or (1,))
    return {**change, "heads": groups * kv_heads, "kv_heads": kv_heads}


def _changed(kernel: Kernel, variants: Sequence[Variant], changes: dict[str, Any]) -> Case | None:
    """Return the plain Case with `changes`, of the first variant that fits; None where there is no such Problem."""
    wanted = dict(changes)
    if "dim_qk" in wanted:
        wanted["dims"] = wanted.pop("dim_qk"), wanted["dim_v"]
    names = [name for name in ("dtype", "causal", "dims") if name in wanted]
    fitting = [each for each in variants if all(getattr(each, name) == wanted[name] for name in names)]
    try:
        return _case(kernel, (fitting or variants)[0], changes)
    except BadArgument:
        return None


def _case(kernel: Kernel, variant: Variant, changes: dict[str, Any]) -> Case:
    can, fields = kernel.capabilities, dict(changes)
    n, _ = _length(can, variant)
    problem = variant.problem(can)
    recipe = Recipe(seed=7, sinks=fields.pop("sink_values", "moderate"))
    if fields.pop("dlse", False):
        fields["needs"] = replace(problem.needs, dlse=True)
    lengths = {} if can.shapes else {"seqlens_q": (n,), "seqlens_k": (n,)}
    problem = replace(problem, **{**lengths, **fields})
    configs = kernel.configs(problem)
    config = variant.config if variant.config in configs or not configs else configs[0]
    return Case(kernel=kernel.name, problem=problem, recipe=recipe, config=config)
