"""A standalone Python file that shows a failure without the harness."""
