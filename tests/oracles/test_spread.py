"""Tokens sampled from several parts at once are those of each part by the definition."""

from __future__ import annotations

import random

import pytest

from attnfuzz.oracles.frames import spread

GOLDEN = (5**0.5 - 1) / 2


def defined(ranges: list[range], heads: int, most: int) -> list[tuple[int, int, int]]:
    """Tokens in the order of sequences, heads and tokens; where they are too many, those at multiples of the golden ratio."""
    every = [(at, head, token) for at, each in enumerate(ranges) for head in range(heads) for token in each]
    if len(every) <= most:
        return every
    return [every[at] for at in sorted({int(len(every) * (n * GOLDEN % 1.0)) for n in range(most)})]


@pytest.mark.parametrize("most", [1, 8, 64])
def test_tokens_of_several_parts_are_those_of_each(most: int) -> None:
    generator = random.Random(most)

    def drawn() -> range:
        start = generator.choice([0, 0, 3, 11])
        return range(start, start + generator.choice([0, 1, 5, 40]))

    parts = [[drawn() for _ in range(generator.randint(1, 4))] for _ in range(60)]
    heads = [generator.randint(1, 6) for _ in parts]
    x = spread(parts, heads, most)
    assert x.kept.shape == (len(parts), most)
    sampled = 0
    for number, (ranges, own) in enumerate(zip(parts, heads, strict=True)):
        kept = x.kept[number]
        got = list(zip(*(each[number][kept].tolist() for each in (x.sequence, x.head, x.token)), strict=True))
        assert got == defined(ranges, own, most)
        sampled += sum(map(len, ranges)) * own > most
    assert 0 < sampled < len(parts)
