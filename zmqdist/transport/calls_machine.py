"""Calls and replies: the call tables of the client and of the server, without I/O.

Rule 1: each method is an event (past tense), and its return value tells the caller what to do now:
        which messages to send, or which calls have ended, so that the caller wakes the waiting
        threads. No method waits, reads a clock or touches a socket.
Rule 2: each table has one owner. A client uses its table only under the channel's lock, and a
server uses its table only in its loop.
Rule 3: every blocking call passes through this module twice on each side, so the hot path uses only
        plain dicts and one record for each call.

Theory of operation
    A client's call is either waiting (not sent yet) or in flight (sent to one incarnation of the
    server). While no server is connected, all calls wait for a server. While a server is connected,
    calls wait only to be batched, or because they are held back (see below). The first call leaves
    at once. The calls that are made while a call is in flight leave together when a reply arrives,
    when a thread waits for one of them, or when they fill a message. When the connection is lost,
    the calls in flight end with UNAVAILABLE. They are never sent again, because the server may have
    executed them. Waiting calls wait for the next connection.
    A client must not fill the server's memory. So it sends arguments eagerly, which means before
    the server has room for them, only while the arguments of all its unanswered calls fit into a
    window of `eager_bytes_max` bytes. Beyond the window, a call with large parts is sent without
    these parts, and the server requests them when it has room. Any other call is held back until
    replies have arrived, unless its arguments are so small that they do not count (`counted_bytes`,
    a rule that the client and the server share). Small calls are never held back, because a handler
    may be waiting for a small call of the client whose large calls keep the server busy. The server
    accepts only calls that name its incarnation, from peers that have fewer than `pending_max`
    unanswered calls. The server drops a call whose reply is no longer wanted, because the call was
    cancelled, its deadline has passed, or its connection has ended.

Promises, checked by tests/transport/test_calls_machine.py and in simulation (tests/sim/test_rpc.py)
    P1  A call ends exactly once: with a value, a remote error, DEADLINE_EXCEEDED, CANCELLED,
        UNAVAILABLE, or the error of a refusal.
    P2  Of all attempts to send a call, at most one delivers it; a call that was in flight is never
        sent again.
    P3  A call is sent only to a server whose hello has arrived, and names the incarnation in that
        hello.
    P4  A table keeps no state of a call that has ended, or of a peer whose connection has ended.
    P5  A call for another incarnation is never started.
    P6  A peer has at most `pending_max` unanswered calls; the reply to the next one is
        RESOURCE_EXHAUSTED.
    P7  Calls leave in the order in which they were made, except calls that are held back (P9). A
        message has at most BATCH_ITEMS_MAX calls, and gets no further call when its bodies have
        BATCH_BYTES_MAX bytes. A call with frames has a message of its own.
    P8  A call does not wait to be batched if no call is in flight, if the waiting calls fill a
        message, or if the call has frames. One that is `later` does, unless the waiting calls fill
        a message: it leaves with the next call.
    P9  The counted arguments that unanswered calls have sent eagerly are at most `eager_bytes_max`
        bytes, unless they belong to a single call. If a call does not fit and has more than
        CHUNK_BYTES in its frames, it leaves without its frames. Other counted calls are held back,
        in the order in which they were made. A call whose arguments do not count is never held
        back.

Not here: the content of a body (wire/safe.py), the threads that wait (channel.py), the execution of
a call (rpc/service.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import chain
from math import ceil, inf
from typing import Any, Final, TypeAlias

from zmqdist.errors import (
    CANCELLED,
    DEADLINE_EXCEEDED,
    INVALID_ARGUMENT,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
)
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
"""Time on the owner's clock in seconds, 30 years after its zero: a call whose `due` is later has no
deadline."""

Frames: TypeAlias = Sequence[Any]
"""Payload frames: buffers whose content only the caller and the handler interpret."""


def nbytes_of(frames: Frames) -> int:
    """Return the bytes of a sequence of buffers of any kind."""
    nbytes = 0
    for frame in frames:  # a generator takes three times as long for one frame
        nbytes += frame.nbytes if hasattr(frame, "nbytes") else len(frame)
    return nbytes


def counted_bytes(body: bytes, frames: Frames) -> int:
    """Return how many bytes of a call's arguments count against the bound on eager arguments: 0 if
    the arguments are small.

    Client and server both apply this rule.
    """
    nbytes = len(body) + nbytes_of(frames) if frames else len(body)
    return nbytes if nbytes > UNCOUNTED_BYTES_MAX else 0


class ClientCall:
    """One call of a client, from `submitted` to its end.

    Attributes:
      method, body, frames: the request; the owner empties `body` and `frames` after it has sent
        them.
      due: time on the owner's clock, in seconds, at which the caller stops waiting; `inf` if the
        call has no deadline.
      id: number of the call in the table; 0 before `submitted`.
      ended: whether the call has ended. Then `code`, `message`, `body` and `frames` hold the reply,
        which is a value if `code` is 0.
      waits_for_server: if False, and no server is connected, the call ends with UNAVAILABLE instead
        of waiting for one.
      later: whether the call need not leave before the next call, or before a thread of the process
        waits for a reply. The caller makes sure that one does soon.
      bounded: whether P9, the bound on eager arguments, applies to the call. It does not if the
        server starts the method at once, because the server bounds such calls in another way.
      nbytes: the bytes of arguments that count against the bound on eager arguments (P9); 0 before
        `submitted`.
      held: whether the call was sent without its large parts, which then wait here until the server
        requests them.
      allocate: function that returns the memory for the large parts of the reply; None means fresh
        memory.
      waiters, callbacks: lists that belong to the owner; None until it needs them.
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
        "later",
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
        self.later = False
        self.bounded = True
        self.nbytes = 0
        self.held = False
        self.allocate: Any = None
        self.waiters: Any = None
        self.callbacks: Any = None

    def end(self, code: int, message: str, body: bytes = b"", frames: Frames = ()) -> None:
        """End the call. The tables call this; other code may call it only for a call that was never
        given to a table."""
        self.code = code
        self.message = message
        self.body = body
        self.frames = frames
        self.ended = True


