"""`zmqdist.Executor`: a `concurrent.futures.Executor` whose workers are a cluster.

Futures and errors are the standard library's: what a function raised comes out of its Future, and one failure does not touch the others.
"""

from __future__ import annotations

import concurrent.futures as futures
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from zmqdist import errors
from zmqdist.coordinator.coordinator import ClusterCoordinator
from zmqdist.coordinator.values import RemoteValue

T = TypeVar("T")


class Executor(futures.Executor):
    """Submits to a dispatcher.

    Args:
      target, and keyword arguments: as of ClusterCoordinator.

    Cancelling a Future works until its function has ended; one that runs is cut off. `shutdown(wait=False)` lets what was submitted
    go on in the background of this process.
    """

    def __init__(self, target: Any = None, **options: Any) -> None:
        self._coordinator = _Coordinator(target, **options)
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._futures: set[_Future[Any]] = set()
        self._shut = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> futures.Future[T]:
        """Schedule `fn(*args, **kwargs)`.

        Raises:
          RuntimeError: after `shutdown`; or no thread can be started that settles the Futures.
          TypeError, ValueError, InvalidArgumentError: as of `ClusterCoordinator.schedule`.
        """
        with self._lock:
            if self._shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            value = self._coordinator.schedule(fn, args, kwargs)
            future: _Future[T] = _Future(value)
            self._futures.add(future)
        try:
            value.add_done_callback(lambda value: self._settle(future, value))
        except BaseException:  # no thread for it: it would never be settled
            value.cancel()
            self._forget(future)
            raise
        return future

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        **options: Any,
    ) -> Iterator[T]:
        """As of `concurrent.futures.Executor`. What the function captures is for all items as it is when this is called."""
        taken = fn if self._shut else self._coordinator._taken(fn)
        return super().map(taken, *iterables, timeout=timeout, chunksize=chunksize, **options)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take nothing more; idempotent.

        Args:
          wait: return when everything has ended; else it ends in the background.
          cancel_futures: cancel what has not ended.
        """
        with self._lock:
            first, self._shut = not self._shut, True
        if cancel_futures:
            for future in list(self._futures):
                future.cancel()
        if not first and not wait:
            return
        if wait:
            self._close_when_idle()
        else:
            threading.Thread(target=self._close_when_idle, name="zmqdist-executor-shutdown", daemon=True).start()

    def _close_when_idle(self) -> None:
        with self._lock:
            while self._futures:
                self._idle.wait()
        self._coordinator.close()

    def _settle(self, future: _Future[Any], value: RemoteValue) -> None:
        """In the coordinator's thread for callbacks, or where `submit` was called when the result is here already."""
        try:
            error = value.exception()
            result = None if error is not None else value.get()
        except BaseException as failed:  # the result came, and could not be unpickled here
            error, result = failed, None
        try:
            if isinstance(error, errors.CancelledError):
                futures.Future.cancel(future)
            if future.set_running_or_notify_cancel():
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result)
        finally:  # a callback of the Future may raise a SystemExit: `shutdown` waits for those that are not settled
            self._forget(future)

    def _forget(self, future: _Future[Any]) -> None:
        with self._lock:
            self._futures.discard(future)
            self._idle.notify_all()


class _Coordinator(ClusterCoordinator):
    """One failure does not end the others' round: there are no rounds."""

    _rounds = False


class _Future(futures.Future[T]):
    """A Future whose cancel reaches the cluster."""

    def __init__(self, value: RemoteValue) -> None:
        super().__init__()
        self._remote = value

    def cancel(self) -> bool:
        """True when it was cancelled before it ended; then its function is taken back or cut off."""
        cancelled = super().cancel()
        if cancelled:
            self._remote.cancel()
        return cancelled
