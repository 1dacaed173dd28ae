"""The guard around the code of a client channel: no thread enters the code after a fork, and Python
raises no KeyboardInterrupt inside it.

While the main thread runs guarded code, the guard replaces Python's handler of SIGINT by its own,
which sets a flag and wakes the thread. When the thread leaves the guarded code, the guard raises
KeyboardInterrupt if the flag is set. An exception inside would lose the message that the thread is
reading.

If Ctrl-C arrives after Python's last check for signals and before the system call that sleeps, the
thread notices Ctrl-C when that system call returns, which is after SLICE_S (channel.py) at the
latest.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.signal costs 20 times as much
import os
from _thread import get_ident
from collections.abc import Callable
from typing import Final

from zmqdist.errors import FailedPreconditionError
from zmqdist.transport import client_connection

_SIGINT: Final = int(_signal.SIGINT)


class InterruptGuard:
    """The guard of one channel. Use `with guard as shielded:` around all code that takes the
    channel's lock. Do not nest such blocks.

    Attributes:
      interrupted: whether Ctrl-C has arrived since the main thread entered the guarded code. If so,
        the main thread should leave that code. Only a `shielded` thread reads this flag.
      wake: the function that the signal handler calls after it has written the eventfd; None while
        the main thread does not sleep. It must be safe to call at any point of the main thread's
        code.
    """

    def __init__(self, address: str, wake_fd: int) -> None:
        self.interrupted = False
        self.wake: Callable[[], None] | None = None
        self._address = address
        self._wake_fd = wake_fd
        self._process = client_connection.process_context
        self._shields = False

    @property
    def forked(self) -> bool:
        """Whether this process was forked after the guard had been made."""
        return self._process is not client_connection.process_context

    def check(self) -> None:
        """Raise FailedPreconditionError if this process was forked after the guard had been
        made.
        """
        if self._process is not client_connection.process_context:
            raise FailedPreconditionError(
                f"the client of {self._address} was made before a fork: make a new one in this "
                f"process"
            )

    def __enter__(self) -> bool:
        """Return whether this thread is now shielded from Ctrl-C: only the main thread is, and only
        if SIGINT has Python's own handler.
        Raises the errors of `check`."""
        self.check()
        if (
            get_ident() != self._process.main_thread
            or _signal.getsignal(_SIGINT) is not _signal.default_int_handler
        ):
            return False
        _signal.signal(_SIGINT, self._on_sigint)
        self._shields = True
        return True

    def __exit__(self, *exc_info: object) -> None:
        if self._shields and get_ident() == self._process.main_thread:
            self._shields = False
            _signal.signal(_SIGINT, _signal.default_int_handler)
            if self.interrupted:
                self.interrupted = False
                raise KeyboardInterrupt

    def _on_sigint(self, signum: int, frame: object) -> None:
        self.interrupted = True
        os.eventfd_write(self._wake_fd, 1)
        if self.wake is not None:
            self.wake()
