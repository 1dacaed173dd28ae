"""`RemoteValue`: the result that a scheduled function will have.

The coordinator's loop settles a value, and the first thread that calls `result` unpacks it. The
threads of the program wait for the loop only until a function has ended or a lost value has been
recomputed.
"""

from __future__ import annotations

import enum
import os
import threading
from _thread import allocate_lock
from collections.abc import Callable, Generator
from typing import Any, Generic, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from zmqdist import clock, errors, nest
from zmqdist.callbacks import Callbacks, NotAFuture, check_callback
from zmqdist.clock import deadline, left, seconds
from zmqdist.conditions import Condition
from zmqdist.messages import CANCELLED, KEPT, VALUE
from zmqdist.scheduling.coordinator import metrics
from zmqdist.scheduling.coordinator.coordinator_events import (
    CancelRequested,
    Event,
    KeptDropped,
    TakeBackRequested,
    ValueLost,
)
from zmqdist.scheduling.coordinator.dispatcher_target import Target
from zmqdist.scheduling.coordinator.failures import Failure, Failures
from zmqdist.scheduling.coordinator.result_fetcher import ResultFetcher
from zmqdist.scheduling.coordinator.work import KeptAt, Work
from zmqdist.scheduling.shared import own_cluster, remote_results
from zmqdist.scheduling.shared.result_parts import part_reference, split_parts
from zmqdist.type_variables import T_co
from zmqdist.wire import results, trusted

NOTHING: Any = object()
"""In place of a value that was not unpacked."""


class RemoteValueStatus(enum.Enum):
    """Whether a RemoteValue has its result.

    >>> value = coordinator.submit(abs, -3)
    >>> value.result(), value.status
    (3, <RemoteValueStatus.READY: 'READY'>)
    """

    NOT_READY = "NOT_READY"
    ABORTED = "ABORTED"
    READY = "READY"


class Packing:
    """What the thread that packs arguments tells the objects in them, and learns from them.

    Attributes:
      mark: the bytes before each payload (`ResultForm.mark`).
      unpacking: held while a result is unpacked, so that each result is unpacked once.
      thread: the thread that is packing arguments, or None.
      uses: the resources and kept values found in these arguments.
      inputs: the RemoteValues found in these arguments, by work number.
      by_reference: whether each RemoteValue is packed as a reference to its kept value, because the
        packed call cannot wait for inputs.
      of_calls: that of calls of actors, which may be packed while another thread schedules.
    """

    def __init__(self, mark: bytes, of_calls: Packing | None = None) -> None:
        self.mark = mark
        self.of_calls = of_calls or self
        self.unpacking = threading.RLock()
        self.thread: int | None = None
        self.uses: list[Any] = []
        self.inputs: dict[int, RemoteValue] = {}
        self.by_reference = False


class ValueOwner(Protocol):
    """The attributes and methods of the coordinator's runtime that a RemoteValue uses. runtime.py
    documents them."""

    pid: int
    closed: bool
    packing: Packing
    target: Target
    lock: Condition
    failures: Failures
    callbacks: Callbacks
    settling: Callbacks
    result_fetcher: ResultFetcher

    def packing_here(self) -> Packing | None: ...

    def request(self, event: Callable[[list[int]], Event], number: int) -> None: ...

    def post_event(self, event: Event) -> None: ...


