"""The oracle: float64 attention, and how far off an output of a correct kernel may be."""
