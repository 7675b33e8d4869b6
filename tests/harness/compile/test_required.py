"""What machine code with tcgen05 products must be made of: read in code written by hand, and planted in compiled kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.compile import Compilable

from attnfuzz.harness.cli import main as cli
from attnfuzz.harness.compile.figures import Figures
from attnfuzz.harness.compile.required import lacking
from attnfuzz.harness.compile.tensor_memory import TensorMemory, tensor_memory
from attnfuzz.kernels import registry
from attnfuzz.kernels.lowering import Operand, Required, Requires
from attnfuzz.kernels.tilelang import lower, sm100_backward_device

NO_NVCC = lower.cannot_lower()
SHARED: frozenset[Operand] = frozenset({"shared"})
BOTH: frozenset[Operand] = frozenset({"shared", "tensor"})
FIGURES = Figures(registers=1, spills=0, shared=0, tensor_core="tcgen05", tensor_columns=64, instructions=9)

FIRST_WARP = ("S2R R9, SR_TID.X", "ISETP.GT.U32.AND P0, PT, R9, 0x1f, PT")


def allocation(label: str, bits: int = 2, skip: str = "@P0 BRA `(.L_end{0})") -> tuple[str, ...]:
    """An allocation as ptxas makes it: one try, then again and again, by the elected thread of the warps that come here."""
    lines = (
        skip, "LDS.U8 R0, [R2+0x1c]", "ISETP.NE.AND P0, PT, R0, RZ, PT", "@P0 BRA `(.L_trap{0})", "ELECT P0, URZ, PT",
        "@!P0 BRA `(.L_end{0})", f"UMOV UR4, {bits:#x}", "UTCATOMSWS.FIND_AND_SET.ALIGN UP0, UR4, UR4", "BRA.U UP0, `(.L_got{0})",
        ".L_again{0}:", "NANOSLEEP 0x64", f"UMOV UR4, {bits:#x}", "UTCATOMSWS.FIND_AND_SET.ALIGN UP0, UR4, UR4",
        "BRA.U !UP0, `(.L_again{0})", ".L_got{0}:", "STS [R0], R3", "BRA `(.L_end{0})", ".L_trap{0}:",
        "CALL.REL.NOINC `($__internal_1_$__cuda_sm10x_tcgen05_guardrail_trap_phase_invalid_during_alloc)", ".L_end{0}:",
    )  # fmt: skip
    return tuple(each.format(label) for each in lines)


RELEASE = ("LDS R3, [R0]", "R2UR UR4, R3", "UTCATOMSWS.AND URZ, UR4")
AGAIN = (
    "LDS R3, [R0]", "ELECT P0, URZ, PT", "VOTEU.ANY UP0, P0", ".L_next:", "@P0 ELECT P1, URZ, PT", "@P1 R2UR.BROADCAST UR4, R3",
    "@P1 PLOP3.LUT P0, PT, P1, PT, PT, 0x8, 0x80", "@UP0 UTCATOMSWS.AND URZ, UR4", "@P0 BRA.U.ANY `(.L_next)",
)  # fmt: skip
"""The other form of a release, once for each mask that a thread of the warp has."""
READ = ("LDTM.x32 R16, tmem[UR8]",)


def code(*lines: str) -> str:
    """The lines as nvdisasm prints them."""
    listing, address = ['\t.section\t.text.k,"ax",@progbits'], 0
    for line in lines:
        listing.append(line if line.endswith(":") else f"        /*{address:04x}*/                   {line} ;")
        address += 0 if line.endswith(":") else 16
    return "\n".join(listing)


TWICE = (*FIRST_WARP, *allocation("a"), "ISETP.GT.U32.AND P0, PT, R9, 0x1f, PT", *allocation("b", 8))
LEAVING = ("ISETP.GT.U32.AND P2, PT, R9, 0x1f, PT", "@P2 EXIT")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("IMAD R1, R2, R3, R4", "EXIT"), TensorMemory(0, False)),
        ((*FIRST_WARP, *allocation("a"), *LEAVING, *RELEASE, "EXIT"), TensorMemory(64, False)),
        ((*TWICE, *READ, *LEAVING, *RELEASE, *RELEASE, "EXIT"), TensorMemory(320, False)),
        ((*TWICE, *LEAVING, *RELEASE, *AGAIN, "EXIT"), TensorMemory(320, False)),
        # never freed; one of two; not where the block leaves early, on a condition of its input; only on such a condition
        ((*FIRST_WARP, *allocation("a"), "EXIT"), TensorMemory(64, True)),
        ((*TWICE, *LEAVING, *RELEASE, "EXIT"), TensorMemory(320, True)),
        ((*TWICE, *LEAVING, *AGAIN, "EXIT"), TensorMemory(320, True)),
        ((*FIRST_WARP, *allocation("a"), "LDC R5, c[0x0][0x380]", "ISETP.EQ.AND P1, PT, R5, RZ, PT", "@P1 EXIT", *LEAVING,
          *RELEASE, "EXIT"), TensorMemory(64, True)),
        ((*FIRST_WARP, *allocation("a"), "ISETP.EQ.AND P1, PT, R5, RZ, PT", "@P1 BRA `(.L_out)", *LEAVING, *RELEASE, ".L_out:",
          "EXIT"), TensorMemory(64, True)),
        # the fourth warp allocates: it frees, or the first one does, which never allocated
        (("S2R R9, SR_TID.X", "SHF.R.U32.HI R8, RZ, 0x5, R9", "ISETP.NE.AND P0, PT, R8, 0x3, PT", *allocation("a", 16),
          "ISETP.NE.AND P2, PT, R8, 0x3, PT", "@P2 EXIT", *RELEASE, "EXIT"), TensorMemory(512, False)),
        (("S2R R9, SR_TID.X", "SHF.R.U32.HI R8, RZ, 0x5, R9", "ISETP.NE.AND P0, PT, R8, 0x3, PT", *allocation("a", 16),
          *LEAVING, *RELEASE, "EXIT"), TensorMemory(512, True)),
        # how much is not known
        ((*FIRST_WARP, "@P0 EXIT", "LDS R4, [R0]", "R2UR UR5, R4", "UTCATOMSWS.FIND_AND_SET.ALIGN UP0, UR4, UR5", *RELEASE,
          "EXIT"), TensorMemory(None, False)),
    ],
)  # fmt: skip
def test_columns_are_counted_and_every_path_to_the_end_is_followed(lines: tuple[str, ...], expected: TensorMemory) -> None:
    assert tensor_memory(code(*lines)) == expected


def test_a_thread_index_is_known_only_until_its_register_is_written() -> None:
    lines = (*FIRST_WARP, *allocation("a"), "LDS.128 R8, [R0]", *LEAVING, *RELEASE, "EXIT")
    assert tensor_memory(code(*lines)) == TensorMemory(64, True)
    elsewhere = (*FIRST_WARP, *allocation("a"), "LDS.128 R12, [R0]", *LEAVING, *RELEASE, "EXIT")
    assert tensor_memory(code(*elsewhere)) == TensorMemory(64, False)


KEPT = (
    "LOP3.LUT R20, R20, 0xfffffeff, RZ, 0xc0, !PT", "@P0 LOP3.LUT R20, R20, 0x100, RZ, 0xfc, !PT", "P2R R21, PR, RZ, 0x1",
)  # fmt: skip
"""The first warp's predicate as a bit of a register, and as another register."""


