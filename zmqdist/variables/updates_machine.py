"""What a parameter server must remember besides values: which updates it has applied, whose sessions it keeps, who waits in which step.

An update comes with an id: the number of its client and a sequence number of that client, and with it the greatest number up to which the
client has all its answers (`settled`): what it will never ask for again. So the log of a client has as many entries as it has updates on
the way, and a question that comes again, because its answer was lost, finds the answer.

A *key* names an update of a session for whoever repeats it: a function that is run again by another process says with it that this is
the same update.

In a *synchronous step* each variable waits for the gradients of `k` updates. The one that is the k-th ends the step: their mean is
applied once, and all of them are answered.

Promises, checked by tests/machines/test_updates.py and tests/sim/test_variables.py
    U1  An update is carried out at most once by its id, and by its key within its session, whatever was lost, repeated or came late.
    U2  A question that comes again while its update is carried out has that one's outcome; after it, the answer that it gave.
    U3  What failed has changed nothing, and may be asked again.
    U4  A client has no more entries than updates that are not settled; there are no more than `clients_max` clients and `keys_max` keys. Of
        those that are carried out none is forgotten.
    U5  The mean of a step is of exactly `k` updates, the first that came; a step is applied once, and none after a later one.
    U6  Whoever takes part in a step has one verdict: APPLIED, or LATE where a step with this number or a later one was applied before.
    U7  A session is dropped when it is closed, or at another program's open when its own has had no connection for `gone_s`.

Not here: values, locks, messages (variable_host.py). No clock: times are given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from zmqdist.errors import InvalidArgumentError, ResourceExhaustedError

NEW: Final = "new"
"""Carry it out."""
RUNNING: Final = "running"
"""It is being carried out: its outcome is this question's, too."""
DONE: Final = "done"
"""It was carried out, and gave this answer."""
SETTLED: Final = "settled"
"""It was carried out, and its client has the answer: nobody waits."""

APPLIED: Final = "applied"
LATE: Final = "late"

_RUNNING: Final = object()

Ticket: TypeAlias = Any
"""One question; the host's own."""


class _Client:
    """Of one client: up to which number all is settled, and what came of the rest."""

    __slots__ = ("answers", "settled")

    def __init__(self) -> None:
        self.settled = 0
        self.answers: dict[int, Any] = {}


class UpdateLog:
    """Which updates were carried out (U1 to U4)."""

    def __init__(self, clients_max: int) -> None:
        self._clients_max = clients_max
        self._clients: OrderedDict[int, _Client] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(client.answers) for client in self._clients.values())

    @property
    def clients(self) -> int:
        """How many are remembered."""
        return len(self._clients)

    def begin(self, client: int, sequence: int, settled: int) -> tuple[str, Any]:
        """An update was asked for: what to do about it, and for DONE its answer."""
        known = self._clients.get(client)
        if known is None:
            known = self._clients[client] = _Client()
            if len(self._clients) > self._clients_max:
                self._forget_one(client)
        else:
            self._clients.move_to_end(client)
        if settled > known.settled:
            known.settled = settled
            if known.answers:
                known.answers = {n: a for n, a in known.answers.items() if n > settled or a is _RUNNING}
        answer = known.answers.get(sequence, None)
        if answer is _RUNNING:
            return RUNNING, None
        if sequence in known.answers:
            return DONE, answer
        if sequence <= known.settled:
            return SETTLED, None
        known.answers[sequence] = _RUNNING
        return NEW, None

    def end(self, client: int, sequence: int, answer: Any) -> None:
        """What `begin` called NEW was carried out."""
        self._clients[client].answers[sequence] = answer

    def fail(self, client: int, sequence: int) -> None:
        """The same was refused, or raised: it has changed nothing."""
        self._clients[client].answers.pop(sequence, None)

    def _forget_one(self, but: int) -> None:
        for number, client in self._clients.items():
            if number != but and not any(answer is _RUNNING for answer in client.answers.values()):
                del self._clients[number]
                return


