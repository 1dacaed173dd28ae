"""WatchDog: writes the stacks of all threads when no scheduled work has ended for a while.

The watchdog checks ten times per timeout in a thread of its own, so that `schedule` and the
coordinator's loop spend no time on it.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, TextIO

from zmqdist import clock as time

log = logging.getLogger("zmqdist.coordinator")

TIMEOUT_ENV = "ZMQDIST_COORDINATOR_WATCH_DOG_TIMEOUT"
"""The environment variable with the timeout in whole seconds, which overrides the timeout that the
program passes."""

CHECKS = 10
"""The number of checks in one timeout."""


class RepeatedTimer:
    """Calls `function(*args)` in a thread of its own every `interval` seconds until `stop`. The
    first call comes after one interval.

    An exception of the function is logged and does not stop the timer.
    """

    def __init__(
        self,
        interval: float,
        function: Callable[..., object],
        *args: Any,
        name: str = "RepeatedTimer",
    ) -> None:
        self._began = time.monotonic()
        self._stop_event = threading.Event()
        call = (self._stop_event, interval, function, args)
        self._thread = threading.Thread(target=_repeat, args=call, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Stop the timer, and wait until a running call of the function has ended. Idempotent.

        Returns:
          The whole seconds since construction.
        """
        self._stop_event.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        return int(time.monotonic() - self._began)


def _repeat(
    stop_event: threading.Event,
    interval: float,
    function: Callable[..., object],
    args: tuple[Any, ...],
) -> None:
    while not stop_event.wait(interval):
        try:
            function(*args)
        except BaseException:
            log.exception("a repeated call of %r failed", function)


class WatchDog:
    """Logs a warning, calls `on_triggered` and writes the stacks of all threads when no work has
    ended for `timeout` seconds.

    Args:
      timeout: seconds; 0 or less switches the watchdog off. The environment variable
        ZMQDIST_COORDINATOR_WATCH_DOG_TIMEOUT overrides it.
      traceback_file: the file to which the stacks are written.
      on_triggered: called without arguments, in the watchdog's thread.
      progress: returns two numbers of work items, (ended, in flight). With `progress` the owner
        need not call `report_closure_done`, and the watchdog does not warn while no work is in
        flight.
    """

    def __init__(
        self,
        timeout: float = -1,
        traceback_file: TextIO = sys.stdout,
        on_triggered: Callable[[], object] | None = None,
        *,
        progress: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        setting = os.environ.get(TIMEOUT_ENV, "")
        self.timeout = int(setting) if setting.isdigit() else timeout
        self._file = traceback_file
        self._on_triggered = on_triggered
        self._progress = progress
        self._count = -1
        self._since = time.monotonic()
        self._timer: RepeatedTimer | None = None
        if self.timeout > 0:
            self._timer = RepeatedTimer(self.timeout / CHECKS, self._check, name="WatchDog")

    def report_closure_done(self) -> None:
        """Restart the timeout. Call this when a work item has ended."""
        self._since = time.monotonic()

    def stop(self) -> None:
        """Stop the watchdog's thread. Idempotent."""
        if self._timer is not None:
            self._timer.stop()

    def _check(self) -> None:
        if self._progress is not None:
            count, in_flight = self._progress()
            if count != self._count or not in_flight:
                self._count = count
                self.report_closure_done()
        if time.monotonic() - self._since < self.timeout:
            return
        log.warning(
            "no scheduled function has ended for %g s; the stacks of all threads follow",
            self.timeout,
        )
        try:
            if self._on_triggered is not None:
                self._on_triggered()
        finally:
            self._write_stacks()
            self.report_closure_done()

    def _write_stacks(self) -> None:
        try:
            faulthandler.dump_traceback(self._file)
        # faulthandler needs a file descriptor, which an io.StringIO or the standard error of a
        # notebook does not have.
        except (AttributeError, OSError, ValueError):
            for ident, frame in sys._current_frames().items():
                self._file.write(f"Thread 0x{ident:x}:\n{''.join(traceback.format_stack(frame))}")
        self._file.write("==== end of the stacks ====\n")
        self._file.flush()
