"""Draw Cases, shrink what fails, keep it."""
