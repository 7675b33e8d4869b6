"""Every kernel that can run here under the fuzzer: what `pytest -n auto` in a clone is for."""

from __future__ import annotations

import pytest

from attnfuzz.harness.plugin import fuzz

test_tilelang_mha = pytest.mark.slow(fuzz("tilelang.mha"))
test_tilelang_mha_pipelined = pytest.mark.slow(fuzz("tilelang.mha_pipelined"))
test_tilelang_gqa_atomic = pytest.mark.slow(fuzz("tilelang.gqa.atomic"))
test_tilelang_gqa_split = pytest.mark.slow(fuzz("tilelang.gqa.split"))
test_tilelang_gqa_varlen_atomic = pytest.mark.slow(fuzz("tilelang.gqa_varlen.atomic"))
test_tilelang_gqa_varlen_split = pytest.mark.slow(fuzz("tilelang.gqa_varlen.split"))
test_tilelang_modified = pytest.mark.slow(fuzz("tilelang.modified", max_examples=40))
test_tilelang_sm100_ss = pytest.mark.slow(fuzz("tilelang.sm100.ss", max_examples=300))
test_tilelang_sm100_ts = pytest.mark.slow(fuzz("tilelang.sm100.ts", max_examples=300))
test_tilelang_sm100_wasp = pytest.mark.slow(fuzz("tilelang.sm100.wasp", max_examples=300))
test_tilelang_varlen = pytest.mark.slow(fuzz("tilelang.varlen"))
test_triton_varlen = fuzz("triton.varlen", max_examples=40)
test_triton_flex = fuzz("triton.flex", max_examples=16)
test_triton_paged = fuzz("triton.paged", max_examples=25)
test_torch_reference_cpu = fuzz("torch.reference_cpu", max_examples=100)
