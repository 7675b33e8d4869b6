"""What to try: Cases by construction, within a kernel's capabilities."""
