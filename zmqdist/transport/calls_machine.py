"""Questions with answers: the call tables of both ends, and no I/O.

Rule 1: a method is an event (past tense), what it returns is what the shell must now do: messages to send, or calls that
        have ended and whose waiters must be told. Nothing here waits, reads a clock or touches a socket.
Rule 2: each table belongs to one shell, which calls it under its lock (client) or in its loop (server).
Rule 3: a blocking call passes through here twice on each side, so the hot path is one record a call and plain dicts.

Theory of operation
    The client's calls are either waiting (to be sent) or in flight (sent, naming the incarnation of the server they were meant
    for). Without a server they all wait for one. With a server they wait for company: the first leaves at once, and those
    that are asked while it is in flight leave together, when an answer arrives, when somebody wants one of them, or when
    a message is full. When the connection goes, what is in flight has ended with UNAVAILABLE - it may have happened, so it is
    never sent again - and what waits goes on waiting for a server.
    So that no client fills a server's memory, arguments leave unasked only while those of unanswered calls are within a window.
    Beyond it a call with large parts is sent without them: the server lets them in when it has room. Any other call is held back
    until answers have come, unless it is so small that it does not count (`counted_bytes`, the rule of both ends): those pass, so that
    a handler can wait for a small call of the very client whose large ones keep the server busy.
    The server takes a call only when it names this life of it, holds at most `pending_max` of one peer, and drops what
    nobody waits for any more: cancelled, past its time, or of a peer that has gone.

Promises, checked by tests/machines/test_calls.py and in simulation (tests/sim/test_rpc.py)
    P1  a call ends exactly once: value, remote error, DEADLINE_EXCEEDED, CANCELLED, UNAVAILABLE, or the refusal's error
    P2  a call is sent at most once that could be delivered; one that was in flight is never sent again
    P3  a call is sent only to a server whose hello is known, and names its incarnation
    P4  nothing is left in a table of a call that has ended, or of a peer that has gone
    P5  no call of another incarnation is ever started
    P6  a peer has at most `pending_max` calls unanswered; the next is answered RESOURCE_EXHAUSTED
    P7  calls leave in the order of asking, but for those that are held back (P9); one message has at most BATCH_ITEMS_MAX of them
        and closes at BATCH_BYTES_MAX; a call with frames has one of its own
    P8  a call does not wait for company when nothing is in flight, when a full message waits, or when it has frames
    P9  arguments of unanswered calls that were sent unasked and count are at most `eager_bytes_max` bytes, or one call; those of a call
        with more than CHUNK_BYTES in its frames leave later where they do not fit, other calls that count are held back, in the
        order of asking, and neither stands in the way of a call that counts nothing

Not here: what is in a body (wire/safe.py), who waits for a call and how (channel.py), who runs it (rpc/service.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import ceil, inf
from typing import Any, Final, TypeAlias

from zmqdist.errors import CANCELLED, DEADLINE_EXCEEDED, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNAVAILABLE
from zmqdist.limits import (
    BATCH_BYTES_MAX,
    BATCH_ITEMS_MAX,
    CALLS_PENDING_MAX,
    CHUNK_BYTES,
    EAGER_BYTES_MAX,
    UNCOUNTED_BYTES_MAX,
)
from zmqdist.messages import Call, CancelCall, Reply

NEVER_S: Final = 1e9
"""A call that is due later than that, on the shell's clock, is due never: 30 years."""

Frames: TypeAlias = Sequence[Any]
"""Payload frames: buffers that only the two ends look into."""


def nbytes_of(frames: Frames) -> int:
    """Bytes of buffers of any kind."""
    return sum(frame.nbytes if hasattr(frame, "nbytes") else len(frame) for frame in frames)


def counted_bytes(body: bytes, frames: Frames) -> int:
    """What the arguments of a call count in bytes, among those that were sent unasked: nothing, if they are small. At both ends."""
    nbytes = len(body) + nbytes_of(frames) if frames else len(body)
    return nbytes if nbytes > UNCOUNTED_BYTES_MAX else 0


