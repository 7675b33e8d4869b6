"""The bank of mutants: bugs of released attention kernels, and of kinds that Cases did not reach, planted in copies of ours.

One file each in tests/mutants/bugs.
"""

from __future__ import annotations

import functools
import importlib
import json
import tomllib
from typing import Literal

import msgspec
from support.paths import TESTS

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.faults.planted import Edit, planted_copy, planted_source
from attnfuzz.kernels.problem import OutputName
from attnfuzz.strategies.case import FORMAT, Case, case_from_object

__all__ = ["FOLDER", "MODULES", "Mutant", "Patch", "kernel_of", "mutants"]

FOLDER = TESTS / "mutants" / "bugs"
Part = Literal["device", "host", "masks"]
MODULES: dict[str, dict[Part, str]] = {
    "triton.varlen": {"device": "attnfuzz.kernels.triton.varlen_device", "host": "attnfuzz.kernels.triton.varlen"},
    "triton.flex": {
        "device": "attnfuzz.kernels.triton.flex_device",
        "masks": "attnfuzz.kernels.triton.blockmask",
    },
}
"""The modules of each kernel in which bugs are planted."""


class Patch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replace the text `old`, which must be there exactly `times` times, by `new` in one part of a kernel."""

    part: Part
    old: str
    new: str
    times: int = 1


class Mutant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bug that a released kernel had, or of a kind that Cases did not reach, and how to plant it in one of our kernels.

    `source`: repository and number. `case`: a Case that shows it, JSON as in a case file, without format and kernel. `outputs`:
    those that are wrong in that Case, and `kinds`: of its failures. `control`: any grid of shapes finds it.
    """

    id: str
    source: str
    mechanism: str
    kernel: str
    outputs: tuple[OutputName, ...]
    kinds: tuple[str, ...]
    patches: tuple[Patch, ...]
    case: str
    device: Device = "cpu"
    control: bool = False

    @property
    def name(self) -> str:
        """The name of the kernel that has the bug."""
        return f"mutant.{self.id}"

    def edits(self, part: Part) -> list[Edit]:
        """Return the edits of one part."""
        return [Edit(each.old, each.new, each.times) for each in self.patches if each.part == part]

    def direct_case(self, kernel: str) -> Case:
        """Return the Case that shows it, for a kernel of that name.

        Raises:
            BadArgument: the file's Case cannot be read.
        """
        return case_from_object({"format": FORMAT, "kernel": kernel, **json.loads(self.case)})


@functools.cache
def mutants() -> dict[str, Mutant]:
    """Read the bank: mutants by id, in the order of their names.

    Raises:
        ValueError: a file is not a mutant, or not named by its id; the text says which and why.
    """
    found = {}
    for path in sorted(FOLDER.glob("*.toml")):
        try:
            each = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Mutant)
            _check(each)
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from None
        if each.id != path.stem:
            raise ValueError(f"{path.name}: its id is {each.id!r}; a file is named by its id")
        found[each.id] = each
    return found


def _check(mutant: Mutant) -> None:
    """Check that its kernel, parts and Case are such, and that its patches fit.

    Raises:
        ValueError: one of them is not; the text says what is expected.
    """
    if mutant.kernel not in MODULES:
        raise ValueError(f"kernel={mutant.kernel!r}: no bugs are planted in it; it is one of {', '.join(MODULES)}")
    if not mutant.patches:
        raise ValueError("patches: there are none; give one at least")
    modules = MODULES[mutant.kernel]
    if unknown := [each.part for each in mutant.patches if each.part not in modules]:
        raise ValueError(f"part={unknown[0]!r}: {mutant.kernel} has no such part; it is one of {', '.join(modules)}")
    for part, module in modules.items():
        file, source = planted_source(module, mutant.edits(part))
        try:
            compile(source, file, "exec")
        except SyntaxError as error:
            raise ValueError(f"patches: {file} is no Python with them: {error}") from None
    mutant.direct_case(mutant.kernel)


def kernel_of(mutant: Mutant) -> Kernel:
    """Make the kernel that has the bug, under a name of its own.

    Raises:
        BadArgument: a patch no longer fits the kernel's source.
    """
    modules = MODULES[mutant.kernel]
    files = registry.get(mutant.kernel).files
    device = functools.partial(planted_copy, modules["device"], mutant.edits("device"))
    if mutant.kernel == "triton.varlen":
        edits = mutant.edits("host")
        host = planted_copy(modules["host"], edits) if edits else importlib.import_module(modules["host"])
        kernel: Kernel = host.TritonVarlen(name=mutant.name, device_code=device, files=files)
        return kernel
    from attnfuzz.kernels.triton.flex import TritonFlex

    return TritonFlex(
        name=mutant.name, device_code=device, masks=functools.partial(planted_copy, modules["masks"], mutant.edits("masks"))
    )
