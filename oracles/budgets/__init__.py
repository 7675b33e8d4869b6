"""Error budgets: how far off an output of a correct kernel may be."""
