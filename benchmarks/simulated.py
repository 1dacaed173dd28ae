"""Simulates any number of workers, and a coordinator, around the dispatcher's real machine, in
virtual time.

A simulated worker runs its leases one after the other, each for `task_s`. It reports ended leases
every `report_s`, or after each lease if a lease takes longer, as real workers do. If the dispatcher
recalls a lease that the worker has not begun, the worker returns it. Only two times are measured:
the time inside the machine, and the time of the codec, which encodes the machine's messages and
decodes the messages to the machine.

Not here: sockets (crowd.py has real ones), and faults (zmqdist.testing has those).
"""

from __future__ import annotations

import gc
import heapq
import tracemalloc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from time import thread_time

from zmqdist.events import Heard, Send
from zmqdist.limits import BATCH_ITEMS_MAX
from zmqdist.messages import (
    VALUE,
    Assign,
    Beat,
    Define,
    Done,
    LeasesReturned,
    Message,
    Register,
    RegisterCoordinator,
    Results,
    StealRequest,
    Submit,
)
from zmqdist.scheduling.dispatcher.machine import Broker, Event
from zmqdist.scheduling.shared.broker_settings import BrokerSettings
from zmqdist.wire.headers import decode, encode

REPORT_S = 0.002
FUNCTION = 7
PAYLOAD_BYTES = 32
"""About the size of the pickle of a call without arguments."""


@dataclass(eq=False)
class Worker:
    name: str
    leases: deque[int] = field(default_factory=deque)
    busy: bool = False


class Cluster:
    """A dispatcher's machine and its simulated peers.

    Args:
      workers: number of workers, each with one slot.
      task_s: seconds of virtual time that a task takes.

    Attributes:
      broker: the machine.
      machine_s: processor time inside the machine so far, including its `deadline`, which a runtime
        reads after each event.
      codec_s: processor time of encoding and decoding so far.
      events: number of events that the machine has handled.
      done: number of results that the machine has sent to the coordinator.
    """

    def __init__(self, workers: int, task_s: float) -> None:
        self.broker = Broker(BrokerSettings())
        self.machine_s = self.codec_s = 0.0
        self.events = self.done = 0
        self.now = 0.0
        self._task_s = task_s
        self._reports: list[tuple[float, int, Worker]] = []
        self._number = 0
        self._workers: dict[str, Worker] = {}
        self.hear("coordinator", RegisterCoordinator(1, 2**21, 1, False))
        self.hear("coordinator", Define([(FUNCTION, b"f" * 100)]))
        self.join(workers)

    # -- the peers ---------------------------------------------------------------------------------

    def join(self, count: int) -> None:
        """Register `count` more workers. Each requests the lowest free index."""
        for number in range(len(self._workers), len(self._workers) + count):
            worker = Worker(f"worker {number}")
            self._workers[worker.name] = worker
            self.hear(
                worker.name, Register(number + 1, "worker", -1, 1, [], [], 1000 + number, "host")
            )

    def submit(self, count: int) -> None:
        """Submit `count` tasks in messages of BATCH_ITEMS_MAX tasks."""
        for first in range(0, count, BATCH_ITEMS_MAX):
            works = range(first, min(first + BATCH_ITEMS_MAX, count))
            self.hear(
                "coordinator",
                Submit(1, [(work, 0, 0, FUNCTION, b"p" * PAYLOAD_BYTES) for work in works]),
            )

    def beat(self) -> None:
        """Send one heartbeat of each worker."""
        for name in self._workers:
            self.hear(name, Beat())

    def run(self, left: int = 0) -> None:
        """Let the workers run tasks until at most `left` tasks wait in the queue; if `left` is -1,
        until all tasks have ended."""
        while self._reports and (left < 0 or self.broker.dispatch.placement.queued > left):
            self.now, _, worker = heapq.heappop(self._reports)
            self._report(worker)

    def _report(self, worker: Worker) -> None:
        count = min(len(worker.leases), max(1, round(REPORT_S / self._task_s)))
        ended = [worker.leases.popleft() for _ in range(count)]
        worker.busy = bool(worker.leases)
        begun = [worker.leases[0]] if worker.leases and self._task_s >= REPORT_S else []
        self._next_report(worker)
        self.hear(
            worker.name, Done([(lease, VALUE, b"r" * PAYLOAD_BYTES) for lease in ended], begun)
        )

    def _next_report(self, worker: Worker) -> None:
        if worker.leases:
            count = min(len(worker.leases), max(1, round(REPORT_S / self._task_s)))
            self._number += 1
            heapq.heappush(self._reports, (self.now + count * self._task_s, self._number, worker))

    # -- the wire ----------------------------------------------------------------------------------

    def hear(self, peer: str, message: Message) -> None:
        """Have the machine handle a message of a peer. Then have the peers handle the messages that
        the machine sends because of it."""
        header = encode(message)
        start = thread_time()
        arrived = decode(header, peer)
        middle = thread_time()
        effects = self._handled(Heard(peer, arrived))
        between = thread_time()
        for effect in effects:
            encode(effect.message)
        self.codec_s += middle - start + thread_time() - between
        self.machine_s += between - middle
        self.events += 1
        for effect in effects:
            self._arrive(effect)

    def _handled(self, event: Event) -> list[Send]:
        effects = self.broker.handle(event, self.now)
        _ = self.broker.deadline
        return effects

    def _arrive(self, effect: Send) -> None:
        match effect.message:
            case Assign(_, items):
                worker = self._workers[str(effect.to)]
                worker.leases.extend(item[0] for item in items)
                if not worker.busy:
                    worker.busy = True
                    self._next_report(worker)
            case StealRequest(leases):
                worker = self._workers[str(effect.to)]
                wanted = set(leases)
                back = [lease for lease in islice(worker.leases, 1, None) if lease in wanted]
                gone = set(back)
                worker.leases = deque(lease for lease in worker.leases if lease not in gone)
                self.hear(worker.name, LeasesReturned(back))
            case Results(items):
                self.done += len(items)
            case _:
                pass


