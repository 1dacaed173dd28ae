"""`cache_variable_reads()`: a scope in which each variable is read from its parameter server once.

Rules
    Inside the scope every read of a whole variable returns the value that the first read returned,
    even after an assignment. Another scope reads the variable again. Single rows (`sparse_read`,
    `gather_nd`), `strategy.read`, `read_versioned` and variables of this process are not cached.
    The scope belongs to the thread that entered it, and to the threads of the replicas that this
    thread starts. A function that is scheduled inside the scope runs inside a new scope on the
    worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from zmqdist.training.context import entered, thread_state


@contextmanager
def cache_variable_reads() -> Iterator[None]:
    """Return a context manager that caches reads of variables in the calling thread. Inside it, a
    read returns the cached value even after an assignment.

    >>> count = zd.Variable(1)
    >>> with zd.cache_variable_reads():
    ...     first = count.numpy()
    ...     print(count.numpy() == first)
    True

    Raises:
      ValueError: the thread is inside such a scope already. That scope continues.
    """
    if thread_state.cache is not None:
        raise ValueError(
            "cache_variable_reads() cannot be nested: this thread caches reads already"
        )
    with entered(cache={}):
        yield


def for_reader(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array that a read returns for a cached array: a copy if the cached array is
    writable, otherwise the cached array itself. Large arrays may be read-only.
    """
    return array.copy() if array.flags.writeable else array


def with_caching(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function to schedule for `fn`. If the calling thread is inside
    `cache_variable_reads()`, the returned function runs `fn` inside `cache_variable_reads()` on the
    worker. Otherwise return `fn` itself.
    """
    return fn if thread_state.cache is None else _Cached(fn)


class WrappedFunction:
    """A picklable function that calls `fn` in another way, under the name of `fn`."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self.__qualname__ = getattr(fn, "__qualname__", type(fn).__qualname__)
        self.__module__ = getattr(fn, "__module__", type(fn).__module__)


class _Cached(WrappedFunction):
    """A callable that runs `fn` inside a scope. It has the module and the name of `fn`. Two of
    these callables for one `fn` have equal pickles."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with cache_variable_reads():
            return self._fn(*args, **kwargs)
