"""Reading ahead in a thread: the operator prefetch, and the limits and checks that parallel
operators share. The threads of the parallel operators are in parallel.py.

Rules
    A thread belongs to one node. It stops with the node's iterator, at the end of the data or when
    the iterator is closed or dropped. Closing the iterator waits until running user functions have
    returned.

    Elements are yielded in order. With `deterministic=False` they may be yielded in the order in
    which they are ready. An error takes the place of its element, and only that element is lost.

    A state contains the elements that were read ahead. The state of a parallel map contains inputs
    instead, and after a load the function is called on them again.

All Python functions of a process share the interpreter lock, so threads help only if a function
waits or computes in NumPy.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from zmqdist import clock as time
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
from zmqdist.data.structure import checked_int, invalid
from zmqdist.errors import FailedPreconditionError

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
        changed: threading.Condition | None = None,
    ) -> None:
        """Prepare to read `node`. The thread is not started yet.

        Args:
          changed: a condition that all candidates of one `wait_for_one` must share. None creates a
            condition for this object alone.
        """
        self._node = node
        self._limit = ReadAheadLimit(least, most)
        self._buffer: deque[Any] = deque()
        self.changed = changed or threading.Condition()
        self._run_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = 0
        self.wake_requested = False
        self._full = False
        self._state_pending = False
        self._stop = False
        self._ended = False

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
        return bool(self._buffer) or self._ended or self._stop

    @staticmethod
    def wait_for_one(candidates: Sequence[ReadAhead]) -> None:
        """Wait until one of the candidates is ready. All candidates must share the condition
        `changed`."""
        for each in candidates:
            each.begin_checked()
        with candidates[0].changed:
            while not any(each.ready() for each in candidates):
                for each in candidates:
                    each.wake_requested = True
                if not any(each.ready() for each in candidates):
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
            while not (self._buffer or self._ended or self._stop):
                self.wake_requested = True
                if not (self._buffer or self._ended):
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
            self._thread.start()

    def _read(self) -> None:
        while not (self._stop or self._ended):
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
        self._ended = True

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
            thread.join()

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
                return {"ahead": ahead, "ended": self._ended, "node": self._node.state_dict()}
        finally:
            self._state_pending = False
            self._wake()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self.halt()
        self._buffer.clear()
        self._buffer.extend(load_elements(state["ahead"]))
        self._ended = state["ended"]
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
@dataclass(frozen=True)
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
