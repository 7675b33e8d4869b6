"""Relations that change values: scores shifted, V and dO scaled, keys changed that a mask hides."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import torch

from attnfuzz.kernels.contract import Outputs
from attnfuzz.kernels.problem import OutputName, Problem
from attnfuzz.oracles.attention import SequenceData, sequences
from attnfuzz.oracles.formats import Format
from attnfuzz.oracles.relations.difference import Difference, Related, Setup, exactly
from attnfuzz.oracles.relations.sizes import Noise, key_counts
from attnfuzz.oracles.relations.tensors import BY_QUERY, output, packed

__all__ = ["cut_rows", "future_keys", "scaled_values", "shifted_scores"]

_LN_2 = math.log(2.0)
_SHIFTS = (96.0, -96.0, 24.0, -120.0)
_LARGEST_FACTOR = 2048.0
_SCALES = ((2, 1), (1, 2), (2, 0), (0, 2))
"""Exponents of two for V and dO: none negative, so that no value becomes subnormal."""
_FUTURE = -16.0


def _noise(setup: Setup, data: SequenceData, shift: torch.Tensor | None = None) -> Noise:
    return Noise(setup.inputs.problem, data, setup.deviations, setup.device, shift)


def shifted_scores(setup: Setup) -> Related:
    """Add a constant to all scores of a row: its LSE moves by that constant, and nothing else changes.

    The last dim of all keys is c, the power of two next to their deviation; that of the queries is 0 in one launch and b_i in the
    other, so that the scores of row i are larger by scale * b_i * c. dK depends on q itself, so its last dim is left out.
    b_i moves scores by up to 120 and has 8 bits, so that b_i * c is exact in every dtype.
    """
    (problem,) = setup.problems
    parts, whole = [], list(sequences(setup.inputs))
    commons = _commons([part.k for part in whole])
    for part, common in zip(whole, commons, strict=True):
        q, k = part.q.clone(), part.k.clone()
        q[..., -1], k[..., -1] = 0, common
        parts.append(dataclasses.replace(part, q=q, k=k))
    factors = [_factors(problem, part, common) for part, common in zip(parts, commons, strict=True)]
    moved = []
    for part, factor in zip(parts, factors, strict=True):
        q = part.q.clone()
        q[..., -1] = factor.to(q.dtype)
        moved.append(dataclasses.replace(part, q=q))
    base = _LN_2 if setup.deviations.lse_base2 else 1.0

    def differences(outputs: Sequence[Outputs]) -> Iterator[Difference]:
        for part, factor, common in zip(parts, factors, commons, strict=True):
            shift = problem.scale * factor * common
            noise = _noise(setup, part, shift)
            for name in problem.needs.outputs:
                expected = output(problem, outputs[0], name, part.index)
                got = output(problem, outputs[1], name, part.index)
                if name == "lse":
                    expected = expected + shift / base
                if name == "dk":
                    got, expected = got[..., :-1], expected[..., :-1]
                yield noise.difference(name, got, expected)

    return Related((packed(problem, parts), packed(problem, moved)), differences)


def _factors(problem: Problem, part: SequenceData, common: float) -> torch.Tensor:
    """Return b_i of each head and row, float64 `(heads, seqlen_q)`."""
    heads, rows = part.q.shape[:2]
    wanted = torch.tensor(_SHIFTS, dtype=torch.float64).to(part.q.device, non_blocking=True) / common
    place = torch.arange(heads, device=part.q.device)[:, None] + torch.arange(rows, device=part.q.device)
    factor = wanted[place % len(_SHIFTS)] / problem.scale if problem.scale else torch.zeros_like(place, dtype=torch.float64)
    return factor.clamp(-_LARGEST_FACTOR / common, _LARGEST_FACTOR / common).to(torch.bfloat16).double()


def _commons(keys: Sequence[torch.Tensor]) -> list[float]:
    """Return c, the last dim of all keys, for each sequence: of the size of k, since it is a factor in dQ's last dim."""
    squares = [k[..., :-1].double().square().mean() if k.numel() else k.new_ones((), dtype=torch.float64) for k in keys]
    sizes = [math.sqrt(square) for square in torch.stack(squares).tolist()]
    return [2.0 ** round(math.log2(size)) if size else 1.0 for size in sizes]


