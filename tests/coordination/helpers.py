"""A keeper of barriers and keys on a port of its own, tasks and programs that use it, and its
machine without sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from zmqdist.coordination.barriers_machine import RoundOutcome
from zmqdist.coordination.machine import Coordination, CoordinationConfig
from zmqdist.coordination.replies import Effect, ReplyValue, Task
from zmqdist.coordination.service import CoordinationService
from zmqdist.errors import OK
from zmqdist.rpc.client import new_incarnation
from zmqdist.rpc.service import RpcService
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Router
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
from tests.coordination.helpers import Keeper
keeper = Keeper(int(sys.argv[2]), address=sys.argv[1])
print(keeper.address, flush=True)
sys.stdin.read()
"""


class Keeper:
    """A CoordinationService for so many workers (or these tasks, or None for whoever comes)."""

    def __init__(
        self, tasks: int | list[Task] | None = 2, *, address: str = "127.0.0.1:0", **config: Any
    ) -> None:
        names = [("worker", index) for index in range(tasks)] if isinstance(tasks, int) else tasks
        self.left = 0
        """Questions that still waited after the stop."""
        self.loop = Loop("zmqdist-keeper")
        incarnation = new_incarnation()
        hello = our_hello("server", incarnation, "keeper")
        router = Router(self.loop, Credentials().server("127.0.0.1"), hello)
        self.address = router.bind(address)
        rpc = RpcService("keeper")
        self.service = CoordinationService(
            rpc, router, self.loop, incarnation, names, CoordinationConfig(**config)
        )
        rpc.attach(router, self.loop, incarnation)
        self.loop.on_stop(rpc.close)
        self.loop.start()

    @property
    def waiting(self) -> int:
        """Questions that wait for their answers."""
        return self.service.snapshot().requests

    def missing(self, name: str) -> tuple[str, ...]:
        """The tasks for which a barrier waits; none where no task waits there."""
        return self.service.snapshot().barriers.get(name, ())

    def stop(self) -> None:
        if self.loop.running:
            self.service.stop("the keeper stops")
            self.left = self.waiting
        self.loop.stop()


class Cut:
    """A wire to a keeper that can be cut: connections to `address` are passed on, until `away` ends
    them; `back` takes new ones."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._port = 0
        self.back()
        self.address = f"127.0.0.1:{self._port}"

    def back(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        self._start(self._accept, self._listener)

    def away(self) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):  # the other end was first
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in (self._listener, *self._sockets):
            each.close()
        self._sockets, self._threads = [], []

    def _start(self, fn: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=fn, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                here, _ = listener.accept()
            except OSError:
                return
            there = socket.create_connection(self._target)
            self._sockets += [here, there]
            self._start(self._pass_on, here, there)
            self._start(self._pass_on, there, here)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


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


def assert_waited_for(keeper: str, error: Exception, timeout_s: float) -> None:
    """The error says who did not come, and for how long that was waited: the whole time-out."""
    head, tail = f"{keeper}, which keeps barriers and keys, did not appear within ", " s"
    message = str(getattr(error, "message", error))
    assert message.startswith(head)
    assert message.endswith(tail)
    assert float(message.removeprefix(head).removesuffix(tail)) >= timeout_s


# -- the machine without sockets ------------------------------------------------------------------

CONFIG = CoordinationConfig(heartbeat_timeout_s=2.0, reconnect_grace_s=0.5)


def worker(index: int) -> Task:
    return "worker", index


def workers(count: int) -> list[Task]:
    return [worker(index) for index in range(count)]


@dataclass(eq=False)
class Call:
    """The reply to a call: a code and a text, or a value. This object is also the ticket of the
    call."""

    done: bool = False
    code: int = -1
    message: str = ""
    value: Any = None
    counter: int = -1

    def replied(self, effect: Effect) -> None:
        assert not self.done, "the machine replied twice"
        self.done = True
        if isinstance(effect, ReplyValue):
            self.code, self.value = OK, effect.value
            if isinstance(effect.value, RoundOutcome):
                self.code, self.message, self.counter = effect.value
        else:
            self.code, self.message = effect.code, effect.message


@dataclass
class Cluster:
    """The machine and its tasks. `lives` has the incarnation of each task."""

    machine: Coordination
    now: float = 0.0
    lives: dict[Task, int] = field(default_factory=dict)

    @classmethod
    def of_workers(cls, count: int) -> Cluster:
        """Return a cluster of so many workers, which have registered."""
        cluster = cls(Coordination(workers(count), CONFIG))
        for task in workers(count):
            assert cluster.register(task).code == OK
        return cluster

    def tell(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            call = effect.ticket
            assert isinstance(call, Call)
            call.replied(effect)

    def register(self, task: Task, incarnation: int | None = None) -> Call:
        call, life = Call(), self.life(task) if incarnation is None else incarnation
        self.tell(self.machine.registered(call, task, life, self.now))
        if call.code == OK or not call.done:
            self.lives[task] = life
        return call

    def life(self, task: Task) -> int:
        return self.lives.get(task, 100 + task[1])

    def beat(self, task: Task, incarnation: int | None = None) -> Call:
        call = Call()
        life = self.life(task) if incarnation is None else incarnation
        self.tell(self.machine.beaten(call, task, life, self.now))
        return call

    def poll(self, task: Task, after: int = 0, until: float = inf) -> Call:
        call = Call()
        self.tell(self.machine.polled(call, task, self.life(task), after, until, self.now))
        return call

    def reset(self, task: Task) -> Call:
        call = Call()
        self.tell(self.machine.reset(call, task, self.now))
        return call

    def barrier(
        self,
        task: Task,
        tasks: Iterable[Task] | None = None,
        *,
        name: str = "b",
        counter: int = 0,
        timeout_s: float = inf,
    ) -> Call:
        call = Call()
        due = self.now + timeout_s
        self.tell(
            self.machine.barrier(call, task, self.life(task), name, counter, tasks, due, self.now)
        )
        return call

    def wait_for_all(self, task: Task) -> Call:
        call = Call()
        self.tell(self.machine.waited_for_all(call, task, self.life(task), [], inf, self.now))
        return call

    def advance(self, seconds: float) -> None:
        """Let time pass, with a tick at each deadline of the machine."""
        end = self.now + seconds
        while (at := self.machine.deadline) <= end:
            self.now = max(self.now, at)
            self.tell(self.machine.ticked(self.now))
            assert self.machine.deadline > self.now, "the machine has the same deadline again"
        self.now = end

    def state(self, task: Task) -> str:
        return {record.task: record.state for record in self.machine.states()}[task]
