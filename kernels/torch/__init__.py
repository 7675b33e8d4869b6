"""Kernels that ship with PyTorch: independent peers."""
