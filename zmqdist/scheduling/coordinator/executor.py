"""`ClusterExecutor`: a `concurrent.futures.Executor` whose workers are a cluster.

It behaves like ProcessPoolExecutor and passes the standard library's tests of that class
(tests/scheduling/coordinator/full/test_standard_library.py). There is one exception: if a function
crashes its process, only that function fails.

Rules
    A Future is settled once: by the coordinator's thread for settling, by the thread that cancels
    the Future, or by the thread that breaks the executor. None of them calls a callback of the
    program, which would have to wait for that thread if it waited for a result. `cancel` never ends
    a function that a worker has begun. It sends a request through the dispatcher to the worker and
    waits for the reply. The loop's thread delivers this reply, so a callback of a Future may cancel
    other Futures without a deadlock.

Not here: what happens to submitted work at the end of the program (program_end.py).
"""

from __future__ import annotations

import concurrent.futures as futures
import contextlib
import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, TypeVar

from zmqdist import errors
from zmqdist.background import logged
from zmqdist.callbacks import Callbacks, check_callback
from zmqdist.clock import deadline, left, seconds
from zmqdist.conditions import Condition, Signals
from zmqdist.field_types import checked, converted, safe_repr
from zmqdist.messages import CANCELLED, ERROR
from zmqdist.scheduling.coordinator import program_end
from zmqdist.scheduling.coordinator.coordinator import IndependentCoordinator
from zmqdist.scheduling.coordinator.per_worker import PerWorkerValues
from zmqdist.scheduling.coordinator.remote_value import (
    RemoteValue,
    is_forked,
    outcome_of,
    release_at_end,
    settle_at_end,
    take_back,
)
from zmqdist.scheduling.coordinator.work import LOST, UNAVAILABLE
from zmqdist.scheduling.shared import own_cluster
from zmqdist.wire import trusted

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from zmqdist.scheduling.shared.option_types import CoordinatorOptions

T = TypeVar("T")

log = logging.getLogger("zmqdist.coordinator")


