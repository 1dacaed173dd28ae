"""The exit codes of the command `zmqdist` and of the roles that launchers start. They are part of
the interface, because scripts rely on them."""

from __future__ import annotations

from enum import IntEnum

from zmqdist import errors


class ExitCode(IntEnum):
    """Exit codes. `zmqdist launch` ends with the code of its program, whatever that is."""

    OK = 0
    """Done."""
    PROGRAM_FAILED = 1
    """The user's program, or an operation that it requested, failed."""
    USAGE = 2
    """The command line is wrong (as in click itself)."""
    CONFIG = 2
    """A file that the user wrote is wrong. The number is that of USAGE, because in both cases the
    user has to correct a mistake."""
    UNAVAILABLE = 3
    """The server does not run, or did not reply in time."""
    REFUSED = 4
    """The server refused the key, the token or the request."""
    INTERRUPTED = 130
    """Ctrl-C; shells use this number, too."""


_OF_ERRORS = {
    errors.OK: ExitCode.OK,
    errors.UNAVAILABLE: ExitCode.UNAVAILABLE,
    errors.DEADLINE_EXCEEDED: ExitCode.UNAVAILABLE,
    errors.UNAUTHENTICATED: ExitCode.REFUSED,
    errors.PERMISSION_DENIED: ExitCode.REFUSED,
    errors.ALREADY_EXISTS: ExitCode.REFUSED,
    errors.INVALID_ARGUMENT: ExitCode.USAGE,
    errors.FAILED_PRECONDITION: ExitCode.USAGE,
}


def exit_code_for(code: int) -> ExitCode:
    """Return the exit code of a process that ends because of an OpError with this error code."""
    return _OF_ERRORS.get(code, ExitCode.PROGRAM_FAILED)
