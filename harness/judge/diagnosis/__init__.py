"""What wrong values look like: where they lie and which simple change explains them."""
