"""Fixtures of the command line's tests."""

from __future__ import annotations

from support.cli_subject import only_acme

__all__ = ["only_acme"]
