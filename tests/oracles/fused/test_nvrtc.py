"""Machine code of generated kernels: kept in a folder, whole or not at all. A real NVRTC compiles them where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attnfuzz.oracles.fused import nvrtc
from attnfuzz.oracles.fused.source import Source, shape_of
from attnfuzz.oracles.fused.trace import traced


class Counting:
    """Stands for NVRTC: machine code is the source, and compiles are counted."""

    version = "1.0"

    def __init__(self) -> None:
        self.compiles = 0

    def cubin(self, source: str, architecture: str) -> bytes:
        self.compiles += 1
        return f"{architecture}: {source}".encode()


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "attnfuzz" / "kernels"


def test_a_source_is_compiled_once_for_an_architecture(caches: Path) -> None:
    one = Counting()
    for _ in range(2):
        assert nvrtc.compiled(one, "a", "sm_90") == b"sm_90: a"  # type: ignore[arg-type]
    assert (one.compiles, len(list(caches.iterdir()))) == (1, 1)
    nvrtc.compiled(one, "a", "sm_100")  # type: ignore[arg-type]
    nvrtc.compiled(one, "b", "sm_90")  # type: ignore[arg-type]
    assert (one.compiles, len(list(caches.iterdir()))) == (3, 3)


def test_an_empty_file_and_a_folder_that_cannot_be_made_are_done_without(caches: Path) -> None:
    one = Counting()
    nvrtc.compiled(one, "a", "sm_90")  # type: ignore[arg-type]
    (path,) = caches.iterdir()
    path.write_bytes(b"")
    assert nvrtc.compiled(one, "a", "sm_90") == b"sm_90: a"  # type: ignore[arg-type]
    assert path.read_bytes() == b"sm_90: a"
    path.unlink()
    caches.rmdir()
    caches.write_text("a file")
    assert nvrtc.compiled(one, "a", "sm_90") == b"sm_90: a"  # type: ignore[arg-type]


def test_a_real_nvrtc_compiles_what_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", torch.version.cuda or "13.0")
    nvrtc.library.cache_clear()
    library = nvrtc.library()
    nvrtc.library.cache_clear()
    if library is None:
        pytest.skip("no NVRTC")
    x = torch.zeros(2, 3, dtype=torch.float64)
    for flat in (True, False):
        code, kinds, _ = traced(_every_operation, "every", (x, x > 0, 2.0), (0, 1), (2,))
        source = Source(code, "every", (False, True), [kind == "bool" for kind in kinds], 1, flat=flat)
        assert library.cubin(source.text, library.newest())[:4] == b"\x7fELF"
    with pytest.raises(RuntimeError, match="refuses a generated kernel"):
        library.cubin("no C", library.newest())
    assert not library.knows("sm_1")


def _every_operation(x: torch.Tensor, mask: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
    y = torch.lerp(x.abs().sqrt(), x.exp().log1p(), x.expm1()) * scale - x.log() / x.log2()
    z = y.round().clamp(min=-1.0, max=scale).nan_to_num(nan=0.0, posinf=1.0)
    near = torch.isfinite(x) & ~torch.isinf(y) | mask
    bits = x.view(torch.int64).bitwise_and(0x7FF0000000000000).view(torch.float64)
    return torch.where(near, z, torch.sign(x).ceil()), near, torch.maximum(bits, 1 / x.square()), torch.isnan(z)


@pytest.mark.parametrize(
    ("shapes", "sizes", "strides", "flat"),
    [
        (((2, 3, 4), (2, 3, 4)), (1, 1, 24), ((0, 0, 1), (0, 0, 1)), True),
        (((2, 3, 4), (2, 3, 1)), (2, 3, 4), ((12, 4, 1), (3, 1, 0)), False),
        (((2, 1, 4), (3, 1)), (2, 3, 4), ((4, 0, 1), (0, 1, 0)), False),
        (((5,), ()), (1, 1, 5), ((0, 0, 1), (0, 0, 0)), False),
    ],
)
def test_how_tensors_lie(shapes: tuple[tuple[int, ...], ...], sizes: object, strides: object, flat: bool) -> None:
    shape = shape_of([torch.zeros(each) for each in shapes])
    assert shape is not None
    assert shape.common == torch.broadcast_shapes(*shapes)
    assert (shape.sizes, shape.strides, shape.flat) == (sizes, strides, flat)


def test_what_cannot_be_indexed_is_said() -> None:
    assert shape_of([torch.zeros(2, 2, 2, 2), torch.zeros(2)]) is None
    assert shape_of([torch.zeros(2, 2, 2, 2), torch.zeros(2, 2, 2, 2)]) is not None
    assert shape_of([torch.zeros(1).expand(1 << 16, 1 << 16), torch.zeros(1 << 16)]) is None
