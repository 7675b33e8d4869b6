"""One Case again: reproduce, shrink further, debug, script, sanitize."""
