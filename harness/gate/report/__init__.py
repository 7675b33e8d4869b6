"""A gate's result for the terminal, GitHub and JUnit."""
