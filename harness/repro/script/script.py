"""A case file as one Python file that stands by itself: inputs, kernel call, float64 reference, comparison.

It needs torch and what the kernel itself is imported from, nothing of the harness or the oracle, so that a kernel's author can
read and change all of it. Its functions are those that the harness makes inputs by and those of parts.py, taken
as text with what they use; the reference is written out with just the masks and modifiers of the Case. The budgets cannot come
along as code (they are half of the oracle): they are measured when the script is written, and hold for the Case's own inputs,
which the script tells by a checksum. Inputs that were edited are held to the same share of each output's largest value.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import msgspec

from attnfuzz.harness.campaign.corpus import CaseFile
from attnfuzz.harness.campaign.shrink import tries
from attnfuzz.harness.isolation.kernel_ref import global_of
from attnfuzz.harness.report.describe import describe_case
from attnfuzz.harness.repro.script.budgets import ScriptBudgets, measured_budgets
from attnfuzz.harness.repro.script.bundle import Bundle, module
from attnfuzz.harness.repro.script.reference import reference_of
from attnfuzz.harness.repro.script.values import maker_of
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.modified import tensors_of
from attnfuzz.kernels.problem import LAYOUTS, Layout, Problem, reject
from attnfuzz.strategies.case import CALLS, RELATIONS, Case
from attnfuzz.strategies.earlier_calls import earlier_problems

__all__ = ["Script", "script_of", "unshown"]

_PARTS = "attnfuzz.harness.repro.script.parts"
_OWN = ("attnfuzz.harness", "attnfuzz.oracles", "attnfuzz.strategies")
_CHECKED = ("out-of-bounds", "outside-view", "duplicate-store", "race", "masked-load")
"""Kinds that the interpreter of Triton kernels on the CPU refuses by itself, in a script as well."""
_IMPORTED = {name: ("attnfuzz.kernels.problem", name) for name in ("Layout", "Needs")}
_UNCHECKED = ("layout", "storage", "strides")
"""Checks of a tensor's form that are not in a script."""


@dataclass(frozen=True, slots=True)
class Script:
    """The text of a script, and what of the Case's failure it cannot show."""

    text: str
    note: str | None


def script_of(stored: CaseFile, device: Device) -> Script:
    """The standalone script of a case file, to be run on `device`. The kernel is not run for it.

    Raises:
        BadArgument: the kernel is absent or cannot be imported by another process, or the Case is too large.
    """
    case = stored.case
    kernel = registry.get(case.kernel)
    note = unshown(stored, device)
    budgets = measured_budgets(case, kernel, device)
    bundle = _bundle(case)
    line, value = _kernel_lines(kernel)
    body = reference_of(case, kernel)
    main = _main(case, stored.rate)
    constants = _constants(case, kernel, device, value, budgets, stored)
    for text in (body, main, constants):
        bundle.use(text, _IMPORTED | module(_PARTS).imported)
    imports = dict.fromkeys([*bundle.imports(), "import sys", "import traceback", "import torch", line])
    parts = [
        _head(stored, device, note),
        "\n".join(sorted(imports, key=_import_order)),
        constants,
        "# --- inputs, made from the seed alone, the same bits everywhere; the comparison; guarded memory",
        *bundle.texts,
        "# --- the float64 reference, gradients by autograd",
        body,
        "# --- the check",
        main,
    ]
    return Script("\n\n\n".join(parts) + "\n", note)


def unshown(stored: CaseFile, device: Device) -> str | None:
    """What of a Case's failure a script for `device` cannot show, or None."""
    told = stored.found.get("identity")
    kind, check = (told.get("kind"), told.get("check")) if isinstance(told, dict) else (None, None)
    if stored.case.check in RELATIONS or kind == "relation":
        return (
            f"the Case compares related calls (check {stored.case.check}); this script makes the one call and compares it with "
            "the float64 reference: what shows only between calls, only `attnfuzz repro` shows"
        )
    if kind == "aggregate":
        return (
            "no element is beyond its own budget, only all of them together; this script compares elements: only "
            "`attnfuzz repro` shows that"
        )
    if kind == "uninitialised" or (kind in _CHECKED and device == "cuda"):
        return (
            f"a failure of kind {kind} is seen by attnfuzz's memory checker; this script shows it where wrong values, or a write "
            "beyond a tensor, come of it"
        )
    if kind == "contract" and check in _UNCHECKED:
        return f"this script checks the type, shape, dtype and device of an output, not its {check}"
    return None


