"""The way into a client channel and out of it: no entry after a fork, and Ctrl-C waits outside (R7 in channel.py).

While the main thread is inside, Python's own handler of SIGINT is replaced by one that sets a flag and wakes it; on the way
out the flag becomes a KeyboardInterrupt. An exception in the middle would lose the message that is being read.

A Ctrl-C that comes in the instant between Python's last look for signals and the system call that sleeps is seen when that
ends: after a slice (channel.py) at the latest.
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
    """`with gate as shielded:` around everything that takes the channel's lock; not to be nested.

    Attributes:
      interrupted: Ctrl-C came since the main thread is inside; it should leave. Of interest to who is `shielded` only.
      wake: called by the handler in the main thread, at any point of it; None while the main thread does not sleep. Besides,
        the eventfd is written.
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
        """Whether this is another process than the one that made it."""
        return self._process is not client_connection.process_context

    def check(self) -> None:
        """Raises FailedPreconditionError after a fork."""
        if self._process is not client_connection.process_context:
            raise FailedPreconditionError(
                f"the client of {self._address} was made before a fork: make a new one in this process"
            )

    def __enter__(self) -> bool:
        """Whether this is the main thread, shielded from Ctrl-C. Raises as `check`."""
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
