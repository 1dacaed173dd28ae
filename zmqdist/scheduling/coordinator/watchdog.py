"""WatchDog: says what a program is at when nothing that was scheduled ends any more.

It has a thread of its own that looks now and then, so that scheduled work pays nothing for it.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

log = logging.getLogger("zmqdist.coordinator")

TIMEOUT_ENV = "ZMQDIST_COORDINATOR_WATCH_DOG_TIMEOUT"
"""Whole seconds: wins over what the program says."""

CHECKS = 10
"""So often in one time-out it looks."""


class RepeatedTimer:
    """Calls `function(*args)` every `interval` seconds, for the first time after one, in a thread; from its construction on.

    What the function raises is logged.
    """

    def __init__(
        self, interval: float, function: Callable[..., object], *args: Any, name: str = "RepeatedTimer"
    ) -> None:
        self._began = time.monotonic()
        self._stopped = threading.Event()
        call = (self._stopped, interval, function, args)
        self._thread = threading.Thread(target=_repeat, args=call, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Call it no more, and wait for a call that is under way. Whole seconds since the construction. Idempotent."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        return int(time.monotonic() - self._began)


def _repeat(stopped: threading.Event, interval: float, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    while not stopped.wait(interval):
        try:
            function(*args)
        except BaseException:
            log.exception("a repeated call failed")


class WatchDog:
    """Warns when nothing has ended for `timeout` seconds: logs it, calls `on_triggered`, and writes where each thread is.

    Args:
      timeout: seconds; 0 or less is off. The environment's ZMQDIST_COORDINATOR_WATCH_DOG_TIMEOUT wins.
      traceback_file: where the threads' stacks go.
      on_triggered: called without arguments, in the watchdog's thread.
      progress: gives (ended, in flight). With it nobody has to call `report_closure_done`, and nothing is told while nothing is
        in flight.
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
        self._ended = -1
        self._since = time.monotonic()
        self._timer: RepeatedTimer | None = None
        if self.timeout > 0:
            self._timer = RepeatedTimer(self.timeout / CHECKS, self._check, name="WatchDog")

    def report_closure_done(self) -> None:
        """Something has ended: the clock starts anew."""
        self._since = time.monotonic()

    def stop(self) -> None:
        """Watch no more. Idempotent."""
        if self._timer is not None:
            self._timer.stop()

    def _check(self) -> None:
        if self._progress is not None:
            ended, in_flight = self._progress()
            if ended != self._ended or not in_flight:
                self._ended = ended
                self.report_closure_done()
        if time.monotonic() - self._since < self.timeout:
            return
        log.warning("nothing that was scheduled has ended for %g s; the stacks of all threads follow", self.timeout)
        try:
            if self._on_triggered is not None:
                self._on_triggered()
        finally:
            self._write_stacks()
            self.report_closure_done()

    def _write_stacks(self) -> None:
        try:
            faulthandler.dump_traceback(self._file)
        except (
            AttributeError,
            OSError,
            ValueError,
        ):  # no file of the system: of io.StringIO, or replaced by a notebook
            for ident, frame in sys._current_frames().items():
                self._file.write(f"Thread 0x{ident:x}:\n{''.join(traceback.format_stack(frame))}")
        self._file.write("==== end of the stacks ====\n")
        self._file.flush()
