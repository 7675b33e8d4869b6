"""Relations that rearrange the same tokens: parts of a batch, permuted keys, repeated heads, split keys.

None is bit by bit, since a kernel may add in another order. Two correct runs may differ by `sizes.Noise`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from msgspec.structs import replace

from attnfuzz.kernels.contract import Outputs
from attnfuzz.kernels.problem import Problem
from attnfuzz.oracles.attention import SequenceData, sequences
from attnfuzz.oracles.relations.difference import Difference, Related, Setup
from attnfuzz.oracles.relations.sizes import Noise
from attnfuzz.oracles.relations.tensors import output, packed

__all__ = ["permuted_keys", "repeated_heads", "split_batch", "split_keys"]

_LN_2 = math.log(2.0)


def _noise(setup: Setup, data: SequenceData) -> Noise:
    return Noise(setup.inputs.problem, data, setup.deviations, setup.device)


def split_batch(setup: Setup) -> Related:
    """Launch the whole batch and each of its sequences alone (`setup.problems`): all outputs are equal."""
    parts = list(sequences(setup.inputs))
    alone = [packed(problem, [dataclasses.replace(part, index=0)]) for problem, part in zip(setup.problems, parts, strict=True)]

    def differences(outputs: Sequence[Outputs]) -> Iterator[Difference]:
        whole = setup.inputs.problem
        for part, problem, own in zip(parts, setup.problems, outputs[1:], strict=True):
            noise = _noise(setup, part)
            for name in whole.needs.outputs:
                got = output(whole, outputs[0], name, part.index)
                yield noise.difference(name, got, output(problem, own, name, 0))

    return Related((setup.inputs, *alone), differences)


def _order(keys: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return a permutation of the keys: j -> (a j + b) mod keys, neighbours far apart. Integers, the same on every device."""
    step = max(1, round(keys * 0.6180339887))
    while math.gcd(step, keys) != 1:
        step += 1
    return (torch.arange(keys, device=device) * step + seed) % max(1, keys)


def permuted_keys(setup: Setup) -> Related:
    """Permute the keys, without a mask: O, LSE, dQ stay, dK and dV are permuted alike."""
    (problem,) = setup.problems
    parts = list(sequences(setup.inputs))
    orders = [_order(part.k.shape[1], setup.seed, part.k.device) for part in parts]
    moved = [dataclasses.replace(part, k=part.k[:, order], v=part.v[:, order]) for part, order in zip(parts, orders, strict=True)]

    def differences(outputs: Sequence[Outputs]) -> Iterator[Difference]:
        for part, order in zip(parts, orders, strict=True):
            noise = _noise(setup, part)
            for name in problem.needs.outputs:
                got = output(problem, outputs[0], name, part.index)
                expected = output(problem, outputs[1], name, part.index)
                if name in ("dk", "dv"):
                    expected = torch.empty_like(expected).index_copy_(1, order, expected)
                yield noise.difference(name, got, expected)

    return Related((setup.inputs, packed(problem, moved)), differences)


def repeated_heads(setup: Setup) -> Related:
    """Repeat the key/value heads, so that grouped heads become multi-head attention; dK, dV are sums over the groups."""
    (problem,) = setup.problems
    parts, groups = list(sequences(setup.inputs)), setup.inputs.problem.groups
    repeated = [
        dataclasses.replace(part, k=part.k.repeat_interleave(groups, 0), v=part.v.repeat_interleave(groups, 0)) for part in parts
    ]

    def differences(outputs: Sequence[Outputs]) -> Iterator[Difference]:
        whole = setup.inputs.problem
        for part in parts:
            noise = _noise(setup, part)
            for name in problem.needs.outputs:
                expected = output(problem, outputs[1], name, part.index)
                if name in ("dk", "dv"):
                    expected = expected.unflatten(0, (whole.kv_heads, groups)).sum(1)
                yield noise.difference(name, output(whole, outputs[0], name, part.index), expected)

    return Related((setup.inputs, packed(problem, repeated)), differences)


def split_keys(setup: Setup) -> Related:
    """Split the keys in two parts, without a mask: attention over all keys is that over the parts, merged by their LSE.

    LSE = log(exp(LSE_a) + exp(LSE_b)), O = exp(LSE_a - LSE) O_a + exp(LSE_b - LSE) O_b (Dao et al., FlashDecoding, 2023).
    """
    parts = list(sequences(setup.inputs))
    cuts = [problem.seqlens_k for problem in setup.problems]
    halves = [
        [
            dataclasses.replace(part, k=part.k[:, keys], v=part.v[:, keys])
            for part in parts
            for keys in [slice(cut[part.index]) if first else slice(part.k.shape[1] - cut[part.index], None)]
        ]
        for first, cut in zip((True, False), cuts, strict=True)
    ]
    launches = [packed(problem, half) for problem, half in zip(setup.problems, halves, strict=True)]
    base = _LN_2 if setup.deviations.lse_base2 else 1.0

    def differences(outputs: Sequence[Outputs]) -> Iterator[Difference]:
        whole = setup.inputs.problem
        for part in parts:
            noise = _noise(setup, part)
            pairs = list(zip(setup.problems, outputs[1:], strict=True))
            logs = torch.stack([output(problem, own, "lse", part.index) for problem, own in pairs]) * base
            total = torch.logsumexp(logs, 0)
            weights = torch.exp(logs - torch.where(torch.isinf(total), 0.0, total))
            o = sum(weight[..., None] * output(*pair, "o", part.index) for weight, pair in zip(weights, pairs, strict=True))
            assert isinstance(o, torch.Tensor)
            if "lse" in whole.needs.outputs:
                yield noise.difference("lse", output(whole, outputs[0], "lse", part.index), total / base)
            if "o" in whole.needs.outputs:
                yield noise.difference("o", output(whole, outputs[0], "o", part.index), o)

    first = dataclasses.replace(setup.inputs, problem=_forward_only(setup.inputs.problem))
    return Related((first, *launches), differences)


def _forward_only(problem: Problem) -> Problem:
    return replace(problem, needs=replace(problem.needs, outputs=("o", "lse")))
