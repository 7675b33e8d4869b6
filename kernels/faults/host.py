"""Faults on the CPU: torch.reference_cpu that is right until a Problem holds what its fault waits for.

Every fault but those of the compiler waits for a sequence of three keys or more, so that shrinking has something to find.
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
"""Tiles that the op does not have, so that lengths around them are drawn."""
_FLOOD = b"attnfuzz floods its output\n" * 2048
_CHUNK = 32 << 20
_LONG = 1_000_000

_Made = tuple["torch.Tensor", "torch.Tensor"]


def _three_keys(problem: Problem) -> bool:
    return max(problem.seqlens_k) >= 3


def _always(_: Problem) -> bool:
    return True


def _raises(_: _Made) -> None:
    raise ValueError("planted: this kernel raises")


def _wrong_numbers(made: _Made) -> None:
    made[0].mul_(1.5)


def _nan(made: _Made) -> None:
    made[0][-1].fill_(float("nan"))


def _wrong_shape(made: _Made) -> _Made:
    return made[0], made[1].t().contiguous()


def _wrong_dtype(made: _Made) -> _Made:
    return made[0].double(), made[1]


def _out_of_bounds(made: _Made) -> None:
    o = made[0]
    ctypes.memset(o.data_ptr() + o.numel() * o.element_size(), 1, 8)


def _segfault(_: _Made) -> None:
    ctypes.memset(8, 1, 8)


def _abort(_: _Made) -> None:
    os.write(2, b"planted: assertion `tile < tiles' failed\n")
    os.abort()


def _kill(_: _Made) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit_at_once(_: _Made) -> None:
    os._exit(3)


def _sys_exit(_: _Made) -> None:
    sys.exit(5)


def _python_loop(_: _Made) -> None:
    while True:
        pass


def _c_loop(_: _Made) -> None:
    """A C loop that never gives up the GIL, every signal blocked that can be."""
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP})
    re.match("(a+)+$", "a" * 200 + "b")


def _allocates(_: _Made) -> None:
    held = []
    while True:
        held.append(bytearray(b"x") * _CHUNK)


def _allocates_at_once(made: _Made) -> _Made:
    return made[0].new_empty(1 << 45), made[1]


def _floods(_: _Made) -> None:
    while True:
        os.write(1, _FLOOD)


def _prints_much(_: _Made) -> None:
    for _i in range(1000):
        os.write(1, _FLOOD)


def _closes_pipes(_: _Made) -> None:
    os.closerange(0, 4096)


def _leaves_a_child(_: _Made) -> None:
    """A daemon: in a session of its own, its parent gone, what it inherited still open."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    time.sleep(_LONG)
    os._exit(0)


def _leaves_a_child_and_dies(made: _Made) -> None:
    _leaves_a_child(made)
    os._exit(4)


_calls = 0


def _every_third(made: _Made) -> None:
    global _calls
    _calls += 1
    if _calls % 3 == 0:
        made[0].mul_(1.5)


def _compiler_refuses() -> None:
    raise BuildError("planted: error: too many registers")


def _compiler_aborts() -> None:
    subprocess.run([sys.executable, "-c", "import os; os.write(2, b'planted: ptxas fatal\\n')"], check=False)
    os.abort()


def _compiler_never_ends() -> None:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(1000000)"], check=False)


def _four_bugs(problem: Problem, made: _Made) -> None:
    if 0 in problem.seqlens_q:
        _segfault(made)
    if problem.causal:
        _raises(made)
    if 17 in problem.seqlens_k:
        _python_loop(made)
    if problem.groups > 1:
        made[1].add_(1.0)


@dataclass(frozen=True)
class HostFault:
    """One fault: what happens (to what forward made, or in the compiler), when, and what a harness must make of it."""

    slug: str
    title: str
    kind: str | None
    """The Failure's kind; None: there must be none."""
    minimal: str = "1x3"
    """The minimal Case, as seqlen_q x seqlen_k of its sequences."""
    happens: Callable[[Any], Any] | None = None
    when: Callable[[Problem], bool] = _three_keys
    compiler: Callable[[], None] | None = None
    """Happens while a causal variant is compiled."""
    sometimes: bool = False

    def act(self, problem: Problem, made: _Made) -> Any:
        """What forward does with what it made."""
        return self.happens(made) if self.happens is not None and self.when(problem) else None


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
    HostFault("third", "wrong on every third call", "nondeterministic", "1x1", _every_third, _always, sometimes=True),
    HostFault("refuses", "compiler refuses", "compile-error", "1x1", compiler=_compiler_refuses),
    HostFault("ccrash", "compiler aborts", "crash", "1x1", compiler=_compiler_aborts),
    HostFault("chang", "compiler never ends", "hang", "1x1", compiler=_compiler_never_ends),
)


class FaultyReference:
    """`torch.reference_cpu` with a fault; the fault of a compiler shows in its causal variant."""

    backend = "torch"
    files = (__file__,)

    def __init__(self, name: str, act: Callable[[Problem, _Made], Any], compiler: Callable[[], None] | None = None) -> None:
        self.name, self._act, self._compiler = name, act, compiler
        self.capabilities = _CAPABILITIES if compiler is None else replace(_CAPABILITIES, compiles_on=("cpu",))

    def configs(self, problem: Problem) -> tuple[Config, ...]:  # noqa: ARG002 - the contract's signature
        """One."""
        return (_CONFIG,)

    def unavailable(self, device: Device) -> str | None:
        """As the correct kernel."""
        return CORRECT.unavailable(device)

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        """Why not, or None."""
        return f"config={config!r}: supports {_CONFIG}" if config != _CONFIG else why_unsupported(_CAPABILITIES, problem, device)

    def compile_key(self, problem: Problem, config: Config) -> str:  # noqa: ARG002 - the contract's signature
        """The mask: that is what the faults of a compiler wait for."""
        return f"{self.name} {problem.causal}"

    def build(self, problem: Problem, config: Config, device: Device) -> Built:  # noqa: ARG002
        """Nothing is compiled, unless the fault is there."""
        if self._compiler is not None and problem.causal:
            self._compiler()
        return _Faulty(CORRECT.build(problem, Config(), device), self._act)


class _Faulty:
    """A built kernel whose forward acts before it returns."""

    def __init__(self, built: Built, act: Callable[[Problem, _Made], Any]) -> None:
        self._built, self._act = built, act

    def forward(self, inputs: Inputs) -> Any:
        """(o, lse), or what the fault makes of them."""
        made: Any = self._built.forward(inputs)
        return self._act(inputs.problem, made) or made

    def backward(self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor | None) -> Any:  # noqa: ARG002
        """As the correct kernel, whatever forward returned."""
        made: Any = self._built.forward(inputs)
        return self._built.backward(inputs, made[0], made[1])


def fault_kernel(slug: str) -> FaultyReference | None:
    """The kernel called "fault." and `slug`, "four" for the one with four bugs; None: there is none."""
    name = f"fault.{slug}"
    if slug == "four":
        return FaultyReference(name, _four_bugs)
    fault = next((each for each in FAULTS if each.slug == slug), None)
    return None if fault is None else FaultyReference(name, fault.act, fault.compiler)