class ClusterExecutor(futures.Executor):
    """Runs submitted functions on the workers of a dispatcher. The arguments are those of
    `zmqdist.Executor`, with a target."""

    def __init__(
        self,
        target: Any,
        *,
        max_workers: int | None,
        initializer: Callable[..., object] | None,
        initargs: Iterable[Any],
        **options: Unpack[CoordinatorOptions],
    ) -> None:
        if max_workers is not None and max_workers < 1:
            raise ValueError(f"max_workers must be greater than 0, and is {max_workers}")
        self._initializer, self._initargs = initializer, tuple(initargs)
        self._idle = Condition()
        self._futures: dict[int, _Future[Any]] = {}
        """The unsettled Futures by work number."""
        self._begun_early: set[int] = set()
        """Work items that a worker began before they were put into `_futures`."""
        self._submitting: set[_Future[Any]] = set()
        self._shut = False
        self._broken: Callable[[], BaseException] | None = None
        executor_ref = weakref.ref(self)
        self._coordinator = _Coordinator(target, width=max_workers, **options)
        self._coordinator.call_on_begun(
            lambda works: (
                None if (executor := executor_ref()) is None else executor._mark_begun(works)
            )
        )
        program_end.watch(self)
        if (executors := getattr(target, "_executors", None)) is not None:
            executors.add(self)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> futures.Future[T]:
        """Schedule `fn(*args, **kwargs)` and return its Future. If `fn` or an argument cannot be
        pickled, the Future raises the error.

        >>> with zd.Executor(cluster) as executor:
        ...     print(executor.submit(sorted, [3, 1, 2], reverse=True).result())
        [3, 2, 1]

        Raises:
          RuntimeError: `shutdown` was called, the program is ending, or no thread can be started to
            settle the Futures.
          BrokenProcessPool (a RuntimeError): the executor is broken, because its cluster was closed
            or its initializer failed.
          UnavailableError: the executor has an initializer, and no worker was present for
            `cluster_lost_limit_s`.
          TypeError, ValueError: `ClusterCoordinator.schedule` raises them.
        """
        future: _Future[T] = _Future(self._coordinator.callbacks)
        try:
            with self._idle:
                self._check_open()
                self._submitting.add(future)
            self._prepare()
            value = self._coordinator.schedule(fn, args, kwargs)
        except trusted.NotPicklableError as error:
            future.end(None, error)
            return future
        else:
            self._register(future, value)
            return future
        finally:
            self._submitting.discard(future)  # first, because Ctrl-C may come after any call
            with self._idle:
                self._idle.notify_all()

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[T]:
        """Submit `fn` for each item, and return the results in order, as in the standard library.
        `fn` is pickled once, now.

        >>> with zd.Executor(cluster) as executor:
        ...     print(list(executor.map(pow, [1, 2, 3], [2, 2, 2])))
        [1, 4, 9]

        Args:
          chunksize: checked and otherwise ignored, because the cluster itself sends quick functions
            in batches.
          buffersize: the largest number of submitted items whose results the caller has not taken.
            `iterables` may then be endless, because the number of arguments and results in memory
            is bounded. None submits all items at once. New in Python 3.14's standard library.
        """
        if converted("chunksize", index, chunksize) < 1:
            raise ValueError("chunksize must be >= 1.")
        if buffersize is not None and not isinstance(buffersize, int):
            raise TypeError("buffersize must be an integer or None")
        if buffersize is not None and buffersize < 1:
            raise ValueError("buffersize must be None or > 0")
        until = deadline(timeout)
        with self._idle:
            self._check_open()
        snapshot: Callable[..., T] = fn
        # If `fn` cannot be pickled, `submit` tries again and puts the error into each Future.
        with contextlib.suppress(trusted.NotPicklableError):
            snapshot = self._coordinator.pickled_now(fn)
        items = zip(*iterables, strict=False)
        submitted = [self.submit(snapshot, *args) for args in itertools.islice(items, buffersize)]
        executor_ref = weakref.ref(self)  # the iterator must not keep the executor alive

        def submit_next() -> futures.Future[T] | None:
            executor = executor_ref()
            arguments = None if executor is None else next(items, None)
            return (
                None
                if executor is None or arguments is None
                else executor.submit(snapshot, *arguments)
            )

        return _results(deque(submitted), None if buffersize is None else submit_next, until)

    @property
    def _max_workers(self) -> int:
        """The number of functions that run at a time. Libraries such as dask read
        this attribute of an Executor."""
        return self._coordinator.width or self._coordinator.slots()

    @checked
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more work, and close the executor when all submitted work has ended.
        Idempotent. Has no effect in a forked child.

        >>> executor = zd.Executor(cluster)
        >>> future = executor.submit(pow, 2, 3)
        >>> executor.shutdown()  # waits for the future
        >>> future.result()
        8

        Args:
          wait: whether to return only when all submitted work has ended and the callbacks of its
            Futures have been called. If False, the work continues in the background. In a callback,
            `shutdown` does not wait for callbacks.
          cancel_futures: whether to cancel the Futures whose functions no worker has begun.
        """
        if self._coordinator.forked:
            return
        with self._idle:
            first, self._shut = not self._shut, True
        if cancel_futures:
            _cancel_all(list(self._futures.values()))
        if wait:
            self._close_when_idle()
        elif first:
            name = "zmqdist-executor-shutdown"
            threading.Thread(
                target=logged, args=(self._close_when_idle,), name=name, daemon=True
            ).start()

    def terminate_workers(self) -> None:
        """Drop waiting functions, ask running functions to stop, and kill them after
        `cancel_grace_s`. Does not wait.

            >>> import time, zmqdist as zd
            >>> with zd.Executor(max_workers=1, cancel_grace_s=0) as executor:
            ...     future = executor.submit(time.sleep, 60)
            ...     executor.terminate_workers()
            >>> future.cancelled() or type(future.exception()).__name__ == "ExecutorBroken"
            True

        A running function sees the request in `zmqdist.cancelled`, and its Future ends with a
        BrokenProcessPool. The worker processes continue with the work of other programs.
        """
        self.shutdown(wait=False)
        for future in list(self._futures.values()):
            if (value := future.value) is not None:
                value.cancel()

    def kill_workers(self) -> None:
        """Drop waiting functions and kill running functions at once, without asking them to stop.

        >>> import time, zmqdist as zd
        >>> executor = zd.Executor(max_workers=1)
        >>> future = executor.submit(time.sleep, 60)
        >>> executor.kill_workers()
        >>> future.cancelled() or isinstance(future.exception(), RuntimeError)
        True
        """
        with self._idle:
            self._shut = True
        self._coordinator.close()

    @safe_repr
    def __repr__(self) -> str:
        state = ", broken" if self._broken is not None else ", shut down" if self._shut else ""
        return f"of {self._coordinator.target}: {len(self._futures)} unfinished{state}"

    # -- for the end of the program, and of the cluster --------------------------------------------

    def _finish(self) -> list[BaseException]:
        """Wait until all submitted work has ended. Return the errors of functions that failed
        meanwhile because the cluster was lost.

        In a forked child, return an empty list at once.
        """
        if self._coordinator.forked:
            return []
        unfinished = list(self._futures.values())
        self._close_when_idle()
        failed = [
            future.exception() for future in unfinished if future.done() and not future.cancelled()
        ]
        return [
            error
            for error in failed
            if error is not None and getattr(error, "of_the_cluster", False)
        ]

    def _give_up(self) -> int:
        """End all work at once, and return the number of functions that had not ended. In a forked
        child, do nothing and return 0."""
        if self._coordinator.forked:
            return 0
        count = len(self._futures)
        self.kill_workers()
        return count

    def _close_when_idle(self) -> None:
        with self._idle, own_cluster.waiting():
            self._idle.wait_for(lambda: not self._futures and not self._submitting)
        self._coordinator.callbacks.wait_called()
        self._coordinator.close()

    def _break(self, make: Callable[[], BaseException]) -> None:
        """Fail all unfinished work, and all work that is submitted from now on, with errors that
        `make` returns."""
        with self._idle:
            if self._broken is not None or (
                self._shut and not self._futures and not self._submitting
            ):
                return
            self._broken = make
        for work, future in list(self._futures.items()):
            future.end(None, make())
            self._forget(work)
        self._coordinator.close()

    # -- one Future --------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if program_end.has_come():
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        if self._broken is not None:
            raise self._broken()
        if self._shut:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def _prepare(self) -> None:
        """Create the per-worker resource for the initializer, if the executor has an initializer
        and the resource does not exist yet."""
        coordinator = self._coordinator
        if self._initializer is None or coordinator.ready is not None:
            return
        with coordinator.preparing:
            if coordinator.ready is None:
                coordinator.ready = coordinator.create_per_worker_resource(
                    self._initializer, self._initargs
                )

    def _register(self, future: _Future[Any], value: RemoteValue) -> None:
        work = value.work
        future.value = value
        self._futures[work] = future
        try:
            settle_at_end(value, lambda value: self._settle(work, future, value))
        except BaseException:  # without a thread for settling the Future would never be settled
            value.cancel()
            self._forget(work)
            raise
        if work in self._begun_early:
            self._begun_early.discard(work)
            future.begin()
        if self._broken is not None:  # `_break` ran meanwhile and did not see this Future
            future.end(None, self._broken())
            self._forget(work)

    def _mark_begun(self, works: list[int]) -> None:
        """Record that workers have begun these functions. The loop calls this method, so this
        method must not wait."""
        for work in works:
            # First add `work` to the set, then look for its Future. `_register` first adds the
            # Future, then looks at the set. So at least one of the two threads finds what the other
            # thread has added.
            self._begun_early.add(work)
            future = self._futures.get(work)
            if future is not None:
                self._begun_early.discard(work)
                future.begin()

    def _settle(self, work: int, future: _Future[Any], value: RemoteValue) -> None:
        """Settle the Future with the outcome of its function. The coordinator's thread for settling
        calls this."""
        try:
            if outcome_of(value)[0] == CANCELLED:
                self._end_cancelled(future, value)
                return
            try:
                error = value.exception()
                result = None if error is not None else value.result()
            except BaseException as failed:
                # the result has arrived, but this process cannot unpickle it
                error, result = (
                    _broken(f"the result of {value.name} cannot be unpickled here", failed),
                    None,
                )
            else:
                error = None if error is None else _translated(value, error)
            if isinstance(error, errors.ClosureInputError):
                error = self._initializer_failed(error)
            future.end(result, error)
        finally:  # `shutdown` waits for each Future in `_futures`
            future.value = None
            self._begun_early.discard(work)
            self._forget(work)

    def _end_cancelled(self, future: _Future[Any], value: RemoteValue) -> None:
        if self._broken is not None:
            future.end(None, self._broken())
        elif not future.end_as_cancelled():
            future.end(
                None,
                _broken(
                    f"{value.name} was cut off: its executor has ended its workers, or "
                    "its cell was interrupted"
                ),
            )

    def _initializer_failed(self, error: errors.ClosureInputError) -> BaseException:
        cause = error.original_exception
        text = f"the initializer {trusted.describe(self._initializer)} failed: {type(cause).__name__}: {cause}"
        if self._broken is None:
            log.critical("an executor is broken: %s", text, exc_info=cause)
        self._break(lambda: _broken(text, cause))
        return _broken(text, cause)

    def _forget(self, work: int) -> None:
        with self._idle:
            self._futures.pop(work, None)
            self._idle.notify_all()


def cluster_closed(executor: ClusterExecutor) -> None:
    """Break the executor. The local_cluster calls this when it is about to close, because
    unfinished work then cannot end."""
    executor._break(lambda: _unavailable("the local_cluster of this executor has been closed"))


class _Coordinator(IndependentCoordinator):
    """The coordinator of an executor.

    Attributes:
      ready: the initializer as a per-worker resource; None without an initializer. The resource is
        among the arguments of each function, so that a process calls the initializer before its
        first function.
      preparing: held while `ready` is created.
      width: the `max_workers` of the executor.
    """

    def __init__(self, target: Any, *, width: int | None, **options: Any) -> None:
        self._width = self.width = width
        self.ready: PerWorkerValues | None = None
        self.preparing = threading.Lock()
        super().__init__(target, **options)

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the process that created the coordinator."""
        return self._runtime.pid != os.getpid()

    @property
    def callbacks(self) -> Callbacks:
        """The thread for the program's callbacks."""
        return self._runtime.callbacks

    def call_on_begun(self, fn: Callable[[list[int]], object]) -> None:
        """Have the loop call `fn(works)` whenever workers have begun work items. `works` is a list
        of work numbers."""
        self._runtime.listeners.on_begun = fn

    def pickled_now(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Pickle the function once, in a form that `schedule` accepts any number of times. Raises
        the errors of `schedule`."""
        return self._snapshot_of(fn)

    def _pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> trusted.Packed:
        if self.ready is None:
            return super()._pack(args, kwargs)
        try:
            return trusted.pack(_ArgumentsAfterInitializer(self.ready, args, kwargs))
        except errors.InvalidArgumentError:
            super()._pack(args, kwargs)  # this raises an error that names the argument
            raise


class _ArgumentsAfterInitializer:
    """The arguments of a function, pickled with the per-worker resource that must exist before the
    function begins."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> Any:
        return _arguments, self._parts


def _arguments(_ready: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return args, kwargs


class _Future(futures.Future[T]):
    """The Future of a function on the cluster.

    Args:
      callbacks: the thread for the program's callbacks.

    Attributes:
      value: the RemoteValue of the function; None before it is scheduled and after it is settled.
    """

    def __init__(self, callbacks: Callbacks) -> None:
        super().__init__()
        self._condition = Condition()
        self._thread = callbacks
        self.value: RemoteValue | None = None
        self._replies: list[_CancelReply] = []

    def result(self, timeout: float | None = None) -> T:
        with self._waiting():
            return super().result(seconds(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        with self._waiting():
            return super().exception(seconds(timeout))

    def _waiting(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self.done() else own_cluster.waiting()

    def cancel(self) -> bool:
        """Cancel the function unless a worker has begun it. Waits for the reply of the dispatcher.
        If a worker has the function already, the dispatcher first needs a reply of this worker.

        Returns:
          Whether the Future is cancelled, now or earlier.
        """
        self._finish_cancel(self._request_cancel())
        return self.cancelled()

    def add_done_callback(self, fn: Callable[[futures.Future[T]], object]) -> None:
        """Call `fn(self)` in a thread of the executor soon after the Future has ended, or at once
        in this thread if it has ended already. `cancel` does not wait for the call.

        Callbacks of one executor run one after the other. `fn` may wait for any Future, but must
        not wait for an event that another callback causes.

        Raises RuntimeError if the process cannot start a thread for callbacks.
        """
        check_callback(fn)
        # The callbacks of asyncio do not wait, and an event loop in a callback waits for them.
        if not self.done() and getattr(fn, "__module__", None) != "asyncio.futures":
            self._thread.start()
            fn = partial(self._thread.put, fn)
        super().add_done_callback(fn)

    def begin(self) -> None:
        """Record that a worker has begun the function, and release the threads that wait in
        `cancel`."""
        with self._condition:
            if self._state == "PENDING":
                self._state = "RUNNING"
            replies, self._replies = self._replies, []
        for reply in replies:
            reply.release()

    def end(self, result: T | None, error: BaseException | None) -> None:
        """Settle the Future with a result or an error, unless it is settled already."""
        try:
            if error is not None:
                self.set_exception(error)
            else:
                self.set_result(result)  # type: ignore[arg-type]
        except futures.InvalidStateError:
            pass

    def end_as_cancelled(self) -> bool:
        """Mark the Future as cancelled unless its function has begun or ended. Return whether the
        Future is cancelled."""
        cancelled = super().cancel()
        with self._condition:
            if self._state == "CANCELLED":
                # this call wakes the threads in `wait` and `as_completed`
                self.set_running_or_notify_cancel()
        return cancelled

    def _request_cancel(self) -> _CancelReply | None:
        """Send a request to cancel the function, and return the pending reply. Return None if it is
        too late to cancel."""
        value = self.value
        if value is None or is_forked(value):
            return None
        reply = _CancelReply()
        with self._condition:
            if self._state != "PENDING":
                return None
            self._replies.append(reply)
        release_at_end(value, reply)
        take_back(value)
        reply.value = value
        return reply

    def _finish_cancel(self, reply: _CancelReply | None) -> None:
        """Wait for the reply to `_request_cancel`, and mark the Future as cancelled if no worker
        had begun the function."""
        if reply is None:
            return
        reply.acquire()
        if reply.value is not None and outcome_of(reply.value)[0] == CANCELLED:
            self.end_as_cancelled()


class _CancelReply(Signals):
    """The pending reply to a request to cancel a function, released once the function has begun or
    ended."""

    value: RemoteValue | None = None


def _cancel_all(pending: Iterable[Any]) -> None:
    """Cancel these Futures. This thread sends all requests before it waits for the first reply, so
    that the requests share a message."""
    for future, reply in [
        (future, future._request_cancel()) for future in pending if isinstance(future, _Future)
    ]:
        future._finish_cancel(reply)


def _results(
    submitted: deque[futures.Future[T]],
    submit_next: Callable[[], futures.Future[T] | None] | None,
    until: float | None,
) -> Iterator[T]:
    """Yield the results of the Futures in order. Cancel the remaining Futures when the caller
    closes the iterator or a function fails.

    Args:
      submit_next: called after each result. It submits one more item and returns its Future, or
        returns None after the last item. Without `submit_next` no further items are submitted.
    """
    try:
        while submitted:
            result_cell = [_pop_result(submitted, until)]
            if submit_next is not None and (future := submit_next()) is not None:
                submitted.append(future)
            yield result_cell.pop()
    finally:
        _cancel_all(submitted)


def _pop_result(submitted: deque[futures.Future[T]], until: float | None) -> T:
    """Return the result of the first Future and remove the Future from the queue, so that nothing
    else refers to the result."""
    result = submitted[0].result(left(until))
    del submitted[0]
    return result


# -- errors ----------------------------------------------------------------------------------------


def _translated(value: RemoteValue, error: BaseException) -> BaseException:
    """Return the error in the form in which the standard library would raise it.

    If the function is not at fault, the returned error is a BrokenProcessPool. A SystemExit of the
    function is returned as it is.
    """
    from zmqdist.scheduling.coordinator import broken_pool

    kind, _ = outcome_of(value)
    if kind == LOST and isinstance(error, errors.WorkerLost):
        return broken_pool.ExecutorWorkerLost(error.function, error.starts)
    if kind == UNAVAILABLE:
        return _unavailable(str(error))
    if kind != ERROR or isinstance(error, errors.ClosureInputError):
        return error
    cause = error.__cause__
    if isinstance(cause, trusted.RemoteTraceback) and cause.unpickling:
        return _broken(
            f"{value.name}, or an argument of it, cannot be unpickled by the worker", error
        )
    original = getattr(error, "original_exception", None)
    if isinstance(error, errors.UnknownError) and isinstance(original, BaseException):
        original.__cause__ = cause
        return original
    return error


def _unavailable(text: str) -> BaseException:
    from zmqdist.scheduling.coordinator.broken_pool import ExecutorUnavailable

    return ExecutorUnavailable(text)


def _broken(text: str, cause: BaseException | None = None) -> BaseException:
    from zmqdist.scheduling.coordinator.broken_pool import ExecutorBroken

    reason = "" if cause is None else f": {type(cause).__name__}: {cause}"
    error = ExecutorBroken(text + reason)
    error.__cause__ = cause
    return error