class UpdateKeys:
    """Updates of one session that carry a key (U1 to U4)."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._answers: OrderedDict[str, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def begin(self, key: str) -> tuple[str, Any]:
        """As `UpdateLog.begin`."""
        answer = self._answers.get(key, None)
        if answer is _RUNNING:
            return RUNNING, None
        if key in self._answers:
            return DONE, answer
        self._answers[key] = _RUNNING
        if len(self._answers) > self._keys_max:
            oldest = next((name for name, outcome in self._answers.items() if outcome is not _RUNNING), None)
            if oldest is not None:
                del self._answers[oldest]
        return NEW, None

    def end(self, key: str, answer: Any) -> None:
        """As `UpdateLog.end`."""
        self._answers[key] = answer

    def fail(self, key: str) -> None:
        """As `UpdateLog.fail`."""
        self._answers.pop(key, None)


# -- updates that are being carried out ------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Update:
    """One update, from its first question to its outcome.

    Attributes:
      id: client and sequence number.
      key: "", or what names it in its session, whose keys are `keys`.
      tickets: the questions whose answer is its outcome, the first one first.
      over: it has ended.
    """

    id: tuple[int, int]
    key: str
    keys: UpdateKeys
    tickets: list[Ticket]
    over: bool = False


@dataclass(frozen=True, slots=True)
class Repeated:
    """It was carried out before: answer the question with this. None: its client waits no more."""

    answer: Any


class Updates:
    """What is to be done about each question for an update (U1 to U4)."""

    def __init__(self, clients_max: int) -> None:
        self._log = UpdateLog(clients_max)
        self._running: dict[tuple[int, int] | tuple[UpdateKeys, str], Update] = {}

    def __len__(self) -> int:
        """Answers that are kept."""
        return len(self._log)

    def asked(
        self, ticket: Ticket, client: int, sequence: int, settled: int, key: str, keys: UpdateKeys
    ) -> Update | Repeated | None:
        """A question has come: carry out this Update, answer it as a Repeated; or None: it waits for one that is carried out."""
        id = client, sequence
        found, answer = self._log.begin(client, sequence, settled)
        if found == RUNNING:
            self._running[id].tickets.append(ticket)
            return None
        if found != NEW:
            return Repeated(answer)
        if key:
            found, answer = keys.begin(key)
            if found == DONE:
                self._log.end(*id, answer)
                return Repeated(answer)
            if found == RUNNING:  # where that one fails, this one may be asked for again
                self._log.fail(*id)
                self._running[keys, key].tickets.append(ticket)
                return None
        update = self._running[id] = Update(id, key, keys, [ticket])
        if key:
            self._running[keys, key] = update
        return update

    def ended(self, update: Update, answer: Any) -> None:
        """It was carried out; the answer is that of all its tickets."""
        self._over(update)
        self._log.end(*update.id, answer)
        if update.key:
            update.keys.end(update.key, answer)

    def failed(self, update: Update) -> bool:
        """It was refused, or raised, and has changed nothing; False: it had ended before."""
        if update.over:
            return False
        self._over(update)
        self._log.fail(*update.id)
        if update.key:
            update.keys.fail(update.key)
        return True

    def _over(self, update: Update) -> None:
        update.over = True
        del self._running[update.id]
        if update.key:
            del self._running[update.keys, update.key]


# -- steps ------------------------------------------------------------------------------------------------------------


@dataclass
class _Step:
    wanted: int
    tickets: list[Hashable] = field(default_factory=list)


@dataclass(frozen=True)
class Pushed:
    """What came of a push.

    Attributes:
      verdict: "" while the step waits for more; APPLIED: this was the last one, apply the mean now; LATE: drop it.
      applied: who took part in the step that is applied now, in the order of their coming, the last one included.
      late: who waits in an earlier step, which will never be applied.
      dropped: those steps.
    """

    verdict: str
    applied: tuple[Hashable, ...] = ()
    late: tuple[Hashable, ...] = ()
    dropped: tuple[int, ...] = ()


class Steps:
    """The steps of one variable (U5, U6).

    Attributes:
      applied: the greatest number of a step that was applied; -1 before the first.
    """

    def __init__(self, open_max: int) -> None:
        self.applied = -1
        self._open_max = open_max
        self._open: dict[int, _Step] = {}

    def check(self, step: int, wanted: int) -> None:
        """Raises InvalidArgumentError, ResourceExhaustedError where `push` cannot take that."""
        if step < 0 or wanted < 1:
            text = f"a step is a number from 0 and takes 1 gradient or more, not step {step} of {wanted}"
            raise InvalidArgumentError(text)
        open_step = self._open.get(step)
        if open_step is not None and open_step.wanted != wanted:
            text = f"step {step} waits for {open_step.wanted} gradients, and this one says {wanted}"
            raise InvalidArgumentError(text)
        if open_step is None and step > self.applied and len(self._open) >= self._open_max:
            text = f"steps {sorted(self._open)} wait for gradients already, so step {step} must wait"
            raise ResourceExhaustedError(text)

    def push(self, step: int, ticket: Hashable, wanted: int) -> Pushed:
        """A gradient has come. Raises as `check`."""
        self.check(step, wanted)
        if step <= self.applied:
            return Pushed(LATE)
        open_step = self._open.setdefault(step, _Step(wanted))
        open_step.tickets.append(ticket)
        if len(open_step.tickets) < wanted:
            return Pushed("")
        self.applied = step
        del self._open[step]
        dropped = tuple(sorted(number for number in self._open if number < step))
        late = tuple(ticket for number in dropped for ticket in self._open.pop(number).tickets)
        return Pushed(APPLIED, tuple(open_step.tickets), late, dropped)

    def waiting(self) -> list[Hashable]:
        """Who waits, of all steps: the variable goes, and they are told so."""
        return [ticket for step in self._open.values() for ticket in step.tickets]


# -- sessions ---------------------------------------------------------------------------------------------------------


@dataclass
class _Session:
    program: int
    holder: int
    gone_at: float | None = None


class KeptSessions:
    """Whose variables are kept (U7).

    A program is a random number of its process; its holder the connection that it opened the session over, by the number that each
    client's hello has, which stays the same when it connects again.
    """

    def __init__(self, gone_s: float) -> None:
        self._gone_s = gone_s
        self._sessions: dict[int, _Session] = {}

    def __contains__(self, session: int) -> bool:
        return session in self._sessions

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, program: int, session: int, holder: int, present: Iterable[int], now: float) -> list[int]:
        """A program opens a session, anew or again.

        Args:
          present: the holders that are connected.

        Returns:
          Sessions of others that are dropped.
        """
        connected = {*present, holder}
        dropped = []
        for number, each in list(self._sessions.items()):
            if each.program == program or each.holder in connected:
                each.gone_at = None
            elif each.gone_at is None:
                each.gone_at = now
            elif now - each.gone_at >= self._gone_s and number != session:
                del self._sessions[number]
                dropped.append(number)
        self._sessions[session] = _Session(program, holder)
        return dropped

    def gone(self, holder: int, now: float) -> None:
        """A connection has ended."""
        for each in self._sessions.values():
            if each.holder == holder and each.gone_at is None:
                each.gone_at = now

    def close(self, session: int) -> bool:
        """Its program needs it no more; False: it was not there."""
        return self._sessions.pop(session, None) is not None
