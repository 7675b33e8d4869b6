"""Checks of a Case other than the comparison with the oracle."""
