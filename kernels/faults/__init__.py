"""Kernels that misbehave on purpose, one fault each, known by name and never listed: what isolation must survive and tell."""
