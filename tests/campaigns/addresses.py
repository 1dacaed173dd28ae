"""Clients whose address changes, and links that forget their connections: how long until an end
notices, and until calls succeed again."""

from __future__ import annotations

import random
import threading
import time
from contextlib import ExitStack
from typing import Any

import zmqdist as zd
from tests.campaigns.proxy import Proxy
from tests.scheduling.work import until
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig

PATIENCE_S = 60.0
TASKS = 200
TIMES = 3


def address(rng: random.Random) -> str:
    """Return another address of the loopback network."""
    return f"127.0.{rng.randrange(1, 255)}.{rng.randrange(2, 255)}"


def calls(seed: int) -> dict[str, Any]:
    """Run a client of an RPC server whose link forgets its connections, with a call in flight or
    without.

    Returns:
      Figures: `noticed_s` until the call in flight has failed, `recovery_s` until the next call has
        got its reply.
    """
    rng = random.Random(seed)
    noticed, recovery = 0.0, 0.0
    with ExitStack() as stack:
        server = zd.rpc.Server.create("zmq", "127.0.0.1:0")
        stack.callback(server.stop)
        runs = 0
        request_seen = threading.Event()
        goes = threading.Event()

        def waits() -> int:
            request_seen.set()
            goes.wait(PATIENCE_S)
            return 1

        def adds(x: int) -> int:
            nonlocal runs
            runs += 1
            return x + 1

        server.register("waits", waits)
        server.register("adds", adds)
        server.start()
        link = stack.enter_context(Proxy(server.address))
        client = stack.enter_context(zd.rpc.Client.create("zmq", link.address))
        answered = 0
        for turn in range(TIMES):
            assert client.adds_blocking(turn) == turn + 1
            request_seen.clear()
            goes.clear()
            in_flight = client.waits() if turn % 2 == 0 else None
            if in_flight is not None:
                assert request_seen.wait(PATIENCE_S)
            else:
                # the connection is idle: the link forgets it without a sign
                time.sleep(rng.uniform(0.0, 3.0))
            begun = time.monotonic()
            if rng.random() < 0.5:
                link.forget()
            else:
                link.readdress(address(rng))
            if in_flight is not None:
                code = in_flight.get_error()[0]
                assert code == errors.UNAVAILABLE, code
                noticed = max(noticed, time.monotonic() - begun)
            goes.set()
            while True:
                result = client.adds(7)
                code = result.get_error()[0]
                if code == errors.OK:
                    assert result.get_value() == 8
                    break
                # The call was sent before the loss was noticed: it fails, and is never sent twice.
                assert code == errors.UNAVAILABLE, code
                noticed = max(noticed, time.monotonic() - begun)
            recovery = max(recovery, time.monotonic() - begun)
            answered += 2
        assert runs <= answered + TIMES
    return {
        "faults": TIMES,
        "tasks": answered,
        "lost": 0,
        "run again": 0,
        "noticed_s": noticed,
        "recovery_s": recovery,
    }


def cluster(seed: int) -> dict[str, Any]:
    """Change the addresses of coordinator and workers, or forget their connections, while functions
    run. Return figures as `calls` does."""
    rng = random.Random(seed)
    recovery = noticed = 0.0
    with ExitStack() as stack:
        dispatcher = stack.enter_context(zd.DispatchServer(DispatcherConfig()))
        links = [stack.enter_context(Proxy(dispatcher.address)) for _ in range(3)]
        for link in links[1:]:
            stack.enter_context(zd.WorkerServer(WorkerConfig(link.address)))
        coordinator = stack.enter_context(ClusterCoordinator(links[0].address))
        until(lambda: dispatcher.num_workers == 2, "both workers are there")
        for _ in range(TIMES):
            values = coordinator.map(abs, range(-TASKS, 0))
            link = rng.choice(links)
            begun, before = time.monotonic(), link.connections
            if rng.random() < 0.5:
                link.forget()
            else:
                link.readdress(address(rng))
            for number, value in zip(range(TASKS, 0, -1), values, strict=True):
                assert value.get(PATIENCE_S) == number
            until(lambda link=link, before=before: link.connections > before, "it connects again")  # type: ignore[misc]
            noticed = max(noticed, time.monotonic() - begun)
            assert coordinator.schedule(abs, (-1,)).get(PATIENCE_S) == 1
            recovery = max(recovery, time.monotonic() - begun)
    figures = {"faults": TIMES, "tasks": TIMES * (TASKS + 1), "lost": 0, "run again": 0}
    return figures | {"noticed_s": noticed, "recovery_s": recovery}
