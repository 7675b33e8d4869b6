"""Compile CUDA source by NVRTC, which comes with PyTorch, and launch it by the driver; compiled code is kept in a folder."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import site
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["Library", "Loaded", "compiled", "current_device", "folder", "library"]

_TRIAL = 'extern "C" __global__ void trial(double* x) { *x = ::exp(*x); }'
_DIGEST = 32
_THREADS, _MOST_BLOCKS = 256, 1 << 14
_INVALID_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT."""


class Library:
    """NVRTC at a path.

    Raises:
        OSError: there is no such library.
    """

    def __init__(self, path: str) -> None:
        # What it opens by name, where it lies in no folder that the loader knows.
        for beside in sorted(Path(path).parent.glob("libnvrtc-builtins.so*")) if "/" in path else ():
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(beside), ctypes.RTLD_GLOBAL)
        self._nvrtc = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def cubin(self, source: str, architecture: str) -> bytes:
        """Return the machine code of `source` for an architecture such as "sm_90".

        Raises:
            RuntimeError: NVRTC refuses it; with its log.
        """
        program = ctypes.c_void_p()
        self._check(self._nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"fused.cu", 0, None, None))
        try:
            options = (ctypes.c_char_p * 2)(f"--gpu-architecture={architecture}".encode(), b"--std=c++17")
            if self._nvrtc.nvrtcCompileProgram(program, len(options), options):
                raise RuntimeError(f"NVRTC {self.version} refuses a generated kernel: {self._log(program)}\n{source}")
            size = ctypes.c_size_t()
            self._check(self._nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
            code = ctypes.create_string_buffer(size.value)
            self._check(self._nvrtc.nvrtcGetCUBIN(program, code))
            return code.raw
        finally:
            self._nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    def knows(self, architecture: str) -> bool:
        """Whether it makes code for an architecture such as "sm_90"."""
        return architecture in {f"sm_{each}" for each in self._architectures()}

    def newest(self) -> str:
        """Return the last architecture that it makes code for."""
        return f"sm_{max(self._architectures())}"

    def _architectures(self) -> list[int]:
        count = ctypes.c_int()
        self._check(self._nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        numbers = (ctypes.c_int * count.value)()
        self._check(self._nvrtc.nvrtcGetSupportedArchs(numbers))
        return list(numbers)

    def _log(self, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(max(1, size.value))
        self._nvrtc.nvrtcGetProgramLog(program, log)
        return log.value.decode("utf-8", "replace").strip()

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise RuntimeError(f"NVRTC answers with status {status}")


@functools.cache
def library() -> Library | None:
    """Return the NVRTC of this PyTorch; None where there is none, or it makes no machine code."""
    major = (torch.version.cuda or "0").split(".")[0]
    for path in _paths(f"libnvrtc.so.{major}"):
        with contextlib.suppress(OSError, AttributeError, RuntimeError):
            nvrtc = Library(path)
            nvrtc.cubin(_TRIAL, nvrtc.newest())
            return nvrtc
    return None


def _paths(name: str) -> Iterator[str]:
    beside = Path(torch.__file__).parent
    for packages in dict.fromkeys([beside.parent, *(Path(each) for each in site.getsitepackages()), *map(Path, sys.path)]):
        for path in sorted(packages.glob(f"nvidia/*/lib/{name}*")):
            if re.fullmatch(r"libnvrtc\.so\.[\d.]+", path.name):
                yield str(path)
    yield str(beside / "lib" / name)
    yield f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/lib64/{name}"
    yield name


def folder() -> Path:
    """Return the folder of compiled kernels, in that for caches."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or "/nonexistent", ".cache")
    return Path(caches, "attnfuzz", "kernels")


def compiled(nvrtc: Library, source: str, architecture: str) -> bytes:
    """Return machine code from the folder, or compile it and keep it there; a folder that cannot be written is done without.

    A file begins with a digest of its code, so that a damaged one is compiled once more.
    """
    name = hashlib.sha256(f"{nvrtc.version} {architecture} {source}".encode()).hexdigest()[:32]
    path = folder() / f"{name}.cubin"
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        if content[:_DIGEST] == hashlib.sha256(content[_DIGEST:]).digest():
            return content[_DIGEST:]
    code = nvrtc.cubin(source, architecture)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, hashlib.sha256(code).digest() + code)
    return code


def _write(path: Path, content: bytes) -> None:
    """Write a file whole, or not at all: other processes read it meanwhile."""
    file, part = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(file, "wb") as stream:
            stream.write(content)
        Path(part).replace(path)
    except OSError:
        Path(part).unlink(missing_ok=True)
        raise


class Loaded:
    """A kernel on the current device, called with its argument and the number of elements; on the current stream."""

    def __init__(self, code: bytes, entry: str) -> None:
        self._driver = _driver()
        self._context = self._current_context()
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _checked(self._driver.cuModuleLoadData(ctypes.byref(module), code), "load")
        _checked(self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, entry.encode()), "find")

    def __call__(self, argument: bytes, count: int, device: int) -> None:
        """Launch it."""
        blocks = min(_MOST_BLOCKS, -(-count // _THREADS))
        # A list of one pointer to the argument; the bytes live on while this frame does.
        parameters = ctypes.byref(ctypes.c_char_p(argument))
        launched = (self._function, blocks, 1, 1, _THREADS, 1, 1, 0, ctypes.c_void_p(_stream(device)), parameters, None)
        status = self._driver.cuLaunchKernel(*launched)
        if status == _INVALID_CONTEXT:
            # A thread without a context, such as autograd's before torch has launched something there.
            _checked(self._driver.cuCtxSetCurrent(self._context), "set the context of")
            status = self._driver.cuLaunchKernel(*launched)
        _checked(status, "launch")

    def _current_context(self) -> ctypes.c_void_p:
        """Return this thread's context; where it has none, that of torch's current device, which becomes the thread's."""
        context = ctypes.c_void_p()
        _checked(self._driver.cuCtxGetCurrent(ctypes.byref(context)), "ask for the context of")
        if not context.value:
            _checked(
                self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device()), "open a context for"
            )
            _checked(self._driver.cuCtxSetCurrent(context), "set the context of")
        return context


def current_device() -> int:
    """Return the number of torch's current device, of a process that has tensors there: no initialisation is looked for."""
    try:
        return int(torch._C._cuda_getDevice())
    except AttributeError:
        return int(torch.cuda.current_device())


def _stream(device: int) -> int:
    """Return the handle of the current stream; torch's own functions do not make an object for it."""
    try:
        return int(torch._C._cuda_getCurrentRawStream(device))
    except AttributeError:
        return int(torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _checked(status: int, what: str) -> None:
    if not status:
        return
    # The driver's own words, by which a lost device and refused memory are told from other errors.
    words = []
    for function in (_driver().cuGetErrorName, _driver().cuGetErrorString):
        text = ctypes.c_char_p()
        function(status, ctypes.byref(text))
        words.append((text.value or b"unknown").decode("ascii", "replace"))
    raise RuntimeError(f"CUDA error: the driver cannot {what} a generated kernel: {words[0]}: {words[1]}")
