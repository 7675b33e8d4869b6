"""Outputs to Verdict: reference and budgets, element by element."""
