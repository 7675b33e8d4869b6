"""The script `attnfuzz`: import the command line and run it; what ends it during the import shows no traceback."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    try:
        Path.cwd()
    except OSError as error:
        # Libraries ask for it as they are imported.
        sys.stderr.write(f"error: the current folder cannot be used ({error.strerror}); change to one that exists\n")
        sys.exit(2)
    try:
        from attnfuzz.harness.cli.main import main as command

        command()
    except KeyboardInterrupt:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        sys.stderr.write("interrupted: nothing was found until then\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
