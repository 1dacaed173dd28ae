"""State that a running function can read: whether it is cancelled, the worker it runs on, and the
key of its next update of a variable.

A parameter server applies an update once for each key, so that a second attempt of a function does
not repeat its updates. The code that runs a function sets this state, for its thread or for its
process. A worker is described by its index and the number of workers.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from zmqdist.futures import Future

Worker: TypeAlias = "Callable[[], tuple[int, int]]"
"""A function that returns the index of a worker and the number of workers."""

_of_thread = threading.local()
_cancelled_of_process: Callable[[], bool] | None = None
_worker_of_process: Worker | None = None
_update_key_of_process: _UpdateKey | None = None
_sending_thread = 0
_in_batch = False
_update: Future | None = None


def enter(cancelled: Callable[[], bool], worker: Worker | None = None) -> None:
    """Record that this thread begins to run a function.

    Args:
      cancelled: a function that returns whether the running function should end.
      worker: the worker, if a coordinator has scheduled the function.
    """
    _of_thread.cancelled = cancelled
    _of_thread.worker = worker


def leave() -> None:
    """Record that this thread runs no function any more."""
    _of_thread.cancelled = None
    _of_thread.worker = None


def enter_process(cancelled: Callable[[], bool], worker: Worker) -> None:
    """Set the state for all threads of this slot process, so that threads that a function starts
    see the state, too. This is possible because a slot process runs only one scheduled function at
    a time.
    """
    global _cancelled_of_process, _worker_of_process
    _cancelled_of_process = cancelled
    _worker_of_process = worker


def cancelled() -> bool:
    """Return whether the running function should end: its RemoteValue was cancelled, its `timeout`
    has passed, its round or coordinator ends, or its worker has lost the dispatcher.

    >>> def count_until_cancelled():
    ...     number = 0
    ...     while not zd.cancelled() and number < 3:
    ...         number += 1
    ...     return number
    >>> coordinator.submit(count_until_cancelled).result()
    3

    In a handler of an RPC server, True means that the reply is no longer wanted, because the caller
    cancelled or disconnected, or the deadline has passed.

    A function that runs for long may check this now and then and return early; its result is
    dropped. A function in a slot process that does not return is killed after `cancel_grace_s`. A
    function in a thread cannot be killed, so later work waits for it.

    Returns:
      False outside a function that zmqdist runs. If slots are threads, also False in a thread that
      the function has started.
    """
    is_cancelled = getattr(_of_thread, "cancelled", None) or _cancelled_of_process
    return bool(is_cancelled()) if is_cancelled is not None else False


def scheduled() -> bool:
    """Return whether this thread runs a function that a coordinator has scheduled."""
    return _worker() is not None


def get_current_worker_index() -> int:
    """Return the index of the worker that runs this function: 3 for "worker:3", also after that
    worker was restarted.

    >>> index = zd.coordinator.get_current_worker_index
    >>> coordinator.options(worker=1).submit(index).result()
    1

    Call it in a scheduled function, or in a function that creates a per-worker dataset or resource.
    If slots are processes, threads of such a function may call it as well.

    Raises:
      RuntimeError: this thread does not run on a worker.
    """
    return _worker_position("get_current_worker_index")[0]


def get_num_workers() -> int:
    """Return the number of workers. The dispatcher reports it with the functions that it sends to
    this worker, so it may be out of date, and may change while a function runs.

    >>> coordinator.submit(zd.coordinator.get_num_workers).result()
    2

    Indices may be higher than this number after workers have left.

    Raises:
      RuntimeError: this thread does not run on a worker.
    """
    return _worker_position("get_num_workers")[1]


def _worker() -> Worker | None:
    return getattr(_of_thread, "worker", None) or _worker_of_process


def _worker_position(function: str) -> tuple[int, int]:
    worker = _worker()
    if worker is None:
        raise RuntimeError(
            f"{function}() is for functions that run on a worker: schedule the function that "
            f"calls it"
        )
    return worker()


@contextmanager
def under_construction(kind: str) -> Iterator[None]:
    """Return a context manager for the code that creates a per-worker object in this thread. Inside
    this context `resource_kind` returns `kind` ("resource" or "dataset"), so that `Variable` knows
    whether and where a variable may be created.
    """
    before, _of_thread.under_construction = resource_kind(), kind
    try:
        yield
    finally:
        _of_thread.under_construction = before


def resource_kind() -> str | None:
    """Return the kind of the per-worker object that this thread is creating (`under_construction`).
    None means that it creates none."""
    return getattr(_of_thread, "under_construction", None)


class _UpdateKey:
    """The keys for the updates of one function. `key` is equal in each attempt of the function.
    `numbers` counts, for each subject, the updates that this attempt has made.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.numbers: defaultdict[Hashable, Iterator[int]] = defaultdict(itertools.count)


@contextmanager
def update_key(key: str) -> Iterator[None]:
    """Return a context manager in which updates by this thread's function have keys, so that a
    second attempt does not repeat them. `key` must be equal in each attempt of the function. In a
    slot process, the context also applies to threads of the function.
    """
    global _update_key_of_process
    state = _of_thread.update_key = _UpdateKey(key)
    # A slot process runs one function at a time, so all of its threads belong to this function.
    if _worker_of_process is not None:
        _update_key_of_process = state
    try:
        yield
    finally:
        _of_thread.update_key = _update_key_of_process = None


def key_of(subject: Hashable) -> str:
    """Return the key for the next update of `subject` by the function that this thread runs. The
    n-th update of a subject has the same key in each attempt of that function. Outside of a `with
    update_key(...)` block the key is "".
    """
    state = getattr(_of_thread, "update_key", None) or _update_key_of_process
    return "" if state is None else f"{state.key}/{subject}.{next(state.numbers[subject])}"


def leave_in_flight(update: Future) -> None:
    """Wait for an update of a variable. The thread that runs the functions of a slot does not wait:
    the slot begins its next function meanwhile, and reports this function when the update has
    ended.
    """
    global _update
    if threading.get_ident() == _sending_thread:
        _update = update
    else:
        update.get_value()


def settle_update() -> None:
    """Wait for the update that the running function has left in flight. Whatever others can see of
    a function calls this first, so that they see its actions in order. Raises the update's error.
    """
    global _update
    update = _update
    # a request that is repeated comes here while this thread waits for it
    if update is not None and update is not getattr(_of_thread, "settling", None):
        _of_thread.settling = update
        try:
            update.get_value()
        finally:
            _of_thread.settling = None
            if _update is update:
                _update = None


def take_update() -> Future | None:
    """Return the update that the function which has just ended has left in flight."""
    global _update
    update, _update = _update, None
    return update


def leave_updates_in_flight(thread: int, in_batch: bool = False) -> None:
    """Let updates by the functions of this thread stay in flight; 0 means those of no thread.

    Args:
      in_batch: whether another thread soon sends what this one leaves unsent.
    """
    global _sending_thread, _in_batch, _update
    _sending_thread, _in_batch, _update = thread, in_batch, None


def may_send_later() -> bool:
    """Return whether the request for an update of this thread may leave with the next request."""
    return _in_batch and threading.get_ident() == _sending_thread


def inherit() -> Callable[[], None]:
    """Return a function that copies the state of this thread to another thread. Call the returned
    function in that other thread."""
    state = dict(_of_thread.__dict__)
    return lambda: _of_thread.__dict__.update(state)
