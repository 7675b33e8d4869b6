"""Kernels that ship with PyTorch: peers that nobody here wrote."""
