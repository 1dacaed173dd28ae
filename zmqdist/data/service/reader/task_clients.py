"""A reader's access to one task, which is in another process (RemoteTask) or in this process
(LocalTask).

`ask(demand, then)` sends a request. `then(kind, value, error)` is called once, in the thread in
which the reply arrives. If the kind is SOME, the consumer's thread calls `open_batch`, which
unpacks `value` into elements. The loop thread does not call it, because unpacking takes time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from zmqdist.data.service import compression
from zmqdist.data.service.elements import unpack
from zmqdist.data.service.local_workers import LocalWorker
from zmqdist.data.service.reader.delivery import FAILED, Demand
from zmqdist.data.service.worker.task_orders import ELEMENTS
from zmqdist.data.service.worker.task_runner import Packed
from zmqdist.errors import OpError, WireError, from_code
from zmqdist.rpc import internal_client
from zmqdist.rpc.client import StatusOrResult, ZmqClient, cancel_unsent, outcome_of
from zmqdist.rpc.handler_errors import code_and_message
from zmqdist.transport.loop import Loop

Then = Callable[[int, Any, OpError | None], object]

CONNECT_S: Final = 1.0
"""Seconds that the first requests to a task wait for the connection. Later requests fail at once if
there is none."""


class RemoteTask:
    """A task of a worker in another process."""

    def __init__(
        self, client: ZmqClient, state: int, task: int, compression: str | None, loop: Loop
    ) -> None:
        self._loop = loop
        self._is_new = True
        self._client = client
        self._state = state
        self._task = task
        self._compression = compression or ""

    def ask(self, demand: Demand, then: Then) -> None:
        args = (self._state, self._task, msgspec.structs.astuple(demand), self._compression)
        try:
            call = internal_client.start(
                self._client, ELEMENTS, *args, waits_for_server=self._is_new
            )
        except OpError as error:  # the client is closed, so report a failed request
            then(FAILED, None, error)
            return
        if self._is_new:
            # the worker starts the task's process when this reader connects
            give_up = partial(_give_up, weakref.ref(call))
            self._loop.set_timer(give_up, self._loop.now() + CONNECT_S, give_up)
        call.add_done_callback(partial(self._answered, then))

    def _answered(self, then: Then, call: StatusOrResult) -> None:
        self._is_new = False
        answer, error = outcome_of(call)
        match answer:
            case (int(kind), value, tag) if error is None:
                then(kind, (self._client.address, value, tag), None)
            case _:
                then(
                    FAILED,
                    None,
                    error
                    or WireError(self._client.address, "not a reply to a request for elements"),
                )


def _give_up(request: weakref.ref[StatusOrResult]) -> None:
    # a timer that referred to the request would keep its elements in memory
    if (call := request()) is not None:
        cancel_unsent(call)


class LocalTask:
    """A task of a worker in this process. Elements are passed by reference, as in a pipeline
    without a data service."""

    def __init__(
        self, worker: LocalWorker, address: str, state: int, task: int, soon: Callable[..., bool]
    ) -> None:
        self._worker = worker
        self._address = address
        self._state = state
        self._task = task
        self._soon = soon

    def ask(self, demand: Demand, then: Then) -> None:
        self._worker.ask(
            self._state, self._task, demand, LocalReply(self._address, self._soon, then)
        )

    def delete(self) -> None:
        """Have the worker delete the task, because this reader is closed. Call this only if no
        other reader reads the task."""
        self._worker.delete(self._task)


class LocalReply:
    """The ElementReply to a reader in this process. It passes the reply to the reader's `then`, and
    sends no message."""

    def __init__(self, address: str, soon: Callable[..., bool], then: Then) -> None:
        self._address = address
        self._then = then
        self.soon = soon
        self.answered = False

    def wanted(self) -> bool:
        return not self.answered

    def answer(self, kind: int, value: Any = None, tag: Any = None) -> None:
        self.answered = True
        if kind == FAILED:
            # An error of user code gets the class and text that it would have if the task were in
            # another process.
            error = value if isinstance(value, OpError) else from_code(*code_and_message(value))
            self._then(kind, None, error)
        elif isinstance(value, Packed):
            self._then(kind, (self._address, value.form(""), tag), None)
        else:
            self._then(kind, (self._address, value, tag, "local"), None)


def open_batch(value: tuple[Any, ...]) -> list[Any]:
    """Return the elements of a reply. Raises WireError if the reply cannot be decoded."""
    if len(value) == 4:
        return value[1]  # type: ignore[no-any-return]
    address, packed, _ = value
    return unpack(compression.decompress_batch(packed, address), address)
