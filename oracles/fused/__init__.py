"""Functions of elements as one GPU kernel each: a function of tensors is traced into C (trace.py) and launched (launch.py).

Kernels written by hand (Handwritten) are compiled and launched in the same way."""

from __future__ import annotations

from attnfuzz.oracles.fused.launch import Handwritten, fused, stacked, sums_of, whole_of

__all__ = ["Handwritten", "fused", "stacked", "sums_of", "whole_of"]
