"""The figures of runs by function, in memory that a slot or an actor shares with its worker.

One process writes, and the worker reads when it makes a report. So counting costs no message, and
what was counted is there when the process hangs or has died. A number may be a moment older than
another one, because nothing is locked.

The memory begins with cells for the process, and has a row for each function after them. The first
row is for functions beyond those that have a row. Each cell has 8 bytes: an integer, or a float.
A row that gets another function has an odd EPOCH meanwhile.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import numpy as np

from zmqdist import clock as time
from zmqdist.limits import (
    BUCKET_BOUNDS_S,
    BUCKETS,
    FUNCTIONS_TOLD_APART_MAX,
)
from zmqdist.messages import FunctionFacts

OBSERVED, BEGAN, WAITING, LEFT_OUT = range(4)
"""How many runs to report in a second; when the run that goes on has begun, by the
monotonic clock; the number of calls that wait or run; the number of runs that were not reported."""
HEAD_CELLS: Final = 8

EPOCH, COORDINATOR, FN, COUNT, FAILED, SUM_S, MAX_S, CPU_S, BYTES_IN, BYTES_OUT, HISTOGRAM = range(
    11
)
ROW_CELLS: Final = HISTOGRAM + BUCKETS
ROWS: Final = FUNCTIONS_TOLD_APART_MAX + 1
TABLE_BYTES: Final = 8 * (HEAD_CELLS + ROWS * ROW_CELLS)

_BOUNDS_S: Final = np.array(BUCKET_BOUNDS_S)

CPU_READ_S: Final = 0.001
"""Seconds of a run, or of runs together, from which on their processor time is measured."""
CPU_READ_AGAIN_S: Final = 0.1
"""Seconds after which the clock is read again, so that what the thread has used between short runs
is not counted for the next long run."""

MANY: Final = 24
"""Runs of a batch from which on NumPy counts them sooner."""

Run: TypeAlias = tuple[int, float, float, int]
"""A run that has ended: (position, when it began and ended by the monotonic clock, kind)."""
Failure: TypeAlias = tuple[int, str, str, str]
"""A run that has failed: (position, type of the error, message, traceback)."""

CallRun: TypeAlias = tuple[str, int, int, int, float, float, int]
"""A call of an actor that has ended: (method, coordinator, work, attempt, when it began and ended,
kind)."""


def new_table(name: str, before: int = 0) -> int:
    """Return a descriptor of new memory for a table, behind `before` bytes for other purposes."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, before + TABLE_BYTES)
    return fd


