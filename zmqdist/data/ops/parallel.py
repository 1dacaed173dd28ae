"""Functions that run in several threads, for parallel map and parallel batch.

Theory
    The reading thread has `pending`, a queue of calls in the order of the input. Worker threads
    take the calls one by one from a common queue, so that no thread is idle while another thread
    has a long call. A worker thread sleeps only when the queue is empty, and the reading thread
    only when the call that it needs is not done. Only sleeping threads are woken. With cheap
    functions there are therefore long runs without a thread switch.

Rules
    Elements are yielded in order. With `deterministic=False` they may be yielded in the order in
    which they are ready. If a call raises, only its element is lost. The state contains the inputs
    of the pending calls. After a load, the function is called on these inputs again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zmqdist.data.interfaces import DatasetLike
from zmqdist.data.iterators import (
    BufferedError,
    Context,
    OperatorNode,
    load_elements,
    save_elements,
)
from zmqdist.data.ops.background import ReadAheadLimit, ahead_max, in_order, threads_for
from zmqdist.data.structure import READY, element

_END = object()
_ANY = object()


class MapCall:
    """One call of the function of a parallel operator, which a thread of MapThreads makes.

    Attributes:
      x: the input.
      y: the output, or a BufferedError if the call or its input has failed. It is valid when `done`
        is True.
    """

    __slots__ = ("done", "x", "y")

    def __init__(self, x: Any) -> None:
        self.x = x
        self.y: Any = None
        self.done = False


class MapThreads:
    """Threads that run the calls in a queue. They have no reference to the iterator, so that they
    do not keep it alive.

    No wake-up is lost, because a thread announces that it will sleep before it checks the queue a
    last time, and `add` appends to the queue before it checks whether a thread sleeps. In the same
    way, `wait` sets `_awaited` before it checks `done`, and a worker thread sets `done` before it
    checks `_awaited`.
    """

    def __init__(self, size: int, function: Callable[[Any], Any]) -> None:
        self._size, self._function = size, function
        self._todo: deque[MapCall] = deque()
        self._threads: list[threading.Thread] = []
        self._work = threading.Condition()
        self._idle = 0
        self._stop = False
        self._done = threading.Condition()
        self._awaited: Any = None

    def add(self, call: MapCall) -> None:
        """Add a call to the queue. Wakes an idle thread, or starts a thread if fewer than `size`
        threads exist."""
        self._todo.append(call)
        if self._idle:
            with self._work:
                if self._idle:
                    # count the woken thread as busy at once, so that the next call wakes another
                    # thread
                    self._idle -= 1
                    self._work.notify()
        elif len(self._threads) < self._size:
            thread = threading.Thread(target=self._run, name="zmqdist-data-map", daemon=True)
            self._threads.append(thread)
            thread.start()

    def wait(self, calls: Sequence[MapCall], ordered: bool) -> MapCall:
        """Wait until a call is done, and return that call. With `ordered` wait for the first of the
        calls, otherwise for any call."""
        with self._done:
            self._awaited = calls[0] if ordered else _ANY
            try:
                while True:
                    for call in calls:
                        if call.done:
                            return call
                        if ordered:
                            break
                    self._done.wait()
            finally:
                self._awaited = None

    def drop(self) -> None:
        """Remove the calls that have not begun from the queue."""
        self._todo.clear()

    def close(self) -> None:
        """Stop the threads, and wait for the running calls. Calls that have not begun are
        dropped.
        """
        self._todo.clear()
        with self._work:
            self._stop = True
            self._work.notify_all()
        for thread in self._threads:
            # Do not join the current thread: a finalizer that closes the iterator may run in one of
            # these threads.
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        todo, function = self._todo, self._function
        while not self._stop:
            try:
                call = todo.popleft()
            except IndexError:
                with self._work:
                    self._idle += 1
                    if todo or self._stop:
                        self._idle -= 1
                    else:
                        self._work.wait()
                continue
            try:
                call.y = function(call.x)
            except BaseException as error:
                # keep the error until the reading thread reaches this call
                call.y = BufferedError(error)
            call.done = True
            if self._awaited is call or self._awaited is _ANY:
                with self._done:
                    self._done.notify_all()


class ParallelNode(OperatorNode):
    """Calls a function on several inputs at once, in threads. Subclasses define the inputs (`feed`)
    and the function (`function`)."""

    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        self.threads = threads_for(self.op.parallel, context)
        self.ordered = in_order(self.op.deterministic, context)
        self.limit = ReadAheadLimit(self.threads, ahead_max(context))
        self.pending: deque[MapCall] = deque()
        self._pool: MapThreads | None = None
        context.interrupts.close_blocks = True

    def feed(self) -> Iterator[Any]:
        """Yield the remaining inputs of the function."""
        return self.source()

    def function(self) -> Callable[[Any], Any]:
        """Return the function that the threads call with each input."""
        raise NotImplementedError

    def run(self) -> Iterator[Any]:
        pending, limit = self.pending, self.limit
        while True:
            if len(pending) <= limit.low:
                self._fill()
                if not pending:
                    return
            call = pending[0]
            if not call.done:
                assert self._pool is not None
                call = self._pool.wait(pending, self.ordered)
            if call is pending[0]:
                pending.popleft()
            else:
                pending.remove(call)
            if type(call.y) is BufferedError:
                raise call.y.error
            yield call.y

    def _fill(self) -> None:
        self.limit.run_finished()
        feed = self.feed()
        while len(self.pending) < self.limit.size:
            try:
                x = next(feed, _END)
            except Exception as error:
                self.children[0].restart()
                feed = self.feed()
                x = BufferedError(error)  # the error takes the place of the failed input
            if x is _END:
                return
            self._add(x)

    def _add(self, x: Any) -> None:
        call = MapCall(x)
        self.pending.append(call)
        if type(x) is BufferedError:
            call.y, call.done = x, True  # the input failed, so the function is not called
            return
        if self._pool is None:
            self._pool = MapThreads(self.threads, self.function())
        self._pool.add(call)

    def close(self) -> None:
        super().close()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def state(self) -> dict[str, Any]:
        pending = save_elements([call.x for call in self.pending])
        return super().state() | {"pending": pending}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        if self._pool is not None:
            self._pool.drop()
        self.pending.clear()
        for x in load_elements(state["pending"]):
            self._add(x)


class ParallelMapNode(ParallelNode):
    """Runs a parallel `map`."""

    def function(self) -> Callable[[Any], Any]:
        return _Call(self.op.fitting().value)


class _Call:
    """A callable that applies a user function to an element."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, x: Any) -> Any:
        y = self._function(*x) if type(x) is tuple else self._function(x)
        return y if type(y) in READY else element(y)
