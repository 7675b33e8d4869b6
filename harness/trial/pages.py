"""A paged key/value cache from the keys and values of a batch: permuted and shared pages, NaN in all rows of no token.

Pages lie in an order drawn from the seed. Some sequences share the first pages of the first one, as requests with a common prefix
do: their keys and values become equal there. Rows behind a sequence's last token, one page that no sequence has, and what the
table names behind the last page hold NaN.
"""

from __future__ import annotations

import dataclasses
import random

import torch

from attnfuzz.kernels.contract import Inputs
from attnfuzz.kernels.problem import Problem

__all__ = ["with_pages"]

_SHARED = (0, 0, 1, 2)
"""Full pages that a sequence shares with the first one, at most."""


def with_pages(inputs: Inputs, seed: int) -> Inputs:
    """Return the inputs with their keys and values in pages too."""
    problem, device = inputs.problem, inputs.k.device
    table, tokens, pages = _table(problem, seed)
    at = [end - n for end, n in zip(_ends(problem.seqlens_k), problem.seqlens_k, strict=True)]
    k, v = inputs.k, inputs.v
    for index, shared in enumerate(tokens):
        if shared:
            for x in (k, v):
                x[at[index] : at[index] + shared] = x[at[0] : at[0] + shared].clone()
    places = [
        table[b][j // problem.page_size] * problem.page_size + j % problem.page_size
        for b, n in enumerate(problem.seqlens_k)
        for j in range(n)
    ]

    def sent(numbers: object, dtype: torch.dtype) -> torch.Tensor:
        # Not waited for: the driver takes its own copy.
        return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)

    rows = sent(places, torch.int64)
    return dataclasses.replace(
        inputs,
        k_pages=_filled(k, rows, pages, problem.page_size),
        v_pages=_filled(v, rows, pages, problem.page_size),
        page_table=sent(table, torch.int32),
        seqlens_k=sent(problem.seqlens_k, torch.int32),
    )


def _filled(x: torch.Tensor, rows: torch.Tensor, pages: int, size: int) -> torch.Tensor:
    cache = x.new_full((pages * size, *x.shape[1:]), torch.nan)
    cache[rows] = x[: len(rows)]
    return cache.unflatten(0, (pages, size))


def _table(problem: Problem, seed: int) -> tuple[list[list[int]], list[int], int]:
    """Return the page table, the tokens that each sequence shares with the first one, and the number of pages."""
    numbers, size = random.Random(f"pages:{seed}"), problem.page_size
    counts = [-(-n // size) for n in problem.seqlens_k]
    full = [n // size for n in problem.seqlens_k]
    shared = [min(numbers.choice(_SHARED), full[0], full[b]) if b else 0 for b in range(problem.batch)]
    own = sum(count - each for count, each in zip(counts, shared, strict=True))
    order = list(range(own + 1))
    numbers.shuffle(order)
    unused, left = order[0], iter(order[1:])
    table: list[list[int]] = []
    for b, count in enumerate(counts):
        row = [*(table[0][: shared[b]] if b else ()), *(next(left) for _ in range(count - shared[b]))]
        table.append(row)
    most = max(1, *counts)
    return [[*row, *[unused] * (most - len(row))] for row in table], [each * size for each in shared], own + 1


def _ends(lengths: tuple[int, ...]) -> list[int]:
    ends, total = [], 0
    for n in lengths:
        total += n
        ends.append(total)
    return ends
