"""Faults on the CPU: torch.reference_cpu, correct until a Problem triggers its fault.

A sequence of three keys or more triggers every fault but the compiler's, so that there is something to shrink.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from attnfuzz.kernels.contract import BuildError, Built, Capabilities, Config, Device, Inputs, why_unsupported
from attnfuzz.kernels.problem import OUTPUT_NAMES, Problem
from attnfuzz.kernels.torch.reference_cpu import KERNEL as CORRECT

if TYPE_CHECKING:
    import torch

__all__ = ["FAULTS", "HostFault", "fault_kernel"]

_CAPABILITIES: Final = Capabilities(
    dtypes=("float32",),
    dims=((16, 16),),
    groups=None,
    causal=(None, "top_left"),
    zero_q=True,
    zero_k=True,
    unequal=True,
    devices=("cpu",),
    compiles_on=(),
    deterministic=OUTPUT_NAMES,
)
_CONFIG: Final = Config(tile_m=16, tile_n=16)
"""Tiles, though the op has none, so that lengths around them are drawn."""
_FLOOD = b"attnfuzz floods its output\n" * 2048
_CHUNK = 32 << 20
_LONG = 1_000_000

_Forward = tuple["torch.Tensor", "torch.Tensor"]


def _three_keys(problem: Problem) -> bool:
    return max(problem.seqlens_k) >= 3


def _always(_: Problem) -> bool:
    return True


def _raises(_: _Forward) -> None:
    raise ValueError("planted: this kernel raises")


def _wrong_numbers(outputs: _Forward) -> None:
    outputs[0].mul_(1.5)


def _nan(outputs: _Forward) -> None:
    outputs[0][-1].fill_(float("nan"))


def _wrong_shape(outputs: _Forward) -> _Forward:
    return outputs[0], outputs[1].t().contiguous()


def _wrong_dtype(outputs: _Forward) -> _Forward:
    return outputs[0].double(), outputs[1]


def _out_of_bounds(outputs: _Forward) -> None:
    o = outputs[0]
    ctypes.memset(o.data_ptr() + o.numel() * o.element_size(), 1, 8)


def _segfault(_: _Forward) -> None:
    ctypes.memset(8, 1, 8)


def _abort(_: _Forward) -> None:
    os.write(2, b"planted: assertion `tile < tiles' failed\n")
    os.abort()


def _kill(_: _Forward) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit_at_once(_: _Forward) -> None:
    os._exit(3)


def _sys_exit(_: _Forward) -> None:
    sys.exit(5)


def _python_loop(_: _Forward) -> None:
    while True:
        pass


def _c_loop(_: _Forward) -> None:
    """A C loop that never releases the GIL, with all signals blocked that can be."""
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP})
    re.match("(a+)+$", "a" * 200 + "b")


def _allocates(_: _Forward) -> None:
    held = []
    while True:
        held.append(bytearray(b"x") * _CHUNK)


def _allocates_at_once(outputs: _Forward) -> _Forward:
    return outputs[0].new_empty(1 << 45), outputs[1]


def _floods(_: _Forward) -> None:
    while True:
        os.write(1, _FLOOD)


def _prints_much(_: _Forward) -> None:
    for _i in range(1000):
        os.write(1, _FLOOD)


def _closes_pipes(_: _Forward) -> None:
    os.closerange(0, 4096)


def _leaves_a_child(_: _Forward) -> None:
    """Start a daemon: in its own session, without its parent, with inherited descriptors still open."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    time.sleep(_LONG)
    os._exit(0)


def _leaves_a_child_and_dies(outputs: _Forward) -> None:
    _leaves_a_child(outputs)
    os._exit(4)


_calls = 0


def _every_third(outputs: _Forward) -> None:
    global _calls
    _calls += 1
    if _calls % 3 == 0:
        outputs[0].mul_(1.5)


def _compiler_refuses() -> None:
    raise BuildError("planted: error: too many registers")


def _compiler_aborts() -> None:
    subprocess.run([sys.executable, "-c", "import os; os.write(2, b'planted: ptxas fatal\\n')"], check=False)
    os.abort()


def _compiler_never_ends() -> None:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(1000000)"], check=False)


def _four_bugs(problem: Problem, outputs: _Forward) -> None:
    if 0 in problem.seqlens_q:
        _segfault(outputs)
    if problem.causal:
        _raises(outputs)
    if 17 in problem.seqlens_k:
        _python_loop(outputs)
    if problem.groups > 1:
        outputs[1].add_(1.0)


@dataclass(frozen=True)
class HostFault:
    """One fault: what happens (to forward's outputs, or in the compiler), when, and the Failure that a harness must report."""

    slug: str
    title: str
    kind: str | None
    """The Failure's kind; None: there must be none."""
    minimal: str = "1x3"
    """The minimal Case, as seqlen_q x seqlen_k of its sequences."""
    happens: Callable[[Any], Any] | None = None
    when: Callable[[Problem], bool] = _three_keys
    compiler: Callable[[], None] | None = None
    """Called while a causal variant is compiled."""
    also: str | None = None
    """Another kind that the Failure of a state may have, by the check that finds it; its Case needs others before it."""

    def act(self, problem: Problem, outputs: _Forward) -> Any:
        """Apply the fault to forward's outputs; returns what replaces them, or None."""
        return self.happens(outputs) if self.happens is not None and self.when(problem) else None