@pytest.mark.parametrize(
    ("tests", "unfreed"),
    [
        (("LOP3.LUT P2, RZ, R20, 0x100, RZ, 0xc0, !PT",), False),
        (("@P5 LOP3.LUT R20, R20, 0x2, RZ, 0xfc, !PT", "LOP3.LUT P2, RZ, R20, 0x100, RZ, 0xc0, !PT"), False),
        (("@P5 LOP3.LUT R20, R20, 0x100, RZ, 0xfc, !PT", "LOP3.LUT P2, RZ, R20, 0x100, RZ, 0xc0, !PT"), True),
        (("LOP3.LUT P2, RZ, R20, 0x102, RZ, 0xc0, !PT",), True),
        (("ISETP.NE.AND P2, PT, R21, RZ, PT",), False),
        (("R2P PR, R22, 0x4",), True),
    ],
)
def test_predicates_kept_in_registers_are_followed(tests: tuple[str, ...], unfreed: bool) -> None:
    lines = (*FIRST_WARP, *KEPT, *allocation("a"), *tests, "@P2 EXIT", *RELEASE, "EXIT")
    assert tensor_memory(code(*lines)) == TensorMemory(64, unfreed)


PRODUCTS = (
    "@UP1 UTCHMMA gdesc[UR16], gdesc[UR10], tmem[UR18], tmem[UR8], idesc[UR9], !UPT", "@UP0 UTCBAR [UR16], URZ",
    "@UP1 UTCHMMA.WS gdesc[UR14], gdesc[UR10], tmem[UR16], tmem[UR8], idesc[UR9], !UPT", "@UP0 UTCBAR [UR16], URZ",
)  # fmt: skip
FROM_TENSOR = PRODUCTS[0].replace("gdesc", "tmem", 1)
RIGHT = (*FIRST_WARP, *allocation("a"), *PRODUCTS, *READ, *LEAVING, *RELEASE, "EXIT")


