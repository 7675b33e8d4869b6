"""Check what an adapter declares: the contract's members, capabilities, configs, supports, compile keys, files."""

from __future__ import annotations

import inspect
import itertools
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec.structs import replace

from attnfuzz.harness.audit.conformance.row import Row, shortened
from attnfuzz.harness.trial.errors import describe_exception
from attnfuzz.kernels import registry
from attnfuzz.kernels.adapters.adapted import Adapted
from attnfuzz.kernels.capabilities import why_not_shape
from attnfuzz.kernels.contract import Capabilities, Config, Device, Kernel, shape_fields, why_unsupported
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Dtype, Needs, Packing, Problem
from attnfuzz.kernels.support.capability_values import impossible
from attnfuzz.strategies.variants import Variant, all_variants

__all__ = ["declarations", "members"]

_METHODS = {"configs": 1, "unavailable": 1, "supports": 3, "compile_key": 2, "build": 3}
"""Number of arguments of each method."""
_PROBLEMS = 200
_PACKINGS: tuple[Packing, ...] = get_args(Packing)
_DEVICES: tuple[Device, ...] = get_args(Device)
_ADDRESS = re.compile(r"0x[0-9a-f]{8,}")


def members(kernel: Any) -> Iterator[Row]:
    """Check that the kernel has the members of a Kernel, of the right types."""
    missing = registry.missing_members(kernel)
    if inspect.isclass(kernel) or missing:
        lack = f"it lacks {', '.join(missing)}" if missing else f"it is a class, {kernel.__name__}"
        yield Row("members", "wrong", lack, "fulfil attnfuzz.kernels.contract.Kernel, or use attnfuzz.kernels.adapters")
        return
    wrong = []
    for name in ("name", "backend"):
        value = getattr(kernel, name)
        if not isinstance(value, str) or not value or any(each.isspace() or each in ":/" for each in value):
            wrong.append(f"{name}={value!r} must be a text without blanks, ':' or '/'")
    if not isinstance(kernel.files, tuple) or not all(isinstance(each, str) for each in kernel.files):
        wrong.append(f"files={kernel.files!r} must be a tuple of paths")
    if not isinstance(kernel.capabilities, Capabilities):
        wrong.append(f"capabilities is a {type(kernel.capabilities).__name__}")
    wrong += [
        f"{name} {reason}" for name, count in _METHODS.items() if (reason := _why_not_callable(getattr(kernel, name), count))
    ]
    remedy = "give each the type that attnfuzz.kernels.contract.Kernel says"
    yield Row("members", "wrong", shortened("; ".join(wrong)), remedy) if wrong else Row("members", "ok", "all there")


def _why_not_callable(method: Any, count: int) -> str | None:
    if not callable(method):
        return "cannot be called"
    try:
        inspect.signature(method).bind(*range(count))
    except TypeError as error:
        return f"does not take {count} arguments ({error})"
    except ValueError:  # its signature is not known
        return None
    return None


def declarations(kernel: Kernel, device: Device) -> Iterator[Row]:
    """Check what the kernel declares and answers, without calling it."""
    can = kernel.capabilities
    wrong = list(_contradictions(can))
    yield _row("capabilities", wrong, "declare what the kernel can do, and no more", "consistent")
    yield _answered("files", lambda: _files(kernel), "name files that exist, by absolute paths: __file__, inspect.getsourcefile")
    yield _answered("unavailable", lambda: _unavailable(kernel), "return None where it runs, and otherwise why it does not")
    if wrong:
        return
    yield _answered("configs", lambda: _configs(kernel), "return the same tuple of distinct Configs each time, the default first")
    yield from _never_passed(kernel)
    yield from _form_of_lse(kernel)
    yield _answered("variants", lambda: _variants(kernel, device), "let supports take what capabilities declare, or declare less")
    yield _answered("supports", lambda: _supports(kernel), "return None or the reason, at least that of why_unsupported(...)")
    yield _answered(
        "compile_key", lambda: _compile_key(kernel), "make a str of what the compiled code depends on, and of nothing else"
    )


def _row(check: str, wrong: list[str], remedy: str, right: str) -> Row:
    return Row(check, "wrong", shortened("; ".join(wrong)), remedy) if wrong else Row(check, "ok", right)


def _answered(check: str, ask: Callable[[], tuple[list[str], str]], remedy: str) -> Row:
    """Run a check of the adapter's own code, which may raise."""
    try:
        wrong, right = ask()
    except Exception as error:  # that is the result
        wrong, right = [f"it raised {describe_exception(error)}"], ""
    return _row(check, wrong, remedy, right)


