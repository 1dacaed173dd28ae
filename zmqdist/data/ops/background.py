"""Reading ahead and calling functions in threads: the operator prefetch, and what parallel map,
parallel batch and parallel interleave share.

Theory
    In a parallel map or batch, the reading thread has `pending`, a queue of calls in the order of
    the input. Worker threads take the calls one by one from a common queue, so that no thread is
    idle while another thread has a long call. A worker thread sleeps only when the queue is empty,
    and the reading thread only when the call that it needs is not done. Only sleeping threads are
    woken. With cheap functions there are therefore long runs without a thread switch.

Rules
    A thread belongs to one node. It stops with the node's iterator, at the end of the data or when
    the iterator is closed or dropped. Closing the iterator waits until running user functions have
    returned.

    Elements are yielded in order. With `deterministic=False` they may be yielded in the order in
    which they are ready. An error takes the place of its element, and only that element is lost.

    A state contains the elements that were read ahead. The state of a parallel map contains inputs
    instead, and after a load the function is called on them again.

    In a parallel interleave, the thread that reads a dataset creates and opens it (DeferredNode),
    while other threads create and open other datasets. The user functions run concurrently, and in
    any order: the random numbers of a dataset depend on the number of its input element
    (`NumberedNode.inner_context`), and not on which thread is the fastest. A dataset that cannot be
    opened raises its error once, and then ends.

All Python functions of a process share the interpreter lock, so threads help only if a function
waits or computes in NumPy.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, ClassVar

from zmqdist import clock as time
from zmqdist.conditions import Condition
from zmqdist.data.constants import AUTOTUNE
from zmqdist.data.interfaces import DatasetLike, operator
from zmqdist.data.iterators import (
    BufferedError,
    Context,
    OperatorNode,
    load_elements,
    save_elements,
)
from zmqdist.data.ops.base import Op
from zmqdist.data.structure import READY, checked_int, element, invalid
from zmqdist.errors import CancelledError, FailedPreconditionError

PREFETCH_AUTOTUNE = 8
"""The smallest number of elements that prefetch(AUTOTUNE) reads ahead."""

AHEAD_MAX = 4096
"""The largest number of elements that are read ahead if the user has set no number."""

AHEAD_SPLITS_MAX = 64
"""The largest number of elements that are read ahead if a dispatcher gives out the positions. It is
small because a position that one process has taken is unavailable to other processes, and is lost
if the process crashes."""

SHORT_S = 0.001
"""Seconds. If less time than this passes from one run (`ReadAheadLimit`) to the next, threads are
woken too often, and the limit is doubled."""

FORKED = "this iterator belongs to the parent of this forked process: create another iterator here"

_END = object()


class ReadAheadLimit:
    """The number of elements that are read ahead, adapted to the time in which they are computed
    and taken.

    Waking a thread takes as much time as computing twenty cheap elements, so the threads pass
    elements in runs. If less than SHORT_S passes from one run to the next, the limit is doubled. If
    more than ten times SHORT_S passes, the limit is halved. In this way some milliseconds of work
    are read ahead, and never fewer than `least` elements.

    Attributes:
      size: the current limit.
      low: the next run starts when at most this number of elements is left, so that it has room for
        a quarter of the limit, or for one element if that is more.
    """

    __slots__ = ("_least", "_most", "_since", "low", "size")

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._resize(least)
        self._most = max(least, most)
        self._since = time.perf_counter()

    def run_finished(self) -> None:
        """Record that a run has finished, and adapt the limit to the time since the previous
        call.
        """
        now = time.perf_counter()
        took, self._since = now - self._since, now
        if took < SHORT_S:
            self._resize(min(2 * self.size, self._most))
        elif took > 10 * SHORT_S:
            self._resize(max(self.size // 2, self._least))

    def _resize(self, size: int) -> None:
        self.size = size
        self.low = size - max(1, size // 4)


def _join(thread: threading.Thread) -> None:
    # A thread whose start Ctrl-C has interrupted cannot be joined. If it runs, it ends by itself.
    with contextlib.suppress(RuntimeError):
        thread.join()


class ReadAhead:
    """Takes the place of a node, and reads that node in a thread: `least` elements ahead, or up to
    `most` elements if they are computed quickly.

    The reading thread starts with the first read, or with `begin`. It reads in runs, and holds
    `_run_lock` during a run. A run ends when the limit is reached, when another thread waits for an
    element or to save the state (`wake_requested`), or when `halt` is called. No run begins while a
    state is saved (`_state_pending`).

    No wake-up is lost, because the other thread sets `wake_requested` before it checks whether it
    has to wait, and the reading thread appends an element before it checks `wake_requested`.
    """

    def __init__(
        self,
        node: OperatorNode,
        least: int,
        most: int = 0,
        changed: Condition | None = None,
    ) -> None:
        """Prepare to read `node`. The thread is not started yet.

        Args:
          changed: a condition that all candidates of one `wait_for_ready` must share. None creates
            a condition for this object alone.
        """
        self._node = node
        self._limit = ReadAheadLimit(least, most)
        self._buffer: deque[Any] = deque()
        self.changed = changed or Condition()
        self._run_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = 0
        self.wake_requested = False
        self._full = False
        self._state_pending = False
        self._stop = False
        self._at_end = False

    def stream(self) -> Iterator[Any]:
        """Yield the remaining elements. Unlike `OperatorNode.stream`, each call creates a
        generator."""
        buffer, limit = self._buffer, self._limit
        while buffer or self._wait():
            x = buffer.popleft()
            if self._full and len(buffer) <= limit.low:
                self._wake()
            if type(x) is BufferedError:
                raise x.error
            yield x

    def begin(self) -> None:
        """Start the thread before the first read. Does nothing if the thread was started."""
        if self._thread is None:
            self._start()

    def ready(self) -> bool:
        """Return whether the next element or the end is available without waiting. Starts the
        thread."""
        self.begin()
        return bool(self._buffer) or self._at_end or self._stop

    @staticmethod
    def wait_for_ready(candidates: Sequence[ReadAhead]) -> None:
        """Wait until one of the candidates is ready. All candidates must share the condition
        `changed`."""
        for reader in candidates:
            reader.begin_checked()
        with candidates[0].changed:
            while not any(reader.ready() for reader in candidates):
                for reader in candidates:
                    reader.wake_requested = True
                candidates[0].changed.notify_all()  # as in `_wait`
                if not any(reader.ready() for reader in candidates):
                    candidates[0].changed.wait()

    def begin_checked(self) -> None:
        """Start the thread if it was not started. Raises FailedPreconditionError in the child of a
        fork, because the thread does not exist there.
        """
        if self._thread is None:
            self._start()
        elif self._pid != os.getpid():
            raise FailedPreconditionError(FORKED)

    def _wait(self) -> bool:
        """Wait for an element. Return False if no further element will come, because the node has
        ended or `halt` was called."""
        self.begin_checked()
        with self.changed:
            while not (self._buffer or self._at_end or self._stop):
                self.wake_requested = True
                self.changed.notify_all()  # Ctrl-C may have come before the `_wake` of `stream`
                if not (self._buffer or self._at_end):
                    self.changed.wait()
        return bool(self._buffer)

    def _pause(self) -> None:
        """Wait until the buffer has room for another run, and no state is being saved. Called in
        the reading thread."""
        with self.changed:
            self._full = True
            while (self._state_pending or len(self._buffer) > self._limit.low) and not self._stop:
                self.changed.wait()
            self._full = False
        self._limit.run_finished()

    def _wake(self) -> None:
        with self.changed:
            self.wake_requested = False
            self.changed.notify_all()

    def _start(self) -> None:
        with self.changed:
            # start the thread under the lock, because `halt` must not join a thread that is not
            # started
            self._stop = False
            self._pid = os.getpid()
            self._thread = threading.Thread(
                target=self._read, name="zmqdist-data-ahead", daemon=True
            )
            try:
                self._thread.start()
            except BaseException:  # Ctrl-C: the next read starts another thread
                self._stop, self._thread = True, None
                raise

    def _read(self) -> None:
        while not (self._stop or self._at_end):
            if self._state_pending or len(self._buffer) >= self._limit.size:
                self._pause()
                continue
            with self._run_lock:
                try:
                    self._run()
                except BaseException as error:
                    # pass on every error, because the consumer may wait for the element
                    self._node.restart()
                    self._buffer.append(BufferedError(error))
            if self.wake_requested:
                self._wake()

    def _run(self) -> None:
        buffer, size = self._buffer, self._limit.size
        for x in self._node.stream():
            buffer.append(x)
            if self.wake_requested or self._stop or len(buffer) >= size:
                return
        self._at_end = True

    def restart(self) -> None:
        """Do nothing, because the reading thread itself restarts the node after an error."""

    def halt(self) -> None:
        """Stop the thread, and keep the elements that it has read."""
        with self.changed:
            self._stop = True
            self._wake()
            thread, self._thread = self._thread, None
        # Do not join the current thread: a finalizer that closes the iterator may run in the
        # reading thread itself.
        if thread is not None and thread is not threading.current_thread():
            _join(thread)

    def abandon(self) -> None:
        """Interrupt a blocking call of the node, as `OperatorNode.abandon` does."""
        self._node.abandon()

    def close(self) -> None:
        """Stop the thread and close the node."""
        self._stop = True
        # interrupt a blocking call of the node first, because `halt` waits for the thread
        self._node.abandon()
        self.halt()
        self._node.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the elements that were read ahead, and the state of the node after these
        elements.
        """
        # Have the thread end its run and begin no other, so that `_run_lock` becomes free.
        self._state_pending = self.wake_requested = True
        try:
            with self._run_lock:
                ahead = save_elements(list(self._buffer))
                return {"ahead": ahead, "ended": self._at_end, "node": self._node.state_dict()}
        finally:
            self._state_pending = False
            self._wake()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self.halt()
        self._buffer.clear()
        self._buffer.extend(load_elements(state["ahead"]))
        self._at_end = state["ended"]
        self._node.load_state_dict(state["node"])


