"""A tiled flash attention emulated on the CPU, correct in many ways, and with numeric faults planted in it.

The kernels "emulated", "emulated.prescaled", "emulated.rounded_p", "emulated.fma", "emulated.tf32" and "emulated.tf32x3" must
always pass;
"fault.numeric.<slug>" must be found (benchmarks/verdict.py). `registered` makes the correct ones known by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from support.emulated.arithmetic import DTYPES, Float32
from support.emulated.choices import Choices, sample
from support.emulated.faults import FAULTS, Change
from support.emulated.modified import Modified, unmasked
from support.emulated.tiled import Sequence, Tiled

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Built, Capabilities, Config, Deviations, Device, Gradients, Inputs, why_unsupported
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.modified import score_of, tensors_of
from attnfuzz.kernels.problem import OUTPUT_NAMES, Problem

_FILES = tuple(str(path) for path in sorted(Path(__file__).parent.glob("*.py")))
_CORRECT: Final = Change()


def _capabilities(*, prescaled_q: bool, rounded_p: bool, float32: Float32) -> Capabilities:
    return Capabilities(
        packings=("ragged", "dense"),
        dtypes=("float16", "bfloat16", "float32") if float32 == "f32" else ("float32",),
        dims=((64, 64), (32, 32), (16, 16), (128, 128), (96, 96), (64, 48), (192, 128), (40, 72), (256, 256)),
        dim_multiple=1,
        groups=None,
        causal=(None, "bottom_right", "top_left"),
        window=True,
        softcap=not prescaled_q,
        score_mod=not prescaled_q,
        mask_mod=True,
        captured=True,
        captured_gradients=not prescaled_q,
        zero_q=True,
        zero_k=True,
        unequal=True,
        slack=True,
        scale_any=True,
        devices=("cpu",),
        compiles_on=(),
        dlse=True,
        deterministic=OUTPUT_NAMES,
        deviations=Deviations(
            prescaled_q=prescaled_q,
            ds_from_rounded_p=rounded_p,
            tf32_on=("cpu",) if float32 == "tf32" else (),
            tf32x3_on=("cpu",) if float32 == "tf32x3" else (),
        ),
    )


class Emulated:
    """Tiled flash attention in torch on the CPU; deterministic with every Config."""

    backend = "torch"
    files = _FILES

    def __init__(
        self,
        name: str,
        change: Change = _CORRECT,
        *,
        prescaled_q: bool = False,
        rounded_p: bool = False,
        float32: Float32 = "f32",
    ) -> None:
        self.name, self.change = name, change
        self.prescaled_q, self.rounded_p, self.float32 = prescaled_q, rounded_p, float32
        self.capabilities = _capabilities(prescaled_q=prescaled_q, rounded_p=rounded_p, float32=float32)

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        """Some two dozen, the plainest first; any other combination of choices is taken too."""
        return sample(problem)

    def unavailable(self, device: Device) -> str | None:
        """None on the CPU."""
        return None if device == "cpu" else f"device={device!r}: the emulation runs on the CPU only"

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        """Why not, or None."""
        try:
            choices = Choices.of(config)
        except BadArgument as error:
            return str(error)
        if choices.mma != "f32" and problem.dtype == "float32":
            return f"mma={choices.mma!r}: tensor cores take float16 and bfloat16"
        return why_unsupported(self.capabilities, problem, device)

    def compile_key(self, problem: Problem, config: Config) -> str:
        """Nothing is compiled: one key for all."""
        return self.name

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        """Nothing to compile.

        Raises:
            BadArgument: `problem` or `config` is not supported.
        """
        if reason := self.supports(problem, config, device):
            raise BadArgument(f"problem: {self.name} does not take it: {reason}; ask supports(problem, config, device) first")
        return _Emulation(
            Choices.of(config), self.change, prescaled_q=self.prescaled_q, rounded_p=self.rounded_p, float32=self.float32
        )


class _Emulation:
    """Sequence by sequence. Slack rows of outputs are 0."""

    def __init__(self, choices: Choices, change: Change, *, prescaled_q: bool, rounded_p: bool, float32: Float32) -> None:
        self.choices, self.change = choices, change
        self.prescaled_q, self.rounded_p, self.float32 = prescaled_q, rounded_p, float32

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """`o` like q with dim_v; `lse (heads, rows)` beside a ragged q, `(batch, heads, rows)` beside a dense one."""
        p, q = inputs.problem, inputs.q
        o = q.new_zeros((*q.shape[:-1], p.dim_v))
        shape = (p.batch, p.heads, q.shape[1]) if p.packing == "dense" else (p.heads, q.shape[0])
        lse = torch.zeros(shape, dtype=torch.float32)
        for index, at in enumerate(_places(p, p.seqlens_q)):
            if p.seqlens_q[index]:
                o_part, lse_part, _ = self._tiled(inputs, index).forward()
                o[at] = _tokens_first(o_part).to(o.dtype)
                lse[_of_lse(at)] = lse_part.flatten(0, 1)
        return o, lse

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Gradients:
        """`dq, dk, dv` like `q, k, v`, and gradients of captured tensors. `lse` is required."""
        if lse is None:
            raise BadArgument("lse=None: the backward recomputes P from it; pass what forward returned")
        p = inputs.problem
        dq, dk, dv = torch.zeros_like(inputs.q), torch.zeros_like(inputs.k), torch.zeros_like(inputs.v)
        captured = {
            each.name: torch.zeros_like(x) for each, x in zip(tensors_of(p), inputs.captured, strict=True) if each.gradient
        }
        places = zip(_places(p, p.seqlens_q), _places(p, p.seqlens_k), strict=True)
        for index, (at_q, at_k) in enumerate(places):
            if not (p.seqlens_q[index] and p.seqlens_k[index]):
                continue
            tiled = self._tiled(inputs, index)
            o_part = _heads_first(p, o[at_q].float())
            # The fp32 O is not among the outputs: a kernel that takes D from it fuses both passes.
            fused = self.choices.delta == "fp32_o" or self.change.delta == "bfloat16_o"
            o32 = self._tiled(inputs, index).forward()[2] if fused else o_part
            lse_part = lse[_of_lse(at_q)].unflatten(0, (p.kv_heads, p.groups))
            dq_part, dk_part, dv_part = tiled.backward(o_part, lse_part, o32)
            for name, x in tiled.x.modified.gradients.items() if tiled.x.modified is not None else ():
                captured[name] += x
            dq[at_q] = _tokens_first(dq_part).to(dq.dtype)
            dk[at_k] = dk_part.transpose(0, 1).to(dk.dtype)
            dv[at_k] = dv_part.transpose(0, 1).to(dv.dtype)
        return (dq, dk, dv, tuple(captured.get(each.name) for each in tensors_of(p))) if captured else (dq, dk, dv)

    def _tiled(self, inputs: Inputs, index: int) -> Tiled:
        p = inputs.problem
        at_q, at_k = list(_places(p, p.seqlens_q))[index], list(_places(p, p.seqlens_k))[index]
        d_lse = inputs.d_lse
        sequence = Sequence(
            dtype=DTYPES[p.dtype],
            q=_heads_first(p, inputs.q[at_q].float()),
            k=inputs.k[at_k].float().transpose(0, 1)[:, None],
            v=inputs.v[at_k].float().transpose(0, 1)[:, None],
            d_o=_heads_first(p, inputs.d_o[at_q].float()),
            d_lse=None if d_lse is None else d_lse[_of_lse(at_q)].unflatten(0, (p.kv_heads, p.groups)),
            mask=_mask(p, index, self.change.causal_shift) & unmasked(inputs, index),
            modified=Modified(inputs, index) if score_of(p) is not None else None,
        )
        return Tiled(
            sequence,
            p.scale,
            self.choices,
            self.change,
            prescaled_q=self.prescaled_q,
            rounded_p=self.rounded_p,
            float32=self.float32,
        )


_Place = tuple[slice | int, ...]


def _places(problem: Problem, lengths: tuple[int, ...]) -> Iterator[_Place]:
    """Where each sequence's rows are: (batch, rows) of a dense tensor, (rows,) of a ragged one."""
    start = 0
    for index, length in enumerate(lengths):
        if problem.packing == "dense":
            yield index, slice(length)
        else:
            yield (slice(start, start + length),)
            start += length