def _contradictions(can: Capabilities) -> Iterator[str]:
    """Yield what is of a wrong type, empty, or contradicts the rest of the capabilities."""
    if wrong := list(impossible(can)):
        yield from wrong
        return
    yield from _contradicting_shapes(can)
    if can.scale_any and not can.scale_given:
        yield "scale_any: only the default scale is taken (scale_given=False)"
    if can.dlse and not {"lse", "dq"} <= set(can.outputs):
        yield "dlse: a gradient of LSE needs LSE and a backward"
    if stray := [name for name in can.deterministic if name not in can.outputs]:
        yield f"deterministic={can.deterministic}: not among outputs: {', '.join(stray)}"
    # compiles_on is left out: its default does not fit a kernel for another device.
    if elsewhere := sorted(can.dtypes_on.keys() - set(can.devices)):
        yield f"dtypes_on: {', '.join(elsewhere)} is not among devices={can.devices}"
    if can.captured_gradients and not can.score_mod:
        yield "captured_gradients: only score_mods have them"


def _contradicting_shapes(can: Capabilities) -> Iterator[str]:
    """Yield what of a pool of shapes the other limits refuse."""
    for shape in can.shapes:
        try:
            problem = replace(Variant("float16", None, can.dims[0], Config()).problem(can), **shape_fields(shape))
        except BadArgument as error:
            yield f"shapes: {error}"
            return
        if reason := why_not_shape(can, problem):
            yield f"shapes: {shape} contradicts the rest: {reason}"


def _never_passed(kernel: Kernel) -> Iterator[Row]:
    """A hint where a function has parameters of which only the default is tried."""
    if isinstance(kernel, Adapted):
        names = [each for each in kernel.call.signature.never_passed if not any(each in config for config in kernel.choices)]
        if names:
            text = f"{', '.join(names)}: never passed, so that only the default is tried"
            yield Row("parameters", "hint", text, f"declare what else is to be tried: configs=({{}}, {{{names[0]!r}: ...}})")


def _form_of_lse(kernel: Kernel) -> Iterator[Row]:
    """Say in which form an adapted function's LSE is read; whether it is right, the row of its values says."""
    if isinstance(kernel, Adapted) and kernel.call.gives_lse:
        form, packing = kernel.call.lse_form, kernel.capabilities.packings[0]
        if form.is_plain(packing):
            return
        base = "" if form.base == math.e else f", logarithm to the base {form.base:g}"
        padded = "" if form.multiple == 1 else f", padded to multiples of {form.multiple}"
        yield Row("form of LSE", "ok", f"read as {form.layout}{base}{padded}")


def _files(kernel: Kernel) -> tuple[list[str], str]:
    wrong = [] if kernel.files else ["none is named: a gate could not see that this kernel has changed"]
    for each in kernel.files:
        if not Path(each).is_file():
            wrong.append(f"{each} is not a file")
        elif not Path(each).is_absolute():
            wrong.append(f"{each} is relative: from another folder it is another file")
    return wrong, f"{len(kernel.files)} there"


def _unavailable(kernel: Kernel) -> tuple[list[str], str]:
    answers = {device: kernel.unavailable(device) for device in _DEVICES}
    wrong = [f"unavailable({d!r}) gives {a!r}" for d, a in answers.items() if a is not None and not (isinstance(a, str) and a)]
    undeclared = [d for d in _DEVICES if d not in kernel.capabilities.devices and answers[d] is None]
    wrong += [f"unavailable({d!r}) gives None, though {d} is not declared" for d in undeclared]
    return wrong, ", ".join(f"{device}: {answer or 'runs here'}" for device, answer in answers.items())


def _probes(kernel: Kernel) -> list[Problem]:
    """Return the smallest Problem of each declared dtype, mask and dims."""
    can = kernel.capabilities
    dtypes = dict.fromkeys(dtype for device in can.devices for dtype in can.dtypes_for(device))
    product = itertools.product(dtypes, can.causal, can.dims)
    return [Variant(dtype, causal, dims, Config()).problem(can) for dtype, causal, dims in product]


def _configs(kernel: Kernel) -> tuple[list[str], str]:
    wrong, counts = list[str](), set[int]()
    for problem in _probes(kernel):
        first, second = kernel.configs(problem), kernel.configs(problem)
        where = f"for {problem.dtype}, dims {problem.dim_qk}/{problem.dim_v}"
        if not isinstance(first, tuple) or not first or not all(isinstance(each, Config) for each in first):
            wrong.append(f"configs(problem) gives {first!r} {where}: a tuple of at least one Config is expected")
        elif first != second:
            wrong.append(f"two calls give {first} and {second} {where}")
        elif len(set(first)) < len(first):
            wrong.append(f"one Config is there twice {where}")
        else:
            counts.add(len(first))
    return wrong[:3], f"{'-'.join(map(str, sorted(counts)))} each"


