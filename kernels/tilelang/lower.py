"""Compile TileLang's device functions to machine code for any architecture: lower them to CUDA source, then run nvcc."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from attnfuzz.kernels.contract import BuildError
from attnfuzz.kernels.lowering import MachineCode, Required, Unit
from attnfuzz.kernels.support.compiler_output import captured
from attnfuzz.kernels.tilelang.build import cuda_passes
from attnfuzz.kernels.tilelang.loading import copying_warp_waits, marked

__all__ = ["cannot_lower", "find_nvcc", "nvcc_version", "units"]

_FLAGS = ("--cubin", "-O3", "-std=c++20", "-lineinfo", "-w", "-Xptxas", "-v")
"""The flags of TileLang's own compile, and verbose output of ptxas."""
_RACE = "Data race detected"


def cannot_lower() -> str | None:
    """The package or compiler that is missing, or None."""
    for package in ("torch", "tilelang"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: pip install {package}"
    if find_nvcc() is None:
        return "no nvcc: pip install 'attnfuzz[compile]', or put the one of a CUDA toolkit (13.0 for sm_100a) on PATH"
    return None if shutil.which("g++") else "no g++ on PATH: nvcc needs a C++ compiler"


def find_nvcc() -> Path | None:
    """Find nvcc where TileLang looks for it: $CUDA_HOME, PATH, the package nvidia-cuda-nvcc, /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path))
    try:
        files = metadata.files("nvidia-cuda-nvcc") or []
    except metadata.PackageNotFoundError:
        files = []
    candidates += [Path(str(each.locate())) for each in files if each.name == "nvcc"]
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((each for each in candidates if each.is_file() and os.access(each, os.X_OK)), None)


def nvcc_version() -> str | None:
    """nvcc's version, such as "13.0.88", or None where there is no nvcc."""
    nvcc = find_nvcc()
    match = re.search(r"V(\d+\.\d+\.\d+)", _version(nvcc)) if nvcc else None
    return match[1] if match else None


def units(module: ModuleType, functions: Mapping[str, tuple[str, dict[str, Any]]], arch: str) -> tuple[Unit, ...]:
    """Make one Unit per PrimFunc; `functions`: the factory in `module` that makes it, and its options.

    A module's `REQUIRED`, where it has one, says by factory what the machine code must have.
    """
    return tuple(_Unit(name, module, *code, arch) for name, code in functions.items())


class _Unit:
    """A PrimFunc, traced once, when it is first used."""

    def __init__(self, function: str, module: ModuleType, factory: str, options: dict[str, Any], arch: str) -> None:
        self.function = function
        self.required: Required | None = getattr(module, "REQUIRED", {}).get(factory)
        self._module, self._factory, self._options, self._arch = module, factory, options, arch
        self._passes = {**cuda_passes(module, options), "tl.disable_data_race_check": False}

    @functools.cached_property
    def _traced(self) -> Any:
        os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
        with captured() as log:
            try:
                return marked(getattr(self._module, self._factory)(**self._options))
            except Exception as error:  # the front end raises unrelated types
                raise BuildError(_text(error, log)) from error

    def identity(self) -> str | None:
        """The PrimFunc as text, and everything that it is compiled with.

        Raises:
            BuildError: it cannot be traced.
        """
        nvcc = find_nvcc()
        parts = (
            self._traced.script(show_meta=True), str(sorted(self._passes.items())), self._arch, " ".join(_FLAGS),
            metadata.version("tilelang"), _version(nvcc) if nvcc else "",
        )  # fmt: skip
        return "\n".join(parts)

    def compile(self) -> MachineCode:
        """Generate CUDA source and compile it to a cubin.

        Raises:
            BuildError: TileLang or nvcc refused.
        """
        func = self._traced
        with captured() as log:
            try:
                artifact = self._lowered(func)
            except Exception as error:  # the compiler raises unrelated types
                raise BuildError(_text(error, log)) from error
            printed = log.read_text(errors="replace")
        cubin, said = _nvcc(artifact.kernel_source, self._arch, fast=bool(self._passes.get("tl.enable_fast_math")))
        shared = {
            str(each.attrs["global_symbol"]): int(each.attrs["dyn_shared_memory_buf"])
            for each in artifact.device_mod.functions.values()
            if "dyn_shared_memory_buf" in each.attrs
        }
        return MachineCode(cubin=cubin, log=lambda: said, dynamic_shared=shared, races=_races(printed))

    def _lowered(self, func: Any) -> Any:
        import tilelang
        from tvm.target import Target

        target = Target({"kind": "cuda", "arch": self._arch})
        with tilelang.transform.PassContext(opt_level=3, config=self._passes), target, copying_warp_waits():
            return tilelang.lower(func, target=target)


def _nvcc(source: str, arch: str, *, fast: bool) -> tuple[bytes, str]:
    """Return (cubin, output of ptxas).

    Raises:
        BuildError: nvcc refused.
    """
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(str(cannot_lower()))
    number = arch.removeprefix("sm_")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cu"
        file.write_text(source, encoding="utf-8")
        includes = [f"-I{each}" for each in (TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR)]
        options = [*_FLAGS, *includes, *(["--use_fast_math"] if fast else []), "-gencode", f"arch=compute_{number},code={arch}"]
        # A relative name: messages must not name a temporary folder.
        command = [str(nvcc), *options, "-o", "kernel.cubin", file.name]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, cwd=folder)
        said = done.stderr + done.stdout
        if done.returncode:
            raise BuildError(f"nvcc ended with exit code {done.returncode}\n{said}")
        return file.with_suffix(".cubin").read_bytes(), said


@functools.cache
def _version(nvcc: Path) -> str:
    return subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False).stdout


def _text(error: Exception, log: Path) -> str:
    return f"{type(error).__name__}: {error}\n{log.read_text(errors='replace')}"


def _races(printed: str) -> tuple[str, ...]:
    """Races in parallel loops that TileLang's check reports, each once: store and place, without its counterexample."""
    reports = re.findall(r"^\s*\[\d+\] (.+)\n(?:\s*--> (.+):(\d+):\d+$)?", printed, re.MULTILINE) if _RACE in printed else []
    return tuple(dict.fromkeys(what + (f" at {Path(file).name}:{line}" if file else "") for what, file, line in reports))
