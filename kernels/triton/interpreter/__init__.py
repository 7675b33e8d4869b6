"""Triton's interpreter, repaired, with an exact memory checker."""
