"""RemoteValue: what a scheduled function will return.

The coordinator's loop settles it; whoever asks first unpacks it, in the asker's thread. Nothing here waits on the loop's thread for
anything but the end of the work.
"""

from __future__ import annotations

import enum
import operator
import os
import queue
import threading
import time
from _thread import allocate_lock, get_ident
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from zmqdist import errors
from zmqdist.messages import KEPT, VALUE
from zmqdist.scheduling.coordinator import metrics
from zmqdist.scheduling.coordinator.callbacks import Callbacks
from zmqdist.scheduling.coordinator.coordinator_events import Event
from zmqdist.scheduling.coordinator.dependencies_and_retries import ValueLost
from zmqdist.scheduling.coordinator.failures import Failure, Failures
from zmqdist.scheduling.coordinator.result_fetcher import Fetching
from zmqdist.scheduling.worker import remote_results
from zmqdist.wire import trusted

_NOTHING: Any = object()


class RemoteValueStatus(enum.Enum):
    """How far a RemoteValue is."""

    NOT_READY = "NOT_READY"
    ABORTED = "ABORTED"
    READY = "READY"


class ValueOwner(Protocol):
    """The connection that settles values; its runtime says what each of these is (runtime.py)."""

    pid: int
    closed: bool
    packing: int | None
    by_reference: bool
    given: list[Any]
    inputs: dict[int, RemoteValue]
    lost_values: dict[int, RemoteValue]
    lock: threading.Lock
    unpacking: threading.RLock
    failures: Failures
    callbacks: Callbacks
    fetching: Fetching

    def cancel(self, work: int) -> None: ...

    def take_back(self, work: int) -> None: ...

    def keep(self, value: RemoteValue) -> None: ...

    def let_go(self, work: int) -> None: ...

    def post_event(self, event: Event) -> None: ...


