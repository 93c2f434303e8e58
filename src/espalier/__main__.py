"""`python -m espalier` is `espalier`."""

import sys

from espalier.cli import main as run


def main() -> None:
    """Runs the command line and ends the process with its exit code."""
    sys.exit(run())


if __name__ == "__main__":
    main()
