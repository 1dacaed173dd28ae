"""Measures what the heartbeats of very many workers cost a real dispatcher. The workers only
connect, register and send heartbeats.

The workers are connections of one process, over real sockets with the options of real workers. No
function is scheduled.

    python -m benchmarks.crowd HOST:PORT COUNT

This command prints "ready" when all COUNT workers are registered. It sends the heartbeats of idle
workers after it has read the line "idle", and those of workers with work after the line "beat".
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
from zmqdist.limits import HEARTBEAT_SERVER_S
from zmqdist.messages import Beat, Register, Registered
from zmqdist.scheduling.dispatcher.membership_and_leases import IDLE_BEAT_S_PER_WORKER
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
      idle: the share while the workers send the heartbeats of idle workers.
      beats: the share while they send those of workers with work.
      beat_s: seconds between two heartbeats of a worker with work.
    """

    idle: float
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
            shares = []
            for line in ("idle\n", "beat\n"):
                crowd.stdin.write(line)
                crowd.stdin.flush()
                time.sleep(SETTLE_S)
                shares.append(_share(pid))
            crowd.stdin.close()
    return Share(*shares, float(ready[1]))


def _share(pid: int) -> float:
    before, start = processor_s(pid), time.perf_counter()
    time.sleep(WATCH_S)
    return (processor_s(pid) - before) / (time.perf_counter() - start)


def main() -> None:
    address, count = sys.argv[1], int(sys.argv[2])
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, count + 16)
        sockets = [_connected(context, address) for _ in range(count)]
        replies = [_registered(socket, number) for number, socket in enumerate(sockets)]
        beat_s = max(reply.beat_s for reply in replies)
        print("ready", beat_s, flush=True)
        for line in sys.stdin:
            _beat(sockets, IDLE_BEAT_S_PER_WORKER * count if line == "idle\n" else beat_s)
        context.destroy(0)


def _connected(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    configure(socket, HEARTBEAT_SERVER_S)
    Credentials(None, None, False).client(address, "worker").apply(socket, address)
    socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
    socket.connect(endpoint(address))
    return socket


def _registered(socket: zmq.Socket[bytes], number: int) -> Registered:
    """Send the hello and the registration of one worker. Return the dispatcher's reply."""
    incarnation = secrets.randbits(62) | 1
    socket.send(encode_hello(our_hello("worker", incarnation, f"crowd {number}")))
    socket.send(encode(Register(incarnation, "worker", -1, 1, [], [], os.getpid(), "crowd")))
    while True:
        header = socket.recv()
        if not is_hello(header):
            answer = decode(header, "dispatcher")
            if not isinstance(answer, Registered):
                raise RuntimeError(f"the dispatcher answered {answer}")
            return answer


def _beat(sockets: list[zmq.Socket[bytes]], beat_s: float) -> None:
    """Send the heartbeats of the workers one after the other, spread evenly over the interval,
    until the next line of standard input or its end."""
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
