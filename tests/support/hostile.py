"""Commands on hostile input: run in this process, and what must hold of every answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from click.testing import CliRunner, Result

from attnfuzz.harness.cli import main as cli

__all__ = ["HARMLESS", "attnfuzz", "json_of", "refused"]

HARMLESS = """
from attnfuzz.kernels.contract import Capabilities
from attnfuzz.kernels.torch.reference_cpu import ReferenceCpu


class Harmless(ReferenceCpu):
    name = "{name}"
"""
"""The class of a kernel that passes, on the CPU."""


def attnfuzz(*arguments: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(cli.main, list(arguments))


def refused(result: Result, words: Sequence[str], code: int = 2) -> None:
    """Assert that a command ended with `code` and the reason in words, and took no blame nor showed a traceback."""
    assert result.exit_code == code, result.output
    for each in words:
        assert each in result.stderr, result.stderr
    assert "Traceback" not in result.output
    assert "fault of attnfuzz" not in result.output


def json_of(result: Result) -> dict[str, Any]:
    """Return what the command printed, which must be one JSON object."""
    whole: dict[str, Any] = json.loads(result.stdout)
    return whole
