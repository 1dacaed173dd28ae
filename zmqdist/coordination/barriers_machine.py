"""Barriers: a set of tasks of which nobody goes on before all have come.

Theory of operation
    A barrier has a name, and is used as often as one likes: each use is a round with a number. A task says which round it means: one
    more than the last one whose end it has seen. So a task that was started again, and would meet the others at the wrong place, is
    found out, and the round fails for all: the one that is on, else the next, so that all are in step again after it, whoever came first.
    A round begins with its first caller, which says who belongs to it, and until when. It ends once, for all of its tasks alike:
    passed, or with an error. Those who come late get that error at once, and go on with the next round.

    A task that does not know where the others are, and may meet them anywhere, names no round: it is taken into the one that is on. That
    is how a group of collectives goes on after an error, and with a member that has begun another life (tasks/agreement_machine.py).

    A barrier never blocks: a caller is a ticket, which is given its RoundOutcome when the round ends. A caller that went away before
    (`dropped`) has not come; a round that all have left again has not begun.

Promises, checked by tests/machines/test_barriers.py
    P1  a round passes only when all of its tasks wait in it at that moment
    P2  all callers of a round get the same outcome; but who calls twice gets CANCELLED for the first call
    P3  each ticket gets one outcome, or is dropped; nothing is left of it then
    P4  a round with a deadline ends by it: the first that a caller gives, or the earliest of all, as this table was told
    P5  a task that was started again never passes a round in the place of its former life, unless it names no round
    P6  at most `names_max` names are known; the longest unused that nobody waits at is forgotten, and then begins with any number

Not here: whether a task lives (machine.py says `task_failed`), and clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from zmqdist.coordination.answers import Answer, Effect, Fail, Task, Ticket, listed, named
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
    """What a caller gets. `counter` is the number of the last round that has ended: it goes on with the next one."""

    code: int
    message: str
    counter: int


@dataclass(slots=True)
class _Round:
    counter: int | None
    """None while no caller has named a number, at a barrier of which nothing is known."""
    tasks: frozenset[Task]
    first: Task
    due: float
    came: dict[Task, Ticket] = field(default_factory=dict)


@dataclass(slots=True)
class _Barrier:
    """A name.

    Attributes:
      counter: number of the last round that has ended; None before the first.
      title: what error texts call it.
      tasks, code, message: of that round.
      round: the one in which somebody waits.
      late: tasks that have not heard yet that a round has failed without them, with its outcome.
    """

    name: str
    title: str
    counter: int | None = None
    tasks: frozenset[Task] = frozenset()
    code: int = OK
    message: str = ""
    round: _Round | None = None
    late: dict[Task, RoundOutcome] = field(default_factory=dict)
    restarted: set[Task] = field(default_factory=set)
    """Tasks of the last round that have begun another life since: they did not pass it."""


class Barriers:
    """See the module's docstring.

    Attributes:
      deadline: `ticked` must be called then at the latest; `inf` for never.
    """

    def __init__(
        self, names_max: int = BARRIERS_MAX, earliest_deadline: bool = False, out_of_step: int = INTERNAL
    ) -> None:
        """Args:
        earliest_deadline: a later caller, too, may say that a round must end; else the first deadline of a round stays.
        out_of_step: the code that ends a round to which a task came with another number than the others.
        """
        self.deadline = inf
        self._earliest_deadline = earliest_deadline
        self._code_out_of_step = out_of_step
        self._names_max = names_max
        self._barriers: dict[str, _Barrier] = {}
        self._by_ticket: dict[Ticket, tuple[_Barrier, Task]] = {}

    def next_counter(self, name: str) -> int:
        """The number of the round that is on, or would be the next."""
        barrier = self._barriers.get(name)
        if barrier is None:
            return 0
        if barrier.round is not None and barrier.round.counter is not None:
            return barrier.round.counter
        return 0 if barrier.counter is None else barrier.counter + 1

    def owes(self, name: str, task: Task) -> bool:
        """Whether a round has failed without this task, which has not been told yet."""
        barrier = self._barriers.get(name)
        return barrier is not None and task in barrier.late

    def is_over(self, name: str, counter: int, task: Task) -> bool:
        """Whether this round has ended: a later one is on, or has ended. If so this task counts as told of it."""
        barrier = self._barriers.get(name)
        if barrier is None or not self._is_past(barrier, counter):
            return False
        if task in barrier.late and barrier.late[task].counter <= counter:
            del barrier.late[task]
        return True

    def tasks_of(self, name: str) -> frozenset[Task]:
        """For whom the round is that is on; empty when none is."""
        barrier = self._barriers.get(name)
        return frozenset() if barrier is None or barrier.round is None else barrier.round.tasks

    def came(
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
        """A task calls a barrier.

        Args:
          counter: the round that it means; None: the one that is on, or the next.
          tasks: who must come, itself included.
          due: until when it would wait.
          problem: why the round cannot pass (code, text): then it fails for all.
          title: what error texts call a round that begins with this call, in place of the barrier's name.
        """
        barrier = self._barriers.get(name)
        if barrier is None:
            if not self._make_room():
                text = f"{self._names_max} barriers are waited at: no room for {name!r}"
                return [Fail(ticket, RESOURCE_EXHAUSTED, text)]
            barrier = self._barriers[name] = _Barrier(name, title or f"barrier {name!r}")
        current = barrier.round
        late = barrier.late.get(task)
        if late is not None and (counter is None or counter <= late.counter):
            del barrier.late[task]
            if counter is not None:
                return [Answer(ticket, late)]
        if current is None:
            last = barrier.counter
            if last is not None and counter is not None and counter != last + 1:
                if not self._is_behind(barrier, counter, task):
                    barrier.late.pop(task, None)  # this error, too, says that the last round is over
                    return [Answer(ticket, self._past(barrier, counter, task))]
                problem = problem or (self._code_out_of_step, self._out_of_step(barrier, counter, task))
            del self._barriers[name]  # to the end: the most recently used
            self._barriers[name] = barrier
            barrier.title = title or barrier.title
            counter = counter if last is None else last + 1
            current = barrier.round = _Round(counter, tasks, task, inf)
        elif current.counter is None:
            current.counter = counter
        problem = problem or self._misfit(barrier, current, counter, task, tasks)
        effects = self._join(barrier, current, ticket, task, due)
        if problem is not None:
            return effects + self._end(barrier, *problem)
        if len(current.came) == len(current.tasks):
            return effects + self._end(barrier, OK, "")
        return effects

    def cancelled(self, ticket: Ticket, name: str, counter: int, task: Task) -> list[Effect]:
        """A task gives up a round, for all."""
        barrier = self._barriers.get(name)
        current = barrier.round if barrier is not None else None
        if barrier is None or current is None or current.counter != counter:
            state = "has passed or failed" if barrier is not None and barrier.counter == counter else "is not on"
            return [
                Fail(ticket, FAILED_PRECONDITION, f"round {counter} of barrier {name!r} {state}: nothing to cancel")
            ]
        return [*self._end(barrier, CANCELLED, f"{barrier.title} was cancelled by {named(task)}"), Answer(ticket)]

    def failed(self, name: str, code: int, message: str) -> list[Effect]:
        """The round that is on, if one is, ends with this error."""
        barrier = self._barriers.get(name)
        return [] if barrier is None or barrier.round is None else self._end(barrier, code, message)

    def task_failed(self, task: Task, why: str, code: int = INTERNAL) -> list[Effect]:
        """A task that others may wait for cannot come any more."""
        effects: list[Effect] = []
        for barrier in self._waited_at():
            if barrier.round is not None and task in barrier.round.tasks:
                effects += self._end(barrier, code, f"{barrier.title} failed: {why}")
        return effects

    def forgotten(self, name: str) -> None:
        """Nothing that has happened at a barrier counts any more. No caller may wait there."""
        self._barriers.pop(name, None)

    def restarted(self, task: Task) -> None:
        """A task begins another life, and knows nothing of the rounds that the former one has passed."""
        for barrier in self._barriers.values():
            barrier.late.pop(task, None)
            if task in barrier.tasks:
                barrier.restarted.add(task)

    def dropped(self, ticket: Ticket) -> None:
        """This caller does not wait any more."""
        barrier, task = self._by_ticket.pop(ticket, (None, None))
        if barrier is None or barrier.round is None or task is None:
            return
        del barrier.round.came[task]
        if not barrier.round.came:
            barrier.round = None
            if barrier.counter is None and not barrier.late:
                del self._barriers[barrier.name]

    def ticked(self, now: float) -> list[Effect]:
        """Time has passed."""
        effects: list[Effect] = []
        if now < self.deadline:
            return effects
        for barrier in self._waited_at():
            if barrier.round is not None and barrier.round.due <= now:
                effects += self._end(barrier, DEADLINE_EXCEEDED, self._overdue(barrier, barrier.round))
        self.deadline = min((b.round.due for b in self._waited_at() if b.round is not None), default=inf)
        return effects

    def stopped(self, why: str) -> list[Effect]:
        """Nobody keeps these barriers any more: all who wait are told."""
        return [effect for barrier in self._waited_at() for effect in self._end(barrier, CANCELLED, why)]

    def tickets(self, name: str) -> list[Ticket]:
        """The callers that wait at a barrier."""
        barrier = self._barriers.get(name)
        return [] if barrier is None or barrier.round is None else list(barrier.round.came.values())

    def missing(self, name: str) -> list[Task]:
        """For whom the present round waits."""
        barrier = self._barriers.get(name)
        if barrier is None or barrier.round is None:
            return []
        return sorted(barrier.round.tasks - barrier.round.came.keys())

    @property
    def open(self) -> list[str]:
        """Names of the barriers at which a caller waits."""
        return [barrier.name for barrier in self._waited_at()]

    @property
    def waiting(self) -> int:
        """Callers that wait."""
        return len(self._by_ticket)

    # -- one round --------------------------------------------------------------------------------------------------------

    def _join(self, barrier: _Barrier, current: _Round, ticket: Ticket, task: Task, due: float) -> list[Effect]:
        effects: list[Effect] = []
        earlier = current.came.get(task)
        if earlier is not None:
            del self._by_ticket[earlier]
            text = f"{named(task)} called {barrier.title} again while this call waited"
            effects.append(Answer(earlier, RoundOutcome(CANCELLED, text, (current.counter or 0) - 1)))
        current.came[task] = ticket
        self._by_ticket[ticket] = barrier, task
        if self._earliest_deadline or current.due == inf:
            current.due = min(current.due, due)
            self.deadline = min(self.deadline, due)
        return effects

    def _misfit(
        self, barrier: _Barrier, current: _Round, counter: int | None, task: Task, tasks: frozenset[Task]
    ) -> tuple[int, str] | None:
        """Why this caller does not fit the round that is on: then it fails for all."""
        if counter is not None and counter != current.counter:
            text = (
                f"{named(task)} came to round {counter} of {barrier.title}, the others to round {current.counter}: "
                "was it started again?"
            )
            return self._code_out_of_step, text
        if task not in current.tasks:
            text = f"{named(task)} called {barrier.title}, which is for {listed(sorted(current.tasks))}"
            return INVALID_ARGUMENT, text
        if tasks != current.tasks:
            text = (
                f"{named(current.first)} called {barrier.title} for {listed(sorted(current.tasks))}, "
                f"{named(task)} for {listed(sorted(tasks))}"
            )
            return INVALID_ARGUMENT, text
        return None

    @staticmethod
    def _is_past(barrier: _Barrier, counter: int) -> bool:
        current = barrier.round
        if current is not None and current.counter is not None and counter < current.counter:
            return True  # also where the rounds before it were another life's to end
        return barrier.counter is not None and counter <= barrier.counter

    def _is_behind(self, barrier: _Barrier, counter: int, task: Task) -> bool:
        """Whether this caller has not seen the last round, though that was for it."""
        assert barrier.counter is not None
        return counter <= barrier.counter and (counter < barrier.counter or task in barrier.restarted)

    def _out_of_step(self, barrier: _Barrier, counter: int, task: Task) -> str:
        last = barrier.counter
        return (
            f"{named(task)} came to round {counter} of {barrier.title}, the last one was {last}: was it started again?"
        )

    def _past(self, barrier: _Barrier, counter: int, task: Task) -> RoundOutcome:
        """What somebody gets who calls the round that has ended, or one that cannot begin yet."""
        assert barrier.counter is not None
        if counter != barrier.counter:
            text = self._out_of_step(barrier, counter, task)
            return RoundOutcome(self._code_out_of_step, text, barrier.counter)
        if task not in barrier.tasks:
            text = f"{named(task)} called {barrier.title}, which was for {listed(sorted(barrier.tasks))}"
            return RoundOutcome(INVALID_ARGUMENT, text, counter)
        return RoundOutcome(barrier.code, barrier.message, counter)

    def _end(self, barrier: _Barrier, code: int, message: str) -> list[Effect]:
        """The round is over: all who wait are told, and those who have not come will be."""
        current = barrier.round
        assert current is not None
        barrier.round = None
        barrier.counter = current.counter or 0
        barrier.tasks, barrier.code, barrier.message = current.tasks, code, message
        barrier.restarted.clear()
        outcome = RoundOutcome(code, message, barrier.counter)
        for task in current.tasks:
            if code == OK or task in current.came:
                barrier.late.pop(task, None)
            else:
                barrier.late[task] = outcome
        for ticket in current.came.values():
            del self._by_ticket[ticket]
        return [Answer(ticket, outcome) for ticket in current.came.values()]

    def _overdue(self, barrier: _Barrier, current: _Round) -> str:
        missing = listed(sorted(current.tasks - current.came.keys()))
        return (
            f"{barrier.title} timed out: {len(current.came)}/{len(current.tasks)} tasks came, "
            f"the first was {named(current.first)}; missing: {missing}"
        )

    # -- the table --------------------------------------------------------------------------------------------------------

    def _waited_at(self) -> list[_Barrier]:
        return list({id(barrier): barrier for barrier, _ in self._by_ticket.values()}.values())

    def _make_room(self) -> bool:
        if len(self._barriers) < self._names_max:
            return True
        unused = next((name for name, barrier in self._barriers.items() if barrier.round is None), None)
        if unused is None:
            return False
        del self._barriers[unused]
        return True
