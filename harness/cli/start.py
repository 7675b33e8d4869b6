"""The script `attnfuzz`: import the command line and run it; Ctrl-C during the import ends it without a traceback."""

from __future__ import annotations

import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
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
