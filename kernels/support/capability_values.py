"""Values of Capabilities that no kernel can have: of another type, empty, out of range, or leaving nothing to draw."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from attnfuzz.kernels.capabilities import Capabilities

__all__ = ["impossible"]


def impossible(capabilities: object) -> Iterator[str]:
    """Yield each value that no kernel can have, as "field=value: reason".

    A Struct of msgspec takes any value when it is made; strategies divide by some of these, and choose from others.
    """
    if not isinstance(capabilities, Capabilities):
        yield f"capabilities is a {type(capabilities).__name__}: must be attnfuzz.kernels.Capabilities"
        return
    try:
        msgspec.convert(msgspec.to_builtins(capabilities), Capabilities)
    except (msgspec.ValidationError, TypeError) as error:
        yield f"{error}"
        return
    yield from _empty(capabilities)
    yield from _lengths(capabilities)
    yield from _heads(capabilities)
    yield from _windows(capabilities)
    yield from _outputs(capabilities)
    if "backward" in capabilities.cuda_graphs and "forward" not in capabilities.cuda_graphs:
        yield f"cuda_graphs={capabilities.cuda_graphs}: the backward of a forward outside a graph is not tried"


def _empty(can: Capabilities) -> Iterator[str]:
    for name in ("packings", "dtypes", "dims", "causal", "devices", "outputs"):
        if not getattr(can, name):
            yield f"{name} is empty"
    for device, dtypes in can.dtypes_on.items():
        if not dtypes:
            yield f"dtypes_on is empty for {device}"


def _lengths(can: Capabilities) -> Iterator[str]:
    if can.min_seqlen_k < 1:
        yield f"min_seqlen_k={can.min_seqlen_k}: empty sequences are zero_k's"
    if can.length_max is not None and can.length_max < can.min_seqlen_k:
        yield f"length_max={can.length_max} is less than min_seqlen_k={can.min_seqlen_k}"
    counts = {name: getattr(can, name) for name in ("multiple_q", "multiple_k", "batch_max", "heads_max")}
    below = {name: value for name, value in counts.items() if value is not None and value < 1}
    for name, value in below.items():
        yield f"{name}={value}: 1 or more"
    if not below and can.length_max is not None and can.length_max < max(can.multiples):
        yield f"length_max={can.length_max} leaves no multiple of {max(can.multiples)}"
    for shape in can.shapes:
        if min(shape) < 1 or shape[1] % shape[2]:
            yield f"shapes: {shape}: each number is 1 or more, and kv_heads divides heads"


def _heads(can: Capabilities) -> Iterator[str]:
    if can.groups is not None and (not can.groups or min(can.groups) < 1):
        yield f"groups={can.groups}: each is 1 or more"
    elif can.heads_max is not None and 1 <= can.heads_max < min(can.groups or (1,)):
        yield f"heads_max={can.heads_max} is less than groups={can.groups}"
    if any(dim < 1 for pair in can.dims for dim in pair):
        yield f"dims={can.dims}: each is 1 or more"
    if can.dim_multiple is not None and not 1 <= can.dim_multiple <= can.dim_max:
        yield f"dim_multiple={can.dim_multiple} with dim_max={can.dim_max} allows no dims"


def _windows(can: Capabilities) -> Iterator[str]:
    if not can.window_forms:
        yield "window_forms is empty: window=False is a kernel without windows"
    if can.window_multiple < 1:
        yield f"window_multiple={can.window_multiple}: 1 or more"
    limited = (can.window_forms, can.window_multiple) != (Capabilities().window_forms, Capabilities().window_multiple)
    if limited and not can.window:
        yield f"window_forms={can.window_forms}, window_multiple={can.window_multiple}: window=False is a kernel without windows"


def _outputs(can: Capabilities) -> Iterator[str]:
    if can.outputs and "o" not in can.outputs:
        yield f"outputs={can.outputs}: O is always one of them"
    gradients = {"dq", "dk", "dv"} & set(can.outputs)
    if gradients and len(gradients) < 3:
        yield f"outputs={can.outputs}: backward gives dQ, dK and dV together"
    if not can.page_sizes or min(can.page_sizes) < 0:
        yield f"page_sizes={can.page_sizes}: each is 1 or more, or 0 for keys without pages"
    elif any(can.page_sizes) and ("ragged" not in can.packings or not set(can.outputs) <= {"o", "lse"}):
        yield "page_sizes: a paged cache is of ragged batches, and has no gradient"
