"""A launcher's workers in random events: the real Elasticity over processes that start late, crash,
hang, leave, and never come up, on hosts that are lost.

Users ask for sizes, two at a time as well; an admin drains a worker; work comes and goes; the
dispatcher loses workers that run on. After each event the promises of elasticity_machine.py are
compared with what this file has seen of processes and work.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf

from msgspec.structs import replace

from zmqdist.events import Ticked
from zmqdist.launch.elasticity_machine import (
    BACKLOG_S,
    LEAVE_MARGIN_S,
    AcceptSize,
    Closing,
    ClusterSeen,
    DrainFailed,
    DrainWorker,
    Elasticity,
    ElasticityEffect,
    ElasticityEvent,
    KillWorker,
    RefuseSize,
    RegisteredChanged,
    RoomChanged,
    SeenWorker,
    SizeBounds,
    SizeRequested,
    StartWorker,
    StopWorker,
    WorkerEnded,
)

EVENTS = 200
SLOTS = 2
IDLE_S = 5.0
GRACE_S = 2.0


@dataclass
class Worker:
    """A worker that was started, until its process has ended for good.

    Attributes:
      runs: whether it has a process now; else it is to be restarted, or has failed.
      failed: it will not be restarted.
      told_at: when it was told to leave.
      hangs: its process ends only when it is killed.
    """

    runs: bool = True
    registered: bool = False
    failed: bool = False
    told_at: float | None = None
    kill_after: float = inf
    killed: bool = False
    hangs: bool = False
    leases: int = 0
    done: int = 0
    burden: int = 0
    refused: bool = False
    idle_since: float | None = None
    seen_done: int = -1


class ElasticitySim:
    """See the module's docstring."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.trace: list[str] = []
        self.now = 100.0
        least = self.random.choice((None, 1, 2))
        most = None if least is None else least + self.random.choice((0, 2, 5))
        room = self.random.choice((None, None, 4, 6))
        if room is not None and most is not None:
            room = max(room, most)
        self.bounds = SizeBounds(least, most, IDLE_S, room, "the hosts are full")
        count = self.random.choice((1, 2, 3)) if least is None else least
        self.wanted = count
        self.workers = {index: Worker() for index in range(count)}
        self.machine = Elasticity(self.bounds, range(count))
        self.queued = 0
        self.backlog_since: float | None = None
        self.calm = self.closing = False
        self.hosts_lost = 0
        self.requests = self.starts = self.leaves = self.kills = self.refusals = self.grown = (
            self.shrunk
        ) = 0

    def promise(self, holds: bool, name: str) -> None:
        if not holds:
            happened = "\n".join(self.trace[-40:])
            raise AssertionError(
                f"{name} is broken; pytest tests/sim --seed {self.seed}\n{happened}"
            )

    def run(self) -> ElasticitySim:
        kinds = (
            *[self._look] * 8,
            *[self._register] * 6,
            *[self._work] * 6,
            *[self._pass] * 4,
            *[self._end_leaving] * 4,
            *[self._request] * 2,
            self._crash,
            self._lose,
            self._lose_host,
            self._drained_by_admin,
            self._burdens,
            self._hang,
        )
        for _ in range(EVENTS):
            self.random.choice(kinds)()
            if self.random.random() < 0.002:
                self.closing = True
                self._handle(Closing())
            self._check()
        self._calm_down()
        return self

    # -- what the launcher holds, by this file's own account ---------------------------------------

    @property
    def held(self) -> dict[int, Worker]:
        return {index: worker for index, worker in self.workers.items() if worker.told_at is None}

    @property
    def seen(self) -> tuple[SeenWorker, ...]:
        return tuple(
            SeenWorker(index, SLOTS, worker.leases, worker.done, worker.burden, worker.refused)
            for index, worker in self.workers.items()
            if worker.registered
        )

    # -- events ------------------------------------------------------------------------------------

    def _look(self) -> None:
        queued, records = self.queued, self.seen
        backlog = queued + sum(
            max(0, item.leases - SLOTS) for index, item in self.held.items() if item.registered
        )
        if not backlog:
            self.backlog_since = None
        elif self.backlog_since is None:
            self.backlog_since = self.now
        for item in self.workers.values():
            if not item.registered:
                continue
            if item.leases or item.burden:
                item.idle_since = None
            elif item.idle_since is None or item.seen_done != item.done:
                item.idle_since = self.now
            item.seen_done = item.done
        starting = any(not item.registered and not item.failed for item in self.held.values())
        running = sum(not item.failed for item in self.held.values())
        for effect in self._handle(ClusterSeen(queued, records)):
            match effect:
                case StartWorker():
                    waited = (
                        self.backlog_since is not None
                        and self.now - self.backlog_since >= BACKLOG_S
                    )
                    self.promise(
                        self.bounds.are_set and waited and not starting,
                        "P7: the size grows too early",
                    )
                    self.grown += 1
                case DrainWorker(index) | StopWorker(index):
                    worker = self.workers[index]
                    idle = worker.idle_since is not None and self.now - worker.idle_since >= IDLE_S
                    self.promise(
                        idle and not worker.burden,
                        "P6: a worker leaves that is busy or keeps something",
                    )
                    self.promise(not backlog, "P6: a worker leaves while work waits")
                    running -= 1
                    self.promise(running >= self.bounds.min, "P6: fewer than min are left")
                    self.shrunk += 1

    def _request(self) -> None:
        count = self.random.choice((0, 1, 1, 2, 3, 4, 5, 7, 9))
        force = self.random.random() < 0.2
        self.requests += 1
        before, records = self._state(), {item.index: item for item in self.seen}
        stays_before = dict(self.held)
        event = SizeRequested(self.requests, count, GRACE_S, tuple(records.values()), force)
        effects = self._handle(event)
        replies = [item for item in effects if isinstance(item, AcceptSize | RefuseSize)]
        self.promise(
            len(replies) == 1 and replies[0].request == self.requests,
            "P8: not one reply to a request",
        )
        if isinstance(replies[0], RefuseSize):
            self.refusals += 1
            self.promise(
                len(effects) == 1 and self._state() == before,
                "P8: a refused request changed something",
            )
            self.promise(
                bool(replies[0].problem or replies[0].refused), "P8: a refusal without a reason"
            )
            return
        self.promise(not self.closing, "P9: a size was accepted while the cluster closes")
        self.promise(
            replies[0].count == count == self.machine.wanted, "P8: another size was accepted"
        )
        self.promise(count <= self.bounds.max, "P1: a size was accepted for which there is no room")
        removed = [
            index
            for index, item in stays_before.items()
            if self.workers.get(index) not in self.held.values()
            and (index in replies[0].leaves or not item.failed)
        ]
        self.promise(
            sorted(removed) == sorted(replies[0].leaves),
            "P8: other workers leave than the reply says",
        )

        def loss(index: int) -> tuple[bool, int, int]:
            worker = records.get(index)
            lost = worker is None or stays_before[index].failed
            return (
                (False, 0, 0)
                if lost or worker is None
                else (worker.refused, worker.burden, worker.leases)
            )

        stays = [index for index in stays_before if index not in removed]
        self.promise(
            force or not any(loss(index)[0] for index in removed), "P5: a refused worker leaves"
        )
        for index in removed:
            self.promise(
                all(loss(index) <= loss(second) for second in stays),
                "P5: a worker with more to lose leaves",
            )

    def _register(self) -> None:
        starting = [
            index for index, worker in self.workers.items() if worker.runs and not worker.registered
        ]
        if starting:
            self.workers[self.random.choice(starting)].registered = True
            self._members()

    def _members(self) -> None:
        self._handle(
            RegisteredChanged(
                frozenset(index for index, worker in self.workers.items() if worker.registered)
            )
        )

    def _work(self) -> None:
        if self.random.random() < 0.3:
            self.queued += self.random.choice((1, 5, 30))
        if self.random.random() < 0.2:
            self.queued = 0
        for worker in self.workers.values():
            if worker.registered and self.random.random() < 0.7:
                worker.done += worker.leases
                worker.leases = 0
                if worker.told_at is None:
                    worker.leases = min(self.queued, self.random.choice((0, 1, 2, 6)))
                    self.queued -= worker.leases

    def _burdens(self) -> None:
        for worker in self.workers.values():
            if worker.registered:
                worker.burden = self.random.choice((0, 0, 0, 1, 4))
                worker.refused = bool(worker.burden) and self.random.random() < 0.5

    def _hang(self) -> None:
        leaving = [
            worker
            for worker in self.workers.values()
            if worker.told_at is not None and not worker.killed
        ]
        if leaving:
            self.random.choice(leaving).hangs = True

    def _crash(self) -> None:
        """A process ends by a failure, also one that has never registered."""
        running = [index for index, worker in self.workers.items() if worker.runs]
        if running:
            self._end(
                self.random.choice(running), in_order=False, restarts=self.random.random() < 0.7
            )

    def _drained_by_admin(self) -> None:
        registered = [index for index, worker in self.held.items() if worker.registered]
        if registered and self.random.random() < 0.4:
            size, index = self.machine.wanted, self.random.choice(registered)
            self._end(index, in_order=True, restarts=False)
            if not self.closing:
                expected = max(self.bounds.min, size - 1)
                self.promise(
                    self.machine.wanted == expected, "P1: the size does not follow a drained worker"
                )

    def _lose(self) -> None:
        """The dispatcher loses a worker whose process runs on: its connection is cut."""
        registered = [index for index, worker in self.workers.items() if worker.registered]
        if registered:
            self._unregister(self.workers[self.random.choice(registered)])
            self._members()

    def _lose_host(self) -> None:
        """A host is lost with its slots. Processes for which the other hosts have no slot end for
        good."""
        if self.bounds.room is None or self.random.random() < 0.7:
            return
        self.hosts_lost += 1
        self.bounds = replace(
            self.bounds, room=max(0, self.bounds.room - self.random.choice((1, 2)))
        )
        self._handle(RoomChanged(self.bounds.room, self.bounds.room_reason))
        running = [index for index, worker in self.workers.items() if worker.runs]
        self.random.shuffle(running)
        for index in running[self.bounds.room :]:
            if self.workers[index].runs:
                self._end(index, in_order=False, restarts=False)

    def _end_leaving(self) -> None:
        leaving = [
            index
            for index, worker in self.workers.items()
            if worker.told_at is not None and not worker.hangs
        ]
        if leaving:
            self._end(self.random.choice(leaving), in_order=True, restarts=False)

    def _pass(self) -> None:
        self.now += self.random.choice((0.1, 0.5, 1.0, 4.0))
        due = self.machine.deadline
        if due is not None and due <= self.now:
            self._handle(Ticked())

    def _unregister(self, worker: Worker) -> None:
        self.queued += worker.leases
        worker.registered, worker.leases, worker.burden, worker.refused, worker.idle_since = (
            False,
            0,
            0,
            False,
            None,
        )

    def _end(self, index: int, *, in_order: bool, restarts: bool) -> None:
        worker = self.workers[index]
        restarts = restarts and worker.told_at is None
        was_registered = worker.registered
        self._unregister(worker)
        if was_registered and self.random.random() < 0.5:
            # the dispatcher may notice first, or last
            self._members()
        if restarts:
            self._handle(WorkerEnded(index, in_order, restarts=True))
            return  # a new process starts at once under the same index
        if worker.told_at is None and not in_order:
            worker.runs, worker.failed = False, True
        else:
            del self.workers[index]
        self._handle(WorkerEnded(index, in_order, restarts=False))
        if was_registered:
            self._members()

    # -- effects -----------------------------------------------------------------------------------

    def _handle(self, event: ElasticityEvent) -> list[ElasticityEffect]:
        self.trace.append(f"{self.now:8.1f}  {event}")
        before = self.machine.wanted
        effects = self.machine.handle(event, self.now)
        grown = self.machine.wanted > before
        self.promise(
            not grown or self.machine.wanted <= self.bounds.max,
            "P1: the size grows beyond the room",
        )
        self.trace += [f"{'':10}  -> {effect}" for effect in effects]
        if isinstance(event, SizeRequested):
            self.wanted = self.machine.wanted
        if self.closing:
            self.promise(
                all(isinstance(item, RefuseSize) for item in effects),
                "P9: something happens while it closes",
            )
        for effect in effects:
            self._carry_out(effect)
        return effects

    def _carry_out(self, effect: ElasticityEffect) -> None:
        match effect:
            case StartWorker(index):
                before = self.workers.get(index)
                self.promise(
                    before is None or before.failed, "P3: an index starts that has a process"
                )
                self.promise(
                    before is None or before.told_at is None, "P4: a worker that leaves is started"
                )
                self.workers[index] = Worker()
                self.starts += 1
            case DrainWorker(index, grace_s):
                self._tell(index, grace_s)
                if not self.workers[index].registered and index in self.workers:
                    self._handle(DrainFailed(index))
            case StopWorker(index):
                worker = self.workers.get(index)
                if worker is not None and worker.told_at is not None and not worker.killed:
                    return  # after a DrainFailed
                self._tell(index, GRACE_S)
            case KillWorker(index):
                worker = self.workers[index]
                self.promise(
                    worker.told_at is not None, "P4: a worker is killed that was not told to leave"
                )
                self.promise(not worker.killed, "P4: a worker is killed twice")
                self.promise(
                    self.now >= worker.kill_after, "P4: a worker is killed within its grace"
                )
                worker.killed, worker.hangs = True, False
                self.kills += 1
            case AcceptSize():
                # Failed workers that were not started again are forgotten without an effect,
                # because they have no process.
                self.workers = {
                    index: item for index, item in self.workers.items() if not item.failed
                }

    def _tell(self, index: int, grace_s: float) -> None:
        worker = self.workers[index]
        self.promise(worker.told_at is None, "P4: a worker is told to leave twice")
        worker.told_at, worker.kill_after = self.now, self.now + grace_s + LEAVE_MARGIN_S
        self.leaves += 1

    # -- checks ------------------------------------------------------------------------------------

    def _state(self) -> tuple[int, list[int], list[int], list[int]]:
        machine = self.machine
        return machine.wanted, machine.starting, machine.leaving, machine.failed

    def _check(self) -> None:
        size, processes = self.machine.wanted, sum(item.runs for item in self.workers.values())
        most = inf if self.bounds.most is None else self.bounds.most
        self.promise(self.bounds.min <= size <= most, "P1: out of bounds")
        self.promise(size >= 1, "P1: no worker is wanted")
        if self.closing:
            return
        self.promise(len(self.held) <= size, "P2: more workers are held than are wanted")
        self.promise(
            self.bounds.room is None or processes <= self.bounds.room,
            "P2: there is no room for a process",
        )
        leaving = sorted(index for index, item in self.workers.items() if item.told_at is not None)
        self.promise(self.machine.leaving == leaving, "P4: it is not known which workers leave")
        for worker in self.workers.values():
            late = self.machine.deadline is not None and self.machine.deadline <= self.now
            overdue = worker.told_at is not None and worker.runs and worker.kill_after < self.now
            self.promise(late or not overdue or worker.killed, "P4: a worker outlives its grace")

    def _calm_down(self) -> None:
        """No more faults: what leaves ends, what starts registers, what was killed is gone."""
        if self.closing:
            return
        for _ in range(3):
            self.now += 60.0
            self._handle(Ticked())
            for index in [
                index for index, item in self.workers.items() if item.told_at is not None
            ]:
                self.promise(
                    not self.workers[index].hangs, "P4: a worker that hangs is never killed"
                )
                self._end(index, in_order=True, restarts=False)
            for worker in self.workers.values():
                worker.registered = worker.runs
            self._members()
        failed = sum(item.failed for item in self.held.values())
        running = sum(item.registered for item in self.held.values())
        full = self.bounds.room is not None and running + failed >= self.bounds.room
        size = self.machine.wanted
        self.promise(
            running + failed == size or (full and running + failed < size),
            "P10: other workers run than are wanted",
        )
        self.promise(
            not self.machine.starting and not self.machine.leaving,
            "P10: something is still expected",
        )


def simulate_elasticity(seed: int) -> ElasticitySim:
    """Run one seed. Raises AssertionError where a promise is broken."""
    return ElasticitySim(seed).run()
