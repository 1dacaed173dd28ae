"""The peer of the benchmarks: a process with an RPC server and a bare echo, so that both run under the same conditions.

The process prints the address of the RPC server on one line. It ends when its standard input is closed, which is a pipe from the process
that started it. `zmqdist bench --serve` runs the same two servers by hand.
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
    """Return the argument. The benchmarks call this method."""
    return value


@contextlib.contextmanager
def serving(address: str) -> Iterator[str]:
    """Return a context manager that runs both servers and yields "host:port" of the RPC server. Its method `bare_port` returns the port of
    the bare echo.

    Raises:
      UnknownError: the address could not be bound.
      FailedPreconditionError: other hosts can reach the address, so it needs keys.
    """
    server = Server.create("zmq", address)
    server.register("echo", echo, inline=True)
    server.register("echo_pool", echo)
    server.register("bare_port", lambda: bare.port, inline=True)
    with server:
        bare = BareServer(join_address(split(address)[0], 0))
        try:
            yield server.address
        finally:
            bare.close()


@contextlib.contextmanager
def peer_process() -> Iterator[str]:
    """Return a context manager that runs a peer in a process of its own, on loopback, and yields its "host:port".

    Raises:
      UnavailableError: the process ended before it served; it has written the reason to standard error.
    """
    command = child_command("zmqdist.observe.peer", "127.0.0.1:0")
    # The peer has a session of its own, so that Ctrl-C reaches only this process, which ends the peer by closing its standard input.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise errors.UnavailableError("the benchmark's second process ended before it served; see standard error")
        try:
            yield address
        finally:
            process.stdin.close()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> None:
    """Serve at HOST:PORT (`sys.argv[1]`) until standard input is closed."""
    with serving(sys.argv[1]) as address:
        with contextlib.suppress(BrokenPipeError):  # the benchmark has already ended
            print(address, flush=True)
        sys.stdin.read()
