"""Barriers: points at which tasks wait until all tasks of a set have arrived. No I/O.

Theory of operation
    A barrier has a name and can be used any number of times. Each use is a round with a number. In
    its call a task names the number of its round: the round after the last round whose end the task
    has seen. By this number the machine detects a restarted task, which counts rounds from 0 again.
    The current round then fails for all tasks, or the next round if no round is current. After that
    all tasks are in step again, in whatever order they called.
    The first caller begins a round, and decides which tasks belong to the round and when it times
    out. A round ends once, in the same way for all of its tasks: it passes, or fails with an error.
    A task that calls a round after its end gets the outcome at once, and continues with the next
    round.

    A task that does not know the round of the other tasks names no round (None), and joins the
    current round. In this way a group of collectives continues after an error, and takes in a
    restarted member (tasks/agreement_machine.py).

    A barrier never blocks: each call has a ticket, which gets a RoundOutcome when the round ends. A
    caller that disconnects before the round ends (`dropped`) no longer counts as arrived. If all
    callers of a round have disconnected, the round counts as not begun.

Promises, checked by tests/coordination/test_machine.py
    P1  a round passes only when all of its tasks wait in it at the same time
    P2  all callers of a round get the same outcome, but if a task calls a round twice, its first
        call gets CANCELLED
    P3  each ticket gets one outcome or is dropped, and no state of the ticket is kept after that
    P4  a round ends at the latest at its deadline. This is the deadline of the first caller that
        names one, even if a later caller names an earlier deadline; with `earliest_deadline` it is
        the earliest deadline of all callers
    P5  a restarted task never passes a round in the place of its earlier incarnation, unless it
        names no round
    P6  the table has at most `names_max` names; to make room it forgets the least recently used
        name at which no caller waits, and the rounds of a forgotten name may begin with any number

Not here: whether a task is alive (machine.py calls `task_failed`), and clocks.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import msgspec

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
    CANCELLED,
    DEADLINE_EXCEEDED,
    FAILED_PRECONDITION,
    INTERNAL,
    INVALID_ARGUMENT,
    OK,
    RESOURCE_EXHAUSTED,
)
from zmqdist.limits import BARRIERS_MAX


class RoundOutcome(NamedTuple):
    """The outcome of a round. `counter` is the number of the last round that has ended. The
    caller's next round has the next number."""

    code: int
    message: str
    counter: int


class _Round(msgspec.Struct):
    counter: int | None
    """The number of the round. In the first round of a barrier it is None until a caller names a
    number."""
    tasks: frozenset[Task]
    first: Task  # the first caller, which error texts name
    due: float
    arrived: dict[Task, Ticket] = msgspec.field(default_factory=dict)


class _Barrier(msgspec.Struct):
    """A barrier: its name, its last round and its current round.

    Attributes:
      title: the description of the barrier in error texts.
      tasks, last: the tasks of the last round that has ended, and its outcome; None before the end
        of the first round.
      round: the round in which callers wait; None while no caller waits.
      late: for each task that had not called a round when the round failed: the outcome of the
        round, until the task has got it.
    """

    name: str
    title: str
    tasks: frozenset[Task] = frozenset()
    last: RoundOutcome | None = None
    round: _Round | None = None
    late: dict[Task, RoundOutcome] = msgspec.field(default_factory=dict)
    restarted: set[Task] = msgspec.field(default_factory=set)
    """The tasks of the last round that were restarted after its end, so that their present
    incarnations have not passed the round."""


