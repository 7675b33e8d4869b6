"""The bank of planted bugs, in the tests of a checkout, and which of them `attnfuzz mutants` tries."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device
from attnfuzz.kernels.errors import BadArgument, reject

__all__ = ["BANK", "TESTS", "of_bank", "of_checkout", "of_operators", "whole_bank"]

TESTS = Path(__file__).parents[2] / "tests"
"""The repository's tests, where this module is in a checkout."""
BANK = TESTS / "mutants" / "bugs"


def of_checkout(name: str) -> ModuleType:
    """Import a module of tests/support.

    Raises:
        BadArgument: this is an installation, without the repository's tests.
    """
    if not BANK.is_dir():
        raise reject("mutants", str(BANK), "the bank of mutants is no part of an installation",
                     "run `attnfuzz` from a checkout of the repository (pip install -e .)")  # fmt: skip
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    return importlib.import_module(f"support.{name}")


def whole_bank() -> dict[str, Any]:
    """Return the mutants by id.

    Raises:
        BadArgument: a file of the bank is wrong.
    """
    try:
        bank: dict[str, Any] = of_checkout("mutants").mutants()
    except ValueError as error:
        raise BadArgument(f"{BANK}: {error}") from None
    return bank


def of_bank(
    bank: dict[str, Any], ids: Sequence[str], device: Device, *, held_out: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Return the ids of the mutants to try, each once, and those that cannot show on the device, with the reasons.

    Without ids, those of the bank, or what is held out; kernels that cannot run on this machine's GPU are left out, as long as
    another can.

    Raises:
        BadArgument: the bank has none of an id, or it cannot show on the device.
    """
    reasons = {each: reason for each, mutant in bank.items() if (reason := _why_not_on(mutant, device))}
    for each in ids:
        if each not in bank:
            near = _near(each, bank) or f"those of {BANK}"
            raise reject("ID", each, f"none of the {len(bank)} mutants has that id", f"did you mean {near}?")
        if each in reasons:
            raise reject("ID", each, reasons[each], "give another, or another --device")
    if ids:
        return list(dict.fromkeys(ids)), {}
    bank = {each: mutant for each, mutant in bank.items() if mutant.held_out == held_out}
    reasons = {each: reason for each, reason in reasons.items() if each in bank}
    able = [each for each in bank if each not in reasons]
    if device == "cuda":
        kernels = dict.fromkeys(bank[each].kernel for each in able)
        unable = {name: f"{name} cannot run: {why}" for name in kernels if (why := registry.get(name).unavailable(device))}
        # Where none can run, the machine is not one for campaigns on a GPU: an error, and no report of nothing.
        if len(unable) < len(kernels):
            reasons |= {each: unable[bank[each].kernel] for each in able if bank[each].kernel in unable}
    return [each for each in able if each not in reasons], reasons


def _why_not_on(mutant: Any, device: Device) -> str:
    if device == "cuda":
        return str(mutant.not_on_gpu)
    return "" if mutant.device == "cpu" else "it shows on a GPU only"


def _near(name: str, ids: Iterable[str]) -> str:
    """Return the ids that a wrong one is close to, whether its letters are large or small; an empty text where there is none."""
    of_small = {each.lower(): each for each in ids}
    return ", ".join(of_small[each] for each in difflib.get_close_matches(name.lower(), of_small, n=5))


def of_operators(kernel: str, ids: Sequence[str], size: int | None) -> tuple[list[str], dict[str, str]]:
    """Return the ids of the mutants that operators make of a kernel, and those that are equivalent with the reasons.

    Raises:
        BadArgument: libcst is missing, the kernel's source has no such mutants, or the list of equivalents does not fit it.
    """
    try:
        bank = of_checkout("operators.bank")
    except ModuleNotFoundError as error:
        if error.name != "libcst":
            raise
        raise reject("operators", kernel, "they change a syntax tree of libcst, which is not installed",
                     "pip install libcst, or the extra `mutants`") from None  # fmt: skip
    try:
        everything, reasons = bank.operator_mutants(kernel), bank.equivalents(kernel)
    except ValueError as error:
        raise BadArgument(f"operators={kernel!r}: {error}") from None
    for each in ids:
        if each not in everything:
            near = _near(each, everything) or f"those of `--operators {kernel} --sample 10`"
            raise reject("ID", each, f"none of the {len(everything)} mutants of {kernel} has that id", f"did you mean {near}?")
    chosen = list(dict.fromkeys(ids or everything))
    if size is not None:
        chosen = bank.sample(chosen, size)
    return [each for each in chosen if each not in reasons], {each: reasons[each] for each in chosen if each in reasons}
