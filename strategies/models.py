"""Cases with the attention shapes of published models, as their configurations have them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from hypothesis import strategies as st

from attnfuzz.kernels.contract import Capabilities, Config, Device, Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Causal, Dtype, Problem
from attnfuzz.strategies.case import SINK_VALUES, Case
from attnfuzz.strategies.cases import Limits
from attnfuzz.strategies.kernel_limits import within_limits
from attnfuzz.strategies.layouts import layouts
from attnfuzz.strategies.lengths import batches
from attnfuzz.strategies.modifiers import chosen
from attnfuzz.strategies.recipes import recipes
from attnfuzz.strategies.variants import Variant, one_variant
from attnfuzz.strategies.weighted import weighted

__all__ = ["MODELS", "Model", "left_out", "model_cases", "model_variants"]

_HALF: tuple[Dtype, ...] = ("bfloat16", "float16")
_SINK_VALUES = st.sampled_from(("moderate", "moderate", *SINK_VALUES))
_MASKS: tuple[Causal, ...] = ("bottom_right", "top_left")


@dataclass(frozen=True, slots=True)
class Model:
    """The attention of one model: heads, dims and what differs from plain softmax attention."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    dim_v: int | None = None
    """None: as `dim`."""
    causal: bool = True
    window: int | None = None
    """Keys that a query sees, its own among them; None: all."""
    softcap: float = 0.0
    softmax_scale: float | None = None
    """None: dim ** -0.5."""
    sinks: bool = False
    """One learned logit a head in the softmax."""

    @property
    def dims(self) -> tuple[int, int]:
        """dim_qk and dim_v."""
        return self.dim, self.dim if self.dim_v is None else self.dim_v


# Gemma 2 and 3 scale by query_pre_attn_scalar ** -0.5, DeepSeek by 192 ** -0.5 times the square of YaRN's factor.
# fmt: off
MODELS = (
    Model("GPT-2", 12, 12, 64), Model("GPT-2 XL", 25, 25, 64), Model("GPT-J 6B", 16, 16, 256), Model("GPT-NeoX 20B", 64, 64, 96),
    Model("Llama 2 7B", 32, 32, 128), Model("Llama 3 8B", 32, 8, 128), Model("Llama 3 70B", 64, 8, 128),
    Model("Llama 3.1 405B", 128, 8, 128), Model("Llama 3.2 1B", 32, 8, 64), Model("Llama 3.2 3B", 24, 8, 128),
    Model("Mistral 7B v0.1", 32, 8, 128, window=4096), Model("Mixtral 8x7B", 32, 8, 128),
    Model("Qwen 2.5 0.5B", 14, 2, 64), Model("Qwen 2.5 7B", 28, 4, 128), Model("Qwen 2.5 14B", 40, 8, 128),
    Model("Qwen 3 0.6B", 16, 8, 128), Model("Qwen 3 8B", 32, 8, 128), Model("Qwen 3 32B", 64, 8, 128),
    Model("Gemma 2 2B (local)", 8, 4, 256, window=4096, softcap=50.0, softmax_scale=256**-0.5),
    Model("Gemma 2 9B (local)", 16, 8, 256, window=4096, softcap=50.0, softmax_scale=256**-0.5),
    Model("Gemma 2 9B (global)", 16, 8, 256, softcap=50.0, softmax_scale=256**-0.5),
    Model("Gemma 2 27B (local)", 32, 16, 128, window=4096, softcap=50.0, softmax_scale=144**-0.5),
    Model("Gemma 2 27B (global)", 32, 16, 128, softcap=50.0, softmax_scale=144**-0.5),
    Model("Gemma 3 1B (local)", 4, 1, 256, window=512, softmax_scale=256**-0.5),
    Model("Gemma 3 27B (local)", 32, 16, 128, window=1024, softmax_scale=168**-0.5),
    Model("DeepSeek-V2-Lite", 16, 16, 192, dim_v=128, softmax_scale=0.1147213867929261),
    Model("DeepSeek-V3", 128, 128, 192, dim_v=128, softmax_scale=0.1352337788608801),
    Model("Phi-2", 32, 32, 80), Model("Phi-3 mini", 32, 32, 96, window=2047), Model("Phi-3 medium", 40, 10, 128),
    Model("gpt-oss (local)", 64, 8, 64, window=128, sinks=True), Model("gpt-oss (global)", 64, 8, 64, sinks=True),
    Model("Falcon 7B", 71, 1, 64), Model("Falcon 40B", 128, 8, 64), Model("StarCoder", 48, 1, 128),
    Model("BERT base", 12, 12, 64, causal=False), Model("Whisper large (encoder)", 20, 20, 64, causal=False),
    Model("ViT-H/14", 16, 16, 80, causal=False), Model("Stable Diffusion 1.5", 8, 8, 40, causal=False),
)
# fmt: on


