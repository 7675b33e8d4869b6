"""Machine code of Triton kernels: compiled without a GPU, checked for races and wrong descriptors."""
