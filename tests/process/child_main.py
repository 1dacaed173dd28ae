"""The code of the children of test_bound_children.py."""

from __future__ import annotations

import os
import signal


def main(fd: int) -> int:
    """Read bytes from the descriptor, each of which is an order; the child ends at the end of the
    stream."""
    while word := os.read(fd, 1):
        if word == b"x":
            return 3
        if word == b"r":
            raise ValueError("a child's own mistake")
        if word == b"i":
            os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C at the terminal of the starting process
            os.write(fd, b"i")
        if word == b"f" and not os.fork():
            signal.pause()
        elif word == b"f":
            os.write(fd, b"f")
        if word == b"p":
            os.write(fd, f"{os.getpgid(0)} {os.getsid(0)} {os.getpid()}".encode())
    return 0
