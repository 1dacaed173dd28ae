"""The reply to a reader in another process. It is sent by RPC, and compressed as the reader
requested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zmqdist.data.service.batch_compression import compress_batch
from zmqdist.data.service.elements import pack
from zmqdist.data.service.reader.delivery import END, SKIP, SOME
from zmqdist.data.service.worker.element_replies import Packed
from zmqdist.errors import OpError
from zmqdist.rpc.service import PendingCall
from zmqdist.transport.loop import Loop


class RemoteReply:
    """The ElementReply to a reader in another process. It is sent as the reply to the reader's RPC
    call."""

    def __init__(self, call: PendingCall, loop: Loop, codec: str) -> None:
        self._call = call
        self._loop = loop
        self._codec = codec
        self.answered = False

    def wanted(self) -> bool:
        return self._call.wanted()

    def soon(self, fn: Callable[[], None]) -> bool:
        try:
            self._loop.call_soon(fn)
        except OpError:  # the loop has ended, because the worker has stopped
            return False
        return True

    def elements(self, elements: list[Any], tag: Any = None) -> None:
        self._pack(lambda: compress_batch(pack(elements), self._codec), tag)

    def packed(self, batch: Packed) -> None:
        self._pack(lambda: batch.form(self._codec), None)

    def _pack(self, batch: Callable[[], Any], tag: Any) -> None:
        try:
            value = batch()
        except BaseException as error:
            self.fail(error)
        else:
            self._answer(SOME, value, tag)

    def end(self) -> None:
        self._answer(END)

    def skip(self, tag: Any = None) -> None:
        self._answer(SKIP, None, tag)

    def _answer(self, kind: int, value: Any = None, tag: Any = None) -> None:
        self.answered = True
        self._call.reply((kind, value, tag))

    def fail(self, error: BaseException) -> None:
        self.answered = True
        self._call.fail(error)
