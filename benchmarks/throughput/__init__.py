"""Parts of benchmarks/throughput.py: how many Cases a second, where their time goes, and what other kinds of test suite reach."""
