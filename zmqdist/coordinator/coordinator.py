"""ClusterCoordinator: schedule functions on a dispatcher's workers and take their results.

The shell of core/closures.py. Users' threads pack and append; one loop thread talks to the dispatcher and settles RemoteValues.

Locks
    _turn    one `schedule` or `join` at a time: `join` answers for what was scheduled before it
    _lock    everything that users' threads and the loop share; held for microseconds, never while anything is waited for
    _unpacking   a result is unpacked once
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import secrets
import socket
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from zmqdist import errors, limits, nest
from zmqdist.coordinator.fetching import Fetching
from zmqdist.coordinator.target import resolve
from zmqdist.coordinator.values import RemoteValue, RemoteValueGiven, failure, in_order_of_completion
from zmqdist.core.closures import (
    DISPATCHER,
    UNAVAILABLE,
    BulkArrived,
    BulkUnreachable,
    Closures,
    DispatcherDown,
    DispatcherUp,
    Effect,
    EndAsked,
    Event,
    Fetch,
    FunctionsDefined,
    FunctionsDropped,
    Resolve,
    ResolveLost,
    RoomMade,
    RoundEnded,
    Scheduled,
    WithdrawAsked,
)
from zmqdist.core.closures import LOST as LOST_KIND
from zmqdist.core.events import Heard, Send, Ticked
from zmqdist.dispatch.bulk import BulkStore, encode_reference
from zmqdist.dispatch.memory import MemoryKeeper
from zmqdist.dispatch.worker import own_host
from zmqdist.limits import INLINE_BYTES_MAX
from zmqdist.messages import CANCELLED, ERROR, Goodbye, Message, Refused
from zmqdist.net.address import join as join_address
from zmqdist.net.dealer import Dealer
from zmqdist.net.loop import Loop
from zmqdist.net.router import Router
from zmqdist.rpc.service import RpcService
from zmqdist.wire import trusted
from zmqdist.wire.functions import FunctionCache
from zmqdist.wire.hello import Hello, our_hello

log = logging.getLogger("zmqdist.coordinator")

WORKERS = frozenset({"worker"})


class ClusterCoordinator:
    """Schedules functions on the workers of a dispatcher.

    Args:
      target: a DispatchServer, a `local_cluster`, "host:port", "zmq://host:port"; None takes the cluster that `zmqdist launch` has put
        into the environment.
      queue_max: pieces of work that may wait for a worker; then `schedule` blocks. None: what the cluster's file says, or 2**20.
      cancel_grace_s: how long a running function has to end after it was cancelled, before its slot is cut off. None: what the
        cluster's file says, or 5.
      cluster_lost_limit_s: how long the cluster may be without a dispatcher, or without any worker, before what is unfinished fails.

    The constructor does not wait for the dispatcher. Close it, or use it in a with-statement. Any thread may use it; it cannot be
    used after a fork.

    Raises:
      ValueError: `target` is none of these.
      FailedPreconditionError: the secrets for the target cannot be read.
    """

    _rounds = True
    """Whether a failure ends the round."""

    def __init__(
        self,
        target: Any = None,
        *,
        queue_max: int | None = None,
        cancel_grace_s: float | None = None,
        cluster_lost_limit_s: float = limits.CLUSTER_LOST_LIMIT_S,
    ) -> None:
        found = resolve(target)
        self._address = found.address
        self._queue_max = found.queue_max if queue_max is None else queue_max
        if self._queue_max < 1:
            raise ValueError(f"queue_max is {queue_max}, wants 1 or more")
        grace_s = found.cancel_grace_s if cancel_grace_s is None else cancel_grace_s
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._unpacking = threading.RLock()
        self._memory = MemoryKeeper()
        self._works = itertools.count(1)
        self._fns = itertools.count(1)
        self._functions: OrderedDict[bytes, int] = OrderedDict()
        self._cache = FunctionCache()
        self._values: dict[int, weakref.ref[RemoteValue]] = {}
        self._kept: set[RemoteValue] = set()
        self._outbox: list[tuple[int, int, bytes]] = []
        self._defined: list[tuple[int, bytes]] = []
        self._dropped: list[int] = []
        self._held: dict[int, list[int]] = {}
        self._draining = False
        self._scheduled = self._resolved = 0
        self._failure: Callable[[], BaseException] | None = None
        self._names: dict[int, Callable[..., Any]] = {}
        self._rounds_ended = 0
        self._waiting = 0
        self._closed = False
        self._callbacks: queue.SimpleQueue[tuple[Callable[[RemoteValue], object], RemoteValue] | None] | None = None
        self._open(found.credentials, grace_s, cluster_lost_limit_s)

    # -- scheduling -----------------------------------------------------------------------------------------------

    def schedule(
        self, fn: Callable[..., Any], args: Iterable[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Run `fn(*args, **kwargs)` once on some worker; returns at once, unless the queue is full.

        Arguments, and what the function captures, are as they are now: they may be changed as soon as this returns. The function
        runs at least once, its result is accepted once: it runs again when its worker dies. It is not run again when it raises.

        Args:
          fn: any callable that can be pickled; lambdas and closures can. Functions of importable modules go by name.
          args: positional arguments, any iterable.
          kwargs: keyword arguments.

        Returns:
          The result to come.

        Raises:
          Exception: an earlier function of this round failed: this is its error, raised once; nothing of the round runs any more,
            and what was unfinished is cancelled. Nothing was scheduled by this call.
          TypeError: `fn` is not callable, or `args` not iterable.
          ValueError: a RemoteValue is among the arguments.
          InvalidArgumentError: `fn` or an argument cannot be pickled; it says which.
          FailedPreconditionError: the coordinator has been closed.
        """
        if not callable(fn):
            raise TypeError(f"schedule() takes a callable, not {type(fn).__name__}")
        positional = () if args is None else tuple(args)
        keywords = {} if kwargs is None else dict(kwargs)
        with self._turn:
            if self._failure is not None:
                self._end_round()
            packed = _pack(positional, keywords)
            blob = self._pickled(fn)
            with self._lock:
                self._wait_for_room()
                work = next(self._works)
                return self._enqueue(work, fn, blob, packed)

    def map(self, fn: Callable[..., Any], iterable: Iterable[Any]) -> list[RemoteValue]:
        """`schedule(fn, (item,))` for each item; the results in the order of the items."""
        return [self.schedule(fn, (item,)) for item in iterable]

    def join(self, timeout: float | None = None) -> None:
        """Wait until everything that was scheduled has ended.

        Raises:
          Exception: the first error of a function; raised once. Nothing that was scheduled is executing any more: what had not
            begun was dropped, what ran was told to end and cut off after `cancel_grace_s` (where slots are threads: waited for), and
            their RemoteValues raise CancelledError. The coordinator can be used on.
          DeadlineExceededError: not all have ended after `timeout` seconds. They go on.
          UnavailableError: there was no dispatcher, or no worker, for `cluster_lost_limit_s`.
        """
        until = None if timeout is None else time.monotonic() + timeout
        if not self._turn.acquire(timeout=-1 if timeout is None else timeout):
            raise errors.DeadlineExceededError(
                None, None, f"another thread joins or schedules for more than {timeout:g} s"
            )
        try:
            with self._lock:
                self._check_open()
                self._wait_until(lambda: self._resolved == self._scheduled or self._failure is not None, until, timeout)
                failed = self._failure is not None
            if failed:
                self._end_round()
        finally:
            self._turn.release()

    def done(self) -> bool:
        """Whether everything that was scheduled has ended. Does not wait, but after an error: raises it as `join` does."""
        self._check_open()
        if self._failure is not None:
            self._end_round()
        return self._resolved == self._scheduled

    def fetch(self, val: Any) -> Any:
        """The structure `val` (lists, tuples, dicts) with each RemoteValue in it replaced by its result; the rest as it is.

        Raises: what `RemoteValue.fetch` raises.
        """
        return nest.map_structure(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val)

    def as_completed(self, values: Iterable[RemoteValue], timeout: float | None = None) -> Iterator[RemoteValue]:
        """Each value once, in the order in which they end.

        Raises:
          DeadlineExceededError: not all have ended `timeout` seconds after the first was asked for.
        """
        return in_order_of_completion(values, timeout)

    @property
    def target(self) -> str:
        """The dispatcher, as "zmq://host:port"."""
        return f"zmq://{self._address}"

    def close(self) -> None:
        """Leave the dispatcher. What is unfinished is cancelled, what runs is cut off. Idempotent; does not raise."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._loop.run(self._say_goodbye, timeout_s=5.0)
        except errors.OpError:
            pass
        self._loop.stop()
        self._fetching.close()
        with self._lock:
            ended = [reference() for reference in self._values.values()]
            self._values.clear()
            for value in ended:
                if value is not None:
                    value._settle(CANCELLED, b"")
            self._resolved = self._scheduled
            self._changed.notify_all()
        self._call_back([(fn, value) for value in ended if value is not None for fn in value._callbacks or ()])
        self._kept.clear()
        if self._callbacks is not None:
            self._callbacks.put(None)

    def __enter__(self) -> ClusterCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a ClusterCoordinator stays in its process: schedule from there, not from a scheduled function")

    # -- in users' threads ----------------------------------------------------------------------------------------

    def _pickled(self, fn: Callable[..., Any]) -> bytes:
        try:
            return self._cache.lookup(fn)[0]
        except errors.InvalidArgumentError as error:
            raise _unwrapped(error) from error.__cause__

    def _enqueue(self, work: int, fn: Callable[..., Any], blob: bytes, packed: bytes | list[Any]) -> RemoteValue:
        """With the lock held."""
        if isinstance(packed, list):
            packed = self._hold(work, packed)
        number = self._functions.get(blob) if len(blob) <= INLINE_BYTES_MAX else None
        if number is None:
            number = self._define(work, fn, blob)
        value = RemoteValue(self, work, _Name(fn))
        self._values[work] = weakref.ref(value)
        self._outbox.append((work, number, packed))
        self._scheduled += 1
        if not self._draining:
            self._draining = True
            self._loop.call_soon(self._drain)
        return value

    def _define(self, work: int, fn: Callable[..., Any], blob: bytes) -> int:
        """A function that the cluster does not know yet. The longest unused is forgotten for it."""
        number = next(self._fns)
        if len(blob) > INLINE_BYTES_MAX:
            # Too large for a message, and too large to compare: it serves this one piece of work.
            self._defined.append((number, self._hold(work, [blob])))
            self._dropped.append(number)
            return number
        self._defined.append((number, blob))
        self._functions[blob] = number
        if len(self._functions) > limits.FUNCTIONS_KEPT_MAX:
            self._dropped.append(self._functions.popitem(last=False)[1])
        return number

    def _hold(self, work: int, parts: list[Any]) -> bytes:
        reference = self._store.hold(parts)
        self._held.setdefault(work, []).append(reference.bulk)
        return encode_reference(reference)

    def _wait_for_room(self) -> None:
        """With the lock held: until the queue has room, or there is an error to raise instead."""
        while True:
            self._check_open()
            if self._machine.queued + len(self._outbox) < self._queue_max:
                return
            if self._failure is not None:
                self._lock.release()
                try:
                    self._end_round()
                finally:
                    self._lock.acquire()
            self._wait_until(
                lambda: (
                    self._closed
                    or self._failure is not None
                    or self._machine.queued + len(self._outbox) < self._queue_max
                ),
                None,
                None,
            )

    def _wait_until(self, ready: Callable[[], bool], until: float | None, timeout: float | None) -> None:
        """With the lock held. The machine fails what waits when the cluster is lost, so this ends."""
        self._waiting += 1
        try:
            while not ready():
                left = limits.WAIT_LOG_S if until is None else min(limits.WAIT_LOG_S, until - time.monotonic())
                if left <= 0:
                    unfinished = self._scheduled - self._resolved
                    problem = f"{unfinished} scheduled functions have not ended after {timeout:g} s"
                    raise errors.DeadlineExceededError(None, None, problem)
                self._changed.wait(left)
                if not self._machine.enlisted:
                    log.info("waiting for the dispatcher at %s: %s", self._address, self._dealer.trouble or "no answer")
                elif not self._machine.workers:
                    log.info("waiting for a worker to register with the dispatcher at %s", self._address)
        finally:
            self._waiting -= 1

    def _end_round(self) -> None:
        """Raise the round's error once nothing of it can be executing. Of several threads one raises."""
        with self._lock:
            before = self._rounds_ended
            fail = self._failure
            if fail is None:
                return
            self._loop.call_soon(self._handle, EndAsked())
            self._wait_until(lambda: self._rounds_ended > before or self._closed, None, None)
            if self._failure is not fail:
                return  # another thread has raised it
            self._failure = None
        raise fail()

    def _check_open(self) -> None:
        if self._closed:
            raise errors.FailedPreconditionError(None, None, "this ClusterCoordinator has been closed")
        if self._pid != os.getpid():
            raise errors.FailedPreconditionError(
                None, None, "this ClusterCoordinator was made before a fork: make a new one in the child process"
            )

    def _cancel(self, work: int) -> None:
        try:
            self._loop.call_soon(self._cancel_in_loop, work)
        except errors.FailedPreconditionError:  # closed: it is settled
            pass

    def _keep(self, value: RemoteValue) -> None:
        """Somebody wants to be called back: it must not be dropped. With the lock held."""
        self._kept.add(value)

    def _call_back(self, calls: list[tuple[Callable[[RemoteValue], object], RemoteValue]]) -> None:
        if not calls:
            return
        with self._lock:
            if self._callbacks is None:
                self._callbacks = queue.SimpleQueue()
                thread = threading.Thread(
                    target=_serve_callbacks, args=(self._callbacks,), name="zmqdist-callbacks", daemon=True
                )
                thread.start()
        for call in calls:
            self._callbacks.put(call)

    # -- in the loop ----------------------------------------------------------------------------------------------

    def _open(self, credentials: Any, cancel_grace_s: float, cluster_lost_limit_s: float) -> None:
        self._pid = os.getpid()
        incarnation = secrets.randbits(62) | 1
        name = f"coordinator {socket.gethostname()}:{self._pid}"
        loop = self._loop = Loop("zmqdist-coordinator")
        try:
            host = own_host(self._address)
            router = Router(loop, credentials.server(host), our_hello("server", incarnation, name))
            service = RpcService("coordinator")
            self._store = BulkStore(service, WORKERS)
            service.attach(router, loop, incarnation)
            self._store.address = router.bind(join_address(host, 0))
            self._fetching = Fetching(credentials, self._fetched, self._not_fetched)
            self._machine = Closures(
                coordinator=incarnation,
                queue_max=self._queue_max,
                cancel_grace_s=cancel_grace_s,
                lost_limit_s=cluster_lost_limit_s,
                now=loop.now(),
            )
            self._dealer = Dealer(
                loop,
                self._address,
                credentials.client(self._address, "submit"),
                our_hello("coordinator", incarnation, name),
                on_up=self._up,
                on_message=self._hear,
                on_down=lambda: self._handle(DispatcherDown()),
                on_refused=self._refused,
            )
        except BaseException:
            loop.stop()
            raise
        self._dealer.connect()
        loop.start()

    def _up(self, _hello: Hello) -> None:
        self._handle(DispatcherUp())

    def _hear(self, message: Message, _frames: list[memoryview]) -> None:
        if isinstance(message, Refused):
            self._refused(errors.from_code(message.code, message.message))
        else:
            self._handle(Heard(DISPATCHER, message))

    def _refused(self, error: errors.OpError) -> None:
        """The dispatcher does not take us, for good: everything fails with its reason."""
        log.error("dispatcher at %s: %s", self._address, error)
        text = f"dispatcher at {self._address}: {error.message}"
        code = error.error_code
        with self._lock:
            self._failure = self._failure or (lambda: errors.from_code(code, text))
            self._changed.notify_all()
        self._drain()
        payload = trusted.pack_error(errors.from_code(code, text))
        self._settle([(work, ERROR, payload) for work in list(self._values)])

    def _drain(self) -> None:
        with self._lock:
            outbox, self._outbox = self._outbox, []
            defined, self._defined = self._defined, []
            dropped, self._dropped = self._dropped, []
            self._draining = False
        if defined:
            self._handle(FunctionsDefined(defined))
        if outbox:
            self._handle(Scheduled(outbox))
        if dropped:
            self._handle(FunctionsDropped(dropped))

    def _cancel_in_loop(self, work: int) -> None:
        self._drain()
        self._handle(WithdrawAsked([work]))

    def _handle(self, event: Event) -> None:
        now = self._loop.now()
        self._perform(self._machine.handle(event, now))
        self._loop.set_timer(self, self._machine.deadline, self._tick)

    def _tick(self) -> None:
        self._handle(Ticked())

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(_, message):
                    self._dealer.send(message)  # while down: everything is submitted again when it is up
                case Resolve(items):
                    self._settle(items)
                case ResolveLost(work, starts):
                    self._settle([(work, LOST_KIND, starts)])
                case Fetch(work, attempt, reference):
                    self._fetch(work, attempt, reference)
                case RoundEnded():
                    with self._lock:
                        self._rounds_ended += 1
                        self._changed.notify_all()
                case RoomMade():
                    with self._lock:
                        self._changed.notify_all()

    def _settle(self, items: list[Any]) -> None:
        calls: list[tuple[Callable[[RemoteValue], object], RemoteValue]] = []
        with self._lock:
            for work, kind, payload in items:
                reference = self._values.pop(work, None)
                if reference is None:
                    continue
                self._resolved += 1
                if self._held and work in self._held:
                    for bulk in self._held.pop(work):
                        self._store.free(bulk)
                value = reference()
                if self._rounds and kind in (ERROR, LOST_KIND, UNAVAILABLE) and self._failure is None:
                    self._failure = _Failure(kind, payload, "a scheduled function" if value is None else value._name())
                if value is None:
                    continue
                value._settle(kind, payload)
                if value._callbacks:
                    calls += [(fn, value) for fn in value._callbacks]
                    self._kept.discard(value)
            if not self._values:
                self._values = {}  # a dict keeps the room that it once needed
            if self._waiting:
                self._changed.notify_all()
        self._memory.look(len(self._values), lambda: True)
        self._call_back(calls)

    # -- bulk results ---------------------------------------------------------------------------------------------

    def _fetch(self, work: int, attempt: int, reference: bytes) -> None:
        held = self._values.get(work)
        wanted = held is not None and held() is not None
        self._fetching.ask(work, attempt, reference, wanted=wanted)

    def _fetched(self, work: int, attempt: int, parts: Any) -> None:
        """In a fetching thread."""
        self._in_loop(self._handle, BulkArrived(work, attempt, parts))

    def _not_fetched(self, work: int, attempt: int, problem: str) -> None:
        """In a fetching thread."""
        self._in_loop(self._handle, BulkUnreachable(work, attempt, problem))

    def _in_loop(self, fn: Callable[..., object], *args: Any) -> None:
        try:
            self._loop.call_soon(fn, *args)
        except errors.FailedPreconditionError:  # closed
            pass

    def _say_goodbye(self) -> None:
        self._dealer.send(Goodbye())
        self._dealer.close(linger_s=0.5)


class _Name:
    """The name of a function, for errors; made into text only when it is asked for."""

    __slots__ = ("_fn",)

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn

    def __call__(self) -> str:
        return trusted.describe(self._fn)


class _Failure:
    """How a round has failed; a fresh exception each time."""

    def __init__(self, kind: int, payload: Any, name: str) -> None:
        self._told = (kind, payload, name)

    def __call__(self) -> BaseException:
        return failure(*self._told)


def _pack(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes | list[Any]:
    try:
        return trusted.pack_call(args, kwargs)
    except errors.InvalidArgumentError as error:
        raise _unwrapped(error) from error.__cause__


def _unwrapped(error: errors.InvalidArgumentError) -> Exception:
    """The ValueError about a RemoteValue, where that was the reason; it may be wrapped more than once."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RemoteValueGiven):
            return ValueError(str(cause))
        cause = cause.__cause__ or cause.__context__
    return error


def _serve_callbacks(calls: queue.SimpleQueue[tuple[Callable[[RemoteValue], object], RemoteValue] | None]) -> None:
    while (call := calls.get()) is not None:
        fn, value = call
        try:
            fn(value)
        except Exception:
            log.exception("a done callback of %r failed", value)
        del call, fn, value
