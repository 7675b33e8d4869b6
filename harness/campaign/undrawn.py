"""Which of a kernel's declared abilities none of the Cases had: what was not tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from attnfuzz.harness.campaign.coverage import OTHERS, Tally
from attnfuzz.kernels.contract import Capabilities, Device, Kernel
from attnfuzz.strategies.models import left_out
from attnfuzz.strategies.variants import Variant

__all__ = ["MODELS_LEFT_OUT", "in_none_of", "models_left_out", "never_drawn", "never_drawn_line", "never_drawn_text"]

YES = "yes"
MODELS_LEFT_OUT = "models left out"
"""Stands for the published models whose attention a kernel does not take, with the profile of models."""
_MOST = 4
"""Values of one ability that a text names."""


def never_drawn(can: Capabilities, device: Device, variants: Sequence[Variant], tally: Tally) -> dict[str, tuple[str, ...]]:
    """Return the declared values that no Case had, by what is drawn; empty where there was no Case.

    An ability that a Case has or has not is in the result with the one value "yes".

    Args:
        can: what the kernel declares.
        device: of the run.
        variants: what Cases are drawn from; their Configs count as declared.
        tally: counts of the Cases.
    """
    if not tally.cases:
        return {}
    missing = {
        name: tuple(each for each in values if each not in tally.drawn.get(name, {})) for name, values in _valued(can, device)
    }
    if OTHERS not in (configs := tally.drawn.get("Config", {})):
        declared = dict.fromkeys(str(each.config) for each in variants if each.config)
        missing["Config"] = tuple(each for each in declared if each not in configs)
    missing |= {name: () if seen else (YES,) for name, seen in _abilities(can, tally)}
    return {name: values for name, values in missing.items() if values}


def _valued(can: Capabilities, device: Device) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield what is drawn, and its declared values as `drawn_values` writes them."""
    yield "dtype", can.dtypes_for(device)
    yield "causal", tuple(each or "no" for each in can.causal)
    yield "packing", can.packings
    yield "dim_qk x dim_v", tuple(f"{dim_qk} x {dim_v}" for dim_qk, dim_v in can.dims)
    yield "groups", tuple(map(str, can.groups or ()))


def _abilities(can: Capabilities, tally: Tally) -> Iterator[tuple[str, bool]]:
    """Yield each declared ability, and whether a Case had it."""
    for name, declared in (("window", can.window), ("softcap", can.softcap)):
        if declared:
            yield name, YES in tally.drawn.get(name, {})
    if any(can.page_sizes):
        yield "paged cache", bool(tally.drawn.get("page size"))
    if can.sinks:
        yield "sinks", bool(tally.drawn.get("sinks"))
    for name, declared in (("score_mod", can.score_mod), ("mask_mod", can.mask_mod)):
        if declared:
            yield name, bool(tally.drawn.get(name, {}).keys() - {"none"})
    if can.layouts:
        yield "layouts other than plain", bool(tally.drawn.get("layout", {}).keys() - {"plain"})
    features = {
        "zero-length queries": can.zero_q,
        "zero-length keys": can.zero_k,
        "q shorter than k": can.unequal,
        "q longer than k": can.unequal,
        "slack rows": can.slack,
    }
    for name, declared in features.items():
        if declared:
            yield name, name in tally.features


def models_left_out(kernel: Kernel, device: Device, longest: int) -> dict[str, tuple[str, ...]]:
    """Return the models that the kernel does not take, by reason: all that is not drawn on purpose with the profile of models."""
    names: dict[str, list[str]] = {}
    for model, reason in left_out(kernel, device, longest).items():
        names.setdefault(reason, []).append(model)
    texts = tuple(f"{', '.join(models)} ({reason})" for reason, models in names.items())
    return {MODELS_LEFT_OUT: texts} if texts else {}


def in_none_of(parts: Iterable[Mapping[str, Sequence[str]]]) -> dict[str, tuple[str, ...]]:
    """Return what was drawn in none of the parts of a run, of what was not drawn in each."""
    first, *others = parts
    common = {
        name: tuple(each for each in values if all(each in other.get(name, ()) for other in others))
        for name, values in first.items()
    }
    return {name: values for name, values in common.items() if values}


def never_drawn_line(missing: Mapping[str, Sequence[str]]) -> str:
    """Return a line for people that says what Cases did not have; empty where nothing is missing."""
    text = never_drawn_text(missing)
    return text if not text or MODELS_LEFT_OUT in missing else f"declared, and in no case: {text}"


def never_drawn_text(missing: Mapping[str, Sequence[str]]) -> str:
    """Return the result of `never_drawn` in words, such as "dtype float32; window"; empty where nothing is missing."""
    texts = []
    for name, values in missing.items():
        most = len(values) if name == MODELS_LEFT_OUT else _MOST
        more = f" and {len(values) - most} more" if len(values) > most else ""
        texts.append(name if tuple(values) == (YES,) else f"{name} {', '.join(values[:most])}{more}")
    return "; ".join(texts)
