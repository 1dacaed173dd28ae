"""The guard around a client channel: no entry after a fork, and no KeyboardInterrupt inside (R7 in channel.py).

While the main thread is inside, a handler that sets a flag and wakes the thread replaces Python's own handler of SIGINT; on the way
out the flag becomes a KeyboardInterrupt. An exception inside would lose the message that is being read.

A Ctrl-C between Python's last check for signals and the system call that sleeps is seen when that call returns: after a slice
(channel.py) at the latest.
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
    """Use `with guard as shielded:` around all code that takes the channel's lock. It must not be nested.

    Attributes:
      interrupted: Ctrl-C came since the main thread entered, so that it should leave. Only a `shielded` thread reads it.
      wake: function that the handler calls, at any point of the main thread, after it has written the eventfd; None while the main
        thread does not sleep.
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
        """Whether this process is not the one that made the guard."""
        return self._process is not client_connection.process_context

    def check(self) -> None:
        """Raise FailedPreconditionError after a fork."""
        if self._process is not client_connection.process_context:
            raise FailedPreconditionError(
                f"the client of {self._address} was made before a fork: make a new one in this process"
            )

    def __enter__(self) -> bool:
        """Return whether this is the main thread, shielded from Ctrl-C. Raises as `check`."""
        self.check()
        if get_ident() != self._process.main_thread or _signal.getsignal(_SIGINT) is not _signal.default_int_handler:
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
