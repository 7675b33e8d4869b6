"""What this machine and this process are; text, files and statistics that all packages share."""
