"""The lines that the child processes of a worker write, for programs that ask for them. No I/O.

`LogBook` has the last lines of all children; a `ChildOutput` cuts the bytes of one child into lines
for it. Bytes may be anything: a line is decoded with replacement characters, and of a line that a
progress bar has written over itself (`\\r`) the last state counts.

Promises, checked by tests/process/test_log_book.py
    L1  a line is kept whole, or cut at LOG_LINE_BYTES_MAX; the last line of a child needs no "\\n"
    L2  of a child that writes faster than LOG_LINES_PER_S on average, after a burst of
        LOG_BURST_LINES, lines are left out; a line in their place has their number
    L3  at most LOG_LINES_KEPT lines in LOG_BYTES_KEPT characters are kept, and less than two lines
        of each stream that are not complete
    L4  numbers of lines increase by 1
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final

from zmqdist.limits import (
    LOG_BURST_LINES,
    LOG_BYTES_KEPT,
    LOG_LINE_BYTES_MAX,
    LOG_LINES_KEPT,
    LOG_LINES_PER_S,
)
from zmqdist.messages import LogLine

STDOUT: Final = 1
STDERR: Final = 2
LATEST: Final = 20
"""Lines that are kept of those that are left out."""


class LogBook:
    """The last lines of all children.

    Args:
      epoch_s: what to add to a time of the caller's clock to get seconds since 1970.

    Attributes:
      last: the number of the last line; 0 before the first.
    """

    def __init__(self, epoch_s: float) -> None:
        self.last = 0
        self._epoch_s = epoch_s
        self._lines: deque[LogLine] = deque()
        self._chars = 0

    def add(self, process: str, stream: int, text: str, now: float) -> None:
        self.last += 1
        self._lines.append(LogLine(self.last, now + self._epoch_s, process, stream, text))
        self._chars += len(text)
        while len(self._lines) > LOG_LINES_KEPT or self._chars > LOG_BYTES_KEPT:
            self._chars -= len(self._lines.popleft().text)

    def after(self, number: int, count: int) -> list[LogLine]:
        """Return the lines with a higher number, `count` of them at most, from the oldest."""
        first = self.last - len(self._lines) + 1
        begin = max(0, number + 1 - first)
        return list(islice(self._lines, begin, begin + count))


class ChildOutput:
    """The output of one child. Of lines that are left out the last are kept, because they may be
    the reason of its end.

    Args:
      process: the name of the child in the lines.
    """

    def __init__(self, book: LogBook, process: str) -> None:
        self._book = book
        self._process = process
        self._partial = {STDOUT: b"", STDERR: b""}
        self._left = float(LOG_BURST_LINES)
        self._left_at = 0.0
        self._left_out = 0
        self._latest: deque[tuple[int, bytes]] = deque(maxlen=LATEST)

    def feed(self, stream: int, data: bytes, now: float) -> float | None:
        """Take what the child has written to a stream. Return the time at which `tick` must be
        called, if lines were left out."""
        self.tick(now)
        if self._left_out:  # most lines of a flood are only counted
            *latest, partial = data.rsplit(b"\n", LATEST)
            if latest:
                self._left_out += latest[0].count(b"\n") + len(latest)
                latest[0] = latest[0].rpartition(b"\n")[2]
                self._latest += [(stream, line) for line in latest]
            else:
                partial = self._partial[stream] + data
            self._partial[stream] = partial[: LOG_LINE_BYTES_MAX + 1]
            return self._resume_at
        *lines, partial = (self._partial[stream] + data).split(b"\n")
        # the rest of a long line is dropped, as `_add` would do
        self._partial[stream] = partial[: LOG_LINE_BYTES_MAX + 1]
        for number, line in enumerate(lines):
            if self._left < 1:
                self._left_out = len(lines) - number
                self._latest += [(stream, line) for line in lines[number:]]
                return self._resume_at
            self._left -= 1
            self._add(stream, line, now)
        return None

    def tick(self, now: float) -> None:
        """Note the time, and after a flood begin to take lines again."""
        passed_s, self._left_at = now - self._left_at, now
        self._left = min(self._left + passed_s * LOG_LINES_PER_S, float(LOG_BURST_LINES))
        if self._left_out and self._left >= LOG_LINES_PER_S:
            self._tell_left_out(now)

    def end(self, now: float) -> None:
        """Take the incomplete lines, because the child has ended."""
        if self._left_out:
            self._tell_left_out(now)
        for stream, line in self._partial.items():
            if line:
                self._add(stream, line, now)
        self._partial = {STDOUT: b"", STDERR: b""}

    @property
    def _resume_at(self) -> float:
        return self._left_at + (LOG_LINES_PER_S - self._left) / LOG_LINES_PER_S

    def _tell_left_out(self, now: float) -> None:
        count = self._left_out - len(self._latest)
        if count:
            self._book.add(self._process, STDERR, f"... {count:,} lines left out", now)
        for stream, line in self._latest:
            self._add(stream, line, now)
        self._latest.clear()
        self._left_out = 0

    def _add(self, stream: int, line: bytes, now: float) -> None:
        if len(line) > LOG_LINE_BYTES_MAX:
            line = line[: LOG_LINE_BYTES_MAX - 3] + b"..."
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        self._book.add(self._process, stream, text, now)
