"""The state of a parameter server besides values: the updates that it has executed, the updates
that wait in synchronous steps, and the sessions.

An update has an id: the number of its client and a sequence number of that client. A request also
carries `settled`, the sequence number up to which the client has all replies and will repeat no
request. So the log needs only one entry for each update that the client has in flight. When a
client repeats a request because the reply was lost, the ps finds the result in the log.

A *key* identifies an update within a session when another process repeats it: a function that runs
again in another process sends the same key, so that the update takes effect once. While the update
is being executed, the second request waits for its outcome. Which variables have the update already
is recorded by the host, because that record is saved with the variables (variable_host.py).

In a *synchronous step* each variable waits for the gradients of `k` updates. The k-th update ends
the step: the ps applies the mean of the gradients once, and replies to all `k` updates.

Promises, checked by tests/variables/test_updates_machine.py and tests/sim/test_variables.py
    U1  An update is executed at most once by its id, and not twice at a time by its key within its
        session, even if messages are lost, repeated or late.
    U2  A request that is repeated while its update is being executed gets the outcome of that
        execution. A request that is repeated later gets the earlier result again.
    U3  An update that failed has changed nothing, and may be requested again.
    U4  A client has at most one entry for each update that is not settled. There are at most
        `clients_max` clients. An update that is being executed is never forgotten.
    U5  The mean of a step is over exactly the first `k` updates that arrive. A step is applied
        once, and never after a later step.
    U6  Every update of a step gets one verdict: APPLIED, or LATE if this step or a later step was
        applied before.
    U7  A session is dropped when its program closes it, or when another program opens a session
        after the first program has had no connection for `gone_s`.

Not here: values, locks, messages (variable_host.py). No clock: times are arguments.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from zmqdist.errors import InvalidArgumentError, ResourceExhaustedError

APPLIED: Final = "applied"
LATE: Final = "late"

Ticket: TypeAlias = Any
"""One request: an object of the variable host, which the machine does not interpret."""


@dataclass(slots=True, eq=False)
class Update:
    """One update that is being executed, from its first request to its outcome.

    Attributes:
      id: number of the client, and sequence number.
      key: identifies the update in its session; "" if the update has no key.
      session: an object of the variable host, which stands for the session.
      tickets: the requests that get the outcome, in order of arrival.
      outcomes: the host's outcomes of the parts of an update in a synchronous step.
      over: whether the update has ended.
    """

    id: tuple[int, int]
    key: str
    session: Any
    tickets: list[Ticket]
    outcomes: dict[int, Any] = field(default_factory=dict)
    over: bool = False


@dataclass(frozen=True, slots=True)
class Repeated:
    """The decision that the update was executed before. The host replies with `result`, which is
    None if the client no longer waits."""

    result: Any


@dataclass(slots=True, eq=False)
class _Client:
    """The updates of one client. The updates with numbers up to `settled` are settled; `results`
    has the results of all other updates by number, and an Update for each update that is being
    executed.
    """

    settled: int = 0
    results: dict[int, Any] = field(default_factory=dict)


class Updates:
    """The updates that are being executed or were executed. This class decides for each request
    whether its update has to be executed (promises U1 to U4)."""

    def __init__(self, clients_max: int) -> None:
        self._clients_max = clients_max
        self._clients: OrderedDict[int, _Client] = OrderedDict()
        self._running: dict[tuple[Hashable, str], Update] = {}
        """The updates with a key that are being executed, by session and key."""

    def __len__(self) -> int:
        """Return the number of results, including updates that are being executed."""
        return sum(len(client.results) for client in self._clients.values())

    @property
    def clients(self) -> int:
        """The number of clients whose updates are remembered."""
        return len(self._clients)

    def begin(
        self,
        ticket: Ticket,
        client: int,
        sequence: int,
        settled: int,
        key: str = "",
        session: Hashable = None,
    ) -> Update | Repeated | None:
        """Decide whether a requested update has to be executed.

        Returns:
          An Update, which the host must execute; a Repeated, which has the result for the reply; or
          None if the request waits for an update that is being executed.
        """
        record = self._client(client)
        if settled > record.settled:
            # U4: the client has these replies, and repeats their requests no more
            record.settled = settled
            if record.results:
                record.results = {
                    number: result
                    for number, result in record.results.items()
                    if number > settled or isinstance(result, Update)
                }
        if sequence in record.results:
            result = record.results[sequence]
            if not isinstance(result, Update):
                return Repeated(result)
            # U2: this request gets the outcome of the running execution
            result.tickets.append(ticket)
            return None
        # U1: a late copy of a request whose reply the client has
        if sequence <= record.settled:
            return Repeated(None)
        if key and (running := self._running.get((session, key))) is not None:
            # Do not record the id, so that the client can request the update again if the running
            # update with this key fails (U3).
            running.tickets.append(ticket)
            return None
        update = record.results[sequence] = Update((client, sequence), key, session, [ticket])
        if key:
            self._running[session, key] = update
        return update

    def ended(self, update: Update, result: Any) -> None:
        """Record that an update was executed. `result` is the result for all requests in
        `update.tickets`."""
        self._end(update)[update.id[1]] = result

    def failed(self, update: Update) -> bool:
        """Record that an update was refused or raised an error, and has changed nothing. Return
        False if the update had ended already."""
        if update.over:
            return False
        del self._end(update)[update.id[1]]
        return True

    def _end(self, update: Update) -> dict[int, Any]:
        """Mark an update as over. Return the results of its client."""
        update.over = True
        if update.key:
            del self._running[update.session, update.key]
        return self._clients[update.id[0]].results

    def _client(self, number: int) -> _Client:
        record = self._clients.get(number)
        if record is not None:
            self._clients.move_to_end(number)
            return record
        record = self._clients[number] = _Client()
        if len(self._clients) > self._clients_max:
            for candidate, client in self._clients.items():
                # U4: an update that is being executed is never forgotten
                if candidate != number and not any(
                    isinstance(result, Update) for result in client.results.values()
                ):
                    del self._clients[candidate]
                    break
        return record


# -- steps -----------------------------------------------------------------------------------------


@dataclass
class _Step:
    size: int
    tickets: list[Hashable] = field(default_factory=list)


@dataclass(frozen=True)
class Pushed:
    """The effect of adding a gradient to a synchronous step.

    Attributes:
      verdict: "" while the step waits for more gradients. APPLIED means that this was the last
        gradient, and that the host applies the mean now. LATE means that the host drops the
        gradient.
      applied: tickets of all gradients of the step that is applied now, in order of arrival.
      late: tickets of the earlier steps in `dropped`.
      dropped: numbers of earlier steps that were still open and will never be applied.
    """

    verdict: str
    applied: tuple[Hashable, ...] = ()
    late: tuple[Hashable, ...] = ()
    dropped: tuple[int, ...] = ()


class Steps:
    """The synchronous steps of one variable (promises U5 and U6).

    Attributes:
      applied: the highest number of a step that was applied; -1 before the first step.
    """

    def __init__(self, open_max: int) -> None:
        self.applied = -1
        self._open_max = open_max
        self._open: dict[int, _Step] = {}

    def check(self, step: int, size: int) -> None:
        """Check that `push` can accept a gradient for this step. Raises InvalidArgumentError or
        ResourceExhaustedError."""
        if step < 0 or size < 1:
            text = f"a step is a number of 0 or more and takes 1 gradient or more, not step {step} of {size}"
            raise InvalidArgumentError(text)
        open_step = self._open.get(step)
        if open_step is not None and open_step.size != size:
            text = f"step {step} waits for {open_step.size} gradients, and this request says {size}"
            raise InvalidArgumentError(text)
        # U4: each open step holds gradients, so their number is bounded
        if open_step is None and step > self.applied and len(self._open) >= self._open_max:
            raise ResourceExhaustedError(
                f"steps {sorted(self._open)} wait for gradients already, so step {step} must wait"
            )

    def push(self, step: int, ticket: Hashable, size: int) -> Pushed:
        """Add a gradient to a step. Raises the errors of `check`."""
        self.check(step, size)
        # U5: never apply a step after a later one
        if step <= self.applied:
            return Pushed(LATE)
        open_step = self._open.setdefault(step, _Step(size))
        open_step.tickets.append(ticket)
        if len(open_step.tickets) < size:
            return Pushed("")
        self.applied = step
        del self._open[step]
        # U6: the gradients of earlier steps get their verdict now, because those steps cannot end
        dropped = tuple(sorted(number for number in self._open if number < step))
        late = tuple(ticket for number in dropped for ticket in self._open.pop(number).tickets)
        return Pushed(APPLIED, tuple(open_step.tickets), late, dropped)

    def waiting(self) -> list[Hashable]:
        """Return the tickets of all open steps. The host fails these updates when the variable is
        dropped."""
        return [ticket for step in self._open.values() for ticket in step.tickets]


# -- sessions --------------------------------------------------------------------------------------


@dataclass
class _Session:
    program: int
    holder: int
    gone_at: float | None = None


class KeptSessions:
    """The sessions whose variables the ps keeps (promise U7).

    A program is identified by a random number of its process. The holder of a session is the client
    that opened it for its program. The holder is identified by the incarnation in its hello, which
    stays the same when the client reconnects.
    """

    def __init__(self, gone_s: float) -> None:
        self._gone_s = gone_s
        self._sessions: dict[int, _Session] = {}

    def __contains__(self, session: int) -> bool:
        return session in self._sessions

    def __len__(self) -> int:
        return len(self._sessions)

    def open(
        self, program: int, session: int, holder: int, present: Iterable[int], now: float
    ) -> list[int]:
        """Open a session for a program, for the first time or again after a lost connection.

        Args:
          present: the holders that are connected now.

        Returns:
          The sessions of other programs that the host must drop, because their programs have been
          gone for `gone_s`.
        """
        connected = {*present, holder}
        dropped = []
        for number, record in list(self._sessions.items()):
            if record.program == program or record.holder in connected:
                record.gone_at = None
            # a connection that ended without notice counts from the moment when this is seen
            elif record.gone_at is None:
                record.gone_at = now
            elif now - record.gone_at >= self._gone_s and number != session:
                del self._sessions[number]
                dropped.append(number)
        self._sessions[session] = _Session(program, holder)
        return dropped

    def disconnected(self, holder: int, now: float) -> None:
        """Record that the connection of a holder has ended."""
        for record in self._sessions.values():
            if record.holder == holder and record.gone_at is None:
                record.gone_at = now

    def close(self, session: int) -> bool:
        """Forget a session that its program has closed. Return False if the session was not
        known.
        """
        return self._sessions.pop(session, None) is not None
