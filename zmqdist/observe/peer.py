"""The peer of the benchmarks: a process that runs an RPC server and a bare echo server, so that
both are measured under equal conditions.

The process prints the address of the RPC server on one line. It ends when its standard input, a
pipe from the process that started it, is closed. `zmqdist bench --serve` runs the two servers for a
user who measures between two hosts.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from zmqdist import errors
from zmqdist.addresses import join_address
from zmqdist.child_command import child_command
from zmqdist.rpc import Server
from zmqdist.transport.endpoint import split
from zmqdist.transport.pyzmq_echo import BareServer

PATIENCE_S = 30.0


def echo(value: object) -> object:
    """Return the argument. The benchmarks measure calls of this method."""
    return value


@contextlib.contextmanager
def serving(address: str) -> Iterator[str]:
    """Return a context manager that runs both servers and yields the "host:port" of the RPC server.
    The method `bare_port` of the RPC server returns the port of the bare echo server.

    Raises:
      UnknownError: the address cannot be bound.
      FailedPreconditionError: other hosts can reach the address, so the server would need keys.
    """
    server = Server.create("zmq", address)
    server.register("echo", echo, inline=True)
    server.register("echo_pool", echo)
    server.register("bare_port", lambda: bare.port, inline=True)
    with server, contextlib.closing(BareServer(join_address(split(address)[0], 0))) as bare:
        yield server.address


@contextlib.contextmanager
def peer_process() -> Iterator[str]:
    """Return a context manager that runs a peer on loopback, in a process of its own, and yields
    the peer's "host:port".

    Raises:
      UnavailableError: the process ended before it served. It has written the reason to standard
        error.
    """
    command = child_command("zmqdist.observe.peer", "127.0.0.1:0")
    # The peer has a session of its own, so that Ctrl-C reaches only this process, which ends the
    # peer by closing its standard input.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise errors.UnavailableError(
                "the benchmark's second process ended before it served; see standard error"
            )
        try:
            yield address
        finally:
            process.stdin.close()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> None:
    """Run the peer at HOST:PORT (`sys.argv[1]`) until standard input is closed."""
    with serving(sys.argv[1]) as address:
        with contextlib.suppress(BrokenPipeError):  # the benchmark has already ended
            print(address, flush=True)
        sys.stdin.read()
