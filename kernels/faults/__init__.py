"""Kernels that misbehave on purpose, one fault each, available by name, never listed: isolation must survive and report them."""
