"""Measures what the heartbeats of very many workers cost a real dispatcher. The workers only
connect, register and send heartbeats.

The workers are connections of one process, over real sockets with the options of real workers. No
function is scheduled.

    python -m benchmarks.crowd HOST:PORT COUNT

This command prints "ready" when all COUNT workers are registered, and sends heartbeats after it has
read the line "beat".
"""

from __future__ import annotations

import os
import secrets
import select
import subprocess
import sys
import time
from dataclasses import dataclass

import zmq

from benchmarks.roles import processor_s, role
from zmqdist.messages import Beat, Register, Registered
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.dealer import configure
from zmqdist.transport.endpoint import endpoint
from zmqdist.wire.headers import decode, encode
from zmqdist.wire.hello import encode_hello, is_hello, our_hello

WATCH_S = 2.0
SETTLE_S = 0.5
PATIENCE_MS = 30_000


@dataclass(frozen=True)
class Share:
    """Processor time of the dispatcher's process, as a share of one core.

    Attributes:
      connections: the share while the workers are connected and send no heartbeats.
      beats: the share while they send heartbeats.
      beat_s: seconds between two heartbeats of a worker.
    """

    connections: float
    beats: float
    beat_s: float


def watched(count: int) -> Share:
    """Return the processor time that `count` workers cost a dispatcher that does nothing else."""
    with role("dispatcher", "--port", "0") as (pid, address):
        command = [sys.executable, "-m", "benchmarks.crowd", address, str(count)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as crowd:
            assert crowd.stdin is not None
            assert crowd.stdout is not None
            ready = crowd.stdout.readline().split()
            if not ready:
                raise RuntimeError(f"a crowd of {count} did not get as far as being registered")
            time.sleep(SETTLE_S)
            connections = _share(pid)
            crowd.stdin.write("beat\n")
            crowd.stdin.flush()
            time.sleep(SETTLE_S)
            share = Share(connections, _share(pid), float(ready[1]))
            crowd.stdin.close()
    return share


def _share(pid: int) -> float:
    before, start = processor_s(pid), time.perf_counter()
    time.sleep(WATCH_S)
    return (processor_s(pid) - before) / (time.perf_counter() - start)


def main() -> None:
    address, count = sys.argv[1], int(sys.argv[2])
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, count + 16)
        sockets = [_connected(context, address) for _ in range(count)]
        beat_s = max(_registered(socket, number) for number, socket in enumerate(sockets))
        print("ready", beat_s, flush=True)
        if sys.stdin.readline().strip() == "beat":
            _beat(sockets, beat_s)
        context.destroy(0)


def _connected(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    configure(socket)
    Credentials(None, None, False).client(address, "worker").apply(socket, address)
    socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
    socket.connect(endpoint(address))
    return socket


def _registered(socket: zmq.Socket[bytes], number: int) -> float:
    """Send the hello and the registration of one worker. Return the interval at which the
    dispatcher wants its heartbeats."""
    incarnation = secrets.randbits(62) | 1
    socket.send(encode_hello(our_hello("worker", incarnation, f"crowd {number}")))
    socket.send(encode(Register(incarnation, "worker", -1, 1, [], [], os.getpid(), "crowd")))
    while True:
        header = socket.recv()
        if not is_hello(header):
            answer = decode(header, "dispatcher")
            if not isinstance(answer, Registered):
                raise RuntimeError(f"the dispatcher answered {answer}")
            return answer.beat_s


def _beat(sockets: list[zmq.Socket[bytes]], beat_s: float) -> None:
    """Send the heartbeats of the workers one after the other, spread evenly over the interval,
    until standard input is closed."""
    beat = encode(Beat())
    start = time.monotonic()
    sent = 0
    while not select.select(
        [sys.stdin], [], [], max(0.0, start + sent * beat_s / len(sockets) - time.monotonic())
    )[0]:
        socket = sockets[sent % len(sockets)]
        while socket.poll(0):
            socket.recv()
        socket.send(beat)
        sent += 1


if __name__ == "__main__":
    main()
