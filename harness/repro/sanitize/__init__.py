"""One Case under NVIDIA's compute-sanitizer."""
