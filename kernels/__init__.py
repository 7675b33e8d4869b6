"""The subjects under test, and the one contract they all fulfil."""
