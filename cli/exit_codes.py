"""What the exit codes of `zmqdist` mean. They are part of the interface: scripts rely on them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes. `zmqdist launch` ends with the code of its program, whatever that is."""

    OK = 0
    """Done."""
    PROGRAM_FAILED = 1
    """The user's program, or something it asked for, failed."""
    USAGE = 2
    """The command line is wrong (as in click itself)."""
    CONFIG = 2
    """A file that the user wrote is wrong; the same number, because the same person mends it."""
    UNAVAILABLE = 3
    """The other side is not there, or did not answer in time."""
    REFUSED = 4
    """The other side refused the key, the token or the request."""
    INTERRUPTED = 130
    """Ctrl-C, as shells write it."""
