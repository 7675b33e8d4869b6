"""The planted bugs of tests/mutants by six ways of testing: same kernels, same seconds for each mutant.

    python benchmarks/detection.py [ID...] [--method NAME ...] [--seconds S] [--control S] [--seed N] [--jobs N] [--markdown]
        [--json FILE]
    python benchmarks/detection.py --read FILE [--markdown]

A way of testing finds a bug if it fails a Case with the bug that it passes with the kernel without it. What it fails of the
kernels without bugs, in `--control` seconds each, are false alarms. Ctrl-C keeps what is finished, with exit code 130; 2 is
wrong use. The parts are in benchmarks/detection/.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "tests"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

if __name__ == "__main__":
    importlib.import_module("detection.cli").main()
