"""`attnfuzz selftest`: attnfuzz tried on faults that are known."""
