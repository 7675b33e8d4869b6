"""The contract of a kernel: what it gets, what it returns, what it declares."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from attnfuzz.kernels.errors import check_name, reject, shown
from attnfuzz.kernels.modified import tensors_of
from attnfuzz.kernels.problem import LAYOUTS, OUTPUT_NAMES, Causal, Dtype, Layout, OutputName, Packing, Problem

if TYPE_CHECKING:
    import torch

__all__ = [
    "BuildError",
    "Built",
    "Capabilities",
    "CapturedGradients",
    "Config",
    "ConfigValue",
    "Deviations",
    "Device",
    "Gradients",
    "Inputs",
    "Kernel",
    "Outputs",
    "SlackRows",
    "beyond_grid",
    "why_unsupported",
]

Device = Literal["cpu", "cuda"]
GRID_MAX = 65535
"""Blocks along the second and third dimension of a CUDA grid."""
ConfigValue = int | str | bool
SlackRows = Literal["anything", "zero", "untouched"]
"""zero: 0, or -inf in LSE, as of a row that sees no key; untouched: what the memory held before the launch."""


class Config(Mapping[str, ConfigValue]):
    """A kernel's own choices (tile sizes, stages, threads, variant): a frozen, hashable mapping with sorted names.

    Raises:
        BadArgument: a name cannot be that of a Python argument.
    """

    __slots__ = ("_items", "_text")

    def __init__(self, values: Mapping[str, ConfigValue] | None = None, /, **named: ConfigValue) -> None:
        items = {**(values or {}), **named}
        for name in items:
            check_name("config", name, "a choice is named as a Python argument is")
        self._items: dict[str, ConfigValue] = dict(sorted(items.items()))
        # Configs are compared several times for each Case.
        try:
            self._text = json.dumps(self._items, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise reject(
                "config", values or named, f"a choice is no JSON value ({error})", "give numbers, texts and booleans"
            ) from None

    def __getitem__(self, name: str) -> ConfigValue:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        # By text: 1 and True are equal values, but not the same choice.
        return isinstance(other, Config) and self._text == other._text

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in self._items.items())})"

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._items.items())

    def integer(self, name: str) -> int:
        """The value of `name`, which must be an integer."""
        value = self._items[name]
        if not isinstance(value, int):
            raise TypeError(f"config {name}={value!r} is not an integer")
        return value

    def tile(self, name: str, default: int = 1) -> int:
        """The tile size `name`, or `default` for a kernel without one: strategies draw lengths around it."""
        return self.integer(name) if name in self._items else default

    def canonical(self) -> str:
        """Sorted JSON: the Config's identity."""
        return self._text


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
    half_partials: bool = False
    """Partial dK, dV sums are rounded to the input dtype before they are added."""
    ds_from_rounded_p: bool = False
    """dS is made from P after its rounding to the input dtype, and rounded again."""
    lse_base2: bool = False
    """LSE is returned as log2."""
    tf32_on: tuple[Device, ...] = ()
    """Devices where float32 products are computed with tf32 operands (u = 2^-10 per operand: truncated)."""


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
    softcap: bool = False
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
    scale_any: bool = False
    """softmax_scale may be zero or negative."""
    devices: tuple[Device, ...] = ("cuda",)
    architectures: tuple[str, ...] | None = None
    """CUDA architectures that the kernel is compiled for ("sm_90a"); None = any. `attnfuzz compile` tries them."""
    compiles_on: tuple[Device, ...] = ("cuda",)
    """Devices where a build takes seconds: a campaign there draws from few variants and compiles them first, in parallel."""
    outputs: tuple[OutputName, ...] = OUTPUT_NAMES
    dlse: bool = False
    deterministic: tuple[OutputName, ...] = ()
    """Outputs that are bitwise equal from run to run."""
    deviations: Deviations = Deviations()

    def dtypes_for(self, device: Device) -> tuple[Dtype, ...]:
        """The dtypes declared for `device`."""
        return self.dtypes_on.get(device, self.dtypes)


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Tensors of one Case, all on one device, in the shapes and layouts of `Problem`: use each one's own strides.

    `cu_seqlens_q`, `cu_seqlens_k` are `(batch + 1,)` int32 (ragged and dense). `d_lse` is shaped like LSE, float32. `captured`
    are the tensors that the modifiers read, in the order of `modified.tensors_of(problem)`: float32 or int32.
    """

    problem: Problem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_o: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    d_lse: torch.Tensor | None = None
    captured: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """Results of a kernel; None where it does not produce an output.

    `o` like q with dim_v, `dq, dk, dv` like q, k, v, in the input dtype. `lse` is float32, natural log:
    `(heads, total_q + slack_q)` ragged, `(batch, heads, seqlen_q + slack_q)` dense. Slack rows hold what the kernel declares
    (`Capabilities.slack_rows`).
    """

    o: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None
    d_captured: tuple[torch.Tensor | None, ...] = ()
    """Gradient of each captured tensor, float32, or None where it takes none."""


class BuildError(Exception):
    """A kernel could not be compiled: the text is the compiler's."""


