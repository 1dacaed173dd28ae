"""Reading ahead in a thread: the operator prefetch, and the limits and checks that parallel operators share. Their threads are in
parallel.py.

Rules
    A thread belongs to one node and stops with its iterator: at the end of the data, or when the iterator is closed or dropped. Closing the
    iterator waits for the user function that is running.

    Elements stay in order, unless `deterministic=False` lets them leave in the order in which they are ready. An error keeps its place
    among the elements and costs only its own element.

    A state contains the elements that were read ahead. For a parallel map these are its inputs, on which the function is called again after
    a load.

Python functions share one interpreter lock: threads help if a function waits, or computes in NumPy.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from zmqdist.data.constants import AUTOTUNE
from zmqdist.data.interfaces import DatasetLike, operator
from zmqdist.data.iterators import BufferedError, Context, OperatorNode, load_elements, save_elements
from zmqdist.data.ops.base import Op
from zmqdist.data.structure import checked_int, invalid
from zmqdist.errors import FailedPreconditionError

PREFETCH_AUTOTUNE = 8
"""The least number of elements that prefetch(AUTOTUNE) reads ahead."""

AHEAD_MAX = 4096
"""The most elements that are read ahead if the user has set no number and the elements are computed quickly."""

AHEAD_SPLITS_MAX = 64
"""The most elements that are read ahead if positions are dealt out. A position taken by one process is unavailable to others, and lost if
the process crashes."""

SHORT_S = 0.001
"""A run of elements that takes less time than this is too short to wake a thread for it."""

FORKED = "this iterator belongs to the parent of this forked process: create another iterator here"

_END = object()


class ReadAheadLimit:
    """The number of elements that are read ahead, adapted to the time that they take to compute.

    Waking a thread costs as much as twenty cheap elements, so elements are handed over in runs. A run shorter than SHORT_S doubles the
    limit; a run longer than ten times that halves it. So some milliseconds of work are read ahead, and never fewer than `least` elements.

    Attributes:
      size: the current limit.
      low: the next run starts when no more than this many elements are left, so that a quarter of the limit, and at least one place, is
        free.
    """

    __slots__ = ("_least", "_most", "_since", "low", "size")

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._resize(least)
        self._most = max(least, most)
        self._since = time.perf_counter()

    def run_finished(self) -> None:
        """Adapt the limit to the time since the last run."""
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
    """Takes the place of a node, and reads it in a thread: `least` elements ahead, or up to `most` if they are computed quickly.

    The thread starts with the first read, or with `begin`. It reads in runs, holding `_run_lock`. A run ends when the limit is reached or
    another thread waits: the reader for an element (`wake_requested`), or a thread that saves the state, for a moment between two elements
    (`_state_pending`).

    No wake-up is lost, because a waiting thread sets its flag before it checks whether it has to wait, and the reading thread appends an
    element before it checks the flag.
    """

    def __init__(
        self, node: OperatorNode, least: int, most: int = 0, changed: threading.Condition | None = None
    ) -> None:
        """Prepare to read `node`; the thread is not started yet.

        Args:
          changed: the condition that all candidates of one `wait_for_one` share; None: a condition of its own.
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
        """Yield the elements that are left. Unlike `OperatorNode.stream`, each call creates a generator."""
        buffer, limit = self._buffer, self._limit
        while buffer or self._wait():
            x = buffer.popleft()
            if self._full and len(buffer) <= limit.low:
                self._wake()
            if type(x) is BufferedError:
                raise x.error
            yield x

    def begin(self) -> None:
        """Start the thread before the first read."""
        if self._thread is None:
            self._start()

    def ready(self) -> bool:
        """Return whether the next element, or the end, is available. Starts the thread."""
        self.begin()
        return bool(self._buffer) or self._ended or self._stop

    @staticmethod
    def wait_for_one(candidates: Sequence[ReadAhead]) -> None:
        """Wait until one of the candidates is ready. All of them share one `changed`."""
        for each in candidates:
            each.begin_checked()
        with candidates[0].changed:
            while not any(each.ready() for each in candidates):
                for each in candidates:
                    each.wake_requested = True
                if not any(each.ready() for each in candidates):
                    candidates[0].changed.wait()

    def begin_checked(self) -> None:
        """Start the thread unless it runs. Raises FailedPreconditionError in the child of a fork, which does not have the thread."""
        if self._thread is None:
            self._start()
        elif self._pid != os.getpid():
            raise FailedPreconditionError(FORKED)

    def _wait(self) -> bool:
        """Wait for an element; return False at the end."""
        self.begin_checked()
        with self.changed:
            while not (self._buffer or self._ended or self._stop):
                self.wake_requested = True
                if not (self._buffer or self._ended):
                    self.changed.wait()
        return bool(self._buffer)

    def _pause(self) -> None:
        """Wait until there is room for another run. Called in the reading thread."""
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
        with self.changed:  # `halt` in another thread must not join a thread that has not started
            self._stop = False
            self._pid = os.getpid()
            self._thread = threading.Thread(target=self._read, name="zmqdist-data-ahead", daemon=True)
            self._thread.start()

    def _read(self) -> None:
        while not (self._stop or self._ended):
            if self._state_pending or len(self._buffer) >= self._limit.size:
                self._pause()
                continue
            with self._run_lock:
                try:
                    self._run()
                except BaseException as error:  # the reader waits for this thread and has to see any error
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
        """Do nothing: the thread has restarted the node."""

    def halt(self) -> None:
        """Stop the thread, and keep the elements that it has read."""
        with self.changed:
            self._stop = True
            self._wake()
            thread, self._thread = self._thread, None
        # A finalizer that closes the iterator may run in the reading thread itself.
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def abandon(self) -> None:
        """See `OperatorNode.abandon`."""
        self._node.abandon()

    def close(self) -> None:
        """Stop the thread and close the node."""
        self._stop = True
        self._node.abandon()  # `halt` joins the thread, which may be blocked in the node
        self.halt()
        self._node.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the elements read ahead, and the state of the node after them."""
        self._state_pending = self.wake_requested = True  # the thread ends its run, and starts no other
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
        size, most = (PREFETCH_AUTOTUNE, ahead_max(context)) if self.op.size == AUTOTUNE else (self.op.size, 0)
        if size and not context.probing:
            self.children = [ReadAhead(self.children[0], size, most)]  # type: ignore[list-item]
            context.interrupts.close_blocks = True

    def run(self) -> Iterator[Any]:
        return self.source()


@operator("prefetch", _PrefetchNode)
@dataclass(frozen=True)
class Prefetch(Op):
    """Reads `size` elements ahead."""

    in_background: ClassVar[bool] = True

    size: int

    def per_split(self) -> Fraction | None:
        return Fraction(1)

    @classmethod
    def checked(cls, size: Any) -> int:
        """Return the size as an int.

        Raises:
          InvalidArgumentError: the size is negative, and not AUTOTUNE. TypeError: it is not an integer.
        """
        count = checked_int(size, "buffer_size")
        if count < AUTOTUNE:
            raise invalid(f"buffer_size must be greater than or equal to 0, or AUTOTUNE, not {size}")
        return count


def threads_for(parallel: int, context: Context) -> int:
    """Return the number of threads for an operator: as requested, bounded by `threading.private_threadpool_size`."""
    requested = (os.cpu_count() or 1) if parallel == AUTOTUNE else parallel
    bound = context.options.threading.private_threadpool_size
    return min(requested, bound) if bound else requested


def ahead_max(context: Context) -> int:
    """Return how many elements may be read ahead if the user has set no number."""
    return AHEAD_SPLITS_MAX if context.has_splits else AHEAD_MAX


def in_order(deterministic: bool | None, context: Context) -> bool:
    """Return whether elements keep their order: as the operator says, else as the options say, else yes."""
    return context.options.deterministic is not False if deterministic is None else deterministic


def checked_parallel(calls: Any, argument: str = "num_parallel_calls") -> int:
    """Return the number of parallel calls as an int; 0 stands for None.

    Raises:
      ValueError: the number is neither positive nor AUTOTUNE. TypeError: it is not an integer.
    """
    if calls is None:
        return 0
    count = checked_int(calls, argument)
    if count < 1 and count != AUTOTUNE:
        raise ValueError(f"`{argument}` must be greater than 0 or AUTOTUNE, not {calls}")
    return count
