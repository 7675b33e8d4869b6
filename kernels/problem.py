"""One attention problem without its data, checked so that an impossible one cannot be built."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec

from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.expressions.ranges import Sizes, why_outside
from attnfuzz.kernels.expressions.tree import DEEPEST, captured, parse, size_of, to_data

__all__ = [
    "LAYOUTS",
    "ORDERS",
    "OUTPUT_NAMES",
    "SINKS",
    "Causal",
    "Dtype",
    "Layout",
    "Needs",
    "Order",
    "OutputName",
    "Packing",
    "Problem",
    "strides_of",
]

Dtype = Literal["float16", "bfloat16", "float32"]
Causal = Literal["bottom_right", "top_left"]
Packing = Literal["ragged", "dense"]
Order = Literal["thd", "htd", "bshd", "bhsd", "sbhd"]
OutputName = Literal["o", "lse", "dq", "dk", "dv"]

OUTPUT_NAMES: tuple[OutputName, ...] = ("o", "lse", "dq", "dk", "dv")
ORDERS: dict[Packing, tuple[Order, ...]] = {"ragged": ("thd", "htd"), "dense": ("bshd", "bhsd", "sbhd")}
"""The orders of each packing, the default first."""
LAYOUTS = ("layout_q", "layout_k", "layout_v", "layout_do")
"""The Problem's fields that say how a tensor lies in memory."""
_INT32_MAX = 2**31 - 1
_MOST_ELEMENTS = 2**34
"""Limit for a captured tensor: 64 GiB."""
SINKS = "sinks"
"""Name of the sinks among a Problem's tensors."""
_FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127


