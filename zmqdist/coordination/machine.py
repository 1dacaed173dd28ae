"""The tasks of a cluster: which of them are alive, which have failed, and what they wait for
together. No I/O.

Theory of operation
    A task registers under its name and its incarnation, a number that its process has drawn, and is
    up from then on. It polls for errors all the time, and each poll is a sign of life. A task goes
    into error when it reports an error itself, is silent for `heartbeat_timeout_s`, does not
    reconnect as the same incarnation within `reconnect_grace_s`, or registers as another
    incarnation. It also goes into error when the runtime sees its process end. The error ends the
    barriers that wait for the task. It is reported to all tasks, or only to the failed task if its
    job may recover. The task stays in error until it is `reset`. A lost task may register again
    without a reset if its job may recover, or if `new_incarnation_may_return` is set.
    A task that shuts down, or is reset, has left. Requests that it sent before may arrive later, so
    the machine accepts requests of the task for another `heartbeat_timeout_s`, and refuses them
    from then on.

Promises, checked by tests/coordination/test_machine.py
    P1  a task has one incarnation at a time; a request of another incarnation gets ABORTED, unless
        it is a registration that is allowed
    P2  each ticket gets one reply or is dropped, and no state of the ticket is kept after that
    P3  a lost task ends every barrier that needs the task; a new barrier that needs it fails at
        once, with an error that names the task
    P4  every error of a task whose job may not recover reaches every task that polls, once each, in
        order
    P5  all tasks that ask which tasks of a set are alive get the same reply, once all tasks of the
        set that are alive have asked

A dispatcher's cluster has no list of tasks: each task that registers becomes a member, and the
callers of a barrier list its tasks.

Not here: rounds of barriers (barriers_machine.py), keys (keys_machine.py), connections and
processes (service.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

from zmqdist import limits
from zmqdist.coordination.barriers_machine import Barriers, RoundOutcome
from zmqdist.coordination.replies import (
    Effect,
    Fail,
    ReplyValue,
    Task,
    Ticket,
    task_name,
    task_names,
)
from zmqdist.errors import (
    ABORTED,
    CANCELLED,
    DEADLINE_EXCEEDED,
    FAILED_PRECONDITION,
    INTERNAL,
    INVALID_ARGUMENT,
    OK,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
)
from zmqdist.field_types import check_fields

MISSING: Final = "missing"  # the task has not registered yet
# the task has registered, and waits until the other tasks have registered
JOINING: Final = "joining"
UP: Final = "up"
ERROR: Final = "error"
LEFT: Final = "left"

ALL_TASKS: Final = "zmqdist.all"
SHUTDOWN: Final = "zmqdist.shutdown"
"""The barrier at which tasks wait to shut down together. ALL_TASKS is the barrier of
`waited_for_all`."""

RETIRED_KEPT: Final = 8
"""How many earlier incarnations of a task are remembered, so that their late requests do not put
the current incarnation into error."""


@dataclass(frozen=True)
class CoordinationConfig:
    """The rules by which tasks count as lost, join and leave. Durations are in seconds.

    Attributes:
      heartbeat_timeout_s: the silence after which a task is in error. Tasks send four signs of life
        in this time.
      reconnect_grace_s: the time in which a task whose connection has ended may reconnect.
      shutdown_timeout_s: how long a task that shuts down waits until all other tasks shut down as
        well; 0 means that tasks do not wait.
      recoverable_jobs: the jobs whose tasks may fail and return. An error of such a task is
        reported to no other task.
      new_incarnation_may_return: whether a lost task of any job may register with a new incarnation
        without a reset.
      register_together: whether a registration waits until all tasks of the cluster have
        registered.
      register_timeout_s: the time after which a registration that waits in this way fails.
    """

    heartbeat_timeout_s: float = limits.LEASE_S
    reconnect_grace_s: float = limits.RECONNECT_GRACE_S
    shutdown_timeout_s: float = 0.0
    recoverable_jobs: frozenset[str] = frozenset()
    new_incarnation_may_return: bool = False
    register_together: bool = False
    register_timeout_s: float = limits.CLUSTER_LOST_LIMIT_S

    def __post_init__(self) -> None:
        check_fields(self)


class TaskError(NamedTuple):
    """An error of a task, in the form in which it is reported to other tasks. `number` counts the
    errors of all tasks from 1."""

    number: int
    task: Task
    code: int
    message: str


class TaskWelcome(NamedTuple):
    """The reply to a task that has registered, with the number of errors of all tasks so far."""

    errors_count: int


@dataclass(slots=True)
class TaskRecord:
    """The keeper's knowledge of one task. `state` is "missing", "joining", "up", "error" or "left".
    `code` and `message` describe the task's error, in state ERROR only."""

    task: Task
    state: str = MISSING
    incarnation: int = 0
    heard_at: float = 0.0
    away_until: float = inf  # the end of the task's grace; inf while it is connected
    # for a task that has left: the time until which its requests are accepted
    heard_until: float = -inf
    code: int = OK
    message: str = ""
    retired: list[int] = field(default_factory=list)  # earlier incarnations, at most RETIRED_KEPT
    devices: list[str] = field(default_factory=list)
    # the request to register that waits for its reply, in state JOINING only
    joining: Ticket = None


