"""The bank of mutants: bugs of released attention kernels, of kinds that Cases did not reach, and others that tests need.

One file each in tests/mutants/bugs, planted in copies of our kernels. Those in tests/mutants/held_out are no part of the bank:
nothing that is drawn or judged was changed for them, so that they say what the fuzzer finds of bugs that nobody has thought of.
"""

from __future__ import annotations

import functools
import importlib
import json
import tomllib
from typing import Any, Literal, NamedTuple

import msgspec
from support.paths import TESTS

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Device, Kernel
from attnfuzz.kernels.faults.planted import Edit, planted_copy, planted_source
from attnfuzz.strategies.case import FORMAT, Case, case_from_object

__all__ = ["FOLDER", "HELD_OUT", "SUBJECTS", "Campaign", "Memory", "Mutant", "Need", "Patch", "kernel_of", "module_of", "mutants"]

FOLDER, HELD_OUT = TESTS / "mutants" / "bugs", TESTS / "mutants" / "held_out"
Part = Literal["device", "host", "masks"]
Need = Literal["sequences", "tiles", "values", "kv_heads"]
"""More than two sequences, more than two tiles of tokens, other values than plain ones, several key/value heads."""


class Subject(NamedTuple):
    """A kernel in which bugs are planted: its modules, the class in `host` that makes it, and that class's arguments."""

    modules: dict[Part, str]
    kind: str
    arguments: dict[str, Any]


def _triton(name: str, kind: str, **more: str) -> Subject:
    package = "attnfuzz.kernels.triton"
    parts = {"device": f"{name}_device", "host": name, **more}
    return Subject({part: f"{package}.{module}" for part, module in parts.items()}, kind, {})  # type: ignore[misc]


def _tilelang(name: str, kind: str, device: str, **arguments: Any) -> Subject:
    package = "attnfuzz.kernels.tilelang"
    return Subject({"device": f"{package}.{device}_device", "host": f"{package}.{name}"}, kind, arguments)


SUBJECTS: dict[str, Subject] = {
    "triton.varlen": _triton("varlen", "TritonVarlen"),
    "triton.paged": _triton("paged", "TritonPaged"),
    "triton.flex": _triton("flex", "TritonFlex", masks="blockmask"),
    "triton.flex.prescaled": _triton("flex", "TritonFlex", masks="blockmask"),
    "triton.flex.tf32": _triton("flex", "TritonFlex", masks="blockmask"),
    "tilelang.varlen": _tilelang("varlen", "TileLangVarlen", "varlen"),
    "tilelang.mha": _tilelang("dense", "TileLangDense", "dense", reduction="none", pipelined=False),
    "tilelang.mha_pipelined": _tilelang("dense", "TileLangDense", "dense", reduction="none"),
    "tilelang.gqa.atomic": _tilelang("dense", "TileLangDense", "dense", reduction="atomic"),
    "tilelang.gqa.split": _tilelang("dense", "TileLangDense", "dense", reduction="split"),
    "tilelang.gqa_varlen.atomic": _tilelang("ragged", "TileLangRagged", "ragged", reduction="atomic"),
    "tilelang.gqa_varlen.split": _tilelang("ragged", "TileLangRagged", "ragged", reduction="split"),
    "tilelang.modified": _tilelang("modified", "TileLangModified", "dense"),
}
"""The kernels in which bugs are planted."""


