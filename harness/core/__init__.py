"""The environment of this process, and text, files and statistics that all packages share."""