def test_right_code_lacks_nothing() -> None:
    assert lacking(Required(products=2, left=SHARED), FIGURES, code(*RIGHT)) is None
    mixed = code(*RIGHT, FROM_TENSOR)
    assert lacking(Required(products=2, left=BOTH), FIGURES, mixed) is None


@pytest.mark.parametrize(
    ("lines", "changes", "required", "expected"),
    [
        (RIGHT, {"tensor_core": "tcgen05+mma"}, {}, "products by tcgen05+mma, and all must be tcgen05's"),
        (RIGHT, {"tensor_core": None}, {}, "products by no tensor core"),
        (RIGHT, {}, {"left": BOTH}, "left operands from shared memory, and it must be shared and tensor memory"),
        ((*RIGHT, FROM_TENSOR), {}, {}, "left operands from shared and tensor memory, and it must be shared memory"),
        (RIGHT, {}, {"products": 3}, "products complete on mbarriers at 2 places, and it must be 3 or more"),
        (RIGHT, {"tensor_columns": 0}, {}, "no tensor memory is allocated"),
        ([each for each in RIGHT if each not in READ], {}, {}, "tensor memory is never read"),
        ([each for each in RIGHT if each not in RELEASE], {}, {}, "does not free all tensor memory"),
    ],
)
def test_what_is_missing_is_said(lines: list[str], changes: dict, required: dict, expected: str) -> None:
    figures = Figures(**{name: getattr(FIGURES, name) for name in FIGURES.__struct_fields__} | changes)
    said = lacking(Required(**{"products": 2, "left": SHARED} | required), figures, code(*lines)) or ""
    assert len(said.splitlines()) == 1
    assert expected in said


def test_the_device_code_declares_it_by_function() -> None:
    options = {"dim_qk": 64, "dim_v": 64, "dtype": "float16", "causal": False, "tile_m": 64, "tile_n": 128, "threads": 128}
    functions = {"backward": ("backward_ts", options), "preprocess": ("preprocess", {"dim_v": 64})}
    backward, preprocess = lower.units(sm100_backward_device, functions, "sm_100a")
    assert isinstance(backward, Requires)
    assert backward.required == Required(products=5, left=BOTH)
    assert isinstance(preprocess, Requires)
    assert preprocess.required is None


@pytest.mark.skipif(NO_NVCC is not None, reason=str(NO_NVCC))
@pytest.mark.slow
def test_planted_fallbacks_and_lost_tensor_memory_fail_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plants = ("none", "fallback", "unfreed", "operand", "one")
    made_of = ("support.compile_sm100", "products", "products")
    registry.register(Compilable("acme.products", "tilelang", plants=plants, architectures=("sm_100a",), tilelang=made_of))
    arguments = ["compile", "--jobs", "2", "--out", str(tmp_path / "out"), "acme.products", "--json"]
    for cached in (False, True):
        result = CliRunner().invoke(cli.main, arguments)
        assert result.exit_code == 1, result.output
        rows = {each["config"]["plant"]: each for each in json.loads(result.stdout)["rows"]}
        assert {each["cached"] for each in rows.values()} == {cached}
        good = rows["none"]
        assert (good["ok"], good["error"], good["tensor_core"], good["tensor_columns"]) == (True, None, "tcgen05", 256)
        assert good["instructions"] > 100
        assert rows["fallback"]["error"].startswith("products by tcgen05+mma, and all must be tcgen05's")
        assert rows["unfreed"]["error"].startswith("a path from tcgen05.alloc to the end does not free all tensor memory")
        assert rows["operand"]["error"].startswith("products take left operands from shared and tensor memory")
        assert "complete on mbarriers at 1 places" in rows["one"]["error"]
        assert not any(row["ok"] for plant, row in rows.items() if plant != "none")
