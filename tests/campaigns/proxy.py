"""A link between two ends that a test can harm: a proxy of TCP that knows whole messages of ZeroMQ.

    with Proxy(dispatcher.address) as link:
        worker = zd.WorkerServer(WorkerConfig(link.address))
        link.freeze()          # no byte passes, and no end gets a sign: a cable that was pulled
        link.mend()

What it can do
    freeze: bytes stay where they are, in both directions, and new connections get no reply, until
      `mend`.
    cut: resets each connection, and closes new ones at once, until `mend`.
    forget: drops the bytes of the current connections, silently and for good, as an idle NAT does;
      new connections work.
    readdress: the same, and new connections come from another address, as from a client that has
      moved.
    harm: a function gets each message of one direction with all its frames, and returns the
      messages that pass in its place: none, the same twice, ... It works only without encryption.
      Handshakes and ZeroMQ's own commands, as heartbeats, pass unharmed.

One thread does all of this. Within a connection ZeroMQ's transport never loses, doubles or reorders
messages. So a `harm` that loses or swaps messages shows the effect of a faulty peer, and one that
calls `drop_connection` that of a broken link.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias

GREETING_BYTES: Final = 64
MORE, LONG, COMMAND = 1, 2, 4
PIECE_BYTES: Final = 2**16
ENDS_S: Final = 20.0
LOOPBACK: Final = "127.0.0.1"

Frames: TypeAlias = "list[bytes]"
Harm: TypeAlias = "Callable[[Pair, str, Frames], list[Frames]]"
"""`harm(pair, direction, message)` returns the messages that pass in place of a message; the
direction is "up" (to the server) or "down".

