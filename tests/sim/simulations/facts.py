"""A simulation of the facts of a dispatcher: its machine, programs that submit and retry work,
workers that report, die and lose slots, and two programs that report the same server.

The record must agree with what has happened, after each event. There are no sockets; workers are a
few lines, because the simulation of a cluster (cluster.py) checks theirs.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.sim.simulations.clock import seed_named
from zmqdist.events import Heard, PeerGone, ProcessExited, Send
from zmqdist.messages import (
    ERROR,
    SUBMISSION_SHIFT,
    VALUE,
    Assign,
    Define,
    Done,
    FailureFacts,
    FunctionFacts,
    LeasesReturned,
    Message,
    MethodFacts,
    Register,
    RegisterCoordinator,
    ServerFacts,
    SlotFacts,
    SlotsLost,
    StartsLost,
    StealRequest,
    Submit,
    TaskEvent,
    VariableFacts,
    WorkerFacts,
    WorkerFigures,
)
from zmqdist.scheduling.dispatcher.facts_record import FactsRecord
from zmqdist.scheduling.dispatcher.machine import Broker
from zmqdist.scheduling.shared.broker_settings import BrokerSettings

STEPS = 120
WORKERS = 2
ATTEMPTS_MAX = 2
NAMES = {7: "f", 8: "g"}
PROGRAM = 1
OWN = ServerFacts(2**40, "dispatcher")

Attempt = tuple[int, int]
"""Work item and attempt."""


@dataclass
class SimpleWorker:
    """A worker with one slot.

    Attributes:
      leases: what it has: lease -> (work, attempt, function), the oldest first.
      running: the lease in its slot; 0 if it is idle.
      figures: what it has not reported yet.
    """

    index: int
    serial: int
    leases: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    running: int = 0
    figures: list[FunctionFacts] = field(default_factory=list)

    @property
    def peer(self) -> str:
        return f"w{self.index}.{self.serial}"


class FactsWorld:
    """One dispatcher with its peers, and what has really happened."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 1.0
        settings = BrokerSettings(
            lease_s=1000.0, reconnect_grace_s=1000.0, cancel_grace_s=5.0, attempts_max=ATTEMPTS_MAX
        )
        self.broker = Broker(settings)
        self.record = FactsRecord(self.broker)
        self.trace: list[str] = []
        self.workers: dict[int, SimpleWorker] = {}
        self.works = 0
        self.serial = 0
        self.submissions: Counter[int] = Counter()
        self.failed_works: list[tuple[int, int]] = []
        self.times: dict[tuple[int, int], tuple[float, float]] = {}
        self.assigned_at: dict[Attempt, float] = {}
        self.runs: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.deaths = self.losses = 0
        self.reported: set[Attempt] = set()
        self.server_calls = 0
        self.reporters: set[str] = set()
        for number, peer in enumerate(("c", "d"), PROGRAM):
            self.hear(peer, RegisterCoordinator(number, 1000, 1, False))
        self.hear("c", Define([(fn, b"") for fn in NAMES], [*NAMES.values()]))
        self.seen: dict[Attempt, list[Any]] = {}
        self.since = 0

    def run(self) -> None:
        actions = {
            self.submit: 5,
            self.retry: 2,
            self.begin: 8,
            self.end: 8,
            self.lose_slot: 2,
            self.report: 6,
            self.lose_worker: 1,
            self.start_worker: 2,
            self.report_server: 2,
            self.end_program: 1,
        }
        for _ in range(STEPS):
            self.now += self.random.choice((0.0, 0.1, 0.5))
            (action,) = self.random.choices([*actions], [*actions.values()])
            self.trace.append(f"{self.now:.1f} {action.__name__}")
            for effect in self.broker.observe(self.now):
                assert isinstance(effect.to, str)
            action()
            self.check()

    # -- what happens ------------------------------------------------------------------------------

    def hear(self, peer: str, message: Message) -> None:
        self.carry_out(self.broker.handle(Heard(peer, message), self.now))

    def carry_out(self, effects: list[Send]) -> None:
        for effect in effects:
            message = effect.message
            worker = next((w for w in self.workers.values() if w.peer == effect.to), None)
            if isinstance(message, Assign) and worker is not None:
                for lease, _, attempt, fn, payload in message.items:
                    worker.leases[lease] = int(payload), attempt, fn
                    self.assigned_at[int(payload), attempt] = self.now
            elif isinstance(message, StealRequest) and worker is not None:
                back = [lease for lease in message.leases if lease in worker.leases]
                back = [lease for lease in back if lease != worker.running]
                for lease in back:
                    del worker.leases[lease]
                self.hear(worker.peer, LeasesReturned(back))
            elif isinstance(message, StartsLost):
                for work, _, _, _, _, final in message.items:
                    if final:
                        fn = 7 + work % 2
                        self.runs[NAMES[fn]] += 1
                        self.failed[NAMES[fn]] += 1

    def a_worker(self, *, running: bool) -> SimpleWorker | None:
        fitting = [
            worker
            for worker in self.workers.values()
            if (worker.running > 0 if running else worker.leases and not worker.running)
        ]
        return self.random.choice(fitting) if fitting else None

    def send_work(self, works: list[int], submission: int, waited: dict[int, float]) -> None:
        items = [
            (work, submission << SUBMISSION_SHIFT, 0, 7 + work % 2, b"%d" % work) for work in works
        ]
        for work in works:
            self.times[work, submission] = self.now - waited.get(work, 0.0), self.now
        self.hear("c", Submit(1, items, waited=waited))

    def submit(self) -> None:
        count = self.random.randint(1, 4)
        works = [self.works + number for number in range(1, count + 1)]
        self.works += count
        if self.random.random() < 0.2:
            works.reverse()
        waited = {works[0]: 0.25} if self.random.random() < 0.3 else {}
        self.send_work(works, 0, waited)

    def retry(self) -> None:
        if self.failed_works:
            work, submission = self.failed_works.pop()
            self.send_work([work], submission + 1, {})

    def begin(self) -> None:
        if (worker := self.a_worker(running=False)) is not None:
            worker.running = next(iter(worker.leases))
            self.hear(worker.peer, Done([], [worker.running]))

    def end(self) -> None:
        worker = self.a_worker(running=True)
        if worker is None:
            return
        lease, worker.running = worker.running, 0
        work, attempt, fn = worker.leases.pop(lease)
        kind = ERROR if self.random.random() < 0.3 else VALUE
        if kind == ERROR:
            self.hear(worker.peer, WorkerFacts(failures=[FailureFacts(lease, 9, "E", "bad", "")]))
            self.failed_works.append((work, attempt >> SUBMISSION_SHIFT))
        worker.figures.append(
            FunctionFacts(PROGRAM, fn, "", 1, kind == ERROR, 0.1, 0.1, 0.0, 1, 1, [(60, 1)])
        )
        self.reported.add((work, attempt))
        run = TaskEvent(lease, 0, 0.0, 0.0, kind)
        self.hear(worker.peer, Done([(lease, kind, b"")], [], runs=[run]))

    def lose_slot(self) -> None:
        if (worker := self.a_worker(running=True)) is not None:
            lease, worker.running = worker.running, 0
            del worker.leases[lease]
            self.deaths += 1
            self.hear(worker.peer, SlotsLost([(lease, -9, "last")]))

    def report(self) -> None:
        if not self.workers:
            return
        worker = self.random.choice([*self.workers.values()])
        for facts in worker.figures:
            self.runs[NAMES[facts.fn]] += facts.count
            self.failed[NAMES[facts.fn]] += facts.failed
        slot = SlotFacts(0, 9, "running" if worker.running else "idle", worker.running)
        figures, worker.figures = worker.figures, []
        self.hear(worker.peer, WorkerFacts(WorkerFigures(), [slot], figures))

    def start_worker(self) -> None:
        free = [index for index in range(WORKERS) if index not in self.workers]
        if free:
            self.serial += 1
            worker = self.workers[free[0]] = SimpleWorker(free[0], self.serial)
            register = Register(
                self.serial, "worker", worker.index, 1, [], [], 100 + self.serial, "host"
            )
            self.hear(worker.peer, register)

    def lose_worker(self) -> None:
        if self.workers:
            worker = self.workers.pop(self.random.choice([*self.workers]))
            self.losses += 1
            gone = ProcessExited(100 + worker.serial, -9, "", job="worker", index=worker.index)
            self.carry_out(self.broker.handle(gone, self.now))

    def report_server(self) -> None:
        self.server_calls += self.random.randint(0, 3)
        peer = self.random.choice("cd")
        if peer == "d" and "d" not in self.reporters:
            self.hear("d", RegisterCoordinator(2, 1000, 1, False))
        self.reporters.add(peer)
        calls = self.server_calls
        method = MethodFacts("double", calls, 0, 0, 0.1, 0.1, [(60, calls)] if calls else [])
        variable = VariableFacts(1, 1, "w", (2,), "f4", 8, calls, 0.0)
        self.hear(peer, ServerFacts(77, "ps:0", [method], [variable]))

    def end_program(self) -> None:
        """The second program, which submits nothing, disconnects."""
        self.carry_out(self.broker.handle(PeerGone("d"), self.now))
        self.reporters.discard("d")

    # -- what the record must say ------------------------------------------------------------------

    def check(self) -> None:
        record = self.record.make(self.since, timeline=True, now=self.now, to_unix_s=0.0)
        self.since = record["next"]
        self.check_counts(record)
        self.check_waiting(record)
        self.check_slots(record)
        self.check_timeline(record)
        self.check_servers()

    def check_counts(self, record: dict[str, Any]) -> None:
        rows = {row["name"]: (row["count"], row["failed"]) for row in record["functions"]}
        for name in NAMES.values():
            happened = self.runs[name], self.failed[name]
            told = rows.get(name, (0, 0))
            assert told == happened, f"runs: {name} has {told} of {happened}"
        failed = record["totals"]["failed"]
        assert failed == self.failed.total(), f"failures: {failed} of {self.failed.total()}"
        told = record["slot_deaths_count"], record["losses_count"]
        assert told == (self.deaths, self.losses), f"deaths: {told}"
        ring = len(self.broker.dispatch.facts.slot_deaths)
        assert ring == min(self.deaths, 100), f"deaths: {ring} of {self.deaths} have last lines"

    def check_waiting(self, record: dict[str, Any]) -> None:
        counts: Counter[str] = Counter()
        for row in record["waiting"]:
            counts[row["reason"]] += row["count"]
        handed_out = sum(len(worker.leases) for worker in self.workers.values())
        running = sum(worker.running > 0 for worker in self.workers.values())
        happened = Counter({"window": handed_out - running})
        happened["all_busy" if self.workers else "no_worker"] += record["queued"]
        assert counts == +happened, f"waiting: {dict(counts)} of {dict(happened)}"

    def check_slots(self, record: dict[str, Any]) -> None:
        for row in record["workers"]:
            worker = self.workers[int(row["name"].partition(":")[2])]
            for slot in row["slots_now"]:
                told = slot["work"], slot["attempt"]
                mine = [(work, attempt) for work, attempt, _ in worker.leases.values()]
                assert told in [(0, 0), *mine], f"slots: {row['name']} runs {told}, has {mine}"

    def check_timeline(self, record: dict[str, Any]) -> None:
        for run in record["timeline"]["events"]:
            attempt = run[2], run[3]
            assert attempt in self.reported, f"timeline: {attempt} has not run"
            assert attempt not in self.seen, f"timeline: {attempt} twice"
            self.seen[attempt] = run
            submitted_at, ready_at = self.times[run[2], run[3] >> SUBMISSION_SHIFT]
            told = run[7], run[13], run[8]
            happened = submitted_at, ready_at, self.assigned_at[attempt]
            assert told == happened, f"timeline: {attempt} came at {told}, not at {happened}"
        missing = self.reported - self.seen.keys()
        assert not missing, f"timeline: {missing} are missing"
        assert not record["timeline"]["dropped"], "timeline: a run was left out"

    def check_servers(self) -> None:
        record = self.broker.servers.record(OWN)
        expected = [self.server_calls] if self.reporters else []
        last = self.broker.servers.record(OWN)["rpc"]
        assert len(record["rpc"]) == len(expected), f"servers: {last}"
        assert len(record["variables"]) == len(expected), f"servers: {record['variables']}"


def simulate_facts(seed: int) -> FactsWorld:
    """Run the simulation with one seed to its end. Raises AssertionError if a figure is wrong."""
    world = FactsWorld(seed)
    with seed_named(seed, world.trace):
        world.run()
    return world
