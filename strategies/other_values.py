"""Cases of the same shapes with other values: what a kernel is given whose every shape takes seconds to compile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from attnfuzz.kernels.contract import Capabilities, Device
from attnfuzz.strategies.case import Case, Recipe
from attnfuzz.strategies.draw import drawn
from attnfuzz.strategies.recipes import recipes

__all__ = ["values_of_a_shape", "with_other_values"]

_VALUES = 8
"""Cases of each shape of such a kernel. A compile on a GPU takes seconds, a Case of code that is compiled milliseconds."""


def values_of_a_shape(can: Capabilities, device: Device) -> int:
    """Return the number of Cases that share a shape: 1, except on a GPU for kernels that compile for each shape."""
    return _VALUES if can.compiles_each_shape and device == "cuda" else 1


def with_other_values(cases: Sequence[Case], count: int, seed: int) -> list[Case]:
    """Return each Case, followed by `count` - 1 others with the same Problem, Config and check, and other Recipes.

    Fewer follow where a dtype has no more Recipes in a few draws.
    """
    return [each for number, case in enumerate(cases) for each in (case, *_others(case, count - 1, seed * 1000 + number))]


def _others(case: Case, count: int, seed: int) -> Iterator[Case]:
    if count < 1:
        return
    known = {case.recipe}
    for drawn_recipe in drawn(recipes(case.problem.dtype), seed=seed, examples=8 * count, quota=count):
        recipe = _fitting(drawn_recipe, case.recipe)
        if recipe not in known:
            known.add(recipe)
            yield replace(case, recipe=recipe)


def _fitting(recipe: Recipe, of_case: Recipe) -> Recipe:
    """Return a drawn Recipe for the Problem of another one: large products need the small scale that was drawn with them."""
    pattern = "large_logits" if recipe.pattern == "large_products" else recipe.pattern
    return replace(recipe, pattern=pattern, sinks=of_case.sinks)
