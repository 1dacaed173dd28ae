"""The command `zmqdist`, and `python -m zmqdist_cli`."""

import signal
import sys

from zmqdist_cli.interrupts import importing


def main() -> int:
    """Run the command and return its exit code."""
    with importing():
        from zmqdist_cli.main import main as run
    code = run()
    # From here on Python only shuts down, and Ctrl-C must print no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


if __name__ == "__main__":
    sys.exit(main())
