"""The interface of RpcService that streams, batches and pending calls use, so that their modules
need not import it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from zmqdist.errors import OpError
from zmqdist.messages import Reply
from zmqdist.rpc.methods import Method
from zmqdist.transport.calls_machine import ServedCall
from zmqdist.transport.peer import Peer
from zmqdist.transport.transfers import Source


class AnsweringService(Protocol):
    """The functions of RpcService that a method needs in order to reply later. RpcService
    (service.py) documents them."""

    def register_later(
        self, name: str, fn: Callable[..., None], *, roles: frozenset[str] | None = None
    ) -> None: ...

    def allowed(self, peer: Peer, name: str) -> Method: ...

    def submit(
        self, fn: Callable[..., None], *args: Any, refuse: Callable[[OpError], object] | None = None
    ) -> None: ...

    def soon(self, fn: Callable[..., object], *args: Any) -> None: ...

    def set_timer(self, key: Hashable, at: float | None, fn: Callable[[], object]) -> None: ...

    def begun(self, served: ServedCall) -> None: ...

    def drop(self, served: ServedCall) -> None: ...

    def reply_later(
        self, served: ServedCall, peer: Peer, reply: Reply | None, sources: Sequence[Source]
    ) -> None: ...
