"""Cases with the check protocol: drawn for kernels that execute their roles, on the CPU alone; schedules shrink towards none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace
from support.subjects import LIMITS, Subject

from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.strategies.case import BadCase, Case, case_from_json, with_check
from attnfuzz.strategies.draw import draw_values
from attnfuzz.strategies.schedules import SCHEDULES
from attnfuzz.strategies.shrink_steps import simpler
from attnfuzz.strategies.trials import trial_cases
from attnfuzz.strategies.variants import all_variants

PROBLEM = Problem(seqlens_q=(1,), seqlens_k=(1,), dim_qk=16, dim_v=16)


class WithRoles(Subject):
    """A kernel that executes its roles."""

    def protocol(self, problem: Problem, config: object, schedule: tuple[int, ...]) -> object:
        """Build nothing."""
        raise NotImplementedError


def cases_of(kernel: Subject, device: str, count: int = 200) -> list[Case]:
    values: list[Case] = []
    draw_values(trial_cases(kernel, device=device, limits=LIMITS), values.append, seed=4, examples=count)  # type: ignore[arg-type]
    return values


def test_one_case_in_sixteen_runs_as_roles_where_the_kernel_can() -> None:
    cases = cases_of(WithRoles(), "cpu", 320)
    chosen = [case for case in cases if case.check == "protocol"]
    assert 8 <= len(chosen) <= 36
    assert len({case.schedule for case in chosen}) > 5
    assert all(not case.schedule for case in cases if case.check != "protocol")
    assert not any(case.check == "protocol" for case in cases_of(Subject(), "cpu"))


def test_a_schedule_has_no_zeros_at_its_end() -> None:
    values: list[tuple[int, ...]] = []
    draw_values(SCHEDULES, values.append, seed=1, examples=200)
    assert () in values
    assert all(not each or each[-1] for each in values)
    assert max(map(len, values)) > 60
    assert 60 <= sum(min(each, default=0) < 0 for each in values) <= 140
    assert {each[0] for each in values if each} >= {-6, -1}


def test_a_schedule_is_part_of_the_case() -> None:
    case = Case(kernel="x.y", problem=PROBLEM, check="protocol", schedule=(0, 2, 1))
    assert case_from_json(case.canonical()) == case
    assert case.id != replace(case, schedule=(0, 2)).id
    assert '"schedule":[0,2,1]' in case.canonical()
    assert with_check(case, "oracle") == Case(kernel="x.y", problem=PROBLEM)
    assert with_check(case, "protocol") == case


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('"check":"protocol","schedule":[0,-1]', "choices from 0 to 99"),
        ('"check":"protocol","schedule":[-100]', "the first perhaps from -1 to -99"),
        ('"check":"protocol","schedule":[100]', "choices from 0 to 99"),
        ('"check":"protocol","schedule":' + str([0] * 1001), "not at most 1000 choices"),
        ('"check":"protocol","schedule":"x"', "schedule"),
        ('"schedule":[1]', "only the check protocol has one"),
        ('"check":"twice","schedule":[1]', "only the check protocol has one"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(text: str, reason: str) -> None:
    whole = f'{{"format":1,"kernel":"x.y","problem":{{"seqlens_q":[1],"seqlens_k":[1],"dim_qk":16,"dim_v":16}},{text}}}'
    with pytest.raises((BadCase, BadArgument)) as caught:
        case_from_json(whole)
    assert reason in str(caught.value)


def test_schedules_shrink_towards_none() -> None:
    variants = all_variants(Subject(), "cpu")
    case = Case(kernel="x.y", problem=PROBLEM, check="protocol", schedule=(0, 3, 0, 4, 1, 0, 0, 2))
    steps = [each.schedule for each in simpler(case, variants) if each.schedule != case.schedule]
    assert steps[0] == ()
    assert all(sum(each) < sum(case.schedule) or len(each) < len(case.schedule) for each in steps)

    def shrunk(needed: tuple[int, int]) -> Case:
        """Shrink while the choice at a place is at least what is needed."""
        now, (place, least) = case, needed
        while True:
            fails = (
                x
                for x in simpler(now, variants)
                if x.check == "protocol" and len(x.schedule) > place and x.schedule[place] >= least
            )
            if (better := next((x for x in fails if x != now), None)) is None:
                return now
            now = better

    assert shrunk((3, 2)).schedule == (0, 0, 0, 2)
    assert shrunk((4, 1)).schedule == (0, 0, 0, 0, 1)


def test_a_role_that_is_held_back_remains_where_it_is_needed() -> None:
    variants = all_variants(Subject(), "cpu")

    def shrunk(schedule: tuple[int, ...], fails: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...]:
        now = Case(kernel="x.y", problem=PROBLEM, check="protocol", schedule=schedule)
        while True:
            steps = (each for each in simpler(now, variants) if each.check == "protocol" and each != now)
            if (better := next((each for each in steps if fails(each.schedule)), None)) is None:
                return now.schedule
            now = better

    assert shrunk((-5, 0, 3, 1), lambda each: min(each, default=0) < 0) == (-1,)
    assert shrunk((-5, 0, 3, 1), lambda each: each[:1] in ((-5,), (-4,))) == (-4,)
    assert shrunk((-5, 0, 3, 1), lambda each: each[:1] == (-5,) and 3 in each) == (-5, 0, 3)
    assert shrunk((-5, 0, 3, 1), lambda each: 3 in each) == (0, 3)
