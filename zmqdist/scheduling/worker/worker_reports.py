"""The reports of a worker for the facts of its dispatcher (WorkerFacts).

Every FACTS_S the loop reads the tables of slots and actors (run_figures.py), and each
PROCESS_SAMPLE_S the memory and processor time of their processes. It sends a report if something
has changed. Failures are sent at once, before the outcome of their lease. While a watcher asks for
the timeline, runs are collected and sent OBSERVED_TICK_S apart.

The code of this module runs in the loop's thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from zmqdist.limits import (
    FACTS_S,
    FAILURES_AT_ONCE,
    FAILURES_PER_S,
    PROCESS_SAMPLE_S,
)
from zmqdist.messages import (
    ActorFacts,
    FailureFacts,
    FunctionFacts,
    Observe,
    ServerFacts,
    SlotFacts,
    TaskEvent,
    WorkerFacts,
    WorkerFigures,
)
from zmqdist.scheduling.shared.server_reports import ServerReports
from zmqdist.scheduling.shared.store import BulkStore
from zmqdist.scheduling.worker.machine import WorkerMachine
from zmqdist.scheduling.worker.run_figures import Allowance, CallRun, Failure, Run, RunReader
from zmqdist.transport.loop import Loop
from zmqdist.transport.memory_limits import available_bytes, usable_bytes, usage
from zmqdist.transport.shm_pool import this_pool

OBSERVED_TICK_S: Final = 0.25
"""Seconds between two reports while runs are watched."""

OVER_MEMORY: Final = "OUT_OF_MEMORY"
"""The error of a run whose slot is killed because it uses too much memory."""

FREE_STEP_BYTES: Final = 64 * 2**20
"""The host's free memory is rounded to this, because it always changes a little."""


class SlotAtWork(NamedTuple):
    """A slot that has a process or thread: its table, and the position of its present item."""

    slot: int
    pid: int
    runs: RunReader
    position: int


class ActorAtWork(NamedTuple):
    """The process of an actor: its table, and the names of its methods by their numbers there."""

    actor: int
    cls: str
    pid: int
    runs: RunReader
    methods: Sequence[str]


class _Usage:
    """The memory and processor time of processes, read each PROCESS_SAMPLE_S, and at their begin."""

    def __init__(self) -> None:
        self._at = 0.0
        self._cpu_s: dict[int, float] = {}
        self.by_pid: dict[int, tuple[int, float]] = {}

    def sample(self, pids: Iterable[int], now: float) -> bool:
        """Read the figures of these processes if it is time, and those of new ones in any case.
        Return whether it was time."""
        due = now >= self._at + PROCESS_SAMPLE_S
        before = self._cpu_s
        if due:
            elapsed_s, self._at = now - self._at, now
            self._cpu_s, self.by_pid = {}, {}
        for pid in pids:
            if pid not in self.by_pid:
                rss, cpu_s = usage(pid)
                used_s = cpu_s - before.get(pid, cpu_s)
                self._cpu_s[pid] = cpu_s
                self.by_pid[pid] = rss, round(100 * max(0.0, used_s) / elapsed_s, 1) if due else 0.0
        return due


