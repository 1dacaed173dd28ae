"""Packets between a process and a child that it has forked: a socket pair that keeps their limits, from the side of the parent's loop."""

from __future__ import annotations

import socket
from collections.abc import Callable

from zmqdist.transport.loop import Loop


class PacketPipe:
    """The parent's end. All in the loop's thread; it never waits.

    The child's end is a blocking socket; it reads b"" there when this end says `end`, or has gone.

    Args:
      hear: gets each packet of the child. That the child has ended is not told here: whoever has forked it sees that.
      bytes_max: of a packet of the child.

    Attributes:
      theirs: the descriptor for the child, which whoever forks it closes here.
    """

    def __init__(self, loop: Loop, hear: Callable[[bytes], object], bytes_max: int) -> None:
        self._loop = loop
        self._hear = hear
        self._bytes_max = bytes_max
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self.theirs = theirs.detach()
        self._closed = False
        loop.add_fd(self._socket.fileno(), self.drain)

    def send(self, packet: bytes) -> None:
        """Nothing happens where the child has ended."""
        try:
            self._socket.send(packet)
        except OSError:
            pass  # its end is told elsewhere

    def drain(self) -> None:
        """Hear all that the child has said; also when it has ended."""
        while not self._closed:
            try:
                packet = self._socket.recv(self._bytes_max)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._loop.remove_fd(self._socket.fileno())
                return
            self._hear(packet)

    def end(self) -> bool:
        """Tell the child that this was all. False where it has ended."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_fd(self._socket.fileno())
            self._socket.close()
