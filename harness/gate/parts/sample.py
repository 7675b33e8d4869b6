"""The Cases that head and base are compared on: a fixed sample for errors, a few large ones for speed."""

from __future__ import annotations

from msgspec.structs import replace

from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Causal, Needs, Problem
from attnfuzz.strategies.case import Case, Recipe
from attnfuzz.strategies.cases import Limits, cases
from attnfuzz.strategies.draw import draw_values
from attnfuzz.strategies.pools import pool
from attnfuzz.strategies.variants import all_variants

__all__ = ["accuracy_cases", "speed_cases"]

_LIMITS: dict[Device, Limits] = {
    "cpu": Limits(batch=3, heads=6, length=150, tiles=8),
    "cuda": Limits(batch=4, heads=8, length=1024, tiles=512),
}
_VARIANTS: dict[Device, int] = {"cpu": 3, "cuda": 12}
"""Variants that are compiled for the sample, on devices where compiling takes long."""
_LEAST = 512
"""Least number of elements of an output for its errors to be measured."""
_DRAWS = 20
_SPEED: dict[Device, tuple[tuple[int, int, int], ...]] = {
    "cpu": ((1, 4, 128), (1, 2, 64)),
    "cuda": ((4, 32, 4096), (2, 16, 2048), (1, 8, 1024)),
}
"""(batch, heads, length): the first that the kernel takes is timed."""


def accuracy_cases(kernel: Kernel, device: Device, count: int, seed: int) -> tuple[Case, ...]:
    """Draw up to `count` Cases of `kernel`, the same for the same kernel, device and seed.

    Every second Case has plain normal values, whose errors are all of one size.
    """
    variants = all_variants(kernel, device)
    if device in kernel.capabilities.compiles_on:
        variants = pool(variants, _VARIANTS[device], seed)
    chosen: dict[Case, None] = {}

    def choose(case: Case) -> bool:
        problem = case.problem
        visible = sum(n_q * min(n_k, 1) for n_q, n_k in zip(problem.seqlens_q, problem.seqlens_k, strict=True))
        if visible * problem.heads * problem.dim_v >= _LEAST:
            plain = replace(case, recipe=Recipe(seed=len(chosen))) if len(chosen) % 2 == 0 else case
            chosen.setdefault(plain)
        return len(chosen) == count

    strategy = cases(kernel, device=device, limits=_LIMITS[device], variants=variants)
    draw_values(strategy, choose, seed=seed, examples=_DRAWS * count)
    return tuple(chosen)


def speed_cases(kernel: Kernel, device: Device) -> tuple[Case, ...]:
    """Return the largest usual problem that the kernel takes, in its first dtype, dims and Config: without and with a mask."""
    can = kernel.capabilities
    masks: list[Causal | None] = [each for each in (None, "bottom_right", "top_left") if each in can.causal]
    timed = []
    for causal in masks[:2]:
        for batch, heads, length in _SPEED[device]:
            if (case := _speed_case(kernel, device, causal, batch, heads, min(length, can.length_max or length))) is not None:
                timed.append(case)
                break
    return tuple(timed)


def _speed_case(kernel: Kernel, device: Device, causal: Causal | None, batch: int, heads: int, length: int) -> Case | None:
    can = kernel.capabilities
    dim_qk, dim_v = can.dims[0]
    groups = 1 if can.groups is None else can.groups[0]
    try:
        problem = Problem(
            seqlens_q=(length,) * batch,
            seqlens_k=(length,) * batch,
            packing=can.packings[0],
            heads=heads * groups if heads % groups else heads,
            kv_heads=heads if heads % groups else heads // groups,
            dim_qk=dim_qk,
            dim_v=dim_v,
            dtype=can.dtypes_for(device)[0],
            causal=causal,
            page_size=can.page_sizes[0] if can.page_sizes else 0,
            needs=Needs(outputs=can.outputs),
        )
    except BadArgument:
        return None
    for config in kernel.configs(problem)[:1]:
        if kernel.supports(problem, config, device) is None:
            return Case(kernel=kernel.name, problem=problem, config=config)
    return None
