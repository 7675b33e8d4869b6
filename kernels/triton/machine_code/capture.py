"""Launches of Triton functions by a call, captured in place of being run, so that their code can be compiled without a GPU."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from attnfuzz.kernels.contract import Built, Inputs
from attnfuzz.kernels.errors import NotLowered
from attnfuzz.kernels.modified import shape_of, tensors_of
from attnfuzz.kernels.problem import Layout, Problem
from attnfuzz.kernels.triton.machine_code.lower import Call

__all__ = ["captured_calls", "plain_inputs"]


def captured_calls(built: Built, problem: Problem, *, backward: bool) -> tuple[Call, ...]:
    """Call `built` on CPU tensors of zeros, and return what it launches, each distinct launch once.

    An autotuned function gives a launch for each of its configs.

    Raises:
        NotLowered: the call fails without a GPU, or launches no Triton function.
    """
    inputs, calls = plain_inputs(problem), list[Call]()
    with _captured(calls):
        try:
            o, lse = built.forward(inputs)
            if backward:
                built.backward(inputs, o, lse)
        except Exception as error:  # a user's function may raise anything
            text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            raise NotLowered(f"its launches cannot be captured: without a GPU, on CPU tensors, it raises {text}") from error
    if not calls:
        raise NotLowered("its launches cannot be captured: it launches no Triton function")
    return _distinct(calls)


def plain_inputs(problem: Problem) -> Inputs:
    """Tensors of zeros on the CPU in the shapes of `problem`; of its layouts the pitch alone, which makes rows apart."""
    import torch

    dtype = getattr(torch, problem.dtype)

    def zeros(queries: bool, heads: int, dim: int, layout: Layout) -> Any:
        lengths, slack = (problem.seqlens_q, problem.slack_q) if queries else (problem.seqlens_k, problem.slack_k)
        rows = (len(lengths), lengths[0] + slack) if problem.packing == "dense" else (sum(lengths) + slack,)
        return torch.zeros((*rows, heads * dim + layout.pitch), dtype=dtype)[..., : heads * dim].unflatten(-1, (heads, dim))

    def starts(lengths: tuple[int, ...]) -> Any:
        return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)

    paged: dict[str, Any] = {}
    if size := problem.page_size:
        most = max(1, *(-(-n // size) for n in problem.seqlens_k))
        paged = {
            "k_pages": torch.zeros((most, size, problem.kv_heads, problem.dim_qk), dtype=dtype),
            "v_pages": torch.zeros((most, size, problem.kv_heads, problem.dim_v), dtype=dtype),
            "page_table": torch.arange(most, dtype=torch.int32).repeat(problem.batch, 1),
            "seqlens_k": torch.tensor(problem.seqlens_k, dtype=torch.int32),
        }
    return Inputs(
        **paged,
        problem=problem,
        q=zeros(True, problem.heads, problem.dim_qk, problem.layout_q),
        k=zeros(False, problem.kv_heads, problem.dim_qk, problem.layout_k),
        v=zeros(False, problem.kv_heads, problem.dim_v, problem.layout_v),
        d_o=zeros(True, problem.heads, problem.dim_v, problem.layout_do),
        cu_seqlens_q=starts(problem.seqlens_q),
        cu_seqlens_k=starts(problem.seqlens_k),
        max_seqlen_q=max(problem.seqlens_q),
        max_seqlen_k=max(problem.seqlens_k),
        captured=tuple(
            torch.zeros(shape_of(problem, each), dtype=torch.float32 if each.kind == "float" else torch.int32)
            for each in tensors_of(problem)
        ),
    )


@contextlib.contextmanager
def _captured(calls: list[Call]) -> Iterator[None]:
    """Append each launch to `calls` in place of running it."""
    jit = importlib.import_module("triton.runtime.jit")
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    before = jit.JITFunction.run, autotuner.run

    def run(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:  # noqa: ARG001
        mock = jit.MockTensor.wrap_dtype
        constants = {name: mock(_without_data(value)) for name, value in kwargs.items()}
        calls.append(Call(self.fn.__name__, self, tuple(map(_without_data, args)), constants))

    def run_each(self: Any, *args: Any, **kwargs: Any) -> None:
        for config in self.configs:
            self.fn.run(*args, **{**kwargs, **config.all_kwargs()})

    jit.JITFunction.run, autotuner.run = run, run_each
    try:
        yield
    finally:
        jit.JITFunction.run, autotuner.run = before


def _without_data(value: Any) -> Any:
    """The dtype of a tensor, as `JITFunction.warmup` takes it; anything else as it is."""
    import torch

    return value.dtype if isinstance(value, torch.Tensor) else value


def _distinct(calls: list[Call]) -> tuple[Call, ...]:
    """Each launch once; launches of one function with other arguments are numbered."""
    distinct: dict[str, Call] = {}
    counts: dict[str, int] = {}
    for call in calls:
        constants = sorted((name, repr(getattr(value, "dtype", value))) for name, value in call.constants.items())
        key = f"{id(call.function)} {call.arguments!r} {constants}"
        if key in distinct:
            continue
        counts[call.name] = number = counts.get(call.name, 0) + 1
        name = call.name if number == 1 else f"{call.name} ({number})"
        distinct[key] = Call(name, call.function, call.arguments, call.constants)
    return tuple(distinct.values())
