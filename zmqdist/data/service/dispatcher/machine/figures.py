"""The figures that tasks and readers report, the rows that `zmqdist status` shows, and an estimate
how many workers would be enough for the readers. No decision of the machine depends on them, and
zmqdist starts no worker because of the estimate.

Theory
    An iteration needs enough workers to make elements as fast as its readers could take them: the
    sum of the readers' rates, divided by the mean rate of a worker, rounded up. The rate of a
    reader is the rate at which it would take elements if it never waited. The median replaces every
    rate that differs from the mean by more than one standard deviation. Otherwise a single worker
    that starts slowly could raise the estimate to a hundred workers.
    The estimate for the service is the largest estimate of all iterations. It is at most FACTOR_MAX
    times the current number of workers, and at most MORE_MAX above that number.
"""

from __future__ import annotations

from collections.abc import Collection
from math import ceil
from statistics import fmean, median, pstdev
from typing import Any, Final

from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.events import TaskReport
from zmqdist.data.service.dispatcher.machine.tables import DispatcherTables
from zmqdist.errors import InvalidArgumentError

SHORTEST_S: Final = 1e-9
"""Seconds. A shorter reported time for an element counts as unknown, because no task or reader is
that fast."""


STALL_SHARE: Final = 0.2
"""The share of time from which on a side that waits is shown."""


