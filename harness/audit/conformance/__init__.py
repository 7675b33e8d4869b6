"""`attnfuzz check-adapter`: check an adapter against the contract."""
