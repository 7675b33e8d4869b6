"""Kernels that other packages release, as subjects: one module a package, which imports the installed package at first use."""
