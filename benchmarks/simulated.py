"""Simulates any number of workers, and a coordinator, around the dispatcher's real machine, in virtual time.

A simulated worker runs its leases one after the other, each for `task_s`. It reports ended leases every `report_s`, or after each lease if
this takes longer, as real workers do. If the dispatcher recalls a lease that the worker has not begun, the worker returns it. Only two
times
count: the time inside the machine, and the time of the codec, which encodes the machine's messages and decodes the messages to it.

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
from zmqdist.scheduling.dispatcher.broker import Broker, Event
from zmqdist.scheduling.dispatcher.broker_settings import BrokerSettings
from zmqdist.wire.headers import decode, encode

REPORT_S = 0.002
FUNCTION = 7
PAYLOAD_BYTES = 32
"""About what a call without arguments is when it is pickled."""


@dataclass(eq=False)
class Worker:
    name: str
    leases: deque[int] = field(default_factory=deque)
    busy: bool = False


class Cluster:
    """A dispatcher's machine and its simulated peers.

    Args:
      workers: how many; one slot each.
      task_s: how long a task takes, in virtual time.

    Attributes:
      broker: the machine.
      machine_s: processor time inside it so far, including its `deadline`, which a runtime reads after each event.
      codec_s: the same of encoding and decoding.
      events: how many it was given.
      done: results that came out of it.
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

    # -- what happens -----------------------------------------------------------------------------------------------

    def join(self, count: int) -> None:
        """So many workers more; each asks for the lowest index that is free."""
        for number in range(len(self._workers), len(self._workers) + count):
            worker = Worker(f"worker {number}")
            self._workers[worker.name] = worker
            self.hear(worker.name, Register(number + 1, "worker", -1, 1, [], [], 1000 + number, "host"))

    def submit(self, count: int) -> None:
        """So many tasks, in full batches."""
        for first in range(0, count, BATCH_ITEMS_MAX):
            works = range(first, min(first + BATCH_ITEMS_MAX, count))
            self.hear("coordinator", Submit(1, [(work, 0, 0, FUNCTION, b"p" * PAYLOAD_BYTES) for work in works]))

    def beat(self) -> None:
        """One beat of each worker."""
        for name in self._workers:
            self.hear(name, Beat())

    def run(self, left: int = 0) -> None:
        """Work until no more than `left` tasks are waiting in the queue; until all are done for -1."""
        while self._reports and (left < 0 or self.broker.dispatch.queued > left):
            self.now, _, worker = heapq.heappop(self._reports)
            self._report(worker)

    def _report(self, worker: Worker) -> None:
        count = min(len(worker.leases), max(1, round(REPORT_S / self._task_s)))
        ended = [worker.leases.popleft() for _ in range(count)]
        worker.busy = bool(worker.leases)
        begun = [worker.leases[0]] if worker.leases and self._task_s >= REPORT_S else []
        self._next_report(worker)
        self.hear(worker.name, Done([(lease, VALUE, b"r" * PAYLOAD_BYTES) for lease in ended], begun))

    def _next_report(self, worker: Worker) -> None:
        if worker.leases:
            count = min(len(worker.leases), max(1, round(REPORT_S / self._task_s)))
            self._number += 1
            heapq.heappush(self._reports, (self.now + count * self._task_s, self._number, worker))

    # -- the wire ---------------------------------------------------------------------------------------------------

    def hear(self, peer: str, message: Message) -> None:
        """A message arrives; what is sent about it arrives, too."""
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
    """Microseconds of processor time: of each task in the machine and in the codec, and of an event once the queue was empty."""

    machine_us: float
    codec_us: float
    tail_us: float


def cost_of_tasks(workers: int, tasks: int, task_s: float) -> Cost:
    """All tasks are submitted at once, then run to the last."""
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
    """Microseconds of a beat in the machine: all workers beat while so many tasks are queued or out."""
    cluster = Cluster(workers, REPORT_S)
    cluster.submit(tasks)
    before = cluster.machine_s
    rounds = max(1, 2000 // workers)
    for _ in range(rounds):
        cluster.beat()
    return (cluster.machine_s - before) / (workers * rounds) * 1e6


def cost_of_joins(workers: int) -> float:
    """Microseconds of a worker that joins, in the machine, while the cluster grows to so many."""
    spent_s = 0.0
    rounds = max(1, 2000 // workers)
    for _ in range(rounds):
        cluster = Cluster(0, REPORT_S)
        before = cluster.machine_s
        cluster.join(workers)
        spent_s += cluster.machine_s - before
    return spent_s / (workers * rounds) * 1e6


def memory_of_workers(workers: int) -> float:
    """Bytes of an idle worker in the machine."""
    cluster = Cluster(10, REPORT_S)
    return _grown(lambda: cluster.join(workers)) / workers


def memory_of_tasks(tasks: int) -> float:
    """Bytes of a queued task in the machine, its payload of PAYLOAD_BYTES included."""
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
