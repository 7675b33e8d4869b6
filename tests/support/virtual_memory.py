"""Memory for rows far apart by a driver that a test makes up: the rows of most tests, and whether all is given back."""

from __future__ import annotations

from support.libcuda import VirtualMemory

from attnfuzz.harness.trial import sparse

__all__ = ["FAR_APART", "GRANULE", "released"]

GRANULE = VirtualMemory.granularity
FAR_APART = [(number << 31, (number << 31) + 256) for number in range(4)]
"""Four rows of 256 bytes."""


def released(cuda: VirtualMemory) -> bool:
    """Whether all that was taken is given back, once, where nothing is kept; several tensors of a batch may be, in any order."""
    sparse.keep(0)
    handles = [handle for _, handle, _ in cuda.calls("cuMemCreate", failed=False)]
    mapped = [each[1:] for each in cuda.calls("cuMemMap", failed=False)]
    reserved, freed = cuda.calls("cuMemAddressReserve", failed=False), cuda.calls("cuMemAddressFree")
    assert [handle for _, handle, _ in cuda.calls("cuMemRelease")] == handles
    assert sorted(each[1:] for each in cuda.calls("cuMemUnmap")) == sorted(mapped)
    assert len(freed) <= len(reserved)
    return sorted(size for _, size, _ in reserved) == sorted(size for _, _, size in freed)