class WorkerReports:
    """Makes and sends the reports of one worker.

    Args:
      send: sends a message to the dispatcher.
      store: the results and arguments that the worker holds.

    Attributes:
      servers: the reports of the servers of this process.
      runs_per_table: the runs a second to report of each process now; a new one begins with it.
    """

    def __init__(
        self, loop: Loop, send: Callable[[WorkerFacts | ServerFacts], object], store: BulkStore
    ) -> None:
        self._loop, self._send, self._store = loop, send, store
        self.servers = ServerReports()
        self._machine: WorkerMachine | None = None
        self._slots: Callable[[], list[SlotAtWork]] = list
        self._actors: Callable[[], list[ActorAtWork]] = list
        self._usage = _Usage()
        self._allowance = Allowance(FAILURES_PER_S, FAILURES_AT_ONCE)
        self._observed_until = 0.0
        self._runs_per_s = self.runs_per_table = 0
        self._functions: list[FunctionFacts] = []
        self._events: list[tuple[TaskEvent, float]] = []
        self._left_out = 0
        self._figures = WorkerFigures()
        self._last: object = None

    def begin(
        self,
        machine: WorkerMachine,
        slots: Callable[[], list[SlotAtWork]],
        actors: Callable[[], list[ActorAtWork]],
    ) -> None:
        """Begin to report. Called once, in the loop's thread."""
        self._machine, self._slots, self._actors = machine, slots, actors
        self._tick()

    def observe(self, message: Observe) -> None:
        """Report runs for a while."""
        self._observed_until = self._loop.now() + message.within_s
        self._runs_per_s = message.runs_per_s
        self._tick()

    def take_runs(
        self, runs: RunReader, cls: str = "", methods: Sequence[str] = ()
    ) -> list[FunctionFacts]:
        """Read, and return, what a table has since it was last read."""

        def method_of(fn: int) -> str:
            return f"{cls}.{methods[fn - 1]}" if 0 < fn <= len(methods) else cls and f"{cls}.?"

        added = runs.added(method_of)
        self._functions += added
        self._left_out += runs.take_left_out()
        if added:
            self._figures = replace(
                self._figures,
                bytes_in=self._figures.bytes_in + sum(facts.bytes_in for facts in added),
                bytes_out=self._figures.bytes_out + sum(facts.bytes_out for facts in added),
            )
        return added

    def reported(
        self, slot: int, pid: int, failures: Sequence[Failure], runs: Sequence[Run]
    ) -> None:
        """Take what a slot has reported, before the outcomes of these runs."""
        assert self._machine is not None
        items = dict(self._machine.slots[slot].given)
        now = self._loop.now()
        for position, error, message, traceback in failures:
            if position not in items:
                continue
            lease, coordinator, _, fn, _ = items[position]
            if error == OVER_MEMORY:  # its slot is killed, and cannot count it
                self._functions.append(
                    FunctionFacts(coordinator, fn, "", 1, 1, 0.0, 0.0, 0.0, 0, 0, [])
                )
            if self._allowance.take(now):
                self._fail(FailureFacts(lease, pid, error, message, traceback))
        for position, began, ended, kind in runs:
            if position in items:
                ago_s = max(0.0, now - ended)
                run = TaskEvent(items[position][0], slot, ago_s, ended - began, kind)
                self._machine.note_run(run)

    def calls_reported(self, failures: Iterable[FailureFacts], runs: Iterable[CallRun]) -> None:
        """Take what an actor has reported about calls."""
        now = self._loop.now()
        for failure in failures:
            if self._allowance.take(now):
                self._fail(failure)
        for method, coordinator, work, attempt, began, ended, kind in runs:
            took_s = ended - began
            event = TaskEvent(0, 0, 0.0, took_s, kind, method, coordinator, work, attempt)
            if len(self._events) < self._runs_per_s:
                self._events.append((event, ended))
            else:
                self._left_out += 1

    def _fail(self, failure: FailureFacts) -> None:
        if self._machine is not None and self._machine.contact.registered:
            self._send(WorkerFacts(failures=[failure]))

    def _tick(self) -> None:
        now = self._loop.now()
        observed = now < self._observed_until
        self._loop.set_timer(self, now + (OBSERVED_TICK_S if observed else FACTS_S), self._tick)
        machine = self._machine
        if machine is None or not machine.contact.registered:
            return
        slots, actors = self._slots(), self._actors()
        tables = [slot.runs for slot in slots] + [actor.runs for actor in actors]
        self.runs_per_table = self._runs_per_s // max(1, len(tables)) or 1 if observed else 0
        for table in tables:
            table.observe(self.runs_per_table)
        pids = {os.getpid(), *(slot.pid for slot in slots), *(actor.pid for actor in actors)}
        if self._usage.sample(pids, now):
            self._sample()
            for server in self.servers.changes():
                self._send(server)
        for slot in slots:
            self.take_runs(slot.runs)
        slot_rows = [self._slot(machine, slot, now) for slot in slots]
        actor_rows = [self._actor(actor) for actor in actors]
        state = (
            self._figures,
            [replace(row, since_s=0.0) for row in slot_rows],
            [replace(row, buckets=[]) for row in actor_rows],
        )
        if state == self._last and not (self._functions or self._events or self._left_out):
            return
        self._last = state
        report = WorkerFacts(
            self._figures,
            slot_rows,
            self._functions,
            [],
            actor_rows,
            # the age at the time of the report, which may be later than the end by a tick
            [replace(event, ago_s=max(0.0, now - ended)) for event, ended in self._events],
            self._left_out,
        )
        self._functions, self._events, self._left_out = [], [], 0
        self._send(report)

    def _sample(self) -> None:
        free, pool = available_bytes() or 0, this_pool()
        used = self._usage.by_pid.values()
        self._figures = replace(
            self._figures,
            rss_bytes=sum(rss for rss, _ in used),
            cpu_percent=round(sum(percent for _, percent in used), 1),
            host_memory_bytes=usable_bytes(),
            host_memory_free_bytes=free - free % FREE_STEP_BYTES,
            kept_bytes=self._store.holdings.bytes,
            shm_bytes=0 if pool is None else pool.nbytes,
        )

    def _slot(self, machine: WorkerMachine, at_work: SlotAtWork, now: float) -> SlotFacts:
        slot = machine.slots[at_work.slot]
        rss, percent = self._usage.by_pid.get(at_work.pid, (0, 0.0))
        lease, since_s = 0, 0.0
        if slot.given:
            position, item = slot.given[0]
            lease = item[0]
            if at_work.position >= position and at_work.runs.began:
                since_s = max(0.0, now - at_work.runs.began)
        of_thread = at_work.pid == os.getpid()
        return SlotFacts(
            at_work.slot,
            at_work.pid,
            slot.row.state,
            lease,
            since_s,
            0 if of_thread else rss,
            0.0 if of_thread else percent,
        )

    def _actor(self, actor: ActorAtWork) -> ActorFacts:
        rss, percent = self._usage.by_pid.get(actor.pid, (0, 0.0))
        added = self.take_runs(actor.runs, actor.cls, actor.methods)
        runs = actor.runs
        return ActorFacts(
            actor.actor,
            actor.pid,
            rss,
            percent,
            runs.count,
            runs.failed,
            runs.waiting,
            [pair for facts in added for pair in facts.buckets],
        )