"""


def split_frames(data: bytearray) -> tuple[list[tuple[int, bytes, bytes]], int]:
    """Split the beginning of a ZMTP 3 byte stream, behind its greeting, into complete frames.

    Returns:
      The frames, each as (flags, body, its bytes on the wire), and how many bytes they took.
    """
    found, at = [], 0
    while at + 2 <= len(data):
        flags = data[at]
        head = 9 if flags & LONG else 2
        if at + head > len(data):
            break
        size = int.from_bytes(data[at + 1 : at + head], "big")
        if at + head + size > len(data):
            break
        found.append(
            (flags, bytes(data[at + head : at + head + size]), bytes(data[at : at + head + size]))
        )
        at += head + size
    return found, at


def join_frames(frames: Frames) -> bytes:
    """Return a message as ZMTP 3 sends it."""
    out = bytearray()
    for number, body in enumerate(frames, 1):
        flags = MORE if number < len(frames) else 0
        if len(body) < 256:
            out += bytes((flags, len(body)))
        else:
            out += bytes((flags | LONG,)) + len(body).to_bytes(8, "big")
        out += body
    return bytes(out)


class Pair:
    """One connection through the proxy.

    Attributes:
      number: counts the connections, from 0.
      dead: its bytes are dropped, without a sign to its ends.
    """

    def __init__(
        self, proxy: Proxy, number: int, near: asyncio.StreamWriter, far: asyncio.StreamWriter
    ) -> None:
        self.number = number
        self.dead = False
        self._proxy = proxy
        self._writers = (near, far)
        self._loop = asyncio.get_running_loop()

    def drop_connection(self) -> None:
        """Reset the connection at both ends. Call it in the proxy's thread."""
        for writer in self._writers:
            writer.transport.abort()

    def send_later(self, way: str, frames: Frames, delay_s: float) -> None:
        """Send a message after some seconds, while others pass. Call it in the proxy's thread."""
        near, far = self._writers
        writer = far if way == "up" else near
        self._loop.call_later(
            delay_s, lambda: writer.is_closing() or writer.write(join_frames(frames))
        )

    async def pass_on(
        self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass bytes until one end closes the connection."""
        try:
            head = bytearray()
            while len(head) < GREETING_BYTES:
                data = await reader.read(GREETING_BYTES - len(head))
                if not data:
                    return
                head += data
                await self._write(writer, data)
            rest, message = bytearray(), list[bytes]()
            while data := await reader.read(PIECE_BYTES):
                rest += data
                frames, taken = split_frames(rest)
                del rest[:taken]
                for flags, body, wire in frames:
                    if flags & COMMAND:
                        await self._write(writer, wire)
                        continue
                    message.append(body)
                    if not flags & MORE:
                        whole, message = message, []
                        for each in self._proxy.harmed(self, way, whole):
                            await self._write(writer, join_frames(each))
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            if not self.dead:
                writer.close()

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        await self._proxy.open_gate()
        if not self.dead:
            writer.write(data)
            await writer.drain()


class Proxy:
    """A link through a proxy. Any thread may use it; at the end of the `with` statement all its
    sockets and its thread are gone.

    Attributes:
      address: the address at which it listens, "127.0.0.1:port".
      connections: the number of connections through it so far.
      messages: the number of messages that have passed or were harmed.
    """

    def __init__(self, server: str, source: str = LOOPBACK) -> None:
        """Listen at once.

        Args:
          server: "host:port", also as a `zmq://` target.
          source: the address from which the proxy connects to the server.
        """
        host, _, port = server.removeprefix("zmq://").rpartition(":")
        self.connections = self.messages = 0
        self._server, self._source = (host, int(port)), source
        self._harm: Harm | None = None
        self._cut = False
        self._numbers = itertools.count()
        self._pairs: dict[Pair, tuple[asyncio.Task[None], ...]] = {}
        self._loop = asyncio.new_event_loop()
        self._gate = asyncio.Event()
        self._gate.set()
        self._listener = self._loop.run_until_complete(
            asyncio.start_server(self._serve, LOOPBACK, 0)
        )
        self.address = "{}:{}".format(*self._listener.sockets[0].getsockname()[:2])
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ENDS_S)
        self._loop.close()

    # -- faults of the link ------------------------------------------------------------------------

    def freeze(self) -> None:
        """Hold all bytes until `mend`, without ending a connection."""
        self._do(self._set_frozen())

    def cut(self) -> None:
        """Reset all connections, and close each new one at once, until `mend`."""
        self._do(self._set_cut())

    def mend(self) -> None:
        """Undo `freeze` and `cut`."""
        self._do(self._mend())

    def forget(self) -> None:
        """Drop the bytes of all current connections, for good."""
        self._do(self._forget())

    def readdress(self, source: str) -> None:
        """Do as `forget`, and connect to the server from another address from now on."""
        self._source = source
        self.forget()

    def harm(self, harm: Harm | None) -> None:
        """Have a function decide about each message from now on."""
        self._harm = harm

    # -- in the thread -----------------------------------------------------------------------------

    def harmed(self, pair: Pair, way: str, frames: Frames) -> list[Frames]:
        """Return the messages that pass in place of a message."""
        self.messages += 1
        return [frames] if self._harm is None else self._harm(pair, way, frames)

    async def open_gate(self) -> None:
        """Wait while the link is frozen."""
        await self._gate.wait()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(ENDS_S)

    async def _set_frozen(self) -> None:
        self._gate.clear()

    async def _set_cut(self) -> None:
        self._cut = True
        for pair in self._pairs:
            pair.drop_connection()

    async def _mend(self) -> None:
        self._cut = False
        self._gate.set()

    async def _forget(self) -> None:
        for pair in self._pairs:
            pair.dead = True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.open_gate()
        if self._cut:
            writer.transport.abort()
            return
        try:
            from_server, to_server = await asyncio.open_connection(
                *self._server, local_addr=(self._source, 0), family=socket.AF_INET
            )
        except OSError:
            writer.transport.abort()
            return
        self.connections += 1
        pair = Pair(self, next(self._numbers), writer, to_server)
        ways = (("up", reader, to_server), ("down", from_server, writer))
        tasks = tuple(asyncio.ensure_future(pair.pass_on(*way)) for way in ways)
        self._pairs[pair] = tasks
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:  # the proxy stops
            return
        if not pair.dead:
            del self._pairs[pair]
            pair.drop_connection()

    async def _end(self) -> None:
        self._listener.close()
        self._gate.set()
        for pair, tasks in list(self._pairs.items()):
            for task in tasks:
                task.cancel()
            pair.drop_connection()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