class Figures:
    """The reported figures of all tasks and readers."""

    def __init__(self, tables: DispatcherTables) -> None:
        self._tables = tables
        self._reports: dict[int, tuple[float, TaskReport]] = {}
        self._rates: dict[int, tuple[float, float, float, float]] = {}
        """Of each task: elements and bytes per second, and the shares of time for which it waited
        for readers, and readers for it."""
        self._scalers: dict[int, AutoScaler] = {}
        """The AutoScaler of each iteration of which a worker or reader has reported."""

    def note_worker_report(self, tasks: dict[int, TaskReport], now: float) -> None:
        """Record the figures that a worker reports. `tasks` maps the number of each task to its
        figures."""
        for number, report in tasks.items():
            task = self._tables.state.tasks.get(number)
            if task is None:
                continue
            before_at, before = self._reports.get(number, (now, report))
            if now > before_at:
                passed = now - before_at
                self._rates[number] = (
                    (report.elements - before.elements) / passed,
                    (report.nbytes - before.nbytes) / passed,
                    _share(report.room_wait_s - before.room_wait_s, passed),
                    _share(report.element_wait_s - before.element_wait_s, passed),
                )
            self._reports[number] = (now, report)
            if report.element_s > SHORTEST_S:
                self._scaler_of(task.iteration).report_worker(task.worker, report.element_s)

    def note_reader_report(self, client: int, seconds: float) -> None:
        """Record how many seconds a reader's program needs for an element."""
        entry = self._tables.state.clients.get(client)
        if entry is not None and seconds > SHORTEST_S:
            self._scaler_of(entry.iteration).report_reader(client, seconds)

    def _scaler_of(self, iteration: int) -> AutoScaler:
        return self._scalers.setdefault(iteration, AutoScaler())

    def forget(self) -> None:
        """Forget the figures of tasks, iterations, workers and readers that have ended."""
        state = self._tables.state
        self._reports = {
            task: report for task, report in self._reports.items() if task in state.tasks
        }
        self._rates = {task: rate for task, rate in self._rates.items() if task in state.tasks}
        for number, scaler in list(self._scalers.items()):
            iteration = state.iterations.get(number)
            if iteration is None or iteration.state is not r.IterationState.OPEN:
                del self._scalers[number]
            else:
                scaler.keep(state.workers, iteration.clients)

    def optimal(self) -> int | None:
        """Return how many workers would be enough for all readers, or None until workers and
        readers have reported."""
        self.forget()
        optima = [scaler.optimal() for scaler in self._scalers.values()]
        workers = len(self._tables.state.workers) - len(self._tables.missing)
        return bounded([optimum for optimum in optima if optimum is not None], workers)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each iteration that has not ended."""
        return [
            self._row(iteration)
            for iteration in self._tables.state.iterations.values()
            if iteration.state is r.IterationState.OPEN
        ]

    def _row(self, iteration: r.Iteration) -> dict[str, Any]:
        state = self._tables.state
        job = state.jobs[iteration.job]
        open_ = [number for number in iteration.tasks if not state.tasks[number].is_over]
        reports = [self._reports[number][1] for number in open_ if number in self._reports]
        rates = [self._rates[number] for number in open_ if number in self._rates]
        workers_wait, readers_wait = (
            fmean(rate[index] for rate in rates) if rates else 0.0 for index in (2, 3)
        )
        left = []  # in the other modes, no positions are assigned
        if iteration.portions is not None:
            left = [iteration.portions.positions_left()]
        elif job.terms.mode == r.DYNAMIC:
            left = [_left(cursor) for cursor in iteration.cursors]
        return {
            "job": job.name,
            "dataset": job.terms.dataset,
            "mode": job.terms.mode,
            "iteration": iteration.id,
            "repetition": iteration.repetition,
            "tasks": len(open_),
            "tasks_count": len(iteration.tasks),
            "clients": len(iteration.clients),
            "elements_per_s": sum(rate[0] for rate in rates),
            "bytes_per_s": sum(rate[1] for rate in rates),
            "workers_wait": workers_wait,
            "readers_wait": readers_wait,
            "waits": _who_waits(workers_wait, readers_wait),
            "buffered": sum(report.buffered for report in reports),
            "room": sum(report.room for report in reports),
            "positions_left": left,
        }


def _share(waited_s: float, passed_s: float) -> float:
    """Return the share of time that was waited; a task that began again has waited less before."""
    return min(1.0, max(0.0, waited_s / passed_s))


def _who_waits(workers_wait: float, readers_wait: float) -> str:
    """Return which side of a job waits for the other one: "producer", "consumer", or ""."""
    if max(workers_wait, readers_wait) < STALL_SHARE:
        return ""
    return "producer" if workers_wait > readers_wait else "consumer"


def _left(cursor: r.Cursor) -> int | None:
    if cursor.count == r.INFINITE:
        return None
    return cursor.count - cursor.position + sum(length for _, length in cursor.returned)


# -- how many workers would be enough --------------------------------------------------------------

FACTOR_MAX: Final = 4
MORE_MAX: Final = 500


class AutoScaler:
    """The rates at which the readers of one iteration take elements, and at which its workers make
    elements."""

    def __init__(self) -> None:
        self._reader_rates: dict[int, float] = {}
        self._worker_rates: dict[int, float] = {}

    def report_worker(self, worker: int, seconds: float) -> None:
        """Record how many seconds a worker needs for an element. Raises InvalidArgumentError if
        `seconds` is not positive."""
        self._worker_rates[worker] = _rate("processing_time", seconds)

    def report_reader(self, reader: int, seconds: float) -> None:
        """Record how many seconds a reader's program needs for an element. Raises
        InvalidArgumentError if `seconds` is not positive."""
        self._reader_rates[reader] = _rate("target_processing_time", seconds)

    def keep(self, workers: Collection[int], readers: Collection[int]) -> None:
        """Keep only the rates of the workers and readers with these numbers, because the others
        have ended."""
        self._worker_rates = {
            number: rate for number, rate in self._worker_rates.items() if number in workers
        }
        self._reader_rates = {
            number: rate for number, rate in self._reader_rates.items() if number in readers
        }

    def optimal(self) -> int | None:
        """Return how many workers would be enough for the iteration, or None until both a worker
        and a reader have reported."""
        if not self._worker_rates or not self._reader_rates:
            return None
        return max(
            1,
            ceil(
                sum(_usual(self._reader_rates.values()))
                / fmean(_usual(self._worker_rates.values()))
            ),
        )


def bounded(estimates: Collection[int], workers: int) -> int | None:
    """Return how many workers would be enough for all iterations, from the estimate of each; None
    without estimates. `workers` is their current number, which bounds the result.
    """
    if not estimates:
        return None
    return min(max(estimates), max(1, FACTOR_MAX * workers), workers + MORE_MAX)


def _rate(name: str, seconds: float) -> float:
    if not seconds > 0:
        raise InvalidArgumentError(f"{name} is {seconds}, wants more than 0 s")
    return 1.0 / seconds


def _usual(rates: Collection[float]) -> list[float]:
    mean, spread, middle = fmean(rates), pstdev(rates), median(rates)
    return [middle if abs(rate - mean) > spread else rate for rate in rates]
