"""`zmqdist.Executor`: a `concurrent.futures.Executor` whose workers are a cluster.

It behaves as the standard library's ProcessPoolExecutor, whose tests it passes (tests/coordinator/full/test_standard_library.py), with
one exception: a function that crashes its process fails alone, and the other functions continue.

Rules
    A Future is settled once: by the coordinator's callback thread, by the thread that cancels the Future, or by the thread that breaks
    the executor.
    `cancel` never ends a function that a worker has begun. It sends a request through the dispatcher to the worker and waits for the
    reply. The loop's thread delivers that reply, so a callback of a Future may cancel other Futures without a deadlock.

Not here: what happens to submitted work at the end of the program (program_end.py).
"""

from __future__ import annotations

import concurrent.futures as futures
import contextlib
import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from zmqdist import errors
from zmqdist.background import logged
from zmqdist.messages import CANCELLED, ERROR
from zmqdist.scheduling.coordinator import program_end
from zmqdist.scheduling.coordinator.coordinator import ClusterCoordinator
from zmqdist.scheduling.coordinator.dependencies_and_retries import LOST, UNAVAILABLE
from zmqdist.scheduling.coordinator.per_worker import PerWorkerValues
from zmqdist.scheduling.coordinator.remote_value import RemoteValue, outcome_of
from zmqdist.wire import trusted

T = TypeVar("T")

log = logging.getLogger("zmqdist.coordinator")