class RemoteValue(NotAFuture, Generic[T_co]):
    """The result of a scheduled function, pending until the function has ended. Only a
    ClusterCoordinator makes RemoteValues.

    A ready value stays ready, because the result is on this host. Kept values are the exception
    (see below). Any thread may call any method.
    If the program drops a RemoteValue, its function still runs, and the result is discarded.

    A RemoteValue may be an argument of other functions of the same coordinator, at any depth, or
    captured by them, even before its own function has ended. Such a function waits for the value
    and gets a copy that is private to its run.

    The value of `options(keep=True)` is ready once its worker has the value, which the worker holds
    until the RemoteValue is garbage-collected. Other functions fetch the value from this worker,
    and only `result` fetches it to the program. If the worker or the dispatcher is lost, or the
    connection to the dispatcher breaks, before the first `result`, a value above 64 KiB is lost.
    With `options(lineage=True)` a lost value is recomputed.

    >>> value = coordinator.submit(pow, 2, 10)
    >>> value.result(timeout=20), value
    (1024, <RemoteValue of builtins.pow: ready>)
    """

    __slots__ = ("__weakref__", "_owner", "_value", "_work")

    def __init__(self, owner: ValueOwner, work: Work) -> None:
        self._work = work
        self._owner = owner
        self._value: T_co = NOTHING

    def __del__(self) -> None:
        work = self._work
        work.alive = None
        # after `alive`, because the loop sets `kind` before it reads `alive`
        if work.kind == KEPT:
            self._owner.request(KeptDropped, work.number)
        elif work.kind is not None:
            work.outcome = None  # the record may outlive the value for a while

    @property
    def name(self) -> str:
        """The name of the function, or the `name` of its options."""
        return self._work.name

    @property
    def work(self) -> int:
        """The number of the function's work item, unique in its coordinator."""
        return self._work.number

    def __repr__(self) -> str:
        states = {
            None: "pending",
            VALUE: "ready",
            KEPT: "kept by its worker",
            CANCELLED: "cancelled",
        }
        state = states.get(self._work.kind, "failed")
        return f"<RemoteValue of {self.name}: {state}>"

    def __reduce__(self) -> Any:
        """Pickle a placeholder for the value. The worker that unpickles the placeholder gets the
        value in its place."""
        packing = self._owner.packing_here()
        if packing is None:
            raise RemoteValueNotAllowed(
                "a RemoteValue can only be given to functions of its own coordinator: give them "
                "its result()"
            )
        if not packing.by_reference:
            packing.inputs[self._input] = self
            return remote_results.input_value, (self._input, self.name)
        if self._work.kind != KEPT:
            raise RemoteValueNotAllowed(
                "only a RemoteValue of keep=True that has ended can be given to all workers: give "
                "them its result()"
            )
        packing.uses.append(self)
        return remote_results.kept_value, (self._reference(self._work.outcome), self.name)

    @property
    def status(self) -> RemoteValueStatus:
        """READY once the function has ended, even with an error. Only values of per-worker
        resources are ever ABORTED."""
        return RemoteValueStatus.NOT_READY if self._work.kind is None else RemoteValueStatus.READY

    # -- getting the result ------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for the function to end, and return what it returned. Each call returns the same
        object, which is private to this process. `get` is TensorFlow's name of this method.

        >>> coordinator.submit(abs, -3).result(timeout=20.0)
        3

        Args:
          timeout: seconds; None waits until the function has ended or the cluster is lost. The
            first `result` of a kept value also fetches the value, which may take longer than
            `timeout`. The fetch fails at once if the worker refuses connections, or is on this host
            and has ended. It fails after about 20 s if the worker does not reply.

        Raises:
          DeadlineExceededError (a TimeoutError): the function has not ended within `timeout`, or a
            lost value has not been recomputed. The function or the recomputation goes on, so you
            may call `result` again. But if the `timeout` of the function's options has passed, the
            function has failed, and `exception` returns this error.
          CancelledError: the function was cancelled, its round ended with another function's error,
            or the coordinator was closed.
          WorkerLost: too many times, the function's process or worker was lost while the function
            ran (`attempts_max` of the dispatcher).
          ClosureInputError: an input of the function has no value; `original_exception` says why.
          UnavailableError: a kept value is lost, a large result could not be fetched, the cluster
            was without a dispatcher or any worker for `cluster_lost_limit_s`, or the function's own
            worker was missing for `worker_recovery_timeout_s`.
          FailedPreconditionError: this process was forked before the result had arrived.
          OpError: the dispatcher refuses the coordinator; the message has its reason.
          Exception: the function raised this exception. Its class is the original class if that can
            be pickled, its cause is the remote traceback, and each `result` raises a new copy. A
            single crash of a worker raises nothing, because the function then runs again.
        """
        timeout = seconds(timeout)
        if self._work.kind is None:
            self._wait(timeout)
        if self._work.kind != VALUE:
            return self._get_kept(timeout)
        if self._value is NOTHING:
            with self._owner.packing.unpacking:
                if self._value is NOTHING:
                    began = clock.perf_counter() if metrics.enable_metrics else 0.0
                    self._value = results.unpack(
                        self._outcome(), safe_only=self._owner.target.form.safe_only
                    )
                    if began:
                        metrics.record("remote_value_fetch", clock.perf_counter() - began)
                    self._forget_outcome()
        return self._value

    get = result

    def _get_kept(self, timeout: float | None) -> T_co:
        until = deadline(timeout)
        while self._value is NOTHING:
            location = self._work.outcome
            if not isinstance(location, KeptAt):
                raise self._error()
            if is_forked(self):
                problem = f"the value of {self.name} was kept before a fork: call result() in the process that scheduled it"
                raise errors.FailedPreconditionError(problem)
            try:
                with metrics.monitored_timer("remote_value_fetch"):
                    reference = self._reference(location)
                    value = self._owner.result_fetcher.fetch_kept(reference, self.name)
            except errors.UnavailableError:
                if not location.lineage or not self._wait_for_recomputation(
                    location, until, timeout
                ):
                    raise
                continue
            with self._owner.packing.unpacking:
                if self._value is NOTHING:  # no other thread has fetched the value meanwhile
                    self._value = value
        return self._value

    def _wait_for_recomputation(
        self, lost: KeptAt, until: float | None, timeout: float | None
    ) -> bool:
        """Wait until a lost value has been recomputed or has failed. Return False if it remains
        lost, as when the coordinator closes."""
        waiter = allocate_lock()
        waiter.acquire()
        with self._owner.lock:
            if self._owner.closed:
                return False
            if self._work.outcome is not lost:
                return True
            self._add_waiter(waiter)
        self._owner.post_event(ValueLost(self._work, lost.attempt))
        if self._owner.closed:
            return False  # type: ignore[unreachable]  # the loop may have ended before the event
        with own_cluster.waiting():
            is_released = waiter.acquire(True, -1 if (left_s := left(until)) is None else left_s)
        if not is_released:
            forget_waiter(self, waiter)
            problem = (
                f"{self.name}, whose value was lost, has not been recomputed after {timeout:g} s"
            )
            raise errors.DeadlineExceededError(problem)
        return self._work.outcome is not lost

    def fetch(self, timeout: float | None = None) -> T_co:
        """Return the result as `result` does, but replace tensors by arrays, as TensorFlow does.

        Each object that has a method `numpy()` is replaced by the result of this method, also in
        containers and dataclasses.

        >>> coordinator.submit(abs, -3).fetch()
        3
        """
        value = self.result(timeout)
        if type(value) in trusted.ATOMS or type(value) is np.ndarray:
            return value
        with_arrays: T_co = nest.as_numpy(value)
        return with_arrays

    def done(self) -> bool:
        """Return whether the function has ended, with a result or an error. Does not wait.

        >>> value = coordinator.submit(abs, -3)
        >>> value.result(), value.done()
        (3, True)
        """
        return self._work.kind is not None

    def cancelled(self) -> bool:
        """Return whether the function has ended with a CancelledError. Does not wait. False while a
        `cancel` is under way.

        >>> value = coordinator.submit(abs, -3)
        >>> value.result(), value.cancelled()
        (3, False)
        """
        return self._work.kind == CANCELLED

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the function has ended, and return its error, or None after success. Raises
        DeadlineExceededError as `result` does.

        >>> with zd.ClusterCoordinator(cluster) as other:
        ...     other.submit(int, "x").exception()
        ValueError("invalid literal for int() with base 10: 'x'")

        The loss of a kept value is not noticed here: only `result` finds out whether the worker
        still holds the value.
        """
        self._wait(seconds(timeout))
        return None if self._work.kind in (VALUE, KEPT) else self._error()

    def cancel(self) -> bool:
        """Request the cancellation of the function. Does not wait.

        >>> value = coordinator.submit(abs, -3)
        >>> value.result(), value.cancel()
        (3, False)

        A waiting function is dropped. A running function is asked to stop, and killed
        `cancel_grace_s` later if its slot is a process.

        Returns:
          False if the function has ended already, otherwise True. After True, `result` may still
          return a result that was already on its way.
        """
        if self._work.kind is not None:
            return False
        self._owner.request(CancelRequested, self.work)
        return True

    def add_done_callback(self, fn: Callable[[RemoteValue[T_co]], object]) -> None:
        """Call `fn(self)` when the function has ended, or soon if the function has ended already.

        >>> ended = []
        >>> coordinator.submit(abs, -3).add_done_callback(ended.append)

        Callbacks run one after the other in a thread of the coordinator. Exceptions of `fn` are
        logged. `fn` may wait for any result, but must not wait for an event that another callback
        causes.

        Raises:
          RuntimeError: the process cannot start a thread for callbacks.
        """
        check_callback(fn)
        self._call_at_end(self._owner.callbacks, fn)

    def _call_at_end(self, thread: Callbacks, fn: Callable[[RemoteValue], object]) -> None:
        if self._work.kind is None:
            _check_not_forked(self)
        thread.start()
        with self._owner.lock:
            if self._work.kind is None:
                self._add_waiter(_Callback(thread, fn, self))
                return
        thread.put(fn, self)

    def _add_waiter(self, waiter: Any) -> None:
        """Have `waiter.release()` called when the function has ended, or its lost value was
        recomputed. The caller holds the lock."""
        if self._work.waiters is None:
            self._work.waiters = []
        self._work.waiters.append(waiter)

    def __await__(self) -> Generator[Any, None, T_co]:
        # imported here, because asyncio is slow to import, and most programs do not await values
        import asyncio

        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def wake_loop(_: RemoteValue) -> None:
            try:
                loop.call_soon_threadsafe(wake)
            except RuntimeError:  # the event loop has been closed, so no task waits any more
                pass

        settle_at_end(self, wake_loop)
        if not future.done():
            with own_cluster.waiting():
                yield from future
        # The fetch of a kept value blocks, so it must not run in the thread of the event loop.
        if self._work.kind == KEPT and self._value is NOTHING:
            return (yield from loop.run_in_executor(None, self.result))
        return self.result()

    def __float__(self) -> float:
        """Wait for the result, and convert it. With `__array__`, functions that call a `map` for
        numbers accept ClusterCoordinator.map."""
        return float(self.result())  # type: ignore[arg-type]

    def __int__(self) -> int:
        return int(self.result())  # type: ignore[call-overload, no-any-return]

    def __complex__(self) -> complex:
        return complex(self.result())  # type: ignore[call-overload, no-any-return]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        array = np.array(self.result(), dtype)
        if array.ndim == 0 and array.dtype.kind not in "iufcO":
            # NumPy fills an array of bools or texts with `bool` and `str` of the RemoteValues,
            # which say nothing of the results.
            raise TypeError(
                f"{self} holds no number or array: make arrays of the results, "
                f"np.array(coordinator.gather(values))"
            )
        return array

    @property
    def _input(self) -> int:
        """The number of the value among the inputs of a function."""
        return self._work.number

    def _reference(self, location: KeptAt) -> bytes:
        """Return the reference to the value, which is kept there."""
        return location.reference

    def _outcome(self) -> Any:
        """Return the packed value. The caller holds `packing.unpacking`, and the value has arrived
        and was not unpacked."""
        return self._work.outcome

    def _forget_outcome(self) -> None:
        self._work.outcome = None

    def _packed(self) -> Any:
        return (
            results.pack(self._value)
            if self._owner.target.form.safe_only
            else trusted.pack(self._value)
        )

    def _wait(self, timeout: float | None) -> None:
        if self._work.kind is not None:
            return
        _check_not_forked(self)
        waiter = allocate_lock()
        waiter.acquire()
        with self._owner.lock:
            if self.done():
                return
            self._add_waiter(waiter)
        with own_cluster.waiting():
            is_released = waiter.acquire(True, -1 if timeout is None else timeout)
        if not is_released:
            forget_waiter(self, waiter)
            if not self.done():
                raise errors.DeadlineExceededError(f"{self.name} has not ended after {timeout:g} s")

    def _error(self) -> BaseException:
        """Return the error of the function, and note that the program has seen it."""
        self._owner.failures.mark_seen(self.work)
        work, safe_only = self._work, self._owner.target.form.safe_only
        return Failure(work.kind, work.outcome, self.name, work.attempts, safe_only)()


