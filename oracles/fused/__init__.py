"""Functions of elements as one GPU kernel each: a function of tensors is traced into C (trace.py) and launched (launch.py)."""

from __future__ import annotations

from attnfuzz.oracles.fused.launch import fused

__all__ = ["fused"]
