"""What a kernel declares that it can do, and why it does not take a Problem."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from attnfuzz.kernels.errors import shown
from attnfuzz.kernels.modified import tensors_of
from attnfuzz.kernels.problem import LAYOUTS, OUTPUT_NAMES, SINKS, Causal, Dtype, Layout, OutputName, Packing, Problem

__all__ = [
    "Capabilities",
    "Deviations",
    "Device",
    "GraphStep",
    "Shape",
    "SlackRows",
    "WindowForm",
    "beyond_grid",
    "shape_fields",
    "why_not_shape",
    "why_unsupported",
    "window_of",
]

Device = Literal["cpu", "cuda"]
GRID_MAX = 65535
"""Blocks along the second and third dimension of a CUDA grid."""
SlackRows = Literal["anything", "zero", "untouched"]
"""zero: 0, or -inf in LSE, as of a row that sees no key; untouched: what the memory held before the launch."""
GraphStep = Literal["forward", "backward"]
WindowForm = Literal["left", "right", "both", "equal"]
"""The sides of a window that have a limit; equal: both, and the same one."""
Shape = tuple[int, int, int, int, int]
"""(batch, heads, kv_heads, seqlen_q, seqlen_k): all that a kernel compiled for one shape has fixed, beside dims and dtype."""


class Deviations(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Differences of a kernel's arithmetic from the verdict's assumptions. Each declaration widens its budget by that term.

    Assumed: P <= 1 against the true running maximum, the row sum from fp32 P, P and dS rounded once to the input
    dtype, fp32 accumulation, one final rounding.
    """

    prescaled_q: bool = False
    """q * softmax_scale * log2(e) is rounded to the input dtype before the first product."""
    l_from_rounded_p: bool = False
    """The row sum adds P after its rounding to the input dtype."""
    lazy_rescale: bool = False
    """The running maximum may lag, so that the largest P is not exactly 1."""
    normalised_p: bool = False
    """P is divided by the row sum so far before it is rounded to the input dtype."""
    half_partials: bool = False
    """Partial sums of dK and dV are rounded to the input dtype before they are added; those of O: `half_partial_o`."""
    ds_from_rounded_p: bool = False
    """dS is made from P after its rounding to the input dtype, and rounded again."""
    half_scaled_k: bool = False
    """In the backward, k * softmax_scale (* log2(e)) is rounded to the input dtype, for the scores and for dQ."""
    half_delta_products: bool = False
    """The products of dO and O are rounded to the input dtype before they are added to Delta."""
    half_partial_o: bool = False
    """O of each split of the keys (split-K) is rounded to the input dtype before the splits are combined in float32."""
    half_split_lse: bool = False
    """LSE of each split of the keys is rounded to the input dtype before the splits are combined by it."""
    split_lse_weights: bool = False
    """O of each split of the keys is multiplied by exp(LSE of the split - LSE), both rounded to float32: these weights do not
    add up to 1 where |LSE| is large."""
    lse_base2: bool = False
    """LSE is returned as log2."""
    tf32_on: tuple[Device, ...] = ()
    """Devices where float32 products are computed with tf32 operands (u = 2^-10 per operand: truncated)."""
    tf32x3_on: tuple[Device, ...] = ()
    """Devices where a float32 product is the sum of three tf32 products of its operands' high and low halves ("tf32x3", 3xTF32):
    nearly exact, but added up on tensor cores, which truncate."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The abilities of a kernel, as data. Strategies draw only what is declared; the defaults describe the simplest kernel."""

    packings: tuple[Packing, ...] = ("ragged",)
    dtypes: tuple[Dtype, ...] = ("float16", "bfloat16")
    dtypes_on: dict[Device, tuple[Dtype, ...]] = {}
    """Dtypes on one device, where they differ from `dtypes`."""
    dims: tuple[tuple[int, int], ...] = ((64, 64),)
    """(dim_qk, dim_v) pairs that strategies draw, simplest first."""
    dim_multiple: int | None = None
    """Any dims that are multiples of this are supported too, up to `dim_max`; None: only the pairs of `dims`."""
    dim_max: int = 256
    groups: tuple[int, ...] | None = (1,)
    """Query heads per key/value head; None = any."""
    causal: tuple[Causal | None, ...] = (None,)
    window: bool = False
    window_forms: tuple[WindowForm, ...] = ("left", "right", "both")
    """Windows that are taken, where there are any, the simplest first. Under a causal mask the right side hides nothing,
    whatever it is, so that "left", "both" and "equal" are one there."""
    window_multiple: int = 1
    """Every limit of a window is a multiple of it."""
    softcap: bool = False
    sinks: bool = False
    """One learned logit a head in the softmax; where there is a backward, it gives their gradient too."""
    score_mod: bool = False
    mask_mod: bool = False
    captured: bool = False
    """Tensors that a score_mod or mask_mod reads."""
    captured_gradients: bool = False
    """Gradients of the tensors that a score_mod reads; `backward` returns them too."""
    layouts: bool = False
    """Every memory layout that a Problem can have: the kernel reads q, k, v and dO by their strides."""
    length_max: int | None = None
    min_seqlen_k: int = 1
    """The shortest sequence of keys, except empty ones."""
    multiple_q: int = 1
    """Every seqlen_q is a multiple of it."""
    multiple_k: int = 1
    """Every seqlen_k is a multiple of it."""
    batch_max: int | None = None
    """Sequences of a batch, at most."""
    heads_max: int | None = None
    """Query heads, at most."""
    page_sizes: tuple[int, ...] = (0,)
    """Tokens of a page of a paged key/value cache, the simplest first; 0: keys and values without pages."""
    shapes: tuple[Shape, ...] = ()
    """The only shapes that the kernel takes, `(batch, heads, kv_heads, seqlen_q, seqlen_k)`, smallest first; all sequences of a
    batch have one length. Empty: any within the other limits."""
    zero_q: bool = False
    """Sequences without queries."""
    zero_k: bool = False
    """Sequences without keys."""
    unequal: bool = False
    """seqlen_q != seqlen_k."""
    slack: bool = False
    """Rows allocated beyond cu_seqlens[-1]."""
    slack_rows: SlackRows = "anything"
    """What a launch leaves in the slack rows of its outputs; anything else is a failure."""
    scale_given: bool = True
    """softmax_scale may be given; otherwise it is always the default, dim_qk ** -0.5."""
    scale_any: bool = False
    """softmax_scale may be zero or negative."""
    devices: tuple[Device, ...] = ("cuda",)
    architectures: tuple[str, ...] | None = None
    """CUDA architectures that the kernel is compiled for ("sm_90a"); None = any. `attnfuzz compile` tries them."""
    compiles_on: tuple[Device, ...] = ("cuda",)
    """Devices where a build takes seconds: a campaign there draws from few variants and compiles them first, in parallel."""
    compiles_each_shape: bool = False
    """Launches on a GPU compile, or plan, for each of most combinations of batch, heads, lengths, windows or strides, for a good
    part of a second or more: several Cases of each shape are drawn, with other values."""
    outputs: tuple[OutputName, ...] = OUTPUT_NAMES
    dlse: bool = False
    deterministic: tuple[OutputName, ...] = ()
    """Outputs that are bitwise equal from run to run."""
    cuda_graphs: tuple[GraphStep, ...] = ()
    """Calls that can be captured into a CUDA graph after a first one, and replayed with other values in the same tensors."""
    deviations: Deviations = Deviations()

    def dtypes_for(self, device: Device) -> tuple[Dtype, ...]:
        """The dtypes declared for `device`."""
        return self.dtypes_on.get(device, self.dtypes)

    @property
    def multiples(self) -> tuple[int, int]:
        """What lengths of queries and of keys are multiples of; a common multiple of both where lengths are equal."""
        both = math.lcm(self.multiple_q, self.multiple_k)
        return (self.multiple_q, self.multiple_k) if self.unequal else (both, both)

    @property
    def least_window(self) -> tuple[int | None, int | None]:
        """A window of few keys, of both sides where that is taken."""
        form = "both" if {"both", "equal"} & {*self.window_forms} else self.window_forms[0]
        return window_of(form, self.window_multiple, self.window_multiple)

    @property
    def least_shape(self) -> Shape:
        """The smallest shape with queries and keys."""
        if self.shapes:
            return self.shapes[0]
        groups, (step_q, step_k) = min(self.groups or (1,)), self.multiples
        n_k = -(-self.min_seqlen_k // step_k) * step_k
        return 1, groups, 1, step_q if self.unequal else n_k, n_k


def shape_fields(shape: Shape) -> dict[str, Any]:
    """Return the fields of a Problem that a shape sets."""
    batch, heads, kv_heads, n_q, n_k = shape
    return {"seqlens_q": (n_q,) * batch, "seqlens_k": (n_k,) * batch, "heads": heads, "kv_heads": kv_heads}


def window_of(form: WindowForm, left: int, right: int) -> tuple[int | None, int | None]:
    """Return the window of a form with these limits, where it has them; an equal one has the left limit on both sides."""
    match form:
        case "left":
            return left, None
        case "right":
            return None, right
        case "both":
            return left, right
        case "equal":
            return left, left


def why_unsupported(capabilities: Capabilities, problem: Problem, device: Device) -> str | None:
    """The reason why a kernel with `capabilities` does not take `problem` on `device`, or None when it does."""
    # A Case's Problem is asked for five times in a row. The objects are kept, so that no other one has their ids.
    key = id(capabilities), id(problem), device
    if (known := _ANSWERS.get(key)) is None:
        reason = (
            _why_not_form(capabilities, problem, device)
            or why_not_shape(capabilities, problem)
            or _why_not_scores(capabilities, problem)
        )
        if len(_ANSWERS) >= _KEPT:
            _ANSWERS.clear()
        _ANSWERS[key] = known = capabilities, problem, reason
    return known[2]


_KEPT = 512
_ANSWERS: dict[tuple[int, int, Device], tuple[Capabilities, Problem, str | None]] = {}


def beyond_grid(problem: Problem, device: Device) -> str | None:
    """Why `problem` exceeds a CUDA grid whose second and third dimensions are heads and sequences, or None."""
    name, count = max(("batch", problem.batch), ("heads", problem.heads), key=lambda each: each[1])
    if device == "cuda" and count > GRID_MAX:
        return f"{name}={count}: a launch has at most {GRID_MAX} of them; call it in parts"
    return None


def _why_not_form(can: Capabilities, problem: Problem, device: Device) -> str | None:
    if device not in can.devices:
        return f"device={device!r}: runs on {', '.join(can.devices)} only"
    if problem.dtype not in can.dtypes_for(device):
        return f"dtype={problem.dtype!r}: supports {', '.join(can.dtypes_for(device))} on {device}"
    if problem.packing not in can.packings:
        return f"packing={problem.packing!r}: supports {', '.join(can.packings)}"
    dims = (problem.dim_qk, problem.dim_v)
    multiple = can.dim_multiple
    if dims not in can.dims and (multiple is None or any(dim % multiple or dim > can.dim_max for dim in dims)):
        also = f" and multiples of {multiple} up to {can.dim_max}" if multiple else ""
        return f"dim_qk, dim_v={dims}: supports {', '.join(map(str, can.dims))}{also}"
    if problem.page_size not in can.page_sizes:
        return f"page_size={problem.page_size}: supports {', '.join(map(str, can.page_sizes))}"
    for name in LAYOUTS:
        if not can.layouts and getattr(problem, name) != Layout():
            return f"{name}={shown(getattr(problem, name))}: only contiguous tensors"
    return None


def why_not_shape(can: Capabilities, problem: Problem) -> str | None:
    """The reason why a kernel does not take the Problem's lengths, heads or batch, or None."""
    if can.groups is not None and problem.groups not in can.groups:
        return f"groups={problem.groups}: supports {', '.join(map(str, can.groups))}"
    if not can.zero_q and 0 in problem.seqlens_q:
        return f"seqlens_q={shown(problem.seqlens_q)}: no sequences without queries"
    if not can.zero_k and 0 in problem.seqlens_k:
        return f"seqlens_k={shown(problem.seqlens_k)}: no sequences without keys"
    short = min((n for n in problem.seqlens_k if n), default=can.min_seqlen_k)
    if short < can.min_seqlen_k:
        return f"seqlens_k={shown(problem.seqlens_k)}: at least {can.min_seqlen_k} keys a sequence"
    if not can.unequal and problem.seqlens_q != problem.seqlens_k:
        return f"seqlens_q={shown(problem.seqlens_q)}, seqlens_k={shown(problem.seqlens_k)}: only equal lengths"
    if not can.slack and (problem.slack_q or problem.slack_k):
        return f"slack_q={problem.slack_q}, slack_k={problem.slack_k}: no rows beyond the last sequence"
    longest = max(problem.seqlens_q + problem.seqlens_k)
    if can.length_max is not None and longest > can.length_max:
        return f"seqlen={longest}: at most {can.length_max}"
    return _why_not_limits(can, problem)


def _why_not_limits(can: Capabilities, problem: Problem) -> str | None:
    for side in ("q", "k"):
        lengths, step = getattr(problem, f"seqlens_{side}"), getattr(can, f"multiple_{side}")
        if any(n % step for n in lengths):
            return f"seqlens_{side}={shown(lengths)}: only multiples of {step}"
    for name, most in (("batch", can.batch_max), ("heads", can.heads_max)):
        if most is not None and getattr(problem, name) > most:
            return f"{name}={getattr(problem, name)}: at most {most}"
    if can.shapes and (shape := _shape_of(problem)) not in can.shapes:
        known = ", ".join(map(str, can.shapes))
        return f"batch, heads, kv_heads, seqlen_q, seqlen_k={shape}: supports {known[:200]}"
    return None


def _shape_of(problem: Problem) -> Shape | tuple[tuple[int, ...], ...]:
    """Return the Problem's shape; where sequences have several lengths, the lengths, which are no shape."""
    if len({*problem.seqlens_q}) > 1 or len({*problem.seqlens_k}) > 1:
        return problem.seqlens_q, problem.seqlens_k
    return problem.batch, problem.heads, problem.kv_heads, problem.seqlens_q[0], problem.seqlens_k[0]


def _why_not_window(can: Capabilities, problem: Problem) -> str | None:
    """Why the sides of the Problem's window are not taken, or None."""
    left, right = problem.window or (None, None)
    step, forms = can.window_multiple, {*can.window_forms}
    if any(side is not None and side % step for side in (left, right)):
        return f"window={problem.window}: only multiples of {step}"
    if problem.causal is not None:
        fits = left is None or bool(forms & {"left", "both", "equal"})
    elif left is None or right is None:
        fits = left is right or ("right" if left is None else "left") in forms
    else:
        fits = "both" in forms or ("equal" in forms and left == right)
    return None if fits else f"window={problem.window}: supports windows of these forms: {', '.join(can.window_forms)}"


def _why_not_scores(can: Capabilities, problem: Problem) -> str | None:
    if problem.causal not in can.causal:
        return f"causal={problem.causal!r}: supports {', '.join(map(repr, can.causal))}"
    for name in ("window", "softcap", "sinks", "score_mod", "mask_mod"):
        if getattr(problem, name) not in (None, 0, (None, None)) and not getattr(can, name):
            return f"{name}={shown(getattr(problem, name))}: not supported"
    if problem.window is not None and (reason := _why_not_window(can, problem)) is not None:
        return reason
    tensors = [each for each in tensors_of(problem) if not (problem.sinks and each.name == SINKS)]
    if not can.captured and tensors:
        names = ", ".join(each.name for each in tensors)
        return f"score_mod, mask_mod: they read {names[:200]}; captured tensors are not supported"
    if not can.captured_gradients and any(each.gradient for each in tensors):
        return "score_mod: gradients of captured tensors are not supported"
    if not can.scale_given and problem.softmax_scale is not None:
        return f"softmax_scale={problem.softmax_scale}: only the default, dim_qk ** -0.5"
    if not can.scale_any and problem.scale <= 0:
        return f"softmax_scale={problem.scale}: only positive scales"
    missing = [name for name in problem.needs.outputs if name not in can.outputs]
    if missing:
        return f"needs={missing}: produces {', '.join(can.outputs)}"
    if problem.needs.dlse and not can.dlse:
        return "needs.dlse: takes no gradient of LSE"
    return None
