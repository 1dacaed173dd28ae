"""An RPC server of its own: a loop, a router and the methods behind it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from zmqdist.background import in_background
from zmqdist.errors import FailedPreconditionError
from zmqdist.limits import GRACE_S, HANDLER_THREADS_MAX
from zmqdist.rpc.client import check_layer, new_incarnation
from zmqdist.rpc.service import RpcService, log
from zmqdist.transport.address import plain, split
from zmqdist.transport.figures import ServerSnapshot
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Router
from zmqdist.transport.security import server_security
from zmqdist.wire.hello import our_hello


class RpcServer:
    """What `Server.create` gives. Stop it, use it in a with-statement, or drop it: that stops it in the background."""

    @staticmethod
    def create(
        rpc_layer: str,
        address: str,
        *,
        keys_dir: str | os.PathLike[str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
        threads_max: int = HANDLER_THREADS_MAX,
    ) -> ZmqServer:
        """A server that will listen on `address`. Opens no port and waits for nothing.

        Args:
          rpc_layer: "zmq".
          address: "host:port"; port 0 takes a free one at `start`.
          keys_dir, token_file: as in `zmqdist.transport.security`; by default the user's token on loopback, and ZMQDIST_KEYS_DIR.
          threads_max: calls that run at a time, besides those of inline methods and streams; the others wait, and their clients have
            turns. Threads are made as they are needed. Handlers that wait for other calls of this server need as many more.

        Raises:
          ValueError: another layer, or `threads_max` is less than 1.
          TypeError: `threads_max` is no int.
          InvalidArgumentError: not an address.
        """
        check_layer(rpc_layer)
        return ZmqServer(address, keys_dir=keys_dir, token_file=token_file, threads_max=threads_max)

    def register(self, name: str, fn: Callable[..., Any]) -> None:
        """Offer a function; see ZmqServer."""
        raise NotImplementedError("made by Server.create")

    def start(self) -> None:
        """Listen; see ZmqServer."""
        raise NotImplementedError("made by Server.create")

    def snapshot(self) -> ServerSnapshot:
        """Figures of now; see ZmqServer."""
        raise NotImplementedError("made by Server.create")


class ZmqServer(RpcServer):
    """The class form of `Server.create`."""

    def __init__(
        self,
        address: str,
        *,
        keys_dir: str | os.PathLike[str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
        threads_max: int = HANDLER_THREADS_MAX,
    ) -> None:
        """See `Server.create`."""
        if type(threads_max) is not int:
            raise TypeError(f"threads_max is a number of threads, an int, not {type(threads_max).__name__}")
        if threads_max < 1:
            raise ValueError(f"threads_max is a number of threads, 1 or more, not {threads_max}")
        self._address = plain(address)
        self._host, _ = split(self._address)
        self._keys_dir = None if keys_dir is None else os.fspath(keys_dir)
        self._token_file = None if token_file is None else os.fspath(token_file)
        self._service = RpcService(threads_max=threads_max)
        self._loop: Loop | None = None
        self._pid = 0
        self._stopped = False

    @property
    def address(self) -> str:
        """ "host:port", after `start` with the real port."""
        return self._address

    def register(
        self,
        name: str,
        fn: Callable[..., Any],
        input_signature: Any = None,
        output_signature: Any = None,
        *,
        inline: bool = False,
        batch: bool = False,
        max_batch: int = 64,
        max_delay_ms: float = 1,
    ) -> None:
        """Offer a function under a name, to everybody who is let in. Arguments and errors: `RpcService.register`.

        It runs here, in threads, many calls at a time, and what it captures is shared by all callers: guard its state.
        """
        self._service.register(
            name,
            fn,
            input_signature,
            output_signature,
            inline=inline,
            batch=batch,
            max_batch=max_batch,
            max_delay_ms=max_delay_ms,
        )

    def start(self) -> None:
        """Listen, and serve in the background. A second start does nothing.

        Raises:
          UnknownError: the address could not be bound, for instance because the port is in use.
          FailedPreconditionError: the address needs keys, or the server was stopped before.
        """
        if self._stopped:
            raise FailedPreconditionError("this server was stopped: make a new one")
        if self._loop is not None:
            return
        security = server_security(self._host, keys_dir=self._keys_dir, token_file=self._token_file)
        loop = Loop("zmqdist-rpc-server")
        try:
            incarnation = new_incarnation()
            router = Router(loop, security, our_hello("server", incarnation, f"rpc server {self._address}"))
            address = router.bind(self._address)
            self._service.where = f"rpc server {address}"
            self._service.attach(router, loop, incarnation)
            loop.start()
        except BaseException:
            loop.stop()
            raise
        self._pid = os.getpid()
        self._loop, self._address = loop, address

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Refuse new calls, wait for those that run (at most `grace_s` seconds), answer them, free the port. Idempotent.

        A handler that runs longer cannot be cut off: its callers get UNAVAILABLE, its thread ends when it does. Not to be
        called by a handler. In a forked child, which has none of its threads, it does nothing.
        """
        loop, self._loop = self._loop, None
        self._stopped = True
        if loop is not None and os.getpid() == self._pid:
            _stop(self._service, loop, grace_s, self._address)

    def snapshot(self) -> ServerSnapshot:
        """Figures of now, for those who operate it: clients, calls, threads, streams, large arrays on the way, messages.

        From any thread. Cheap: microseconds in the server's loop, and less than one for each client. Zeros before `start`; after `stop`
        what there was at the end.

        Raises:
          DeadlineExceededError: the loop did not answer within seconds: an inline method keeps it.
          FailedPreconditionError: in a forked child, which has none of the server's threads.
        """
        if not self._pid:
            return ServerSnapshot()
        if self._pid != os.getpid():
            raise FailedPreconditionError(
                "this server was started before a fork: it serves in the process that started it"
            )
        return self._service.snapshot()

    def __enter__(self) -> ZmqServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __del__(self) -> None:
        loop = self.__dict__.get("_loop")
        if loop is not None and os.getpid() == self._pid:
            in_background("zmqdist-rpc-stop", _stop, self._service, loop, GRACE_S, self._address)


def _stop(service: RpcService, loop: Loop, grace_s: float, address: str) -> None:
    loop.run(service.say_goodbye, "the server stops")  # their new calls wait for the next server instead of failing
    if not service.stop(grace_s):
        log.warning("rpc server %s stops although handlers still run after %.1f s", address, grace_s)
    loop.stop()
