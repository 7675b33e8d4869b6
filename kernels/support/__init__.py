"""Code that the kernels of all backends share."""
