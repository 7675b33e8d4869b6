"""A standalone Python file that shows a failure without attnfuzz."""