def scaled_values(setup: Setup) -> Related:
    """Scale V by 2^a and dO by 2^b: O scales by 2^a, dV by 2^b, dQ and dK by 2^(a + b); LSE stays.

    Outputs declared deterministic are compared bit by bit, except one rounding of subnormals: a power of two changes no other
    rounding. dQ and dK of float16, where some dS is subnormal at any size, are compared as noise; so is dV with half-precision
    partial sums.
    """
    (problem,) = setup.problems
    a, b = _SCALES[setup.seed % len(_SCALES)]
    parts = list(sequences(setup.inputs))
    scaled = [dataclasses.replace(part, v=part.v * 2.0**a, d_o=part.d_o * 2.0**b) for part in parts]
    powers: dict[OutputName, int] = {"o": a, "lse": 0, "dq": a + b, "dk": a + b, "dv": b}
    form, half = Format.of(problem.dtype), problem.dtype == "float16"
    inexact = {name for name in ("dq", "dk", "dv") if half and (name != "dv" or setup.deviations.half_partials)}

    def differences(outputs: Sequence[Outputs]) -> Iterator[Difference]:
        for part in parts:
            noise = functools.cache(functools.partial(_noise, setup, part))
            for name in problem.needs.outputs:
                factor = 2.0 ** powers[name]
                expected = output(problem, outputs[0], name, part.index)
                got = output(problem, outputs[1], name, part.index) / factor
                if name in setup.deterministic and name not in inexact:
                    # The smallest normal itself may be a subnormal that was rounded up.
                    small = expected.abs() <= 2.0**form.min_exponent
                    allowed = (small & (name != "lse")).double() * (form.eta * (1 + 1 / factor))
                    yield Difference(name, part.index, got, expected, allowed)
                else:
                    yield noise().difference(name, got, expected)

    return Related((setup.inputs, packed(problem, scaled)), differences)


def cut_rows(problem: Problem, index: int, seed: int) -> int:
    """Return the length of the prefix of queries that must not see the changed keys: 0 where every prefix sees every key."""
    n_q, n_k = problem.seqlens_q[index], problem.seqlens_k[index]
    most = min(n_q, n_k - 1) if problem.causal == "top_left" else n_q - 1
    if problem.causal is None or n_k == 0 or most < 1:
        return 0
    choices = (most, (most + 1) // 2, 1, 1 + seed // 4 % most)
    return choices[seed % 4]


def future_keys(setup: Setup) -> Related:
    """Change the keys that a causal mask hides from a prefix of queries: O, LSE and dQ of the prefix stay, bit by bit.

    Keys and values from the first hidden one on are reversed and multiplied by -16. Outputs that are not declared deterministic
    are compared as noise.
    """
    (problem,) = setup.problems
    parts = list(sequences(setup.inputs))
    rows = [cut_rows(problem, part.index, setup.seed) for part in parts]
    changed = []
    for part, count in zip(parts, rows, strict=True):
        first = int(key_counts(problem, part.index, "cpu")[count - 1]) if count else part.k.shape[1]
        k, v = part.k.clone(), part.v.clone()
        k[:, first:], v[:, first:] = k[:, first:].flip(1) * _FUTURE, v[:, first:].flip(1) * _FUTURE
        changed.append(dataclasses.replace(part, k=k, v=v))

    def differences(outputs: Sequence[Outputs]) -> Iterator[Difference]:
        for part, count in zip(parts, rows, strict=True):
            noise = functools.cache(functools.partial(_noise, setup, part))
            for name in (each for each in problem.needs.outputs if each in BY_QUERY):
                expected = output(problem, outputs[0], name, part.index)
                got = output(problem, outputs[1], name, part.index)
                exact = name in setup.deterministic
                yield (exactly(name, part.index, got, expected) if exact else noise().difference(name, got, expected)).prefix(
                    count
                )

    return Related((setup.inputs, packed(problem, changed)), differences)
