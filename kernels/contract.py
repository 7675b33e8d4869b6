"""The contract of a kernel: what it gets, what it returns, what it declares."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from attnfuzz.kernels.capabilities import (
    Capabilities,
    Deviations,
    Device,
    Shape,
    SlackRows,
    WindowForm,
    beyond_grid,
    shape_fields,
    why_unsupported,
    window_of,
)
from attnfuzz.kernels.errors import BadArgument, check_name, reject
from attnfuzz.kernels.problem import Problem

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
    "Shape",
    "SlackRows",
    "WindowForm",
    "beyond_grid",
    "protocol_of",
    "shape_fields",
    "why_unsupported",
    "window_of",
]

ConfigValue = int | str | bool


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


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Tensors of one Case, all on one device, in the shapes and layouts of `Problem`: use each one's own strides.

    `cu_seqlens_q`, `cu_seqlens_k` are `(batch + 1,)` int32 (ragged and dense). `d_lse` is shaped like LSE, float32. `captured`
    are the tensors that the modifiers read, in the order of `modified.tensors_of(problem)`: float32 or int32; the last one are
    the `sinks` where the Problem has them.
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
    k_pages: torch.Tensor | None = None
    v_pages: torch.Tensor | None = None
    """A paged cache, `(pages, page_size, kv_heads, dim)`; k and v hold the same tokens in order, for the oracle alone: a kernel
    that uses them gets an error."""
    page_table: torch.Tensor | None = None
    """`(batch, most pages of a sequence)` int32; entries behind a sequence's last page name a page of NaN."""
    seqlens_k: torch.Tensor | None = None
    """`(batch,)` int32, beside a paged cache."""

    @property
    def sinks(self) -> torch.Tensor | None:
        """The sinks, float32 `(heads,)`, finite and exact in float16 and bfloat16 too; None where the Problem has none."""
        return self.captured[-1] if self.problem.sinks else None

    def for_kernel(self) -> Inputs:
        """Return them as a kernel gets them: beside a paged cache, whatever uses k or v raises a BadArgument."""
        if self.page_table is None:
            return self
        return dataclasses.replace(self, k=_beside_pages("k"), v=_beside_pages("v"))


@functools.cache
def _beside_pages(name: str) -> torch.Tensor:
    """Return what stands for k or v beside a paged cache: a tensor of which every use is an error."""
    import torch

    class Absent(torch.Tensor):  # type: ignore[misc]
        """A tensor without values."""

        @classmethod
        def __torch_function__(cls, *_: object, **__: object) -> Any:
            """Refuse any function, method or attribute of torch."""
            reason = "keys and values of this Problem are in pages"
            raise BadArgument(f"inputs.{name}: {reason}; read inputs.{name}_pages, by inputs.page_table and inputs.seqlens_k")

        def __repr__(self, **_: object) -> str:
            """As text, for debuggers."""
            return f"<no {name} beside {name}_pages>"

    return torch.empty(0, device="cpu").as_subclass(Absent)


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
    """Gradient of each captured tensor, float32, or None where it takes none; that of sinks, the last, may have q's dtype."""


class BuildError(Exception):
    """A kernel could not be compiled: the text is the compiler's."""


CapturedGradients: TypeAlias = "tuple[torch.Tensor | None, ...]"
"""As `Outputs.d_captured`."""
Gradients: TypeAlias = (
    "tuple[torch.Tensor, torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor, CapturedGradients]"
)
"""(dq, dk, dv), and those of captured tensors where they are needed: `(dq, dk, dv, (d_sinks,))` with sinks."""


class Built(Protocol):
    """A kernel compiled for one Problem's compile key, ready to run that Problem.

    It may keep something from forward to the backward that follows, if `build` returns a new one each time: other calls may come
    between the two.
    """

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(o, lse)."""

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Gradients:
        """(dq, dk, dv) of sum(d_o * o) (+ sum(d_lse * lse) where d_lse is given).

        A kernel with `captured_gradients` adds them where a modifier of the problem reads a tensor that takes one.
        """


@runtime_checkable
class Kernel(Protocol):
    """A subject under test.

    It may have a member `process`, a `ProcessSetup`: what each process needs before its first launch. And a member `proof`, a
    line of text: what has been shown of it where the hardware it is made for was not at hand. And a method
    `protocol(problem, config, schedule)`, which builds it for the CPU as warp roles: see `protocol_of`.
    """

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


def protocol_of(kernel: Kernel) -> Callable[[Problem, Config, tuple[int, ...]], Built] | None:
    """Return the kernel's own `protocol`, or None where it has none.

    What it builds runs on the CPU as the kernel's warp roles, under a schedule: the choice at each point at which several of them
    may go on, or an asynchronous operation may finish; -N at its start holds back the Nth role, which goes on only where nothing
    else can. A launch raises a `ProtocolFault` if they do not wait as they must.
    """
    return getattr(kernel, "protocol", None)
