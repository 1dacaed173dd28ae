"""`zmqdist.Executor`: a `concurrent.futures.Executor` whose workers are a cluster.

It behaves as the standard library's ProcessPoolExecutor, whose tests it passes (tests/coordinator/full/test_standard_library.py). One rule
differs: a function that kills its processes fails alone, and the others go on.

Rules
    A Future is settled once: by the coordinator's thread for callbacks, by the thread that cancels, or by the one that breaks the executor.
    `cancel` never ends what a worker has begun. It asks the dispatcher, which asks the worker, and waits for the answer; the loop's
    thread gives it, so a callback may cancel, too.

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
    """Submits to a dispatcher.

    Args:
      target, and other keyword arguments: as of ClusterCoordinator.
      max_workers: so many functions are with the cluster at a time, at most. None: as many as its slots take.
      initializer, initargs: `initializer(*initargs)` is called in each process that runs a function of this executor, before the first. The
        first `submit` waits for a worker then. What it raises breaks the executor.

    What was submitted is carried out before the program ends, also after `shutdown(wait=False)`, `sys.exit` or an uncaught error; not
    after a Ctrl-C. A program that has lost its cluster by then ends after `cluster_lost_limit_s`, with exit code 1.

    Raises:
      ValueError: `max_workers` is below 1; or as of ClusterCoordinator.
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
        """Those that have not been settled, by the number of their work."""
        self._begun_early: set[int] = set()
        """Work that had begun before it was in `_futures`."""
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
        """Schedule `fn(*args, **kwargs)`. What cannot be pickled is the error of the Future, a `pickle.PicklingError`.

        Raises:
          RuntimeError: after `shutdown`, or when the program ends; or no thread can be started that settles the Futures.
          BrokenProcessPool: the executor is broken: its cluster was closed, or its initializer failed. A RuntimeError, too.
          TypeError, ValueError: as of `ClusterCoordinator.schedule`.
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
        """As of the standard library. What the function captures is for all items as it is when this is called. `chunksize` is checked and
        has no effect: the cluster itself hands out quick functions in batches.

        With a `buffersize`, which the standard library has since Python 3.14, so many items at most have been submitted whose results
        were not taken: there are neither more arguments nor more results, and `iterables` may be endless. None: all are submitted at once.
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
        with contextlib.suppress(trusted.NotPicklableError):  # which is the error of each Future
            snapshot = self._coordinator._taken(fn)
        items = zip(*iterables, strict=False)
        submitted = [self.submit(snapshot, *args) for args in itertools.islice(items, buffersize)]
        executor_ref = weakref.ref(self)  # who has only the iterator does not keep the executor

        def submit_next() -> futures.Future[T] | None:
            executor = executor_ref()
            arguments = None if executor is None else next(items, None)
            return None if executor is None or arguments is None else executor.submit(snapshot, *arguments)

        return _results(deque(submitted), None if buffersize is None else submit_next, until)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take nothing more; idempotent. Does nothing in a child that was forked.

        Args:
          wait: return when everything has ended; else it ends in the background.
          cancel_futures: cancel what no worker has begun.
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
        """End everything: what waits is cancelled, what runs is told to end (`zmqdist.cancelled`), and cut off after `cancel_grace_s`. Does
        not wait. The Futures of what ran have an error, a BrokenProcessPool. The workers go on with the work of others."""
        self.shutdown(wait=False)
        for future in list(self._futures.values()):
            if (value := future.value) is not None:
                value.cancel()

    def kill_workers(self) -> None:
        """As `terminate_workers`, at once: what runs is cut off without having been told."""
        with self._idle:
            self._shut = True
        self._coordinator.close()

    # -- for the end of the program, and of the cluster ---------------------------------------------------------------

    def finish(self) -> list[BaseException]:
        """Wait until all that was submitted has ended; the errors of what has failed meanwhile for want of a cluster. Does nothing in a
        child that was forked."""
        if self._coordinator.forked:
            return []
        unfinished = list(self._futures.values())
        self._close_when_idle()
        failed = [future.exception() for future in unfinished if future.done() and not future.cancelled()]
        return [error for error in failed if error is not None and getattr(error, "of_the_cluster", False)]

    def give_up(self) -> int:
        """End everything at once; how much had not ended. Does nothing in a child that was forked."""
        if self._coordinator.forked:
            return 0
        count = len(self._futures)
        self.kill_workers()
        return count

    def cluster_closed(self) -> None:
        """Its local_cluster is about to end: what has not ended never will."""
        self._break(lambda: _unavailable("the local_cluster of this executor has been closed"))

    def _close_when_idle(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: not self._futures and not self._submitting)
        self._coordinator.close()

    def _break(self, make: Callable[[], BaseException]) -> None:
        """All that has not ended fails, and so does whatever is submitted from now on."""
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
        """Have the initializer's call with the coordinator."""
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
        except BaseException:  # no thread for it: it would never be settled
            value.cancel()
            self._forget(work)
            raise
        if work in self._begun_early:
            self._begun_early.discard(work)
            future.begin()
        if self._broken is not None:  # meanwhile
            future.end(None, self._broken())
            self._forget(work)

    def _mark_begun(self, works: list[int]) -> None:
        """Workers have begun these. In the loop, which must not wait."""
        for work in works:
            self._begun_early.add(work)  # first: the submitting thread looks after it has put the Future there
            future = self._futures.get(work)
            if future is not None:
                self._begun_early.discard(work)
                future.begin()

    def _settle(self, work: int, future: _Future[Any], value: RemoteValue) -> None:
        """In the coordinator's thread for callbacks."""
        try:
            if outcome_of(value)[0] == CANCELLED:
                self._end_cancelled(future, value)
                return
            try:
                error = value.exception()
                result = None if error is not None else value.get()
            except BaseException as failed:  # the result came, and could not be unpickled here
                error, result = _broken(f"the result of {value.name} cannot be unpickled here", failed), None
            else:
                error = None if error is None else _translated(value, error)
            if isinstance(error, errors.ClosureInputError):
                error = self._initializer_failed(error)
            future.end(result, error)
        finally:  # a callback of the Future may raise a SystemExit: `shutdown` waits for those that are not settled
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
    """One failure does not end the others' round: there are no rounds.

    Attributes:
      ready: what the initializer's call is with workers; each function gets it, and so it was called where the function runs.
      preparing: held while it is made.
    """

    _rounds = False

    def __init__(self, target: Any, *, width: int | None, **options: Any) -> None:
        self._width = width
        self.ready: PerWorkerValues | None = None
        self.preparing = threading.Lock()
        super().__init__(target, **options)

    @property
    def forked(self) -> bool:
        """Whether it is that of the process from which this one was forked."""
        return self._runtime.pid != os.getpid()

    def call_on_begun(self, fn: Callable[[list[int]], object]) -> None:
        """Call `fn(works)` in the loop when workers have begun these."""
        self._runtime.on_begun = fn

    def _pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> trusted.Packed:
        if self.ready is None:
            return super()._pack(args, kwargs)
        try:
            return trusted.pack(_ArgumentsAfterInitializer(self.ready, args, kwargs))
        except errors.InvalidArgumentError:
            super()._pack(args, kwargs)  # which says where in them
            raise


