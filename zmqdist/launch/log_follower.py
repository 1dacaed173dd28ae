"""What functions print, at the program: a thread that follows the lines of all workers of a cluster
and writes them to the program's own standard output and error."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from zmqdist import clock as time
from zmqdist import errors
from zmqdist.limits import CONNECT_S

KEPT, FROM_NOW, ALL = -1, -2, 0
"""Special values of `since` (scheduling/dispatcher/log_stream.py)."""

WAIT_S: Final = 10.0
AGAIN_S: Final = 1.0
LAST_S: Final = 1.0
"""Seconds for the last lines of workers that have ended."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def line_of(row: list[Any]) -> str:
    """Return a row of the RPC method `logs` as a line for people, without a newline: with the name
    of its worker, and without what could move a cursor."""
    _, worker, _, _, _, text = row
    shown = "".join(
        char if char.isprintable() or char == "\t" else "?" for char in _COLOURS.sub("", text)
    )
    return f"[{worker.replace(':', '-')}] {shown}" if worker else shown


class NewRows:
    """The rows that are new to a reader who asks again after the dispatcher was restarted: its
    workers then send also what they have sent before.

    Args:
      begin_at: workers of which no row has come are expected to have no new one before this time.
    """

    def __init__(self, begin_at: float = 0.0) -> None:
        self._begin_at = begin_at
        self._last_at: dict[str, float] = {}
        """When the last row of each worker was written, by that worker's clock."""
        self._sent_again: dict[str, float] | None = None
        """The last row of each worker that may send rows again."""

    def begin_anew(self) -> None:
        """Expect rows again."""
        self._sent_again = dict(self._last_at)

    def of(self, rows: list[list[Any]]) -> Iterator[list[Any]]:
        """Yield the new ones of these rows."""
        for row in rows:
            worker, at = row[1], row[2]
            if self._sent_again is not None:
                if at <= self._sent_again.get(worker, self._begin_at):
                    continue
                self._sent_again[worker] = 0.0  # all later ones are new, also if its clock is set
            self._last_at[worker] = at
            yield row


class LogFollower:
    """Writes what the workers of a cluster print to the standard output and error of this program.

    Args:
      open_client: makes a DispatcherClient, with this time-out of its calls.
      since: FROM_NOW, or 0 for all that the dispatcher's workers have printed.
    """

    def __init__(self, open_client: Callable[[float], Any], since: int = FROM_NOW) -> None:
        self._open_client = open_client
        self._since = since
        self._new_rows = NewRows(time.time() if since == FROM_NOW else 0.0)
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._client: Any = None
        self._thread = threading.Thread(target=self._run, name="zmqdist-logs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._lock:
            self._ends.set()
            if self._client is not None:
                self._client.close()  # ends its call
        self._thread.join()

    def finish(self) -> None:
        """End the thread, and write the last lines of workers that have ended."""
        self.close()
        until = time.monotonic() + LAST_S
        with (
            contextlib.suppress(errors.OpError),
            self._open_client(LAST_S) as client,
        ):
            while self._pass_on(client, 0.02) and time.monotonic() < until:
                pass

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                with self._open_client(CONNECT_S) as client:
                    with self._lock:
                        if self._ends.is_set():
                            return
                        self._client = client
                    while True:
                        self._pass_on(client, 0.0 if self._since == FROM_NOW else WAIT_S)
            except errors.OpError:  # `close`, or the dispatcher is restarted or too busy
                self._ends.wait(AGAIN_S)
                if self._since != FROM_NOW:
                    self._since = ALL
                    self._new_rows.begin_anew()

    def _pass_on(self, client: Any, wait_s: float) -> int:
        """Write the next lines. Return the number of workers that may have more."""
        answer = client.call("logs", "", self._since, wait_s, timeout_s=wait_s + CONNECT_S)
        self._since = answer["next"]
        for row in self._new_rows.of(answer["rows"]):
            stream = sys.stderr if row[4] == 2 else sys.stdout
            with contextlib.suppress(OSError, ValueError):  # closed
                stream.write(f"{line_of(row)}\n")
                stream.flush()
        return int(answer["connected"]) + len(answer["rows"])
