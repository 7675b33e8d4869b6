"""Diagnosis of wrong values: where they lie, and which simple change explains them."""