def model_variants(kernel: Kernel, device: Device, longest: int) -> tuple[Variant, ...]:
    """Return the variants of all models that `kernel` takes, with their modifiers; half precision where it has that.

    Windows are halved until they are shorter than the `longest` sequence: others would hide nothing.

    Raises:
        BadArgument: it takes none of them.
    """
    variants: dict[Variant, None] = {}
    for model in MODELS:
        variants.update(dict.fromkeys(_variants(kernel, device, model, longest)))
    if not variants:
        reasons = "; ".join(left_out(kernel, device, longest))
        raise BadArgument(f"kernel={kernel.name!r}: it takes no model's attention on {device}: {reasons}; use another profile")
    return tuple(variants)


def left_out(kernel: Kernel, device: Device, longest: int) -> dict[str, str]:
    """Return the models that `kernel` does not take, each with the reason."""
    reasons = {}
    for model in MODELS:
        if not _variants(kernel, device, model, longest):
            reasons[model.name] = _why_not(kernel, device, model, longest)
    return reasons


def model_cases(
    kernel: Kernel, *, device: Device, limits: Limits, variants: Sequence[Variant], longest: int | None = None
) -> st.SearchStrategy[Case]:
    """Return the strategy of Cases of `variants`, which are of `model_variants`, with each model's heads and scale.

    Heads are reduced by a common factor of all, so that groups stay, to as few as `limits` has, or to one key/value head.

    Args:
        kernel: what the Cases are of.
        device: where they run.
        limits: on the size of a Case.
        variants: what they are drawn from.
        longest: as the variants were made with; by default the length of `limits`.
    """
    strategy = _model_cases(_Parts(kernel, limits, tuple(variants), limits.length if longest is None else longest))
    return strategy.filter(lambda case: kernel.supports(case.problem, case.config, device) is None)


def _variants(kernel: Kernel, device: Device, model: Model, longest: int) -> tuple[Variant, ...]:
    can = kernel.capabilities
    if _why_not_heads(model, can):
        return ()
    variants = []
    for dtype in _dtypes(can, device):
        variant = Variant(dtype, _causal(model, can), model.dims, Config(), _modifiers(model, can, longest))
        problem = msgspec.structs.replace(variant.problem(can), sinks=model.sinks)
        for config in kernel.configs(problem):
            if kernel.supports(problem, config, device) is None:
                variants.append(replace(variant, config=config))
    return tuple(variants)


def _of_model(model: Model, variants: Sequence[Variant], can: Capabilities, longest: int) -> tuple[Variant, ...]:
    """Return those of `variants` that compute the attention of a model."""
    if _why_not_heads(model, can):
        return ()
    wanted = (model.dims, _causal(model, can), _modifiers(model, can, longest))
    return tuple(each for each in variants if (each.dims, each.causal, each.modifiers) == wanted)


def _why_not(kernel: Kernel, device: Device, model: Model, longest: int) -> str:
    can = kernel.capabilities
    if reason := _why_not_heads(model, can):
        return reason
    for dtype in _dtypes(can, device):
        variant = Variant(dtype, _causal(model, can), model.dims, Config(), _modifiers(model, can, longest))
        problem = msgspec.structs.replace(variant.problem(can), sinks=model.sinks)
        configs = kernel.configs(problem) or (Config(),)
        if reason := kernel.supports(problem, configs[0], device):
            return reason
    return f"no dtype on {device}"