class Executor(futures.Executor):
    """Runs submitted functions on the workers of a dispatcher.

    Args:
      target, and other keyword arguments: as for ClusterCoordinator.
      max_workers: the number of functions that the cluster has at a time, at most. None: as many as there are slots.
      initializer, initargs: each process that runs functions of this executor calls `initializer(*initargs)` before its first function.
        With an initializer, the first `submit` waits for a worker. If the initializer raises, the executor is broken.

    Submitted functions are run before the program ends, even after `shutdown(wait=False)`, `sys.exit` or an uncaught error, but not
    after Ctrl-C. If the program has lost its cluster by then, it ends after `cluster_lost_limit_s` with exit code 1.

    Raises:
      ValueError: `max_workers` is below 1; or as for ClusterCoordinator.
      TypeError: `initializer` is not callable.
    """

    def __init__(
        self,
        target: Any = None,
        *,
        max_workers: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        **options: Any,
    ) -> None:
        if max_workers is not None and max_workers < 1:
            raise ValueError(f"max_workers must be greater than 0, and is {max_workers}")
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        self._initializer, self._initargs = initializer, tuple(initargs)
        self._idle = threading.Condition(threading.Lock())
        self._futures: dict[int, _Future[Any]] = {}
        """Unsettled Futures by the number of their work item."""
        self._begun_early: set[int] = set()
        """Work items that a worker began before they were put into `_futures`."""
        self._submitting = 0
        self._shut = False
        self._broken: Callable[[], BaseException] | None = None
        executor_ref = weakref.ref(self)
        self._coordinator = _Coordinator(target, width=max_workers, **options)
        self._coordinator.call_on_begun(
            lambda works: None if (executor := executor_ref()) is None else executor._mark_begun(works)
        )
        program_end.watch(self)
        if (executors := getattr(target, "_executors", None)) is not None:
            executors.add(self)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> futures.Future[T]:
        """Schedule `fn(*args, **kwargs)`. If they cannot be pickled, the `pickle.PicklingError` is raised by the Future, not by this call.

        Raises:
          RuntimeError: `shutdown` was called or the program is ending; or no thread can be started to settle the Futures.
          BrokenProcessPool (a RuntimeError): the executor is broken, because its cluster was closed or its initializer failed.
          TypeError, ValueError: as for `ClusterCoordinator.schedule`.
        """
        with self._idle:
            self._check_open()
            self._submitting += 1
        future: _Future[T] = _Future()
        try:
            self._prepare()
            value = self._coordinator.schedule(fn, args, kwargs)
        except trusted.NotPicklableError as error:
            future.end(None, error)
            return future
        else:
            self._register(future, value)
            return future
        finally:
            with self._idle:
                self._submitting -= 1
                self._idle.notify_all()

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[T]:
        """Submit `fn` for each item and return the results in order, as in the standard library. `fn` is pickled once, during this call.

        Args:
          chunksize: checked and otherwise ignored, because the cluster itself sends quick functions in batches.
          buffersize: the number of submitted items whose results the caller has not taken, at most. This bounds both arguments and results,
            so `iterables` may be endless. None: all items are submitted at once. (The standard library has it since Python 3.14.)
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if buffersize is not None and not isinstance(buffersize, int):
            raise TypeError("buffersize must be an integer or None")
        if buffersize is not None and buffersize < 1:
            raise ValueError("buffersize must be None or > 0")
        until = None if timeout is None else time.monotonic() + timeout
        with self._idle:
            self._check_open()
        snapshot: Callable[..., T] = fn
        with contextlib.suppress(trusted.NotPicklableError):  # `submit` makes it the error of each Future
            snapshot = self._coordinator.pickled_now(fn)
        items = zip(*iterables, strict=False)
        submitted = [self.submit(snapshot, *args) for args in itertools.islice(items, buffersize)]
        executor_ref = weakref.ref(self)  # the iterator must not keep the executor alive

        def submit_next() -> futures.Future[T] | None:
            executor = executor_ref()
            arguments = None if executor is None else next(items, None)
            return None if executor is None or arguments is None else executor.submit(snapshot, *arguments)

        return _results(deque(submitted), None if buffersize is None else submit_next, until)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more work. Idempotent. Does nothing in a forked child.

        Args:
          wait: return once all submitted work has ended. If False, return at once; the work continues in the background.
          cancel_futures: cancel the Futures whose functions no worker has begun.
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
            threading.Thread(target=logged, args=(self._close_when_idle,), name=name, daemon=True).start()

    def terminate_workers(self) -> None:
        """Cancel all work: drop waiting functions, ask running ones to stop, and kill those after `cancel_grace_s`. Does not wait.

        A running function sees the request in `zmqdist.cancelled`; its Future ends with a BrokenProcessPool. The worker processes continue
        with the work of other programs.
        """
        self.shutdown(wait=False)
        for future in list(self._futures.values()):
            if (value := future.value) is not None:
                value.cancel()

    def kill_workers(self) -> None:
        """Cancel all work as `terminate_workers` does, but kill running functions at once, without asking them to stop."""
        with self._idle:
            self._shut = True
        self._coordinator.close()

    # -- for the end of the program, and of the cluster ---------------------------------------------------------------

    def finish(self) -> list[BaseException]:
        """Wait until all submitted work has ended; return the errors of the functions that failed meanwhile because the cluster was lost.

        In a forked child it does nothing and returns an empty list.
        """
        if self._coordinator.forked:
            return []
        unfinished = list(self._futures.values())
        self._close_when_idle()
        failed = [future.exception() for future in unfinished if future.done() and not future.cancelled()]
        return [error for error in failed if error is not None and getattr(error, "of_the_cluster", False)]

    def give_up(self) -> int:
        """End all work at once; return how many functions had not ended. Does nothing in a forked child."""
        if self._coordinator.forked:
            return 0
        count = len(self._futures)
        self.kill_workers()
        return count

    def cluster_closed(self) -> None:
        """Break the executor, because its local_cluster is about to close, so that unfinished work cannot end."""
        self._break(lambda: _unavailable("the local_cluster of this executor has been closed"))

    def _close_when_idle(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: not self._futures and not self._submitting)
        self._coordinator.close()

    def _break(self, make: Callable[[], BaseException]) -> None:
        """Fail all unfinished work, and all work that is submitted from now on, with errors made by `make`."""
        with self._idle:
            if self._broken is not None or (self._shut and not self._futures and not self._submitting):
                return
            self._broken = make
        for work, future in list(self._futures.items()):
            future.end(None, make())
            self._forget(work)
        self._coordinator.close()

    # -- one Future ---------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if program_end.has_come():
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        if self._broken is not None:
            raise self._broken()
        if self._shut:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def _prepare(self) -> None:
        """Create the initializer's per-worker resource before the first function is scheduled."""
        coordinator = self._coordinator
        if self._initializer is None or coordinator.ready is not None:
            return
        with coordinator.preparing:
            if coordinator.ready is None:
                coordinator.ready = coordinator.create_per_worker_resource(self._initializer, self._initargs)

    def _register(self, future: _Future[Any], value: RemoteValue) -> None:
        work = value.work
        future.value = value
        self._futures[work] = future
        try:
            value.add_done_callback(lambda value: self._settle(work, future, value))
        except BaseException:  # no callback thread: the Future would never be settled
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
        """Note that workers have begun these functions. The loop calls this, so it must not wait."""
        for work in works:
            self._begun_early.add(work)  # before the look-up: `_register` checks this set after it has added the Future
            future = self._futures.get(work)
            if future is not None:
                self._begun_early.discard(work)
                future.begin()

    def _settle(self, work: int, future: _Future[Any], value: RemoteValue) -> None:
        """Settle the Future with the result of its function. Called in the coordinator's callback thread."""
        try:
            if outcome_of(value)[0] == CANCELLED:
                self._end_cancelled(future, value)
                return
            try:
                error = value.exception()
                result = None if error is not None else value.get()
            except BaseException as failed:  # the result has arrived, but this process cannot unpickle it
                error, result = _broken(f"the result of {value.name} cannot be unpickled here", failed), None
            else:
                error = None if error is None else _translated(value, error)
            if isinstance(error, errors.ClosureInputError):
                error = self._initializer_failed(error)
            future.end(result, error)
        finally:  # even if a callback of the Future raises SystemExit: `shutdown` waits for each Future in `_futures`
            future.value = None
            self._begun_early.discard(work)
            self._forget(work)

    def _end_cancelled(self, future: _Future[Any], value: RemoteValue) -> None:
        if self._broken is not None:
            future.end(None, self._broken())
        elif not future.end_as_cancelled():
            future.end(None, _broken(f"{value.name} was cut off: its executor has ended its workers"))

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


