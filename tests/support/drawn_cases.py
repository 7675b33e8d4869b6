"""Cases that several tests of the strategies draw, and what these tests ask of a Case or of Hypothesis."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from support.subjects import LIMITS, Subject

from attnfuzz.kernels.problem import LAYOUTS, Layout, Problem
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.cases import Limits, cases
from attnfuzz.strategies.draw import draw_values


def quiet(count: int) -> settings:
    return settings(
        max_examples=count, deadline=None, database=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck)
    )


def draw_cases(subject: Subject, count: int = 100, limits: Limits = LIMITS, seed: int = 5) -> list[Case]:
    """`count` Cases of a seed, without shrinking."""
    collected: list[Case] = []

    draw_values(cases(subject, device="cpu", limits=limits), collected.append, seed=seed, examples=count)
    return collected


def tiles(case: Case) -> int:
    problem, tile_m, tile_n = case.problem, case.config.integer("tile_m"), case.config.integer("tile_n")
    pairs = zip(problem.seqlens_q, problem.seqlens_k, strict=True)
    return problem.heads * sum(-(-n_q // tile_m) * -(-n_k // tile_n) for n_q, n_k in pairs)


def pairs(case: Case) -> list[tuple[int, int]]:
    return list(zip(case.problem.seqlens_q, case.problem.seqlens_k, strict=True))


def laid_out(problem: Problem) -> list[str]:
    return [name for name in LAYOUTS if getattr(problem, name) != Layout()]