class _PrefetchNode(OperatorNode):
    def __init__(self, dataset: DatasetLike, context: Context) -> None:
        super().__init__(dataset, context)
        size, most = (
            (PREFETCH_AUTOTUNE, ahead_max(context))
            if self.op.size == AUTOTUNE
            else (self.op.size, 0)
        )
        if size and not context.probing:
            self.children = [ReadAhead(self.children[0], size, most)]  # type: ignore[list-item]
            context.interrupts.close_blocks = True


@operator("prefetch", _PrefetchNode)
class Prefetch(Op):
    """Reads `size` elements ahead in a thread. AUTOTUNE adapts the number, and with 0 there is no
    thread."""

    ratio = Fraction(1)
    in_background: ClassVar[bool] = True

    size: int

    @classmethod
    def checked(cls, size: Any) -> int:
        """Return the size as an int.

        Raises:
          InvalidArgumentError: the size is negative, and not AUTOTUNE.
          TypeError: the size is not an integer.
        """
        count = checked_int(size, "buffer_size")
        if count < AUTOTUNE:
            raise invalid(
                f"buffer_size must be greater than or equal to 0, or AUTOTUNE, not {size}"
            )
        return count


def threads_for(parallel: int, context: Context) -> int:
    """Return the number of threads for an operator: the requested number, but at most
    `threading.private_threadpool_size`."""
    requested = (os.cpu_count() or 1) if parallel == AUTOTUNE else parallel
    bound = context.options.threading.private_threadpool_size
    return min(requested, bound) if bound else requested


