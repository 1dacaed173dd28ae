"""The client of an RPC server.

Rules
    `client.m(...)` and `call` never wait for the reply; `client.m_blocking(...)` does. Any number
    of threads may share a client. A call that is made while no server is connected waits for a
    server until the call's deadline, and is sent when a server is connected. A call that was in
    flight when the connection ended fails with UNAVAILABLE and is never sent again, because it may
    have run. An error that the client itself can recognise (arguments of the wrong structure, a
    value that cannot travel) is raised when the call is made. Every other error is the outcome of
    the call.

Not here: threads and the socket (transport/channel.py).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from zmqdist.clock import seconds
from zmqdist.errors import InvalidArgumentError, UnavailableError
from zmqdist.field_types import checked, checks_options
from zmqdist.limits import CONNECT_S, NAME_CHARS_MAX
from zmqdist.rpc import payload
from zmqdist.rpc.future import StatusOrResult, as_leaves, as_returned, as_specified, outcome
from zmqdist.rpc.method_list import MethodInfo, decode_methods
from zmqdist.rpc.output_array import OutputArray
from zmqdist.rpc.service import METHODS
from zmqdist.rpc.snapshots import snapshot
from zmqdist.rpc.streams import Stream
from zmqdist.rpc.stubs import check_name, due_after, stubs
from zmqdist.safe_repr import safe_repr
from zmqdist.transport.calls_machine import ClientCall
from zmqdist.transport.channel import Channel
from zmqdist.transport.connection_snapshots import ClientSnapshot
from zmqdist.transport.endpoint import strip_scheme
from zmqdist.transport.security import ClientSecurity, client_security
from zmqdist.wire.hello import our_hello

LAYER: Final = "zmq"


def check_layer(rpc_layer: str, kind: str, address: str) -> None:
    """Raise ValueError unless `rpc_layer` is "zmq". `kind` is "Server" or "Client"."""
    if rpc_layer != LAYER:
        raise ValueError(
            f'Only the "{LAYER}" backend is supported at the moment, given '
            f"rpc_layer={rpc_layer!r}: write "
            f'{kind}.create("{LAYER}", {address!r})'
        )


def new_incarnation() -> int:
    """Return a random number from 1 to 2**63 - 1 for one incarnation of a client or server."""
    return int.from_bytes(os.urandom(8), "big") >> 1 or 1


class RpcClient:
    """A client of one server; `Client.create` makes it.

    >>> server = zd.rpc.Server.create("zmq", "127.0.0.1:0")
    >>> server.register("scale", lambda array, by: array * by)
    >>> server.start()
    >>> client = zd.rpc.Client.create("zmq", server.address)
    >>> client.scale_blocking(np.arange(3), 10)
    array([ 0, 10, 20])
    >>> client.close()
    >>> server.stop()

    Close it with `close` or a with-statement. Closing ends unanswered calls with CANCELLED. A
    client that the program drops is closed when the results of its calls were dropped, too.

    The client has attributes for each method that the server had when the client was made, or at
    the last `refresh`. `m(*args, **kwargs)` returns a StatusOrResult; `m_blocking(*args, **kwargs)`
    waits and returns the value, or raises the error. If the method is a generator function,
    `m(*args, **kwargs)` returns a Stream. The keywords `timeout_in_ms` and `out` (as in `call`) are
    the client's own, so a parameter of the method with such a name must be given by position.
    Arguments that cannot be right (an unknown keyword, a structure other than that of the
    signature) raise TypeError or ValueError before the call is sent. If the name of a method is not
    an identifier, or is an attribute of this class, use `call`, or `stream` for a generator
    function.

    Attributes:
      address: "host:port" of the server.
      name: the name of this client in logs; it need not be unique.
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
        """Connect to a server and fetch its list of methods. This blocks until the server replies.

        >>> server = zd.rpc.Server.create("zmq", "127.0.0.1:0")
        >>> server.register("double", lambda x: 2 * x)
        >>> server.start()
        >>> client = zd.rpc.Client.create("zmq", server.address)
        >>> sorted(client.methods())
        ['double']
        >>> client.close()
        >>> server.stop()

        Args:
          rpc_layer: "zmq".
          address: "host:port" or "zmq://host:port".
          name: the name of this client in logs; it need not be unique.
          timeout_in_ms: default deadline in milliseconds of each call, and of `create` itself. 0 or
            less means no deadline; `create` then waits without limit, and logs for which server it
            waits.
          keys_dir, token_file: the folder of the keys, or the file of the token. By default the
            folder is ZMQDIST_KEYS_DIR. Without keys, the client shows the user's token, which works
            on loopback only.

        Returns:
          A ZmqClient. The caller owns the client and closes it.

        Raises:
          ValueError: `rpc_layer` is not "zmq".
          TypeError, ValueError: `timeout_in_ms` is not a number.
          InvalidArgumentError: `address` is not a valid address.
          DeadlineExceededError: no server replied within `timeout_in_ms`.
          UnavailableError: the connection ended twice before the server had replied.
          UnauthenticatedError: the server refused the key or token, or failed to prove its own
            identity.
          FailedPreconditionError: the server speaks another version of the protocol, or uses
            another kind of security; or the address needs keys that are missing, or the secrets
            cannot be read.
        """
        check_layer(rpc_layer, "Client", address)
        return ZmqClient(
            address, name, True, timeout_in_ms, keys_dir=keys_dir, token_file=token_file
        )

    def call(
        self,
        method_name: str,
        args: Any = None,
        output_specs: Any = None,
        timeout_in_ms: int = 0,
        *,
        out: Any = None,
    ) -> StatusOrResult:
        """Call a method by its name (`ZmqClient.call`).

        >>> client.call("scale", [np.arange(3), 10]).get_value()
        [array([ 0, 10, 20])]
        """
        raise NotImplementedError("call this method on the client that Client.create returns")

    def snapshot(self) -> ClientSnapshot:
        """Return the client's current figures (`ZmqClient.snapshot`).

        >>> client.snapshot().calls >= 0
        True
        """
        raise NotImplementedError("call this method on the client that Client.create returns")