class ClientCalls:
    """The calls of one client to one address.

    Attributes:
      incarnation: the incarnation of the connected server; 0 while no server is connected.
      in_flight: sent calls by number, in the order in which they were made.
      waiting: unsent calls by number, in the order in which they were made; they wait for a server,
        or to be batched with other calls.
      waiting_bytes: bytes of the bodies in `waiting`.
      eager_bytes: bytes of counted arguments that the calls in flight have sent eagerly (P9).
      held_back: calls that wait until replies make room for their arguments (P9), in the order in
        which they were made. *Invariant*: each was made before every call in `waiting`.
      deadline: latest time for the next `ticked`; `inf` if no call has a deadline. *Invariant*:
        each call's `due` is at this time or later.
    """

    def __init__(
        self,
        address: str,
        pending_max: int = CALLS_PENDING_MAX,
        eager_bytes_max: int = EAGER_BYTES_MAX,
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
        """Add a new call, which then waits to be sent. The call ends at once if too many calls are
        open, or if it does not wait for a server and no server is connected.

        Returns:
          Whether the caller should send the waiting calls now, because P8 says that they need not
          wait to be batched.
        """
        waiting, in_flight = self.waiting, self.in_flight
        # refused here, because the server would refuse the call only after its arguments had
        # travelled (P6)
        if len(in_flight) + len(waiting) + len(self.held_back) >= self._pending_max:
            call.end(
                RESOURCE_EXHAUSTED,
                f"{self._pending_max} calls to {self._address} are unanswered: wait for some first",
            )
            return False
        # such a call means the incarnation that has ended, and no other
        if not self.incarnation and not call.waits_for_server:
            call.end(
                UNAVAILABLE,
                f"the server at {self._address} has ended; the call of {call.method!r} was not "
                f"sent",
            )
            return False
        self._last_id = call.id = self._last_id + 1
        if call.due < self.deadline:
            self.deadline = call.due
        self.waiting_bytes += len(call.body)
        if call.bounded:
            call.nbytes = counted_bytes(call.body, call.frames)
        waiting[call.id] = call
        # P8: a gathered call leaves with the next reply, so there must be a call in flight; and a
        # full message gains nothing by waiting
        return self.incarnation != 0 and (
            len(waiting) >= BATCH_ITEMS_MAX
            or self.waiting_bytes >= BATCH_BYTES_MAX
            or (
                bool(call.frames) and len(waiting) > 1
                if call.later
                else not in_flight or bool(call.frames)
            )
        )

    def next_message(self) -> list[ClientCall]:
        """Return the calls to send as one message, and count them as in flight. Return an empty
        list if no call may leave, or no server is connected.
        """
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
        """Take from `source` (`held_back` or `waiting`) the first calls that fit into one message,
        and return them.

        If P9, the bound on eager arguments, does not let a call of `waiting` leave, the call is
        moved to `held_back`.
        """
        held_back = self.held_back
        resumes = source is held_back
        calls: list[ClientCall] = []
        behind: list[ClientCall] = []
        byte_count = 0
        for call in source.values():
            # P7: a call with frames has a message of its own
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
        """Return whether P9, the bound on eager arguments, lets a call leave now, perhaps without
        its large parts.

        Args:
          first: whether no earlier call is held back.
        """
        # P9, the bound on the arguments that wait in the server's memory
        if first and self.eager_bytes + call.nbytes <= self._eager_bytes_max:
            return True
        # the server requests the parts when it has room, so the call need not wait
        if call.frames and nbytes_of(call.frames) > CHUNK_BYTES:
            call.held, call.nbytes = True, 0
            return True
        return first and not self.eager_bytes

    def is_unsent(self, call: ClientCall) -> bool:
        """Return whether a call was not sent yet, because it waits for a server, to be batched, or
        for replies to other calls."""
        return call.id in self.waiting or call.id in self.held_back

    def request(self, call: ClientCall, now: float) -> Call:
        """Return the message that requests a call. It contains the time left until the call's
        deadline."""
        left_ms = max(1, ceil((call.due - now) * 1000)) if call.due < NEVER_S else 0
        return Call(call.id, call.method, self.incarnation, left_ms, call.body, (), call.held)

    def undelivered(self, calls: list[ClientCall]) -> None:
        """Record that the connection did not take the message with these calls. Move them, and all
        calls that the bound on arguments (P9) holds back, to the waiting calls, in the order in
        which they were made.
        """
        unsent = {call.id: call for call in calls if self.in_flight.pop(call.id, None) is not None}
        self.eager_bytes -= sum(call.nbytes for call in unsent.values())
        self._requeue(unsent)

    def server_up(self, incarnation: int) -> None:
        """Record that a server's hello has arrived. Waiting calls may be sent now."""
        self.incarnation = incarnation

    def server_leaving(self) -> None:
        """Record that the server said goodbye. The server still replies to the calls in flight; new
        calls wait for its next incarnation."""
        self.incarnation = 0
        self._requeue({})

    def connection_lost(self) -> list[ClientCall]:
        """Record that the connection has ended, and that all its messages were read. Return the
        calls that end because of this."""
        self.incarnation = 0
        self.eager_bytes = 0
        self._requeue({})
        ended_calls = list(self.in_flight.values())
        # P2: these calls are never sent again, because the server may have executed them
        self.in_flight.clear()
        for call in ended_calls:
            call.end(
                UNAVAILABLE,
                f"the connection to {self._address} was lost while the call of {call.method!r} "
                f"was in flight; "
                "the server may have executed it",
            )
        for call in [call for call in self.waiting.values() if not call.waits_for_server]:
            self._forget(call)
            call.end(
                UNAVAILABLE,
                f"the server at {self._address} has ended; the call of {call.method!r} was not "
                f"sent",
            )
            ended_calls.append(call)
        return ended_calls

    def replied(self, reply: Reply, frames: Frames) -> ClientCall | None:
        """Record that a reply has arrived. Return the call that has ended now; None if the call had
        ended before."""
        # P1: a call that has ended, at its deadline for instance, is not in the table any more
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
        """End a call that its caller cancels, unless it has ended. Return the message that cancels
        the call at the server; None if the call was not sent.
        """
        if call.ended:
            return None
        in_flight = self._forget(call)
        call.end(CANCELLED, f"the call of {call.method!r} was cancelled by its caller")
        return CancelCall(call.id) if in_flight else None

    def ticked(self, now: float) -> list[ClientCall]:
        """End and return the calls whose deadline has passed. The server needs no message, because
        each request contained the time left until its deadline.
        """
        if now < self.deadline:
            return []
        expired_calls = [call for call in self.unanswered if call.due <= now]
        for call in expired_calls:
            sent = self._forget(call)
            waited_for = "an answer" if sent or self.incarnation else f"a server at {self._address}"
            call.end(
                DEADLINE_EXCEEDED,
                f"deadline passed while the call of {call.method!r} waited for {waited_for}",
            )
        self.deadline = min((call.due for call in self.unanswered), default=inf)
        return expired_calls

    def failed(self, code: int, message: str) -> list[ClientCall]:
        """End all calls with this error, because the server refuses this client or the client is
        closed. Return the calls."""
        self.incarnation = 0
        failed_calls = self.unanswered
        for calls in self._tables():
            calls.clear()
        self.waiting_bytes = 0
        self.eager_bytes = 0
        for call in failed_calls:
            call.end(code, message)
        return failed_calls

    @property
    def unanswered(self) -> list[ClientCall]:
        return [call for calls in self._tables() for call in calls.values()]

    def _tables(self) -> tuple[dict[int, ClientCall], ...]:
        return self.in_flight, self.held_back, self.waiting

    def _requeue(self, unsent: dict[int, ClientCall]) -> None:
        """Move these calls, and all that are held back, to the waiting calls, in the order in which
        they were made."""
        if unsent or self.held_back:
            again = {**unsent, **self.held_back}
            self.waiting_bytes += sum(len(call.body) for call in again.values())
            self.held_back.clear()
            self.waiting = dict(sorted({**again, **self.waiting}.items()))

    def _forget(self, call: ClientCall) -> bool:
        """Remove a call from the table, which may make room for a call that is held back. Return
        whether the removed call was in flight."""
        if self.in_flight.pop(call.id, None) is not None:
            self.eager_bytes -= call.nbytes
            return True
        if self.waiting.pop(call.id, None) is not None:
            self.waiting_bytes -= len(call.body)
        else:
            self.held_back.pop(call.id, None)
        return False


class ServedCall:
    """One call in a server's table. Any thread may call `is_wanted`; only the loop's thread uses
    the rest.

    Attributes:
      dropped: whether the call was cancelled or finished, or its connection has ended.
      due: time on the server's clock at which the caller stops waiting; `inf` if the call has no
        deadline.
      method, arrived: the method, and when the call arrived on the server's clock.
      on_dropped: a function that the table's owner sets, and calls when the call is cancelled or
        its connection ends; or None.
    """

    __slots__ = ("arrived", "dropped", "due", "id", "method", "on_dropped", "peer")

    def __init__(self, peer: Hashable, call: Call, now: float) -> None:
        self.peer = peer
        self.id = call.id
        self.due = now + call.left_ms / 1000 if call.left_ms else inf
        self.method, self.arrived = call.method, now
        self.dropped = False
        self.on_dropped: Any = None

    def is_wanted(self, now: float) -> bool:
        """Return whether the caller still waits for the reply."""
        return not self.dropped and now < self.due


class ServerCalls:
    """The unanswered calls of one server, by peer."""

    def __init__(self, incarnation: int, pending_max: int = CALLS_PENDING_MAX) -> None:
        self._incarnation = incarnation
        self._pending_max = pending_max
        self._by_peer: dict[Hashable, dict[int, ServedCall]] = {}
        self.repeated = 0
        """Count of calls that were refused because their call number was in use, which is a fault
        of the peer."""

    def __len__(self) -> int:
        return sum(map(len, self._by_peer.values()))

    def stale_reply(self, call: Call) -> Reply | None:
        """Return the reply that refuses a call for another incarnation of this server; None for a
        call to this incarnation."""
        # P5: the earlier incarnation may have executed the call
        if call.incarnation == self._incarnation:
            return None
        return Reply(
            call.id,
            UNAVAILABLE,
            "the call was for an earlier incarnation of this server; it was not executed",
            b"",
        )

    def call_arrived(self, peer: Hashable, call: Call, now: float) -> ServedCall | Reply:
        """Add a call that is not served inline. Return the record of the call, or the reply that
        refuses the call."""
        refused = self.stale_reply(call)
        if refused is not None:
            return refused
        calls = self._by_peer.setdefault(peer, {})
        # two calls with one number would get each other's replies
        if call.id in calls:
            self.repeated += 1
            return Reply(
                call.id,
                INVALID_ARGUMENT,
                f"call number {call.id} is in use by an unanswered call",
                b"",
            )
        if len(calls) >= self._pending_max:
            return Reply(
                call.id,
                RESOURCE_EXHAUSTED,
                f"{self._pending_max} calls of this client are unanswered",
                b"",
            )
        served = calls[call.id] = ServedCall(peer, call, now)
        return served

    def in_flight(self) -> Counter[str]:
        """Return the number of unanswered calls of each method. Any thread may call this."""
        calls = (list(calls.values()) for calls in list(self._by_peer.values()))
        return Counter(served.method for served in chain.from_iterable(calls))

    def finished(self, served: ServedCall, now: float = -inf) -> bool:
        """Remove a call that has run, or whose reply is not wanted. Return whether to send its
        reply: True at most once for each call.

        After the deadline no reply is sent, because the client has already ended the call, and
        because a method that has found `cancelled()` true may have returned anything.
        """
        calls = self._by_peer.get(served.peer)
        if calls is not None and calls.get(served.id) is served:
            del calls[served.id]
            if not calls:
                del self._by_peer[served.peer]
        sends_reply, served.dropped = served.is_wanted(now), True
        return sends_reply

    def cancelled(self, peer: Hashable, id: int) -> ServedCall | None:
        """Mark a call as cancelled: it no longer begins, and no reply is sent. It counts as
        unanswered until `finished` is called.

        Returns:
          The call; None if it was cancelled before or is not in the table.
        """
        served = self._by_peer.get(peer, {}).get(id)
        if served is None or served.dropped:
            return None
        served.dropped = True
        return served

    def arguments_lost(self, peer: Hashable, id: int) -> None:
        """Remove a call whose arguments will not arrive, so that it does not run."""
        served = self._by_peer.get(peer, {}).get(id)
        if served is not None:
            self.finished(served)

    def peer_gone(self, peer: Hashable) -> list[ServedCall]:
        """Drop all calls of a connection that has ended; return the calls that were still
        wanted.
        """
        dropped = [served for served in self._by_peer.pop(peer, {}).values() if not served.dropped]
        for served in dropped:
            served.dropped = True
        return dropped
