"""Metamorphic relations: what related launches of one kernel must agree on, at any size, without a float64 attention."""
