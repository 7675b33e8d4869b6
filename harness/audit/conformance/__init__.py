"""`attnfuzz check-adapter`: whether an adapter fulfils the contract."""
