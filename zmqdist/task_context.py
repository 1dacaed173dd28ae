"""What a running function can ask about itself: `zmqdist.cancelled()`, on which worker it is, and what its updates are to be known as.

Whoever runs a function says so here for its thread, or for its process. A worker is known by its index and by how many there are.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Worker: TypeAlias = "Callable[[], tuple[int, int]]"
"""Tells the index of a worker, and how many there are."""

_of_thread = threading.local()
_cancelled_of_process: Callable[[], bool] | None = None
_worker_of_process: Worker | None = None
_once_of_process: _Once | None = None


def enter(cancelled: Callable[[], bool], worker: Worker | None = None) -> None:
    """The present thread begins to run a function.

    Args:
      cancelled: tells whether it should end.
      worker: where it runs, if a coordinator has scheduled it.
    """
    _of_thread.cancelled = cancelled
    _of_thread.worker = worker


def leave() -> None:
    """The present thread runs nothing any more."""
    _of_thread.cancelled = None
    _of_thread.worker = None


def enter_process(cancelled: Callable[[], bool], worker: Worker) -> None:
    """In a slot process one scheduled function runs at a time: threads that it starts may ask, too."""
    global _cancelled_of_process, _worker_of_process
    _cancelled_of_process = cancelled
    _worker_of_process = worker


def cancelled() -> bool:
    """Whether somebody wants the running function to end: its RemoteValue was cancelled, or its round has ended.

    In a method of an RPC server: nobody waits for its answer any more - cancelled, gone, or out of time.

    A function that runs for long may look now and then and return early; what it returns is dropped. In a slot process
    it is otherwise cut off after `cancel_grace_s`; in a thread nobody can end it, so there the others wait for it.

    Returns:
      False outside a function that zmqdist runs.
    """
    is_cancelled = getattr(_of_thread, "cancelled", None) or _cancelled_of_process
    return bool(is_cancelled()) if is_cancelled is not None else False


def scheduled() -> bool:
    """Whether the present thread runs a function that a coordinator has scheduled."""
    return _worker() is not None


def get_current_worker_index() -> int:
    """The index of the worker that runs this: of "worker:3" it is 3, also after that was started again.

    In a scheduled function, and in one that makes a per-worker dataset or resource; also in the threads that they start where slots are
    processes.

    Raises:
      RuntimeError: this does not run on a worker.
    """
    return _worker_position("get_current_worker_index")[0]


def get_num_workers() -> int:
    """How many workers there were when the running function was handed to this one. Indices may be higher where some have left.

    Raises:
      RuntimeError: this does not run on a worker.
    """
    return _worker_position("get_num_workers")[1]


def _worker() -> Worker | None:
    return getattr(_of_thread, "worker", None) or _worker_of_process


def _worker_position(function: str) -> tuple[int, int]:
    worker = _worker()
    if worker is None:
        raise RuntimeError(f"{function}() is for functions that run on a worker: schedule the function that calls it")
    return worker()


@contextmanager
def building(kind: str) -> Iterator[None]:
    """In the present thread something is built that belongs to its worker: "resource" or "dataset"."""
    before, _of_thread.building = being_built(), kind
    try:
        yield
    finally:
        _of_thread.building = before


def being_built() -> str | None:
    """What is being built in the present thread, as `building` was told; None for nothing."""
    return getattr(_of_thread, "building", None)


class _Once:
    """A function whose effects elsewhere are to count once, however often it is run."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.numbers: defaultdict[Hashable, Iterator[int]] = defaultdict(itertools.count)


@contextmanager
def once(key: str) -> Iterator[None]:
    """What the present thread runs is known as `key`, the same each time it is run; so are, in a slot process, the threads it starts."""
    global _once_of_process
    once = _of_thread.once = _Once(key)
    if _worker_of_process is not None:
        _once_of_process = once
    try:
        yield
    finally:
        _of_thread.once = _once_of_process = None


def key_of(subject: Hashable) -> str:
    """A key for the next update of something: the same for the n-th update of it each time this function is run; "" outside of `once`."""
    once = getattr(_of_thread, "once", None) or _once_of_process
    return "" if once is None else f"{once.key}/{subject}.{next(once.numbers[subject])}"


def inherit() -> Callable[[], None]:
    """For threads that a function starts: called in one of them, what this function may ask is true there, too."""
    state = dict(_of_thread.__dict__)
    return lambda: _of_thread.__dict__.update(state)
