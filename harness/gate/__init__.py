"""`attnfuzz gate`: a change of kernels against what was there before it."""
