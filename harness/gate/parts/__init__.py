"""The parts of a gate, one module each."""