def _why_not_heads(model: Model, can: Capabilities) -> str | None:
    """Return why no batch of the model's heads is taken, however few of them, or its scale; or None."""
    groups = model.heads // model.kv_heads
    if can.shapes:
        return "only the shapes that the kernel lists"
    if can.groups is not None and groups not in can.groups:
        return f"groups={groups}: supports {', '.join(map(str, can.groups))}"
    if can.heads_max is not None and groups > can.heads_max:
        return f"heads={groups}: at most {can.heads_max}"
    if not can.scale_given and model.softmax_scale is not None:
        return f"softmax_scale={model.softmax_scale}: only the default, dim_qk ** -0.5"
    return None


def _dtypes(can: Capabilities, device: Device) -> tuple[Dtype, ...]:
    declared = can.dtypes_for(device)
    return tuple(each for each in _HALF if each in declared) or declared


def _causal(model: Model, can: Capabilities) -> Causal | None:
    """Return the mask of a model as the kernel has it; both masks are one where there are as many keys as queries."""
    return next((each for each in _MASKS if each in can.causal), _MASKS[0]) if model.causal else None


def _modifiers(model: Model, can: Capabilities, longest: int) -> tuple[tuple[str, object], ...]:
    window = None
    if model.window is not None:
        left = model.window
        while left >= longest:
            left //= 2
        window = ((left - 1) // can.window_multiple * can.window_multiple, 0)
    return chosen({"softcap": model.softcap or None, "window": window})


class _Parts:
    """The strategies of the parts of a kernel's Cases. Its repr is short, since Hypothesis writes it out."""

    def __init__(self, kernel: Kernel, limits: Limits, variants: tuple[Variant, ...], longest: int) -> None:
        self.name, self.can, self.limits = kernel.name, kernel.capabilities, limits
        self.packing = st.sampled_from(self.can.packings)
        fitting = {model: _of_model(model, variants, self.can, longest) for model in MODELS}
        self.models = st.sampled_from([model for model, each in fitting.items() if each])
        self.variant = {model.name: one_variant(each) for model, each in fitting.items() if each}

    def __repr__(self) -> str:
        return f"<models of {self.name}>"


@functools.cache
def _heads(model: Model, most: int) -> st.SearchStrategy[tuple[int, int]]:
    """Return a strategy of (heads, kv_heads) of a model, all divided by a common factor; fewest first, most for half of all."""
    groups = model.heads // model.kv_heads
    fewer = [kv for kv in range(1, model.kv_heads + 1) if model.kv_heads % kv == 0 and (kv == 1 or groups * kv <= most)]
    return st.sampled_from([(groups * kv, kv) for kv in (*fewer, *fewer[-1:] * len(fewer))])


@st.composite
def _model_cases(draw: st.DrawFn, parts: _Parts) -> Case:
    can, limits = parts.can, parts.limits
    model = draw(parts.models)
    variant = draw(parts.variant[model.name])
    recipe = draw(recipes(variant.dtype))
    if recipe.pattern == "large_products":
        # Its scale would have to be small.
        recipe = msgspec.structs.replace(recipe, pattern="large_logits")
    if model.sinks:
        recipe = msgspec.structs.replace(recipe, sinks=draw(_SINK_VALUES))
    packing = draw(parts.packing)
    laid_out = draw(layouts(can, packing, variant.dtype))
    packed = "layout_q" in laid_out and laid_out["layout_q"].packed
    heads_q, kv_heads = draw(_heads(model, min(limits.heads, can.heads_max or limits.heads)))
    room = limits.room(variant, heads_q, max(limits.tiles, heads_q))
    room = replace(room, batch=max(1, min(room.batch, room.tiles // heads_q)))
    # Models are trained on as many keys as queries, and have more keys as they generate.
    alike = variant.causal == "top_left" or packed
    several = batches(can, room, dense=packing == "dense", packed=True)
    if not alike:
        several = draw(weighted((2, st.just(several)), (1, st.just(batches(can, room, dense=packing == "dense")))))
    pairs = within_limits(draw(several), can, room, packed=packed)
    problem: Problem = msgspec.structs.replace(
        variant.problem(can),
        seqlens_q=tuple(pair[0] for pair in pairs),
        seqlens_k=tuple(pair[1] for pair in pairs),
        packing=packing,
        heads=heads_q,
        kv_heads=kv_heads,
        softmax_scale=model.softmax_scale,
        sinks=model.sinks,
        **laid_out,
    )
    return Case(kernel=parts.name, problem=problem, recipe=recipe, config=variant.config)
