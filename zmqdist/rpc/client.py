"""The client of an RPC server.

Rules
    `client.m(...)` and `call` never wait for the answer, `client.m_blocking(...)` does. Any number of threads may use one client.
    A call made while the server is away waits for it, up to its deadline, and is sent when it is there. A call that was in
    flight when the connection went ends with UNAVAILABLE and is never sent again.
    A mistake that can be seen here - another structure of the arguments, a value that cannot travel - is raised by the call
    itself; all else is the outcome of the call.

Not here: threads and the socket (transport/channel.py).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, Final

from zmqdist.errors import InvalidArgumentError, UnavailableError
from zmqdist.rpc import payload
from zmqdist.rpc.future import StatusOrResult, as_leaves, as_returned, as_specified, outcome
from zmqdist.rpc.method_list import MethodInfo, decode_methods
from zmqdist.rpc.output_array import OutputArray
from zmqdist.rpc.service import METHODS
from zmqdist.rpc.snapshots import snapshot
from zmqdist.rpc.streams import Stream
from zmqdist.rpc.stubs import check_name, due_after, stubs
from zmqdist.transport.address import plain
from zmqdist.transport.calls_machine import ClientCall
from zmqdist.transport.channel import Channel
from zmqdist.transport.figures import ClientSnapshot
from zmqdist.transport.security import ClientSecurity, client_security
from zmqdist.wire.hello import our_hello

LAYER: Final = "zmq"


def check_layer(rpc_layer: str) -> None:
    """Raises ValueError for anything but "zmq"."""
    if rpc_layer != LAYER:
        raise ValueError(f'Only the "{LAYER}" backend is supported at the moment, given {rpc_layer!r}')


def new_incarnation() -> int:
    """A random number for one life of a client or server, 1 to 2**63 - 1."""
    return int.from_bytes(os.urandom(8), "big") >> 1 or 1


class RpcClient:
    """What `Client.create` gives. Close it, use it in a with-statement, or drop it: pending calls then end with CANCELLED.

    Each method that the server had when the client was made, or at the last `refresh`, is an attribute: `m(*args, **kwargs)` gives
    a StatusOrResult, `m_blocking(*args, **kwargs)` the value, or raises; of a generator function, `m(*args, **kwargs)` gives a
    Stream. `timeout_in_ms` and `out` (as in `call`) belong to the client: a parameter of that name is given by position.
    Arguments that cannot be right are a TypeError or ValueError here: a keyword that the function does not have, another
    structure than its signature's. A method whose name is taken by this class, or is no identifier, is reached by `call`.

    Attributes:
      address: "host:port" of the server.
      name: for people; need not be unique.
    """

    address: str
    name: str

    @staticmethod
    def create(
        rpc_layer: str,
        address: str,
        name: str = "",
        timeout_in_ms: int = 0,
        *,
        keys_dir: str | os.PathLike[str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
    ) -> ZmqClient:
        """Connect and ask for the list of methods: waits until the server is up.

        Args:
          rpc_layer: "zmq".
          address: "host:port"; "zmq://host:port" is fine too.
          timeout_in_ms: default deadline of each call, of this one too; 0 or less for none: then it waits for ever, and
            logs whom it waits for.
          keys_dir, token_file: as in `zmqdist.transport.security`; by default the user's token, or ZMQDIST_KEYS_DIR.

        Raises:
          ValueError: another layer.
          InvalidArgumentError: not an address.
          DeadlineExceededError: no server within the time.
          UnauthenticatedError: it refused the key or token, or is not who it should be.
          FailedPreconditionError: it speaks another protocol or security.
        """
        check_layer(rpc_layer)
        return ZmqClient(address, name, True, timeout_in_ms, keys_dir=keys_dir, token_file=token_file)

    def call(
        self, method_name: str, args: Any = None, output_specs: Any = None, timeout_in_ms: int = 0, *, out: Any = None
    ) -> StatusOrResult:
        """Call any method by its name; see ZmqClient."""
        raise NotImplementedError("made by Client.create")

    def snapshot(self) -> ClientSnapshot:
        """Figures of now; see ZmqClient."""
        raise NotImplementedError("made by Client.create")


class ZmqClient(RpcClient):
    """The class form of `Client.create`; without the list of methods it returns at once, server or not."""

    def __init__(
        self,
        address: str,
        name: str = "",
        list_registered_methods: bool = False,
        timeout_in_ms: int = 0,
        *,
        keys_dir: str | os.PathLike[str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
        security: ClientSecurity | None = None,
    ) -> None:
        """See `Client.create`; with `list_registered_methods` it waits and raises as that does.

        `security` stands above `keys_dir` and `token_file`: for another role than "client".
        """
        due_after(timeout_in_ms, 0)
        self.address = plain(address)
        self.name = name
        self._timeout_in_ms = timeout_in_ms
        if security is None:
            security = client_security(self.address, "client", keys_dir=_path(keys_dir), token_file=_path(token_file))
        hello = our_hello("client", new_incarnation(), name or f"{socket.gethostname()}:{os.getpid()}")
        self._channel = Channel(self.address, security, hello)
        self._offered: set[str] = set()
        if list_registered_methods:
            try:
                self.refresh()
            except BaseException:
                self.close()
                raise

    def call(
        self, method_name: str, args: Any = None, output_specs: Any = None, timeout_in_ms: int = 0, *, out: Any = None
    ) -> StatusOrResult:
        """Ask; does not wait.

        Args:
          args: None, one value, or any structure of them; only its leaves count, from left to right.
          output_specs: a structure of TensorSpec that the value is packed into, as arrays. None: the value is the flat list
            of what the function returned, None when that was nothing.
          timeout_in_ms: deadline of this call; 0 or less: the client's default.
          out: a writable, contiguous array: the value is `out` itself, with the answer in it, which must be one array of the
            same shape and dtype. Large ones are received straight into it. Leave it alone until the call has ended. When the
            answer does not fit (InvalidArgumentError) it is untouched; after any other error its content is undefined.

        Raises:
          InvalidArgumentError: something in `args` or the name cannot travel, nothing can be received into `out`, or `out`
            and `output_specs` were both given.
          TypeError, ValueError: `method_name` is not a str, or `timeout_in_ms` no number.
        """
        check_name(method_name)
        if out is not None and output_specs is not None:
            raise InvalidArgumentError("out and output_specs both say what the value is: give one of them")
        output = None if out is None else OutputArray(out)
        read = output.read if output else as_leaves if output_specs is None else as_specified(output_specs)
        body, parts = payload.pack([] if args is None else payload.leaves(args))
        sources = snapshot(parts, lends=self._channel.lends, still=False) if parts else ()
        call = ClientCall(method_name, body, sources, due_after(timeout_in_ms, self._timeout_in_ms))
        if output is not None:
            call.room = output.room
        self._channel.call(call)
        return StatusOrResult(self._channel, call, read)

    def stream(self, method_name: str, *args: Any, timeout_in_ms: int = 0) -> Stream:
        """Call a generator function by its name, listed or not.

        Args:
          timeout_in_ms: for the whole stream; 0 or less: the client's default.

        Raises:
          InvalidArgumentError: something in `args` or the name cannot travel.
          TypeError, ValueError: `method_name` is not a str, or `timeout_in_ms` no number.
        """
        check_name(method_name)
        return Stream(self._channel, method_name, args, due_after(timeout_in_ms, self._timeout_in_ms))

    def methods(self) -> dict[str, MethodInfo]:
        """Ask the server for its methods, and wait: what it has now, by name.

        Where the connection goes meanwhile it asks once more, since a server that was started anew may be there.

        Raises:
          OpError: what the call ended with.
        """
        due = due_after(0, self._timeout_in_ms)
        try:
            return self._methods(due)
        except UnavailableError:
            return self._methods(due)

    def _methods(self, due: float) -> dict[str, MethodInfo]:
        body, _ = payload.pack([])
        call = ClientCall(METHODS, body, (), due)
        self._channel.ask(call)
        return decode_methods(outcome(call, self.address, as_returned), self.address)

    def refresh(self) -> None:
        """Ask for the methods again, and have attributes for those that the server has now. Waits and raises as `methods`."""
        methods = self.methods()
        offered: dict[str, Callable[..., Any]] = {}
        for name, info in methods.items():
            if not name.isidentifier():
                continue
            functions = self.stubs(info)
            for attribute, function in zip((name, f"{name}_blocking"), functions, strict=False):
                reserved = hasattr(self, attribute) and attribute not in self._offered
                if not reserved and (attribute == name or attribute not in methods):
                    offered[attribute] = function
        before, self._offered = self._offered, set(offered)
        for attribute, function in offered.items():  # at no moment without one that stays: others are calling it
            setattr(self, attribute, function)
        for attribute in before - offered.keys():
            delattr(self, attribute)

    def stubs(self, info: MethodInfo) -> tuple[Callable[..., Any], ...]:
        """`m`, and `m_blocking` unless it streams, of a method that `methods` told of: also where its name is no attribute."""
        return stubs(self._channel, info, self._timeout_in_ms)

    def snapshot(self) -> ClientSnapshot:
        """Figures of now, for those who operate it: calls, threads that wait, large arrays on the way, messages.

        Cheap, and from any thread.

        Raises:
          FailedPreconditionError: the client was made before a fork.
        """
        return self._channel.snapshot()

    def close(self) -> None:
        """End the connection; pending calls end with CANCELLED. Idempotent."""
        self._channel.close()

    def __enter__(self) -> ZmqClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name + ' ' if self.name else ''}of {self.address}>"


def _path(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.fspath(path)


def channel_of(client: ZmqClient) -> Channel:
    """Its channel. No attribute: those are for methods of its server."""
    return client._channel
