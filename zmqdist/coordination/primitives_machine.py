"""Locks, semaphores, queues and events by name, which the processes of a cluster share. No I/O.

Theory of operation
    A process that uses primitives is a *client*, with a number that is never used again. When the
    lease or the process ends, the client's requests leave their lines, its places of locks and
    semaphores are free, and its later messages get ABORTED; the process becomes a client with a
    larger number. Each message of a client renews its lease. A request that waits also leaves its
    line when the connection that brought it ends.
    Each request of a client has a number. A place belongs to the request to which it was granted,
    until the client withdraws that request. An item of a queue is handed over in two steps: the
    getter receives the item, and confirms it before its program sees the item. An item that is
    withdrawn, or whose client ends before it has confirmed the item, returns to its queue.
    A new keeper does not know what the clients of an earlier keeper hold. It grants no place of a
    lock or semaphore for one lease, in which these clients name the places that they hold. Items of
    queues and states of events are lost with their keeper.
    A primitive that no request uses, and that has no item and is not set, takes no memory.

Promises, checked by tests/coordination/test_primitives_machine.py
    P1  a lock has at most one holder whose lease has not ended, and a semaphore at most its number,
        across a restart of the keeper, too; each holder has a larger fence than earlier holders
    P2  each ticket gets one reply or is dropped, and a request that is dropped has no effect
    P3  when a client ends, it has no place and no request any more, and the next requests in the
        lines are served; a later message of the client changes nothing
    P4  the requests of a line are served in their order, items leave a queue in the order in which
        they came, and no request waits that could be served
    P5  an item is confirmed by one getter at most; an item that is not confirmed stays or returns
    P6  a request that is late ends at its deadline, without effect
    P7  clients, names, requests of a client, and bytes of items are bounded; a request beyond a
        bound changes nothing

Not here: the content of items, connections, processes (primitives_service.py), and the decisions of
a client (primitives_client_machine.py).
"""

from __future__ import annotations

import enum
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from zmqdist import limits
from zmqdist.coordination.replies import Effect, Fail, ReplyValue, Ticket
from zmqdist.errors import ABORTED, INVALID_ARGUMENT, RESOURCE_EXHAUSTED
from zmqdist.transitions import enter

Key: TypeAlias = tuple[str, str]
"""The kind and the name of a primitive."""

LOCK: Final = "lock"
SEMAPHORE: Final = "semaphore"
QUEUE: Final = "queue"
EVENT: Final = "event"
VERBS: Final[Mapping[str, tuple[str, ...]]] = {
    LOCK: ("acquire", "look"),
    SEMAPHORE: ("acquire", "look"),
    QUEUE: ("put", "get", "look"),
    EVENT: ("set", "clear", "wait", "look"),
}
"""What a client may request of each kind of primitive."""

ITEM_OVERHEAD_BYTES: Final = 100
"""Bytes that a queued item takes beside its content."""


class RequestState(enum.Enum):
    WAITING = enum.auto()  # in the line of its primitive
    HOLDING = enum.auto()  # has a place of a lock or a semaphore
    GIVEN = enum.auto()  # has received an item that the client has not confirmed
    OVER = enum.auto()


TRANSITIONS: Final[Mapping[RequestState, frozenset[RequestState]]] = {
    RequestState.WAITING: frozenset(
        {RequestState.HOLDING, RequestState.GIVEN, RequestState.OVER},
    ),
    RequestState.HOLDING: frozenset({RequestState.OVER}),
    RequestState.GIVEN: frozenset({RequestState.OVER}),
    RequestState.OVER: frozenset(),
}


class PrimitiveRequest(NamedTuple):
    """A request of a client.

    Attributes:
      size: the number of places of a lock or semaphore, or of items of a queue (0 means any
        number). None leaves the size of a queue to other requests.
      item: the packed item, for "put".
      due: when the wait ends. The time of the request means that the request does not wait.
    """

    client: int
    number: int
    verb: str
    key: Key
    size: int | None = None
    item: bytes = b""
    due: float = inf


class Hold(NamedTuple):
    """A place of a lock or semaphore, as its client remembers it."""

    number: int
    key: Key
    size: int
    fence: int


class _Client(msgspec.Struct):
    until: float
    requests: dict[int, _Request] = msgspec.field(default_factory=dict)