class _ArgumentsAfterInitializer:
    """The arguments of a function, and what has to be there before it begins."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> Any:
        return _arguments, self._parts


def _arguments(_ready: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return args, kwargs


class _Future(futures.Future[T]):
    """A Future of work of the cluster.

    Attributes:
      value: the work's, until it is settled; None before it was scheduled, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.value: RemoteValue | None = None
        self._replies: list[_CancelReply] = []

    def cancel(self) -> bool:
        """Cancel it unless a worker has begun it; waits for the worker to say so: two trips through the dispatcher.

        Returns:
          Whether it is cancelled now, or was before.
        """
        self._finish_cancel(self._request_cancel())
        return self.cancelled()

    def begin(self) -> None:
        """A worker has begun it."""
        with self._condition:
            if self._state == "PENDING":
                self._state = "RUNNING"
            replies, self._replies = self._replies, []
        for reply in replies:
            reply.release()

    def end(self, result: T | None, error: BaseException | None) -> None:
        """Settle it, unless that has been done."""
        try:
            if error is not None:
                self.set_exception(error)
            else:
                self.set_result(result)  # type: ignore[arg-type]
        except futures.InvalidStateError:
            pass

    def end_as_cancelled(self) -> bool:
        """Whether it could be: it had neither begun nor ended. It may have been cancelled before."""
        cancelled = super().cancel()
        with self._condition:
            if self._state == "CANCELLED":
                self.set_running_or_notify_cancel()  # for those that wait
        return cancelled

    def _request_cancel(self) -> _CancelReply | None:
        """Take it back unless it has begun. None where there is nothing to ask."""
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
        """Wait for the answer, and act on it."""
        if reply is None:
            return
        reply.wait()
        if reply.value is not None and outcome_of(reply.value)[0] == CANCELLED:
            self.end_as_cancelled()


class _CancelReply(threading.Event):
    """To the question whether work was taken back: it has ended, or begun."""

    value: RemoteValue | None = None
    release = threading.Event.set


def _cancel_all(pending: Iterable[Any]) -> None:
    """Cancel these Futures: one question for all of them."""
    for future, reply in [(future, future._request_cancel()) for future in pending if isinstance(future, _Future)]:
        future._finish_cancel(reply)


def _results(
    submitted: deque[futures.Future[T]], submit_next: Callable[[], futures.Future[T] | None] | None, until: float | None
) -> Iterator[T]:
    """Their results in order; what is left is cancelled when the caller gives up, or one of them fails.

    Args:
      submit_next: submits one more for each result that is taken; gives None when there is none.
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
    """Of the first one, which nothing refers to afterwards."""
    result = submitted[0].result(None if until is None else until - time.monotonic())
    del submitted[0]
    return result


# -- errors -------------------------------------------------------------------------------------------------------------


def _translated(value: RemoteValue, error: BaseException) -> BaseException:
    """As the standard library would have it: broken where the function is not to blame, and a SystemExit of the function as it is."""
    from zmqdist.scheduling.coordinator import broken_pool

    kind, _ = outcome_of(value)
    if kind == LOST and isinstance(error, errors.WorkerLost):
        return broken_pool.ExecutorWorkerLost(error.what, error.starts)
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