def _variants(kernel: Kernel, device: Device) -> tuple[list[str], str]:
    """Check that `supports` takes every declared dtype, mask and pair of dims in some variant."""
    can = kernel.capabilities
    if device not in can.devices:
        return [], f"none: {device} is not declared"
    try:
        variants = all_variants(kernel, device)
    except BadArgument as error:
        return [str(error)], ""
    wrong = []
    for name, declared in (("dtype", can.dtypes_for(device)), ("causal", can.causal), ("dims", can.dims)):
        for value in declared:
            if not any(getattr(each, name) == value for each in variants):
                problem = replace(variants[0].problem(can), **_as_problem(name, value))
                reason = kernel.supports(problem, kernel.configs(problem)[0], device)
                wrong.append(f"{name}={value!r} is declared, and never taken: {reason}")
    return wrong, f"{len(variants)} on {device}"


def _as_problem(name: str, value: Any) -> dict[str, Any]:
    return {"dim_qk": value[0], "dim_v": value[1]} if name == "dims" else {name: value}


def _supports(kernel: Kernel) -> tuple[list[str], str]:
    """Try Problems of all sorts, most of them beyond what is declared, and a Config of another kernel."""
    can, wrong = kernel.capabilities, list[str]()
    sample = _sample(can)
    default = kernel.configs(sample[0])[0]
    for problem, device in itertools.product(sample, _DEVICES):
        try:
            answer = kernel.supports(problem, default, device)
        except Exception as error:  # that is the result
            wrong.append(f"it raised {describe_exception(error)} for {_spelled(problem)}")
            continue
        if answer is not None and not (isinstance(answer, str) and answer):
            wrong.append(f"it gives {answer!r} for {_spelled(problem)}: None or a reason is expected")
        elif answer is None and (reason := why_unsupported(can, problem, device)):
            wrong.append(f"it takes what is not declared: {reason}")
    foreign = Config(no_such_choice=12345)
    if kernel.supports(sample[0], foreign, can.devices[0]) is None:
        wrong.append(f"it takes {foreign!r}")
    return list(dict.fromkeys(wrong))[:3], f"{2 * len(sample)} problems tried"


def _spelled(problem: Problem) -> str:
    return str(msgspec.to_builtins(problem))


def _sample(can: Capabilities) -> list[Problem]:
    """Draw Problems, the same for the same capabilities; the first is the smallest that they allow."""
    rng, dtypes = random.Random("attnfuzz"), get_args(Dtype)
    causal: tuple[Any, ...] = (None, "bottom_right", "top_left")
    base = Variant(can.dtypes_for(can.devices[0])[0], can.causal[0], can.dims[0], Config()).problem(can)
    problems = [base]
    while len(problems) < _PROBLEMS:
        batch, groups, kv_heads = rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 8)), rng.choice((1, 2))
        lengths = [tuple(rng.choice((0, 1, 2, 7, 64, 65, 1000)) for _ in range(batch)) for _ in range(2)]
        packing = rng.choice(_PACKINGS)
        if packing == "dense":
            lengths = [(each[0],) * batch for each in lengths]
        dims = rng.choice((*can.dims, (1, 1), (64, 32), (96, 96), (511, 7)))
        changes: dict[str, Any] = {
            "window": rng.choice((None, (0, None), (3, 1))),
            "softcap": rng.choice((0.0, 30.0)),
            "softmax_scale": rng.choice((None, 1.0, 0.0, -0.5)),
            "slack_q": rng.choice((0, 3)),
            "needs": rng.choice((Needs(), Needs(outputs=("o",)), Needs(dlse=True))),
        }
        # One or two of them at a time, so that plain Problems occur as well.
        for name in rng.sample(list(changes), rng.choice((3, 4, 5))):
            del changes[name]
        problems.append(
            Problem(
                seqlens_q=lengths[0],
                seqlens_k=lengths[1],
                packing=packing,
                heads=groups * kv_heads,
                kv_heads=kv_heads,
                dim_qk=dims[0],
                dim_v=dims[1],
                dtype=rng.choice(dtypes),
                causal=rng.choice(causal),
                **changes,
            )
        )
    return problems


def _compile_key(kernel: Kernel) -> tuple[list[str], str]:
    wrong, keys = list[str](), set[str]()
    for problem in _probes(kernel):
        for config in kernel.configs(problem):
            # Equal objects, not the same ones.
            again = msgspec.convert(msgspec.to_builtins(problem), Problem)
            one, other = kernel.compile_key(problem, config), kernel.compile_key(again, Config(dict(config)))
            if not isinstance(one, str) or not one:
                wrong.append(f"it gives {one!r}, which must be a str")
            elif one != other:
                wrong.append(f"equal Problems have {one!r} and {other!r}")
            elif _ADDRESS.search(one):
                wrong.append(f"it holds an address in memory: {one!r}")
            else:
                keys.add(one)
    return list(dict.fromkeys(wrong))[:3], f"{len(keys)} of them"
