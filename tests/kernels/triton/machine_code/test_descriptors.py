"""Products that read shared memory without a descriptor: found in wrong machine code, and in no other."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from support.paths import TESTS

from attnfuzz.harness.compile import child as compiling_child
from attnfuzz.kernels.lowering import MachineCode
from attnfuzz.kernels.triton import runtime
from attnfuzz.kernels.triton.assembler import assembler
from attnfuzz.kernels.triton.machine_code.descriptors import astray
from attnfuzz.kernels.triton.machine_code.effects import descriptors_of, effect_of, swaps
from attnfuzz.kernels.triton.machine_code.sass import Instruction, functions

LOADED = "LDG.E.U16 R11, desc[UR60][R2.64]"
RIGHT = """
S2UR UR6, SR_CgaCtaId
UMOV UR5, 0x400
ULEA UR4, UR6, UR5, 0x18
LDG.E.U16 R10, desc[UR60][R2.64]
LDG.E.U16 R11, desc[UR60][R2.64+0x2]
IMAD.U32 R232, RZ, RZ, UR4
SHF.R.U32.HI R5, RZ, 0x4, R232
SGXT.U32 R6, R5, 0xe
IADD3 R10, P0, R6, 0x2, RZ
IMAD.MOV.U32 R0, RZ, RZ, RZ
IADD3.X R11, R0, -0x7fffffe0, RZ, P0, !PT
R2UR UR14, R10
R2UR UR15, R11
UIADD3.64 UR10, UR14, 0x3e, URZ
WARPGROUP.ARRIVE
HGMMA.64x64x16.F32.BF16 R24, R92, gdesc[UR8], R24, gsb0
EXIT
"""
"""The address and its offset, both halves, as ptxas 12.9 makes them for a product whose A is in registers."""
WRONG = RIGHT.replace("R10, P0, R6, 0x2", "R10, P0, R10, 0x2").replace("R11, R0, -0x7fffffe0", "R11, R11, -0x7fffffe0")
"""As ptxas 12.8 made them: of what had been loaded before into the registers that it chose."""


def sass(text: str, name: str = "backward") -> str:
    """As nvdisasm prints it: each instruction has a line of the source, its own number."""
    printed = [f'\t.section\t.text.{name},"ax",@progbits', f".text.{name}:"]
    for number, line in enumerate(text.strip().splitlines()):
        if line.startswith(".L_"):
            printed.append(line)
        else:
            source = f'\t//## File "/made/up/kernel.py", line {number}'
            printed += [source, f"        /*{16 * number:04x}*/                   {line} ;"]
    return "\n".join(printed)


def instruction(text: str) -> Instruction:
    return Instruction(0, text, None)


def test_other_registers_make_no_other_sentence() -> None:
    other = re.sub(r"UR1([0145])\b", r"UR3\1", WRONG).replace("gdesc[UR8]", "gdesc[UR28]")
    assert astray(sass(other)) == astray(sass(WRONG)) != ()


def test_a_descriptor_is_followed_to_where_it_comes_from() -> None:
    assert astray(sass(RIGHT)) == ()
    assert astray(sass(WRONG)) == (
        "kernel.py:15: a product's shared memory descriptor is made of a register that was loaded at kernel.py:3: "
        "wrong code of ptxas",
    )


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("R2UR UR15, R11\n", "", "nothing has set"),
        ("R2UR UR14, R10\n", "", "nothing has set"),
        ("IMAD.MOV.U32 R0, RZ, RZ, RZ", "S2R R0, SR_CTAID.Z", "is no constant"),
        ("IMAD.MOV.U32 R0, RZ, RZ, RZ", "IMAD R0, R232, 0x2, RZ", "is no constant"),
        ("IMAD.MOV.U32 R0, RZ, RZ, RZ", "LDC R0, c[0x0][0x210]", "is no constant"),
        ("IMAD.MOV.U32 R0, RZ, RZ, RZ", "MOV R0, c[0x0][0x210]", "is no constant"),
        ("SGXT.U32 R6, R5, 0xe", "LDS R6, [R5]", "was loaded at kernel.py:7"),
        ("SGXT.U32 R6, R5, 0xe", "LDS.64 R6, [R5]", "was loaded at kernel.py:7"),
        ("SGXT.U32 R6, R5, 0xe", "LDSM.16.M88.4 R4, [R5]", "was loaded at kernel.py:7"),
        ("SGXT.U32 R6, R5, 0xe", "@P1 LDG.E R6, desc[UR60][R2.64]", "was loaded at kernel.py:7"),
        ("R2UR UR14, R10", "R2UR UR14, R232\nLDS R9, [R5]\nR2UR UR14, R9", "was loaded at kernel.py:12"),
    ],
)
def test_faults_are_found(before: str, after: str, message: str) -> None:
    assert before in RIGHT
    (actual,) = astray(sass(RIGHT.replace(before, after)))
    assert message in actual


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # By way of the thread's own stack.
        ("R2UR UR15, R11", "STL [R1+0x104], R11\nLDG.E R11, desc[UR60][R2.64]\nLDL.LU R11, [R1+0x104]\nR2UR UR15, R11"),
        ("R2UR UR15, R11", "STL.64 [R1+0x100], R10\nCS2R R10, SRZ\nLDL.64 R10, [R1+0x100]\nR2UR UR15, R11"),
        ("IMAD.MOV.U32 R0, RZ, RZ, RZ", "STL [R1], RZ\nLDL R0, [R1]"),
        # Exchanged, by exclusive ors, and back.
        (
            "UIADD3.64 UR10, UR14, 0x3e, URZ",
            "UIADD3.64 UR10, UR14, 0x3e, URZ\n" + "".join(
                f"ULOP3.LUT UR{a}, UR10, UR11, URZ, 0x3c, !UPT\n" for a in (11, 10, 11, 11, 10, 11)
            ).strip(),
        ),
        # Set where a predicate says so, and read where it says so too.
        ("R2UR UR15, R11", "@P2 R2UR UR15, R11\n@!P2 UMOV UR15, 0x40000040"),
        # A warp's number, which all its threads have by a shuffle, decides of the address alone.
        ("SGXT.U32 R6, R5, 0xe", "SHFL.IDX PT, R7, R232, RZ, 0x1f\nIADD3 R6, R7, R5, RZ"),
        ("IMAD.MOV.U32 R0, RZ, RZ, RZ", "CS2R R0, SRZ"),
    ],
)  # fmt: skip
def test_right_code_in_other_words_is_right(before: str, after: str) -> None:
    assert before in RIGHT
    assert astray(sass(RIGHT.replace(before, after))) == ()


def test_an_exchange_takes_along_what_is_wrong() -> None:
    exchanged = "".join(f"\nULOP3.LUT UR{a}, UR10, UR11, URZ, 0x3c, !UPT" for a in (11, 10, 11))
    (actual,) = astray(sass(RIGHT.replace("0x3e, URZ", "0x3e, URZ" + exchanged)))
    assert "is no constant" in actual


def test_all_ways_to_a_product_count() -> None:
    begin, _, end = RIGHT.strip().partition("R2UR UR15, R11")
    either = "@P3 BRA `(.L_x_1)\nR2UR UR15, R11\nBRA `(.L_x_2)\n.L_x_1:\nSECOND\n.L_x_2:"
    assert astray(sass(begin + either.replace("SECOND", "UMOV UR15, 0x40000040") + end)) == ()
    (actual,) = astray(sass(begin + either.replace("SECOND", "S2UR UR15, SR_CTAID.X") + end))
    assert "is no constant" in actual
    (actual,) = astray(sass(begin + either.replace("SECOND", "NOP") + end))
    assert "nothing has set" in actual


def test_a_loop_is_followed_round() -> None:
    begin, _, end = RIGHT.strip().partition("WARPGROUP.ARRIVE")
    turn = f"{begin}.L_x_5:\nWARPGROUP.ARRIVE{end.replace('EXIT', 'LAST')}@P4 BRA `(.L_x_5)\nEXIT"
    assert astray(sass(turn.replace("LAST", "UIADD3.64 UR10, UR10, 0x2, URZ\n").replace("\n\n", "\n"))) == ()
    (actual,) = astray(sass(turn.replace("LAST", f"{LOADED}\nR2UR UR11, R11\n").replace("\n\n", "\n")))
    assert "was loaded at kernel.py:17" in actual


def test_what_was_known_on_one_way_alone_is_not_known() -> None:
    """A register that one way sets and the other one changes: both are kept, whichever way is followed last."""
    begin, _, end = RIGHT.strip().partition("R2UR UR15, R11")
    for first, second in (("R2UR UR15, R11", "S2UR UR15, SR_CTAID.X"), ("S2UR UR15, SR_CTAID.X", "R2UR UR15, R11")):
        (actual,) = astray(sass(f"{begin}@P3 BRA `(.L_x_1)\n{first}\nBRA `(.L_x_2)\n.L_x_1:\n{second}\n.L_x_2:{end}"))
        assert "is no constant" in actual
    (actual,) = astray(sass(RIGHT.replace("R2UR UR15, R11", "S2UR UR15, SR_CTAID.X\n@P2 R2UR UR15, R11")))
    assert "is no constant" in actual


def test_accumulators_are_no_descriptors() -> None:
    zeros = "\n".join(f"UMOV UR{each}, 0x4" for each in (8, 9, 10, 11))
    for product in ("HGMMA.64x64x16.F32 R8, gdesc[UR8], RZ, !UPT", "HMMA.16816.F32 R8, R4, R6, RZ"):
        (actual,) = astray(sass(RIGHT.replace("R2UR UR15, R11", f"{zeros}\n{product}\nR2UR UR15, R11")))
        assert "is no constant" in actual


@pytest.mark.parametrize(
    "between", ["UIADD3 UR11, UR11, 0x1, URZ", "S2UR UR10, SR_CTAID.X", "VOTEU.ANY UR10, UPT, P0", "ULDC.64 UR10, c[0x0][0x208]"]
)
def test_an_exchange_with_a_write_in_between_is_none(between: str) -> None:
    one, two, three = (f"ULOP3.LUT UR{a}, UR10, UR11, URZ, 0x3c, !UPT" for a in (11, 10, 11))
    (block,) = (each.blocks[0] for each in functions(sass("\n".join((one, between, two, three)))))
    assert swaps(block) == {}
    (block,) = (each.blocks[0] for each in functions(sass("\n".join((one, "NOP", two, three)))))
    assert swaps(block) == {0: None, 32: None, 48: ("UR11", "UR10")}


def test_code_that_goes_nobody_knows_where_is_left_alone() -> None:
    for jump in ("BRX R4 -0x20", "BRXU UR4 -0x20", "CALL.REL.NOINC `(.L_x_9)"):
        assert astray(sass(WRONG.replace("WARPGROUP.ARRIVE", jump))) == ()
    assert astray(sass(RIGHT) + "\n" + sass(WRONG, "second")) == astray(sass(WRONG))
    assert astray("") == () == astray(sass("FADD R1, R2, R3\nEXIT"))
    assert [each.name for each in functions(sass(RIGHT) + "\n" + sass("EXIT", "second"))] == ["backward", "second"]


def test_conditional_branches_go_on() -> None:
    (function,) = functions(sass("BRA.DIV ~URZ, `(.L_x_0)\nNOP\nBRA `(.L_x_0)\nNOP\n.L_x_0:\n@P0 EXIT\nEXIT"))
    assert function.following == [[3, 1], [3], [3], [4], []]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("HGMMA.64x64x16.F32 R24, R92, gdesc[UR8], R24, gsb0", (("UR10", "UR11"),)),
        ("HGMMA.64x64x16.F32 R24, gdesc[UR8].tnspB, R24", (("UR8", "UR9"), ("UR10", "UR11"))),
        ("@P0 QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR8], RZ, !UPT", (("UR8", "UR9"), ("UR10", "UR11"))),
        ("HMMA.16816.F32 R4, R8, R12, R4", ()),
    ],
)
def test_which_registers_are_descriptors(text: str, expected: tuple[tuple[str, str], ...]) -> None:
    assert descriptors_of(instruction(text)) == expected


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("IMAD.WIDE R16, R5, 0x4, R6", ("R16", "R17")),
        ("LDG.E.128 R4, desc[UR4][R2.64]", ("R4", "R5", "R6", "R7")),
        ("LOP3.LUT P0, R5, R3, 0x1, RZ, 0xc0, !PT", ("R5",)),
        ("SHFL.IDX PT, R3, R2, RZ, 0x1f", ("R3",)),
        ("STG.E desc[UR4][R2.64], R5", None),
        ("STS [R5], R6", None),
        ("ISETP.GE.AND P1, PT, R225, R252, PT", None),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", None),
        ("CS2R.32 R4, SR_CLOCKLO", ("R4",)),
        ("STL [R5], R6", None),
        ("LDL R6, [R5+0x10]", ("R6",)),
        ("EXIT", None),
        ("REDUX.SUM UR4, R2", ("UR4",)),
        ("RED.E.ADD.STRONG.GPU desc[UR4][R2.64], R5", None),
        ("HGMMA.64x16x16.F32.BF16 R24, R92, gdesc[UR8], R24, gsb0", tuple(f"R{24 + i}" for i in range(8))),
        ("HGMMA.64x16x16.F16 R24, R92, gdesc[UR8], R24, gsb0", tuple(f"R{24 + i}" for i in range(4))),
        ("HMMA.16816.F32 R4, R8, R12, R4", ("R4", "R5", "R6", "R7")),
        ("HMMA.16816.F16 R4, R8, R12, R4", ("R4", "R5")),
        ("UIMAD.WIDE.U32 UR4, UR6, UR7, UR8", ("UR4", "UR5")),
        ("VOTEU.ANY UR4, UPT, P0", ("UR4",)),
    ],
)
def test_what_an_instruction_makes(text: str, targets: tuple[str, ...] | None) -> None:
    effect = effect_of(instruction(text))
    assert targets is None if effect is None else effect.targets == targets


class Unit:
    function = "backward"

    def __init__(self, **code: Any) -> None:
        self.code = code

    def compile(self) -> MachineCode:
        log = "ptxas info : Compiling entry function 'f' for 'sm_90a'\nptxas info : Used 10 registers"
        return MachineCode(cubin=b"", log=lambda: log, **self.code)


def test_wrong_code_is_told_with_the_races_and_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def races(text: str, **code: Any) -> tuple[str, ...] | None:
        monkeypatch.setattr(compiling_child, "disassembled", lambda _: sass(text))
        lowered = compiling_child._compiled(Unit(**code), None)
        assert (lowered.error, lowered.figures and lowered.figures.tensor_core) == (code.get("refused"), "wgmma")
        return lowered.races

    sentences = astray(sass(WRONG))
    assert len(sentences) == 1
    assert races(RIGHT, suspects=astray) == ()
    assert races(WRONG, suspects=astray) == sentences
    assert races(WRONG, suspects=astray, races=("another",), refused="too large") == ("another", *sentences)
    assert races(WRONG, races=("another",)) == ("another",)
    assert races(WRONG) is None


@pytest.mark.skipif(runtime.unavailable("cpu") is not None, reason="needs Triton")
def test_in_real_machine_code_what_is_planted_is_found_and_nothing_else() -> None:
    """Upper halves that are not constants: a program's number instead."""
    script = TESTS / "support" / "triton_sass.py"
    done = subprocess.run([sys.executable, "-P", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    if (version := assembler(90)) and version[1] < (12, 9):
        assert astray(done.stdout)
        pytest.skip("this ptxas gets it wrong by itself")
    assert astray(done.stdout) == ()
    lines = done.stdout.splitlines()
    planted = [i for i, line in enumerate(lines) if re.search(r" UMOV UR\d+, 0x40000040 ", line)]
    # The assembler of CUDA 13.0 writes 11 of them where that of 12.9 writes more than 20.
    assert len(planted) >= (10 if version and version[1] >= (13, 0) else 20), f"assembled by {version}"
    for i in planted[::4]:
        changed = re.sub(r"UMOV (UR\d+), 0x40000040", r"S2UR \1, SR_CTAID.Z", lines[i])
        sentences = astray("\n".join([*lines[:i], changed, *lines[i + 1 :]]))
        assert sentences
        assert all(re.match(r"flex_device\.py:\d+: a product's .* is no constant", each) for each in sentences), lines[i]