class RemoteValue:
    """The result of one `schedule`; made by a ClusterCoordinator only.

    Ready means for good: the result is on this machine, and no worker's death can take it away. All methods may be called from
    any thread. Dropping a RemoteValue does not cancel its function, but its result is not kept.

    It may be an argument of other functions of the same coordinator, at any depth, or captured by them, also before it has ended: the
    function waits for it, and gets a value that is private to that run.

    One of `schedule(..., keep=True)` is ready when its value is with the worker, which holds it until the RemoteValue has been collected.
    Only `get` brings it here; functions get it straight from that worker. Until then it is lost with its worker, with the dispatcher,
    and with the coordinator's connection to that; one of `schedule(..., lineage=True)` is then made again.

    Attributes:
      name: of its function.
      work: its number among what its coordinator has scheduled.
    """

    __slots__ = (
        "__weakref__",
        "_alive",
        "_callbacks",
        "_kind",
        "_owner",
        "_payload",
        "_value",
        "_waiters",
        "name",
        "work",
    )

    def __init__(self, owner: ValueOwner, work: int, name: str, alive: object = None) -> None:
        self._owner = owner
        self._alive = alive  # the coordinator is not given up while somebody waits
        self.work = work
        self.name = name
        self._kind: int | None = None
        self._payload: Any = None
        self._value: Any = _NOTHING
        self._waiters: list[Any] | None = None
        self._callbacks: list[Callable[[RemoteValue], object]] | None = None

    def __repr__(self) -> str:
        state = {None: "pending", VALUE: "ready", KEPT: "kept by its worker"}.get(self._kind, "failed")
        return f"<RemoteValue of {self.name}: {state}>"

    def __reduce__(self) -> Any:
        """As an argument of a scheduled function, or captured by one: its value is put there where that is unpickled."""
        if self._owner.packing != get_ident():
            raise RemoteValueNotAllowed(
                "a RemoteValue can only be given to functions of its own coordinator: fetch() it first"
            )
        if not self._owner.by_reference:
            self._owner.inputs[self.work] = self
            return remote_results.taken, (self.work, self.name)
        if self._kind != KEPT:
            raise RemoteValueNotAllowed(
                "only a RemoteValue of keep=True that has ended can be given to all workers: fetch() it first"
            )
        self._owner.given.append(self._payload)
        return remote_results.value, (self._payload.encoded, self.name)

    @property
    def status(self) -> RemoteValueStatus:
        """READY as soon as it has ended, also with an error. ABORTED is only for what belongs to a worker that was lost."""
        return RemoteValueStatus.NOT_READY if self._kind is None else RemoteValueStatus.READY

    @property
    def forked(self) -> bool:
        """Whether another process has scheduled it, from which this one was forked: its result comes to that one."""
        return self._owner.pid != os.getpid()

    # -- asking ---------------------------------------------------------------------------------------------------

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the function to end and give what it returned: the same object each time, private to this process.

        Args:
          timeout: seconds; None waits as long as there is a cluster. A kept value is brought here by the first call, which takes its
            own time: a worker on this host whose process has ended, or that refuses connections, is known at once, one that does not
            answer any more after some 20 s.

        Raises:
          DeadlineExceededError (a TimeoutError): not ended within `timeout`. It goes on, ask again. Or the `timeout` of its `schedule` has
            passed: then `done` is true.
          CancelledError: it was cancelled, or its round ended by another function's error; schedule it again.
          WorkerLost: every process that started it died.
          ClosureInputError: one of its inputs has no value; `original_exception` says why.
          UnavailableError: there was no dispatcher, or no worker, for `cluster_lost_limit_s`; or it was kept by its worker and is lost.
          Exception: what the function raised, of its own class where that can be pickled, with the remote traceback as
            its cause; a fresh copy each time. It is never WorkerLost only because a worker died once: then it ran again.
        """
        if self._kind is None:
            self._wait(timeout)
        if self._kind != VALUE:
            return self._get_kept(timeout)
        if self._value is _NOTHING:
            with self._owner.unpacking:
                if self._value is _NOTHING:
                    with metrics.monitored_timer("remote_value_fetch"):
                        self._value = _unpack(self._payload)
                    self._payload = None
        return self._value

    def _get_kept(self, timeout: float | None) -> Any:
        until = None if timeout is None else time.monotonic() + float(timeout)
        while self._value is _NOTHING:
            held = self._payload
            if not isinstance(held, Kept):
                raise self.error()
            if self.forked:
                problem = (
                    f"the value of {self.name} was kept before a fork: fetch() it in the process that scheduled it"
                )
                raise errors.FailedPreconditionError(problem)
            try:
                with metrics.monitored_timer("remote_value_fetch"):
                    value = self._owner.fetching.kept(held.encoded, self.name)
            except errors.UnavailableError:
                if not held.lineage or not self._wait_for_remake(held, until, timeout):
                    raise
                continue
            with self._owner.unpacking:
                if self._value is _NOTHING:  # else another thread was faster
                    self._value = value
        return self._value

    def _wait_for_remake(self, lost: Kept, until: float | None, timeout: float | None) -> bool:
        """Wait until a lost value was made again, or has failed; False where the coordinator has been closed."""
        waiter = allocate_lock()
        waiter.acquire()
        with self._owner.lock:
            if self._owner.closed:
                return False
            if self._payload is not lost:
                return True
            self._waiters = [*(self._waiters or ()), waiter]
            self._owner.lost_values[self.work] = self
        self._owner.post_event(ValueLost(self.work, lost.work))
        if not waiter.acquire(True, -1 if until is None else max(0.0, until - time.monotonic())):
            self._remove_waiter(waiter)
            problem = f"{self.name}, whose value was lost, has not been made again after {timeout:g} s"
            raise errors.DeadlineExceededError(problem)
        return self._payload is not lost

    def fetch(self, timeout: float | None = None) -> Any:
        """As `get`, with what has a method `numpy()`, as the tensors of other libraries, turned into arrays, in lists, tuples, dicts."""
        return _as_numpy(self.get(timeout))

    def done(self) -> bool:
        """Whether it has ended, in whatever way. Does not wait."""
        return self._kind is not None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end; the error that `get` would raise, None after success. DeadlineExceededError as in `get`.

        Of a kept value it is how its function ended: whether the value is still there only `get` finds out.
        """
        self._wait(timeout)
        return None if self._kind in (VALUE, KEPT) else self.error()

    def cancel(self) -> bool:
        """Take it back: dropped where it waits, told to end where it runs, and cut off `cancel_grace_s` later.

        Returns:
          False when it has ended already. True means that it was asked for: `get` tells how it ended, which may be a value
          that was on its way.
        """
        if self._kind is not None:
            return False
        self._owner.cancel(self.work)
        return True

    def add_done_callback(self, fn: Callable[[RemoteValue], object]) -> None:
        """Call `fn(self)` when it has ended, in a thread of the coordinator that runs callbacks one after the other; at once
        when it has ended already. What `fn` raises is logged. It must not wait for another RemoteValue of a callback.

        Raises:
          RuntimeError: no thread can be started for it.
        """
        self._owner.callbacks.start()
        with self._owner.lock:
            if self._kind is None:
                if self._callbacks is None:
                    self._callbacks = []
                    self._owner.keep(self)
                self._callbacks.append(fn)
                return
        self._owner.callbacks.put([(fn, self)])

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio  # only for those who use it

        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def set_done() -> None:
            if not future.done():
                future.set_result(None)

        def ended(_: RemoteValue) -> None:
            try:
                loop.call_soon_threadsafe(set_done)
            except RuntimeError:  # the event loop has been closed: nobody waits
                pass

        self.add_done_callback(ended)
        yield from future
        if self._kind == KEPT and self._value is _NOTHING:  # to bring it here takes time that is not the event loop's
            return (yield from loop.run_in_executor(None, self.get))
        return self.get()

    def release_at_end(self, waiter: Any) -> None:
        """Have `waiter` released, which keeps nobody from collecting this value but itself; at once when it has ended."""
        with self._owner.lock:
            if self._kind is None:
                self._waiters = [*(self._waiters or ()), waiter]
                return
        waiter.release()

    # -- settling, by the coordinator's loop with the coordinator's lock held ------------------------------------------

    def settle(self, kind: int, payload: Any) -> list[Callable[[RemoteValue], object]] | None:
        """It has ended so; gives its callbacks, which are to be called."""
        self._payload = payload
        self._kind = kind
        if kind != KEPT:
            self._alive = None
        if self._waiters is not None:
            self.wake()
        return self._callbacks

    def wake(self) -> None:
        """Let the threads that wait have another look."""
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            waiter.release()

    # -- for other parts of the coordinator ----------------------------------------------------------------------------

    def copied(self, take: Callable[[Any], object]) -> None:
        """Give `take` the value as it is now, packed, where it is here; no thread changes it meanwhile that has yet to ask for it.

        Raises InvalidArgumentError where it was changed and cannot be packed.
        """
        if self._kind == VALUE:
            with self._owner.unpacking:
                take(self._payload if self._value is _NOTHING else trusted.pack(self._value))

    def take_back(self) -> None:
        """As `cancel`, unless a worker has begun it: for an Executor."""
        self._owner.take_back(self.work)

    def _wait(self, timeout: float | None) -> None:
        if self._kind is not None:
            return
        if self.forked:
            problem = f"{self.name} was scheduled before a fork: its result comes to the process that scheduled it"
            raise errors.FailedPreconditionError(problem)
        waiter = allocate_lock()
        waiter.acquire()
        with self._owner.lock:
            if self.done():
                return
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(waiter)
        if timeout is None:
            waiter.acquire()
        elif not waiter.acquire(True, min(max(0.0, timeout), threading.TIMEOUT_MAX)):
            self._remove_waiter(waiter)
            if not self.done():
                raise errors.DeadlineExceededError(f"{self.name} has not ended after {timeout:g} s")

    def _remove_waiter(self, waiter: Any) -> None:
        with self._owner.lock:
            if self._waiters is not None and waiter in self._waiters:
                self._waiters.remove(waiter)

    def error(self) -> BaseException:
        """How it has failed, for the program, which has seen it then."""
        self._owner.failures.mark_seen(self.work)
        return Failure(self._kind, self._payload, self.name)()


