"""Faults on a GPU, planted in copies of triton.varlen and tilelang.varlen; a sequence of three keys or more triggers them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from attnfuzz.kernels.contract import Built, Config, Device, Gradients, Inputs, Kernel, why_unsupported
from attnfuzz.kernels.faults.planted import Edit, planted_copy
from attnfuzz.kernels.problem import Problem

if TYPE_CHECKING:
    import torch

__all__ = ["BACKENDS", "FAULTS", "DeviceFault", "fault_kernel"]

BACKENDS: Final = ("triton", "tilelang")
_TRITON_AT = "    acc = tl.zeros([TILE_M, PAD_V], tl.float32)\n    row_sum = tl.zeros([TILE_M], tl.float32)\n"
_TILELANG_AT = (
    "                for i in T.Parallel(tile_m):\n                    if row_0 + i < n_q:\n                        LSE["
)
_FAR = 1 << 38
"""Elements of LSE: a TiB, beyond anything that a GPU has mapped near it."""


@dataclass(frozen=True)
class DeviceFault:
    """One fault: the Failure that a harness must report, and the edits that plant it in each kernel."""

    slug: str
    title: str
    kind: str | None
    """The Failure's kind; None: there must be none."""
    triton: tuple[Edit, ...] = ()
    tilelang: tuple[Edit, ...] = ()
    minimal: str = "1x3"
    hungry: bool = False
    """The wrapper allocates device memory until there is none left."""


def _before(anchor: str, code: str, times: int = 1) -> Edit:
    return Edit(anchor, code + anchor, times=times)


FAULTS: Final = (
    DeviceFault(
        "address",
        "illegal address",
        "illegal-access",
        triton=(
            _before(
                _TRITON_AT,
                f"    if seqlen_k >= 3:\n        tl.store(lse + {_FAR} + tl.arange(0, TILE_M), tl.zeros([TILE_M], tl.float32))\n",
            ),
        ),
        tilelang=(
            # By address: TileLang guards indexed accesses.
            _before(
                _TILELANG_AT,
                "                if n_k >= 3:\n"
                '                    T.evaluate(T.call_extern("float32", "atomicAdd", '
                f"T.address_of(LSE[head, T.int64({_FAR})]), T.float32(1)))\n",
            ),
        ),
    ),
    DeviceFault(
        "endless",
        "endless kernel",
        "hang",
        triton=(
            _before(
                _TRITON_AT,
                "    spin = seqlen_k\n"
                "    while spin >= 3:\n"
                "        spin = tl.load(cu_seqlens_k + seq + 1, volatile=True) - begin_k\n",
            ),
        ),
        tilelang=(
            _before(
                _TILELANG_AT,
                "                while cu_k[seq + 1] - cu_k[seq] >= 3:\n"
                "                    LSE[head, q_start] = LSE[head, q_start] + 1.0\n",
            ),
        ),
    ),
    DeviceFault(
        "assert",
        "device-side assert",
        "crash",
        triton=(
            Edit("_FORWARD_SCALARS)\ndef forward(", "_FORWARD_SCALARS, debug=True)\ndef forward("),
            _before(_TRITON_AT, '    tl.device_assert(seqlen_k < 3, "planted: too many keys")\n'),
        ),
        tilelang=(_before(_TILELANG_AT, '                T.device_assert(n_k < 3, "planted: too many keys")\n'),),
    ),
    DeviceFault("memory", "allocates without end", "out-of-memory", hungry=True),
    DeviceFault("none", "correct, after all of these", None),
)


def fault_kernel(backend: str, slug: str) -> Kernel | None:
    """Return the kernel called "fault.<backend>.<slug>", or None."""
    for fault in FAULTS:
        if fault.slug == slug and backend in BACKENDS:
            edits = fault.triton if backend == "triton" else fault.tilelang
            return _planted(backend, f"fault.{backend}.{slug}", edits, hungry=fault.hungry)
    return None


def _planted(backend: str, name: str, edits: tuple[Edit, ...], *, hungry: bool) -> Kernel:
    code = functools.partial(planted_copy, f"attnfuzz.kernels.{backend}.varlen_device", edits)
    kernel: Any
    if backend == "triton":
        from attnfuzz.kernels.triton.varlen import TritonVarlen

        kernel = TritonVarlen(name=name, device_code=code)
    else:
        from attnfuzz.kernels.tilelang.varlen import TileLangVarlen

        kernel = TileLangVarlen(name=name, device_code=code)
    return _Narrow(kernel, hungry=hungry)


class _Narrow:
    """One variant of a kernel, to compile little; if hungry, its wrapper allocates device memory until there is none left."""

    def __init__(self, kernel: Any, *, hungry: bool) -> None:
        self._kernel, self._hungry = kernel, hungry
        self.name, self.backend, self.files = kernel.name, kernel.backend, (__file__, *kernel.files)
        self.capabilities = replace(kernel.capabilities, dtypes=("float16",), dims=((64, 64),), causal=(None,))

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        """The kernel's first Config."""
        return tuple(self._kernel.configs(problem)[:1])

    def unavailable(self, device: Device) -> str | None:
        """As the kernel itself."""
        reason: str | None = self._kernel.unavailable(device)
        return reason

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        """Why not, or None."""
        refused: str | None = self._kernel.supports(problem, config, device)
        return why_unsupported(self.capabilities, problem, device) or refused

    def compile_key(self, problem: Problem, config: Config) -> str:
        """As the kernel itself."""
        return str(self._kernel.compile_key(problem, config))

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        """The kernel's own Built, wrapped if it is hungry."""
        built: Built = self._kernel.build(problem, config, device)
        return _HungryBuilt(built) if self._hungry else built


class _HungryBuilt:
    """A built kernel that allocates device memory without end."""

    def __init__(self, built: Built) -> None:
        self._built = built

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Allocate without end for three keys or more."""
        import torch

        held: list[Any] = []
        while max(inputs.problem.seqlens_k) >= 3:
            held.append(torch.empty(4 << 30, dtype=torch.uint8, device=inputs.q.device))
        return self._built.forward(inputs)

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Gradients:
        """The kernel's own backward."""
        return self._built.backward(inputs, o, lse)