class ClientCall:
    """One question, from `submitted` to its end.

    Attributes:
      method, body, frames: what is asked; the shell empties body and frames once they are sent.
      due: when the caller stops waiting, on the shell's clock in seconds; `inf` for never.
      id: number in the table, 0 before `submitted`.
      ended: whether it has ended; then `code` (0: value), `message`, and `body` and `frames` of the answer.
      waits_for_server: False: it ends with UNAVAILABLE where it would have to wait for a server to appear.
      bounded: False: it is left out of P9, because the method that it asks for begins at once, and has bounds of its own.
      nbytes: what it counts of P9, 0 before `submitted`; `held`: it was sent without its large parts.
      room: where large parts of the answer are received; None for wherever the shell likes.
      waiters, callbacks: the shell's own; empty until it needs them.
    """

    __slots__ = (
        "allocate",
        "body",
        "bounded",
        "callbacks",
        "code",
        "due",
        "ended",
        "frames",
        "held",
        "id",
        "message",
        "method",
        "nbytes",
        "waiters",
        "waits_for_server",
    )

    def __init__(self, method: str, body: bytes, frames: Frames = (), due: float = inf) -> None:
        self.id = 0
        self.method = method
        self.body = body
        self.frames = frames
        self.due = due
        self.ended = False
        self.code = 0
        self.message = ""
        self.waits_for_server = True
        self.bounded = True
        self.nbytes = 0
        self.held = False
        self.allocate: Any = None
        self.waiters: Any = None
        self.callbacks: Any = None

    def end(self, code: int, message: str, body: bytes = b"", frames: Frames = ()) -> None:
        """What the tables do; besides them only whoever never gave the call to one may do it."""
        self.code = code
        self.message = message
        self.body = body
        self.frames = frames
        self.ended = True


