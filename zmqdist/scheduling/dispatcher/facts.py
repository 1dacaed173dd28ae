"""What a dispatcher shows of the inside of its cluster, apart from its queues: figures by function,
what each slot does, and the last failures, deaths and refusals. No I/O.

`facts_record.py` beside it makes the record that the RPC method `facts` returns.

Theory of operation
    Slots count in shared memory; a worker sends what was added since its last report. So a lost
    report loses figures and nothing else. A failure comes before the outcome of its lease, so the
    lease still says which work it was.
    Functions have numbers in each program. Here they count by name, so that the same function of
    two programs is one row. The dispatcher keeps the names for a while after the end of a program,
    because the last figures arrive later.
    A request for the timeline has all workers report runs for OBSERVED_S, with the outcomes of
    their leases, which still say which work it was.

Promises, checked by tests/scheduling/dispatcher/test_facts.py
    P1  all lists and texts are bounded, whatever workers and programs send
    P2  failures, slot deaths, refusals and runs share one sequence of numbers, so that a watcher
        that names the next one gets each later entry once, unless the ring has dropped it
    P3  figures of a function are the sum over all reports; they survive its program and workers
    P4  runs are recorded only within OBSERVED_S of a request for them
    P5  a report changes nothing about work, leases and members
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from zmqdist.events import Peer, Send
from zmqdist.limits import (
    BUCKET_MIN_S,
    EVENTS_KEPT,
    EVENTS_PER_S,
    FAILURE_MESSAGE_CHARS_MAX,
    FAILURES_SHOWN_MAX,
    FUNCTION_NAME_CHARS_MAX,
    FUNCTION_NAMES_KEPT_MAX,
    FUNCTIONS_SHOWN_MAX,
    OBSERVED_S,
    REFUSALS_KEPT,
    SLOT_DEATHS_KEPT,
    TRACEBACK_CHARS_MAX,
)
from zmqdist.messages import (
    ActorFacts,
    FailureFacts,
    FunctionFacts,
    Observe,
    TaskEvent,
    WorkerFacts,
)
from zmqdist.scheduling.dispatcher.membership_and_leases import Member
from zmqdist.scheduling.dispatcher.records import Lease, LeaseState, SessionQueue
from zmqdist.scheduling.dispatcher.run_times import RunTimes

OTHER_FUNCTIONS: Final = "other functions"
"""The row of functions beyond those that are told apart."""

OUTCOMES: Final = ("value", "error", "value", "cancelled", "value", "input lost", "out of memory")
"""What the timeline calls each kind of outcome (messages.py)."""

UNMET_SHOWN_MAX: Final = 8
"""The functions that one entry each says of a queue whose work no worker can run."""

RATE_S: Final = 5.0
"""Seconds over which a rate of calls is an average."""


@dataclass(slots=True)
class Totals:
    """What has happened to work since the dispatcher began."""

    submitted: int = 0
    cancelled: int = 0
    lost_starts: int = 0
    retried: int = 0


@dataclass(slots=True)
class FunctionTotals:
    """The runs of one function: `buckets` counts durations (FunctionFacts)."""

    count: int = 0
    failed: int = 0
    sum_s: float = 0.0
    max_s: float = 0.0
    cpu_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    buckets: Counter[int] = field(default_factory=Counter)

    def add(self, facts: FunctionFacts | FunctionTotals) -> None:
        self.count += facts.count
        self.failed += facts.failed
        self.sum_s += facts.sum_s
        self.max_s = max(self.max_s, facts.max_s)
        self.cpu_s += facts.cpu_s
        self.bytes_in += facts.bytes_in
        self.bytes_out += facts.bytes_out
        buckets = facts.buckets
        for bucket, count in buckets if isinstance(buckets, list) else buckets.items():
            self.buckets[bucket] += count

    def row(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "count": self.count,
            "failed": self.failed,
            "mean_s": self.sum_s / self.count if self.count else 0.0,
            "p50_s": min(percentile(self.buckets, 0.5), self.max_s),
            "p99_s": min(percentile(self.buckets, 0.99), self.max_s),
            "max_s": self.max_s,
            "sum_s": self.sum_s,
            "cpu_s": self.cpu_s,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
        }


def smoothed_rate(before: float, added: int, elapsed_s: float) -> float:
    """Return a rate per second, smoothed over RATE_S, after `added` more events in `elapsed_s`
    seconds, which are above 0. A count that began again adds nothing."""
    return before + (max(0, added) / elapsed_s - before) * min(1.0, elapsed_s / RATE_S)


def percentile(buckets: Mapping[int, int], share: float) -> float:
    """Return the duration in seconds that this share of all runs did not exceed, within 9 %; 0
    without runs."""
    left = share * sum(buckets.values())
    if not left:
        return 0.0
    for bucket in sorted(buckets):
        left -= buckets[bucket]
        if left <= 0:
            break
    return float(BUCKET_MIN_S * 2 ** ((bucket - 0.5) / 4))


@dataclass(slots=True)
class ActorTotals:
    """The calls of one actor, from the reports of its worker."""

    facts: ActorFacts
    buckets: Counter[int]
    calls_per_s: float
    at: float


class Worked(NamedTuple):
    """The work of a lease, for the timeline."""

    coordinator: int
    work: int
    attempt: int
    function: str
    kind: int


class Ring(deque[dict[str, Any]]):
    """The last entries of one kind, each with its `seq`, the oldest first."""

    def since(self, seq: int) -> list[dict[str, Any]]:
        later = []
        for entry in reversed(self):
            if entry["seq"] < seq:
                break
            later.append(entry)
        return later[::-1]


class Facts:
    """The facts of one dispatcher; the module's docstring has the rules.

    Attributes:
      totals: what has happened to work.
      failed_at: how many functions have failed at each member.
      reports: the last report with figures of each member, and when it arrived.
      failures, slot_deaths, refusals: the last of each kind. The times `at` in them are those of
        the machine's clock.
      timeline: runs that have ended, oldest first: [seq, coordinator, work, attempt, function,
        worker, slot, submitted_at, assigned_at, started_at, ended_at, outcome, kind, ready_at].
      times: when work was submitted and handed out, while a watcher asks for the timeline.
      dropped: the number of runs that were left out of the timeline.
      next: the number of the next entry.
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self.functions: OrderedDict[str, FunctionTotals] = OrderedDict()
        self.actors: dict[int, ActorTotals] = {}
        self.reports: dict[Member, tuple[WorkerFacts, float]] = {}
        self.failed_at: Counter[Member] = Counter()
        self.failures, self.slot_deaths = (
            Ring(maxlen=FAILURES_SHOWN_MAX),
            Ring(maxlen=SLOT_DEATHS_KEPT),
        )
        self.refusals = Ring(maxlen=REFUSALS_KEPT)
        self.timeline: deque[list[Any]] = deque(maxlen=EVENTS_KEPT)
        self.dropped = 0
        self.next = 1
        self._names: OrderedDict[tuple[int, int], str] = OrderedDict()
        self._observed_until = 0.0
        self._asked_at = 0.0
        self.times = RunTimes()

    # -- names -------------------------------------------------------------------------------------

    def define(
        self, coordinator: int, functions: Iterable[tuple[int, bytes]], names: list[str]
    ) -> None:
        """Take the names of a program's functions."""
        for (fn, _), name in zip(functions, names, strict=False):
            self._names[coordinator, fn] = name[:FUNCTION_NAME_CHARS_MAX]
            self._names.move_to_end((coordinator, fn))
        while len(self._names) > FUNCTION_NAMES_KEPT_MAX:
            self._names.popitem(last=False)

    def name(self, coordinator: int, fn: int) -> str:
        """Return the name of a function."""
        return self._names.get((coordinator, fn)) or (
            f"function {fn}" if coordinator else OTHER_FUNCTIONS
        )

    def name_of(self, lease: Lease) -> str:
        return self.name(lease.session.coordinator, lease.item[3])

    # -- reports of workers ------------------------------------------------------------------------

    def take(
        self, member: Member, report: WorkerFacts, leases: Mapping[int, Lease], now: float
    ) -> None:
        """Add what a worker reports. `leases` are the worker's leases that have not ended."""
        if report.figures is not None:
            self.reports[member] = report, now
        for function in report.functions:
            name = function.method[:FUNCTION_NAME_CHARS_MAX] or self.name(
                function.coordinator, function.fn
            )
            self._totals_of(name).add(function)
            self.failed_at[member] += function.failed
        for failure in report.failures:
            self._note_reported(member, failure, leases.get(failure.lease), now)
        for actor in report.actors:
            self._note_actor(actor, now)
        if self.is_observed(now):
            self.dropped += report.events_dropped
            self.note_runs(member, report.events, leases, now)

    def lost(self, member: Member) -> None:
        self.reports.pop(member, None)
        del self.failed_at[member]

    def actor_ended(self, actor: int) -> None:
        self.actors.pop(actor, None)

    def _totals_of(self, name: str) -> FunctionTotals:
        totals = self.functions.get(name)
        if totals is None:
            totals = self.functions[name] = FunctionTotals()
            if len(self.functions) > FUNCTIONS_SHOWN_MAX:
                rest = self.functions.setdefault(OTHER_FUNCTIONS, FunctionTotals())
                self.functions.move_to_end(OTHER_FUNCTIONS)
                rest.add(self.functions.popitem(last=False)[1])
        self.functions.move_to_end(name)
        return self.functions.get(name, totals)

    def _note_actor(self, facts: ActorFacts, now: float) -> None:
        before = self.actors.get(facts.actor)
        if before is None or before.facts.pid != facts.pid:
            before = ActorTotals(facts, Counter(), 0.0, now)
            self.actors[facts.actor] = before
        elapsed_s = now - before.at
        if elapsed_s > 0:
            added = facts.calls - before.facts.calls
            before.calls_per_s = smoothed_rate(before.calls_per_s, added, elapsed_s)
        before.facts, before.at = facts, now
        before.buckets.update(dict(facts.buckets))

    # -- failures, deaths, refusals ----------------------------------------------------------------

    def _note_reported(
        self, member: Member, failure: FailureFacts, lease: Lease | None, now: float
    ) -> None:
        if failure.lease and lease is None:
            return  # of work that was cancelled, or ran again elsewhere
        if lease is None:
            function = failure.method[:FUNCTION_NAME_CHARS_MAX]
            worked = Worked(failure.coordinator, failure.work, failure.attempt, function, 0)
        else:
            worked = self._worked(lease, 0)
        self.note_failure(
            worked,
            member,
            failure.error,
            failure.message,
            now,
            pid=failure.pid,
            traceback=failure.traceback,
        )

    def note_failure(
        self,
        worked: Worked,
        member: Member,
        error: str,
        message: str,
        now: float,
        *,
        pid: int = 0,
        traceback: str = "",
    ) -> None:
        """Record that a function, or a call of an actor, has failed for its program."""
        self._add(
            self.failures,
            now,
            function=worked.function,
            worker=member.name,
            host=member.host,
            pid=pid,
            coordinator=worked.coordinator,
            work=worked.work,
            attempt=worked.attempt,
            error=error[:FUNCTION_NAME_CHARS_MAX],
            message=message[:FAILURE_MESSAGE_CHARS_MAX],
            traceback=traceback[-TRACEBACK_CHARS_MAX:],
        )

    def note_lost_start(self, lease: Lease, member: Member, attempts_max: int, now: float) -> None:
        """Record that a function has begun and is about to be charged, because its process was lost."""
        self.totals.lost_starts += 1
        if lease.lost + 1 >= attempts_max and lease.state is LeaseState.BEGUN:
            # no slot is there to count it
            totals = self._totals_of(self.name_of(lease))
            totals.count += 1
            totals.failed += 1
            self.failed_at[member] += 1
            text = (
                f"its process has died {attempts_max} times while it ran, and it does not run again"
            )
            self.note_failure(self._worked(lease, 0), member, "WorkerLost", text, now)

    def note_unmet(self, queue: SessionQueue, lack: str, now: float) -> None:
        """Record that the work of a queue has failed before it began, because no worker has what it
        needs."""
        coordinator = queue.session.coordinator
        items = (item for band in queue.bands for item in (*band.report_before_start, *band.items))
        for fn, count in Counter(item[3] for item in items).most_common(UNMET_SHOWN_MAX):
            name = self.name(coordinator, fn)
            self._totals_of(name).failed += count
            self._add(
                self.failures,
                now,
                function=name,
                worker="",
                host="",
                pid=0,
                coordinator=coordinator,
                work=0,
                attempt=0,
                error="UnavailableError",
                message=f"{count:,} did not begin: {lack}"[:FAILURE_MESSAGE_CHARS_MAX],
                traceback="",
            )

    def note_slot_death(
        self,
        member: Member,
        number: int,
        lease: Lease | None,
        exit_code: int | None,
        log: str,
        now: float,
    ) -> None:
        """Record that a slot process has died while it ran the function of a lease."""
        report = self.reports.get(member)
        slots = () if report is None else report[0].slots
        self._add(
            self.slot_deaths,
            now,
            worker=member.name,
            pid=next((slot.pid for slot in slots if slot.lease == number), 0),
            exit_code=exit_code,
            function="" if lease is None else self.name_of(lease),
            last_lines=log[-TRACEBACK_CHARS_MAX:],
        )

    def note_refusal(self, peer: str, reason: str, now: float) -> None:
        """Record that a message, or a connection, of a peer was refused."""
        self._add(
            self.refusals,
            now,
            peer=peer[:FUNCTION_NAME_CHARS_MAX],
            reason=reason[:FAILURE_MESSAGE_CHARS_MAX],
        )

    def _add(self, ring: Ring, now: float, **entry: Any) -> None:
        ring.append({"seq": self.next, "at": now, **entry})
        self.next += 1

    # -- the timeline ------------------------------------------------------------------------------

    def runs_since(self, seq: int, to_unix_s: float) -> list[list[Any]]:
        """Return the runs from this number on, with times in seconds since 1970."""
        later = []
        for run in reversed(self.timeline):
            if run[0] < seq:
                break
            times = (at and at + to_unix_s for at in run[7:11])
            later.append([*run[:7], *times, *run[11:13], run[13] and run[13] + to_unix_s])
        return later[::-1]

    def observe(self, peers: list[Peer], now: float) -> list[Send]:
        """Have the workers report each run for OBSERVED_S. Return the messages to send."""
        was_observed = self.is_observed(now)
        self._observed_until = now + OBSERVED_S
        if was_observed and now < self._asked_at + OBSERVED_S / 5:
            return []
        self._asked_at = now
        self._observe = Observe(OBSERVED_S, max(1, EVENTS_PER_S // max(1, len(peers))))
        return [Send(peer, self._observe) for peer in peers]

    def joined(self, member: Member, now: float) -> list[Send]:
        """Have a worker that has just registered report its runs like the others."""
        if member.peer is None or not self.is_observed(now):
            return []
        return [Send(member.peer, self._observe)]

    def is_observed(self, now: float) -> bool:
        if now < self._observed_until:
            return True
        if self._observed_until:
            self._observed_until = 0.0
            self.times = RunTimes()
        return False

    def _worked(self, lease: Lease, kind: int) -> Worked:
        work, attempt, _, _, _ = lease.item
        return Worked(lease.session.coordinator, work, attempt, self.name_of(lease), kind)

    def note_runs(
        self, member: Member, events: list[TaskEvent], leases: Mapping[int, Lease], now: float
    ) -> None:
        """Add runs to the timeline. `leases` are the worker's, before those that end now."""
        if not self.is_observed(now):
            return
        for event in events:
            worked = self._worked_of(event, leases)
            if worked is None:
                self.dropped += 1
                continue
            if len(self.timeline) == EVENTS_KEPT:
                self.dropped += 1
            ended_at = now - event.ago_s
            submitted_at, ready_at = self.times.submitted(*worked[:3])
            self.timeline.append(
                [
                    self.next,
                    worked.coordinator,
                    worked.work,
                    worked.attempt,
                    worked.function,
                    member.name,
                    event.slot,
                    submitted_at,
                    self.times.handed_out.time_of(event.lease),
                    ended_at - event.took_s,
                    ended_at,
                    OUTCOMES[event.kind] if event.kind < len(OUTCOMES) else "",
                    "call" if event.method else "task",
                    ready_at,
                ]
            )
            self.next += 1

    def _worked_of(self, event: TaskEvent, leases: Mapping[int, Lease]) -> Worked | None:
        if event.method:
            name = event.method[:FUNCTION_NAME_CHARS_MAX]
            return Worked(event.coordinator, event.work, event.attempt, name, event.kind)
        lease = leases.get(event.lease)
        return None if lease is None else self._worked(lease, event.kind)
