"""Machine code of Triton kernels: compiled without a GPU, read for races and wrong descriptors."""
