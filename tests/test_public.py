"""The public face: each name is its module's, no backend is loaded, and documentation and examples import nothing else."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pages import PAGES, README, blocks, name_of
from support.paths import ROOT
from test_architecture import sources

PUBLIC = ("attnfuzz.harness", "attnfuzz.kernels", "attnfuzz.kernels.expressions")
ALSO = {("attnfuzz.harness.plugin", "fuzz")}
"""Where `fuzz` was first; test files of kernel teams import it from there."""
WRITTEN = [page for page in [*PAGES, README] if "reference" not in page.parts]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


def imports(source: str) -> Iterator[tuple[str, str | None]]:
    """Modules of attnfuzz that `source` imports, each with a name from it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.startswith("attnfuzz"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attnfuzz"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def is_public(module: str, name: str | None) -> bool:
    return (module, name) in ALSO or (module in PUBLIC and (name is None or name in importlib.import_module(module).__all__))


@pytest.mark.parametrize("package", PUBLIC)
def test_each_exported_name_is_that_of_its_module(package: str) -> None:
    module = importlib.import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    homes = {alias.name: str(each.module) for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) for alias in each.names}
    assert set(module.__all__) == homes.keys() - {"TYPE_CHECKING", "lazy"}, "type checkers see other names"
    for name in module.__all__:
        assert getattr(module, name) is getattr(importlib.import_module(homes[name]), name)
        assert name in dir(module)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = module.nonsense


def test_importing_the_public_packages_loads_no_backend() -> None:
    absent = ("torch", "triton", "tilelang", "hypothesis", "pytest")
    program = f"import sys, {', '.join(PUBLIC)}; print([name for name in {absent} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_code_blocks_import_public_names_only(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            private = [each for each in imports(block.text) if not is_public(*each)]
            assert not private, f"{name_of(page)}:{block.line}"


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_examples_import_public_names_only(path: Path) -> None:
    assert not [each for each in imports(path.read_text()) if not is_public(*each)]


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_no_module_imports_from_the_public_face(path: Path) -> None:
    """It leads everywhere: an import through it would hide the order of the packages."""
    modules = {each.parent for each in sources()}
    for module, name in imports(path.read_text()):
        folder = ROOT.joinpath(*module.split(".")[1:])
        assert module not in PUBLIC or (folder / f"{name}.py").exists() or folder / str(name) in modules, f"{module}: {name}"