@checks_options("connect()")
def connect(
    address: str,
    *,
    timeout: float | None = CONNECT_S,
    name: str = "",
    keys_dir: str | os.PathLike[str] | None = None,
    token_file: str | os.PathLike[str] | None = None,
) -> ZmqClient:
    """Connect to an RPC server, and return a client with the server's methods.

        >>> import zmqdist as zd
        >>> with zd.rpc.serve(methods=[len]) as server, zd.rpc.connect(server.address) as client:
        ...     pending = client.len("four")  # does not wait
        ...     print(client.len_blocking("three"), pending.get_value())
        5 4

    Args:
      address: "host:port" or "zmq://host:port".
      timeout: seconds to wait for the server; None waits without a limit. Calls have no time limit
        unless they set `timeout_in_ms`.
      name, keys_dir, token_file: as for `Client.create`.

    Raises the errors of `Client.create`: DeadlineExceededError if no server replies in time.
    """
    client = ZmqClient(address, name, keys_dir=keys_dir, token_file=token_file)
    try:
        client.refresh(timeout)
    except BaseException:
        client.close()
        raise
    return client


class ZmqClient(RpcClient):
    """The concrete class that `Client.create` returns.

    >>> client.scale(np.arange(3), 10).get_value()
    array([ 0, 10, 20])

    A program may also make a ZmqClient directly. Without `list_registered_methods`, the constructor
    does not wait for the server.
    """

    @checked
    def __init__(
        self,
        address: str,
        name: str = "",
        list_registered_methods: bool = False,
        timeout_in_ms: float = 0,
        *,
        keys_dir: str | os.PathLike[str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
        security: ClientSecurity | None = None,
    ) -> None:
        """Connect. The arguments are those of `Client.create`. With `list_registered_methods`, wait
        for the server, and raise the errors of `Client.create`.

        `security` overrides `keys_dir` and `token_file`; use it to connect in another role than
        "client".
        """
        due_after(timeout_in_ms, 0)
        self.address = strip_scheme(address)
        name = str(name)  # not one of NumPy, which the wire format refuses
        if len(name) > NAME_CHARS_MAX or not name.isprintable():
            raise InvalidArgumentError(
                f"name wants at most {NAME_CHARS_MAX} printable characters: {name[:40]!a}"
            )
        self.name = name
        self._timeout_in_ms = timeout_in_ms
        if security is None:
            security = client_security(
                self.address, "client", keys_dir=_path(keys_dir), token_file=_path(token_file)
            )
        hello = our_hello(
            "client", new_incarnation(), name or f"{socket.gethostname()}:{os.getpid()}"
        )
        self._channel = Channel(self.address, security, hello)
        self._offered: set[str] = set()
        if list_registered_methods:
            try:
                self.refresh()
            except BaseException:
                self.close()
                raise

    if TYPE_CHECKING:  # for the methods of the server, which only `refresh` learns

        def __getattr__(self, name: str) -> Any: ...

    def call(
        self,
        method_name: str,
        args: Any = None,
        output_specs: Any = None,
        timeout_in_ms: int = 0,
        *,
        out: Any = None,
    ) -> StatusOrResult:
        """Call a method by its name, without waiting for the reply.

        >>> client.call("scale", [np.arange(3), 10]).get_value()
        [array([ 0, 10, 20])]

        Args:
          method_name: the name under which the method is registered, dots included.
          args: None, one value, or any structure of values. Only the leaves are sent, from left to
            right.
          output_specs: a structure of TensorSpec, into which the returned leaves are packed, as
            arrays. Without it, the value is the flat list of the leaves that the function returned,
            or None if the function returned nothing.
          timeout_in_ms: deadline of this call in milliseconds. 0 or less means the client's
            default.
          out: a writable, contiguous array that receives the reply, which must be one array of the
            same shape and dtype. The value of the call is then `out` itself. A large reply from
            another host is received directly into `out`; any other reply is copied into it once. Do
            not touch `out` until the call has ended. If the reply does not fit
            (InvalidArgumentError), `out` is unchanged; after any other error its content is
            undefined.

        Returns:
          A StatusOrResult for the outcome of the call.

        Raises:
          InvalidArgumentError: a value in `args`, or the name, cannot travel; `out` cannot receive
            an array; or both `out` and `output_specs` were given.
          TypeError, ValueError: `method_name` is not a str, or `timeout_in_ms` not a number.
          FailedPreconditionError: the client was made before a fork.
        """
        check_name(method_name)
        if out is not None and output_specs is not None:
            raise InvalidArgumentError(
                "out and output_specs both decide the form of the value: give only one of them"
            )
        output = None if out is None else OutputArray(out)
        read = (
            output.read
            if output
            else as_leaves
            if output_specs is None
            else as_specified(output_specs)
        )
        body, parts = payload.pack([] if args is None else payload.leaves(args))
        sources = snapshot(parts, lends=self._channel.shares_memory, still=False) if parts else ()
        call = ClientCall(method_name, body, sources, due_after(timeout_in_ms, self._timeout_in_ms))
        if output is not None:
            call.allocate = output.room
        self._channel.submit(call)
        return StatusOrResult(self._channel, call, read)

    def stream(self, method_name: str, *args: Any, timeout_in_ms: int = 0) -> Stream:
        """Call a generator function by its name, without waiting. The client's list of methods need
        not contain the name.

        >>> [int(item) for item in client.stream("count", 3)]
        [0, 1, 2]

        Args:
          timeout_in_ms: deadline of the whole stream in milliseconds. 0 or less means the client's
            default.

        Raises:
          InvalidArgumentError: a value in `args`, or the name, cannot travel.
          TypeError, ValueError: `method_name` is not a str, or `timeout_in_ms` not a number.
          FailedPreconditionError: the client was made before a fork.
        """
        check_name(method_name)
        return Stream(
            self._channel, method_name, args, due_after(timeout_in_ms, self._timeout_in_ms)
        )

    def methods(self, timeout: float | None = None) -> dict[str, MethodInfo]:
        """Fetch the methods that the server has now, by name. Blocks for at most `timeout` seconds;
        None means the client's deadline.

        >>> sorted(client.methods())
        ['count', 'scale']

        If the connection ends meanwhile, this method requests the list once more, because a
        restarted server may listen at the address.

        Raises:
          OpError: the error with which the call for the list ended.
        """
        limit_s = seconds(timeout)
        due = due_after(0 if limit_s is None else max(1000 * limit_s, 1), self._timeout_in_ms)
        try:
            return self._methods(due)
        except UnavailableError:
            return self._methods(due)

    def _methods(self, due: float) -> dict[str, MethodInfo]:
        body, _ = payload.pack([])
        call = ClientCall(METHODS, body, (), due)
        self._channel.call_and_wait(call)
        return decode_methods(outcome(call, self.address, as_returned), self.address)

    def refresh(self, timeout: float | None = None) -> None:
        """Fetch the list of the server's methods again, and update this client's attributes to
        match. This blocks as `methods` does, and raises the errors of `methods`.

        >>> client.refresh()
        """
        methods = self.methods(timeout)
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
        # An attribute that remains is overwritten, not deleted and set again, because other threads
        # may use it at any moment.
        for attribute, function in offered.items():
            setattr(self, attribute, function)
        for attribute in before - offered.keys():
            delattr(self, attribute)

    def stubs(self, info: MethodInfo) -> tuple[Callable[..., Any], ...]:
        """Return the functions that call a method: `m` and, unless it is a stream, `m_blocking`.
        `info` is from the result of `methods`. The method's name need not be an identifier.

        >>> _, blocking = client.stubs(client.methods()["scale"])
        >>> blocking(np.arange(3), 10)
        array([ 0, 10, 20])
        """
        return stubs(self._channel, info, self._timeout_in_ms)

    def snapshot(self) -> ClientSnapshot:
        """Return the client's current figures: calls, waiting threads, large arrays in flight,
        messages.

        >>> client.snapshot().calls >= 0
        True

        This is cheap, and any thread may call it.

        Raises:
          FailedPreconditionError: the client was made before a fork.
        """
        return self._channel.snapshot()

    def close(self) -> None:
        """Close the connection. Unanswered calls end with CANCELLED, and later calls with
        FAILED_PRECONDITION. Idempotent.

        >>> server = zd.rpc.Server.create("zmq", "127.0.0.1:0")
        >>> server.start()
        >>> zd.rpc.Client.create("zmq", server.address).close()
        >>> server.stop()
        """
        self._channel.close()

    def __enter__(self) -> ZmqClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @safe_repr
    def __repr__(self) -> str:
        return f"{self.name + ' ' if self.name else ''}of {self.address}{', closed' if self._channel.closed else ''}"


def _path(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.fspath(path)


def channel_of(client: ZmqClient) -> Channel:
    """Return the channel of a client. It is not a public attribute, because a client's attributes
    are for the methods of its server."""
    return client._channel
