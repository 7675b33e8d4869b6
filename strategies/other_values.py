"""Cases of the same shapes with other values: what a kernel is given whose every shape takes long to compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from attnfuzz.kernels.contract import Capabilities, Device
from attnfuzz.strategies.case import RELATIONS, Case, Recipe
from attnfuzz.strategies.draw import drawn
from attnfuzz.strategies.recipes import recipes

__all__ = ["values_of_a_shape", "with_other_values"]

_VALUES = 8
"""Cases of each shape of such a kernel. A compile on a GPU takes seconds, a Case of code that is compiled milliseconds."""


def values_of_a_shape(can: Capabilities, device: Device) -> int:
    """Return the number of Cases that share a shape: 1, except on a GPU for kernels that compile for each shape."""
    return _VALUES if can.compiles_each_shape and device == "cuda" else 1


def with_other_values(cases: Sequence[Case], count: int, seed: int, takes: Callable[[Case], bool] = lambda _: True) -> list[Case]:
    """Return each Case, followed by `count` - 1 others with the same Problem, Config and check, and other Recipes.

    Fewer follow where `takes` refuses some, or a dtype has no more Recipes in a few draws. How a relation changes the lengths may
    depend on the seed.
    """
    others = (filter(takes, _others(case, count - 1, seed * 1000 + number)) for number, case in enumerate(cases))
    return [each for case, more in zip(cases, others, strict=True) for each in (case, *more)]


def _others(case: Case, count: int, seed: int) -> Iterator[Case]:
    if count < 1:
        return
    known = {case.recipe}
    for drawn_recipe in drawn(recipes(case.problem.dtype), seed=seed, examples=8 * count, quota=count):
        recipe = _fitting(drawn_recipe, case)
        if recipe not in known:
            known.add(recipe)
            yield replace(case, recipe=recipe)


def _fitting(recipe: Recipe, case: Case) -> Recipe:
    """Return a drawn Recipe for the Problem and check of `case`.

    Large products need the small scale that was drawn with them. What a relation compares is known for its own pattern and
    magnitudes, which were drawn for it: only the seed is another.
    """
    if case.check in RELATIONS:
        return replace(case.recipe, seed=recipe.seed)
    pattern = "large_logits" if recipe.pattern == "large_products" else recipe.pattern
    return replace(recipe, pattern=pattern, sinks=case.recipe.sinks)
