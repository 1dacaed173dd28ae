"""`ClusterCoordinator.trace`: a file of what the functions of one coordinator did, and where, for
Perfetto and Chrome (the trace event format).

Theory of operation
    This process knows when its work was submitted and when the result was ready. The dispatcher has
    the runs (facts, `timeline`), which workers report while a thread here asks for them. At the end
    both are joined by the number of the work item, on the clock of the dispatcher: its distance
    from the clock here is known within half of the shortest round trip.

Promises, checked by tests/scheduling/test_run_trace.py
    T1  the file is valid from the beginning on, and complete however the program leaves the
        with-statement, whether or not the dispatcher still answers
    T2  at most RUNS_MAX runs and work items are in the file; it says how many were left out
    T3  the end waits at most LATE_S for the last reports
    T4  without a trace a work item costs one look at an attribute
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

import msgspec

from zmqdist import clock as time
from zmqdist.errors import FailedPreconditionError, OpError
from zmqdist.limits import FACTS_S
from zmqdist.messages import SUBMISSION_SHIFT
from zmqdist.rpc.client import ZmqClient
from zmqdist.scheduling.coordinator.runtime import CoordinatorRuntime
from zmqdist.scheduling.coordinator.work import Work

RUNS_MAX: Final = 50_000
"""The most runs, and work items, in a file, which then has about 40 MB."""

ASK_S: Final = 0.5
"""Seconds between two questions to the dispatcher, which keeps the last 20,000 runs."""

BEGIN_S: Final = 0.05
"""Seconds in which the request to report runs gets from the dispatcher to the workers."""

LATE_S: Final = 2.5 * FACTS_S
"""Seconds for which the end waits for reports of workers."""

CALL_MS: Final = 3_000

NO_EVENTS: Final = 2**62
"""A number that no event has: the first question wants none of earlier ones."""

PROGRAM: Final = 0
"""The number of the program among the processes in the file. Workers have larger ones."""

ACTOR_ROWS: Final = 1_000_000
"""The number of a worker's first row of an actor's class. The rows of slots have smaller ones."""

Event = dict[str, Any]


class Trace:
    """A trace that is being recorded, for a with-statement; `ClusterCoordinator.trace` makes it.

    Attributes:
      path: where the file will be.
    """

    def __init__(self, runtime: CoordinatorRuntime, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)  # the program may change its folder
        self._runtime = runtime
        self._submitted: dict[int, tuple[float, str]] = {}
        self._ready: dict[int, float] = {}
        self._left_out = 0
        self._runs: list[list[Any]] = []
        self._runs_left_out = 0
        self._since = NO_EVENTS
        self._begin_at = self._offset_s = 0.0
        self._round_trip_s = float("inf")
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zmqdist-trace", daemon=True)

    def __enter__(self) -> Trace:
        self._runtime.check_open()
        if self._runtime.listeners.trace is not None:
            raise FailedPreconditionError("this coordinator records a trace already: end it first")
        if os.path.isdir(self.path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
        self._write()  # a path that cannot be written to fails now, and not after the work
        self._client = self._connect()
        try:
            self._ask()
        except BaseException:
            self._client.close()
            raise
        # functions come to workers after the request to report them; calls of actors might not
        self._end.wait(BEGIN_S)
        self._runtime.listeners.trace = self
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._runtime.listeners.trace = None
        self._end.set()
        self._thread.join()
        self._client.close()
        self._write()

    # -- what the runtime reports, any thread ------------------------------------------------------

    def submitted(self, work: Work) -> None:
        """Record that the program has handed in a work item."""
        if len(self._submitted) < RUNS_MAX:
            self._submitted[work.number] = time.time(), work.name
        else:
            self._left_out += 1

    def ended(self, works: list[Work]) -> None:
        """Record that results are ready."""
        now = time.time()
        for work in works:
            if work.number in self._submitted:
                self._ready[work.number] = now

    # -- the dispatcher's runs, in the thread ------------------------------------------------------

    def _connect(self) -> ZmqClient:
        target = self._runtime.target
        security = target.credentials.client(target.address, "submit")
        return ZmqClient(target.address, "", True, CALL_MS, security=security)

    def _watch(self) -> None:
        while not self._end.wait(ASK_S):
            with suppress(OpError):  # it may be restarted
                self._ask()
        until_s = time.monotonic() + LATE_S
        pause = threading.Event()
        with suppress(OpError):
            self._ask()
            while set(self._ready) - {run[2] for run in self._runs}:
                if time.monotonic() >= until_s or self._runs_left_out:
                    return
                pause.wait(ASK_S / 5)
                self._ask()

    def _ask(self) -> None:
        begin_s = time.time()
        record = self._client.facts_blocking(self._since, True)
        round_trip_s = time.time() - begin_s
        if round_trip_s < self._round_trip_s:
            self._round_trip_s = round_trip_s
            self._offset_s = record["at"] - (begin_s + round_trip_s / 2)
        self._since = record["next"]
        own = self._runtime.machine.coordinator
        self._begin_at = self._begin_at or record["at"]
        # a run that ended before may be reported only now
        runs = [
            run
            for run in record["timeline"]["events"]
            if run[1] == own and run[10] >= self._begin_at
        ]
        room = RUNS_MAX - len(self._runs)
        self._runs += runs[:room]
        self._runs_left_out += len(runs[room:])

    # -- the file ----------------------------------------------------------------------------------

    def _write(self) -> None:
        names = {run[2] for run in self._runs}
        record = {
            "traceEvents": list(self._events()),
            "displayTimeUnit": "ms",
            "otherData": {
                "dispatcher": self._runtime.target.address,
                "work_left_out": self._left_out,
                "runs_left_out": self._runs_left_out,
                "work_without_run": len(self._ready.keys() - names),
            },
        }
        staging = f"{self.path}.{os.getpid()}"
        with open(staging, "wb") as file:
            file.write(msgspec.json.encode(record))
        os.replace(staging, self.path)

    def _events(self) -> Iterator[Event]:
        yield from _named(PROGRAM, "program", ((1, "submitted"), (2, "ready")))
        for number, (at, name) in self._submitted.items():
            yield _slice(name, PROGRAM, 1, at + self._offset_s, 0.0, work=number)
        for number, at in self._ready.items():
            name = self._submitted[number][1]
            yield _slice(name, PROGRAM, 2, at + self._offset_s, 0.0, work=number)
        workers: dict[str, tuple[int, dict[Any, int]]] = {}
        flows = itertools.count(1)
        for run in self._runs:
            _, _, work, attempt, function, worker, slot, *times, outcome, kind, ready = run
            submitted, assigned, started, ended = times
            process, rows = workers.setdefault(worker, (len(workers) + 1, {}))
            row: Any = slot if kind == "task" else f"actor {function.rpartition('.')[0]}"
            thread = rows.setdefault(row, slot + 1 if kind == "task" else ACTOR_ROWS + len(rows))
            details: Event = {
                "work": work,
                "attempt": (attempt & ((1 << SUBMISSION_SHIFT) - 1)) + 1,
                "outcome": outcome,
                "function": function,
            }
            if assigned and ready:
                details["inputs_ms"] = round((ready - submitted) * 1e3, 3)
                details["queued_ms"] = round((assigned - ready) * 1e3, 3)
                details["at_worker_ms"] = round((started - assigned) * 1e3, 3)
            submitted_at, name = self._submitted.get(work, (None, function))
            if submitted_at is not None:
                submitted_at += self._offset_s
                flow = next(flows)
                details["waited_ms"] = round((started - submitted_at) * 1e3, 3)
                yield _arrow("s", flow, PROGRAM, 1, submitted_at)
                yield _arrow("f", flow, process, thread, started)
            if work in self._ready:
                ready_s = self._ready[work] + self._offset_s - ended
                details["ready_after_ms"] = round(ready_s * 1e3, 3)
            yield _slice(name, process, thread, started, ended - started, kind, **details)
        for worker, (process, rows) in workers.items():
            labels = (
                (thread, row if isinstance(row, str) else f"slot {row}")
                for row, thread in rows.items()
            )
            yield from _named(process, worker, labels)


def _named(process: int, name: str, threads: Iterable[tuple[int, str]]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for thread, label in threads:
        common = {"ph": "M", "pid": process, "tid": thread}
        yield {**common, "name": "thread_name", "args": {"name": label}}
        yield {**common, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _slice(
    name: str, process: int, thread: int, at: float, took_s: float, kind: str = "", **details: Any
) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": kind or "program",
        "pid": process,
        "tid": thread,
        "ts": round(at * 1e6, 1),
        "dur": round(max(took_s * 1e6, 1.0), 1),
        "args": details,
    }


def _arrow(phase: str, flow: int, process: int, thread: int, at: float) -> Event:
    end = {"bp": "e"} if phase == "f" else {}
    common = {"ph": phase, "name": "submitted", "cat": "flow", "id": flow}
    return {**common, "pid": process, "tid": thread, "ts": round(at * 1e6, 1), **end}