def ahead_max(context: Context) -> int:
    """Return the largest number of elements that an operator may read ahead if the user has set no
    number."""
    return AHEAD_SPLITS_MAX if context.has_splits else AHEAD_MAX


def in_order(deterministic: bool | None, context: Context) -> bool:
    """Return whether elements must be yielded in order. If the context does not require it, the
    operator's `deterministic` decides. If that is None, the options decide, whose default is True.
    """
    if context.ordered:
        return True
    return context.options.deterministic is not False if deterministic is None else deterministic


def checked_parallel(calls: Any, argument: str = "num_parallel_calls") -> int:
    """Return the number of parallel calls as an int. The result for None is 0.

    Raises:
      ValueError: the number is neither positive nor AUTOTUNE.
      TypeError: the number is not an integer.
    """
    if calls is None:
        return 0
    count = checked_int(calls, argument)
    if count < 1 and count != AUTOTUNE:
        raise ValueError(f"`{argument}` must be greater than 0 or AUTOTUNE, not {calls}")
    return count


_ANY = object()


class MapCall:
    """One call of the function of a parallel operator, which a thread of MapThreads makes.

    Attributes:
      x: the input.
      y: the output, or a BufferedError if the call or its input has failed. It is valid when
        `finished` is True.
    """

    __slots__ = ("finished", "x", "y")

    def __init__(self, x: Any) -> None:
        self.x = x
        self.y: Any = None
        self.finished = False


