"""Kernels written in TileLang, on CUDA and on the CPU."""
