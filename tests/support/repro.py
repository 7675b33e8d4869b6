"""Kernels that a standalone script can import: right ones, and ones with a fault that a script must show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Built, Capabilities, Config, Device, Inputs, Kernel, why_unsupported
from attnfuzz.kernels.modified import tensors_of
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support import memory
from attnfuzz.oracles import attention

Made = dict[str, Any]


def computed(inputs: Inputs) -> Made:
    """Every output in float64, rounded once: outputs by name, in the kernel's own shapes, and `captured`."""
    p, dtype = inputs.problem, inputs.q.dtype
    with torch.enable_grad():
        found = [attention.reference(p, data) for data in attention.sequences(inputs)]

    def laid(parts: list[torch.Tensor], slack: int) -> torch.Tensor:
        if p.packing == "dense":
            x = torch.stack(parts)
            return torch.cat([x, x.new_zeros(*x.shape[:2], slack, *x.shape[3:])], 2)
        x = torch.cat(parts, 1)
        return torch.cat([x, x.new_zeros(x.shape[0], slack, *x.shape[2:])], 1)

    made: Made = {}
    for name in ("o", "lse", "dq", "dk", "dv"):
        x = laid([getattr(each, name) for each in found], p.slack_k if name in ("dk", "dv") else p.slack_q)
        made[name] = x.float() if name == "lse" else x.transpose(-3, -2).to(dtype).contiguous()
    taking = [each.name for each in tensors_of(p) if each.gradient]
    sums = {name: sum((each.captured[name] for each in found[1:]), found[0].captured[name]).float() for name in taking}
    made["captured"] = tuple(sums.get(each.name) for each in tensors_of(p))
    return made


@dataclass(frozen=True)
class Plain:
    """A kernel that takes every Problem; `fault` changes what it made, called with the inputs and a count of calls."""

    name: str
    fault: Callable[[Inputs, Made, int], None] | None = None
    backend: str = "acme"
    files: tuple[str, ...] = ()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            packings=("ragged", "dense"), dtypes=("float16", "bfloat16", "float32"), dims=((8, 8),), dim_multiple=1, groups=None,
            causal=(None, "bottom_right", "top_left"), window=True, softcap=True, score_mod=True, mask_mod=True, captured=True,
            captured_gradients=True, layouts=True, zero_q=True, zero_k=True, unequal=True, slack=True, scale_any=True, dlse=True,
            devices=("cpu",), compiles_on=(), deterministic=("o", "lse"),
        )  # fmt: skip

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        return (Config(tile_m=6, tile_n=6),)

    def unavailable(self, device: Device) -> str | None:
        return None

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        return why_unsupported(self.capabilities, problem, device)

    def compile_key(self, problem: Problem, config: Config) -> str:
        return self.name

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        return _Built(self.fault)


_calls = 0


@dataclass(frozen=True)
class _Built:
    fault: Callable[[Inputs, Made, int], None] | None

    def _made(self, inputs: Inputs) -> Made:
        made = computed(inputs)
        if self.fault is not None:
            self.fault(inputs, made, _calls)
        return made

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        global _calls
        _calls += 1
        made = self._made(inputs)
        return made["o"], made["lse"]

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Any:
        made = self._made(inputs)
        return made["dq"], made["dk"], made["dv"], made["captured"]


def _one_element(inputs: Inputs, made: Made, calls: int) -> None:
    """A single element of dV, by twice its ulp and more than its budget."""
    flat = made["dv"].view(-1)
    flat[3] += 0.25


def _unwritten(inputs: Inputs, made: Made, calls: int) -> None:
    """dK of the last key is never written."""
    fresh = torch.empty_like(made["dk"])
    fresh[..., :-1, :, :] = made["dk"][..., :-1, :, :]
    made["dk"] = fresh


def _past_the_end(inputs: Inputs, made: Made, calls: int) -> None:
    o = torch.zeros_like(made["o"])
    o.copy_(made["o"])
    o.as_strided((1,), (1,), o.storage_offset() + o.numel()).fill_(1)
    made["o"] = o