@dataclass(frozen=True, slots=True)
class _Poll:
    ticket: Ticket
    after: int
    until: float


class Coordination:
    """The states of the tasks of one cluster, and their waiting requests. A method for an event
    returns the replies that are to be sent.

    Attributes:
      deadline: the latest time for the next call of `ticked`; `inf` means never.
    """

    def __init__(self, tasks: Iterable[Task] | None, config: CoordinationConfig) -> None:
        """Make a table of all `tasks` of the cluster, in the cluster's order. With None, each task
        that registers becomes a member."""
        self._config = config
        self._open = tasks is None
        self._records = {task: TaskRecord(task) for task in tasks or ()}
        self._barriers = Barriers()
        self._own_waits: dict[Ticket, tuple[str, Task]] = {}
        """The barrier, SHUTDOWN or ALL_TASKS, and the task of each request that waits there."""
        self._errors: list[TaskError] = []
        self._errors_count = 0
        self._polls: dict[Task, _Poll] = {}
        self._alive: dict[frozenset[Task], dict[Task, Ticket]] = {}
        self._check_at = inf
        self._register_by = inf
        self._complete = not config.register_together

    # -- registration ------------------------------------------------------------------------------

    def registered(self, ticket: Ticket, task: Task, incarnation: int, now: float) -> list[Effect]:
        """Record that a task registers. The reply is a TaskWelcome. With `register_together` the
        reply waits for the other tasks."""
        record = self._records.get(task)
        if record is None and self._open:
            if len(self._records) >= limits.WORKERS_MAX:
                text = f"{limits.WORKERS_MAX} tasks are known here: no room for more"
                return [Fail(ticket, RESOURCE_EXHAUSTED, text)]
            record = self._records[task] = TaskRecord(task)
        if record is None:
            return [Fail(ticket, INVALID_ARGUMENT, self._not_in_cluster(task))]
        if incarnation in record.retired:  # P1: a later incarnation has registered
            return [
                Fail(
                    ticket,
                    ABORTED,
                    f"{task_name(task)} was restarted since: this incarnation of it is over",
                )
            ]
        reconnects = incarnation == record.incarnation
        if record.state == UP and reconnects:
            self._refresh(record, now)
            return [ReplyValue(ticket, TaskWelcome(self._errors_count))]
        effects: list[Effect] = []
        if record.state == UP and task[0] in self._config.recoverable_jobs:
            effects = self._lose(record, "it was restarted", now)
        elif record.state == UP:
            text = f"{task_name(task)} registered again as another incarnation, without a reset: it was restarted, or runs twice"
            return [*self._fail(record, ABORTED, text, now), Fail(ticket, ABORTED, text)]
        if record.state == ERROR and not self._may_return(record):
            # P1: the task may register only after a reset
            return [
                Fail(
                    ticket,
                    ABORTED,
                    f"{task_name(task)} is in error, and must be reset first: {record.message}",
                )
            ]
        return effects + self._join(record, ticket, incarnation, now)

    def beaten(self, ticket: Ticket, task: Task, incarnation: int, now: float) -> list[Effect]:
        """Record a sign of life. If the task is in error, the reply is the task's error."""
        record = self._records.get(task)
        if (
            record is None
            or record.state == MISSING
            or (record.state == LEFT and now > record.heard_until)
        ):
            text = (
                f"{task_name(task)} is not registered"
                if record is not None
                else self._not_in_cluster(task)
            )
            return [Fail(ticket, INVALID_ARGUMENT, text)]
        if record.state == ERROR:
            return [Fail(ticket, record.code, record.message)]
        if incarnation != record.incarnation:
            text = f"{task_name(task)} sent a sign of life as another incarnation than the registered one"
            # a late request of an earlier incarnation, or of a task that is not up, is no second
            # process
            is_harmless = incarnation in record.retired or record.state != UP
            return [
                *([] if is_harmless else self._fail(record, ABORTED, text, now)),
                Fail(ticket, ABORTED, text),
            ]
        self._refresh(record, now)
        return [ReplyValue(ticket)]

    def polled(
        self, ticket: Ticket, task: Task, incarnation: int, after: int, until: float, now: float
    ) -> list[Effect]:
        """Record that a task polls for errors, which is also a sign of life.

        The reply is a list of the TaskErrors with numbers above `after`, as soon as there are any.
        At `until` it is an empty list.
        """
        if problem := self._problem(task, incarnation, now):
            return [Fail(ticket, *problem)]
        record = self._records[task]
        if record.state == UP:
            self._refresh(record, now)
        effects: list[Effect] = []
        # P2: one poll of a task waits, so its earlier poll gets a reply now
        earlier = self._polls.pop(task, None)
        if earlier is not None:
            effects.append(
                Fail(earlier.ticket, CANCELLED, f"{task_name(task)} repeated this request")
            )
        errors = [error for error in self._errors if error.number > after]
        if errors:
            return [*effects, ReplyValue(ticket, errors)]
        self._polls[task] = _Poll(ticket, after, until)
        self._check_at = min(self._check_at, until)
        return effects

    def away(self, task: Task, incarnation: int, now: float) -> list[Effect]:
        """Record that the connection of a task has ended. The same incarnation may reconnect within
        its grace."""
        record = self._records.get(task)
        # the connection of an earlier incarnation says nothing about this one
        if record is not None and record.state == UP and record.incarnation == incarnation:
            record.away_until = now + self._config.reconnect_grace_s
            self._check_at = min(self._check_at, record.away_until)
        return []

    def is_away(self, task: Task, incarnation: int) -> bool:
        """Return whether this incarnation is disconnected but still within its grace."""
        return self.is_registered(task, incarnation) and self._records[task].away_until < inf

    def is_registered(self, task: Task, incarnation: int) -> bool:
        """Return whether this incarnation of the task is registered, and not in error."""
        record = self._records.get(task)
        return (
            record is not None
            and record.incarnation == incarnation
            and record.state in (UP, JOINING)
        )

    def lost(self, task: Task, incarnation: int, why: str, now: float) -> list[Effect]:
        """Record that the process of this incarnation has ended, so that the task is lost."""
        record = self._records.get(task)
        if record is None or record.state != UP or record.incarnation != incarnation:
            return []
        return self._lose(record, why, now)

    def reported(
        self, ticket: Ticket, task: Task, incarnation: int, code: int, message: str, now: float
    ) -> list[Effect]:
        """Record that a task reports its own failure."""
        problem = self._problem(task, incarnation, now)
        if problem is None and self._records[task].state != UP:
            problem = FAILED_PRECONDITION, f"{task_name(task)} has disconnected"
        if problem is not None:
            return [Fail(ticket, *problem)]
        return [
            *self._fail(
                self._records[task], code, f"{task_name(task)} reported an error: {message}", now
            ),
            ReplyValue(ticket),
        ]

    def reset(self, ticket: Ticket, task: Task, now: float) -> list[Effect]:
        """Forget the error of a task. The task may then register again, with the same incarnation
        or a new one."""
        if task not in self._records:
            return [Fail(ticket, INVALID_ARGUMENT, self._not_in_cluster(task))]
        return [*self._leave(self._records[task], "was reset", now), ReplyValue(ticket)]

    def left(
        self, ticket: Ticket, task: Task, incarnation: int, together: bool, now: float
    ) -> list[Effect]:
        """Record that a task shuts down. If `together` and the cluster has a `shutdown_timeout_s`,
        the reply waits for the other tasks."""
        problem = self._problem(task, incarnation, now)
        if problem is not None and problem[0] != FAILED_PRECONDITION:
            return [Fail(ticket, *problem)]
        record = self._records[task]
        if record.state != UP or not together or not self._config.shutdown_timeout_s:
            return [*self._leave(record, "has shut down", now), ReplyValue(ticket)]
        members = self._barriers.tasks_of(SHUTDOWN) or frozenset(
            record.task for record in self._records.values() if record.state not in (ERROR, LEFT)
        )
        counter = self._barriers.next_counter(SHUTDOWN)
        due = now + self._config.shutdown_timeout_s
        self._own_waits[ticket] = SHUTDOWN, task
        return self._to_callers(
            self._barriers.arrived(ticket, SHUTDOWN, counter, task, members, due), now
        )

    # -- barriers, and requests about other tasks --------------------------------------------------

    def barrier(
        self,
        ticket: Ticket,
        task: Task,
        incarnation: int,
        name: str,
        counter: int,
        tasks: Iterable[Task] | None,
        due: float,
        now: float,
    ) -> list[Effect]:
        """Record that a task calls a barrier. The reply is a RoundOutcome, or an error if the task
        may not make requests.

        Args:
          tasks: the tasks of the barrier. None means all tasks of the cluster.
        """
        problem = self._problem(task, incarnation, now)
        if problem is not None and not (
            task in self._records and self._records[task].state == ERROR
        ):
            return [Fail(ticket, *problem)]
        if tasks is None and self._open:
            return [
                Fail(
                    ticket,
                    INVALID_ARGUMENT,
                    f"barrier {name!r}: name its tasks, because this cluster has no list of them",
                )
            ]
        members = frozenset(self._records if tasks is None else tasks)
        effects = self._barriers.arrived(
            ticket, name, counter, task, members, due, self._problem_of_barrier(name, task, members)
        )
        return self._to_callers(effects, now)

    def barrier_cancelled(
        self, ticket: Ticket, name: str, counter: int, task: Task, now: float
    ) -> list[Effect]:
        """Record that a task requests to cancel a round of a barrier for all tasks."""
        return self._to_callers(self._barriers.cancelled(ticket, name, counter, task), now)

    def missing(self, name: str) -> list[Task]:
        """Return the tasks that have not called this barrier yet in its current round."""
        return self._barriers.missing(name)

    def waited_for_all(
        self,
        ticket: Ticket,
        task: Task,
        incarnation: int,
        devices: list[str],
        due: float,
        now: float,
    ) -> list[Effect]:
        """Record that a task has called `wait_for_all`. When all tasks have called, the reply has
        the devices of all tasks, in order."""
        if problem := self._problem(task, incarnation, now):
            return [Fail(ticket, *problem)]
        self._records[task].devices = list(devices)
        all_tasks = frozenset(self._records)
        problem = self._problem_of_barrier(ALL_TASKS, task, all_tasks)
        counter = self._barriers.next_counter(ALL_TASKS)
        self._own_waits[ticket] = ALL_TASKS, task
        return self._to_callers(
            self._barriers.arrived(ticket, ALL_TASKS, counter, task, all_tasks, due, problem), now
        )

    def alive_requested(
        self, ticket: Ticket, task: Task, incarnation: int, tasks: Iterable[Task] | None, now: float
    ) -> list[Effect]:
        """Record that a task asks which of `tasks` are alive. The reply waits until each of `tasks`
        that is alive has asked, too (P5)."""
        if problem := self._problem(task, incarnation, now):
            return [Fail(ticket, *problem)]
        members = frozenset(self._records if tasks is None else tasks)
        strangers = members - self._records.keys()
        if strangers:
            return [Fail(ticket, INVALID_ARGUMENT, self._not_in_cluster(min(strangers)))]
        if task not in members:
            return [
                Fail(
                    ticket,
                    INVALID_ARGUMENT,
                    f"{task_name(task)} is none of {task_names(sorted(members))}, whose states it "
                    f"requests",
                )
            ]
        waiting = self._alive.setdefault(members, {})
        effects: list[Effect] = []
        if task in waiting:
            effects.append(
                Fail(waiting[task], CANCELLED, f"{task_name(task)} repeated this request")
            )
        waiting[task] = ticket
        return effects + self._reply_alive()

    def states(self, jobs: Iterable[str] | None = None) -> list[TaskRecord]:
        """Return the records of all tasks, or of the tasks of some jobs, in the order of the
        cluster. The caller must not change them."""
        names = None if jobs is None else set(jobs)
        return [
            record for record in self._records.values() if names is None or record.task[0] in names
        ]

    # -- time, and the end of callers --------------------------------------------------------------

    @property
    def deadline(self) -> float:
        return min(self._check_at, self._barriers.deadline, self._register_by)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a reply."""
        joining = sum(record.state == JOINING for record in self._records.values())
        return (
            self._barriers.waiting
            + len(self._polls)
            + sum(map(len, self._alive.values()))
            + joining
        )

    @property
    def open_barriers(self) -> dict[str, list[Task]]:
        """The barriers at which tasks wait, each with the tasks that have not called the barrier
        yet."""
        return {name: self._barriers.missing(name) for name in self._barriers.open}

    def ticked(self, now: float) -> list[Effect]:
        """End the waits whose deadline has come, and fail the tasks whose sign of life is
        overdue.
        """
        effects = self._to_callers(self._barriers.ticked(now), now)
        if now >= self._register_by:
            effects += self._give_up_joining()
        if now >= self._check_at:
            effects += self._check(now)
        return effects

    def dropped(self, ticket: Ticket) -> list[Effect]:
        """Record that the caller with this ticket does not wait for the reply any more."""
        self._barriers.dropped(ticket)
        self._own_waits.pop(ticket, None)
        for task, poll in self._polls.items():
            if poll.ticket == ticket:
                del self._polls[task]
                break
        for record in self._records.values():
            if record.state == JOINING and record.joining == ticket:
                record.state, record.joining = MISSING, None
        for waiting in self._alive.values():
            for task in [task for task, waiter in waiting.items() if waiter == ticket]:
                del waiting[task]
        self._alive = {tasks: waiting for tasks, waiting in self._alive.items() if waiting}
        return []

    def stopped(self, why: str, now: float) -> list[Effect]:
        """Fail all waiting requests with CANCELLED, because the keeper stops."""
        effects = self._to_callers(self._barriers.stopped(why), now)
        effects += [Fail(poll.ticket, CANCELLED, why) for poll in self._polls.values()]
        effects += [
            Fail(ticket, CANCELLED, why)
            for waiting in self._alive.values()
            for ticket in waiting.values()
        ]
        self._polls, self._alive = {}, {}
        return effects + self._end_joining(CANCELLED, why)

    def _problem(self, task: Task, incarnation: int, now: float) -> tuple[int, str] | None:
        """Return (code, text) if this task may not make requests, or None if it may."""
        record = self._records.get(task)
        if record is None:
            return INVALID_ARGUMENT, self._not_in_cluster(task)
        if record.state in (MISSING, JOINING):
            return FAILED_PRECONDITION, f"{task_name(task)} has not been registered"
        if incarnation != record.incarnation:
            return (
                ABORTED,
                f"{task_name(task)} calls as another incarnation than the registered one",
            )
        if record.state == LEFT and now > record.heard_until:
            return FAILED_PRECONDITION, f"{task_name(task)} has disconnected"
        if record.state == ERROR:
            return FAILED_PRECONDITION, record.message
        return None

    def _problem_of_barrier(
        self, name: str, task: Task, members: frozenset[Task]
    ) -> tuple[int, str] | None:
        """Return (code, text) if a barrier of these tasks cannot pass, or None if it can."""
        strangers = members - self._records.keys()
        if strangers:
            return INVALID_ARGUMENT, f"barrier {name!r}: {self._not_in_cluster(min(strangers))}"
        for record in (self._records[member] for member in sorted(members | {task})):
            if record.state == ERROR:
                return INTERNAL, f"barrier {name!r} failed: {record.message}"
            if record.state == LEFT:
                return INTERNAL, f"barrier {name!r} failed: {task_name(record.task)} has left"
        return None

    def _join(
        self, record: TaskRecord, ticket: Ticket, incarnation: int, now: float
    ) -> list[Effect]:
        effects: list[Effect] = []
        if record.state == JOINING:
            effects.append(
                Fail(
                    record.joining, ABORTED, f"{task_name(record.task)} registered again meanwhile"
                )
            )
        if record.incarnation and record.incarnation != incarnation:
            # P1: by this list late requests of the earlier incarnation are recognised
            record.retired = [*record.retired, record.incarnation][-RETIRED_KEPT:]
            self._barriers.restarted(record.task)
        record.incarnation, record.code, record.message, record.devices = incarnation, OK, "", []
        self._refresh(record, now)
        if self._complete:
            record.state = UP
            return [*effects, ReplyValue(ticket, TaskWelcome(self._errors_count))]
        record.state, record.joining = JOINING, ticket
        self._register_by = min(self._register_by, now + self._config.register_timeout_s)
        if all(member.state == JOINING for member in self._records.values()):
            self._complete, self._register_by = True, inf
            for member in self._records.values():
                effects.append(ReplyValue(member.joining, TaskWelcome(self._errors_count)))
                member.state, member.joining = UP, None
                self._refresh(member, now)
        return effects

    def _give_up_joining(self) -> list[Effect]:
        self._register_by = inf
        joining = [record for record in self._records.values() if record.state == JOINING]
        missing = task_names(
            record.task for record in self._records.values() if record.state != JOINING
        )
        text = f"{len(joining)}/{len(self._records)} tasks registered in time; missing: {missing}"
        return self._end_joining(DEADLINE_EXCEEDED, text)

    def _end_joining(self, code: int, text: str) -> list[Effect]:
        """Fail the registrations that wait for other tasks."""
        effects: list[Effect] = []
        for record in self._records.values():
            if record.state == JOINING:
                effects.append(Fail(record.joining, code, text))
                record.state, record.joining = MISSING, None
        return effects

    def _may_return(self, record: TaskRecord) -> bool:
        """Return whether a task in error may register again without a reset."""
        recovers = (
            record.task[0] in self._config.recoverable_jobs
            or self._config.new_incarnation_may_return
        )
        return record.code == UNAVAILABLE and recovers

    def _refresh(self, record: TaskRecord, now: float) -> None:
        record.heard_at, record.away_until = now, inf
        self._check_at = min(self._check_at, now + self._config.heartbeat_timeout_s)

    def _check(self, now: float) -> list[Effect]:
        """Fail the tasks whose sign of life or reconnection is overdue, and end the polls whose
        time has come."""
        effects: list[Effect] = []
        timeout_s = self._config.heartbeat_timeout_s
        for record in list(self._records.values()):
            if record.state != UP:
                continue
            if record.away_until <= now:
                effects += self._lose(record, "its connection ended and it did not come back", now)
            elif record.heard_at + timeout_s <= now:
                effects += self._lose(record, f"nothing was heard of it for {timeout_s:g} s", now)
        for task, poll in list(self._polls.items()):
            if poll.until <= now:
                del self._polls[task]
                effects.append(ReplyValue(poll.ticket, []))
        times = [
            min(r.heard_at + timeout_s, r.away_until)
            for r in self._records.values()
            if r.state == UP
        ]
        self._check_at = min([*times, *(poll.until for poll in self._polls.values())], default=inf)
        return effects

    def _lose(self, record: TaskRecord, why: str, now: float) -> list[Effect]:
        return self._fail(record, UNAVAILABLE, f"{task_name(record.task)} is lost: {why}", now)

    def _fail(self, record: TaskRecord, code: int, message: str, now: float) -> list[Effect]:
        """Put a task into error, and end its barriers. All polls get the error, or only the poll of
        this task if its job may recover."""
        record.state, record.code, record.message, record.away_until = ERROR, code, message, inf
        effects = self._to_callers(self._barriers.task_failed(record.task, message), now)
        effects += self._reply_alive()
        self._errors_count += 1
        error = TaskError(self._errors_count, record.task, code, message)
        recovers = record.task[0] in self._config.recoverable_jobs
        # P4: an error of a job that may recover concerns the task alone
        if not recovers:
            self._errors = [*self._errors, error][-limits.TASK_ERRORS_KEPT :]
        for task in [record.task] if recovers else list(self._polls):
            poll = self._polls.pop(task, None)
            if poll is not None:
                effects.append(ReplyValue(poll.ticket, [error]))
        return effects

    def _leave(self, record: TaskRecord, how: str, now: float) -> list[Effect]:
        if record.state in (MISSING, LEFT):
            return []
        effects: list[Effect] = []
        if record.state == JOINING:
            effects.append(Fail(record.joining, CANCELLED, f"{task_name(record.task)} {how}"))
            record.joining = None
        # requests that the task sent before it left may still arrive
        record.state, record.heard_until = LEFT, now + self._config.heartbeat_timeout_s
        record.away_until = inf
        effects += self._to_callers(
            self._barriers.task_failed(record.task, f"{task_name(record.task)} {how}"), now
        )
        return effects + self._reply_alive()

    def _to_callers(self, effects: list[Effect], now: float) -> list[Effect]:
        """Return `effects`, but replace the outcomes of the barriers SHUTDOWN and ALL_TASKS by the
        replies that the callers expect."""
        outgoing: list[Effect] = []
        leaving: list[tuple[Ticket, Task, RoundOutcome]] = []
        for effect in effects:
            name, task = self._own_waits.pop(effect.ticket, ("", None))
            if task is None or isinstance(effect, Fail):
                outgoing.append(effect)
            elif name == SHUTDOWN:
                leaving.append((effect.ticket, task, effect.value))
            elif effect.value.code == OK:
                devices = [device for record in self._records.values() for device in record.devices]
                outgoing.append(ReplyValue(effect.ticket, devices))
            else:
                outgoing.append(Fail(effect.ticket, effect.value.code, effect.value.message))
        return outgoing + self._end_shutdown(leaving, now)

    def _end_shutdown(
        self, leaving: list[tuple[Ticket, Task, RoundOutcome]], now: float
    ) -> list[Effect]:
        """Let the tasks that waited at the barrier SHUTDOWN leave. If the round has failed, put the
        tasks that are still up into error."""
        effects: list[Effect] = []
        failed = None
        for ticket, task, outcome in leaving:
            if outcome.code != CANCELLED:
                # a CANCELLED task stays: the keeper stops, or the task has called again
                effects += self._leave(self._records[task], "has shut down", now)
            if outcome.code == OK:
                effects.append(ReplyValue(ticket))
            else:
                effects.append(Fail(ticket, outcome.code, outcome.message))
                if outcome.code != CANCELLED:
                    failed = failed or outcome
        if failed is not None:
            for record in [record for record in self._records.values() if record.state == UP]:
                effects += self._fail(
                    record,
                    INTERNAL,
                    f"{task_name(record.task)} did not shut down with the others: {failed.message}",
                    now,
                )
        return effects

    def _reply_alive(self) -> list[Effect]:
        effects: list[Effect] = []
        for tasks, waiting in list(self._alive.items()):
            for task in [task for task in waiting if self._records[task].state != UP]:
                effects.append(
                    Fail(
                        waiting.pop(task),
                        FAILED_PRECONDITION,
                        f"{task_name(task)} is not alive itself",
                    )
                )
            alive = [task for task in sorted(tasks) if self._records[task].state == UP]
            # P5: the last task of the set that is alive has asked, or no task waits any more
            if not waiting or len(waiting) == len(alive):
                del self._alive[tasks]
                effects += [ReplyValue(ticket, alive) for ticket in waiting.values()]
        return effects

    def _not_in_cluster(self, task: Task) -> str:
        return f"{task_name(task)} is not in the cluster, which has {task_names(self._records)}"
