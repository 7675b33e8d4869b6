"""How far off an output of a correct kernel may be."""