class ClientCalls:
    """The calls of one client to one address.

    Attributes:
      incarnation: of the server that is connected; 0 while none is.
      in_flight, waiting: the calls by number, in the order of asking; those that wait do so for a server, or for company.
      waiting_bytes: of the bodies of those in `waiting`.
      unasked: bytes of arguments that were sent unasked, of the calls in flight (P9).
      held_back: the calls that wait for answers, in the order of asking: all were asked before those in `waiting`.
      deadline: when `ticked` must be called at the latest: no call is due before. `inf` when none has a deadline.
    """

    def __init__(
        self, address: str, pending_max: int = CALLS_PENDING_MAX, eager_bytes_max: int = EAGER_BYTES_MAX
    ) -> None:
        self._address = address
        self._pending_max = pending_max
        self._eager_bytes_max = eager_bytes_max
        self._last_id = 0
        self.eager_bytes = 0
        self.deadline = inf
        self.waiting_bytes = 0
        self.incarnation = 0
        self.in_flight: dict[int, ClientCall] = {}
        self.waiting: dict[int, ClientCall] = {}
        self.held_back: dict[int, ClientCall] = {}

    def submitted(self, call: ClientCall) -> bool:
        """A new call. It waits, or has ended here (then `ended` is set): there are too many, or no server for one that waits for none.

        Returns:
          Whether what waits should leave now, although nobody wants an answer yet (P8).
        """
        waiting, in_flight = self.waiting, self.in_flight
        if len(in_flight) + len(waiting) + len(self.held_back) >= self._pending_max:
            call.end(
                RESOURCE_EXHAUSTED, f"{self._pending_max} calls to {self._address} are unanswered: wait for some first"
            )
            return False
        if not self.incarnation and not call.waits_for_server:
            call.end(UNAVAILABLE, f"the server at {self._address} has gone; the call of {call.method!r} was not sent")
            return False
        self._last_id = call.id = self._last_id + 1
        if call.due < self.deadline:
            self.deadline = call.due
        nbytes = len(call.body)
        self.waiting_bytes += nbytes
        if call.bounded:
            call.nbytes = counted_bytes(call.body, call.frames)
        waiting[call.id] = call
        return self.incarnation != 0 and (
            not in_flight
            or len(waiting) >= BATCH_ITEMS_MAX
            or self.waiting_bytes >= BATCH_BYTES_MAX
            or bool(call.frames)
        )

    def next_message(self) -> list[ClientCall]:
        """The calls to be sent as one message, in flight from now on; none when none may leave, or no server is known."""
        if not self.incarnation:
            return []
        waiting = self.waiting
        if self.held_back:
            if calls := self._next_calls(self.held_back):
                return calls
        elif len(waiting) == 1:
            number, call = waiting.popitem()
            self.waiting_bytes = 0
            if call.nbytes and not self._may_send(call):
                self.held_back[number] = call
                return []
            self.in_flight[number] = call
            self.eager_bytes += call.nbytes
            return [call]
        return self._next_calls(waiting) if waiting else []

    def _next_calls(self, source: dict[int, ClientCall]) -> list[ClientCall]:
        """The first calls of `held_back` or `waiting`, as many as make a message. Those of `waiting` that may not leave are held back."""
        held_back = self.held_back
        resumes = source is held_back
        calls: list[ClientCall] = []
        behind: list[ClientCall] = []
        byte_count = 0
        for call in source.values():
            if call.frames and calls:
                break
            if call.nbytes:
                if not self._may_send(call, resumes or not (held_back or behind)):
                    if resumes:
                        break
                    behind.append(call)
                    continue
                self.eager_bytes += call.nbytes
            calls.append(call)
            byte_count += len(call.body)
            if call.frames or len(calls) >= BATCH_ITEMS_MAX or byte_count >= BATCH_BYTES_MAX:
                break
        if not resumes:
            self.waiting_bytes -= byte_count + sum(len(call.body) for call in behind)
        if len(calls) == len(source):
            self.in_flight.update(source)
            source.clear()
        else:
            for call in calls:
                self.in_flight[call.id] = source.pop(call.id)
            for call in behind:
                held_back[call.id] = source.pop(call.id)
        return calls

    def _may_send(self, call: ClientCall, first: bool = True) -> bool:
        """P9 for a call that counts: whether it may leave now, perhaps without its large parts.

        Args:
          first: no call is held back that was asked before it.
        """
        if first and self.eager_bytes + call.nbytes <= self._eager_bytes_max:
            return True
        if call.frames and nbytes_of(call.frames) > CHUNK_BYTES:
            call.held, call.nbytes = True, 0
            return True
        return first and not self.eager_bytes

    def is_unsent(self, call: ClientCall) -> bool:
        """Whether it has not been sent: for a server, for company or for answers to others."""
        return call.id in self.waiting or call.id in self.held_back

    def request(self, call: ClientCall, now: float) -> Call:
        """What the server is told of a call."""
        left_ms = max(1, ceil((call.due - now) * 1000)) if call.due < NEVER_S else 0
        return Call(call.id, call.method, self.incarnation, left_ms, call.body, (), call.held)

    def undelivered(self, calls: list[ClientCall]) -> None:
        """The message of these calls could not be handed to the connection: they were not sent, so they wait, before the others."""
        unsent = {call.id: call for call in calls if self.in_flight.pop(call.id, None) is not None}
        self.eager_bytes -= sum(call.nbytes for call in unsent.values())
        self._requeue(unsent)

    def server_up(self, incarnation: int) -> None:
        """A server's hello arrived: what waits can be sent."""
        self.incarnation = incarnation

    def server_leaving(self) -> None:
        """The server said goodbye: it still answers what it has, and takes nothing new. New calls wait for its next life."""
        self.incarnation = 0
        self._requeue({})

    def connection_lost(self) -> list[ClientCall]:
        """The connection has ended, and what it had brought was read: the calls that ended with it."""
        self.incarnation = 0
        self.eager_bytes = 0
        self._requeue({})
        ended = list(self.in_flight.values())
        self.in_flight.clear()
        for call in ended:
            call.end(
                UNAVAILABLE,
                f"the connection to {self._address} went while the call of {call.method!r} was in flight; it may have been carried out",
            )
        for call in [call for call in self.waiting.values() if not call.waits_for_server]:
            self._forget(call)
            call.end(UNAVAILABLE, f"the server at {self._address} has gone; the call of {call.method!r} was not sent")
            ended.append(call)
        return ended

    def replied(self, reply: Reply, frames: Frames) -> ClientCall | None:
        """An answer arrived: the call that ended; None when nobody waits for it any more."""
        call = self.in_flight.pop(reply.id, None)
        if call is not None:
            self.eager_bytes -= call.nbytes
            call.code = reply.code
            call.message = reply.message
            call.body = reply.body
            call.frames = frames
            call.ended = True
        return call

    def cancelled(self, call: ClientCall) -> CancelCall | None:
        """The caller gives up: the call has ended, unless it had before. What to tell the server, if anything."""
        if call.ended:
            return None
        in_flight = self._forget(call)
        call.end(CANCELLED, f"the call of {call.method!r} was cancelled by its caller")
        return CancelCall(call.id) if in_flight else None

    def ticked(self, now: float) -> list[ClientCall]:
        """The calls whose time has passed. The server is not told: it knows the time that was left."""
        if now < self.deadline:
            return []
        ended = [call for calls in self._tables() for call in calls.values() if call.due <= now]
        for call in ended:
            sent = self._forget(call)
            waited_for = "an answer" if sent or self.incarnation else f"a server at {self._address}"
            call.end(DEADLINE_EXCEEDED, f"deadline passed while the call of {call.method!r} waited for {waited_for}")
        self.deadline = min((call.due for calls in self._tables() for call in calls.values()), default=inf)
        return ended

    def failed(self, code: int, message: str) -> list[ClientCall]:
        """The server refuses this client, or the client is closed: every call has ended with this error."""
        self.incarnation = 0
        ended = [call for calls in self._tables() for call in calls.values()]
        for calls in self._tables():
            calls.clear()
        self.waiting_bytes = 0
        self.eager_bytes = 0
        for call in ended:
            call.end(code, message)
        return ended

    def _tables(self) -> tuple[dict[int, ClientCall], ...]:
        return self.in_flight, self.held_back, self.waiting

    def _requeue(self, unsent: dict[int, ClientCall]) -> None:
        """These, and all that are held back, wait with the others, in the order of asking."""
        if unsent or self.held_back:
            again = {**unsent, **self.held_back}
            self.waiting_bytes += sum(len(call.body) for call in again.values())
            self.held_back.clear()
            self.waiting = dict(sorted({**again, **self.waiting}.items()))

    def _forget(self, call: ClientCall) -> bool:
        """Take it out of the table, which may make room for what is held back; whether it was in flight."""
        if self.in_flight.pop(call.id, None) is not None:
            self.eager_bytes -= call.nbytes
            return True
        if self.waiting.pop(call.id, None) is not None:
            self.waiting_bytes -= len(call.body)
        else:
            self.held_back.pop(call.id, None)
        return False