class PartValue(RemoteValue[T_co]):
    """One part of the result of a function with `num_returns`. All parts share one work item, which
    the cluster computes, keeps, loses and cancels as a whole.

    Args:
      whole: the RemoteValue of the work item. Only its parts hold it, so that the value is dropped
        with the last of them.
    """

    __slots__ = ("_count", "_part", "_whole")

    def __init__(self, whole: RemoteValue, part: int, count: int) -> None:
        super().__init__(whole._owner, whole._work)
        self._whole, self._part, self._count = whole, part, count

    def __del__(self) -> None:
        """Do nothing: `_whole` drops the value."""

    @property
    def _input(self) -> int:
        return self._work.number | self._part << remote_results.PART_SHIFT

    def _reference(self, location: KeptAt) -> bytes:
        return part_reference(location.reference, self._part, self._count)

    def _outcome(self) -> Any:
        whole = self._whole
        if whole._value is NOTHING:
            whole._value = split_parts(self._work.outcome, self._count)
            self._work.outcome = None
        return whole._value[self._part]

    def _forget_outcome(self) -> None:
        self._whole._value[self._part] = None


# -- for other parts of the coordinator ------------------------------------------------------------


def settle_at_end(value: RemoteValue, fn: Callable[[RemoteValue], object]) -> None:
    """As `add_done_callback`, for functions of this package that do not wait. A callback of the
    program may wait for them.
    """
    value._call_at_end(value._owner.settling, fn)


