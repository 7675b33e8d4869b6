"""Fixtures of the command line's tests."""

from __future__ import annotations

from support.cli_subject import only_acme
from support.mutants_command import campaigns, of_checkout

__all__ = ["campaigns", "of_checkout", "only_acme"]
