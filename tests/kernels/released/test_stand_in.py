"""The stand-in of a GPU: what wrappers are told, what an autotuner chooses, and that nothing of it stays."""

from __future__ import annotations

import pytest
import torch
from support.triton_mode import loaded, marks

pytestmark = marks()

triton = loaded()

import triton.language as tl  # noqa: E402 - after the mode is fixed
from triton.language.extra import libdevice  # noqa: E402 - imports triton

from attnfuzz.kernels.released.stand_in import NAME, h100  # noqa: E402 - imports triton
from attnfuzz.kernels.support import memory  # noqa: E402 - imports triton
from attnfuzz.kernels.support.memory import MemoryFault  # noqa: E402 - imports triton


def test_questions_about_the_gpu_have_answers_inside_and_none_after() -> None:
    x = torch.zeros(1)
    with h100():
        assert torch.cuda.get_device_capability() == (9, 0)
        assert torch.cuda.get_device_name(0) == NAME
        assert torch.cuda.get_device_properties(x.device).multi_processor_count == 132
        assert triton.runtime.driver.active.get_current_target().arch == 90
        assert triton.runtime.driver.active.utils.get_device_properties(0)["max_shared_mem"] == 232448
        with torch.cuda.device(0):
            assert x.is_cuda
        assert not torch.cuda.is_available()
    assert not x.is_cuda
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            torch.cuda.get_device_capability()


def configs(*sizes: int) -> list[triton.Config]:
    return [triton.Config({"block": size}, num_warps=4) for size in sizes]


with h100():

    @triton.autotune(configs(64, 16, 32), key=["n"])
    @triton.jit
    def tuned_kernel(x, n, block: tl.constexpr, most: tl.constexpr):
        tl.static_assert(block <= most)
        at = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(x + at, block, mask=at < n)

    @triton.jit
    def counted_kernel(x, n, size: tl.constexpr):
        tl.store(x + tl.program_id(0), size + n)


@pytest.mark.parametrize(("most", "chosen"), [(64, 64), (16, 16), (32, 16)])
def test_an_autotuner_takes_its_first_candidate_that_compiles(most: int, chosen: int) -> None:
    x = torch.zeros(70, dtype=torch.int32)
    tuned_kernel.cache.clear()
    with h100():
        tuned_kernel[lambda meta: (triton.cdiv(70, meta["block"]),)](x, 70, most=most)
    assert set(x.tolist()) == {chosen}


def test_a_candidate_that_breaks_otherwise_is_an_error() -> None:
    x = torch.zeros(8, dtype=torch.int32)
    tuned_kernel.cache.clear()
    with h100(), pytest.raises((MemoryFault, triton.runtime.errors.InterpreterError)):
        tuned_kernel[(1,)](x, 70, most=64)


def test_what_a_launch_returns_can_be_launched_again_as_a_compiled_kernel_can() -> None:
    x = torch.zeros(4, dtype=torch.int32)
    assert isinstance(counted_kernel, triton.runtime.JITFunction)
    assert [each.is_constexpr for each in counted_kernel.params] == [False, False, True]
    compiled = counted_kernel[(2,)](x, 1, size=10)
    assert x.tolist() == [11, 11, 0, 0]
    compiled[(4, 1, 1)](x, 2)
    assert x.tolist() == [12] * 4
    compiled[(3,)](x, 2, 20)
    assert x.tolist() == [22, 22, 22, 12]


@triton.jit
def tanh_kernel(x, y, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(y + at, libdevice.tanh(tl.load(x + at)))


def test_tanh_of_cuda_is_that_of_the_cpu() -> None:
    x, y = torch.linspace(-3, 3, 8), torch.zeros(8)
    with h100():
        tanh_kernel[(1,)](x, y, size=8)
    assert torch.allclose(y, x.tanh(), rtol=1e-6)


@triton.jit
def half_masked_kernel(x, y, n, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(y + at, tl.load(x + at, mask=at < n))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_masked_elements_without_other(dtype: torch.dtype) -> None:
    x, y = torch.ones(8, dtype=dtype), torch.full((8,), 5, dtype=dtype)
    with pytest.raises(MemoryFault, match="4 of 8 elements are masked and there is no other="):
        half_masked_kernel[(1,)](x, y, 4, size=8)
    with memory.masked_loads("zero"):
        half_masked_kernel[(1,)](x, y, 4, size=8)
    assert y.tolist() == [1] * 4 + [0] * 4
    with memory.masked_loads("anything"):
        half_masked_kernel[(1,)](x, y, 4, size=8)
    assert y[:4].tolist() == [1] * 4
    assert bool(y[4:].isnan().all()) if dtype.is_floating_point else y[4:].tolist() == [127] * 4
    with pytest.raises(MemoryFault):
        half_masked_kernel[(1,)](x, y, 4, size=8)
