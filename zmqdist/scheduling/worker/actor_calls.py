"""The runtime of actor_calls_machine.py: it receives the calls of an actor, has the main thread run
them, and sends the results.

The loop's thread owns the queue. The main thread gets lists of calls to run, and appends outcomes.
The outcomes of several short calls are sent together: when a list of calls has ended, or FLUSH_S
after the first of them if a later call runs for longer.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import queue
import threading
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, Final

from zmqdist import clock as time
from zmqdist import errors, limits
from zmqdist.batches import split
from zmqdist.field_types import did_you_mean
from zmqdist.limits import STREAM_AHEAD
from zmqdist.messages import (
    BULK,
    ERROR,
    ITEM,
    VALUE,
    ActorResults,
    ActorSpec,
    CallActor,
    CancelActorCalls,
    FailureFacts,
    ResultReceived,
    StreamCredit,
)
from zmqdist.scheduling.shared.actor_class import MethodKind, is_async
from zmqdist.scheduling.shared.references import (
    PartsFetcher,
    decode_reference,
    encode_reference,
    is_reference,
)
from zmqdist.scheduling.shared.store import BulkStore
from zmqdist.scheduling.worker.actor_calls_machine import ActorCall, ActorCallQueue, CallState
from zmqdist.scheduling.worker.function_call import last_failure, run, run_method
from zmqdist.scheduling.worker.run_figures import BEGAN, CallRun, RunTable
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Peer, Router
from zmqdist.wire import results, trusted

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger("zmqdist.worker")

CALLERS: Final = frozenset({"submit"})
"""The roles that may call an actor, and fetch its large results."""

GIVEN_CALLS_MAX: Final = 256
"""Calls that the main thread has at a time, so that it need not wait for the loop's thread."""

FLUSH_S: Final = 0.002
FLUSH_MAX_S: Final = 0.016
"""Seconds between two looks for outcomes while a list of calls runs; each pause is twice as long as
the last, up to the second number."""

STREAM_WAITS: Final = "%s.%s waits for the reader of its values, and other calls wait for it"

CREDIT_S: Final = 0.002
"""Seconds between two looks of an asynchronous generator for credit."""

_running: contextvars.ContextVar[ActorCall | None] = contextvars.ContextVar("call", default=None)


