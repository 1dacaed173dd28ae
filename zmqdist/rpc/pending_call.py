"""A call whose method replies later, without occupying a thread meanwhile.

Not here: how such a method is registered, and when it runs (service.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from zmqdist import clock as time
from zmqdist import errors
from zmqdist.messages import Reply
from zmqdist.rpc.handler_errors import failed
from zmqdist.rpc.service_protocol import AnsweringService
from zmqdist.rpc.snapshots import pack_result
from zmqdist.transport.calls_machine import ServedCall
from zmqdist.transport.peer import Peer
from zmqdist.transport.transfers import Source


class PendingCall:
    """A call that waits for its method's reply. Any thread may reply, and only the first reply is
    sent.

    Attributes:
      peer: the caller's connection; `peer.role` is the caller's role, `peer.hello.incarnation` the
        caller's incarnation.
      due: when the caller stops waiting, on the clock of `time.monotonic`. `inf` means that the
        call has no deadline.
    """

    __slots__ = ("_served", "_service", "due", "peer")

    def __init__(self, service: AnsweringService, served: ServedCall, peer: Peer) -> None:
        self._service = service
        self._served = served
        self.peer = peer
        self.due = served.due
        served.on_dropped = partial(service.drop, served)

    def wanted(self) -> bool:
        """Return whether the caller still waits for the reply."""
        return self._served.is_wanted(time.monotonic())

    def begun(self) -> None:
        """Record that a batched call has begun to run, so that its arguments no longer count as
        waiting. The loop calls this."""
        self._service.begun(self._served)

    def on_dropped(self, fn: Callable[[], None]) -> None:
        """Have the loop call `fn` if the caller cancels the call or disconnects before the reply.
        The loop does not call `fn` when the call's deadline passes.
        """
        service, served = self._service, self._served

        def dropped() -> None:
            service.drop(served)
            fn()

        served.on_dropped = dropped

    def reply(self, value: Any) -> None:
        """Reply with a value. Later changes of arrays in the value are not sent, because the arrays
        are copied unless they are frozen."""
        try:
            body, sources = pack_result(
                [value], lends=self.peer.bulk is not None and self.peer.bulk.shares_memory
            )
        except BaseException as error:
            self.fail(error)
        else:
            self.reply_packed(body, sources)

    def reply_packed(self, body: bytes, sources: Sequence[Source]) -> None:
        """Reply with a value that `pack_result` has packed."""
        self._service.reply_later(
            self._served, self.peer, Reply(self._served.id, errors.OK, "", body), sources
        )

    def fail(self, error: BaseException) -> None:
        """Reply with an error, as if the method had raised it."""
        self._service.reply_later(self._served, self.peer, failed(self._served.id, error), ())
