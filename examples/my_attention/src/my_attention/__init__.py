"""Attention with grouped heads and a causal mask, forward and backward, in Triton."""

from my_attention.attention import my_attention

__all__ = ["my_attention"]
