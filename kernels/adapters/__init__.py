"""Make a kernel of a function with flash-attention's signature, in five lines; docs/plug-in.md is the how-to.

    from attnfuzz.kernels.adapters import dense
    from mypackage.attention import my_flash_attn

    KERNEL = dense(my_flash_attn, name="mine", devices=("cpu", "cuda"), groups=None)

Only what the signature shows or the caller says is declared; the defaults are those of the simplest kernel (equal lengths, none
of them zero, no grouped heads, head dim 64, float16 and bfloat16, CUDA). `attnfuzz check-adapter` shows what more works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attnfuzz.kernels.adapters.adapted import Adapted, AdaptedTriton
from attnfuzz.kernels.adapters.call import Call
from attnfuzz.kernels.adapters.declared import check_options, checked, of_shapes
from attnfuzz.kernels.adapters.lse_form import DenseLse, LseForm, RaggedLse
from attnfuzz.kernels.adapters.reached import triton_files
from attnfuzz.kernels.adapters.signature import read, source_files
from attnfuzz.kernels.contract import Capabilities, Config, ConfigValue, Device
from attnfuzz.kernels.errors import reject
from attnfuzz.kernels.problem import OUTPUT_NAMES, OutputName, Packing
from attnfuzz.kernels.support.process_setup import ProcessSetup

__all__ = ["Adapted", "dense", "paged", "varlen"]

Function = Callable[..., Any]
Lse = bool | Literal["auto"]


def dense(
    function: Function,
    *,
    name: str | None = None,
    backend: str | None = None,
    layout: Literal["bshd", "bhsd"] = "bshd",
    lse: Lse = "auto",
    lse_layout: DenseLse = "bhs",
    lse_base: float = math.e,
    lse_multiple: int = 1,
    lse_has_sinks: bool = True,
    sinks_in_dtype: bool = False,
    gradients: bool = True,
    backward: Function | None = None,
    configs: Sequence[Mapping[str, ConfigValue]] = ({},),
    files: Sequence[str | Path] = (),
    environment: Mapping[str, str] | None = None,
    set_up: Callable[[Device], None] | None = None,
    **capabilities: Any,
) -> Adapted:
    """Make a kernel of `function(q, k, v, ...)`, like flash_attn_func: q `(batch, seqlen_q, heads, dim)`, k and v alike.

    Args:
        function: returns o, or a tuple that begins with o (and LSE). It is passed those of these parameters that it has:
            `softmax_scale` (or `scale`, `sm_scale`), `causal` (or `is_causal`), `window_size` (two numbers, -1 for no limit),
            `softcap`, `sinks` (or `sink`, `s_aux`, `learnable_sink`: `(heads,)`), and a flag for LSE (`return_lse`,
            `return_softmax_lse` or `return_attn_probs`).
        name: the kernel's name; default: the function's own.
        backend: "triton" prepares Triton's interpreter on the CPU, and lets `attnfuzz compile` capture the launches; it is the
            default where the function's module, or one of its package's that it imports, has Triton functions, else "torch".
        layout: "bhsd": the function takes and returns `(batch, heads, seqlen, dim)`.
        lse: whether it returns LSE `(batch, heads, seqlen_q)`, float32, natural log: "auto": if it has a flag for it; True:
            always, second in the tuple. +inf in a row that sees no key, flash-attention's convention, is read as -inf.
        lse_layout: "bsh" for `(batch, seqlen_q, heads)`.
        lse_base: of the logarithm; 2: LSE is log2.
        lse_multiple: what the function pads LSE's dimension of tokens to a multiple of; the padding is cut off.
        lse_has_sinks: False: LSE is that of the keys alone, and the sinks are added here.
        sinks_in_dtype: whether the function takes sinks in q's dtype; default: float32.
        gradients: dQ, dK and dV by torch's autograd of `function`; False: it has none.
        backward: returns (dq, dk, dv) instead of autograd: `backward(d_o, q, k, v, o, lse, ...)` with the same keywords, and with
            LSE in the function's own form; with sinks it returns their gradient too.
        configs: choices (tile sizes, ...), the default first, passed by name. Lengths are drawn around `tile_m` and `tile_n`,
            which are passed only if the function has such parameters.
        files: additional sources whose change means that the kernel changed; the function's own is included, and so are those of
            the Triton functions by which the default of `backend` is found.
        environment: variables that each process has before its first tensor on the device is made, by name.
        set_up: called with the device once in each such process, after that: an allocator, a workspace. A global of a module.
        capabilities: fields of `attnfuzz.kernels.contract.Capabilities` that replace the defaults.

    Raises:
        BadArgument: the signature cannot be read or does not fit, or the capabilities contradict it.
    """
    form = LseForm.of("dense", lse_layout, lse_base, lse_multiple)
    call = Call(
        function, backward, read(function, ()), lse, layout, gradients, form, lse_has_sinks, sinks_in_dtype=sinks_in_dtype
    )
    process = ProcessSetup.of(environment, set_up)
    return _adapted(call, name, backend, configs, files, process, {"packings": ("dense",), **capabilities})


def varlen(
    function: Function,
    *,
    name: str | None = None,
    backend: str | None = None,
    lse: Lse = "auto",
    lse_layout: RaggedLse = "ht",
    lse_base: float = math.e,
    lse_multiple: int = 1,
    lse_has_sinks: bool = True,
    sinks_in_dtype: bool = False,
    gradients: bool = True,
    backward: Function | None = None,
    configs: Sequence[Mapping[str, ConfigValue]] = ({},),
    files: Sequence[str | Path] = (),
    environment: Mapping[str, str] | None = None,
    set_up: Callable[[Device], None] | None = None,
    **capabilities: Any,
) -> Adapted:
    """Make a kernel of `function(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, ...)`: flash_attn_varlen_func.

    q is `(total_q, heads, dim)`, k and v `(total_k, kv_heads, dim)`, cu_seqlens `(batch + 1,)` int32, LSE `(heads, total_q)`.
    The last four are passed by name, to `backward` too. `lse_layout`: "th" for `(total_q, heads)`, "bhs" and "bsh" for one padded
    to max_seqlen_q, `(batch, heads, max_seqlen_q)` or its transpose. Everything else is as for `dense`.

    Raises:
        BadArgument: the signature cannot be read or does not fit, or the capabilities contradict it.
    """
    needed = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    form = LseForm.of("ragged", lse_layout, lse_base, lse_multiple)
    call = Call(
        function, backward, read(function, needed), lse, "thd", gradients, form, lse_has_sinks, sinks_in_dtype=sinks_in_dtype
    )
    process = ProcessSetup.of(environment, set_up)
    return _adapted(call, name, backend, configs, files, process, {"packings": ("ragged",), **capabilities})


def paged(
    function: Function,
    *,
    page_sizes: Sequence[int],
    name: str | None = None,
    backend: str | None = None,
    lse: Lse = "auto",
    lse_layout: RaggedLse = "ht",
    lse_base: float = math.e,
    lse_multiple: int = 1,
    lse_has_sinks: bool = True,
    sinks_in_dtype: bool = False,
    configs: Sequence[Mapping[str, ConfigValue]] = ({},),
    files: Sequence[str | Path] = (),
    environment: Mapping[str, str] | None = None,
    set_up: Callable[[Device], None] | None = None,
    **capabilities: Any,
) -> Adapted:
    """Make a kernel of `function(q, k_pages, v_pages, page_table, seqlens_k, cu_seqlens_q, max_seqlen_q, ...)`: forward only.

    q is `(total_q, heads, dim)`, the caches are `(pages, page_size, kv_heads, dim)`, page_table is `(batch, most pages of a
    sequence)` int32, seqlens_k `(batch,)` int32. All but the first three are passed by name, those that it has of: page_table (or
    block_table, block_tables), seqlens_k (or cache_seqlens, seqused_k), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k.
    `page_sizes`: tokens of a page, the simplest first. Everything else is as for `varlen`.

    Raises:
        BadArgument: the signature cannot be read or does not fit, or the capabilities contradict it.
    """
    integers = isinstance(page_sizes, tuple | list) and all(type(each) is int for each in page_sizes)
    if not integers or not page_sizes or min(page_sizes) < 1:
        raise reject("page_sizes", page_sizes, "a page has 1 token or more", "give whole numbers: page_sizes=(16, 64)")
    known = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    signature = read(function, (), known)
    for option in ("page_table", "seqlens_k"):
        if signature.option(option) is None:
            raise reject("function", signature.name, f"it has no parameter {option}", "wrap it in a def that has")
    form = LseForm.of("ragged", lse_layout, lse_base, lse_multiple)
    more = {"lse_has_sinks": lse_has_sinks, "sinks_in_dtype": sinks_in_dtype, "pages": True}
    call = Call(function, None, signature, lse, "thd", False, form, **more)
    pages = {"packings": ("ragged",), "page_sizes": tuple(page_sizes)}
    return _adapted(call, name, backend, configs, files, ProcessSetup.of(environment, set_up), {**pages, **capabilities})


def _adapted(
    call: Call,
    name: str | None,
    backend: str | None,
    configs: Sequence[Mapping[str, ConfigValue]],
    files: Sequence[str | Path],
    process: ProcessSetup | None,
    capabilities: dict[str, Any],
) -> Adapted:
    check_options(
        name=name, backend=backend, configs=configs, files=files, layout=call.layout, lse=call.lse, backward=call.own_backward,
        gradients=call.by_autograd, lse_has_sinks=call.lse_has_sinks, sinks_in_dtype=call.sinks_in_dtype,
    )  # fmt: skip
    name = call.signature.name if name is None else name
    if not name or any(each.isspace() or each in ":/" for each in name):
        raise reject("name", name, "a kernel's name has no spaces, colons or slashes", "give a dotted one, such as mine.flash")
    if not configs:
        raise reject("configs", configs, "a kernel has at least its default", "leave it out, or give ({},)")
    if wrong := [each for each in configs if not isinstance(each, Mapping)]:
        remedy = "give a tuple of dicts, the default first: ({'tile_m': 64}, {'tile_m': 128})"
        raise reject("configs", wrong[0], "each choice is a dict of keyword arguments", remedy)
    chosen = tuple(Config(each) for each in configs)
    if unknown := sorted({key for each in chosen for key in each} - {*call.signature.parameters, "tile_m", "tile_n"}):
        raise reject("configs", unknown[0], f"{call.signature.name} has no such parameter", "name its parameters")
    can = _capabilities(call, capabilities)
    launched = triton_files(call.function)
    backend = backend or ("torch" if launched is None else "triton")
    named = [str(Path(each).absolute()) for each in files]
    sources = tuple(dict.fromkeys([*source_files(call.function), *(launched or ()), *named]))
    if not sources:
        raise reject("files", files, f"the source of {call.signature.name} is not found", "name the files that make it up")
    kind = AdaptedTriton if backend == "triton" else Adapted
    return kind(name=name, backend=backend, files=sources, capabilities=can, call=call, choices=chosen, process=process)


def _capabilities(call: Call, declared: dict[str, Any]) -> Capabilities:
    """Capabilities that the signature shows, replaced by those that the caller declares."""
    declared = checked(declared)
    has = call.signature.option
    outputs: tuple[OutputName, ...] = tuple(
        each for each in OUTPUT_NAMES if each == "o" or (call.gives_lse if each == "lse" else call.has_gradients)
    )
    visible: dict[str, Any] = {
        **of_shapes(declared.get("shapes", ())),
        "scale_given": has("softmax_scale") is not None,
        "causal": (None, "bottom_right") if has("causal") else (None,),
        "window": has("window_size") is not None,
        "softcap": has("softcap") is not None,
        "sinks": has("sinks") is not None,
        "outputs": outputs,
        "compiles_on": (),
    }
    can = Capabilities(**{**visible, **declared})
    for field, name in (("window", "window_size"), ("softcap", "softcap"), ("sinks", "sinks")):
        if getattr(can, field) and not has(name):
            raise reject(field, True, f"{call.signature.name} has no parameter {name}", "leave it out, or wrap the function")
    for name, value, default in (("sinks_in_dtype", call.sinks_in_dtype, False), ("lse_has_sinks", call.lse_has_sinks, True)):
        if value is not default and not has("sinks"):
            raise reject(name, value, f"{call.signature.name} has no parameter sinks", "leave it out, or wrap the function")
    if len(can.causal) > 1 and not has("causal"):
        remedy = "name the one mask that it always has, or wrap the function"
        raise reject("causal", can.causal, f"{call.signature.name} has no parameter causal", remedy)
    if can.scale_given and not has("softmax_scale"):
        raise reject("scale_given", True, f"{call.signature.name} has no parameter softmax_scale", "leave it out")
    if wrong := [each for each in can.outputs if each not in outputs]:
        remedy = "lse=True where it always gives LSE; gradients=True or backward=... where it has them"
        raise reject("outputs", wrong, f"the adapter gets only {', '.join(outputs)} of it", remedy)
    expected: Packing = "ragged" if call.layout == "thd" else "dense"
    if can.packings != (expected,):
        raise reject("packings", can.packings, f"this adapter calls it {expected}", "leave it out, or use the other adapter")
    if can.slack and call.layout != "thd":
        raise reject("slack", True, "a dense function is not passed how many rows count", "leave it out")
    if can.page_sizes != (0,) and not call.pages:
        raise reject("page_sizes", can.page_sizes, "this adapter passes no page table", "use adapters.paged")
    if not call.gives_lse and not call.lse_form.is_plain(expected):
        remedy = "say lse=True where it always comes second in the result"
        raise reject("lse", call.lse, "a form of LSE is given, and the function returns none", remedy)
    if can.slack_rows == "untouched" and expected == "ragged" and call.lse_form.layout in ("bhs", "bsh"):
        raise reject("slack_rows", "untouched", "a padded LSE has no slack rows of its own", "leave it out")
    if can.score_mod or can.mask_mod:
        raise reject("score_mod", True, "these adapters pass no functions", "write a Kernel (contract.Kernel)")
    return can
