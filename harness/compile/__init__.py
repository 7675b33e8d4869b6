"""Machine code of every kernel and Config, without a GPU."""
