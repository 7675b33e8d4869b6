"""The planted bugs of tests/mutants by six ways of testing; benchmarks/detection.py runs it."""