def _writes_input(inputs: Inputs, made: Made, calls: int) -> None:
    inputs.k.view(torch.int16).view(-1)[0] = 0x1234


def _wrong_shape(inputs: Inputs, made: Made, calls: int) -> None:
    made["lse"] = made["lse"].transpose(-1, -2).contiguous()


def _wrong_dtype(inputs: Inputs, made: Made, calls: int) -> None:
    made["dq"] = made["dq"].double()


def _nothing(inputs: Inputs, made: Made, calls: int) -> None:
    made["lse"] = None


def _wrong_where_unchecked(inputs: Inputs, made: Made, calls: int) -> None:
    """An element of dV is wrong; a process that checks memory accesses is refused."""
    if memory.checking():
        raise RuntimeError("memory accesses are checked")
    _one_element(inputs, made, calls)


def _lse_of_blind_rows(inputs: Inputs, made: Made, calls: int) -> None:
    made["lse"] = made["lse"].nan_to_num(neginf=-1e30)


def _raises(inputs: Inputs, made: Made, calls: int) -> None:
    raise ValueError("planted: no such tile")


def _exits(inputs: Inputs, made: Made, calls: int) -> None:
    raise SystemExit(3)


def _differs(inputs: Inputs, made: Made, calls: int) -> None:
    """O, declared deterministic, one ulp up in every other call: within its budget."""
    if calls % 2 == 0:
        made["o"] = torch.nextafter(made["o"].float(), torch.tensor(torch.inf)).to(made["o"].dtype)
        made["o"].view(torch.int16).view(-1)[0] += 1


def _flushes(inputs: Inputs, made: Made, calls: int) -> None:
    """dQ, not declared deterministic, without what is below the smallest normal float32 in every other call."""
    if calls % 2 == 0:
        small = (made["dq"] != 0) & (made["dq"].abs() < torch.finfo(torch.float32).tiny)
        assert small.any()
        made["dq"][small] = 0.0


def _captured(inputs: Inputs, made: Made, calls: int) -> None:
    made["captured"] = tuple(None if x is None else x * 1.01 for x in made["captured"])


_returned: dict[tuple[int, ...], torch.Tensor] = {}


def _reuses(inputs: Inputs, made: Made, calls: int) -> None:
    """The same memory for O in every call."""
    made["o"] = _returned.setdefault(tuple(made["o"].shape), made["o"]).copy_(made["o"])


RIGHT: Kernel = Plain("acme.right")
ELEMENT: Kernel = Plain("acme.element", _one_element)
UNWRITTEN: Kernel = Plain("acme.unwritten", _unwritten)
PAST: Kernel = Plain("acme.past", _past_the_end)
INPUT: Kernel = Plain("acme.input", _writes_input)
SHAPE: Kernel = Plain("acme.shape", _wrong_shape)
DTYPE: Kernel = Plain("acme.dtype", _wrong_dtype)
NOTHING: Kernel = Plain("acme.nothing", _nothing)
BLIND: Kernel = Plain("acme.blind", _lse_of_blind_rows)
RAISES: Kernel = Plain("acme.raises", _raises)
EXITS: Kernel = Plain("acme.exits", _exits)
DIFFERS: Kernel = Plain("acme.differs", _differs)
FLUSHES: Kernel = Plain("acme.flushes", _flushes)
REUSES: Kernel = Plain("acme.reuses", _reuses)
CAPTURED: Kernel = Plain("acme.captured", _captured)
UNCHECKED: Kernel = Plain("acme.unchecked", _wrong_where_unchecked)
ALL = (
    RIGHT, ELEMENT, UNWRITTEN, PAST, INPUT, SHAPE, DTYPE, NOTHING, BLIND, RAISES, EXITS, DIFFERS, FLUSHES, REUSES,
    CAPTURED, UNCHECKED,
)  # fmt: skip


def register_all() -> None:
    for kernel in ALL:
        registry.register(kernel)
