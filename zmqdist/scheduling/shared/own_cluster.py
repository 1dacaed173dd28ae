"""The cluster whose work this process, or this thread, runs. With it a function that schedules
functions finds its own cluster.

Whatever runs the work of programs (a slot, the process of an actor) calls `enter` before it runs
code of users. In a process that runs one program's code at a time all threads see the entry; a slot
that is a thread has an entry of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Final, Protocol

from zmqdist.errors import ResourceExhaustedError
from zmqdist.scheduling.shared import remote_results
from zmqdist.transport.credentials import Credentials


@dataclass(eq=False)
class OwnCluster:
    """The cluster, and the place in it.

    Attributes:
      dispatcher: "host:port" of the dispatcher.
      credentials: the places of the secrets with which this process may schedule work.
      safe_only: returns whether the program whose work runs accepts results in the safe form only.
      parent: returns the lease of the work item that runs now; 0 if none does.
      waits: tells the worker that the function waits (`waiting`).
      at_end: functions to call when this process, or this thread, runs no more work.
    """

    dispatcher: str
    credentials: Credentials
    safe_only: Callable[[], bool]
    parent: Callable[[], int] = int
    waits: Callable[[], AbstractContextManager[object]] = nullcontext
    at_end: list[Callable[[], object]] = field(default_factory=list)

    def end(self) -> None:
        """Record that this process, or this thread, runs no more work."""
        for function in self.at_end:
            function()


class _OfThread(threading.local):
    cluster: OwnCluster | None = None


_of_thread = _OfThread()
_of_process: OwnCluster | None = None


def enter(cluster: OwnCluster, *, whole_process: bool) -> None:
    """Record the cluster of this process, or with `whole_process=False` that of this thread."""
    global _of_process
    if whole_process:
        _of_process = cluster
    else:
        _of_thread.cluster = cluster


def present() -> OwnCluster | None:
    """Return the cluster whose work this thread runs; None in a program of its own."""
    return _of_thread.cluster or _of_process


def parent_of(dispatcher: str) -> int:
    """Return the lease of the work item that this thread runs, if the dispatcher at "host:port" has
    given it; otherwise 0."""
    own = present()
    return own.parent() if own is not None and _same(own.dispatcher, dispatcher) else 0


def _same(first: str, second: str) -> bool:
    return first.replace("localhost:", "127.0.0.1:") == second.replace("localhost:", "127.0.0.1:")


_NO_WAIT: Final = nullcontext()


def waiting() -> AbstractContextManager[object]:
    """Return a context manager for code that waits until other work has ended. A function gives the
    place of its slot back meanwhile. In a program of its own it does nothing.

    Entering it raises ResourceExhaustedError if the worker has no place left for other work.
    """
    own = present()
    return _NO_WAIT if own is None else own.waits()


class ItemLink(Protocol):
    """How a slot asks its worker about the work item that runs. Each method may be called by any
    thread, one at a time.
    """

    def position(self) -> int:
        """Return the position of the item that runs; 0 while none does."""

    def lease(self, position: int) -> int:
        """Ask for the lease of this item; 0 if the worker has dropped it."""

    def wait(self, position: int) -> str:
        """Tell that the function of this item waits. Return why it may not, or ""."""

    def resume(self, position: int) -> None:
        """Tell that the function of this item goes on."""


class Item:
    """The work item that a slot runs, as its functions see it. All threads of a slot's process count
    as parts of the function that runs.
    """

    def __init__(self, link: ItemLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._position = self._lease = self._waits = 0

    def lease(self) -> int:
        """Return the lease of the item; 0 if none runs."""
        with self._lock:
            position = self._present()
            if position and not self._lease:
                self._lease = self._link.lease(position)
            return self._lease

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Give the slot's place back while a thread of the function waits."""
        with self._lock:
            position = self._present()
            if position and not self._waits and (refusal := self._link.wait(position)):
                raise ResourceExhaustedError(refusal)
            self._waits += 1
        try:
            yield
        finally:
            with self._lock:
                if position == self._present():
                    self._waits -= 1
                    if position and not self._waits:
                        self._link.resume(position)

    def _present(self) -> int:
        position = self._link.position()
        if position != self._position:
            self._position, self._lease, self._waits = position, 0, 0
        return position


def of_slot(dispatcher: str, credentials: Credentials, link: ItemLink | None = None) -> OwnCluster:
    """Return the entry of a slot or an actor, whose functions the calling thread will run. An actor
    has no link, because no work item ends with it and it has no place to give back."""
    state = remote_results.of_thread.__dict__  # that of this thread, for all of its threads
    own = OwnCluster(dispatcher, credentials, lambda: bool(state.get("safe_only")))
    if link is not None:
        item = Item(link)
        own.parent, own.waits = item.lease, item.waiting
    return own
