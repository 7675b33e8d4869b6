"""Judging: outputs, reference and budgets to a Verdict, element by element."""
