"""Triton's interpreter, repaired and with an exact memory checker."""
