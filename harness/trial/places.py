"""Where the tokens of each sequence are, as tensors on the device."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import accumulate

import torch

from attnfuzz.harness.trial.noise import Numbers
from attnfuzz.kernels.problem import Problem

__all__ = ["Places", "cumulated", "equal_lengths", "lists_of", "starts_of"]


class Places:
    """For each token of a side: sequence, position in it, the sequence's first token and length; int64 (tokens,)."""

    def __init__(self, lengths: tuple[int, ...], numbers: Numbers) -> None:
        self._lengths, self._numbers = lengths, numbers

    @functools.cached_property
    def _tokens(self) -> torch.Tensor:
        return torch.arange(sum(self._lengths), device=self._numbers.device)

    @functools.cached_property
    def sequence(self) -> torch.Tensor:
        """The sequence of each token: as many end before it, or with it."""
        return torch.searchsorted(self._numbers.integers(cumulated(self._lengths))[1:], self._tokens, right=True)

    @functools.cached_property
    def length(self) -> torch.Tensor:
        """Its length."""
        return self._numbers.integers(self._lengths)[self.sequence]

    @functools.cached_property
    def first(self) -> torch.Tensor:
        """Its first token."""
        return self._numbers.integers(starts_of(self._lengths))[self.sequence]

    @functools.cached_property
    def position(self) -> torch.Tensor:
        """The position in it."""
        return self._tokens - self.first

    def block(self, count: int) -> torch.Tensor:
        """Return for each token the first one of its block, with `count` blocks (and a rest) in a sequence."""
        size = (self.length // count).clamp(min=1)
        return self.first + self.position // size * size

    def sorted(self, x: torch.Tensor) -> torch.Tensor:
        """Sort noise along each sequence, ascending; as integers, so that one sort is enough for all sequences."""
        offset = (self.sequence << 20)[:, None, None]
        return ((x * 4096).to(torch.int64) + offset).sort(0).values.sub(offset).to(torch.float32) / 4096


def cumulated(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return where each sequence begins, and where the last one ends."""
    return (0, *accumulate(lengths))


def starts_of(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first token of each sequence."""
    return tuple(accumulate(lengths[:-1], initial=0))


def equal_lengths(problem: Problem) -> tuple[int, ...]:
    """Return for each sequence 1 if it has as many queries as keys, else 0."""
    return tuple(int(n_q == n_k) for n_q, n_k in zip(problem.seqlens_q, problem.seqlens_k, strict=True))


def lists_of(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Yield the lists of integers that the values of a Problem may need on the device."""
    yield equal_lengths(problem)
    for lengths in (problem.seqlens_q, problem.seqlens_k):
        yield lengths
        yield starts_of(lengths)
        yield cumulated(lengths)
