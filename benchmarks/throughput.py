"""How many Cases a second the engine judges, where the time of a Case goes, and what other kinds of test suite reach.

    python benchmarks/throughput.py [--only engine stages rivals growth] [--device cpu|cuda] [--kernel NAME ...]
        [--workers 1 2 auto] [--budget 30s] [--rounds N] [--cold] [--json FILE] [--plot FOLDER] [--markdown]
    python benchmarks/throughput.py --soak 10m [--device cpu|cuda] [--kernel NAME ...] [--workers auto] [--json FILE]
    python benchmarks/throughput.py --read FILE [--markdown] [--plot FOLDER]

engine: `attnfuzz run --json` as a user calls it; stages: where its time goes, by step of a worker and by stage of its child;
rivals: a parametrised suite and a Hypothesis test of the same kernels beside it, alternately; growth: Cases a second against the
size of Cases, workers, budget and stored Cases. --soak runs one campaign and ends with 1 where memory or rate drift, or a process
stays behind. --read prints the tables of an earlier --json. The parts are in benchmarks/throughput/.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

if __name__ == "__main__":
    importlib.import_module("throughput.cli").run()