class ActorCalls:
    """The calls of one actor. The main thread calls `run`; the router calls the rest in the loop's
    thread."""

    def __init__(
        self,
        loop: Loop,
        router: Router,
        store: BulkStore,
        spec: ActorSpec,
        incarnation: int,
        table: RunTable,
        report: Callable[[list[FailureFacts], list[CallRun]], object],
    ) -> None:
        self._table, self._report = table, report
        self._numbers = {name: at for at, name in enumerate(sorted(spec.methods), 1)}
        self._failed: list[FailureFacts] = []
        self._ran: list[CallRun] = []
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
        self._streams: dict[tuple[Peer, int], _Stream] = {}
        self._held: dict[Peer, dict[tuple[int, int], list[int]]] = defaultdict(dict)
        router.on(CallActor, self._called, roles=CALLERS)
        router.on(CancelActorCalls, self._cancelled, roles=CALLERS)
        router.on(StreamCredit, self._credited, roles=CALLERS)
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
        for stream in self._streams.values():
            stream.credit(1)
        self._close()

    # -- calls -------------------------------------------------------------------------------------

    def _called(self, peer: Peer, message: CallActor, _frames: object) -> None:
        if (message.actor, message.incarnation) != (self._spec.actor, self._incarnation):
            text = f"another actor listens here: {self._spec.cls}, in another process than it was"
            self._router.expel(peer, errors.FAILED_PRECONDITION, text)
            return
        assert peer.hello is not None
        former: Any = self._queue.former(peer, peer.hello.incarnation)
        if former is not None:
            self._gone(former)
        refused = self._queue.add(peer, message.calls)
        if refused:
            error = trusted.pack_error(
                errors.ResourceExhaustedError(
                    f"{self._spec.cls} has too many waiting calls of this program"
                )
            )
            items = [(work, attempt, ERROR, error) for work, attempt in refused]
            self._router.send(peer, ActorResults(self._incarnation, items))
        self._table.note_waiting(self._queue.unended)
        self._give_next()

    def _give_next(self) -> None:
        calls = self._queue.next_calls()
        if calls:
            for call in calls:
                if self._spec.methods.get(call.method) == MethodKind.STREAM:
                    peer: Any = call.caller
                    self._streams[peer, call.work] = _Stream()
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
        for work, _ in message.calls:
            self._drop_stream(peer, work)

    def _received(self, peer: Peer, message: ResultReceived, _frames: object) -> None:
        held = self._held.get(peer, {})
        for work, attempt in message.items:
            self._store.free(held.pop((work, attempt), ()))

    def _credited(self, peer: Peer, message: StreamCredit, _frames: object) -> None:
        stream = self._streams.get((peer, message.work))
        if stream is not None:
            count = min(message.count, len(stream.sent))
            for _ in range(count):
                self._store.free(stream.sent.popleft())
            stream.credit(count)
            if stream.is_ended and not stream.sent:
                del self._streams[peer, message.work]

    def _gone(self, peer: Peer) -> None:
        self._interrupt(self._queue.caller_gone(peer))
        for key in [key for key in self._streams if key[0] is peer]:
            self._drop_stream(*key)
        for bulks in self._held.pop(peer, {}).values():
            self._store.free(bulks)

    def _drop_stream(self, peer: Peer, work: int) -> None:
        stream = self._streams.pop((peer, work), None)
        if stream is not None:
            stream.credit(1)  # its generator may wait, and sees that the call was dropped
            for bulks in stream.sent:
                self._store.free(bulks)

    def _flush(self) -> None:
        """Send the outcomes, and give the next calls."""
        self._flush_due = False
        outcomes = self._outcomes[:]
        del self._outcomes[: len(outcomes)]  # the main thread may append meanwhile
        by_peer: dict[Peer, list[tuple[int, int, int, bytes]]] = defaultdict(list)
        for call, kind, payload in outcomes:
            peer: Any = call.caller
            is_held = kind == BULK or (kind == ITEM and is_reference(payload))
            bulks: list[int] = decode_reference(payload).bulks if is_held else []
            if kind == ITEM:
                stream = self._streams.get((peer, call.work))
                if stream is None:
                    self._store.free(bulks)
                else:
                    by_peer[peer].append((call.work, call.attempt, kind, payload))
                    stream.sent.append(bulks)
            elif self._queue.ended(call):
                by_peer[peer].append((call.work, call.attempt, kind, payload))
                if bulks:
                    self._held[peer][call.work, call.attempt] = bulks
            else:
                self._store.free(bulks)
            if kind != ITEM and (stream := self._streams.get((peer, call.work))) is not None:
                stream.is_ended = True
                if not stream.sent:
                    del self._streams[peer, call.work]
        self._table.note_waiting(self._queue.unended)
        if self._failed or self._ran:
            failed, ran = self._failed[:], self._ran[:]
            del self._failed[: len(failed)], self._ran[: len(ran)]
            with contextlib.suppress(OSError):  # the worker has closed the pipe
                self._report(failed, ran)
        for peer, items in by_peer.items():
            for part in split(items):
                self._router.send(peer, ActorResults(self._incarnation, part))
        self._give_next()

    # -- the main thread ---------------------------------------------------------------------------

    def run(self, instance: Any, fetcher: PartsFetcher) -> None:
        """Run the calls until the actor ends. The main thread calls this, once the loop has
        started."""
        methods = _Methods(self, instance, self._spec, fetcher)
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
            if self._ending:
                self._close()

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
                self._table.seconds[BEGAN] = began = time.monotonic()
                kind, payload = run(methods, 0, call.method, call.payload)
                ended = self._end_call(call, began, kind, payload)
                self._current = None
                self._append(call, kind, payload)
                if ended > flush_at:
                    self._loop.call_soon(self._flush)
                    flush_at = time.monotonic() + FLUSH_S
            self._loop.call_now(self._flush)
        self._loop.run(self._flush)

    async def _run_async(self, methods: _Methods) -> None:
        import asyncio

        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        tasks: dict[ActorCall, asyncio.Task[None]] = {}

        async def run_one(call: ActorCall) -> None:
            _running.set(call)
            try:
                began = time.monotonic()
                kind, payload = await run_method(methods, 0, call.method, call.payload)
                self._end_call(call, began, kind, payload)
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
            if self._ending:
                self._close()

        self._loop.call_soon(begin)
        await ended.wait()
        for task in list(tasks.values()):
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        self._loop.run(self._flush)

    def stream(self, method: Callable[..., Any]) -> Callable[..., None]:
        """Return a function that sends the values of a generator method to the caller."""
        call = self._current
        assert call is not None
        stream = self._streams.get((call.caller, call.work))  # type: ignore[arg-type]

        def send_all(*args: Any, **kwargs: Any) -> None:
            with contextlib.closing(method(*args, **kwargs)) as generator:
                for item in generator:
                    while stream is not None and not stream.wait(limits.WAIT_LOG_S):
                        log.warning(STREAM_WAITS, self._spec.cls, call.method)
                    if stream is None or self.is_cancelled():
                        return
                    self._send_item(call, item)

        return send_all

    def async_stream(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a coroutine function that does the same in an event loop."""
        import asyncio

        call = _running.get()
        assert call is not None
        stream = self._streams.get((call.caller, call.work))  # type: ignore[arg-type]

        async def send_all(*args: Any, **kwargs: Any) -> None:
            generator = method(*args, **kwargs)
            items = generator if hasattr(generator, "__anext__") else _as_async(generator)
            async with contextlib.aclosing(items):
                async for item in items:
                    if stream is None:
                        return
                    while not stream.wait(0.0):
                        await asyncio.sleep(CREDIT_S)
                    self._send_item(call, item)

        return send_all

    def _end_call(self, call: ActorCall, began: float, kind: int, payload: Any) -> float:
        """Record for the facts that a call has ended. Return when."""
        table, ended = self._table, time.monotonic()
        size = sum(memoryview(part).nbytes for part in payload) if kind == BULK else len(payload)
        fn = self._numbers.get(call.method, 0)
        table.add(0, fn, [ended - began], kind == ERROR, len(call.payload), size, ended)
        watches_runs = table.watches_runs and table.may_report_run(ended)
        if kind == ERROR or watches_runs:
            peer: Any = call.caller
            method = f"{self._spec.cls}.{call.method}"
            place = peer.hello.incarnation, call.work, call.attempt
            if watches_runs:
                self._ran.append((method, *place, began, ended, kind))
            texts = last_failure.take() if kind == ERROR else None
            if texts is not None:
                self._failed.append(FailureFacts(0, os.getpid(), *texts, method, *place))
        return ended

    def _send_item(self, call: ActorCall, item: Any) -> None:
        pack = results.pack if call.payload[:1] == results.SAFE else trusted.pack
        packed = pack(item)
        if not isinstance(packed, bytes):
            packed = encode_reference(self._store.hold(packed, shared=False))
        self._outcomes.append((call, ITEM, packed))
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _append(self, call: ActorCall, kind: int, payload: Any) -> None:
        if kind == BULK:
            try:
                payload = encode_reference(self._store.hold(payload, shared=False))
            except Exception as error:
                kind, payload = ERROR, trusted.pack_error(error)
        self._outcomes.append((call, kind, payload))


class _Stream:
    """The values of a generator at its actor: the numbers in the store of those that were sent and
    not taken, and the credit for more."""

    def __init__(self) -> None:
        self.sent: deque[list[int]] = deque()
        self.is_ended = False
        self._credit = threading.Semaphore(STREAM_AHEAD)

    def credit(self, count: int) -> None:
        self._credit.release(count)

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._credit.acquire(timeout=timeout_s)


async def _as_async(generator: Any) -> AsyncGenerator[Any, None]:
    with contextlib.closing(generator):
        for item in generator:
            yield item


class _Methods:
    """The methods of the object, by name."""

    def __init__(
        self, calls: ActorCalls, instance: Any, spec: ActorSpec, fetcher: PartsFetcher
    ) -> None:
        self._calls, self._instance, self._cls, self._fetcher = calls, instance, spec.cls, fetcher
        self._kinds, self._is_async = spec.methods, is_async(type(instance))

    def get(self, _coordinator: int, name: str) -> Any:
        method = None if name.startswith("_") else getattr(self._instance, name, None)
        if not callable(method):
            names = [name for name in dir(type(self._instance)) if not name.startswith("_")]
            raise AttributeError(f"{self._cls} has no method {name}: {did_you_mean(name, names)}")
        if self._kinds.get(name) == MethodKind.STREAM:
            return (self._calls.async_stream if self._is_async else self._calls.stream)(method)
        return method

    def fetched(self, payload: bytes) -> list[Any]:
        return self._fetcher.fetch(decode_reference(payload))
