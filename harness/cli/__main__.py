"""`python -m attnfuzz.harness.cli`: the command line without its script."""

from attnfuzz.harness.cli.start import main

if __name__ == "__main__":
    main()
