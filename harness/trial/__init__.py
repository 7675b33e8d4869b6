"""A Trial, one Case in this process: inputs, launches, reference, Verdict."""
