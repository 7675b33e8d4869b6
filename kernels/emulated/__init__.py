"""A tiled flash attention emulated on the CPU, correct in many ways, and the numeric faults planted in it. Never listed."""
