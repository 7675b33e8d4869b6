"""What the kernels of all backends share."""
