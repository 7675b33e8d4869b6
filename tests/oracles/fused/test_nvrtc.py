"""Machine code of generated kernels: kept in a folder, whole or not at all. A real NVRTC compiles them where there is one."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from attnfuzz.harness.trial.gpu_memory import is_out_of_memory
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


@pytest.mark.parametrize("content", [b"", b"half", b"x" * 100, None])
def test_a_damaged_file_is_compiled_once_more(caches: Path, content: bytes | None) -> None:
    one = Counting()
    nvrtc.compiled(one, "a", "sm_90")  # type: ignore[arg-type]
    (path,) = caches.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] if content is None else content)
    assert nvrtc.compiled(one, "a", "sm_90") == b"sm_90: a"  # type: ignore[arg-type]
    assert (one.compiles, path.read_bytes()) == (2, whole)


def test_a_folder_that_cannot_be_made_and_a_full_disk_are_done_without(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Counting()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert nvrtc.compiled(one, "a", "sm_90") == b"sm_90: a"  # type: ignore[arg-type]
    assert list(caches.iterdir()) == []
    caches.rmdir()
    caches.write_text("a file")
    assert nvrtc.compiled(one, "a", "sm_90") == b"sm_90: a"  # type: ignore[arg-type]


def test_an_error_of_the_driver_has_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        """Stands for libcuda."""

        @staticmethod
        def cuGetErrorName(status: int, text: Any) -> None:  # noqa: N802
            text._obj.value = {2: b"CUDA_ERROR_OUT_OF_MEMORY", 700: b"CUDA_ERROR_ILLEGAL_ADDRESS"}[status]

        @staticmethod
        def cuGetErrorString(status: int, text: Any) -> None:  # noqa: N802
            text._obj.value = {2: b"out of memory", 700: b"an illegal memory access was encountered"}[status]

    monkeypatch.setattr(nvrtc, "_driver", Driver)
    nvrtc._checked(0, "launch")
    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS: an illegal memory access"):
        nvrtc._checked(700, "launch")
    with pytest.raises(RuntimeError) as error:
        nvrtc._checked(2, "load")
    assert is_out_of_memory(error.value)


class Threads:
    """Stands for libcuda: a context by thread, and launches that need one."""

    def __init__(self) -> None:
        self.of_thread: dict[int, int] = {threading.get_ident(): 7}
        self.launches: list[int] = []

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = self.of_thread.get(threading.get_ident())
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self.of_thread[threading.get_ident()] = context.value
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:  # noqa: N802
        context._obj.value = 7 + device
        return 0

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:  # noqa: N802
        return 0 if threading.get_ident() in self.of_thread else 201

    def cuModuleGetFunction(self, function: Any, module: Any, entry: bytes) -> int:  # noqa: N802
        return 0

    def cuLaunchKernel(self, *arguments: Any) -> int:  # noqa: N802
        if threading.get_ident() not in self.of_thread:
            return 201
        self.launches.append(self.of_thread[threading.get_ident()])
        return 0


@pytest.mark.parametrize("loaded_there", [False, True])
def test_a_thread_without_a_context_launches_as_well(loaded_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's thread has none until torch launches something there."""
    driver = Threads()
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    monkeypatch.setattr(nvrtc, "_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel = None if loaded_there else nvrtc.Loaded(b"code", "entry")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (kernel or nvrtc.Loaded(b"code", "entry"))(b"argument", 1000, 0)).result()
    assert driver.launches == [7]


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
    assert tuple(shape.common) == torch.broadcast_shapes(*shapes)
    assert (shape.sizes, shape.elements, shape.flat) == (sizes, math.prod(shape.sizes), flat)
    assert tuple(tuple(shape.strides[at : at + 3]) for at in range(0, len(shape.strides), 3)) == strides


def test_what_cannot_be_indexed_is_said() -> None:
    assert shape_of([torch.zeros(2, 2, 2, 2), torch.zeros(2)]) is None
    assert shape_of([torch.zeros(2, 2, 2, 2), torch.zeros(2, 2, 2, 2)]) is not None
    assert shape_of([torch.zeros(1).expand(1 << 16, 1 << 16), torch.zeros(1 << 16)]) is None


def test_strides_of_one_index_are_none() -> None:
    far = torch.zeros(1).as_strided((1, 3, 1), (1 << 33, 0, 1 << 33))
    near = shape_of([far, torch.zeros(3, 1)])
    assert near is not None
    assert (near.sizes, near.strides, near.flat) == ((1, 3, 1), [0, 0, 0, 0, 1, 0], False)


@pytest.mark.parametrize("shapes", [((2, 3), (3, 3)), ((4,), (3,)), ((0, 3), (2, 3))])
def test_shapes_that_do_not_fit_are_left_to_torch(shapes: tuple[tuple[int, ...], ...]) -> None:
    assert shape_of([torch.zeros(each) for each in shapes]) is None


@pytest.mark.parametrize("change", ["+=", "-=", "*=", "/=", "|=", "add_", "mul_"])
def test_an_argument_is_not_changed_in_place(change: str) -> None:
    def changes(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        match change:
            case "+=":
                x += 1
            case "-=":
                x -= 1
            case "*=":
                x *= 2
            case "/=":
                x /= 2
            case "|=":
                mask |= x > 0
            case "add_":
                x.add_(1)
            case _:
                x.mul_(2)
        return x

    x = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="changed in place"):
        traced(changes, "changes", (x, x > 0), (0, 1), ())


def test_names_of_one_tensor_change_together() -> None:
    def doubled(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = x * 2
        b = a
        a += y
        return a, b

    x = torch.zeros(3, dtype=torch.float64)
    code, _, _ = traced(doubled, "doubled", (x, x), (0, 1), ())
    one, other = (line.split("=")[1] for line in code.splitlines() if line.strip().startswith("out"))
    assert one == other
