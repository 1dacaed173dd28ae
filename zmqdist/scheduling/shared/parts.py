"""Parts of servers: what a dispatcher or a worker hosts beside the queue of functions, such as the
data service.

A server gets a function that makes its part, and knows nothing else of the part. Everything here is
called in the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from zmqdist.process.bound_children import BoundChildren
from zmqdist.rpc.internal_client import LoopClient
from zmqdist.rpc.service import RpcService
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.loop import Loop
from zmqdist.transport.security import ServerSecurity


class PartTask(Protocol):
    """Something that the part does at one worker. `moves` says whether other workers continue it
    when the worker is drained."""

    @property
    def moves(self) -> bool: ...


class TaskAtWorker(PartTask, Protocol):
    """A data task, with the names of its job and of its processing mode."""

    @property
    def job(self) -> str: ...

    @property
    def mode(self) -> str: ...


class StreamAtWorker(PartTask, Protocol):
    """A stream of a distributed snapshot, with the folder of the snapshot and its number there."""

    @property
    def path(self) -> str: ...

    @property
    def stream(self) -> int: ...


class DispatcherPart(Protocol):
    """The part of a dispatcher. Its maker gets the service, on which it registers its methods, and
    the loop."""

    def admit(self, address: str) -> None:
        """Raise an OpError if the part refuses the worker with this address."""

    def joined(
        self, name: str, address: str, incarnation: int, tags: tuple[str, ...], *, named: bool
    ) -> None:
        """Record that a worker has registered. `named` says whether its index belongs to it."""

    def lost(self, incarnation: int, *, left: bool) -> None:
        """Record that a worker is lost, or has left."""

    def status(self) -> Any:
        """Return the figures for `zmqdist status`."""

    def tasks_of(self, worker: str) -> Sequence[TaskAtWorker]:
        """Return the unfinished tasks of a worker, for its drain report."""

    def streams_of(self, worker: str) -> Sequence[StreamAtWorker]:
        """Return the streams that a worker writes, for its drain report."""


class WorkerSurroundings(NamedTuple):
    """What the maker of a worker's part gets.

    Attributes:
      service: the service on which the part registers its methods.
      calls: the client for calls of the dispatcher.
      host: the host to which the worker's sockets are bound.
      children: the owner of the worker's zygote; None if everything runs in threads.
    """

    loop: Loop
    service: RpcService
    calls: LoopClient
    dispatcher: str
    credentials: Credentials
    incarnation: int
    host: str
    children: BoundChildren | None


class WorkerPart(Protocol):
    """The part of a worker."""

    def bound(self, address: str, read_at: str, security: ServerSecurity) -> None:
        """Take the worker's address, the address of its second port ("" without one), and the
        security of its ports."""

    def registered(self) -> None:
        """Record that the dispatcher has registered the worker, for the first time or again."""

    def drain(self, then: Callable[[], None]) -> None:
        """Finish the part's tasks, send the last replies, and then call `then`."""

    def refuse(self, then: Callable[[], None]) -> None:
        """Reply to what has been received, refuse what comes later, and then call `then`."""