class Patch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replace the text `old`, which must be there exactly `times` times, by `new` in one part of a kernel."""

    part: Part
    old: str
    new: str
    times: int = 1


class Campaign(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a campaign of few variants finds the bug (tests/kernels/faults/test_faults.py), on the CPU or on a GPU.

    `causal`: only a causal mask shows it. `ahead`: only a Config of four warps, whose products are asynchronous. `races`: rows of
    another sequence are stored twice, and on a GPU either block may be the last.
    """

    causal: bool = False
    ahead: bool = False
    races: bool = False


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a campaign finds a bug of memory, or of what one call leaves to the next (tests/kernels/faults/test_memory.py).

    `kinds`: of the failure without the memory checker, and `says`: a part of its message. `checker`: the kind as which the memory
    checker of interpreted kernels finds it, if it does.
    """

    kinds: tuple[str, ...]
    says: str = ""
    checker: str = ""


class Mutant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bug, and how to plant it in one of our kernels.

    `source`: repository and number of the released kernel that had it, or "no released kernel" and why it is here. `case`: a Case
    that shows it, JSON as in a case file, without format and kernel. `outputs`: those that are wrong in that Case, and `kinds`:
    of its failures. `needs`: what a Case must have to show it (tests/mutants/test_bank.py tries Cases without). `control`: any
    grid of shapes finds it. `fused`: it shows only where a product and a sum are rounded once. `isolated`: the Case needs a
    process of its own, which hangs. `not_on_gpu`: why no Case can show it on a GPU. `held_out`: by the folder of its file.
    """

    id: str
    source: str
    mechanism: str
    kernel: str
    outputs: tuple[str, ...]
    kinds: tuple[str, ...]
    patches: tuple[Patch, ...]
    case: str
    needs: tuple[Need, ...] = ()
    device: Device = "cpu"
    control: bool = False
    fused: bool = False
    isolated: bool = False
    not_on_gpu: str = ""
    held_out: bool = False
    campaign: Campaign | None = None
    memory: Memory | None = None

    @property
    def name(self) -> str:
        """The name of the kernel that has the bug."""
        return f"mutant.{self.id}"

    @property
    def backend(self) -> str:
        """The language of the kernel."""
        return self.kernel.partition(".")[0]

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
    """Read the bank, then what is held out: mutants by id, in the order of their names.

    Raises:
        ValueError: a file is not a mutant, or not named by its id; the text says which and why.
    """
    found: dict[str, Mutant] = {}
    for folder in (FOLDER, HELD_OUT):
        for path in sorted(folder.glob("*.toml")):
            try:
                each = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Mutant)
                _check(each)
            except ValueError as error:
                raise ValueError(f"{path.name}: {error}") from None
            if each.id != path.stem:
                raise ValueError(f"{path.name}: its id is {each.id!r}; a file is named by its id")
            if each.id in found:
                raise ValueError(f"{path.name}: the bank has a mutant of that id too")
            found[each.id] = msgspec.structs.replace(each, held_out=folder == HELD_OUT)
    return found


def _check(mutant: Mutant) -> None:
    """Check that its kernel, parts and Case are such, and that its patches fit.

    Raises:
        ValueError: one of them is not; the text says what is expected.
    """
    if mutant.kernel not in SUBJECTS:
        raise ValueError(f"kernel={mutant.kernel!r}: no bugs are planted in it; it is one of {', '.join(SUBJECTS)}")
    if not mutant.patches:
        raise ValueError("patches: there are none; give one at least")
    modules = SUBJECTS[mutant.kernel].modules
    if unknown := [each.part for each in mutant.patches if each.part not in modules]:
        raise ValueError(f"part={unknown[0]!r}: {mutant.kernel} has no such part; it is one of {', '.join(modules)}")
    for part, module in modules.items():
        file, source = planted_source(module, mutant.edits(part))
        try:
            compile(source, file, "exec")
        except SyntaxError as error:
            raise ValueError(f"patches: {file} is no Python with them: {error}") from None
    mutant.direct_case(mutant.kernel)


def module_of(kernel: str, part: Part) -> str:
    """Return the name of a kernel's module."""
    return SUBJECTS[kernel].modules[part]


def kernel_of(mutant: Mutant, name: str = "") -> Kernel:
    """Make the kernel that has the bug, called `name`, or by a name of its own.

    Raises:
        BadArgument: a patch no longer fits the kernel's source.
    """
    modules, kind, arguments = SUBJECTS[mutant.kernel]
    copies = {part: functools.partial(planted_copy, module, mutant.edits(part)) for part, module in modules.items()}
    host = copies["host"]() if mutant.edits("host") else importlib.import_module(modules["host"])
    # A right part is not copied: what TileLang has compiled for the right kernel is found again.
    options = {"device_code": copies["device"]} if mutant.edits("device") else {}
    if mutant.backend == "triton":
        original = registry.get(mutant.kernel)
        options |= {"files": original.files, "device_code": copies["device"]}
        if "masks" in modules:
            options |= {"masks": copies["masks"], "capabilities": original.capabilities}
    kernel: Kernel = getattr(host, kind)(name=name or mutant.name, **arguments, **options)
    return kernel
