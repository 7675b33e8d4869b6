"""The architecture: package list, import order, no cycles, few entries a folder, and every module imports without backends."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.paths import ROOT

TOPS = ("harness", "kernels", "oracles", "strategies")
MAY_IMPORT = {
    "kernels": {"kernels"},
    "oracles": {"oracles", "kernels"},
    "strategies": {"strategies", "kernels"},
    "harness": {"harness", "strategies", "oracles", "kernels"},
}
PACKAGES = (*("core", "judge", "trial", "isolation", "campaign", "report", "repro", "compile", "gate", "audit", "plugin", "cli"),)
"""Packages of harness/ in import order: each may import only those before it."""
MOST_ENTRIES = {"harness": 14, "kernels": 17, "oracles": 12}
FROM_KERNELS = {
    *(f"attnfuzz.kernels.{name}" for name in ("capabilities", "contract", "problem", "modified")),
    "attnfuzz.kernels.errors",
    *(f"attnfuzz.kernels.expressions.{name}" for name in ("tree", "derivative", "evaluation", "named", "ranges")),
}
"""All modules of the kernels that oracles and strategies may import: data, never a kernel."""


@functools.cache
def sources() -> tuple[Path, ...]:
    return tuple(sorted(path for top in TOPS for path in (ROOT / top).rglob("*.py")))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("attnfuzz", *(parts[:-1] if parts[-1] == "__init__" else parts)))


@functools.cache
def module_names() -> frozenset[str]:
    return frozenset(map(module_name, sources()))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Modules of this project that `path` imports, at the top or inside functions, as dotted names."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("attnfuzz")}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            arguments = [each.value for each in node.args if isinstance(each, ast.Constant)]
            found |= {name for name in arguments if isinstance(name, str) and name.startswith("attnfuzz")}
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.add("a relative import")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attnfuzz"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in module_names() else str(node.module))
    return frozenset(found)


def test_package_list_matches_the_folders() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {module_name(path) for path in sources() if path.name == "__init__.py"}
    assert sorted(listed) == sorted(folders)
    holding_code = {".".join(("attnfuzz", *path.parent.relative_to(ROOT).parts)) for path in sources()}
    assert holding_code == folders, "every folder with code is a package"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_order(path: Path) -> None:
    top, *inner = path.relative_to(ROOT).parts
    assert "a relative import" not in imports(path), "write the whole name: the order is read from it"
    reached = {name.split(".")[1] for name in imports(path) if "." in name}
    assert reached <= MAY_IMPORT[top]
    if top == "harness" and len(inner) > 1:
        packages = {name.split(".")[2] for name in imports(path) if name.startswith("attnfuzz.harness.")}
        assert packages <= set(PACKAGES[: PACKAGES.index(inner[0]) + 1])
    if top in ("oracles", "strategies"):
        assert {name for name in imports(path) if name.startswith("attnfuzz.kernels")} <= FROM_KERNELS


def test_the_packages_of_the_harness_are_those_of_the_order() -> None:
    assert {path.name for path in (ROOT / "harness").iterdir() if (path / "__init__.py").exists()} == set(PACKAGES)


@pytest.mark.parametrize("top", MOST_ENTRIES)
def test_few_entries_at_the_first_level(top: str) -> None:
    # Folders without code are what a branch switch leaves behind.
    entries = [path.name for path in (ROOT / top).iterdir() if path.is_file() or any(path.rglob("*.py"))]
    assert len(entries) <= MOST_ENTRIES[top], sorted(entries)


def test_no_two_modules_import_each_other() -> None:
    edges = {module_name(path): imports(path) for path in sources()}
    cycles = {tuple(sorted((a, b))) for a, targets in edges.items() for b in targets if a in edges.get(b, set()) and a != b}
    assert not cycles


def test_every_module_imports_without_backends() -> None:
    """On a machine without CUDA, triton and tilelang: each module by itself, in a process where those cannot be imported."""
    names = [module_name(path) for path in sources()]
    program = f"""
import importlib, sys
for absent in ("triton", "tilelang", "tvm"):
    sys.modules[absent] = None
for name in {names!r}:
    importlib.import_module(name)
import torch
assert not torch.cuda.is_initialized()
from attnfuzz.kernels import registry
for name in registry.names():
    kernel = registry.get(name)
    for device in ("cpu", "cuda"):
        if kernel.backend in ("triton", "tilelang"):
            reason = kernel.unavailable(device).lower()
            # Of a released kernel its own package may be missing too, which is said first.
            assert kernel.backend in reason or (registry.is_released(name) and "is not installed" in reason), reason
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr


def test_importing_the_harness_imports_no_backend() -> None:
    program = (
        "import sys, attnfuzz.harness.cli, attnfuzz.harness.plugin, attnfuzz.kernels.registry as registry\n"
        "[registry.get(name) for name in registry.names()]\n"
        "print([name for name in ('torch', 'triton', 'tilelang') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "[]"


def test_the_run_never_prints() -> None:
    for path in sources():
        calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
        printing = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]
        assert not printing, f"{path}: the run speaks through events"


@functools.cache
def defined(module: str) -> frozenset[str]:
    """Names at the top of a module of this project, and its submodules."""
    path = ROOT.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = {each.stem for each in path.glob("*")} if path.is_dir() else set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        else:
            names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            # Of a package that loads them when they are asked for.
            names |= {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return frozenset(names)


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_programs_outside_import_names_that_are_there(folder: str) -> None:
    """No other tool looks at them: mypy checks the package alone."""
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(ROOT)}: {node.module}.{alias.name}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("attnfuzz.")
        for alias in node.names
        if alias.name not in defined(node.module)
    ]
    assert not wrong, wrong
