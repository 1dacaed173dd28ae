"""ZeroMQ with nothing around it: what `zmqdist bench` compares zmqdist with, in the same run.

An echo server on a ROUTER and a client on a DEALER, one message a call, no security, no framework. Not for anything else.
"""

from __future__ import annotations

import sys

import zmq


def serve() -> None:
    """`python -m zmqdist.net.bare`: say the port, then echo until standard input closes."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.set_hwm(0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    print(port, flush=True)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if sys.stdin.fileno() in ready:
            break
        socket.send_multipart(socket.recv_multipart(copy=False), copy=False)
    context.destroy(linger=0)


class BareClient:
    """The other end: `call` waits for its answer, `many` sends all before it reads."""

    def __init__(self, port: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def call(self, payload: bytes) -> int:
        """Bytes of the answer. Large ones are not copied on the way into the socket and out of it."""
        if len(payload) < 65536:
            self._socket.send(payload)
            return len(self._socket.recv())
        self._socket.send(payload, copy=False)
        return len(self._socket.recv(copy=False))

    def many(self, payload: bytes, count: int) -> None:
        for _ in range(count):
            self._socket.send(payload)
        for _ in range(count):
            self._socket.recv()

    def close(self) -> None:
        self._context.destroy(linger=0)


if __name__ == "__main__":
    serve()