def release_at_end(value: RemoteValue, waiter: Any) -> None:
    """Call `waiter.release()` when the function has ended, or at once if it has ended already.

    Unlike a callback, a waiter does not keep the RemoteValue alive, so the caller must keep a
    reference to the RemoteValue.
    """
    if type(value) not in (RemoteValue, PartValue):
        # the value of a resource, which is built again and again
        settle_at_end(value, lambda _: waiter.release())
        return
    if value._work.kind is None:
        _check_not_forked(value)
    with value._owner.lock:
        if value._work.kind is None:
            value._add_waiter(waiter)
            return
    waiter.release()


def forget_waiter(value: RemoteValue, waiter: Any) -> None:
    """Do not release this waiter when the function ends."""
    with value._owner.lock:
        waiters = value._work.waiters
        if waiters is not None and waiter in waiters:
            waiters.remove(waiter)


def copied(value: RemoteValue, take: Callable[[Any], object]) -> None:
    """If the value is in this process, call `take` with the value, packed in its present state.

    `take` runs while the lock `unpacking` is held.

    Raises InvalidArgumentError if the program has changed the value in such a way that it cannot be
    packed any more.
    """
    if value._work.kind == VALUE:
        with value._owner.packing.unpacking:
            take(value._outcome() if value._value is NOTHING else value._packed())


