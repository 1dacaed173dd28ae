"""The backend "zmqdist" of joblib: `Parallel` runs on the workers of a cluster. It needs the package
joblib; the import of this module registers the backend.

    >>> import joblib
    >>> import zmqdist.integrations.joblib
    >>> with joblib.parallel_config("zmqdist", target=cluster):
    ...     joblib.Parallel()(joblib.delayed(abs)(number) for number in (-1, 2))
    [1, 2]
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final
from weakref import WeakSet

from zmqdist import errors

try:
    from joblib import parallel_config, register_parallel_backend
    from joblib.parallel import AutoBatchingMixin, ParallelBackendBase
except ImportError as error:
    raise ImportError(errors.needs("zmqdist.integrations.joblib", "joblib")) from error


from zmqdist.limits import INLINE_BYTES_MAX
from zmqdist.scheduling.coordinator.coordinator import (
    ClusterCoordinator,
    independent_coordinator,
)
from zmqdist.scheduling.shared import own_cluster

SHARED_BYTES_MIN: Final = INLINE_BYTES_MAX
"""Arguments of more bytes are pickled once for all functions of a `Parallel`."""
_NUMBERS: Final = frozenset({bool, int, float, complex, type(None)})
GROWTH_MAX: Final = 8
"""How many times as many functions as the batch before it a batch may have."""


class ZmqdistBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc, unused-ignore]
    """Runs the batches of a `joblib.Parallel` on the workers of a cluster.

    A large argument that several functions share is pickled and sent once, as it is when the first
    of them is submitted. A function may use `Parallel(n_jobs=...)` itself: its functions run on the
    same cluster, and it gives the place of its slot back while it waits for them. When a function
    fails, the others are cancelled.

    Args:
      target: the cluster or the address of its dispatcher; None for the cluster of the environment
        (`zmqdist launch`), or in a function for the one that runs it.
      initializer, initargs: each slot calls `initializer(*initargs)` before its first function.
      options: options of the functions, as of `ClusterCoordinator.options`.

    Raises:
      FailedPreconditionError: there is no target.
      UnavailableError: the cluster has no dispatcher.
    """

    supports_retrieve_callback = True
    supports_inner_max_num_threads = True
    default_n_jobs = -1
    # a batch costs less here than in a pool of processes, and short ones spread more evenly
    MIN_IDEAL_BATCH_DURATION = 0.05
    MAX_IDEAL_BATCH_DURATION = 0.5

    def __init__(
        self,
        target: Any = None,
        nesting_level: int | None = None,
        inner_max_num_threads: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        **options: Any,
    ) -> None:
        super().__init__(nesting_level=nesting_level, inner_max_num_threads=inner_max_num_threads)
        self._target, self._options = target, options
        self._initializer, self._initargs = initializer, initargs
        self._lock = threading.Lock()
        self._coordinator: ClusterCoordinator | None = None
        self._place: tuple[int, Any] | None = None
        """The process and the target of the coordinator."""
        self._running: set[Any] = set()
        self._scattered: dict[int, tuple[Any, Any]] = {}
        self._ready: Any = None
        """The initializer, which each slot calls before its first function."""

    def __reduce__(self) -> Any:
        # in a function, the cluster that runs it
        return ZmqdistBackend, (None, self.nesting_level, self.inner_max_num_threads)

    def get_nested_backend(self) -> tuple[ZmqdistBackend, None]:
        level = (self.nesting_level or 0) + 1
        return ZmqdistBackend(self._target, level, self.inner_max_num_threads), None

    def _connected(self) -> ClusterCoordinator:
        with _connecting:
            if self._coordinator is None:
                self._coordinator = self._shared() or independent_coordinator(self._target)
            return self._coordinator

    def _shared(self) -> ClusterCoordinator | None:
        """Return the coordinator of another backend of this program with the same target. Each
        `parallel_config` makes a backend, and a connection takes as long as many calls."""
        if own_cluster.present() is not None:
            return None
        self._place = os.getpid(), self._target
        same = [other._coordinator for other in _backends if other._place == self._place]
        _backends.add(self)
        return next((coordinator for coordinator in same if coordinator is not None), None)

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return how many functions run at a time: -1 means all slots of the cluster."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None or n_jobs > 0:
            return n_jobs or 1
        return max(1, self._connected().slots() + 1 + n_jobs)

    def compute_batch_size(self) -> int:
        """Return how many functions the next batch has. joblib's own rule doubles the number at
        most, which takes dozens of batches, and one costs more here than in a pool of processes.
        """
        size: int = self._effective_batch_size  # type: ignore[has-type, unused-ignore]
        duration = self._smoothed_batch_duration
        larger: int = super().compute_batch_size()
        if larger > size:
            ideal = int(size * self.MIN_IDEAL_BATCH_DURATION / duration)
            larger = self._effective_batch_size = max(larger, min(ideal, GROWTH_MAX * size))
        return larger

    def configure(
        self,
        n_jobs: int = 1,
        parallel: Any = None,
        prefer: str | None = None,
        require: str | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        **_: Any,
    ) -> int:
        """Begin a call. joblib also passes what concerns files that processes map."""
        self.parallel, self._ready = parallel, None
        if initializer is None:
            initializer, initargs = self._initializer, self._initargs
        if initializer is not None:
            self._ready = self._connected().create_per_worker_resource(initializer, initargs)
        return self.effective_n_jobs(n_jobs)

    def submit(self, func: Any, callback: Callable[[Any], object] | None = None) -> Any:
        work = self._connected().options(**self._options)
        items = [
            (
                fn,
                [self._once(value) for value in args],
                {name: self._once(value) for name, value in kwargs.items()},
            )
            for fn, args, kwargs in func.items
        ]
        nested = self.get_nested_backend()
        value = work.submit(_run, self._ready, items, nested, self.inner_max_num_threads)
        self._running.add(value)
        value.add_done_callback(lambda value: self._ended(value, callback))
        return value

    def _ended(self, value: Any, callback: Callable[[Any], object] | None) -> None:
        self._running.discard(value)
        value.exception()  # joblib raises the first error only, and the others are no surprise
        if callback is not None:
            callback(value)

    def _once(self, value: Any) -> Any:
        """Return a large value as a RemoteValue that functions share, any other as it is."""
        if type(value) in _NUMBERS:
            return value
        if (entry := self._scattered.get(id(value))) is not None:
            return entry[1]  # before its size is asked for, which takes pandas milliseconds
        if _size_of(value) <= SHARED_BYTES_MIN:
            return value
        coordinator = self._connected()
        with self._lock:
            if id(value) not in self._scattered:
                # the value is kept, so that no other gets its id
                self._scattered[id(value)] = value, coordinator.scatter(value)
            return self._scattered[id(value)][1]

    def retrieve_result_callback(self, out: Any) -> Any:
        return out.result()

    @contextlib.contextmanager
    def retrieval_context(self) -> Iterator[None]:
        """Wait for functions; in a function give the place of its slot back meanwhile."""
        with own_cluster.waiting():
            yield

    def stop_call(self) -> None:
        self._scattered.clear()

    def terminate(self) -> None:
        self.reset_batch_stats()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        for value in list(self._running):
            value.cancel()


def _size_of(value: Any) -> int:
    """Return about how many bytes a value has."""
    # the arrays of a sparse matrix of SciPy are its attributes
    holder = value.data if type(value).__module__.startswith("scipy.sparse") else value
    nbytes = getattr(holder, "nbytes", None)
    return nbytes if isinstance(nbytes, int) else sys.getsizeof(value, 0)


def _run(
    _ready: object, items: list[Any], nested: tuple[Any, Any], threads: int | None
) -> list[Any]:
    """Run the functions of a batch in a slot."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(parallel_config(backend=nested[0], n_jobs=nested[1]))
        if threads is not None:
            from threadpoolctl import threadpool_limits

            stack.enter_context(threadpool_limits(threads))
        return [fn(*args, **kwargs) for fn, args, kwargs in items]


_connecting = threading.Lock()
_backends: WeakSet[ZmqdistBackend] = WeakSet()
"""The backends of programs, of which those with one target have one coordinator."""

register_parallel_backend("zmqdist", ZmqdistBackend)
