"""Kernels written in Triton, compiled on CUDA and interpreted on the CPU."""