def part_of(value: RemoteValue, packed: Any) -> Any:
    """Return what belongs to this value of the packed result of its work item."""
    return (
        split_parts(packed, value._count)[value._part] if isinstance(value, PartValue) else packed
    )


def reference_of(value: RemoteValue) -> bytes:
    """Return the reference to the kept value."""
    return value._reference(value._work.outcome)


def take_back(value: RemoteValue) -> None:
    """Request that the function be cancelled unless a worker has begun it. Only an Executor uses
    this.
    """
    value._owner.request(TakeBackRequested, value.work)


def is_forked(value: RemoteValue) -> bool:
    """Return whether this process was forked from the process that scheduled the function, which
    alone gets the result.
    """
    return value._owner.pid != os.getpid()


def _check_not_forked(value: RemoteValue) -> None:
    if is_forked(value):
        problem = f"{value.name} was scheduled before a fork: only the process that scheduled it gets its result"
        raise errors.FailedPreconditionError(problem)


def outcome_of(value: RemoteValue) -> tuple[int | None, Any]:
    """Return the outcome of the function of a RemoteValue, as (kind, payload). The kind is None
    until the function has ended."""
    return value._work.kind, value._work.outcome


class _Callback:
    """A waiter whose `release` has a thread call a function with the RemoteValue, which it keeps
    alive."""

    __slots__ = ("_fn", "_thread", "_value")

    def __init__(
        self, thread: Callbacks, fn: Callable[[RemoteValue], object], value: RemoteValue
    ) -> None:
        self._thread, self._fn, self._value = thread, fn, value

    def release(self) -> None:
        self._thread.put(self._fn, self._value)


def work_of(value: RemoteValue) -> Work:
    """Return the record of the function's work item."""
    return value._work


class RemoteValueNotAllowed(ValueError):
    """The arguments that are being packed contain a RemoteValue that the process which unpickles
    them could not use."""


def unwrapped(error: errors.InvalidArgumentError) -> Exception:
    """Return `error` without its internal frames, or a ValueError in its place if a
    RemoteValueNotAllowed is among its causes."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RemoteValueNotAllowed):
            error.__cause__ = None
            return ValueError(str(cause))
        cause = cause.__cause__ or cause.__context__
    return error.with_traceback(None)