def outcome_of(value: RemoteValue) -> tuple[int | None, Any]:
    """How it has ended, (kind, payload); the kind is None before."""
    return value._kind, value._payload


class Kept:
    """A value that its worker keeps until this object has been collected.

    Attributes:
      work: the number of the work, or of the attempt, that made it.
      encoded: the reference to it.
      lineage: it is made again when it is lost.
    """

    __slots__ = ("_owner", "encoded", "lineage", "work")

    def __init__(self, owner: ValueOwner, work: int, encoded: bytes, lineage: bool = False) -> None:
        self._owner = owner
        self.work = work
        self.encoded = encoded
        self.lineage = lineage

    def __del__(self) -> None:
        self._owner.let_go(self.work)


class RemoteValueNotAllowed(ValueError):
    """A RemoteValue that cannot be an argument was met while arguments were packed."""


def unwrapped(error: errors.InvalidArgumentError) -> Exception:
    """The ValueError about a RemoteValue, where that was the reason; it may be wrapped more than once."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RemoteValueNotAllowed):
            return ValueError(str(cause))
        cause = cause.__cause__ or cause.__context__
    return error


def _as_numpy(value: Any) -> Any:
    """The same object where there is nothing to turn."""
    cls = type(value)
    if cls in trusted.ATOMS or cls is np.ndarray or isinstance(value, type):
        return value
    if isinstance(value, (list, tuple)):
        items = [_as_numpy(item) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        if cls is list or cls is tuple:
            return cls(items)
        return cls(*items) if hasattr(value, "_fields") else value
    if cls is dict:
        mapped = {key: _as_numpy(item) for key, item in value.items()}
        return value if all(map(operator.is_, mapped.values(), value.values())) else mapped
    numpy = getattr(value, "numpy", None)
    return numpy() if callable(numpy) else value


def _unpack(payload: Any) -> Any:
    return trusted.unpack_parts(payload) if isinstance(payload, list) else trusted.unpack(payload)


def in_order_of_completion(values: Iterable[RemoteValue], timeout: float | None) -> Iterator[RemoteValue]:
    """Each value once, as it ends. DeadlineExceededError when not all have ended `timeout` seconds after the first `next`."""
    until = None if timeout is None else time.monotonic() + float(timeout)
    ended: queue.SimpleQueue[RemoteValue] = queue.SimpleQueue()
    wanted = list(dict.fromkeys(values))
    for value in wanted:
        value.release_at_end(_CompletionWaiter(ended, value))
    for count in range(len(wanted)):
        try:
            yield ended.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
        except queue.Empty:
            problem = f"{len(wanted) - count} of {len(wanted)} values have not ended after {timeout:g} s"
            raise errors.DeadlineExceededError(problem) from None


class _CompletionWaiter:
    """A waiter that says which value has ended."""

    __slots__ = ("_queue", "_value")

    def __init__(self, completed: queue.SimpleQueue[RemoteValue], value: RemoteValue) -> None:
        self._queue = completed
        self._value = value

    def release(self) -> None:
        self._queue.put(self._value)
