"""The keeper of locks, semaphores, queues and events, behind the port of a dispatcher: the runtime
of primitives_machine.py.

Rules
    All code runs in the loop, and no thread waits, because a request that waits is a ticket in the
    machine. Callers must have the role `worker` or `submit`. Items of queues are bytes here. This
    module validates the arguments before it passes them to the machine. The end of a connection ends
    no client, because the client may connect again within its lease. If the client's process ran on
    this host and ends, the client ends at once.

Methods (each name follows "primitives."; `client` is the client's number)
    open(client, pid, holds)                -> (incarnation of the keeper, lease in seconds, numbers
        of the requests that hold places); holds are (number, kind, name, size, fence)
    renew(client, pid, confirmed, withdrawn) -> None
    request(client, number, verb, kind, name, size, item, timeout) -> the outcome; None if the request
        was late

Not here: the decisions (primitives_machine.py), the client's side (primitives_client.py).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final

from zmqdist import clock as time
from zmqdist.coordination.arguments import (
    invalid_argument,
    list_argument,
    number_argument,
    seconds_argument,
    text_argument,
)
from zmqdist.coordination.primitives_machine import (
    LOCK,
    SEMAPHORE,
    VERBS,
    Hold,
    Key,
    PrimitiveRequest,
    Primitives,
)
from zmqdist.coordination.replies import Effect, ReplyValue
from zmqdist.errors import from_code
from zmqdist.limits import PRIMITIVE_REQUESTS_MAX, QUEUE_ITEM_BYTES_MAX
from zmqdist.rpc.service import PendingCall, RpcService
from zmqdist.transport.loop import Loop
from zmqdist.transport.process_ends import watch_process_end
from zmqdist.transport.router import Peer, Router
from zmqdist.wire.hello import host_identity

PREFIX: Final = "primitives."
ROLES: Final = frozenset({"worker", "submit"})

FENCES_OF_MILLISECOND: Final = 2**20
"""The fences of a keeper begin with the milliseconds of its start, multiplied by this number, so that
they are above all fences of earlier keepers."""


class PrimitivesService:
    """The RPC methods of a keeper; the module's docstring lists them."""

    def __init__(
        self,
        service: RpcService,
        router: Router,
        loop: Loop,
        incarnation: int,
        lease_s: float,
        is_first: bool,
    ) -> None:
        """Register the RPC methods at `service`, which must not be attached to a router yet.

        Args:
          is_first: whether no other keeper has had this keeper's address. If False, no place of a
            lock or semaphore is granted for one lease.
        """
        settled_at = -inf if is_first else loop.now() + lease_s
        first_fence = int(time.time() * 1000) * FENCES_OF_MILLISECOND
        self._machine = Primitives(lease_s, settled_at, first_fence)
        self._loop = loop
        self._welcome = incarnation, lease_s
        self._due = inf
        self._clients: dict[Peer, tuple[int, int]] = {}
        """The client that last used each connection, with the pid of its process."""
        router.on_gone.append(self._peer_gone)
        methods: dict[str, Callable[..., None]] = {
            "open": self._open,
            "renew": self._renew,
            "request": self._request,
        }
        for name, fn in methods.items():
            service.register_later(PREFIX + name, fn, roles=ROLES)
        self._perform([])

    def _open(self, call: PendingCall, client: int, pid: int, holds: Any) -> None:
        number_argument(client, "the number of a client")
        restored = [_hold(hold) for hold in _rows(holds)]
        former, _ = self._clients.get(call.peer, (client, 0))
        self._clients[call.peer] = max(former, client), number_argument(pid, "a pid")
        *effects, reply = self._machine.opened(call, client, restored, self._loop.now(), former)
        if isinstance(reply, ReplyValue):
            reply = ReplyValue(call, (*self._welcome, reply.value))
        self._perform([*effects, reply])

    def _renew(
        self, call: PendingCall, client: int, pid: int, confirmed: Any, withdrawn: Any
    ) -> None:
        number_argument(client, "the number of a client")
        numbers = _numbers(confirmed), _numbers(withdrawn)
        # the client may have connected again
        latest = max(client, self._clients.get(call.peer, (0, 0))[0])
        self._clients[call.peer] = latest, number_argument(pid, "a pid")
        self._perform(self._machine.renewed(call, client, *numbers, self._loop.now()))

    def _request(
        self,
        call: PendingCall,
        client: int,
        number: int,
        verb: str,
        kind: str,
        name: str,
        size: int | None,
        item: bytes,
        timeout: float | None,
    ) -> None:
        key = _key(kind, name, size)
        if type(verb) is not str or verb not in VERBS[kind]:
            raise invalid_argument(f"one of {', '.join(sorted(VERBS[kind]))}", verb)
        if type(item) is not bytes or len(item) > QUEUE_ITEM_BYTES_MAX:
            raise invalid_argument(f"an item of at most {QUEUE_ITEM_BYTES_MAX} bytes", type(item))
        number_argument(client, "the number of a client")
        number_argument(number, "the number of a request")
        now = self._loop.now()
        demand = PrimitiveRequest(
            client, number, verb, key, size, item, now + seconds_argument(timeout)
        )
        call.on_dropped(lambda: self._perform(self._machine.dropped(client, number)))
        self._perform(self._machine.requested(call, demand, now))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            call = effect.ticket
            assert isinstance(call, PendingCall)
            if isinstance(effect, ReplyValue):
                call.reply(effect.value)
            else:
                call.fail(from_code(effect.code, effect.message))
        due = self._machine.deadline
        if due != self._due:
            self._due = due
            self._loop.set_timer(self, None if due == inf else due, self._tick)

    def _tick(self) -> None:
        self._due = inf
        self._perform(self._machine.ticked(self._loop.now()))

    def _peer_gone(self, peer: Peer) -> None:
        client, pid = self._clients.pop(peer, (0, 0))
        # only on this host can the keeper see that a process has ended
        if client and peer.hello is not None and peer.hello.host == host_identity():
            watch_process_end(
                self._loop,
                (self, client),
                pid,
                lambda: all(client != number for number, _ in self._clients.values()),
                lambda: self._perform(self._machine.lost(client)),
            )


def _key(kind: Any, name: Any, size: Any) -> Key:
    if type(kind) is not str or kind not in VERBS:
        raise invalid_argument(f"one of {', '.join(VERBS)}", kind)
    text_argument(name, f"the name of a {kind}")
    if (kind == LOCK and size != 1) or (kind == SEMAPHORE and not size):
        raise invalid_argument(f"the number of places of a {kind}", size)
    if size is not None:
        number_argument(size, f"the size of a {kind}")
    return kind, name


def _rows(value: Any) -> list[Any]:
    """Return the items of a list that is no longer than the requests of a client."""
    rows = list_argument(value, "a list")
    if len(rows) > PRIMITIVE_REQUESTS_MAX:
        raise invalid_argument(f"a list of at most {PRIMITIVE_REQUESTS_MAX} items", len(rows))
    return rows


def _numbers(value: Any) -> list[int]:
    return [number_argument(number, "the number of a request") for number in _rows(value)]


def _hold(value: Any) -> Hold:
    fields = list_argument(value, "a place")
    if len(fields) != 5 or fields[1] not in (LOCK, SEMAPHORE):
        raise invalid_argument("a place: (number, kind, name, size, fence)", value)
    number, kind, name, size, fence = fields
    key = _key(kind, name, size)
    _numbers([number, fence])
    return Hold(number, key, size, fence)
