"""A keeper of barriers and keys on a port of its own, and what the tests of this folder do with tasks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zmqdist.coordination.service import CoordinationService
from zmqdist.core.answers import Task
from zmqdist.core.coordination import CoordinationConfig
from zmqdist.net.credentials import Credentials
from zmqdist.net.loop import Loop
from zmqdist.net.router import Router
from zmqdist.rpc.client import new_incarnation
from zmqdist.rpc.service import RpcService
from zmqdist.wire.hello import our_hello

ROOT = Path(__file__).resolve().parents[2]

TASK = """
import sys
from zmqdist.coordination.client import CoordinationClient
address, task, what = sys.argv[1:4]
client = CoordinationClient(address, task)
client.register(30)
print("registered", flush=True)
for name in what.split():
    client.barrier(name, 60)
    print("passed", name, flush=True)
sys.stdin.read()
"""
"""A task in a process of its own: address, name, barriers to call one after the other."""

KEEPER = """
import sys
from tests.coordination.kept import Keeper
keeper = Keeper(int(sys.argv[2]), address=sys.argv[1])
print(keeper.address, flush=True)
sys.stdin.read()
"""


class Keeper:
    """A CoordinationService for so many workers (or these tasks, or None for whoever comes)."""

    def __init__(self, tasks: int | list[Task] | None = 2, *, address: str = "127.0.0.1:0", **config: Any) -> None:
        names = [("worker", index) for index in range(tasks)] if isinstance(tasks, int) else tasks
        self.loop = Loop("zmqdist-keeper")
        incarnation = new_incarnation()
        hello = our_hello("server", incarnation, "keeper")
        router = Router(self.loop, Credentials().server("127.0.0.1"), hello)
        self.address = router.bind(address)
        rpc = RpcService("keeper")
        self.service = CoordinationService(rpc, router, self.loop, incarnation, names, CoordinationConfig(**config))
        rpc.attach(router, self.loop, incarnation)
        self.loop.on_stop(rpc.close)
        self.loop.start()

    @property
    def waiting(self) -> int:
        return self.service._tasks.waiting + self.service._keys.waiting

    def stop(self) -> None:
        if self.loop.running:
            self.service.stop("the keeper stops")
        self.loop.stop()


class Caller(threading.Thread):
    """Calls something in a thread; `error` is what it raised."""

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        super().__init__(daemon=True)
        self.fn, self.args = fn, args
        self.value: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.value = self.fn(*self.args)
        except BaseException as error:
            self.error = error

    def ended(self) -> BaseException | None:
        """Wait for the end; the error, if there was one."""
        self.join(30)
        assert not self.is_alive(), "it does not end"
        return self.error


def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Look again and again until it is true."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it does not become true"
        pause.wait(0.005)
