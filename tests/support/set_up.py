"""Kernels that need their processes set up, for tests with real child processes: each call says in which process it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from support import adapters

from attnfuzz.kernels.adapters import Adapted, dense

NOTES, WORKSPACE = "ACME_NOTES", "ACME_WORKSPACE"
"""Variables: the file in which calls are noted, and what the kernel reads."""
SMALL: dict[str, Any] = {"dims": ((8, 8),), "dtypes": ("float32",), "devices": ("cpu",), "lse": False, "gradients": False}
_workspace: list[int] = []


def note(what: str) -> None:
    """Write a line with this process's id into the file of the test; both kernels run in a process that has the variable."""
    with Path(os.environ[NOTES]).open("a") as file:
        file.write(f"{os.getpid()} {what}\n")


def notes(path: Path) -> list[tuple[int, str]]:
    """Return the lines."""
    return [(int(pid), what) for pid, _, what in (line.partition(" ") for line in path.read_text().splitlines())]


def make_workspace(device: str) -> None:
    note(f"set_up {device} {os.environ.get(WORKSPACE)}")
    _workspace.append(int(os.environ[WORKSPACE]))


def with_workspace(q: Any, k: Any, v: Any, softmax_scale: Any = None) -> Any:
    """Attention that is right only in a process that was set up once, with the variable in place."""
    note("with")
    if _workspace != [7] or os.environ.get(WORKSPACE) != "7":
        raise RuntimeError(f"workspace {_workspace}, {WORKSPACE}={os.environ.get(WORKSPACE)}")
    return adapters.flash(q, k, v, softmax_scale=softmax_scale)


def without(q: Any, k: Any, v: Any, softmax_scale: Any = None) -> Any:
    """Attention that is right only in a process that was not set up for the other kernel."""
    note("without")
    if _workspace or WORKSPACE in os.environ:
        raise RuntimeError(f"workspace {_workspace}, {WORKSPACE}={os.environ.get(WORKSPACE)}")
    return adapters.flash(q, k, v, softmax_scale=softmax_scale)


def refused(device: str) -> None:
    raise OSError(f"no workspace on {device}")


def ends(device: str) -> None:
    raise SystemExit(f"no workspace on {device}")


def careless(device: str) -> None:
    torch.set_default_dtype(torch.float64)


def flash(q: Any, k: Any, v: Any, softmax_scale: Any = None) -> Any:
    return adapters.flash(q, k, v, softmax_scale=softmax_scale)


WITH: Adapted = dense(with_workspace, name="acme.with", environment={WORKSPACE: "7"}, set_up=make_workspace, **SMALL)
WITHOUT: Adapted = dense(without, name="acme.without", **SMALL)
REFUSED: Adapted = dense(flash, name="acme.refused", set_up=refused, **SMALL)
ENDS: Adapted = dense(flash, name="acme.ends", set_up=ends, **SMALL)
CARELESS: Adapted = dense(flash, name="acme.careless", set_up=careless, **SMALL)
