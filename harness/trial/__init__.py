"""One Case in this process: inputs, launches, reference, Verdict."""
