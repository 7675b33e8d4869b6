"""Common parts of the adapters of PyTorch's own CUDA attention: the Kernel around one op, and the op's tensors.

An op gets exactly the rows of a Problem: a view without the slack rows, which hold NaN and lie right behind the last row that the
op may read. Its results are copied into tensors with slack rows.

Within an aten op nothing is poisoned: a dispatch mode sees the op, not the op's allocations. With `deterministic=True` in the
Config, torch's deterministic mode fills those allocations with NaN instead.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from attnfuzz.kernels.contract import Built, Capabilities, Config, Device, Inputs, why_unsupported
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.support.installed_torch import built_with, op_arguments, sees_cuda

if TYPE_CHECKING:
    import torch

__all__ = ["DETERMINISTIC", "Op", "Part", "Peer", "Step", "missing_op", "without_keys"]

DETERMINISTIC: Final = (Config(deterministic=False), Config(deterministic=True))
"""Configs of an op that reads torch.are_deterministic_algorithms_enabled()."""


@dataclass(frozen=True, slots=True)
class Op:
    """An op of torch.ops.aten, and the names of its positional arguments as an adapter passes them ("a|b": either name)."""

    name: str
    arguments: str

    def why_not(self) -> str | None:
        """Why this torch does not have the op in that form, or None."""
        version, takes = built_with()[0], op_arguments(self.name)
        if takes is None:
            return f"torch {version} has no aten::{self.name}; install torch 2.11 or newer"
        wanted, actual = self.arguments.split(), takes.positional
        if len(actual) != len(wanted) or any(name not in names.split("|") for name, names in zip(actual, wanted, strict=True)):
            return f"aten::{self.name} of torch {version} takes ({', '.join(actual)}), not ({', '.join(wanted)}); use torch 2.11"
        if "scale" not in takes.keyword:
            return f"aten::{self.name} of torch {version} takes no scale; use torch 2.11"
        return None


def missing_op(ops: tuple[Op, ...]) -> str | None:
    """The first reason why one of `ops` is missing, or None."""
    return next((reason for op in ops if (reason := op.why_not()) is not None), None)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """`Inputs` without slack rows: `q (batch, seqlen_q, heads, dim_qk)` dense, `(total_q, heads, dim_qk)` ragged."""

    problem: Problem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_o: torch.Tensor
    d_lse: torch.Tensor | None
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def of(cls, inputs: Inputs) -> Part:
        """Make views of `inputs`."""
        problem = inputs.problem
        dense = problem.packing == "dense"
        rows_q = problem.seqlens_q[0] if dense else problem.total_q
        rows_k = problem.seqlens_k[0] if dense else problem.total_k
        return cls(
            problem=problem,
            q=inputs.q.narrow(-3, 0, rows_q),
            k=inputs.k.narrow(-3, 0, rows_k),
            v=inputs.v.narrow(-3, 0, rows_k),
            d_o=inputs.d_o.narrow(-3, 0, rows_q),
            d_lse=None if inputs.d_lse is None else inputs.d_lse.narrow(-1, 0, rows_q),
            cu_seqlens_q=inputs.cu_seqlens_q,
            cu_seqlens_k=inputs.cu_seqlens_k,
            max_seqlen_q=inputs.max_seqlen_q,
            max_seqlen_k=inputs.max_seqlen_k,
        )

    @property
    def dense(self) -> bool:
        """Whether the tensors have a batch dimension."""
        return self.problem.packing == "dense"

    @property
    def empty(self) -> bool:
        """Whether there are no queries or no keys at all: the ops do not take tensors without elements."""
        return not (self.max_seqlen_q and self.max_seqlen_k)

    def sequences(self) -> Iterator[tuple[int, int, int]]:
        """Yield (number, first query row, queries) of each ragged sequence."""
        lengths = self.problem.seqlens_q
        yield from zip(range(len(lengths)), accumulate((0, *lengths[:-1])), lengths, strict=True)


def without_keys(lse: torch.Tensor) -> torch.Tensor:
    """Replace +inf by -inf, for ops whose LSE is +inf in rows that see no key. A wrong +inf elsewhere stays wrong, as -inf."""
    return lse.masked_fill(lse == float("inf"), float("-inf"))


class Step:
    """One trial's calls of an op; it keeps the op's state from forward to backward. Subclasses call the op.

    The backward gets what the op itself returned (padded LSE, random state), as torch's autograd would pass it, and not what the
    harness passes back.
    """

    def __init__(self, problem: Problem, config: Config) -> None:
        self.problem, self.config = problem, config
        self._kept: Any = None

    def attend(self, part: Part) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Return (o, lse, state for the backward) of a `part` that is not empty, shaped as in `Outputs` without slack rows."""
        raise NotImplementedError

    def differentiate(self, part: Part, kept: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (dq, dk, dv) of a `part` that is not empty, shaped as in `Outputs` without slack rows."""
        raise NotImplementedError

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """`o` and `lse` as in the contract; slack rows are unwritten."""
        import torch

        part, q = Part.of(inputs), inputs.q
        self._kept = None
        if part.empty:
            # The ops document no result; zeros and -inf are the contract's.
            *batch, rows, heads, _ = q.shape
            o = torch.zeros((*q.shape[:-1], part.problem.dim_v), dtype=q.dtype, device=q.device)
            return o, torch.full((*batch, heads, rows), -torch.inf, dtype=torch.float32, device=q.device)
        with _deterministic(self.config):
            o, lse, self._kept = self.attend(part)
        return _grown(o, q.shape[-3], -3), _grown(lse, q.shape[-3], -1)

    def backward(
        self,
        inputs: Inputs,
        o: torch.Tensor,  # noqa: ARG002 - the contract's signature
        lse: torch.Tensor | None,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`dq, dk, dv` of the last `forward`, like `q, k, v`; slack rows are unwritten."""
        import torch

        part = Part.of(inputs)
        if part.empty:
            return torch.zeros_like(inputs.q), torch.zeros_like(inputs.k), torch.zeros_like(inputs.v)
        if self._kept is None:
            raise BadArgument("backward: there was no forward before it; call forward on the same inputs first")
        with _deterministic(self.config):
            dq, dk, dv = self.differentiate(part, self._kept)
        rows_q, rows_k = inputs.q.shape[-3], inputs.k.shape[-3]
        return _grown(dq, rows_q, -3), _grown(dk, rows_k, -3), _grown(dv, rows_k, -3)


def _grown(x: torch.Tensor, rows: int, dim: int) -> torch.Tensor:
    """Extend `x` to `rows` rows, the new ones unwritten; `x` itself where there are none."""
    import torch

    if x.shape[dim] == rows:
        return x
    shape = list(x.shape)
    shape[dim] = rows
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out


@contextmanager
def _deterministic(config: Config) -> Iterator[None]:
    """Set torch's deterministic mode from the Config (its scope is the process), with its NaN fill."""
    import torch

    wanted = config.get("deterministic", False) is True
    mode, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(wanted)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill


class Peer:
    """A Kernel around ops of PyTorch.

    Args:
        name: the kernel's name.
        file: the adapter's source file.
        capabilities: what the op takes.
        step: makes a Built for a Problem and a Config.
        missing: returns why this torch lacks what the adapter calls, or None; called only where torch finds a CUDA device.
        refuses: returns why the op does not take a Problem within the capabilities, or None.
        configs: the Configs, the default first.
    """

    backend = "torch"

    def __init__(
        self,
        *,
        name: str,
        file: str,
        capabilities: Capabilities,
        step: Callable[[Problem, Config], Built],
        missing: Callable[[], str | None],
        refuses: Callable[[Problem], str | None] | None = None,
        configs: tuple[Config, ...] = (Config(),),
    ) -> None:
        self.name = name
        self.files = (file, __file__)
        self.capabilities = capabilities
        self._step, self._missing, self._refuses, self._configs = step, missing, refuses, configs

    def configs(self, problem: Problem) -> tuple[Config, ...]:  # noqa: ARG002 - the contract's signature
        """The same for every Problem: an op chooses its tiles itself."""
        return self._configs

    def unavailable(self, device: Device) -> str | None:
        """Another device than CUDA, a missing torch or CUDA device, a torch with other ops; or None."""
        if device != "cuda":
            return f"device={device!r}: {self.name} runs on CUDA only"
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed: pip install torch"
        version, cuda = built_with()
        if cuda is None:
            return f"torch {version} was built without CUDA"
        if not sees_cuda():
            return "no CUDA device: torch.cuda.is_available() is False"
        # Last: it may import modules that only a process for CUDA should.
        return self._missing()

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        """Why not, or None."""
        if config not in self._configs:
            return f"config={config!r}: supports {', '.join(map(repr, self._configs))}"
        return why_unsupported(self.capabilities, problem, device) or (self._refuses(problem) if self._refuses else None)

    def compile_key(self, problem: Problem, config: Config) -> str:  # noqa: ARG002 - the contract's signature
        """One key a Config: nothing is compiled."""
        return f"{self.name} {config.canonical()}"

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        """Make a new Step, which keeps state from forward to backward.

        Raises:
            BadArgument: `problem` is not supported.
        """
        if reason := self.supports(problem, config, device):
            raise BadArgument(f"problem: {self.name} does not take it: {reason}; ask supports(problem, config, device) first")
        return self._step(problem, config)