class _Coordinator(ClusterCoordinator):
    """A coordinator without rounds, so that the failure of one function leaves the others alone.

    Attributes:
      ready: the initializer as a per-worker resource; None without an initializer. It is among the arguments of each function, so a
        process calls the initializer before its first function.
      preparing: held while `ready` is created.
    """

    _rounds = False

    def __init__(self, target: Any, *, width: int | None, **options: Any) -> None:
        self._width = width
        self.ready: PerWorkerValues | None = None
        self.preparing = threading.Lock()
        super().__init__(target, **options)

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the process that created the coordinator."""
        return self._runtime.pid != os.getpid()

    def call_on_begun(self, fn: Callable[[list[int]], object]) -> None:
        """Call `fn(works)` in the loop whenever workers have begun these work items."""
        self._runtime.on_begun = fn

    def pickled_now(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Pickle a function now, for any number of `schedule` calls. Raises as `schedule` does for the function."""
        return self._snapshot_of(fn)

    def _pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> trusted.Packed:
        if self.ready is None:
            return super()._pack(args, kwargs)
        try:
            return trusted.pack(_ArgumentsAfterInitializer(self.ready, args, kwargs))
        except errors.InvalidArgumentError:
            super()._pack(args, kwargs)  # raises an error that names the argument
            raise


class _ArgumentsAfterInitializer:
    """The arguments of a function, with the per-worker resource that must exist before the function begins."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> Any:
        return _arguments, self._parts


def _arguments(_ready: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return args, kwargs


class _Future(futures.Future[T]):
    """The Future of a function on the cluster.

    Attributes:
      value: the RemoteValue of the function; None before it is scheduled and after it is settled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.value: RemoteValue | None = None
        self._replies: list[_CancelReply] = []

    def cancel(self) -> bool:
        """Cancel the function unless a worker has begun it. Waits for the worker's reply: two round trips through the dispatcher.

        Returns:
          Whether the Future is cancelled, by this call or an earlier one.
        """
        self._finish_cancel(self._request_cancel())
        return self.cancelled()

    def begin(self) -> None:
        """Note that a worker has begun the function, and release the threads that wait in `cancel`."""
        with self._condition:
            if self._state == "PENDING":
                self._state = "RUNNING"
            replies, self._replies = self._replies, []
        for reply in replies:
            reply.release()

    def end(self, result: T | None, error: BaseException | None) -> None:
        """Settle the Future unless it is settled already."""
        try:
            if error is not None:
                self.set_exception(error)
            else:
                self.set_result(result)  # type: ignore[arg-type]
        except futures.InvalidStateError:
            pass

    def end_as_cancelled(self) -> bool:
        """Cancel the Future unless its function has begun or ended. Return whether it is cancelled."""
        cancelled = super().cancel()
        with self._condition:
            if self._state == "CANCELLED":
                self.set_running_or_notify_cancel()  # wakes `wait` and `as_completed`
        return cancelled

    def _request_cancel(self) -> _CancelReply | None:
        """Send the request to cancel the function. Return the pending reply; None if the function cannot be cancelled any more."""
        value = self.value
        if value is None or value.forked:
            return None
        reply = _CancelReply()
        with self._condition:
            if self._state != "PENDING":
                return None
            self._replies.append(reply)
        value.release_at_end(reply)
        value.take_back()
        reply.value = value
        return reply

    def _finish_cancel(self, reply: _CancelReply | None) -> None:
        """Wait for the reply, and mark the Future as cancelled if no worker had begun the function."""
        if reply is None:
            return
        reply.wait()
        if reply.value is not None and outcome_of(reply.value)[0] == CANCELLED:
            self.end_as_cancelled()


class _CancelReply(threading.Event):
    """The pending reply to a request to cancel a function. The event is set once the function has begun or ended."""

    value: RemoteValue | None = None
    release = threading.Event.set


def _cancel_all(pending: Iterable[Any]) -> None:
    """Cancel these Futures. All requests are sent before this thread waits for the first reply, so that they share one message."""
    for future, reply in [(future, future._request_cancel()) for future in pending if isinstance(future, _Future)]:
        future._finish_cancel(reply)


def _results(
    submitted: deque[futures.Future[T]], submit_next: Callable[[], futures.Future[T] | None] | None, until: float | None
) -> Iterator[T]:
    """Yield the results in order. Cancel the remaining Futures when the caller closes the iterator or a function fails.

    Args:
      submit_next: submits one more item for each result that was taken, and returns its Future; None when there are no more items.
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
    """Return the result of the first Future and remove the Future from the queue, so that nothing else refers to the result."""
    result = submitted[0].result(None if until is None else until - time.monotonic())
    del submitted[0]
    return result


# -- errors -------------------------------------------------------------------------------------------------------------


def _translated(value: RemoteValue, error: BaseException) -> BaseException:
    """Return the error in the form in which the standard library would raise it.

    If the function is not at fault, that is a BrokenProcessPool. A SystemExit of the function is returned itself.
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
        return _broken(f"{value.name}, or an argument of it, cannot be unpickled by the worker", error)
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
