"""A client with the user's token sends recorded messages of other clients again, in any order."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import zmq

import zmqdist as zd
from tests.campaigns.messages import right, works
from tests.campaigns.proxy import Frames, Pair, Proxy
from tests.scheduling.work import until
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.messages import Message, Refused, Register, RegisterCoordinator
from zmqdist.scheduling.shared.config import WorkerConfig
from zmqdist.transport import keys
from zmqdist.wire.headers import decode
from zmqdist.wire.hello import is_hello

TASKS = 300
REPLAYED = 2000
PATIENCE_S = 60.0


class Recorded:
    """A `harm` that passes every message, and records those to the server."""

    def __init__(self) -> None:
        self.messages: list[Frames] = []

    def __call__(self, pair: Pair, way: str, frames: Frames) -> list[Frames]:
        if way == "up":
            self.messages.append(frames)
        return [frames]


def decoded(header: bytes) -> Message | None:
    """Return the message in a recorded frame; None for a hello."""
    return None if is_hello(header) else decode(header, "recorded")


def replay(address: str, role: str, messages: list[Frames]) -> None:
    """Send recorded messages over a new connection in a role, the hello first. Check that the
    dispatcher refuses them."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 1000
        socket.plain_username = role.encode()
        socket.plain_password = keys.user_token()[0]
        socket.connect(f"tcp://{address}")
        hellos = [each for each in messages if is_hello(each[0])]
        for each in [hellos[0], *(each for each in messages if not is_hello(each[0]))]:
            socket.send_multipart(each)
        received = []
        while socket.poll(500):
            received.append(decoded(socket.recv_multipart()[0]))
        assert any(isinstance(each, Refused) for each in received), "the dispatcher has not replied"


def replaying(seed: int) -> dict[str, Any]:
    """Replay messages of a worker and of a coordinator beside them. Enlist and Register are left
    out: a client that sends them with the number of another one takes its place
    (tests/scheduling/dispatcher/test_strangers.py).
    """
    rng = random.Random(seed)
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor())
        dispatcher = stack.enter_context(zd.DispatchServer())
        links = [stack.enter_context(Proxy(dispatcher.address)) for _ in range(2)]
        recorded = [Recorded(), Recorded()]
        for link, each in zip(links, recorded, strict=True):
            link.harm(each)
        stack.enter_context(zd.WorkerServer(WorkerConfig(links[1].address)))
        coordinator = stack.enter_context(ClusterCoordinator(links[0].address))
        until(lambda: dispatcher.num_workers == 1, "the worker is there")
        values = [coordinator.schedule(works, (number,)) for number in range(TASKS)]
        assert [value.get(PATIENCE_S) for value in values] == [
            right(number) for number in range(TASKS)
        ]
        replaying = []
        for role, each in (("submit", recorded[0]), ("worker", recorded[1])):
            known = [
                frames for frames in each.messages if is_hello(frames[0]) or not _claims(frames[0])
            ]
            again = [known[0], *rng.choices(known[1:], k=REPLAYED // 2)]
            address = dispatcher.address.removeprefix("zmq://")
            replaying.append(threads.submit(replay, address, role, again))
        values = [coordinator.schedule(works, (number,)) for number in range(TASKS)]
        assert [value.get(PATIENCE_S) for value in values] == [
            right(number) for number in range(TASKS)
        ]
        for each in replaying:
            each.result(PATIENCE_S)
        assert dispatcher.num_workers == 1
        assert len(dispatcher.snapshot().coordinators) == 1
    return {"faults": REPLAYED, "tasks": 2 * TASKS, "lost": 0, "doubled": 0, "recovery_s": 0.0}


def _claims(header: bytes) -> bool:
    """Return whether a recorded message is a RegisterCoordinator or a Register."""
    return isinstance(decoded(header), RegisterCoordinator | Register)
