"""What is asked of a Case besides the comparison with the oracle."""
