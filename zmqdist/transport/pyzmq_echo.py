"""A bare pyzmq echo, server and client. Benchmarks compare zmqdist with it, and no other code uses
it.

Its sockets are ROUTER and DEALER over tcp, as a careful user would write them: no codec, no
security, high-water marks 0. The server does one more thing, so that benchmarks can measure large
payloads: it replies to `SIZED_REQUEST` and a number with one frame of that many bytes. It serves
every process that reaches its port.
"""

from __future__ import annotations

import logging
import threading
from time import perf_counter
from typing import Final

import zmq

from zmqdist.addresses import is_ipv6
from zmqdist.transport.endpoint import endpoint, split

log = logging.getLogger("zmqdist.transport")

SIZED_REQUEST: Final = b"bytes "
REQUEST_BYTES_MAX: Final = 4096
REPLY_BYTES_MAX: Final = 256 * 2**20
REPLY_MS_MAX: Final = 30_000
"""Milliseconds after which a missing reply is an error, because the server has ended."""


class BareServer:
    """An echo server that runs in a thread of its own until it is closed.

    Args:
      address: "host:port"; port 0 takes a free port.

    Attributes:
      port: the bound port.
    """

    def __init__(self, address: str) -> None:
        host, _ = split(address)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        socket.setsockopt(zmq.IPV6, int(is_ipv6(host)))
        socket.bind(endpoint(address))
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        self.port = split(bound.rstrip(b"\0").decode().removeprefix("tcp://"))[1]
        self._thread = threading.Thread(
            target=self._serve, args=(socket,), name="zmqdist-bare-echo", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread and free the port."""
        self._context.term()  # this makes the socket raise ContextTerminated in the server's thread
        self._thread.join()

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        reply = bytearray()
        with socket:
            while True:
                try:
                    frames = socket.recv_multipart()
                    count = _requested_bytes(frames[-1])
                    if count is None:
                        socket.send_multipart(frames)
                    else:
                        if len(reply) != count:
                            reply = bytearray(b"x" * count)
                        socket.send(frames[0], zmq.SNDMORE)
                        socket.send(reply, copy=False)
                except zmq.ZMQError:  # `close` has terminated the context
                    return
                except BaseException:
                    # Memory for the reply may be short, for instance. Only this request gets no
                    # reply.
                    reply = bytearray()
                    log.exception("the bare echo server could not reply")


def _requested_bytes(request: bytes) -> int | None:
    digits = request.removeprefix(SIZED_REQUEST)
    if digits is request or len(digits) > 12 or not digits.isdigit():
        return None
    return min(int(digits), REPLY_BYTES_MAX)


class BareClient:
    """The client of a BareServer, for one thread. Use it in a with-statement.

    Raises (from each method):
      zmq.Again: no reply within REPLY_MS_MAX.
    """

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, REPLY_MS_MAX)
        self._socket.setsockopt(zmq.IPV6, int(is_ipv6(split(address)[0])))
        self._socket.connect(endpoint(address))

    def __enter__(self) -> BareClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()

    def round_trips(self, count: int) -> list[float]:
        """Send `count` small requests one after the other, and return the seconds that each
        took.
        """
        send, receive = self._socket.send, self._socket.recv
        took = []
        for _ in range(count):
            start = perf_counter()
            send(b"24 bytes of small payload")
            receive()
            took.append(perf_counter() - start)
        return took

    def pipelined(self, count: int, window: int) -> float:
        """Send `count` small requests in groups of `window`, and await the replies of each group
        together. Return the seconds for all requests.
        """
        send, receive = self._socket.send, self._socket.recv
        start = perf_counter()
        for first in range(0, count, window):
            batch = min(window, count - first)
            for _ in range(batch):
                send(b"24 bytes of small payload")
            for _ in range(batch):
                receive()
        return perf_counter() - start

    def fetch(self, byte_count: int) -> float:
        """Request one frame of `byte_count` bytes, and return the seconds until it has arrived. The
        frame is not copied."""
        start = perf_counter()
        frame = self.request(SIZED_REQUEST + str(byte_count).encode())
        took = perf_counter() - start
        assert len(frame) == byte_count
        return took

    def request(self, request: bytes) -> memoryview:
        """Send a request, and return its reply without a copy."""
        self._socket.send(request)
        return self._socket.recv(copy=False).buffer
