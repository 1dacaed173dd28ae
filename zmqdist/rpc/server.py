"""A server for RPC alone. It owns its loop and its router, and serves the methods that the program
registers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from zmqdist.background import in_background
from zmqdist.clock import duration
from zmqdist.errors import FailedPreconditionError, InvalidArgumentError
from zmqdist.field_types import checked, checks_options, converted, safe_repr
from zmqdist.limits import GRACE_S, HANDLER_THREADS_MAX
from zmqdist.rpc.client import check_layer, new_incarnation
from zmqdist.rpc.service import RpcService, log
from zmqdist.transport.connection_snapshots import ServerSnapshot
from zmqdist.transport.endpoint import split, strip_scheme
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Router
from zmqdist.transport.security import server_security
from zmqdist.wire.hello import our_hello


class RpcServer:
    """A server of methods; `Server.create` makes it.

    >>> server = zd.rpc.Server.create("zmq", "127.0.0.1:0")
    >>> server.register("double", lambda x: 2 * x)
    >>> server.start()
    >>> server.stop()

    Stop the server with `stop` or a with-statement. A server that the program drops without `stop`
    is stopped in the background.
    """

    @staticmethod
    def create(
        rpc_layer: str,
        address: str,
        *,
        keys_dir: str | os.PathLike[str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
        threads_max: int = HANDLER_THREADS_MAX,
    ) -> ZmqServer:
        """Return a server for `address` that does not listen yet, because `start` opens the port.
        This does not block.

        >>> server = zd.rpc.Server.create("zmq", "127.0.0.1:0")
        >>> server.start()
        >>> server.address.startswith("127.0.0.1:")
        True
        >>> server.stop()

        Args:
          rpc_layer: "zmq".
          address: "host:port"; with port 0, `start` picks a free port.
          keys_dir, token_file: the folder of the keys, or the file of the token. By default the
            folder is ZMQDIST_KEYS_DIR. Without keys, the server checks the user's token, which
            works on loopback only.
          threads_max: how many calls may run at the same time, not counting inline methods and
            streams. Further calls wait, and the server takes calls from its clients in turn.
            Threads are started when they are needed. A handler that waits for another call of this
            server occupies a thread meanwhile, so add one thread for each such handler.

        Returns:
          A ZmqServer. The caller owns the server and stops it.

        Raises:
          ValueError: `rpc_layer` is not "zmq", or `threads_max` is less than 1.
          TypeError: `threads_max` is not an int.
          InvalidArgumentError: `address` is not a valid address.
        """
        check_layer(rpc_layer, "Server", address)
        return ZmqServer(address, keys_dir=keys_dir, token_file=token_file, threads_max=threads_max)

    def register(self, method_name: str, func: Callable[..., Any]) -> None:
        """Register a function as a method (`ZmqServer.register`).

        >>> server = zd.rpc.Server.create("zmq", "127.0.0.1:0")
        >>> server.register("double", lambda x: 2 * x)
        """
        raise NotImplementedError("call this method on the server that Server.create returns")

    def start(self) -> None:
        """Listen on the address (`ZmqServer.start`).

        >>> server = zd.rpc.Server.create("zmq", "127.0.0.1:0")
        >>> server.start()
        >>> server.stop()
        """
        raise NotImplementedError("call this method on the server that Server.create returns")

    def snapshot(self) -> ServerSnapshot:
        """Return the server's current figures (`ZmqServer.snapshot`).

        >>> zd.rpc.Server.create("zmq", "127.0.0.1:0").snapshot().clients
        0
        """
        raise NotImplementedError("call this method on the server that Server.create returns")


@checks_options("serve()")
def serve(
    address: str = "127.0.0.1:0",
    methods: Mapping[str, Any] | Iterable[Any] = (),
    *,
    keys_dir: str | os.PathLike[str] | None = None,
    token_file: str | os.PathLike[str] | None = None,
    threads_max: int = HANDLER_THREADS_MAX,
) -> ZmqServer:
    """Serve functions in the background, and return the server, which listens already.

        >>> import zmqdist as zd
        >>> def double(x):
        ...     return 2 * x
        >>> with zd.rpc.serve(methods={"double": double}) as server:
        ...     with zd.rpc.connect(server.address) as client:
        ...         print(client.double_blocking(21), client.double("ab").get_value())
        42 abab

    The server stops at the end of the with-statement, or with `stop`.

    Args:
      address: "host:port". Port 0 takes a free port, which `address` of the server has.
      methods: functions by name, or functions that are served under their own names.
        `zmqdist.function` gives a function signatures. `Server.create` and `register` set more
        options of a method.
      keys_dir, token_file, threads_max: as for `Server.create`.

    Raises:
      InvalidArgumentError: `address` is not valid, a name or function cannot be a method, or two
        functions have the same name.
      TypeError: `methods` or one of them has a wrong type, or no name.
      UnknownError: the address could not be bound, for instance because the port is in use.
      FailedPreconditionError: the address needs keys that are missing.
    """
    named: list[tuple[str, Any]] = converted(
        "methods", list, methods.items() if isinstance(methods, Mapping) else methods
    )
    if not isinstance(methods, Mapping):
        named = [_with_name(function) for function in named]
    if len({name for name, _ in named}) < len(named):
        names = ", ".join(str(name) for name, _ in named)
        raise InvalidArgumentError(f"two methods have the same name: {names}; give methods a dict")
    server = ZmqServer(address, keys_dir=keys_dir, token_file=token_file, threads_max=threads_max)
    for name, function in named:
        server.register(name, function)
    server.start()
    return server


def _with_name(function: Any) -> tuple[str, Any]:
    name = getattr(function, "__name__", None)
    if name is None:
        raise TypeError(
            f"methods has {function!r:.200}, which has no name: give a dict, as {{'name': "
            f"function}}"
        )
    return name, function


class ZmqServer(RpcServer):
    """The concrete class that `Server.create` returns.

    >>> server = zd.rpc.ZmqServer("127.0.0.1:0")
    >>> server.register("double", lambda x: 2 * x)
    >>> server.start()
    >>> server.stop()
    """

    @checked
    def __init__(
        self,
        address: str,
        *,
        keys_dir: str | os.PathLike[str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
        threads_max: int = HANDLER_THREADS_MAX,
    ) -> None:
        """Create a server that does not listen yet; the arguments are those of `Server.create`."""
        if threads_max < 1:
            raise ValueError(f"threads_max is a number of threads, 1 or more, not {threads_max}")
        self._address = strip_scheme(address)
        self._host, _ = split(self._address)
        self._keys_dir = None if keys_dir is None else os.fspath(keys_dir)
        self._token_file = None if token_file is None else os.fspath(token_file)
        self._service = RpcService(threads_max=threads_max)
        self._loop: Loop | None = None
        self._pid = 0
        self._is_closed = False

    @property
    def address(self) -> str:
        """ "host:port"; after `start`, with the port that the server has bound."""
        return self._address

    @checked
    def register(
        self,
        method_name: str,
        func: Callable[..., Any],
        input_signature: Any = None,
        output_signature: Any = None,
        *,
        inline: bool = False,
        batch: bool = False,
        max_batch: int = 64,
        max_delay_ms: float = 1,
    ) -> None:
        """Register `func` as a method that every authenticated client may call. Use this before
        `start`.

        >>> @zd.function(input_signature=[zd.TensorSpec((None,), np.float64)])
        ... def mean(x):
        ...     return x.mean()
        >>> server = zd.rpc.Server.create("zmq", "127.0.0.1:0")
        >>> server.register("mean", mean)

        The arguments and errors are those of `RpcService.register`, where `method_name` is `name`
        and `func` is `fn`. The function runs in this process, in several threads at the same time
        unless `inline` or `batch` is set. All its runs share the state that `func` captures, so
        guard that state with a lock.
        """
        self._service.register(
            method_name,
            func,
            input_signature,
            output_signature,
            inline=inline,
            batch=batch,
            max_batch=max_batch,
            max_delay_ms=max_delay_ms,
        )

    def start(self) -> None:
        """Listen on the address and serve calls in the background. A second call does nothing.

        >>> server = zd.rpc.Server.create("zmq", "127.0.0.1:0")
        >>> server.start()
        >>> server.stop()

        Raises:
          UnknownError: the address could not be bound, for instance because the port is in use.
          FailedPreconditionError: the address needs keys that are missing, or the server was
            stopped before.
        """
        if self._is_closed:
            raise FailedPreconditionError("this server was stopped: make a new one")
        if self._loop is not None:
            return
        security = server_security(self._host, keys_dir=self._keys_dir, token_file=self._token_file)
        loop = Loop("zmqdist-rpc-server")
        try:
            incarnation = new_incarnation()
            router = Router(
                loop, security, our_hello("server", incarnation, f"rpc server {self._address}")
            )
            address = router.bind(self._address)
            self._service.where = f"rpc server {address}"
            self._service.label = f"rpc {address}"
            self._service.attach(router, loop, incarnation)
            loop.start()
        except BaseException:
            loop.stop()
            raise
        self._pid = os.getpid()
        self._loop, self._address = loop, address

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Refuse new calls, wait at most `grace_s` seconds for the accepted calls, send their
        replies and free the port. Idempotent.

        >>> server = zd.rpc.Server.create("zmq", "127.0.0.1:0")
        >>> server.start()
        >>> server.stop(grace_s=1.0)

        Accepted calls are those that run, and those that wait for a thread and whose arguments have
        arrived. Calls whose arguments have not arrived, and streams, end at once with UNAVAILABLE.

        A handler that runs longer is not interrupted: its caller gets UNAVAILABLE, and its thread
        ends when the handler returns. Do not call `stop` in a handler, because `stop` would wait
        for that handler. In a forked child, `stop` does nothing, because the threads of the server
        are in the parent.
        """
        grace_s = duration("grace_s", grace_s)
        loop, self._loop = self._loop, None
        self._is_closed = True
        if loop is not None and os.getpid() == self._pid:
            _stop(self._service, loop, grace_s, self._address)

    def snapshot(self) -> ServerSnapshot:
        """Return the server's current figures: clients, calls, threads, streams, large arrays in
        flight, messages.

        >>> zd.rpc.Server.create("zmq", "127.0.0.1:0").snapshot().clients
        0

        Any thread may call this. It occupies the server's loop for some microseconds, plus less
        than a microsecond for each client. All figures are zero before `start`. After `stop` they
        describe the moment of the stop.

        Raises:
          DeadlineExceededError: the server's loop did not return the figures within 10 s, because
            an inline method blocks the loop.
          FailedPreconditionError: this is a forked child, and the server runs in its parent.
        """
        if not self._pid:
            return ServerSnapshot()
        if self._pid != os.getpid():
            raise FailedPreconditionError(
                "this server was started before a fork: it serves in the process that started it"
            )
        return self._service.snapshot()

    @safe_repr
    def __repr__(self) -> str:
        return f"at {self._address}: {'stopped' if self._is_closed else 'not started' if self._loop is None else 'serving'}"

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
    # Clients that have read this Goodbye hold new calls for the next server at this address.
    # Without the Goodbye, these calls would fail.
    loop.run(service.say_goodbye, "the server stops")
    if not service.stop(grace_s):
        log.warning(
            "rpc server %s stops although handlers still run after %.1f s", address, grace_s
        )
    loop.stop()