def _bundle(case: Case) -> Bundle:
    """What makes the inputs, and the parts that every script has."""
    plain = all(getattr(case.problem, name) == Layout() for name in LAYOUTS) and not tensors_of(case.problem)
    bundle = Bundle(
        _OWN,
        {("attnfuzz.harness.trial.values", "Maker"): maker_of(case.recipe.pattern)},
        {("attnfuzz.strategies.case", "Recipe"): (_PARTS, "Recipe")},
    )
    bundle.add(_PARTS if plain else "attnfuzz.harness.trial.inputs", "materialise")
    names = ["checksum", "called", "judged"]
    names += ["judged_captured"] if tensors_of(case.problem) else []
    names += ["kept", "again"] if case.check in CALLS else []
    for name in names:
        bundle.add(_PARTS, name)
    return bundle


def _import_order(line: str) -> tuple[bool, bool, str]:
    return "attnfuzz" in line, line.startswith("from"), line


def _kernel_lines(kernel: Kernel) -> tuple[str, str]:
    """The import of a kernel, and the expression that it is."""
    name = kernel.name
    if not registry.is_local(name):
        for point in metadata.entry_points(group=registry.ENTRY_POINT_GROUP):
            if point.name == name:
                found = point.load()
                call = "()" if inspect.isclass(found) or inspect.isfunction(found) else ""
                first, _, rest = point.attr.partition(".")
                return f"from {point.module} import {first}", f"{first}{'.' + rest if rest else ''}{call}"
    place = global_of(kernel)
    if not registry.is_local(name) and (place is None or place[0].startswith("attnfuzz.")):
        return "from attnfuzz.kernels.registry import get", f"get({name!r})"
    if place is None or place[0] == "__main__":
        raise reject("script", name, "the kernel is no global of a module that a script could import it from", "make it one")
    return f"from {place[0]} import {place[1]}", place[1]


def _head(stored: CaseFile, device: Device, note: str | None) -> str:
    case = stored.case
    told = [f"attnfuzz case {case.id}, written by `attnfuzz repro CASE --script`. Run it: exit 0 is OK, 1 is FAILED."]
    told += [f"   {name:<20} {value}" for name, value in describe_case(case)]
    if message := stored.found.get("message"):
        told.append(f"   {'found':<20} {message}")
    identity = stored.found.get("identity")
    kind = identity.get("kind") if isinstance(identity, dict) else None
    if kind in ("crash", "hang", "out-of-memory", "illegal-access"):
        told.append(f"The kernel ended or kept its process ({kind}): so it does to this script, unless it is mended.")
    if note:
        told.append(f"NOTE: {note}.")
    lines = ["\n".join(f"# {line}".rstrip() for text in told for line in text.splitlines()), "from __future__ import annotations"]
    if device == "cpu":
        # As in harness/core/environment.py: before anything imports Triton.
        lines.append('import os\n\nos.environ["TRITON_INTERPRET"] = "1"  # Triton on the CPU: set before anything imports it')
    return "\n\n".join(lines)