FAULTS: Final = (
    HostFault("raises", "raises", "exception", happens=_raises),
    HostFault("numbers", "returns wrong numbers", "mismatch", happens=_wrong_numbers),
    HostFault("nan", "returns NaN", "nonfinite", happens=_nan),
    HostFault("shape", "returns a wrong shape", "contract", "3x1", _wrong_shape, lambda problem: problem.total_q >= 3),
    HostFault("dtype", "returns a wrong dtype", "contract", happens=_wrong_dtype),
    HostFault("bounds", "writes beyond its output", "guard", happens=_out_of_bounds),
    HostFault("segfault", "SIGSEGV", "crash", happens=_segfault),
    HostFault("abort", "abort()", "crash", happens=_abort),
    HostFault("kill", "kills itself", "crash", happens=_kill),
    HostFault("exit", "leaves by _exit", "crash", happens=_exit_at_once),
    HostFault("sysexit", "calls sys.exit", "exception", happens=_sys_exit),
    HostFault("pyloop", "endless Python loop", "hang", happens=_python_loop),
    HostFault("cloop", "endless C loop, GIL held, signals blocked", "hang", happens=_c_loop),
    HostFault("onelength", "hangs for one length only", "hang", "17x1", _python_loop, lambda problem: 17 in problem.seqlens_q),
    HostFault("memory", "allocates without end", "out-of-memory", happens=_allocates),
    HostFault("huge", "allocates 128 TiB", "out-of-memory", happens=_allocates_at_once),
    HostFault("flood", "floods stdout without end", "hang", happens=_floods),
    HostFault("noise", "prints 55 MB, right numbers", None, happens=_prints_much),
    HostFault("pipes", "closes its pipes", "crash", happens=_closes_pipes),
    HostFault("daemon", "forks a child that outlives it", "crash", happens=_leaves_a_child_and_dies),
    HostFault("stray", "leaves a child, right numbers", None, happens=_leaves_a_child),
    HostFault("third", "wrong on every third call", "mismatch", "1x1", _every_third, _always, also="nondeterministic"),
    HostFault("refuses", "compiler refuses", "compile-error", "1x1", compiler=_compiler_refuses),
    HostFault("ccrash", "compiler aborts", "crash", "1x1", compiler=_compiler_aborts),
    HostFault("chang", "compiler never ends", "hang", "1x1", compiler=_compiler_never_ends),
)


class FaultyReference:
    """`torch.reference_cpu` with a fault; a compiler's fault shows in its causal variant."""

    backend = "torch"
    files = (__file__,)

    def __init__(self, name: str, act: Callable[[Problem, _Forward], Any], compiler: Callable[[], None] | None = None) -> None:
        self.name, self._act, self._compiler = name, act, compiler
        self.capabilities = _CAPABILITIES if compiler is None else replace(_CAPABILITIES, compiles_on=("cpu",))

    def configs(self, problem: Problem) -> tuple[Config, ...]:  # noqa: ARG002 - the contract's signature
        """One Config."""
        return (_CONFIG,)

    def unavailable(self, device: Device) -> str | None:
        """As the correct kernel."""
        return CORRECT.unavailable(device)

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        """Why not, or None."""
        return f"config={config!r}: supports {_CONFIG}" if config != _CONFIG else why_unsupported(_CAPABILITIES, problem, device)

    def compile_key(self, problem: Problem, config: Config) -> str:  # noqa: ARG002 - the contract's signature
        """The mask, which triggers the compiler's faults."""
        return f"{self.name} {problem.causal}"

    def build(self, problem: Problem, config: Config, device: Device) -> Built:  # noqa: ARG002
        """Compile nothing, unless that is the fault."""
        if self._compiler is not None and problem.causal:
            self._compiler()
        return _Faulty(CORRECT.build(problem, Config(), device), self._act)


class _Faulty:
    """A built kernel whose forward acts before it returns."""

    def __init__(self, built: Built, act: Callable[[Problem, _Forward], Any]) -> None:
        self._built, self._act = built, act

    def forward(self, inputs: Inputs) -> Any:
        """(o, lse), after the fault."""
        outputs: Any = self._built.forward(inputs)
        return self._act(inputs.problem, outputs) or outputs

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Any:  # noqa: ARG002
        """As the correct kernel, from a correct forward."""
        outputs: Any = self._built.forward(inputs)
        return self._built.backward(inputs, outputs[0], outputs[1])


def fault_kernel(slug: str) -> FaultyReference | None:
    """Return the kernel called "fault.<slug>", or None; "four" has four bugs."""
    name = f"fault.{slug}"
    if slug == "four":
        return FaultyReference(name, _four_bugs)
    fault = next((each for each in FAULTS if each.slug == slug), None)
    return None if fault is None else FaultyReference(name, fault.act, fault.compiler)