class _Primitive(msgspec.Struct):
    """`out` counts the requests in the states HOLDING and GIVEN."""

    key: Key
    size: int | None = None
    out: int = 0
    is_set: bool = False
    items: deque[tuple[int, bytes]] = msgspec.field(default_factory=deque)
    takers: OrderedDict[_Request, None] = msgspec.field(default_factory=OrderedDict)
    putters: OrderedDict[_Request, None] = msgspec.field(default_factory=OrderedDict)


class _Request(msgspec.Struct, eq=False):
    """`item` is the item that a putter brings, or that a getter has received with the number
    `serial`."""

    client: _Client
    number: int
    primitive: _Primitive
    line: OrderedDict[_Request, None]
    ticket: Ticket
    item: bytes
    due: float
    serial: int = 0
    state: RequestState = RequestState.WAITING

    def enter(self, state: RequestState) -> None:
        """Change the state. Raises InternalError if TRANSITIONS has no such transition."""
        self.state = enter(TRANSITIONS, self.state, state, *self.primitive.key, self.number)


class Primitives:
    """The primitives of one keeper. A method for an event returns the replies to send.

    Outcomes of requests: of "acquire" the fence; of "get" the item; of "put", "wait", "set" and
    "clear" True; of "look" [requests that have a place or an unconfirmed item, items, whether the
    event is set, size]. None means that the request was late.

    Attributes:
      nbytes: the bytes of all items, those of waiting and unconfirmed requests included.
      waiting: the number of requests that wait in a line.
    """

    def __init__(self, lease_s: float, settled_at: float, first_fence: int = 1) -> None:
        """Start without primitives.

        Args:
          settled_at: until when no place is granted, because clients of an earlier keeper may hold
            it; -inf if there was no earlier keeper.
          first_fence: a number above all fences of earlier keepers.
        """
        self.nbytes = self.waiting = 0
        self._lease_s = lease_s
        self._settled_at = settled_at
        self._fences = itertools.count(first_fence)
        self._serials = itertools.count()
        self._clients: dict[int, _Client] = {}
        self._primitives: dict[Key, _Primitive] = {}
        self._ends: list[tuple[float, int]] = []
        """When to check the lease of each client."""
        self._dues: list[tuple[float, int, _Request]] = []

    def __len__(self) -> int:
        """Return the number of primitives that take memory."""
        return len(self._primitives)

    @property
    def deadline(self) -> float:
        """The latest time for the next call of `ticked`; `inf` means never."""
        settled_at = self._settled_at if self._settled_at > -inf else inf
        return min(settled_at, *(heap[0][0] for heap in (self._ends, self._dues) if heap), inf)

    # -- clients -----------------------------------------------------------------------------------

    def opened(
        self, ticket: Ticket, client: int, holds: Iterable[Hold], now: float, former: int = 0
    ) -> list[Effect]:
        """Begin the lease of a client. `holds` are places that an earlier keeper has granted to
        this process. The reply, which comes last, has the numbers of those that the client still
        has. `former` is the last client of the same process, which it has given up."""
        if former > client:  # P3: this message is late, and its process has given up this client
            return [_unknown(ticket)]
        effects = self.lost(former) if former != client else []
        if len(self._clients) >= limits.PRIMITIVE_CLIENTS_MAX:
            text = f"{limits.PRIMITIVE_CLIENTS_MAX} processes use locks, queues and events here"
            return [*effects, Fail(ticket, RESOURCE_EXHAUSTED, text)]
        record = self._clients.setdefault(client, _Client(now))
        heappush(self._ends, (now + self._lease_s, client))
        record.until = now + self._lease_s
        # P1: later, the leases of all clients of an earlier keeper have ended
        for hold in holds if now < self._settled_at else ():
            demand = PrimitiveRequest(client, hold.number, "acquire", hold.key, hold.size)
            primitive = self._primitive(demand, record)
            if isinstance(primitive, _Primitive) and primitive.out < hold.size:
                self._answer(self._begin(record, demand, primitive, None), hold.fence)
        return [*effects, ReplyValue(ticket, [*record.requests])]

    def renewed(
        self,
        ticket: Ticket,
        client: int,
        confirmed: Iterable[int],
        withdrawn: Iterable[int],
        now: float,
    ) -> list[Effect]:
        """Renew the lease of a client, confirm items that it has received, and end the requests that
        it withdraws. A request that is over stays over."""
        record = self._clients.get(client)
        if record is None:
            return [_unknown(ticket)]
        record.until = now + self._lease_s
        effects: list[Effect] = []
        for request in [record.requests[n] for n in confirmed if n in record.requests]:
            if request.state is RequestState.GIVEN:  # P5
                self.nbytes -= _size_of(request.item)
                effects += self._end(request, is_confirmed=True)
        for request in [record.requests[n] for n in withdrawn if n in record.requests]:
            effects += self._end(request)
        return [*effects, ReplyValue(ticket)]

    def lost(self, client: int) -> list[Effect]:
        """Record that a client has ended (P3)."""
        record = self._clients.pop(client, None)
        if record is None:
            return []
        # The waiting requests first, so that no request of this client is served. The youngest items
        # first, so that each returns to the front of its queue.
        requests = sorted(
            record.requests.values(),
            key=lambda request: (request.state is not RequestState.WAITING, -request.serial),
        )
        return [effect for request in requests for effect in self._end(request)]

    # -- requests ----------------------------------------------------------------------------------

    def requested(self, ticket: Ticket, demand: PrimitiveRequest, now: float) -> list[Effect]:
        """Carry out a request, which may wait."""
        client = self._clients.get(demand.client)
        if client is None:
            return [_unknown(ticket)]
        client.until = now + self._lease_s
        primitive = self._primitive(demand, client)
        if not isinstance(primitive, _Primitive):
            return [Fail(ticket, *primitive)]
        if demand.verb == "look":
            size = primitive.size or 0
            figures = [primitive.out, len(primitive.items), primitive.is_set, size]
            return [ReplyValue(ticket, figures), *self._serve(primitive)]
        if demand.verb in ("set", "clear"):
            primitive.is_set = demand.verb == "set"
            return [ReplyValue(ticket, True), *self._serve(primitive)]
        request = self._begin(client, demand, primitive, ticket)
        effects = self._serve(primitive)
        if request.state is RequestState.WAITING and demand.due <= now:
            effects += self._expire(request)
        elif request.state is RequestState.WAITING and demand.due < inf:
            if len(self._dues) > 2 * self.waiting + 64:  # most of these requests wait no more
                self._dues = [row for row in self._dues if row[2].state is RequestState.WAITING]
                heapify(self._dues)
            heappush(self._dues, (demand.due, next(self._serials), request))
        return effects

    def dropped(self, client: int, number: int) -> list[Effect]:
        """Record that the caller of a request waits no more (P2)."""
        record = self._clients.get(client)
        request = None if record is None else record.requests.get(number)
        if request is None or request.state is not RequestState.WAITING:
            return []
        request.ticket = None
        return self._end(request)

    def _primitive(self, demand: PrimitiveRequest, client: _Client) -> _Primitive | tuple[int, str]:
        """Return the primitive of a demand, or (code, text) if the demand is refused (P7)."""
        kind, name = demand.key
        if len(client.requests) >= limits.PRIMITIVE_REQUESTS_MAX:
            return RESOURCE_EXHAUSTED, (
                f"this process holds or waits for {limits.PRIMITIVE_REQUESTS_MAX} locks, places, "
                f"items and events"
            )
        if demand.number in client.requests:
            return INVALID_ARGUMENT, f"request number {demand.number} is in use"
        nbytes = _size_of(demand.item) if demand.verb == "put" else 0
        if nbytes and self.nbytes + nbytes > limits.QUEUED_BYTES_MAX:
            return RESOURCE_EXHAUSTED, (
                f"the items of all queues take {self.nbytes} bytes, and at most "
                f"{limits.QUEUED_BYTES_MAX} are kept: get items before you put into {name!r}, or "
                f"give the queues a maxsize"
            )
        primitive = self._primitives.get(demand.key)
        if primitive is None:
            if len(self._primitives) >= limits.PRIMITIVES_MAX:
                return RESOURCE_EXHAUSTED, (
                    f"{limits.PRIMITIVES_MAX} locks, semaphores, queues and events are in use: "
                    f"release, empty or clear some before you use {kind} {name!r}"
                )
            primitive = self._primitives[demand.key] = _Primitive(demand.key, demand.size)
        if primitive.size is None:
            primitive.size = demand.size
        elif demand.size not in (None, primitive.size):
            return INVALID_ARGUMENT, (
                f"{kind} {name!r} is in use with size {primitive.size}, so it cannot have size "
                f"{demand.size}"
            )
        return primitive

    def _begin(
        self, client: _Client, demand: PrimitiveRequest, primitive: _Primitive, ticket: Ticket
    ) -> _Request:
        is_put = demand.verb == "put"
        line = primitive.putters if is_put else primitive.takers
        request = client.requests[demand.number] = _Request(
            client, demand.number, primitive, line, ticket, demand.item, demand.due
        )
        line[request] = None
        self.waiting += 1
        self.nbytes += _size_of(demand.item) if is_put else 0
        return request

    # -- time --------------------------------------------------------------------------------------

    def ticked(self, now: float) -> list[Effect]:
        """End leases and late requests, and grant places once the keeper has settled."""
        effects: list[Effect] = []
        while self._ends and self._ends[0][0] <= now:
            number = heappop(self._ends)[1]
            client = self._clients.get(number)
            if client is not None and client.until <= now:
                effects += self.lost(number)
            elif client is not None:
                heappush(self._ends, (client.until, number))
        if -inf < self._settled_at <= now:
            self._settled_at = -inf
            for primitive in list(self._primitives.values()):
                effects += self._serve(primitive)
        while self._dues and self._dues[0][0] <= now:
            request = heappop(self._dues)[2]
            if request.state is RequestState.WAITING:
                effects += self._expire(request)
        return effects

    # -- lines -------------------------------------------------------------------------------------

    def _serve(self, primitive: _Primitive) -> list[Effect]:
        """Carry out the requests of a primitive that need not wait (P4). Forget an idle
        primitive."""
        effects: list[Effect] = []
        takers, putters, items = primitive.takers, primitive.putters, primitive.items
        grants = primitive.key[0] in (LOCK, SEMAPHORE) and self._settled_at == -inf
        size = primitive.size or 0
        while True:
            taker = next(iter(takers), None)
            if taker is not None and items:
                taker.serial, taker.item = items.popleft()
                effects += self._answer(taker, taker.item)
            elif putters and not 0 < size <= len(items):
                putter = next(iter(putters))
                items.append((next(self._serials), putter.item))
                effects += self._answer(putter, True)
            elif taker is not None and primitive.is_set:
                effects += self._answer(taker, True)
            elif taker is not None and grants and primitive.out < size:
                effects += self._answer(taker, next(self._fences))
            else:
                break
        if not (items or takers or putters or primitive.out or primitive.is_set):
            self._primitives.pop(primitive.key, None)
        return effects

    def _answer(self, request: _Request, outcome: Any) -> list[Effect]:
        """End the wait of a request with an outcome."""
        del request.line[request]
        self.waiting -= 1
        kind = request.primitive.key[0]
        if outcome is None or outcome is True:
            request.enter(RequestState.OVER)
            del request.client.requests[request.number]
        else:
            request.enter(RequestState.GIVEN if kind == QUEUE else RequestState.HOLDING)
            request.primitive.out += 1
        return [] if request.ticket is None else [ReplyValue(request.ticket, outcome)]

    def _expire(self, request: _Request) -> list[Effect]:
        """Answer a late request (P6)."""
        self._uncount(request)
        return [*self._answer(request, None), *self._serve(request.primitive)]

    def _end(self, request: _Request, is_confirmed: bool = False) -> list[Effect]:
        """Forget a request, and free what it has. A request that waits fails."""
        state, primitive, effects = request.state, request.primitive, list[Effect]()
        request.enter(RequestState.OVER)
        del request.client.requests[request.number]
        if state is RequestState.WAITING:
            del request.line[request]
            self.waiting -= 1
            self._uncount(request)
            if request.ticket is not None:
                effects = [Fail(request.ticket, ABORTED, "the request was withdrawn")]
        else:
            primitive.out -= 1
        if state is RequestState.GIVEN and not is_confirmed:  # P5: back to its place in the order
            items, place = primitive.items, 0
            while place < len(items) and items[place][0] < request.serial:
                place += 1
            items.insert(place, (request.serial, request.item))
        return effects + self._serve(primitive)

    def _uncount(self, request: _Request) -> None:
        """Stop counting the bytes of an item that does not enter its queue."""
        if request.line is request.primitive.putters:
            self.nbytes -= _size_of(request.item)


def _size_of(item: bytes) -> int:
    return len(item) + ITEM_OVERHEAD_BYTES


def _unknown(ticket: Ticket) -> Fail:
    return Fail(ticket, ABORTED, "the lease of this process has ended, or the dispatcher is new")
