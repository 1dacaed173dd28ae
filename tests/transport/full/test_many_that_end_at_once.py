"""Hundreds of connections that end at the same time, as when processes are killed, are all
noticed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import ROOT
from tests.transport.helpers import Served, until
from zmqdist.transport.security import server_security

PROCESSES, CONNECTIONS, ROUNDS = 4, 150, 5

CROWD = """
import sys
import zmq
from zmqdist.transport.dealer import configure
from zmqdist.wire.hello import encode_hello, our_hello
context = zmq.Context()
context.max_sockets = 4096
made = []
for number in range(int(sys.argv[2])):
    socket = context.socket(zmq.DEALER)
    configure(socket)
    socket.connect("tcp://" + sys.argv[1])
    socket.send(encode_hello(our_hello("client", 1, f"one {number}")))
    made.append(socket)
for socket in made:
    assert socket.poll(20_000)
    socket.recv()
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def crowd() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    made: list[subprocess.Popen[str]] = []

    def make(address: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CROWD, address, str(CONNECTIONS)]
        made.append(
            subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        return made[-1]

    yield make
    for process in made:
        process.kill()
        process.communicate()


@pytest.mark.timeout(300)
def test_killed_connections_leave_no_peer(
    serve: Callable[..., Served], crowd: Callable[[str], subprocess.Popen[str]]
) -> None:
    served = serve(server_security("127.0.0.1", insecure=True))
    for round in range(1, ROUNDS + 1):
        processes = [crowd(served.address) for _ in range(PROCESSES)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
        for process in processes:
            process.kill()
        until(lambda count=round * PROCESSES * CONNECTIONS: len(served.gone) == count)  # type: ignore[misc]
        assert served.loop.run(lambda: served.router.peers) == []
