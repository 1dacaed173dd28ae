"""The decisions of a process that uses locks, semaphores, queues and events of a dispatcher: its
lease, the places that it holds, and what a lost connection means for its requests. No I/O.

Theory of operation
    An Operation is a generator: it yields KeeperCalls, and gets the value of each, or its error by
    `throw`. Its runtime sets `now` before each continuation, and continues one operation at
    a time. The runtime closes an operation whose thread waits no more, for example after Ctrl-C.
    The client counts its lease from the sending of the last message that was answered, so its lease
    ends for the client before it ends for the dispatcher. When the dispatcher does not know the
    client, the process becomes a new client, and names the places that it still holds.

Promises, checked by tests/coordination/test_primitives_client_machine.py
    P1  the client counts a place as its own only until the end of its lease, and while the
        dispatcher does not refuse it; the release of a lost place raises AbortedError
    P2  a request is sent again only if it was refused, or has no effect that is left
    P3  an item reaches the program after its confirmation; if it is unknown whether an item was put
        or confirmed, the operation raises AbortedError
    P4  an operation ends with UnavailableError if no dispatcher answers for a bounded time
    P5  an operation on a queue or event that began at another dispatcher raises AbortedError

Not here: the keeper's decisions (primitives_machine.py), threads and the connection
(primitives_client.py).
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Generator, Mapping
from math import inf
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from zmqdist.coordination.primitives_machine import EVENT, QUEUE, Hold, Key
from zmqdist.errors import AbortedError, DeadlineExceededError, OpError, UnavailableError
from zmqdist.limits import CLUSTER_LOST_LIMIT_S, CONNECT_S
from zmqdist.transitions import enter

RENEWALS: Final = 4
"""The number of renewals in the time of a lease, so that three may be late."""

AGAIN_S: Final = 0.1
"""Seconds between a failed renewal and the next one."""


class KeeperCall(NamedTuple):
    """A call to the dispatcher.

    Attributes:
      due: when to stop waiting for the reply, with DeadlineExceededError.
      waits: whether the call waits for a dispatcher that is not connected. Otherwise it fails at
        once with UnavailableError, as a call does whose connection ends.
    """

    method: str
    args: tuple[Any, ...]
    due: float
    waits: bool


T = TypeVar("T")
Operation: TypeAlias = Generator[KeeperCall, Any, T]


class ClientState(enum.Enum):
    ABSENT = enum.auto()  # the dispatcher does not know this process
    OPENING = enum.auto()  # has a number that the dispatcher may not know yet
    OPEN = enum.auto()


TRANSITIONS: Final[Mapping[ClientState, frozenset[ClientState]]] = {
    ClientState.ABSENT: frozenset({ClientState.OPENING}),
    ClientState.OPENING: frozenset({ClientState.OPEN, ClientState.ABSENT}),
    ClientState.OPEN: frozenset({ClientState.ABSENT}),
}


class PrimitivesClient:
    """One process at one dispatcher; the module's docstring has the rules.

    Attributes:
      now: the time, which the runtime sets before it continues an operation.
    """

    def __init__(self, address: str, pid: int, number: int) -> None:
        """Start without a lease. `number` is the random number of the first client of this process;
        later ones have the following numbers."""
        self.now = 0.0
        self._holds: dict[Key, list[Hold]] = {}
        """The places of this process, in the order in which it got them."""
        self._address = address
        self._pid = pid
        self._clients = itertools.count(number)
        self._numbers = itertools.count(1)
        self._state = ClientState.ABSENT
        self._client = 0
        self._keeper = 0
        self._lease_s = 0.0
        self._lease_end = -inf
        self._is_suspected = False
        """Whether the connection has ended, or requests are to be withdrawn."""
        self._withdrawn: set[int] = set()
        self._lost: Counter[Key] = Counter()
        self._operations = 0

    @property
    def is_needed(self) -> bool:
        """Whether this process has a place, or withdrawn requests that the dispatcher may grant."""
        return bool(self._holds or self._withdrawn)

    def hold(self, key: Key, now: float) -> Hold | None:
        """Return the place of this name that this process got last, if it has one now."""
        holds = self._holds.get(key) if now < self._lease_end else None
        return holds[-1] if holds else None

    # -- operations --------------------------------------------------------------------------------

    def request(
        self, verb: str, key: Key, size: int | None, item: bytes, due: float, keeper: int
    ) -> Operation[tuple[Any, int]]:
        """Send a request, and return its outcome (primitives_machine.py) and the dispatcher's
        incarnation. `keeper` is the incarnation that has the state of a queue or event; 0 means
        any."""
        self._operations += 1
        number = 0
        try:
            while True:
                client = yield from self._contact(due)
                if key[0] in (QUEUE, EVENT):
                    if keeper not in (0, self._keeper):  # P5
                        raise AbortedError(
                            f"the dispatcher at {self._address} was restarted, so the state of "
                            f"{key[0]} {key[1]!r} is lost; the next call begins with a new one"
                        )
                    keeper = self._keeper
                number = next(self._numbers)
                left_s = None if due == inf else max(0.0, due - self.now)
                args = number, verb, *key, size, item, left_s
                try:
                    outcome = yield from self._exchange(client, "request", *args)
                except AbortedError:
                    continue  # P2: it was refused
                except UnavailableError as error:
                    if verb == "put":
                        raise AbortedError(
                            f"{error.message}, so the item may be in queue {key[1]!r}, or not"
                        ) from None
                    # P2: what the request may have got is given back first
                    self._withdraw(key, number)
                    continue
                if outcome is None or verb not in ("get", "acquire"):
                    return outcome, keeper
                if verb == "get":
                    if (yield from self._confirm(client, number, key[1])):
                        return outcome, keeper
                elif self._client == client:
                    self._holds.setdefault(key, []).append(Hold(number, key, size or 1, outcome))
                    return outcome, keeper
        except (GeneratorExit, KeyboardInterrupt):  # the program waits no more
            self._withdraw(key, number)
            raise
        finally:
            self._operations -= 1

    def release(self, key: Key) -> Operation[bool]:
        """Release the last place of this name. Return False if this process has none.

        Raises AbortedError if the place was lost before (P1).
        """
        if self.now >= self._lease_end:
            self._lose(set())
        if key not in self._holds:
            if not self._lost[key]:
                return False
            self._lost[key] -= 1
            raise AbortedError(
                f"this process lost {key[0]} {key[1]!r} before the release, because it had no "
                f"contact with the dispatcher at {self._address} for a lease: another process may "
                f"have it since"
            )
        client, number = self._client, self._holds[key][-1].number
        try:
            self._withdraw(key, number)
            # a later client of this process does not name this place
            while client and self._client == client and number in self._withdrawn:
                yield from self._contact(inf)
        except KeyboardInterrupt:
            self._withdraw(key, number)
            raise
        return True

    def renew(self) -> Operation[float]:
        """Renew the lease, if an operation runs or `is_needed`. Return the seconds until the next
        renewal."""
        if self._operations or self.is_needed:
            self._is_suspected = True
            try:
                yield from self._contact(self.now)
            except OpError:
                return AGAIN_S
        return self._lease_s / RENEWALS or AGAIN_S

    # -- contact -----------------------------------------------------------------------------------

    def _contact(self, due: float) -> Operation[int]:
        """Return the number of this client, once the dispatcher knows it and has heard which
        requests are withdrawn. An operation that waits until `due` waits for the dispatcher as long
        (P4), within bounds."""
        wait_s = min(CLUSTER_LOST_LIMIT_S, max(CONNECT_S, due - self.now))
        limit = self.now + wait_s
        while True:
            if self._state is ClientState.OPEN and self.now >= self._lease_end:
                self._enter(ClientState.ABSENT)
            if self._state is ClientState.OPEN and not self._is_suspected:
                return self._client
            try:
                yield from (
                    self._open(limit)
                    if self._state is not ClientState.OPEN
                    else (self._confirmed([], limit))
                )
            except AbortedError:
                continue
            except (UnavailableError, DeadlineExceededError):
                if self.now >= limit:
                    raise UnavailableError(
                        f"no dispatcher has answered at {self._address} for {wait_s:g} s"
                    ) from None

    def _open(self, limit: float) -> Operation[None]:
        if self.now >= self._lease_end:
            self._lose(set())
        if self._state is ClientState.ABSENT:
            self._enter(ClientState.OPENING)
            self._client = next(self._clients)
            self._withdrawn.clear()
        client, sent_at = self._client, self.now
        offered = [
            (hold.number, *hold.key, hold.size, hold.fence)
            for holds in self._holds.values()
            for hold in holds
        ]
        due = min(limit, self._lease_end) if offered else limit
        try:
            welcome = yield from self._exchange(
                client, "open", self._pid, offered, due=due, waits=True
            )
        except DeadlineExceededError:
            # P1: a later attempt must not name places whose lease has ended
            if self._client == client and self._state is ClientState.OPENING:
                self._enter(ClientState.ABSENT)
            raise
        # the first of several threads has this news
        if self._client == client and self._state is ClientState.OPENING:
            self._enter(ClientState.OPEN)
            self._keeper, self._lease_s, holding = welcome
            self._lease_end = sent_at + self._lease_s
            self._is_suspected = bool(self._withdrawn)
            self._lose(set(holding))

    def _confirmed(self, numbers: list[int], due: float) -> Operation[None]:
        """Confirm items, and withdraw requests."""
        withdrawn = list(self._withdrawn)
        yield from self._exchange(
            self._client, "renew", self._pid, numbers, withdrawn, due=due, waits=True
        )
        self._withdrawn.difference_update(withdrawn)
        self._is_suspected = bool(self._withdrawn)

    def _confirm(self, client: int, number: int, name: str) -> Operation[bool]:
        """Return whether an item has become this client's; False means that it has returned (P3)."""
        is_repeated = False
        while client == (yield from self._contact(inf)):
            try:
                yield from self._confirmed([number], inf)
                return True
            except UnavailableError:
                is_repeated = True
            except AbortedError:
                break
        if is_repeated:
            raise AbortedError(
                f"the connection to {self._address} ended for longer than a lease, so an item of "
                f"queue {name!r} may be lost"
            )
        return False

    def _exchange(
        self, client: int, method: str, *args: Any, due: float = inf, waits: bool = False
    ) -> Operation[Any]:
        """Make a call, and note what its outcome says about the lease."""
        sent_at = self.now
        try:
            value = yield KeeperCall(method, (client, *args), due, waits)
        except UnavailableError:
            self._is_suspected = True
            raise
        except AbortedError:
            if self._client == client and self._state is not ClientState.ABSENT:
                self._enter(ClientState.ABSENT)
            raise
        if self._client == client:
            self._lease_end = max(self._lease_end, sent_at + self._lease_s)
        return value

    def _withdraw(self, key: Key, number: int) -> None:
        """Give up a request, and the place that it may have got."""
        if holds := [hold for hold in self._holds.pop(key, ()) if hold.number != number]:
            self._holds[key] = holds
        self._withdrawn.add(number)
        self._is_suspected = True

    def _lose(self, kept: set[int]) -> None:
        """Count all places but those of these requests as lost."""
        for key, holds in list(self._holds.items()):
            self._holds[key] = [hold for hold in holds if hold.number in kept]
            self._lost[key] += len(holds) - len(self._holds[key])
            if not self._holds[key]:
                del self._holds[key]

    def _enter(self, state: ClientState) -> None:
        self._state = enter(TRANSITIONS, self._state, state, "the client at", self._address)