class Barriers:
    """All barriers of a keeper or leader; the module's docstring has the rules.

    *Invariant*: `_by_ticket` has exactly the callers that wait in current rounds.

    Attributes:
      deadline: the latest time for the next call of `ticked`; `inf` means never.
    """

    def __init__(
        self,
        names_max: int = BARRIERS_MAX,
        earliest_deadline: bool = False,
        out_of_step: int = INTERNAL,
    ) -> None:
        """Create a table without barriers.

        Args:
          earliest_deadline: whether a later caller with an earlier deadline shortens the round. If
            False, the first deadline holds.
          out_of_step: the code with which a round ends if its tasks called the barrier with
            different numbers.
        """
        self.deadline = inf
        self._earliest_deadline = earliest_deadline
        self._code_out_of_step = out_of_step
        self._names_max = names_max
        self._barriers: dict[str, _Barrier] = {}
        self._by_ticket: dict[Ticket, tuple[_Barrier, Task]] = {}

    def next_counter(self, name: str) -> int:
        """Return the number of the barrier's current round, or of its next round if no round is
        current."""
        barrier = self._barriers.get(name)
        if barrier is None:
            return 0
        if barrier.round is not None and barrier.round.counter is not None:
            return barrier.round.counter
        return 0 if barrier.last is None else barrier.last.counter + 1

    def missed_failure(self, name: str, task: Task) -> bool:
        """Return whether a round of this task has failed before the task called it, and the task
        has not got the round's error yet."""
        barrier = self._barriers.get(name)
        return barrier is not None and task in barrier.late

    def is_over(self, name: str, counter: int, task: Task) -> bool:
        """Return whether this round is over: it has ended, or a later round has begun. If so,
        `task` counts as notified of the end."""
        barrier = self._barriers.get(name)
        if barrier is None or not self._is_past(barrier, counter):
            return False
        if task in barrier.late and barrier.late[task].counter <= counter:
            del barrier.late[task]
        return True

    def tasks_of(self, name: str) -> frozenset[Task]:
        """Return the tasks of the barrier's current round; an empty set if no round is current."""
        barrier = self._barriers.get(name)
        return frozenset() if barrier is None or barrier.round is None else barrier.round.tasks

    def arrived(
        self,
        ticket: Ticket,
        name: str,
        counter: int | None,
        task: Task,
        tasks: frozenset[Task],
        due: float = inf,
        problem: tuple[int, str] | None = None,
        title: str = "",
    ) -> list[Effect]:
        """Record that a task calls a barrier.

        Args:
          counter: the number of the caller's round. None means the current round, or the next round
            if no round is current.
          tasks: the tasks that must call, including the caller.
          due: when the caller stops waiting.
          problem: (code, text) if the round cannot pass, so that it fails for all tasks; None if it
            can.
          title: a description of the barrier in error texts, in place of its name. Only the title
            of a round's first call is used.
        """
        barrier = self._barriers.get(name)
        if barrier is None:
            if not self._make_room():
                return [
                    Fail(
                        ticket,
                        RESOURCE_EXHAUSTED,
                        f"tasks wait at {self._names_max} barriers already: no room for {name!r}",
                    )
                ]
            barrier = self._barriers[name] = _Barrier(name, title or f"barrier {name!r}")
        current = barrier.round
        late = barrier.late.get(task)
        if late is not None and (counter is None or counter <= late.counter):
            del barrier.late[task]
            if counter is not None:
                # the task gets the outcome of its round, which has failed without this task (P2)
                return [ReplyValue(ticket, late)]
        if current is None:
            last = barrier.last
            if last is not None and counter is not None and counter != last.counter + 1:
                # A caller is behind if it names a round before the last round, or names the last
                # round but was restarted after that round.
                if counter > last.counter or (
                    counter == last.counter and task not in barrier.restarted
                ):
                    # Forget the outcome that is kept for the task, because the reply below also
                    # shows that the last round has ended.
                    barrier.late.pop(task, None)
                    return [ReplyValue(ticket, self._past(barrier, last, counter, task))]
                # The task is behind, so the next round fails for all tasks (P5). After that all
                # tasks are at the same round again.
                problem = problem or (
                    self._code_out_of_step,
                    self._out_of_step(barrier, last, counter, task),
                )
            # the next line inserts the name again, as the most recently used name (P6)
            del self._barriers[name]
            self._barriers[name] = barrier
            barrier.title = title or barrier.title
            counter = counter if last is None else last.counter + 1
            current = barrier.round = _Round(counter, tasks, task, inf)
        elif current.counter is None:
            current.counter = counter
        problem = problem or self._misfit(barrier, current, counter, task, tasks)
        effects = self._join(barrier, current, ticket, task, due)
        if problem is not None:
            return effects + self._end(barrier, *problem)
        if len(current.arrived) == len(current.tasks):
            # all tasks of the round wait at the same time (P1)
            return effects + self._end(barrier, OK, "")
        return effects

    def cancelled(self, ticket: Ticket, name: str, counter: int, task: Task) -> list[Effect]:
        """End a round with CANCELLED for all tasks, because this task requests the cancellation."""
        barrier = self._barriers.get(name)
        current = barrier.round if barrier is not None else None
        if barrier is None or current is None or current.counter != counter:
            state = (
                "has passed or failed"
                if barrier is not None and barrier.last and barrier.last.counter == counter
                else "is not the current one"
            )
            return [
                Fail(
                    ticket,
                    FAILED_PRECONDITION,
                    f"round {counter} of barrier {name!r} {state}: nothing to cancel",
                )
            ]
        return [
            *self._end(barrier, CANCELLED, f"{barrier.title} was cancelled by {task_name(task)}"),
            ReplyValue(ticket),
        ]

    def failed(self, name: str, code: int, message: str) -> list[Effect]:
        """End the barrier's current round with this error. Without a current round, do nothing."""
        barrier = self._barriers.get(name)
        return [] if barrier is None or barrier.round is None else self._end(barrier, code, message)

    def task_failed(self, task: Task, why: str, code: int = INTERNAL) -> list[Effect]:
        """Record that a task can call no barrier any more, and end the current rounds to which the
        task belongs."""
        effects: list[Effect] = []
        for barrier in self._waited_at():
            if barrier.round is not None and task in barrier.round.tasks:
                effects += self._end(barrier, code, f"{barrier.title} failed: {why}")
        return effects

    def forgotten(self, name: str) -> None:
        """Forget the past rounds of a barrier. Call this only while no caller waits at it."""
        self._barriers.pop(name, None)

    def restarted(self, task: Task) -> None:
        """Record that a task has a new incarnation, which knows nothing of the rounds that the
        earlier incarnation has passed."""
        for barrier in self._barriers.values():
            barrier.late.pop(task, None)
            if task in barrier.tasks:
                barrier.restarted.add(task)

    def dropped(self, ticket: Ticket) -> None:
        """Record that the caller with this ticket does not wait any more."""
        barrier, task = self._by_ticket.pop(ticket, (None, None))
        if barrier is None or barrier.round is None or task is None:
            return
        del barrier.round.arrived[task]
        if not barrier.round.arrived:
            # no caller waits in the round any more, so it counts as not begun
            barrier.round = None
            if barrier.last is None and not barrier.late:
                del self._barriers[barrier.name]

    def ticked(self, now: float) -> list[Effect]:
        """End the rounds whose deadline has come."""
        effects: list[Effect] = []
        if now < self.deadline:
            return effects
        for barrier in self._waited_at():
            if barrier.round is not None and barrier.round.due <= now:
                effects += self._end(
                    barrier, DEADLINE_EXCEEDED, self._overdue(barrier, barrier.round)
                )
        self.deadline = min(
            (b.round.due for b in self._waited_at() if b.round is not None), default=inf
        )
        return effects

    def stopped(self, why: str) -> list[Effect]:
        """End all rounds with CANCELLED, because the keeper of these barriers stops."""
        return [
            effect for barrier in self._waited_at() for effect in self._end(barrier, CANCELLED, why)
        ]

    def tickets(self, name: str) -> list[Ticket]:
        """Return the tickets of the callers that wait at this barrier."""
        barrier = self._barriers.get(name)
        return (
            [] if barrier is None or barrier.round is None else list(barrier.round.arrived.values())
        )

    def missing(self, name: str) -> list[Task]:
        """Return the tasks that have not called the current round of a barrier yet."""
        barrier = self._barriers.get(name)
        if barrier is None or barrier.round is None:
            return []
        return sorted(barrier.round.tasks - barrier.round.arrived.keys())

    @property
    def open(self) -> list[str]:
        """The names of the barriers at which a caller waits."""
        return [barrier.name for barrier in self._waited_at()]

    @property
    def waiting(self) -> int:
        """The number of callers that wait at barriers."""
        return len(self._by_ticket)

    # -- one round ---------------------------------------------------------------------------------

    def _join(
        self, barrier: _Barrier, current: _Round, ticket: Ticket, task: Task, due: float
    ) -> list[Effect]:
        effects: list[Effect] = []
        earlier = current.arrived.get(task)
        if earlier is not None:  # the second call of a task replaces its first call (P2)
            del self._by_ticket[earlier]
            text = f"{task_name(task)} called {barrier.title} again while this call waited"
            effects = [
                ReplyValue(earlier, RoundOutcome(CANCELLED, text, (current.counter or 0) - 1))
            ]
        current.arrived[task] = ticket
        self._by_ticket[ticket] = barrier, task
        if self._earliest_deadline or current.due == inf:  # otherwise the first deadline holds (P4)
            current.due = min(current.due, due)
            self.deadline = min(self.deadline, due)
        return effects

    def _misfit(
        self,
        barrier: _Barrier,
        current: _Round,
        counter: int | None,
        task: Task,
        tasks: frozenset[Task],
    ) -> tuple[int, str] | None:
        """Return None if this call fits the current round, otherwise the (code, text) with which
        the round must fail for all tasks."""
        if counter is not None and counter != current.counter:
            return self._code_out_of_step, (
                f"{task_name(task)} came to round {counter} of {barrier.title}, the others to "
                f"round {current.counter}: was the task restarted?"
            )
        if task not in current.tasks:
            return INVALID_ARGUMENT, (
                f"{task_name(task)} called {barrier.title}, which is for "
                f"{task_names(sorted(current.tasks))}"
            )
        if tasks != current.tasks:
            return INVALID_ARGUMENT, (
                f"{task_name(current.first)} called {barrier.title} for "
                f"{task_names(sorted(current.tasks))}, "
                f"{task_name(task)} for {task_names(sorted(tasks))}"
            )
        return None

    @staticmethod
    def _is_past(barrier: _Barrier, counter: int) -> bool:
        current = barrier.round
        if current is not None and current.counter is not None and counter < current.counter:
            # The current round has a later number, so `counter` is past, even if this object has
            # seen no round of the barrier end.
            return True
        return barrier.last is not None and counter <= barrier.last.counter

    def _out_of_step(self, barrier: _Barrier, last: RoundOutcome, counter: int, task: Task) -> str:
        return (
            f"{task_name(task)} came to round {counter} of {barrier.title}, but its last round was "
            f"{last.counter}: was the task restarted?"
        )

    def _past(
        self, barrier: _Barrier, last: RoundOutcome, counter: int, task: Task
    ) -> RoundOutcome:
        """Return the outcome of the last round if the call names that round. If it names a later
        round than the next, return an error."""
        if counter != last.counter:
            text = self._out_of_step(barrier, last, counter, task)
            return RoundOutcome(self._code_out_of_step, text, last.counter)
        if task not in barrier.tasks:
            return RoundOutcome(
                INVALID_ARGUMENT,
                f"{task_name(task)} called {barrier.title}, which was for "
                f"{task_names(sorted(barrier.tasks))}",
                counter,
            )
        return last

    def _end(self, barrier: _Barrier, code: int, message: str) -> list[Effect]:
        """End the current round, reply to its callers, and keep the outcome for the tasks of the
        round that have not called."""
        current = barrier.round
        assert current is not None
        barrier.round = None
        outcome = barrier.last = RoundOutcome(code, message, current.counter or 0)
        barrier.tasks = current.tasks
        barrier.restarted.clear()
        for task in current.tasks:
            if code == OK or task in current.arrived:
                barrier.late.pop(task, None)
            else:
                barrier.late[task] = outcome
        for ticket in current.arrived.values():
            del self._by_ticket[ticket]
        return [ReplyValue(ticket, outcome) for ticket in current.arrived.values()]

    def _overdue(self, barrier: _Barrier, current: _Round) -> str:
        missing = task_names(sorted(current.tasks - current.arrived.keys()))
        return (
            f"{barrier.title} timed out: {len(current.arrived)}/{len(current.tasks)} tasks came, "
            f"the first was {task_name(current.first)}; missing: {missing}"
        )

    # -- the table ---------------------------------------------------------------------------------

    def _waited_at(self) -> list[_Barrier]:
        return list({id(barrier): barrier for barrier, _ in self._by_ticket.values()}.values())

    def _make_room(self) -> bool:
        if len(self._barriers) < self._names_max:
            return True
        # The dict is in the order of use, so this is the least recently used name (P6).
        unused = next(
            (name for name, barrier in self._barriers.items() if barrier.round is None), None
        )
        if unused is None:
            return False
        del self._barriers[unused]
        return True
