"""`cache_variable_reads()`: a variable is read from its parameter server once, and from then on from here.

Rules
    The first read of a whole variable inside is what all later ones give, also after an assignment; leaving drops it, and the next
    scope reads anew. Single rows (`sparse_read`, `gather_nd`) are never cached.
    The scope is the thread's own, and its replicas'. Around `schedule` it goes with the function: that runs inside one of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

Cache = dict[Hashable, "np.ndarray[Any, Any]"]


class _ThreadState(threading.local):
    cache: Cache | None = None


_thread_state = _ThreadState()


@contextmanager
def cache_variable_reads() -> Iterator[None]:
    """Read each variable once in this scope.

    Raises:
      ValueError: inside such a scope; that one stays as it is.
    """
    if _thread_state.cache is not None:
        raise ValueError("cache_variable_reads() cannot be nested: this thread caches reads already")
    _thread_state.cache = {}
    try:
        yield
    finally:
        _thread_state.cache = None


def current_cache() -> Cache | None:
    """The cache of this thread's scope; None outside one."""
    return _thread_state.cache


def set_cache(cache: Cache | None) -> None:
    """For the threads of replicas: they share the cache of whoever started them."""
    _thread_state.cache = cache


def for_reader(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A cached array for its reader: a copy of one that could be written to, a large (read-only) one as it is."""
    return array.copy() if array.flags.writeable else array


def with_caching(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What to schedule instead of `fn`: inside a scope a function that runs `fn` inside one, too."""
    return fn if _thread_state.cache is None else _Cached(fn)


class _Cached:
    """Pickles as its function; two of the same function are the same to whoever keeps pickles."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self.__qualname__ = getattr(fn, "__qualname__", type(fn).__qualname__)
        self.__module__ = getattr(fn, "__module__", type(fn).__module__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with cache_variable_reads():
            return self._fn(*args, **kwargs)
