"""What the Cases of a kernel reach: features, pairs of features, relations of sizes, lines of its device code."""
