"""The server side of the benchmarks: an RPC server and a bare echo in one process, so that both run under the same conditions.

The process prints its address on one line and ends when its standard input closes: the process that started it holds the other end of
that pipe. `zmqdist bench --serve` runs the same by hand.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from zmqdist import errors
from zmqdist.child_command import child_command
from zmqdist.rpc import Server
from zmqdist.transport.address import join, split
from zmqdist.transport.pyzmq_echo import BareServer

PATIENCE_S = 30.0


def echo(value: object) -> object:
    """Return the argument: the method that the benchmarks call."""
    return value


@contextlib.contextmanager
def serving(address: str) -> Iterator[str]:
    """Run both servers within this context, which gives "host:port" of the RPC server. Its method `bare_port` returns the echo's port.

    Raises:
      UnknownError: the address could not be bound.
      FailedPreconditionError: other machines can reach the address, so it needs keys.
    """
    server = Server.create("zmq", address)
    server.register("echo", echo, inline=True)
    server.register("echo_pool", echo)
    server.register("bare_port", lambda: bare.port, inline=True)
    with server:
        bare = BareServer(join(split(address)[0], 0))
        try:
            yield server.address
        finally:
            bare.close()


@contextlib.contextmanager
def peer_process() -> Iterator[str]:
    """Run a peer in its own process on loopback within this context, which gives its "host:port".

    Raises:
      UnavailableError: the process did not start; its reason is on standard error.
    """
    command = child_command("zmqdist.observe.peer", "127.0.0.1:0")
    # In a session of its own: Ctrl-C at a terminal is for this process, which ends the peer by closing its standard input.
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
    """Serve at HOST:PORT (`sys.argv[1]`) until standard input closes."""
    with serving(sys.argv[1]) as address:
        with contextlib.suppress(BrokenPipeError):  # the benchmark has already ended
            print(address, flush=True)
        sys.stdin.read()
