"""The server's side of calls: a service runs the registered methods when the peers of a router call
them.

Rules
    A handler that was registered inline runs in the loop. It must take microseconds only, because
    every peer waits meanwhile. Any other handler runs in a thread of the pool. Calls may run in any
    order, even the calls of one client.
    An exception of a handler becomes the error of its call and has no other effect. An OpError
    keeps its code and its text; the class of any other exception decides the code, and the text has
    class and traceback.
    Values travel by the safe codec, and no code here unpickles anything.
    A handler can check `zmqdist.cancelled()`, which is true when the caller has cancelled the call
    or disconnected, or when the deadline has passed. Inline handlers are too short to need this
    check.
    Clients take turns with their calls that wait for a thread, and the bytes of the arguments of
    these calls are bounded (admission_machine.py). A call of an inline method, or of a method that
    replies later, begins at once. If a client holds arguments back, the service requests these
    arguments as soon as there is room for them.
    The reply to a call that arrived alone leaves at once. Other replies without payload frames are
    collected during one turn of the loop, and leave as one message to each peer.

Not here: which functions may be registered and how arguments are checked (methods.py), streams
(generators.py), batches (batching.py), when a call is accepted, dropped or replied to
(transport/calls_machine.py), sockets (transport).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from math import inf
from typing import Any, Final

from zmqdist import clock as time
from zmqdist import errors
from zmqdist.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    OpError,
    PermissionDeniedError,
    WireError,
)
from zmqdist.limits import BATCH_BYTES_MAX, BATCH_ITEMS_MAX, HANDLER_THREADS_MAX
from zmqdist.messages import Call, Calls, CancelCall, Goodbye, Replies, Reply, SendParts
from zmqdist.rpc.batching import Batched, check_options
from zmqdist.rpc.blocked_handlers_log import BlockedHandlersLog
from zmqdist.rpc.generators import Generators
from zmqdist.rpc.handler_errors import failed, no_room, stopping
from zmqdist.rpc.handler_pool import HandlerPool
from zmqdist.rpc.methods import Method, method_for
from zmqdist.rpc.pending_call import PendingCall
from zmqdist.rpc.server_info import ECHO, SERVER_INFO, describe_server, echo
from zmqdist.rpc.snapshots import pack_result
from zmqdist.task_context import enter, leave
from zmqdist.transport.calls_machine import ServedCall, ServerCalls, counted_bytes
from zmqdist.transport.connection_snapshots import ServerSnapshot
from zmqdist.transport.loop import Loop
from zmqdist.transport.peer import Peer
from zmqdist.transport.router import Router
from zmqdist.transport.transfers import Source, allocate_fresh, announced_bytes

log = logging.getLogger("zmqdist.rpc")

METHODS: Final = "zmqdist.methods"
"""Name of the reserved method that returns the list of the server's methods without reserved ones.
method_list.py decodes this list."""

UNREAD_S: Final = 0.5
"""Seconds for which a stopping server waits while no client reads any bytes of its replies."""

SWEEP_S: Final = 0.1
"""Seconds between two searches of one client's queue for expired calls. A search is not cheap,
because the queue may have 65,536 calls."""

NAME_WANTED: Final = "wanted identifiers joined by dots (zmqdist.* is reserved)"


class _Submitted:
    """The pool's key for work that is not a call, such as a batch. `refuse` is called with the
    error if the work does not run."""

    __slots__ = ("refuse",)

    def __init__(self, refuse: Callable[[OpError], object] | None) -> None:
        self.refuse = refuse


class RpcService:
    """The methods of one server. After `attach`, a router passes its peers' calls to this service.
    A router may have several services."""

    def __init__(self, name: str = "rpc", threads_max: int = HANDLER_THREADS_MAX) -> None:
        self.where = f"the {name} server of process {os.getpid()}"
        """The name of this server in log lines."""
        self._methods: dict[str, Method] = {}
        self._name = name
        self._pool = HandlerPool(
            f"zmqdist-{name}-handler", threads_max, lambda: self.soon(self._let_in)
        )
        self._blocked_log = BlockedHandlersLog(self._pool)
        self._swept_at: dict[Peer, float] = {}
        self._replies: dict[Peer, list[Reply]] = {}
        self._reply_bytes = 0
        self._attached = False
        self._stopping = False
        self._add(Method(METHODS, self._list, [], inline=True))
        self._add(
            Method(SERVER_INFO, lambda: describe_server(name, self._incarnation), [], inline=True)
        )
        self._add(Method(ECHO, echo, None, inline=True))
        self._generators = Generators(self)
        self._batched: list[Batched] = []

    def register(
        self,
        name: str,
        fn: Callable[..., Any],
        input_signature: Any = None,
        output_signature: Any = None,
        *,
        inline: bool = False,
        batch: bool = False,
        max_batch: int = 64,
        max_delay_ms: float = 1,
        roles: frozenset[str] | None = None,
    ) -> None:
        """Register a function as a method.

        Args:
          name: an identifier, or several identifiers joined by dots. A method with dots in its name
            is no attribute of a client.
          fn: a function made by `zmqdist.function`, or any callable. A generator function becomes a
            stream, and clients iterate over the items that it yields. If it has parameters
            `timeout_in_ms` or `out`, clients can give them by position only, because these keywords
            belong to the client.
          input_signature: a structure of TensorSpec for each of the first parameters; it overrides
            the signature of `fn`. With a signature, `fn` gets its arguments as arrays, without a
            signature as they were sent.
          output_signature: a structure of TensorSpec for the result, or for each item of a
            generator function.
          inline: run `fn` in the loop instead of a thread. Use it only for functions that take
            microseconds and never block.
          batch: join concurrent calls of all clients along axis 0 and run them as one call
            (batching.py). Each caller gets its rows of the result. One batch runs at a time.
          max_batch: largest number of rows in a batch. A full batch runs without delay; a call with
            more rows runs alone.
          max_delay_ms: milliseconds for which a call waits at most for other calls to join it.
          roles: roles that may call the method, besides `admin`; `None` means every authenticated
            peer.

        Raises:
          FailedPreconditionError: the server has started.
          InvalidArgumentError: `name` is not a valid name, or is registered already.
          ValueError: the input signature does not fit `fn`; `fn` is made by `function`, takes
            arguments and has none; or options are wrong.
          TypeError: `name` is not a str, `fn` is not callable or is an async function, or a
            signature is not made of TensorSpecs.
        """
        if not isinstance(name, str):
            raise TypeError(f"method_name: a method's name is a str, not {type(name).__name__}")
        if self._attached:
            raise FailedPreconditionError(
                "All methods must be registered before starting the server: this one has been "
                "started"
            )
        if name in self._methods:
            raise InvalidArgumentError(f"{name} is already registered.")
        if not all(map(str.isidentifier, name.split("."))) or name.startswith("zmqdist."):
            raise InvalidArgumentError(f"{name!r} cannot name a method: {NAME_WANTED}")
        method = method_for(name, fn, input_signature, output_signature, inline, roles)
        if batch:
            check_options(method, max_batch, max_delay_ms)
            batched = Batched(self, method, max_batch, float(max_delay_ms) / 1000)
            method.fn, method.later, method.batch, method.pooled = batched.called, True, True, False
            self._batched.append(batched)
        self._add(method)

    def register_later(
        self, name: str, fn: Callable[..., None], *, roles: frozenset[str] | None = None
    ) -> None:
        """Register a method that replies later, without occupying a thread: the loop calls
        `fn(call, *args)`.

        `call` is a PendingCall (pending_call.py). An exception of `fn` becomes the error of the
        call. The name may begin with `zmqdist.`; the list of methods leaves such names out.
        """
        self._add(Method(name, fn, roles=roles, later=True))

    def attach(self, router: Router, loop: Loop, incarnation: int) -> None:
        """Begin to serve the calls that a router receives. Call this before the router's loop
        starts, or in the loop's thread.

        Args:
          incarnation: the incarnation in the router's hello.
        """
        self._attached = True
        self._router = router
        self._loop = loop
        self._incarnation = incarnation
        self._calls = ServerCalls(incarnation)
        router.on(Call, self._called)
        router.on(Calls, self._called_many)
        router.on(CancelCall, lambda peer, message, frames: self._cancelled(peer, message.id))
        router.on_gone.append(self._peer_gone)
        loop.at_end_of_turn(self._send_replies)

    def say_goodbye(self, reason: str) -> None:
        """Send a Goodbye to all clients, because this server stops, and accept no new clients. The
        loop calls this.

        Replies that are ready are sent before the Goodbye, so that each client reads them first.
        """
        self._send_replies()
        self._router.stopping = True
        for peer in self._router.peers:
            self._router.send(peer, Goodbye(reason))

    def stop(self, grace_s: float) -> bool:
        """Refuse new calls, and wait until the current calls have their replies. Any thread except
        the loop's may call this.

        Calls whose arguments have not all arrived are refused at once; calls that still wait for a
        thread are refused after `grace_s` seconds.

        Returns:
          False if some handlers still ran, or some replies were still on the way, after `grace_s`.
          Handlers cannot be interrupted.
        """
        self._stopping = True
        if not self._attached:
            return True
        until = time.monotonic() + grace_s
        streaming = self._loop.run(self._generators.stop)
        for batched in self._batched:
            self._loop.run(batched.close)
        self._loop.run(self._refuse, False)
        idle = self._pool.wait_idle(grace_s)
        if not idle:
            self._loop.run(self._refuse, True)
        self._pool.stop()
        for thread in streaming:
            thread.join(max(0.0, until - time.monotonic()))
        return (
            self._wait_sent(until) and idle and not any(thread.is_alive() for thread in streaming)
        )

    def close(self) -> None:
        """Refuse new calls, without waiting for the current calls. The server's loop calls this
        when it ends, even after `stop`."""
        self._stopping = True
        self._generators.stop()
        self._pool.stop()

    def _wait_sent(self, until: float) -> bool:
        """Wait until clients have received all replies, or until no client has read any bytes of
        them for UNREAD_S.

        Return False if `until` passes first.
        """
        before, unsent, moved_at = 1, self._loop.run(self._router.unsent_bytes), time.monotonic()
        # Looks twice, because it cannot look into ZeroMQ's queues (Router.unsent_bytes).
        while (before or unsent) and (now := time.monotonic()) < min(until, moved_at + UNREAD_S):
            time.sleep(0.002)
            before, unsent = unsent, self._loop.run(self._router.unsent_bytes)
            moved_at = now if unsent != before else moved_at
        return not unsent or time.monotonic() < until

    def snapshot(self) -> ServerSnapshot:
        """Return the server's current figures. Before `attach` they are zeros; after the loop has
        ended they are the last figures. Any thread may call this.

        Raises:
          DeadlineExceededError: the loop did not return the figures within 10 s, because an inline
            method blocks the loop.
        """
        if not self._attached:
            return ServerSnapshot()
        try:
            return self._loop.run(self._snapshot)
        except FailedPreconditionError:
            # the loop has ended, so this thread may read the loop's state
            return self._snapshot()

    # -- in the loop -------------------------------------------------------------------------------

    def _snapshot(self) -> ServerSnapshot:
        router, peers = self._router, self._router.peers
        channels = [peer.bulk for peer in peers if peer.bulk is not None]
        queued, running, threads, threads_max = self._pool.counts()
        return ServerSnapshot(
            clients=len(peers),
            calls=len(self._calls),
            calls_queued=queued,
            calls_running=running,
            threads=threads,
            threads_max=threads_max,
            calls_batched=sum(map(len, self._batched)),
            bytes_waiting=self._pool.held(),
            streams=len(self._generators),
            transfers=sum(len(each.tracked) for each in channels),
            bytes_unsent=sum(each.undelivered for each in channels),
            bytes_unacknowledged=sum(each.unacknowledged for each in channels),
            messages_received=router.received,
            messages_dropped=dict(router.dropped),
            calls_repeated=self._calls.repeated,
            transfer_faults=sum(each.faults for each in channels),
            handshakes_refused=router.refused_handshakes,
            faults=self._loop.faults,
        )

    def _called(self, peer: Peer, call: Call, frames: list[Any]) -> None:
        result = self._take(peer, call, frames)
        if result is not None:
            reply, sources = result
            if sources:
                self._router.bulk_channel(peer).send(reply, sources)
            else:
                self._router.send(peer, reply)

    def _called_many(self, peer: Peer, calls: Calls, frames: list[memoryview]) -> None:
        if frames:
            raise WireError(peer.name, "several calls in one message with payload frames")
        self._router.count_work(len(calls.items))
        for call in calls.items:
            result = self._take(peer, call, frames)
            if result is not None:
                self._gather(peer, *result)

    def _take(
        self, peer: Peer, call: Call, frames: list[Any]
    ) -> tuple[Reply, Sequence[Source]] | None:
        """Take an arrived call. Return the reply if the call is refused or its method is inline.
        Otherwise pass the call to `_begin` and return None.
        """
        method = self._methods.get(call.method)
        # The fast path has one test for all reasons to refuse a call. The code in the branch finds
        # out which reason holds, if any.
        if (
            method is None
            or method.roles is not None
            or self._stopping
            or call.incarnation != self._incarnation
        ):
            reply = self._calls.stale_reply(call)
            if reply is not None:
                return reply, ()
            try:
                method = self.allowed(peer, call.method)
            except OpError as error:
                return failed(call.id, error), ()
        if method.inline and not call.parts:
            return _run_method(method, call.id, call.body, frames, peer)
        served = self._calls.call_arrived(peer, call, time.monotonic())
        if isinstance(served, Reply):
            return served, ()
        self._begin(served, peer, method, call, frames)
        return None

    def _gather(self, peer: Peer, reply: Reply, sources: Sequence[Source]) -> None:
        if sources:
            self._router.bulk_channel(peer).send(reply, sources)
            return
        replies = self._replies.get(peer)
        if replies is None:
            replies = self._replies[peer] = []
        replies.append(reply)
        self._reply_bytes += 4 * len(reply.message) if reply.code else len(reply.body)
        if len(replies) >= BATCH_ITEMS_MAX or self._reply_bytes >= BATCH_BYTES_MAX:
            self._send_replies()

    def _send_replies(self) -> None:
        if self._replies:
            gathered, self._replies, self._reply_bytes = self._replies, {}, 0
            for peer, replies in gathered.items():
                self._router.send(peer, replies[0] if len(replies) == 1 else Replies(replies))

    def _begin(
        self, served: ServedCall, peer: Peer, method: Method, call: Call, frames: list[Any]
    ) -> None:
        """Refuse a call, or run its method when all arguments have arrived and, in the pool, when
        it is the client's turn."""
        if not call.parts:
            if method.pooled:
                self._submit(
                    served, peer, method, call.body, frames, counted_bytes(call.body, frames)
                )
                return
            nbytes = counted_bytes(call.body, frames) if method.batch else 0
            if not nbytes or self._count(served, peer, call, nbytes):
                self._run(served, peer, method, call.body, frames)
        elif not (method.pooled or method.batch):
            self._receive(served, peer, method, call)
        elif call.held:
            # the client sends the large parts only when this server requests them by SendParts
            self._pool.announced(
                peer,
                served,
                len(call.body) + announced_bytes(call.parts),
                (served, peer, method, call),
            )
            self._let_in()
        elif self._count(served, peer, call, len(call.body) + announced_bytes(call.parts)):
            self._receive(served, peer, method, call)

    def _count(self, served: ServedCall, peer: Peer, call: Call, nbytes: int) -> bool:
        """Add the arguments that arrived with a call to the waiting bytes. If they do not fit,
        refuse the call and return False."""
        refused = self._pool.arrived(peer, served, nbytes)
        # Calls past their deadline must not use up the room of a call that is still wanted.
        if refused and self._drop_unwanted(peer):
            refused = self._pool.arrived(peer, served, nbytes)
        if refused:
            self._router.bulk_channel(peer).decline(call.parts)
            self._finished(served, peer, no_room(served.id, refused), ())
        return not refused

    def _submit(
        self,
        served: ServedCall,
        peer: Peer,
        method: Method,
        body: bytes,
        frames: list[Any],
        nbytes: int = 0,
    ) -> None:
        """Queue the call for a thread of the pool. `nbytes` is the size of its arguments, or 0 if
        admission has counted them already."""
        work = (self._serve, (served, peer, method, body, frames))
        refused = self._pool.ready(peer, served, work, nbytes)
        if refused and self._drop_unwanted(peer):
            refused = self._pool.ready(peer, served, work, nbytes)
        if refused:
            self._finished(served, peer, no_room(served.id, refused), ())
        elif self._pool.full and self._blocked_log.deadline is None:
            self._check_blocked()

    def _drop_unwanted(self, peer: Peer) -> bool:
        """Drop a client's waiting calls that are not wanted any more, at most once per SWEEP_S.
        Return whether any was dropped."""
        now = time.monotonic()
        if now < self._swept_at.get(peer, -inf) + SWEEP_S:
            return False
        self._swept_at[peer] = now
        unwanted = [args[0] for _, args in self._pool.waiting(peer) if not args[0].is_wanted(now)]
        for served in unwanted:
            self._pool.dropped(peer, served)
            self._calls.finished(served)
        return bool(unwanted)

    def _let_in(self) -> None:
        """Request the arguments that clients hold back, as far as there is room for them."""
        while not self._stopping and (item := self._pool.let_in()) is not None:
            served, peer, method, call = item
            if served.is_wanted(time.monotonic()):
                self._receive(served, peer, method, call)
            else:
                self._router.bulk_channel(peer).decline(call.parts)
                self._pool.dropped(peer, served)
                self._finished(served, peer, None, ())

    def _receive(self, served: ServedCall, peer: Peer, method: Method, call: Call) -> None:
        """Receive the large parts of a call. Parts in shared memory have arrived already; parts in
        chunks arrive later."""
        arrived = partial(self._arrived, served, peer, method, call.body)
        try:
            frames = self._router.bulk_channel(peer).receive(
                call.id, call.parts, allocate_fresh, arrived
            )
        except (OpError, MemoryError) as error:
            self._pool.dropped(peer, served)
            self._finished(served, peer, failed(call.id, error), ())
            return
        if frames is not None:
            self._run(served, peer, method, call.body, frames)
        elif call.held:
            self._router.send(peer, SendParts(call.id))

    def _arrived(
        self,
        served: ServedCall,
        peer: Peer,
        method: Method,
        body: bytes,
        frames: list[Any] | None,
        problem: str,
    ) -> None:
        if frames is not None:
            self._run(served, peer, method, body, frames)
        else:
            self.begun(served)
            self._finished(served, peer, failed(served.id, WireError(peer.name, problem)), ())

    def _run(
        self, served: ServedCall, peer: Peer, method: Method, body: bytes, frames: list[Any]
    ) -> None:
        if method.pooled:
            self._submit(served, peer, method, body, frames)
        elif method.later:
            try:
                args, named = method.arguments(body, frames, peer.name)
                method.fn(PendingCall(self, served, peer), *args, **named)
            except BaseException as error:
                self.begun(served)
                self._finished(served, peer, failed(served.id, error), ())
        elif method.streaming:
            problem = InvalidArgumentError(
                f"{method.name} is a stream: client.stream, or client.{method.name}"
            )
            self._finished(served, peer, failed(served.id, problem), ())
        elif served.is_wanted(time.monotonic()):
            self._finished(served, peer, *_run_method(method, served.id, body, frames, peer))
        else:
            self._finished(served, peer, None, ())

    def reply_later(
        self, served: ServedCall, peer: Peer, reply: Reply | None, sources: Sequence[Source]
    ) -> None:
        """Have the loop send a reply, if the caller still waits for it. Any thread may call
        this.
        """
        self.soon(self._finished, served, peer, reply, sources)

    def soon(self, fn: Callable[..., object], *args: Any) -> None:
        """Have the loop call `fn(*args)`, unless the loop has ended. Any thread may call this."""
        try:
            self._loop.call_soon(fn, *args)
        except FailedPreconditionError:  # the server has stopped without waiting for this call
            pass

    def submit(
        self, fn: Callable[..., None], *args: Any, refuse: Callable[[OpError], object] | None = None
    ) -> None:
        """Have a thread of the pool call `fn(*args)`. If the server stops before that, the loop
        calls `refuse`. Only the loop uses this."""
        self._pool.ready(None, _Submitted(refuse), (fn, args))

    def set_timer(self, key: Hashable, at: float | None, fn: Callable[[], object]) -> None:
        """Have the loop call a function at a certain time (`Loop.set_timer`)."""
        self._loop.set_timer(key, at, fn)

    def drop(self, served: ServedCall) -> None:
        """Remove a call that will get no reply."""
        self.begun(served)
        self._calls.finished(served)

    def begun(self, served: ServedCall) -> None:
        """Stop counting the arguments of a call as waiting, because the call has begun or ended.
        Only the loop may use this."""
        self._pool.dropped(served.peer, served)
        self._let_in()

    def _refuse(self, ready: bool) -> None:
        """Reply UNAVAILABLE to calls whose arguments are missing; with `ready`, also to calls that
        wait only for a thread."""
        for peer, key, item in self._pool.cut_off(ready):
            if isinstance(key, ServedCall):
                if not ready and item is not None:
                    self._router.bulk_channel(peer).decline(item[3].parts)
                elif peer.bulk is not None:
                    peer.bulk.call_ended(key.id)
                self._finished(key, peer, failed(key.id, stopping()), ())
            elif key.refuse is not None:
                key.refuse(stopping())

    def _check_blocked(self) -> None:
        deadline = self._blocked_log.look(self._loop.now(), self.where)
        self._loop.set_timer(self._blocked_log, deadline, self._check_blocked)

    def _peer_gone(self, peer: Peer) -> None:
        self._pool.owner_lost(peer)
        self._swept_at.pop(peer, None)
        for served in self._calls.peer_gone(peer):
            if served.on_dropped is not None:
                served.on_dropped()
        self._generators.peer_gone(peer)
        self._let_in()

    def _cancelled(self, peer: Peer, id: int) -> None:
        served = self._calls.cancelled(peer, id)
        if served is not None and served.on_dropped is not None:
            served.on_dropped()
        if peer.bulk is not None:
            if peer.bulk.receiving(id):
                self._calls.arguments_lost(peer, id)
            peer.bulk.call_ended(id)
        if served is not None and served.on_dropped is None:
            if self._pool.dropped(peer, served):
                self._calls.finished(served)
            self._let_in()

    @property
    def unsent(self) -> int:
        """Bytes of replies that have not reached their callers yet. Only the loop may read this."""
        return self._router.unsent_bytes()

    @property
    def idle(self) -> bool:
        """Whether every call has its reply and every reply has reached its caller. Only the loop
        may read this."""
        return not len(self._calls) and not self.unsent

    def allowed(self, peer: Peer, name: str) -> Method:
        """Return the method of this name, if this peer may call it.

        Raises InvalidArgumentError if there is no such method, PermissionDeniedError if the peer's
        role may not call it, and UnavailableError while the server stops.
        """
        method = self._methods.get(name)
        if method is None:
            raise InvalidArgumentError(f"{name} is not registered.")
        if method.roles is not None and peer.role not in method.roles:
            allowed = ", ".join(sorted(method.roles))
            raise PermissionDeniedError(
                f"role {peer.role} may not call {name} (allowed: {allowed})"
            )
        if self._stopping:
            raise stopping()
        return method

    def _finished(
        self, served: ServedCall, peer: Peer, reply: Reply | None, sources: Sequence[Source]
    ) -> None:
        if self._calls.finished(served, time.monotonic()) and reply is not None:
            self._gather(peer, reply, sources)

    def _list(self) -> list[Any]:
        methods = [
            method for name, method in self._methods.items() if not name.startswith("zmqdist.")
        ]
        return [method.info().to_wire() for method in methods]

    def _add(self, method: Method) -> None:
        self._methods[method.name] = method

    # -- in a thread of the pool -------------------------------------------------------------------

    def _serve(
        self, served: ServedCall, peer: Peer, method: Method, body: bytes, frames: list[Any]
    ) -> None:
        reply: Reply | None = None
        sources: Sequence[Source] = ()
        if served.is_wanted(time.monotonic()):
            enter(partial(_unwanted, served))
            reply, sources = _run_method(method, served.id, body, frames, peer)
            leave()
        try:  # repeats the code of `reply_later`, to save two function calls on the hot path
            self._loop.call_soon(self._finished, served, peer, reply, sources)
        except FailedPreconditionError:
            pass


def _unwanted(served: ServedCall) -> bool:
    return not served.is_wanted(time.monotonic())


def _run_method(
    method: Method, id: int, body: bytes, frames: list[Any], peer: Peer
) -> tuple[Reply, Sequence[Source]]:
    """Run a method and return its reply, which is an error if the method raises. The handler may
    keep and change its result afterwards."""
    try:
        box = [method.run(body, frames, peer.name)]
        body, sources = pack_result(box, lends=peer.bulk is not None and peer.bulk.shares_memory)
        return Reply(id, errors.OK, "", body), sources
    except BaseException as error:
        return failed(id, error), ()
