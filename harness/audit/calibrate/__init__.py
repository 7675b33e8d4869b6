"""`attnfuzz calibrate`: how near correct kernels come to their budgets."""