def _constants(case: Case, kernel: Kernel, device: Device, value: str, budgets: ScriptBudgets, stored: CaseFile) -> str:
    recipe = ", ".join(f"{name}={each!r}" for name, each in msgspec.to_builtins(case.recipe).items())
    lines = [
        f"DEVICE = {device!r}",
        f"KERNEL = {value}",
        f"PROBLEM = {_problem(case.problem)}",
        f"CONFIG = Config({', '.join(f'{name}={each!r}' for name, each in case.config.items())})",
        f"RECIPE = dict({recipe})",
    ]
    if case.check in CALLS:
        earlier = ", ".join(_problem(each) for each in earlier_problems(kernel, case, device))
        lines += ["# Calls that come before, in the same process.", f"EARLIER = [{earlier}]"]
        exact = tuple(name for name in case.problem.needs.outputs if name in kernel.capabilities.deterministic)
        lines.append(f"DETERMINISTIC = {exact!r}")
        lines.append(f"REORDER = {_table(budgets.reorder)}")
    if stored.rate is not None:
        lines.append(f"RUNS = {tries(stored.rate)}  # it failed in {stored.rate[0]} of {stored.rate[1]} runs")
    rows = ", of each row its largest" if budgets.by_row else ""
    lines += [
        "# How far off each element may be: the error budgets of a correct kernel, measured with the float64 oracle when this",
        f"# was written{rows}. They hold for the inputs of this checksum. Inputs that were edited are held to LIMITS, which is",
        "# rough: the largest budget of an output as a share of its largest value, or 8 roundings where that is more.",
        f"CHECKSUM = {_checksum(case)}",
        f"BUDGETS = {_table(budgets.allowed)}",
        f"LIMITS = {_numbers(budgets.limits)}",
    ]
    return "\n".join(lines)


def _numbers(values: dict[str, float]) -> str:
    return "{" + ", ".join(f"{name!r}: {value:.4g}" for name, value in values.items()) + "}"


def _table(packed: dict[str, tuple[str, tuple[int, ...]]]) -> str:
    rows = (f"    {name!r}: ({text!r}, {shape!r})," for name, (text, shape) in packed.items())
    return "\n".join(["{", *rows, "}"])


def _problem(problem: Problem) -> str:
    """The Problem as it is built, defaults left out."""
    fields: dict[str, Any] = {
        each.name: value for each in msgspec.structs.fields(Problem) if (value := getattr(problem, each.name)) != each.default
    }
    return f"Problem({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def _checksum(case: Case) -> int:
    from attnfuzz.harness.repro.script.parts import checksum
    from attnfuzz.harness.trial.inputs import materialise

    return checksum(materialise(case.problem, case.recipe, "cpu"))


def _main(case: Case, rate: tuple[int, int] | None) -> str:
    """The end of the script: call, compare, say."""
    calls = case.check in CALLS
    captured = [each.name for each in tensors_of(case.problem)]
    after = _CAPTURED.replace("NAMES", repr(captured)) if captured else ""
    text = _MAIN.replace("#EARLIER\n", _EARLIER if calls else "").replace("#AFTER\n", after + (_AFTER if calls else ""))
    return (text.replace("range(1)", "range(RUNS)") if rate else text).strip()


_MAIN = '''
def check() -> list[str]:
    """What is wrong, in words."""
    bands, recipe = Bands(), Recipe(**RECIPE)
    inputs = materialise(PROBLEM, recipe, DEVICE)
    try:
#EARLIER
        made, wrong = called(KERNEL, PROBLEM, CONFIG, inputs, bands)
    except KeyboardInterrupt:
        raise
    except BaseException:  # a kernel may raise anything
        traceback.print_exc()
        return ["the kernel raised; its traceback is above"]
    expected, own = reference(inputs), checksum(inputs) == CHECKSUM
    if not own:
        print("these inputs are not the case's own: they are held to LIMITS, not to BUDGETS")
    wrong += bands.broken()
    wrong += judged(inputs, made, expected, BUDGETS if own else None, LIMITS)
#AFTER
    return wrong


def main() -> int:
    """Print what is wrong; the exit code."""
    for run in range(1):
        if wrong := check():
            print(f"FAILED {KERNEL.name} on {DEVICE}, run {run + 1}", *wrong, sep="\\n")
            return 1
    print(f"OK {KERNEL.name} on {DEVICE}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:  # of this script, not of the kernel
        traceback.print_exc()
        sys.exit(2)
'''
_EARLIER = """        first, before = None, []
        for problem in EARLIER:
            earlier, changed = called(KERNEL, problem, CONFIG, materialise(problem, recipe, DEVICE), bands)
            before += [f"{line} (in a call before)" for line in changed]
            first = kept(PROBLEM, earlier) if problem == PROBLEM and first is None else first
"""
_AFTER = """    wrong += before
    wrong += again(inputs, first, made, REORDER, DETERMINISTIC) if first else []
"""
_CAPTURED = "    wrong += judged_captured(made, expected, NAMES, BUDGETS if own else None, LIMITS)\n"