CapturedGradients: TypeAlias = "tuple[torch.Tensor | None, ...]"
"""As `Outputs.d_captured`."""
Gradients: TypeAlias = (
    "tuple[torch.Tensor, torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor, CapturedGradients]"
)
"""(dq, dk, dv), and those of captured tensors where they are needed."""


class Built(Protocol):
    """A kernel compiled for one Problem's compile key, ready to run that Problem."""

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(o, lse)."""

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Gradients:
        """(dq, dk, dv) of sum(d_o * o) (+ sum(d_lse * lse) where d_lse is given).

        A kernel with `captured_gradients` adds them where a modifier of the problem reads a tensor that takes one.
        """


@runtime_checkable
class Kernel(Protocol):
    """A subject under test."""

    @property
    def name(self) -> str:
        """Dotted name, backend first: "tilelang.varlen"."""

    @property
    def backend(self) -> str:
        """ "tilelang", "triton", "torch", ..."""

    @property
    def files(self) -> tuple[str, ...]:
        """Source files whose change means that this kernel changed."""

    @property
    def capabilities(self) -> Capabilities:
        """The abilities that the kernel declares."""

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        """The Configs that may be drawn for `problem`, the default first."""

    def unavailable(self, device: Device) -> str | None:
        """Why this kernel cannot run on `device` of this machine (a missing package, no compiler), or None."""

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        """Why this kernel cannot take `problem`, or None: at least `why_unsupported(...)`."""

    def compile_key(self, problem: Problem, config: Config) -> str:
        """Everything the compiled code depends on: equal keys share one compile. Called only for what `supports` accepts."""

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        """Compile (or take from the cache) for `problem`.

        Raises:
            BuildError: the compiler refused.
        """


def why_unsupported(capabilities: Capabilities, problem: Problem, device: Device) -> str | None:
    """The reason why a kernel with `capabilities` does not take `problem` on `device`, or None when it does."""
    return (
        _why_not_form(capabilities, problem, device)
        or _why_not_lengths(capabilities, problem)
        or _why_not_scores(capabilities, problem)
    )


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
    if can.groups is not None and problem.groups not in can.groups:
        return f"groups={problem.groups}: supports {', '.join(map(str, can.groups))}"
    for name in LAYOUTS:
        if not can.layouts and getattr(problem, name) != Layout():
            return f"{name}={shown(getattr(problem, name))}: only contiguous tensors"
    return None


def _why_not_lengths(can: Capabilities, problem: Problem) -> str | None:
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
    return None


def _why_not_scores(can: Capabilities, problem: Problem) -> str | None:
    if problem.causal not in can.causal:
        return f"causal={problem.causal!r}: supports {', '.join(map(repr, can.causal))}"
    for name in ("window", "softcap", "score_mod", "mask_mod"):
        if getattr(problem, name) not in (None, 0, (None, None)) and not getattr(can, name):
            return f"{name}={shown(getattr(problem, name))}: not supported"
    tensors = tensors_of(problem)
    if not can.captured and tensors:
        names = ", ".join(each.name for each in tensors)
        return f"score_mod, mask_mod: they read {names[:200]}; captured tensors are not supported"
    if not can.captured_gradients and any(each.gradient for each in tensors):
        return "score_mod: gradients of captured tensors are not supported"
    if not can.scale_any and problem.scale <= 0:
        return f"softmax_scale={problem.scale}: only positive scales"
    missing = [name for name in problem.needs.outputs if name not in can.outputs]
    if missing:
        return f"needs={missing}: produces {', '.join(can.outputs)}"
    if problem.needs.dlse and not can.dlse:
        return "needs.dlse: takes no gradient of LSE"
    return None
