"""One process of the ring that collectives.py measures: `python -m benchmarks.ring_member RANK
ADDRESS ...`.

The first half of the addresses are those of the tasks, the second half those of the plain sockets.
When the process is ready, it writes an empty list. It then reads questions, each as a line [what,
bytes, count], and replies to each with a line: the list of the seconds of each piece of work.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

import numpy as np

from zmqdist.tasks.server import Server
from zmqdist.transport.endpoint import split

PIECE = 2 * 2**20
LOOK_S = 60.0


def main(rank: int, addresses: list[str]) -> None:
    size = len(addresses) // 2
    listener = socket.create_server(split(addresses[size + rank]))
    server = Server({"worker": addresses[:size]}, "worker", rank)
    server.all_reduce(0)  # returns when all members have bound their ports
    right = socket.create_connection(split(addresses[size + (rank + 1) % size]))
    left, _ = listener.accept()
    buffers = np.ones(PIECE, np.uint8), np.ones(PIECE, np.uint8)
    print("[]", flush=True)
    for line in sys.stdin:
        what, nbytes, count = json.loads(line)
        value = np.ones(nbytes // 8)
        moved = 2 * (size - 1) * nbytes // size
        times = []
        for _ in range(count):
            server.all_reduce(0)
            start = time.perf_counter()
            if what == "all_reduce":
                server.all_reduce(value)
            elif what == "sockets" or rank in (0, 1):
                sends, receives = what == "sockets" or rank == 0, what == "sockets" or rank == 1
                _move(right if sends else None, left if receives else None, moved, buffers)
            else:
                continue
            times.append(time.perf_counter() - start)
        print(json.dumps(times), flush=True)


def _move(
    right: socket.socket | None,
    left: socket.socket | None,
    nbytes: int,
    buffers: tuple[np.ndarray, np.ndarray],
) -> None:
    """Send `nbytes` bytes, rounded down to whole pieces, to the right, and receive as many from the
    left. None means that a member does not send, or does not receive."""

    def send() -> None:
        assert right is not None
        for _ in range(nbytes // PIECE):
            right.sendall(buffers[0])

    sender = threading.Thread(target=send)
    if right is not None:
        sender.start()
    view = memoryview(buffers[1])
    missing = nbytes // PIECE * PIECE if left is not None else 0
    while missing and left is not None:
        missing -= left.recv_into(view[: min(missing, PIECE)])
    if right is not None:
        sender.join()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
