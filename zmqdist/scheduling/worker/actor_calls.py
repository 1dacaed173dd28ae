"""The runtime of actor_calls_machine.py: it receives the calls of an actor, has the main thread run
them, and sends the results.

The loop's thread owns the queue. The main thread gets lists of calls to run, and appends outcomes.
The outcomes of several short calls are sent together: when a list of calls has ended, or FLUSH_S
after the first of them if a later call runs for longer.
"""

from __future__ import annotations

import contextvars
import queue
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from zmqdist import clock as time
from zmqdist import errors
from zmqdist.batches import split
from zmqdist.field_types import did_you_mean
from zmqdist.messages import (
    BULK,
    ERROR,
    VALUE,
    ActorResults,
    ActorSpec,
    CallActor,
    CancelActorCalls,
    ResultReceived,
)
from zmqdist.scheduling.shared.actors import is_async
from zmqdist.scheduling.shared.references import PartsFetcher, decode_reference, encode_reference
from zmqdist.scheduling.shared.store import BulkStore
from zmqdist.scheduling.worker.actor_calls_machine import ActorCall, ActorCallQueue, CallState
from zmqdist.scheduling.worker.function_call import run, run_method
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Peer, Router
from zmqdist.wire import trusted

if TYPE_CHECKING:
    import asyncio

CALLERS: Final = frozenset({"submit"})
"""The roles that may call an actor, and fetch its large results."""

GIVEN_CALLS_MAX: Final = 256
"""Calls that the main thread has at a time, so that it need not wait for the loop's thread."""

FLUSH_S: Final = 0.002
FLUSH_MAX_S: Final = 0.016
"""Seconds between two looks for outcomes while a list of calls runs; each pause is twice as long as
the last, up to the second number."""

_running: contextvars.ContextVar[ActorCall | None] = contextvars.ContextVar("call", default=None)


