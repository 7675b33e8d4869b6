"""`attnfuzz gate`: compare changed kernels with their base."""