class MapThreads:
    """Threads that run the calls in a queue. They have no reference to the iterator, so that they
    do not keep it alive.

    No wake-up is lost, because a thread announces that it will sleep before it checks the queue a
    last time, and `add` appends to the queue before it checks whether a thread sleeps. In the same
    way, `wait` sets `_awaited` before it checks `finished`, and a worker thread sets `finished`
    before it checks `_awaited`.
    """

    def __init__(self, size: int, function: Callable[[Any], Any]) -> None:
        self._size, self._function = size, function
        self._todo: deque[MapCall] = deque()
        self._threads: list[threading.Thread] = []
        self._work = Condition()
        self._idle = 0
        self._stop = False
        self._call_finished = Condition()
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
        with self._call_finished:
            self._awaited = calls[0] if ordered else _ANY
            try:
                while True:
                    for call in calls:
                        if call.finished:
                            return call
                        if ordered:
                            break
                    if self._stop:
                        raise CancelledError("the iterator was closed")
                    self._call_finished.wait()
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
        with self._call_finished:
            self._call_finished.notify_all()
        for thread in self._threads:
            # Do not join the current thread: a finalizer that closes the iterator may run in one of
            # these threads.
            if thread is not threading.current_thread():
                _join(thread)

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
            call.finished = True
            if self._awaited is call or self._awaited is _ANY:
                with self._call_finished:
                    self._call_finished.notify_all()


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
            if not call.finished:
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
        if type(x) is BufferedError:
            call.y, call.finished = x, True  # the input failed, so the function is not called
        else:
            if self._pool is None:
                self._pool = MapThreads(self.threads, self.function())
            self._pool.add(call)
        # last, because `run` would wait for ever for a call that Ctrl-C has kept from the pool
        self.pending.append(call)

    def close(self) -> None:
        super().close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

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
        fn = self.op.fitting().value

        def call(x: Any) -> Any:
            y = fn(*x) if type(x) is tuple else fn(x)
            return y if type(y) in READY else element(y)

        return call


class DeferredNode:
    """Takes the place of the node of one dataset in a parallel interleave, and creates that node at
    the first read."""

    def __init__(self, make_dataset: Callable[[], DatasetLike], context: Context) -> None:
        """Prepare to open a node. `make_dataset` is not called yet.

        Args:
          make_dataset: a function that returns the dataset.
          context: the context for this dataset alone.
        """
        self._make_dataset = make_dataset
        self._context = context
        self._lock = threading.Lock()
        self._node: OperatorNode | None = None
        self._saved: dict[str, Any] | None = None
        self._failed = False
        self._abandoned = False

    def stream(self) -> Iterator[Any]:
        """Return the generator of the node, as `OperatorNode.stream` does. The first call opens the
        dataset."""
        if self._failed:
            return iter(())
        return self.open().stream()

    def open(self) -> OperatorNode:
        """Return the node. The first call opens it.

        Raises:
          CancelledError: the iterator is being closed.
          Exception: any error of the function, or of opening the dataset.
        """
        if self._node is None:
            try:
                self._node = self._open()
            except BaseException:
                self._failed = True
                raise
            with self._lock:
                abandoned = self._abandoned
            if abandoned:
                # abandon the new node too, because `abandon` was called before it was created
                self._node.abandon()
        return self._node

    def _open(self) -> OperatorNode:
        dataset = self._make_dataset()
        if self._abandoned:
            raise CancelledError("the iterator was closed")
        node = self._context.open(dataset)
        if self._saved is not None:
            node.load_state_dict(self._saved)
        return node

    def restart(self) -> None:
        """Restart the node if it exists, as `OperatorNode.restart` does."""
        if self._node is not None:
            self._node.restart()

    def abandon(self) -> None:
        """Interrupt a blocking call of the node, as `OperatorNode.abandon` does."""
        with self._lock:
            self._abandoned = True
            node = self._node
        if node is not None:
            node.abandon()

    def close(self) -> None:
        """Close the node if it exists, as `OperatorNode.close` does."""
        if self._node is not None:
            self._node.close()

    def state_dict(self) -> dict[str, Any]:
        """Return whether opening the node has failed ("over"), and the state of the node ("node"),
        which is None until the node is open."""
        return {"over": self._failed, "node": self._node and self._node.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned. Opens the node, unless the state says
        that opening it has failed."""
        self._failed, self._saved = state["over"], state["node"]
        if not self._failed:
            self.open()
