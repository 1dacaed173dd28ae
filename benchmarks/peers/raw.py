"""Bare pyzmq: ROUTER and DEALER over TCP between two processes, without codec and security. Its
figures are the cost of the network."""

from __future__ import annotations

import subprocess
import sys
from functools import cached_property
from typing import Any

from benchmarks.peers.served import System, echoed, run


class Raw(System):
    package = "zmq"

    def version(self) -> str:
        import zmq

        return f"pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}"

    @cached_property
    def _client(self) -> Any:
        from zmqdist.observe.bench import bare_of
        from zmqdist.observe.peer import peer_process

        return self.stack.enter_context(bare_of(self.stack.enter_context(peer_process())))

    def latency(self, count: int) -> list[float]:
        return list(self._client.round_trips(count))

    roundtrip = latency

    def calls(self, count: int, window: int) -> list[float]:
        return [count / self._client.pipelined(count, window)]

    @cached_property
    def _large(self) -> Any:
        """A socket that is connected to an echo process for frames of any size."""
        import zmq

        server = subprocess.Popen(
            [sys.executable, "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert server.stdout is not None
        self.stack.callback(server.communicate)
        context = self.stack.enter_context(zmq.Context())
        socket = self.stack.enter_context(context.socket(zmq.DEALER))
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(server.stdout.readline().decode().strip())
        return socket

    def bandwidth(self, count: int, size: int) -> list[float]:
        import numpy as np

        socket = self._large

        def echo(array: Any) -> Any:
            socket.send(array, copy=False)
            return np.frombuffer(socket.recv(copy=False), np.uint8)

        return echoed(echo, size, count)


ECHO = """
import sys, threading, zmq
with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
    socket.set_hwm(0)
    socket.bind("tcp://127.0.0.1:*")
    print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin, zmq.POLLIN)
    while (ready := dict(poller.poll())) and sys.stdin.fileno() not in ready:
        socket.send_multipart(socket.recv_multipart(copy=False), copy=False)
"""

if __name__ == "__main__":
    run(Raw)
