"""The command `zmqdist`, and `python -m zmqdist_cli`."""

import sys

from zmqdist_cli.interrupts import importing


def main() -> int:
    """Run it. Returns its exit code."""
    with importing():
        from zmqdist_cli.main import main as run
    return run()


if __name__ == "__main__":
    sys.exit(main())
