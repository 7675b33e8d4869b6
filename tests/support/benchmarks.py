"""The programs in benchmarks/ as modules."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from support.paths import ROOT

FOLDER = ROOT / "benchmarks"


def loaded(name: str) -> ModuleType:
    """Import benchmarks/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"benchmark_of_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
