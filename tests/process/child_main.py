"""What children of test_bound_children.py run."""

from __future__ import annotations

import os
import signal


def main(fd: int) -> int:
    """Do what is read from the descriptor: a byte says what; at its end the child has ended."""
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
