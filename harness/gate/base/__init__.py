"""What a change is compared with: a commit or a baseline file."""