@dataclass(frozen=True)
class Cost:
    """Microseconds of processor time.

    Attributes:
      machine_us, codec_us: the time of each task in the machine, and in the codec.
      tail_us: the time of each event in the machine after the queue has become empty.
    """

    machine_us: float
    codec_us: float
    tail_us: float


def cost_of_tasks(workers: int, tasks: int, task_s: float) -> Cost:
    """Submit all tasks at once, and run them until the last one has ended. Return what they
    cost.
    """
    cluster = Cluster(workers, task_s)
    machine_s, codec_s = cluster.machine_s, cluster.codec_s
    cluster.submit(tasks)
    cluster.run()
    before, events = cluster.machine_s, cluster.events
    cluster.run(-1)
    if cluster.done != tasks:
        raise AssertionError(f"{tasks} tasks went in and {cluster.done} results came out")
    return Cost(
        (cluster.machine_s - machine_s) / tasks * 1e6,
        (cluster.codec_s - codec_s) / tasks * 1e6,
        (cluster.machine_s - before) / max(1, cluster.events - events) * 1e6,
    )


def cost_of_beats(workers: int, tasks: int) -> float:
    """Return the microseconds that the machine needs for a heartbeat, while `tasks` tasks are in
    the queue or at workers."""
    cluster = Cluster(workers, REPORT_S)
    cluster.submit(tasks)
    before = cluster.machine_s
    rounds = max(1, 2000 // workers)
    for _ in range(rounds):
        cluster.beat()
    return (cluster.machine_s - before) / (workers * rounds) * 1e6


def cost_of_joins(workers: int) -> float:
    """Return the microseconds that the machine needs to register a worker, while a cluster grows
    from 0 to `workers` workers."""
    spent_s = 0.0
    rounds = max(1, 2000 // workers)
    for _ in range(rounds):
        cluster = Cluster(0, REPORT_S)
        before = cluster.machine_s
        cluster.join(workers)
        spent_s += cluster.machine_s - before
    return spent_s / (workers * rounds) * 1e6


def memory_of_workers(workers: int) -> float:
    """Return the bytes that the machine needs for an idle worker."""
    cluster = Cluster(10, REPORT_S)
    return _grown(lambda: cluster.join(workers)) / workers


def memory_of_tasks(tasks: int) -> float:
    """Return the bytes that the machine needs for a queued task, including the payload of
    PAYLOAD_BYTES."""
    cluster = Cluster(0, REPORT_S)
    return _grown(lambda: cluster.submit(tasks)) / tasks


def _grown(grow: Callable[[], None]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        grow()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