class ServedCall:
    """One call that a server holds. `is_wanted` may be asked from any thread, the rest is the loop's.

    Attributes:
      on_dropped: the shell's own: what to do when nobody waits for it any more; None for nothing.
    """

    __slots__ = ("dropped", "due", "id", "on_dropped", "peer")

    def __init__(self, peer: Hashable, id: int, due: float) -> None:
        self.peer = peer
        self.id = id
        self.due = due
        self.dropped = False
        self.on_dropped: Any = None

    def is_wanted(self, now: float) -> bool:
        """Whether somebody still waits for the answer."""
        return not self.dropped and now < self.due


class ServerCalls:
    """The calls that one server holds, by peer."""

    def __init__(self, incarnation: int, pending_max: int = CALLS_PENDING_MAX) -> None:
        self._incarnation = incarnation
        self._pending_max = pending_max
        self._by_peer: dict[Hashable, dict[int, ServedCall]] = {}
        self.repeated = 0
        """Calls refused because their number was in use: a fault of the peer."""

    def __len__(self) -> int:
        return sum(map(len, self._by_peer.values()))

    def stale_reply(self, call: Call) -> Reply | None:
        """The answer to a call that was meant for another life of this server; None for one that was meant for this one."""
        if call.incarnation == self._incarnation:
            return None
        return Reply(
            call.id, UNAVAILABLE, "the call was meant for an earlier life of this server; it was not carried out", b""
        )

    def call_arrived(self, peer: Hashable, call: Call, now: float) -> ServedCall | Reply:
        """A call that will take its time: its record, or the answer that refuses it."""
        refused = self.stale_reply(call)
        if refused is not None:
            return refused
        calls = self._by_peer.setdefault(peer, {})
        if call.id in calls:
            self.repeated += 1
            return Reply(call.id, INVALID_ARGUMENT, f"call number {call.id} is in use by an unanswered call", b"")
        if len(calls) >= self._pending_max:
            return Reply(call.id, RESOURCE_EXHAUSTED, f"{self._pending_max} calls of this client are unanswered", b"")
        served = calls[call.id] = ServedCall(peer, call.id, now + call.left_ms / 1000 if call.left_ms else inf)
        return served

    def finished(self, served: ServedCall, now: float = -inf) -> bool:
        """It was run, or turned out to be unwanted: whether an answer is to be sent. True once.

        After the deadline none is: a function that was told so by `cancelled()` has given up, and what it returned is no result.
        Its caller's own deadline was earlier.
        """
        calls = self._by_peer.get(served.peer)
        if calls is not None and calls.get(served.id) is served:
            del calls[served.id]
            if not calls:
                del self._by_peer[served.peer]
        wanted, served.dropped = served.is_wanted(now), True
        return wanted

    def cancelled(self, peer: Hashable, id: int) -> ServedCall | None:
        """Nobody waits for this call any more: it is not started, and not answered. It counts until it is `finished`.

        Returns:
          The call; None when it was answered, or cancelled, before.
        """
        served = self._by_peer.get(peer, {}).get(id)
        if served is None or served.dropped:
            return None
        served.dropped = True
        return served

    def arguments_lost(self, peer: Hashable, id: int) -> None:
        """The arguments of this call will not arrive: it is not run."""
        served = self._by_peer.get(peer, {}).get(id)
        if served is not None:
            self.finished(served)

    def peer_gone(self, peer: Hashable) -> list[ServedCall]:
        """The connection has ended: its calls are as if cancelled. Those that were not before."""
        dropped = [served for served in self._by_peer.pop(peer, {}).values() if not served.dropped]
        for served in dropped:
            served.dropped = True
        return dropped
