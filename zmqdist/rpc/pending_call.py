"""A call that its method answers later, without a thread that waits.

Not here: how such a method is registered, and when it is called (service.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from zmqdist import errors
from zmqdist.messages import Reply
from zmqdist.rpc.handler_errors import failed
from zmqdist.rpc.service_protocol import AnsweringService
from zmqdist.rpc.snapshots import pack_result
from zmqdist.transport.calls_machine import ServedCall
from zmqdist.transport.router import Peer
from zmqdist.transport.transfers import Source


class Asked:
    """A call that its method answers later, from any thread. Only the first answer counts; without one its caller waits on.

    Attributes:
      peer: who asks; `peer.role` is what it was let in as, `peer.hello.incarnation` its life.
      due: when its caller stops waiting, on `time.monotonic`; `inf` for never.
    """

    __slots__ = ("_served", "_service", "due", "peer")

    def __init__(self, service: AnsweringService, served: ServedCall, peer: Peer) -> None:
        self._service = service
        self._served = served
        self.peer = peer
        self.due = served.due
        served.on_dropped = partial(service.drop, served)

    def wanted(self) -> bool:
        """Whether its caller still waits."""
        return self._served.wanted(time.monotonic())

    def begun(self) -> None:
        """In the loop: a batched call runs now, and its arguments do not count among those that wait."""
        self._service.begun(self._served)

    def on_dropped(self, fn: Callable[[], None]) -> None:
        """Have `fn` called in the loop when the caller cancels, or its connection ends, before the answer. Not at its deadline."""
        service, served = self._service, self._served

        def dropped() -> None:
            service.drop(served)
            fn()

        served.on_dropped = dropped

    def answer(self, value: Any) -> None:
        """The call has this value. An array in it is a snapshot of this moment."""
        try:
            body, sources = pack_result([value], lends=self.peer.lanes is not None and self.peer.lanes.lends)
        except BaseException as error:
            self.fail(error)
        else:
            self.answer_packed(body, sources)

    def answer_packed(self, body: bytes, sources: Sequence[Source]) -> None:
        """The same for what was packed before."""
        self._service.reply_later(self._served, self.peer, Reply(self._served.id, errors.OK, "", body), sources)

    def fail(self, error: BaseException) -> None:
        """The call has this error, as if its method had raised it."""
        self._service.reply_later(self._served, self.peer, failed(self._served.id, error), ())
