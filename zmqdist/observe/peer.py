"""The other end of the benchmarks: an RPC server and a bare echo in one process, so that both meet the same machine.

The process says on one line where they are, and ends when its standard input does: the process that started it holds the other
end of that pipe. `zmqdist bench --serve` runs the same by hand.
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
    """What the benchmarks call."""
    return value


@contextlib.contextmanager
def serving(address: str) -> Iterator[str]:
    """Both servers while entered; gives "host:port" of the RPC server. Its method `bare_port` tells where the bare echo is.

    Raises:
      UnknownError: the address could not be bound.
      FailedPreconditionError: it needs keys.
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
    """A peer in a process of its own on loopback, while entered; gives its "host:port".

    Raises:
      UnavailableError: it did not start; its reason is on standard error.
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
            raise errors.UnavailableError("the benchmark's second process ended before it had begun")
        try:
            yield address
        finally:
            process.stdin.close()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> None:
    """HOST:PORT: serve there until standard input ends."""
    with serving(sys.argv[1]) as address:
        with contextlib.suppress(BrokenPipeError):  # the benchmark has ended already
            print(address, flush=True)
        sys.stdin.read()
