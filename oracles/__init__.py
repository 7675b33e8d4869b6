"""What is true: float64 attention, and how far off an output may be."""