class RunTable:
    """The table of one process or thread, which alone writes it.

    Attributes:
      seconds: the cells as floats. Set seconds[BEGAN] when a run begins.
      runs, failures: the runs and failures to report that were not reported yet.
    """

    def __init__(self, memory: mmap.mmap | bytearray, before: int = 0) -> None:
        view = memoryview(memory)[before:]
        self._cells = view.cast("Q")
        self.seconds: memoryview[float] = view.cast("d")
        self._array = np.frombuffer(view, np.int64, TABLE_BYTES // 8)
        self._cpu_s = self._cpu_read_at = 0.0
        self._rows: dict[tuple[int, int], int] = {}
        self._free = [HEAD_CELLS + row * ROW_CELLS for row in range(ROWS - 1, 0, -1)]
        self._allowance = Allowance(0.0, 0.0)
        self.runs: list[Run] = []
        self.failures: list[Failure] = []

    @property
    def watches_runs(self) -> bool:
        """Whether runs are reported."""
        self._allowance.per_s = self._allowance.at_once = per_s = self._cells[OBSERVED]
        return per_s > 0

    def note_waiting(self, count: int) -> None:
        self._cells[WAITING] = count

    def may_report_run(self, ended: float, left: int = 0) -> bool:
        """Return whether to report a run. If not, because there were many, count it, and the `left`
        ones after it, as left out."""
        if self._allowance.take(ended):
            return True
        self._cells[LEFT_OUT] += 1 + left
        return False

    def note_failure(self, position: int, texts: tuple[str, str, str] | None) -> None:
        """Have a failure reported."""
        if texts is not None:
            self.failures.append((position, *texts))

    def take_reports(self) -> tuple[list[Failure], list[Run]]:
        """Return the failures and the runs to report."""
        failures, runs = self.failures[:], self.runs[:]
        del self.failures[: len(failures)], self.runs[: len(runs)]  # a thread may append meanwhile
        return failures, runs

    def add(
        self,
        coordinator: int,
        fn: int,
        durations: list[float],
        failed: int,
        bytes_in: int,
        bytes_out: int,
        now: float,
    ) -> None:
        """Add runs of one function, which have just ended, one after the other.

        Their processor time is that of the thread. For short runs this clock would cost more than
        all else here, so their duration counts instead, and is left out of what a long run has used.
        """
        row = self._rows.get((coordinator, fn)) or self._new_row(coordinator, fn)
        cells, seconds = self._cells, self.seconds
        cells[row + BYTES_IN] += bytes_in
        cells[row + BYTES_OUT] += bytes_out
        if failed:
            cells[row + FAILED] += failed
        if len(durations) == 1:
            total = longest = durations[0]
        else:
            total, longest = sum(durations), max(durations)
        seconds[row + SUM_S] += total
        used_s = total
        if total >= CPU_READ_S or now > self._cpu_read_at + CPU_READ_AGAIN_S:
            cpu_s = time.thread_time()
            if total >= CPU_READ_S:
                used_s = min(total, max(0.0, cpu_s - self._cpu_s))
            self._cpu_s, self._cpu_read_at = cpu_s, now
        else:
            self._cpu_s += total
        seconds[row + CPU_S] += used_s
        if longest > seconds[row + MAX_S]:
            seconds[row + MAX_S] = longest
        histogram = row + HISTOGRAM
        if len(durations) < MANY:
            for duration in durations:
                cells[histogram + bisect_left(BUCKET_BOUNDS_S, duration)] += 1
        else:
            buckets = np.searchsorted(_BOUNDS_S, durations)
            self._array[histogram : histogram + BUCKETS] += np.bincount(buckets, minlength=BUCKETS)
        cells[row + COUNT] += len(durations)  # last, because the worker looks at it first

    def forget(self, functions: Iterable[tuple[int, int]]) -> None:
        """Have later functions use the rows of these."""
        for key in functions:
            row = self._rows.pop(key, HEAD_CELLS)
            if row != HEAD_CELLS:
                self._free.insert(0, row)  # used last, so that the worker has read it by then

    def _new_row(self, coordinator: int, fn: int) -> int:
        if not self._free:
            return HEAD_CELLS
        row = self._rows[coordinator, fn] = self._free.pop()
        cells = self._cells
        cells[row + EPOCH] += 1
        for cell in range(row + COUNT, row + ROW_CELLS):
            cells[cell] = 0
        cells[row + COORDINATOR], cells[row + FN] = coordinator, fn
        cells[row + EPOCH] += 1
        return row


class RunReader:
    """The worker's side of a table: it finds what was added since it last read.

    Attributes:
      count, failed: the number of runs, and of those that have failed, until it last read.
    """

    def __init__(self, memory: mmap.mmap | bytearray, before: int = 0) -> None:
        view = memoryview(memory)[before:]
        self._cells = view.cast("Q")
        self._seconds: memoryview[float] = view.cast("d")
        self._read: dict[int, tuple[list[int], list[float]]] = {}
        self._left_out = 0
        self.count = self.failed = 0

    def observe(self, runs_per_s: int) -> None:
        self._cells[OBSERVED] = runs_per_s

    @property
    def began(self) -> float:
        return self._seconds[BEGAN]

    @property
    def waiting(self) -> int:
        return self._cells[WAITING]

    def take_left_out(self) -> int:
        before, self._left_out = self._left_out, self._cells[LEFT_OUT]
        return self._left_out - before

    def added(self, method_of: Any = lambda fn: "") -> list[FunctionFacts]:
        """Return what was added to each row."""
        facts = []
        cells = self._cells
        for row in range(HEAD_CELLS, HEAD_CELLS + ROWS * ROW_CELLS, ROW_CELLS):
            before, before_s = self._read.get(row, _NOTHING)
            if cells[row + COUNT] == before[COUNT] and cells[row + EPOCH] == before[EPOCH]:
                if not before[EPOCH] and row > HEAD_CELLS:
                    break  # no function has had a row from here on
                continue
            now = cells[row : row + ROW_CELLS].tolist()
            seconds = [*self._seconds[row : row + HISTOGRAM]]
            if now[EPOCH] % 2:
                continue
            if now[EPOCH] != before[EPOCH]:
                before, before_s = _NOTHING
            self._read[row] = now, seconds
            if now[COUNT] <= before[COUNT]:
                continue
            facts.append(
                FunctionFacts(
                    now[COORDINATOR],
                    now[FN],
                    method_of(now[FN]),
                    now[COUNT] - before[COUNT],
                    max(0, now[FAILED] - before[FAILED]),
                    max(0.0, seconds[SUM_S] - before_s[SUM_S]),
                    seconds[MAX_S],
                    max(0.0, seconds[CPU_S] - before_s[CPU_S]),
                    now[BYTES_IN] - before[BYTES_IN],
                    now[BYTES_OUT] - before[BYTES_OUT],
                    [
                        (bucket, count - earlier)
                        for bucket, (count, earlier) in enumerate(
                            zip(now[HISTOGRAM:], before[HISTOGRAM:], strict=True)
                        )
                        if count > earlier
                    ],
                )
            )
            self.count += facts[-1].count
            self.failed += facts[-1].failed
        return facts

    def close(self) -> None:
        """Release the memory, so that it can be unmapped."""
        self._cells.release()
        self._seconds.release()


_NOTHING: Final = [0] * ROW_CELLS, [0.0] * HISTOGRAM


class Allowance:
    """A bound on how often something may happen: `per_s` times a second, `at_once` times if it has
    not happened for long."""

    def __init__(self, per_s: float, at_once: float) -> None:
        self.per_s, self.at_once = per_s, at_once
        self._left = at_once
        self._at = 0.0

    def take(self, now: float) -> bool:
        self._left = min(self.at_once, self._left + (now - self._at) * self.per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
