"""Kernels that other packages release, as subjects: one module a package, which imports the installed package at first use."""

from __future__ import annotations

from typing import Final

__all__ = ["DISTRIBUTIONS"]

DISTRIBUTIONS: Final = (
    "aule-attention",
    "conch-triton-kernels",
    "fasterkernels",
    "fla-core",
    "flag-gems",
    "flash-attention-triton",
    "flash-attn",
    "flashinfer-python",
    "lightllm",
    "liger-kernel",
    "sageattention",
    "trinix",
    "xformers",
)
"""The packages, by the names under which they are installed."""