class Layout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Memory layout of one tensor, whose shape is that of `Problem`. The default is contiguous in the packing's default order.

    A row is the part of one token that is contiguous: `heads * dim` elements, or `dim` where heads are stored outside tokens.
    """

    order: Order | None = None
    """Stored dimensions, outermost first: "thd" (the default) or "htd" ragged; "bshd" (the default), "bhsd", "sbhd" dense."""
    offset: int = 0
    """Elements between the start of the allocation and the tensor."""
    pitch: int = 0
    """Elements of padding after each row."""
    expanded_heads: bool = False
    """One stored head, shared by all heads with stride 0."""
    packed: bool = False
    """A slice of one allocation whose rows hold k and v, or q, k and v, side by side."""
    expanded: bool = False
    """dO only: one stored element, repeated with stride 0, like the gradient of `o.sum()`."""

    def __post_init__(self) -> None:
        for name in ("offset", "pitch"):
            if getattr(self, name) < 0:
                raise reject(f"layout.{name}", getattr(self, name), "elements cannot be negative", "give 0 or more")
        for name in ("order", "pitch", "expanded_heads", "packed"):
            if self.expanded and getattr(self, name):
                raise reject(f"layout.{name}", getattr(self, name), "an expanded tensor is one element", "leave one of them out")
        for name in ("order", "expanded_heads"):
            if self.packed and getattr(self, name):
                raise reject(
                    f"layout.{name}", getattr(self, name), "a packed tensor is a part of each row", "leave one of them out"
                )


class Needs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The outputs that are needed, and whether there is a gradient of LSE."""

    outputs: tuple[OutputName, ...] = OUTPUT_NAMES
    dlse: bool = False

    def __post_init__(self) -> None:
        wrong = [name for name in self.outputs if name not in OUTPUT_NAMES]
        if not self.outputs or wrong or len(set(self.outputs)) < len(self.outputs):
            raise reject("needs.outputs", self.outputs, "each output's name at most once", f"choose from {OUTPUT_NAMES}")


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One attention problem: lengths, heads, dims, dtype, masks and scale, but no values.

    Ragged tensors are `q (total_q + slack_q, heads, dim_qk)`, `k (total_k + slack_k, kv_heads, dim_qk)`,
    `v (total_k + slack_k, kv_heads, dim_v)`; dense ones have `(batch, seqlen)` in place of the first dimension.
    With `page_size`, keys and values lie in a paged cache: `k_pages (pages, page_size, kv_heads, dim_qk)`, `v_pages` alike, and
    `page_table (batch, most pages of a sequence)`; token j of sequence b is row j % page_size of the page that
    page_table[b, j // page_size] names. With `visible(i, j)` = j < seqlen_k and causal and window and mask_mod,

        s_ij = score_mod(softcap(softmax_scale * q_i . k_j))
        LSE_i = log sum_{visible j} exp(s_ij)          O_i = sum_j exp(s_ij - LSE_i) v_j

    A row that sees no key has O = 0, LSE = -inf and no gradient. With `sinks`, one learned logit a head, the softmax has one
    more column with value 0, unscaled and never masked (StreamingLLM, gpt-oss): LSE_i = log(exp(sink) + sum_j exp(s_ij)), which
    is the sink itself in a row that sees no key; d sink = sum_i exp(sink - LSE_i) (dLSE_i - dO_i . O_i).
    `causal="bottom_right"` is `j <= i + seqlen_k - seqlen_q`, `"top_left"` is `j <= i`.

    Raises:
        BadArgument: an impossible problem, with argument, value, reason and remedy.
    """

    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    dim_qk: int
    dim_v: int
    heads: int = 1
    kv_heads: int = 1
    dtype: Dtype = "float16"
    packing: Packing = "ragged"
    slack_q: int = 0
    slack_k: int = 0
    page_size: int = 0
    causal: Causal | None = None
    window: tuple[int | None, int | None] | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    score_mod: tuple[Any, ...] | None = None
    mask_mod: tuple[Any, ...] | None = None
    layout_q: Layout = Layout()
    layout_k: Layout = Layout()
    layout_v: Layout = Layout()
    layout_do: Layout = Layout()
    needs: Needs = Needs()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields: the Problem was checked when it was made, and is not when it is read."""
        return _unpickled, msgspec.structs.astuple(self)

    def __post_init__(self) -> None:
        for name in ("seqlens_q", "seqlens_k", "window", "score_mod", "mask_mod"):
            msgspec.structs.force_setattr(self, name, _frozen(name, getattr(self, name)))
        self._check_types()
        for name in ("softmax_scale", "softcap"):
            if getattr(self, name) is not None:
                # Equal problems have one spelling: 1 is 1.0, and -0.0 is 0.0.
                msgspec.structs.force_setattr(self, name, float(getattr(self, name)) + 0.0)
        self._check_lengths()
        self._check_heads()
        self._check_scores()
        self._check_layouts()
        self._check_packed()
        self._check_pages()
        self._check_modifiers()

    def _check_types(self) -> None:
        for name in ("heads", "kv_heads", "dim_qk", "dim_v", "slack_q", "slack_k", "page_size"):
            if type(getattr(self, name)) is not int:
                raise reject(name, getattr(self, name), "it must be an integer", "give a whole number")
        for name in ("seqlens_q", "seqlens_k"):
            lengths = getattr(self, name)
            if not isinstance(lengths, tuple) or any(type(n) is not int for n in lengths):
                raise reject(name, lengths, "one integer per sequence is expected", "give a list of whole numbers")
        for name, values in _CHOICES.items():
            if getattr(self, name) not in values:
                raise reject(name, getattr(self, name), "there is no such choice", f"use one of {', '.join(map(repr, values))}")
        if type(self.sinks) is not bool:
            raise reject("sinks", self.sinks, "it says whether there are any", "give true or false")
        for name in ("softmax_scale", "softcap"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and not isinstance(value, bool)) and (name, value) != ("softmax_scale", None):
                raise reject(name, value, "it must be a number", "give a number")
        window = self.window
        if window is not None and (not isinstance(window, tuple) or len(window) != 2 or any(not _side(side) for side in window)):
            raise reject("window", window, "two sides are expected, left and right", "give integers, or null for no limit")
        for name, kind in _PARTS.items():
            if not isinstance(getattr(self, name), kind):
                raise reject(
                    name, getattr(self, name), f"a {kind.__name__} is expected", f"give a {kind.__name__}, or leave it out"
                )

    def _check_lengths(self) -> None:
        if not self.seqlens_q:
            raise reject("seqlens_q", self.seqlens_q, "a batch has at least one sequence", "give one length per sequence")
        if len(self.seqlens_q) != len(self.seqlens_k):
            raise reject(
                "seqlens_k",
                self.seqlens_k,
                f"it has {len(self.seqlens_k)} lengths and seqlens_q has {len(self.seqlens_q)}",
                "give both one length per sequence",
            )
        for name in ("seqlens_q", "seqlens_k"):
            lengths: tuple[int, ...] = getattr(self, name)
            if min(lengths) < 0:
                raise reject(name, lengths, "a length cannot be negative", "use 0 for an empty sequence")
            slack = max(0, getattr(self, f"slack_{name[-1]}"))
            if sum(lengths) + slack > _INT32_MAX:
                total = f"the total with {slack} slack rows" if slack else "the total"
                raise reject(name, lengths, f"{total} does not fit cu_seqlens, which is int32", "use shorter sequences")
            if self.packing == "dense" and len(set(lengths)) > 1:
                raise reject(name, lengths, "a dense batch has one length for all sequences", "use packing='ragged'")
        for name in ("slack_q", "slack_k"):
            if getattr(self, name) < 0:
                raise reject(name, getattr(self, name), "rows cannot be negative", "give 0 or more")

    def _check_heads(self) -> None:
        for name in ("heads", "kv_heads", "dim_qk", "dim_v"):
            if getattr(self, name) < 1:
                raise reject(name, getattr(self, name), "it must be positive", "give 1 or more")
        if self.heads % self.kv_heads:
            raise reject(
                "kv_heads",
                self.kv_heads,
                f"it does not divide heads={self.heads}",
                "every group has the same number of query heads: give a divisor of heads",
            )

    def _check_scores(self) -> None:
        if self.softmax_scale is not None and not math.isfinite(self.softmax_scale):
            raise reject("softmax_scale", self.softmax_scale, "it must be finite", "give a number, or null for dim_qk ** -0.5")
        if self.softmax_scale is not None and abs(self.softmax_scale) > _FLOAT32_MAX:
            raise reject("softmax_scale", self.softmax_scale, "it does not fit float32, in which kernels take it", "give less")
        if not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise reject("softcap", self.softcap, "it must be finite and not negative", "use 0 for no softcap")
        if self.softcap > _FLOAT32_MAX:
            raise reject("softcap", self.softcap, "it does not fit float32, in which kernels take it", "give less")
        for side in self.window or ():
            if side is not None and side < 0:
                raise reject(
                    "window", self.window, "a side counts keys from the diagonal", "give 0 or more, or null for no limit"
                )

    def _check_layouts(self) -> None:
        orders = ORDERS[self.packing]
        for name in LAYOUTS:
            layout: Layout = getattr(self, name)
            if layout.order is not None and layout.order not in orders:
                names = " or ".join(map(repr, orders))
                raise reject(f"{name}.order", layout.order, f"packing={self.packing!r} has no such order", f"use {names}")
            if layout.order == orders[0]:
                # Equal problems have one spelling.
                msgspec.structs.force_setattr(self, name, msgspec.structs.replace(layout, order=None))
            if layout.expanded and name != "layout_do":
                raise reject(f"{name}.expanded", True, "q, k and v are not constants", "use it for layout_do only")

    def _check_packed(self) -> None:
        if self.layout_do.packed:
            raise reject("layout_do.packed", True, "dO is not packed with q, k, v", "leave it out")
        q, k, v = self.layout_q, self.layout_k, self.layout_v
        if k.packed != v.packed or (q.packed and not k.packed):
            flags = (q.packed, k.packed, v.packed)
            raise reject("layout.packed", flags, "k and v lie in one allocation, alone or with q", "pack k and v, or all three")
        together = {each for each in (q, k, v) if each.packed}
        if len(together) > 1:
            raise reject("layout", (q, k, v), "packed tensors lie in the same rows", "give them one offset and one pitch")
        if q.packed and (self.seqlens_q, self.slack_q) != (self.seqlens_k, self.slack_k):
            raise reject(
                "layout_q.packed",
                True,
                "a packed row is one token of q, k and v",
                "give queries and keys the same lengths and slack",
            )

    def _check_pages(self) -> None:
        if self.page_size < 0:
            raise reject("page_size", self.page_size, "a page has tokens", "give 1 or more, or 0 for keys without pages")
        if not self.page_size:
            return
        if self.packing != "ragged":
            raise reject("page_size", self.page_size, "queries of a paged cache are ragged", "use packing='ragged'")
        if self.slack_k or self.layout_k != Layout() or self.layout_v != Layout():
            raise reject("page_size", self.page_size, "pages have a layout of their own", "leave out slack_k, layout_k, layout_v")
        if not set(self.needs.outputs) <= {"o", "lse"}:
            raise reject("page_size", self.page_size, "a cache has no gradient", "ask for o and lse: needs.outputs")

    def _check_modifiers(self) -> None:
        trees = []
        for name, kind in (("score_mod", "float"), ("mask_mod", "bool")):
            data = getattr(self, name)
            if data is None:
                continue
            tree = parse(data)
            if tree.kind != kind or (name == "mask_mod" and tree.scored):
                raise reject(name, str(tree), f"it is of kind {tree.kind}" if tree.kind != kind else "it reads the score",
                             "a score_mod is a float tree, a mask_mod a bool tree of b, h, q_idx and kv_idx")  # fmt: skip
            lengths = set(zip(self.seqlens_q, self.seqlens_k, strict=True))
            if reason := next(filter(None, (why_outside(tree, self.sizes, *pair) for pair in sorted(lengths))), None):
                raise reject(name, str(tree), reason, "keep every index inside for all queries and keys")
            # Equal problems have one spelling.
            msgspec.structs.force_setattr(self, name, to_data(tree))
            trees.append(tree)
        for tensor in captured(*trees):
            if self.sinks and tensor.name == SINKS:
                raise reject("captured.name", SINKS, "the problem's own sinks have that name", "give the tensor another name")
            elements = math.prod(size_of(size, self.sizes) for size in tensor.sizes)
            if elements > _MOST_ELEMENTS:
                reason = f"{tensor.name} would have {elements:,} elements, and {_MOST_ELEMENTS:,} is the limit"
                raise reject("captured.sizes", tensor.sizes, reason, "give smaller sizes, or shorter sequences")

    @property
    def sizes(self) -> Sizes:
        """The sizes that captured tensors refer to; lengths are the longest ones."""
        return {
            "batch": self.batch, "heads": self.heads, "kv_heads": self.kv_heads, "seqlen_q": max(self.seqlens_q),
            "seqlen_k": max(self.seqlens_k),
        }  # fmt: skip

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.seqlens_q)

    @property
    def groups(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        """The factor on q . k: `softmax_scale`, or `dim_qk ** -0.5` by default."""
        return self.dim_qk**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def total_q(self) -> int:
        """Query tokens in all sequences, slack rows not counted."""
        return sum(self.seqlens_q)

    @property
    def total_k(self) -> int:
        """Key tokens in all sequences, slack rows not counted."""
        return sum(self.seqlens_k)


_CHOICES: dict[str, tuple[Any, ...]] = {
    "dtype": get_args(Dtype),
    "causal": (None, *get_args(Causal)),
    "packing": get_args(Packing),
}
_PARTS = {"layout_q": Layout, "layout_k": Layout, "layout_v": Layout, "layout_do": Layout, "needs": Needs}


def _side(side: object) -> bool:
    return side is None or type(side) is int


def _frozen(name: str, value: Any, depth: int = 0) -> Any:
    """Nested lists as nested tuples, so that a Problem read from JSON is hashable."""
    # A captured tensor and its sizes add two levels to its node.
    if depth > DEEPEST + 2:
        raise reject(name, "...", f"it is nested more than {DEEPEST} deep", "write it flatter")
    if isinstance(value, dict | set):
        raise reject(name, value, f"a {type(value).__name__} has no place in it", "use lists, numbers and names")
    return tuple(_frozen(name, item, depth + 1) for item in value) if isinstance(value, list | tuple) else value


def strides_of(packing: Packing, layout: Layout, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return the strides of a tensor of `shape` in the packing's default order, and its elements in memory without the offset.

    Dimensions are stored in the layout's order, with its pitch after each row: the part of a token that lies together.
    """
    own = ORDERS[packing][0]
    order = layout.order or own
    sizes = dict(zip(own, shape, strict=True))
    row_begins = max(order.index(axis) for axis in order if axis in "bst") + 1
    strides, step = {}, 1
    for at in reversed(range(len(order))):
        if at == row_begins - 1:
            step += layout.pitch
        strides[order[at]] = step
        step *= sizes[order[at]]
    return tuple(strides[axis] for axis in own), step


_ANY = Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=1, dim_v=1)


def _unpickled(*values: Any) -> Problem:
    """Return a Problem with these fields, in their order, without checks."""
    problem = copy.copy(_ANY)
    for name, value in zip(Problem.__struct_fields__, values, strict=True):
        msgspec.structs.force_setattr(problem, name, value)
    return problem