def _of_lse(at: _Place) -> _Place:
    """The same place in LSE, which has its heads before its rows."""
    return (*at[:-1], slice(None), at[-1])


def _heads_first(problem: Problem, x: torch.Tensor) -> torch.Tensor:
    """(rows, heads, dim) -> [kv_heads, groups, rows, dim]."""
    return x.transpose(0, 1).unflatten(0, (problem.kv_heads, problem.groups))


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    """[kv_heads, groups, rows, dim] -> (rows, heads, dim)."""
    return x.flatten(0, 1).transpose(0, 1)


def _mask(problem: Problem, index: int, shift: int) -> torch.Tensor:
    """Which keys each query sees, bool (seqlen_q, seqlen_k); the causal edge `shift` keys too far right."""
    n, m = problem.seqlens_q[index], problem.seqlens_k[index]
    rows, keys = torch.arange(n)[:, None], torch.arange(m)[None, :]
    diagonal = rows if problem.causal == "top_left" else rows + (m - n)
    mask = torch.ones(n, m, dtype=torch.bool)
    if problem.causal is not None:
        mask &= keys <= diagonal + shift
    left, right = problem.window or (None, None)
    if left is not None:
        mask &= keys >= diagonal - left
    if right is not None:
        mask &= keys <= diagonal + right
    return mask


KERNEL: Final = Emulated("emulated")
PRESCALED: Final = Emulated("emulated.prescaled", prescaled_q=True)
ROUNDED_P: Final = Emulated("emulated.rounded_p", rounded_p=True)
FMA: Final = Emulated("emulated.fma", float32="fma")
TF32: Final = Emulated("emulated.tf32", float32="tf32")
TF32X3: Final = Emulated("emulated.tf32x3", float32="tf32x3")
_CORRECT_KERNELS: Final = {
    "KERNEL": KERNEL,
    "PRESCALED": PRESCALED,
    "ROUNDED_P": ROUNDED_P,
    "FMA": FMA,
    "TF32": TF32,
    "TF32X3": TF32X3,
}


def kernel_named(name: str) -> Emulated:
    """Return the correct kernel of that name."""
    return next(each for each in _CORRECT_KERNELS.values() if each.name == name)


def fault_kernel(slug: str) -> Emulated:
    """Return the kernel with the fault `slug`."""
    return Emulated(f"fault.numeric.{slug}", next(each.change for each in FAULTS if each.slug == slug))


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Make the correct kernels known by their names while the block runs."""
    for attribute, kernel in _CORRECT_KERNELS.items():
        registry.register(kernel, f"{__name__}:{attribute}")
    try:
        yield
    finally:
        for kernel in _CORRECT_KERNELS.values():
            registry.unregister(kernel.name)