class ActorCalls:
    """The calls of one actor. The main thread calls `run`; the router calls the rest in the loop's
    thread."""

    def __init__(
        self, loop: Loop, router: Router, store: BulkStore, spec: ActorSpec, incarnation: int
    ) -> None:
        self._loop, self._router, self._store = loop, router, store
        self._spec, self._incarnation = spec, incarnation
        self._queue = ActorCallQueue(0)  # `run` admits calls
        self._give: Callable[[list[ActorCall]], object] = lambda calls: None
        self._interrupt: Callable[[list[ActorCall]], object] = lambda calls: None
        self._close: Callable[[], object] = lambda: None
        self._outcomes: list[tuple[ActorCall, int, bytes]] = []
        self._current: ActorCall | None = None
        self._ending = self._flush_due = False
        self._flush_step_s = FLUSH_S
        self._held: dict[Peer, dict[tuple[int, int], list[int]]] = defaultdict(dict)
        router.on(CallActor, self._called, roles=CALLERS)
        router.on(CancelActorCalls, self._cancelled, roles=CALLERS)
        router.on(ResultReceived, self._received, roles=CALLERS)
        router.on_gone.append(self._gone)

    def is_cancelled(self) -> bool:
        """Return whether the running call should end early."""
        call = _running.get() or self._current
        return self._ending or (call is not None and call.state is CallState.DROPPED)

    def end(self) -> None:
        """Begin no further call, and have `run` return when the running calls have ended. Any
        thread may call this."""
        self._ending = True
        self._loop.call_soon(self._end)

    def _end(self) -> None:
        self._queue.close()
        self._close()

    # -- calls -------------------------------------------------------------------------------------

    def _called(self, peer: Peer, message: CallActor, _frames: object) -> None:
        if (message.actor, message.incarnation) != (self._spec.actor, self._incarnation):
            text = f"another actor listens here: {self._spec.cls}, in another process than it was"
            self._router.expel(peer, errors.FAILED_PRECONDITION, text)
            return
        refused = self._queue.add(peer, message.calls)
        if refused:
            error = trusted.pack_error(
                errors.ResourceExhaustedError(
                    f"{self._spec.cls} has too many waiting calls of this program"
                )
            )
            items = [(work, attempt, ERROR, error) for work, attempt in refused]
            self._router.send(peer, ActorResults(self._incarnation, items))
        self._give_next()

    def _give_next(self) -> None:
        calls = self._queue.next_calls()
        if calls:
            self._give(calls)
            if len(calls) > 1 or self._queue.running > 1:
                self._flush_step_s = FLUSH_S
                self._loop.set_timer(self, self._loop.now() + FLUSH_S, self._flush_later)

    def _flush_later(self) -> None:
        self._flush()
        if self._queue.running > 1:
            self._flush_step_s = min(2 * self._flush_step_s, FLUSH_MAX_S)
            self._loop.set_timer(self, self._loop.now() + self._flush_step_s, self._flush_later)

    def _cancelled(self, peer: Peer, message: CancelActorCalls, _frames: object) -> None:
        self._interrupt(self._queue.cancel(peer, message.calls))

    def _received(self, peer: Peer, message: ResultReceived, _frames: object) -> None:
        held = self._held.get(peer, {})
        for work, attempt in message.items:
            self._store.free(held.pop((work, attempt), ()))

    def _gone(self, peer: Peer) -> None:
        self._interrupt(self._queue.caller_gone(peer))
        for bulks in self._held.pop(peer, {}).values():
            self._store.free(bulks)

    def _flush(self) -> None:
        """Send the outcomes, and give the next calls."""
        self._flush_due = False
        outcomes = self._outcomes[:]
        del self._outcomes[: len(outcomes)]  # the main thread may append meanwhile
        by_peer: dict[Peer, list[tuple[int, int, int, bytes]]] = defaultdict(list)
        for call, kind, payload in outcomes:
            peer: Any = call.caller
            bulks: list[int] = decode_reference(payload).bulks if kind == BULK else []
            if self._queue.ended(call):
                by_peer[peer].append((call.work, call.attempt, kind, payload))
                if bulks:
                    self._held[peer][call.work, call.attempt] = bulks
            else:
                self._store.free(bulks)
        for peer, items in by_peer.items():
            for part in split(items):
                self._router.send(peer, ActorResults(self._incarnation, part))
        self._give_next()

    # -- the main thread ---------------------------------------------------------------------------

    def run(self, instance: Any, fetcher: PartsFetcher) -> None:
        """Run the calls until the actor ends. The main thread calls this, once the loop has
        started."""
        methods = _Methods(instance, self._spec.cls, fetcher)
        if is_async(type(instance)):
            import asyncio  # here, because it is slow to import, and most actors do not need it

            asyncio.run(self._run_async(methods))
        else:
            self._run_in_order(methods)

    def _run_in_order(self, methods: _Methods) -> None:
        batches: queue.SimpleQueue[list[ActorCall] | None] = queue.SimpleQueue()

        def begin() -> None:
            self._queue.running_max = GIVEN_CALLS_MAX
            self._give, self._close = batches.put, lambda: batches.put(None)
            self._give_next()

        self._loop.call_soon(begin)
        while (calls := batches.get()) is not None:
            flush_at = time.monotonic() + FLUSH_S
            for call in calls:
                if self._ending:
                    break
                if call.state is CallState.DROPPED:
                    self._outcomes.append((call, VALUE, b""))
                    continue
                self._current = call
                kind, payload = run(methods, 0, call.method, call.payload)
                self._current = None
                self._append(call, kind, payload)
                if time.monotonic() > flush_at:
                    self._loop.call_soon(self._flush)
                    flush_at = time.monotonic() + FLUSH_S
            self._loop.call_soon(self._flush)
        self._loop.run(self._flush)

    async def _run_async(self, methods: _Methods) -> None:
        import asyncio

        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        tasks: dict[ActorCall, asyncio.Task[None]] = {}

        async def run_one(call: ActorCall) -> None:
            _running.set(call)
            try:
                kind, payload = await run_method(methods, 0, call.method, call.payload)
                self._append(call, kind, payload)
            finally:
                del tasks[call]
                if not self._flush_due:
                    self._flush_due = True
                    self._loop.call_soon(self._flush)

        def begin_tasks(calls: list[ActorCall]) -> None:
            for call in calls:
                tasks[call] = loop.create_task(run_one(call))

        def cancel_tasks(calls: list[ActorCall]) -> None:
            for call in calls:
                if call in tasks:
                    tasks[call].cancel()

        def begin() -> None:
            self._queue.running_max = self._spec.concurrency
            self._give = lambda calls: loop.call_soon_threadsafe(begin_tasks, calls)
            self._interrupt = lambda calls: loop.call_soon_threadsafe(cancel_tasks, calls)
            self._close = lambda: loop.call_soon_threadsafe(ended.set)
            self._give_next()

        self._loop.call_soon(begin)
        await ended.wait()
        for task in list(tasks.values()):
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        self._loop.run(self._flush)

    def _append(self, call: ActorCall, kind: int, payload: Any) -> None:
        if kind == BULK:
            try:
                payload = encode_reference(self._store.hold(payload, shared=True))
            except Exception as error:
                kind, payload = ERROR, trusted.pack_error(error)
        self._outcomes.append((call, kind, payload))


class _Methods:
    """The methods of the object, by name."""

    def __init__(self, instance: Any, cls: str, fetcher: PartsFetcher) -> None:
        self._instance, self._cls, self._fetcher = instance, cls, fetcher

    def get(self, _coordinator: int, name: str) -> Any:
        method = None if name.startswith("_") else getattr(self._instance, name, None)
        if not callable(method):
            names = [name for name in dir(type(self._instance)) if not name.startswith("_")]
            raise AttributeError(f"{self._cls} has no method {name}: {did_you_mean(name, names)}")
        return method

    def fetched(self, payload: bytes) -> list[Any]:
        return self._fetcher.fetch(decode_reference(payload))
