"""Memory around rows far apart that no tensor has any more: who has it next, how much is kept, and when it is given back."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.libcuda import VirtualMemory
from support.virtual_memory import FAR_APART, GRANULE, released

from attnfuzz.harness.trial import gpu_memory, sparse
from attnfuzz.harness.trial.sparse import SparseMemory

MIB = 1 << 20


def address(memory: SparseMemory) -> int:
    at: int = memory.__cuda_array_interface__["data"][0]
    return at


def test_rows_in_the_same_places_have_the_memory_that_was_kept(cuda: VirtualMemory) -> None:
    memory, first = SparseMemory(FAR_APART), len(cuda.calls())
    at = address(memory)
    del memory
    assert len(cuda.calls()) == first
    memory = SparseMemory([(begin, end + 256) for begin, end in FAR_APART])
    assert address(memory) == at
    assert len(cuda.calls()) == first
    del memory
    # What another one has kept lies elsewhere.
    elsewhere = SparseMemory(FAR_APART[:3])
    assert address(elsewhere) != at
    assert len(cuda.calls("cuMemMap")) == 4 + 3
    del elsewhere
    assert released(cuda)


def test_memory_in_use_and_that_of_another_context_is_not_taken(cuda: VirtualMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, other = SparseMemory(FAR_APART), SparseMemory(FAR_APART)
    assert address(memory) != address(other)
    assert len(cuda.calls("cuMemMap")) == 8
    del memory, other
    with monkeypatch.context() as patch:
        patch.setattr(sparse._Cuda, "context", 5)
        memory = SparseMemory(FAR_APART)
    assert len(cuda.calls("cuMemMap")) == 12
    del memory
    assert released(cuda)


def test_what_was_used_last_is_kept_and_the_rest_is_given_back(cuda: VirtualMemory) -> None:
    first, second, third = (SparseMemory(FAR_APART[:count]) for count in (2, 3, 4))
    third_at = address(third)
    del first, third, second
    assert sparse.kept() == 9 * GRANULE
    sparse.keep(7 * GRANULE)
    assert [size for _, _, size in cuda.calls("cuMemUnmap")] == [GRANULE] * 2
    sparse.keep(7 * GRANULE - 1)
    assert len(cuda.calls("cuMemUnmap")) == 2 + 4
    assert third_at in {at for _, at, _ in cuda.calls("cuMemAddressFree")}
    sparse.keep(3 * GRANULE)
    assert len(cuda.calls("cuMemAddressFree")) == 2
    again = SparseMemory(FAR_APART[:3])
    sparse.keep(0)
    assert len(cuda.calls("cuMemAddressFree")) == 2
    del again
    assert released(cuda)


def test_a_process_keeps_little_between_two_tasks_and_nothing_where_memory_is_taken(
    cuda: VirtualMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = 100 << 30
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(gpu_memory, "_total", lambda: 100 << 30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_bytes, 100 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    rows = sparse.KEPT // GRANULE
    small, large = SparseMemory(FAR_APART), SparseMemory([(number << 31, (number << 31) + 256) for number in range(rows)])
    del small, large
    gpu_memory.trim("cuda")
    assert len(cuda.calls("cuMemUnmap")) == 4
    free_bytes = 1 << 30
    gpu_memory.trim("cuda")
    assert len(cuda.calls("cuMemAddressFree")) == 2
    assert released(cuda)


def test_of_a_small_gpu_a_process_keeps_a_small_part(cuda: VirtualMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    total, cached = 64 * 8 * GRANULE, 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(gpu_memory, "_total", lambda: total)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: cached)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, total))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    first, second, third = (SparseMemory(FAR_APART[:count]) for count in (2, 4, 3))
    del first, second, third
    gpu_memory.trim("cuda")
    assert sparse.kept() == 7 * GRANULE
    # With what torch keeps it is more than that part, and no memory is free.
    cached = 2 * GRANULE
    gpu_memory.trim("cuda")
    assert sparse.kept() == 0


def test_what_is_kept_within_a_task_has_a_bound(cuda: VirtualMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in the user's own process has no tasks, after which memory is given back."""
    monkeypatch.setattr(sparse, "KEPT", 4 * GRANULE)
    monkeypatch.setattr(sparse, "_MOST", 8 * GRANULE)
    for apart in range(20):
        SparseMemory([(0, 256), ((1 << 31) + apart * GRANULE, (1 << 31) + apart * GRANULE + 256)])
        assert sparse.kept() <= 10 * GRANULE
    assert len(cuda.calls("cuMemAddressReserve")) == 20
    assert released(cuda)


def test_what_is_too_large_to_be_kept_leaves_the_rest(cuda: VirtualMemory) -> None:
    small, large = SparseMemory(FAR_APART[:2]), SparseMemory(FAR_APART)
    del small, large
    sparse.keep(3 * GRANULE)
    assert sparse.kept() == 2 * GRANULE
    assert [size for _, _, size in cuda.calls("cuMemUnmap")] == [GRANULE] * 4


def test_where_the_driver_has_no_memory_what_is_kept_is_given_back_first(
    cuda: VirtualMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(sparse, "_as_tensor", lambda *_: torch.zeros(8 * GRANULE, dtype=torch.uint8))
    cuda.begin("cuMemCreate", 5, 2)
    memory = SparseMemory(FAR_APART)
    del memory
    device: Any = SimpleNamespace(type="cuda")
    sparse.empty_strided((2, 4), (MIB, 1), dtype=torch.float16, device=device)
    names = [name for name, *_ in cuda.calls()]
    again = len(names) - 1 - names[::-1].index("cuMemAddressReserve")
    assert names[:again].count("cuMemAddressFree") == 2


def test_a_case_that_waits_for_memory_has_what_is_kept(cuda: VirtualMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "start_counting", lambda _: None)
    monkeypatch.setattr(gpu_memory, "is_own_need", lambda *_: False)
    monkeypatch.setattr(gpu_memory, "_PAUSE", 0.0)
    memory = SparseMemory(FAR_APART)
    del memory

    def act() -> str:
        if not cuda.calls("cuMemAddressFree"):
            raise torch.OutOfMemoryError
        return "done"

    assert gpu_memory.when_free(act, "cuda") == "done"
