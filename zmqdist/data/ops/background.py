"""Work ahead of the reader, in threads: prefetch, and what parallel map and interleave are made of.

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
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from zmqdist.data.constants import AUTOTUNE
from zmqdist.data.iterators import Context, Failure, Node, load_elements, save_elements
from zmqdist.data.ops.base import Op, operator
from zmqdist.data.structure import READY, element, invalid

if TYPE_CHECKING:
    from zmqdist.data.tree import Tree

PREFETCH_AUTOTUNE = 8
"""Elements: what prefetch(AUTOTUNE) keeps."""

_END = object()


class Ahead:
    """Reads a node in a thread, up to `size` elements ahead; stands in the node's place.

    The thread starts with the first read. `_pulling` is held while an element is on its way from the node to the buffer, so that
    a state is taken between two elements.
    """

    def __init__(self, node: Node, size: int) -> None:
        self._node = node
        self._size = size
        self._buffer: deque[Any] = deque()
        self._changed = threading.Condition()
        self._pulling = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = False
        self._ended = False

    def stream(self) -> Iterator[Any]:
        """The elements from here on; as `Node.stream`, but made anew each time."""
        while (x := self._take()) is not _END:
            if isinstance(x, Failure):
                raise x.error
            yield x

    def ready(self) -> bool:
        """Whether the next element, or the end, is there."""
        if self._thread is None:
            self._start()
        return bool(self._buffer) or self._ended

    def _take(self) -> Any:
        if self._thread is None:
            self._start()
        with self._changed:
            while not self._buffer:
                if self._ended or self._stop:
                    return _END
                self._changed.wait()
            x = self._buffer.popleft()
            if len(self._buffer) == self._size - 1:
                self._changed.notify_all()
            return x

    def _start(self) -> None:
        self._stop = False
        self._thread = threading.Thread(target=self._read, name="zmqdist-data-ahead", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        stream = self._node.stream()
        while True:
            with self._changed:
                while len(self._buffer) >= self._size and not self._stop:
                    self._changed.wait()
                if self._stop or self._ended:
                    return
            with self._pulling:
                try:
                    x = next(stream, _END)
                except Exception as error:
                    self._node.restart()
                    stream = self._node.stream()
                    x = Failure(error)
                with self._changed:
                    if x is _END:
                        self._ended = True
                    else:
                        self._buffer.append(x)
                    if x is _END or len(self._buffer) == 1:
                        self._changed.notify_all()

    def restart(self) -> None:
        """Nothing: the thread has done it."""

    def halt(self) -> None:
        """End the thread; what it has read stays."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def close(self) -> None:
        """End the thread and the node."""
        self.halt()
        self._node.close()

    def state_dict(self) -> dict[str, Any]:
        """The elements that are ahead, and the node's state behind them."""
        with self._pulling:
            return {"ahead": save_elements(list(self._buffer)), "ended": self._ended, "node": self._node.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called."""
        self.halt()
        self._buffer = deque(load_elements(state["ahead"]))
        self._ended = state["ended"]
        self._node.load_state_dict(state["node"])


class _PrefetchNode(Node):
    def __init__(self, dataset: Tree, context: Context) -> None:
        super().__init__(dataset, context)
        size = PREFETCH_AUTOTUNE if self.op.size == AUTOTUNE else self.op.size
        if size and not context.probing:
            self.children = [Ahead(self.children[0], size)]  # type: ignore[list-item]

    def run(self) -> Iterator[Any]:
        return self.source()


@operator("prefetch", _PrefetchNode)
@dataclass(frozen=True)
class Prefetch(Op):
    """Reads `size` elements ahead."""

    size: int

    def per_split(self) -> Fraction | None:
        return Fraction(1)

    @classmethod
    def checked(cls, size: Any) -> int:
        """The size. Raises InvalidArgumentError for none."""
        if size < AUTOTUNE:
            raise invalid(f"buffer_size must be greater than or equal to 0, or AUTOTUNE, not {size}")
        return int(size)


def threads_for(parallel: int, context: Context) -> int:
    """How many threads an operator gets."""
    wanted = (os.cpu_count() or 1) if parallel == AUTOTUNE else parallel
    bound = context.options.threading.private_threadpool_size
    return min(wanted, bound) if bound else wanted


def in_order(deterministic: bool | None, context: Context) -> bool:
    """Whether elements keep their order: what the operator says, else the options, else yes."""
    return context.options.deterministic is not False if deterministic is None else deterministic


def checked_parallel(calls: Any) -> int:
    """A number of parallel calls, 0 for None. Raises ValueError for none."""
    if calls is None:
        return 0
    if calls < 1 and calls != AUTOTUNE:
        raise ValueError(f"`num_parallel_calls` must be greater than 0 or AUTOTUNE, not {calls}")
    return int(calls)


class ParallelMapNode(Node):
    """`pending` are (input, future of the output), in the order of the input; of an input that failed, its failure."""

    def __init__(self, dataset: Tree, context: Context) -> None:
        super().__init__(dataset, context)
        self.threads = threads_for(self.op.parallel, context)
        self.ordered = in_order(self.op.deterministic, context)
        self.pending: deque[tuple[Any, Future[Any]]] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def run(self) -> Iterator[Any]:
        while True:
            while len(self.pending) < self.threads and self._submit_next():
                pass
            if not self.pending:
                return
            if not self.ordered:
                self._bring_ready_first()
            _, future = self.pending.popleft()
            yield future.result()

    def _submit_next(self) -> bool:
        child = self.children[0]
        try:
            for x in child.stream():
                self._submit(x)
                return True
            return False
        except Exception as error:
            child.restart()
            self._submit(Failure(error))
            return True

    def _submit(self, x: Any) -> None:
        if isinstance(x, Failure):
            failed: Future[Any] = Future()
            failed.set_exception(x.error)
            self.pending.append((x, failed))
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, "zmqdist-data-map")
        self.pending.append((x, self._pool.submit(_call, self.op.function.value, x)))

    def _bring_ready_first(self) -> None:
        ready = wait([future for _, future in self.pending], return_when=FIRST_COMPLETED).done
        while self.pending[0][1] not in ready:
            self.pending.rotate(-1)

    def close(self) -> None:
        super().close()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def state(self) -> dict[str, Any]:
        return {"pending": save_elements([x for x, _ in self.pending])}

    def load(self, state: dict[str, Any]) -> None:
        self.pending.clear()
        for x in load_elements(state["pending"]):
            self._submit(x)


def _call(fn: Any, x: Any) -> Any:
    y = fn(*x) if type(x) is tuple else fn(x)
    return y if type(y) in READY else element(y)
