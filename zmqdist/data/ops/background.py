"""Work ahead of the reader, in a thread: prefetch, and what parallel operators have in common (their threads are in parallel.py).

Rules
    A thread belongs to one node and ends with its iterator: at the end of the data, when it is closed, or dropped. Whoever closes waits for
    the function that runs just now.

    Elements stay in order, unless a `deterministic=False` allows the order in which they are ready. An error waits in its place among the
    elements and costs nothing but its own.

    A state holds what lies ahead: prefetched elements as they are; of a parallel map the inputs, whose function is called again.

Functions in Python share one interpreter lock: threads help where a function waits, or computes in NumPy.
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
"""Elements: what prefetch(AUTOTUNE) keeps at least."""

AHEAD_MAX = 4096
"""Elements that lie ahead at most, where nobody has said how many and they come quickly."""

AHEAD_SPLITS_MAX = 64
"""The same of positions that somebody deals out: what one takes, others cannot have, and it is lost with its process."""

SHORT_S = 0.001
"""A run of elements that takes less is too short for a thread that has to be woken for it."""

FORKED = "this iterator belongs to the process that this one was forked from: make another one here"

_END = object()


class ReadAheadLimit:
    """How many elements may lie ahead.

    Waking a thread costs as much as twenty cheap elements, so they are handed over in runs: a run that took next to no time lets
    the next be twice as long, one that took long makes it shorter again. So what lies ahead is some milliseconds of work, and never less
    than `least`.

    Attributes:
      size: at present.
      low: so many are left when it is time for the next run: the room is filled up when a quarter of it, or one place, is free.
    """

    __slots__ = ("_least", "_most", "_since", "low", "size")

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._resize(least)
        self._most = max(least, most)
        self._since = time.perf_counter()

    def run_finished(self) -> None:
        """A run is over."""
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
    """Reads a node in a thread, `least` elements ahead, or up to `most` where they come quickly; stands in the node's place.

    The thread starts with the first read, or with `begin`. It reads in runs, holding `_pulling`, and leaves a run when there is no more
    room or somebody is waiting (`wanted`): a reader for an element, or who takes a state, for a place between two elements (`_held`).
    Each of the two says that it waits before it looks whether it must; who brings something looks for a waiter behind that.
    """

    def __init__(
        self, node: OperatorNode, least: int, most: int = 0, changed: threading.Condition | None = None
    ) -> None:
        """`changed` is that of all among which `wait_for_one` waits; by default it is this one's own."""
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
        """The elements from here on; as `OperatorNode.stream`, but made anew each time."""
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
        """Whether the next element, or the end, is there."""
        self.begin()
        return bool(self._buffer) or self._ended or self._stop

    @staticmethod
    def wait_for_one(candidates: Sequence[ReadAhead]) -> None:
        """Until one of them is ready; they have one `changed`."""
        for each in candidates:
            each.begin_checked()
        with candidates[0].changed:
            while not any(each.ready() for each in candidates):
                for each in candidates:
                    each.wake_requested = True
                if not any(each.ready() for each in candidates):
                    candidates[0].changed.wait()

    def begin_checked(self) -> None:
        """The child of a fork has no thread that reads: FailedPreconditionError."""
        if self._thread is None:
            self._start()
        elif self._pid != os.getpid():
            raise FailedPreconditionError(FORKED)

    def _wait(self) -> bool:
        """Until an element is there; False at the end."""
        self.begin_checked()
        with self.changed:
            while not (self._buffer or self._ended or self._stop):
                self.wake_requested = True
                if not (self._buffer or self._ended):
                    self.changed.wait()
        return bool(self._buffer)

    def _pause(self) -> None:
        """The thread: until a part of the room is free."""
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
        with self.changed:  # `halt`, which another thread may call, joins only a thread that has begun
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
                except BaseException as error:  # whoever waits for this thread must hear of it
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
        """Nothing: the thread has done it."""

    def halt(self) -> None:
        """End the thread; what it has read stays."""
        with self.changed:
            self._stop = True
            self._wake()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def abandon(self) -> None:
        """As `OperatorNode.abandon`."""
        self._node.abandon()

    def close(self) -> None:
        """End the thread and the node."""
        self._stop = True
        self._node.abandon()
        self.halt()
        self._node.close()

    def state_dict(self) -> dict[str, Any]:
        """The elements that are ahead, and the node's state behind them."""
        self._state_pending = self.wake_requested = True
        try:
            with self._run_lock:
                ahead = save_elements(list(self._buffer))
                return {"ahead": ahead, "ended": self._ended, "node": self._node.state_dict()}
        finally:
            self._state_pending = False
            self._wake()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called."""
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
            context.openings.waits = True

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
        """The size. Raises InvalidArgumentError for none, TypeError for what is no whole number."""
        count = checked_int(size, "buffer_size")
        if count < AUTOTUNE:
            raise invalid(f"buffer_size must be greater than or equal to 0, or AUTOTUNE, not {size}")
        return count


def threads_for(parallel: int, context: Context) -> int:
    """How many threads an operator gets."""
    requested = (os.cpu_count() or 1) if parallel == AUTOTUNE else parallel
    bound = context.options.threading.private_threadpool_size
    return min(requested, bound) if bound else requested


def ahead_max(context: Context) -> int:
    """How many elements may lie ahead where nobody has said it."""
    return AHEAD_SPLITS_MAX if context.has_splits else AHEAD_MAX


def in_order(deterministic: bool | None, context: Context) -> bool:
    """Whether elements keep their order: what the operator says, else the options, else yes."""
    return context.options.deterministic is not False if deterministic is None else deterministic


def checked_parallel(calls: Any, argument: str = "num_parallel_calls") -> int:
    """A number of parallel calls, 0 for None. Raises ValueError for none, TypeError for what is no whole number."""
    if calls is None:
        return 0
    count = checked_int(calls, argument)
    if count < 1 and count != AUTOTUNE:
        raise ValueError(f"`{argument}` must be greater than 0 or AUTOTUNE, not {calls}")
    return count
