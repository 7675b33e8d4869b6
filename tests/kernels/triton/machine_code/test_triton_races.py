"""Tiles that are overwritten while a product reads them, in what Triton makes: found where there are any, and only there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.paths import TESTS

from attnfuzz.kernels.triton import runtime
from attnfuzz.kernels.triton.machine_code.races import overwritten

LOOP = """
%q = ttg.local_alloc : () -> !ttg.memdesc<BUFFERSx64x64xf16, #shared, #smem, mutable>
%at_1 = ttg.memdesc_index %q[%c0] : !ttg.memdesc<2x64x64xf16>
%token = ttg.async_copy_global_to_local %q_tile_1, %at_1 mask %m : tensor<64x64x!tt.ptr<f16>> -> <64x64xf16>
%all:2 = scf.for %i = %c0 to %n step %c1 iter_args(%acc = %zero, %t = %token) {
  %at_2 = ttg.memdesc_index %q[%j] : !ttg.memdesc<2x64x64xf16>
  %turned = ttg.memdesc_trans %at_2 {order = array<i32: 1, 0>} : !ttg.memdesc<64x64xf16>
  %dk = ttng.warp_group_dot %ds, %READ, %acc {isAsync = true} : tensor<64x64xf16> * !ttg.memdesc<64x64xf16>
  WAIT
  %at_3 = ttg.memdesc_index %q[%j] : !ttg.memdesc<2x64x64xf16>
  %next = ttg.async_copy_global_to_local %q_tile_2, %at_3 mask %m : tensor<64x64x!tt.ptr<f16>> -> <64x64xf16>
}
"""
OVERWRITTEN = ("q_tile: the next tile is copied into its one buffer while a product may still read it",)


def loop(buffers: int = 1, read: str = "at_2", wait: str = "") -> str:
    return LOOP.replace("BUFFERS", str(buffers)).replace("READ", read).replace("WAIT", wait)


@pytest.mark.parametrize("read", ["at_2", "turned"])
def test_a_product_under_way(read: str) -> None:
    assert overwritten(loop(read=read)) == OVERWRITTEN
    assert overwritten(loop(read=read, wait="%w = ttng.warp_group_dot_wait %dk {pendings = 1 : i32}")) == OVERWRITTEN


@pytest.mark.parametrize(
    ("wait", "sentences"), [("", OVERWRITTEN), ("%w = ttng.warp_group_dot_wait %dk {pendings = 0 : i32}", ())]
)
def test_a_product_of_the_turn_before(wait: str, sentences: tuple[str, ...]) -> None:
    lines = loop(wait=wait).strip().splitlines()
    before, begin, product, copy = lines[:3], lines[3], lines[4:8], lines[8:10]
    assert " scf.for " in begin
    assert overwritten("\n".join([*before, begin, *copy, *product, "}"])) == sentences
    assert overwritten("\n".join([*before, *copy, *product])) == ()


def test_what_is_waited_for_has_two_buffers_or_reads_another_tile() -> None:
    assert overwritten(loop(wait="%w:2 = ttng.warp_group_dot_wait %dk, %at_2 {pendings = 0 : i32}")) == ()
    assert overwritten(loop(buffers=2)) == ()
    assert overwritten(loop(read="other")) == ()
    assert overwritten("") == ()


@pytest.mark.skipif(runtime.unavailable("cpu") is not None, reason="needs Triton")
def test_our_kernels_have_none_and_the_one_that_was_wrong_is_found() -> None:
    script = TESTS / "support" / "triton_races.py"
    done = subprocess.run([sys.executable, "-P", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    reply = json.loads(done.stdout)
    assert reply.pop("pipelined") == list(OVERWRITTEN)
    assert reply == {"triton.flex": [], "triton.flex.prescaled": [], "triton.varlen": []}
