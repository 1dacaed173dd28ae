"""Tasks that watch each other in virtual time, with the real WatchedTasks of each task.

Each task begins to watch the others at some time, sends them messages, and passes on which
incarnation it has last heard from. Faults: a task ends and comes back in another incarnation, a
connection ends. After FAULTS_S no more faults come.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.sim.simulations.calls import SimCall, SimHost, SimWorld
from zmqdist.coordination.replies import Task, task_name
from zmqdist.tasks.watches_machine import (
    ProbeTask,
    ReportGone,
    ReportSeen,
    WatchedTasks,
    WatchEffect,
    WatchTask,
)

TASKS: tuple[Task, ...] = (("worker", 0), ("worker", 1), ("worker", 2))
FAULTS_S = 4.0
END_S = 8.0
DOWN_S = 0.6
SPEAK_S = 0.4
APPEARS_S = 0.3
"""The longest time until a call that waits for a server finds it, in seconds: its client connects
again with back-off."""

NOTICED_S = 0.2
"""Within this time the end of a task is noticed by those to which it was connected."""


class SimTask:
    """A model of tasks/liveness.py, for one incarnation of a task.

    Attributes:
      heard: the incarnation of each task that last sent a message to this one directly.
      heard_while_watched: the incarnation of each watched task that last sent a message to this
        one.
      taken_on_trust: the tasks that are no longer gone, because another task has passed on a
        message of theirs.
      in_flight: the watches that have not ended, by task.
      faults_seen: by task, the world's count of faults between the two when that task last replied
        to a watch; at first, when this incarnation started.
    """

    def __init__(self, world: WatchesSim, task: Task) -> None:
        self.world = world
        self.task = task
        self.host = SimHost(world.network, task_name(task), world.new_life())
        self.host.methods |= {
            "watch": self._watch_call,
            "speak": self._spoken,
            "relay": self._relayed,
        }
        self.host.on_left = self._left
        self.machine = WatchedTasks(task)
        self.heard: dict[Task, int] = {}
        self.heard_while_watched: dict[Task, int] = {}
        self.taken_on_trust: set[Task] = set()
        self.in_flight: dict[Task, int] = {}
        self.faults_seen = {other: world.faults_between(task, other) for other in TASKS}
        world.network.start(self.host)
        for other in TASKS:
            if other != task:
                start_s = world.random.random() * 1.5
                world.clock.after(start_s, partial(self.host.post, partial(self._watch, other)))
        self._later()

    def _watch(self, other: Task) -> None:
        self._perform(self.machine.watched(other, "there"))

    def _perform(self, effects: list[WatchEffect]) -> None:
        world = self.world
        for effect in effects:
            match effect:
                case WatchTask(other, incarnation):
                    self.in_flight[other] = self.in_flight.get(other, 0) + 1
                    world.promise(
                        self.in_flight[other] == 1,
                        "watches W1: two watches of a task are in flight",
                    )
                    self._send_watch(other, incarnation)
                case ProbeTask(other):
                    name, then = task_name(other), partial(self._probe_ended, other)
                    world.network.call(self.host, name, "watch", 0, then=then)
                case ReportSeen(other, incarnation):
                    world.note(f"{self.host} sees {other} {incarnation}")
                    self.taken_on_trust.discard(other)
                    self._alive(other)
                case ReportGone(other, message):
                    world.note(f"{self.host} says: {message}")
                    new = world.faults_between(self.task, other) > self.faults_seen[other]
                    world.promise(new, "watches W4: a task is gone without a fault")

    def _send_watch(self, other: Task, incarnation: int) -> None:
        world, name = self.world, task_name(other)
        if not incarnation and name not in world.network.hosts:
            world.clock.after(
                world.random.random() * APPEARS_S,
                lambda: self.host.post(lambda: self._send_watch(other, incarnation)),
            )
            return
        world.network.call(
            self.host, name, "watch", incarnation, then=partial(self._watch_ended, other)
        )

    def _watch_ended(self, other: Task, value: Any, code: int, message: str) -> None:
        self.in_flight[other] -= 1
        self._perform(self.machine.watch_ended(other, code, message, value or 0))

    def _probe_ended(self, other: Task, value: Any, code: int, message: str) -> None:
        self._perform(self.machine.probe_ended(other, code, message))

    def _left(self, peer: SimHost) -> None:
        other = self.world.task_of(peer)
        self._perform(
            self.machine.connection_ended(other, self.world.network.is_connected(self.host, peer))
        )

    def _alive(self, other: Task) -> None:
        self.faults_seen[other] = self.world.faults_between(self.task, other)

    # -- methods -----------------------------------------------------------------------------------

    def _watch_call(self, call: SimCall, incarnation: int) -> None:
        if incarnation != self.host.life:
            call.answer(self.host.life)

    def _spoken(self, call: SimCall, index: int, life: int) -> None:
        world, other = self.world, TASKS[index]
        open_still = call.connection.open
        known, gone = self.machine.incarnation(other), self.machine.gone_message(other)
        self.machine.heard_from(other, life, open_still)
        still = self.machine.gone_message(other)
        if gone and life == known:
            world.promise(bool(still), "watches W3: a late message makes a task up")
        if open_still:
            self.heard[other] = life
            self.taken_on_trust.discard(other)
            if self.machine.is_watched(other):
                self.heard_while_watched[other] = life
            world.promise(
                not still or life == known, "watches W2: a task that speaks counts as gone"
            )

    def _relayed(self, call: SimCall, index: int, life: int) -> None:
        other = TASKS[index]
        if other == self.task:
            return
        known, gone = self.machine.incarnation(other), self.machine.gone_message(other)
        self.machine.heard_from(other, life, None)
        still = self.machine.gone_message(other)
        if gone and not still:
            self.taken_on_trust.add(other)
        if gone and life == (known or self.heard.get(other, 0)):
            self.world.promise(
                bool(still), "watches W3: a late message, passed on, makes a task up"
            )

    def _later(self) -> None:
        self.world.clock.after(
            self.world.random.random() * SPEAK_S, lambda: self.host.post(self._speak)
        )

    def _speak(self) -> None:
        world = self.world
        index = world.random.randrange(len(TASKS))
        if TASKS[index] != self.task:
            name = task_name(TASKS[index])
            if world.random.random() < 0.5:
                world.network.call(self.host, name, "speak", TASKS.index(self.task), self.host.life)
            else:
                for other, life in self.heard.items():
                    world.network.call(self.host, name, "relay", TASKS.index(other), life)
        self._later()


class WatchesSim(SimWorld):
    """One run of the tasks with seeded faults.

    Attributes:
      tasks: the current incarnation of each task that runs.
    """

    def __init__(self, seed: int, faults: int = 8) -> None:
        super().__init__(seed)
        self.tasks: dict[Task, SimTask] = {}
        self.ends: dict[Task, int] = dict.fromkeys(TASKS, 0)
        self._cuts: dict[frozenset[Task], int] = {}
        self._stays_down = TASKS[seed % len(TASKS)] if seed % 2 else None
        for task in TASKS:
            self.clock.after(self.random.random(), partial(self._start, task))
        for _ in range(faults):
            self.clock.after(self.random.uniform(0.1, FAULTS_S), self._fault)
        if faults and self._stays_down is not None:
            self.clock.after(
                FAULTS_S + DOWN_S, lambda: self._end(TASKS[seed % len(TASKS)], returns=False)
            )

    def faults_between(self, one: Task, other: Task) -> int:
        """How often the other task has ended, or a connection between the two."""
        return self.ends[other] + self._cuts.get(frozenset((one, other)), 0)

    def task_of(self, host: SimHost) -> Task:
        return next(task for task in TASKS if task_name(task) == host.name)

    def run(self) -> None:
        self.clock.run(END_S)
        for task, watcher in self.tasks.items():
            for other in watcher.machine.tasks:
                running = self.tasks.get(other)
                gone, seen = watcher.machine.gone_message(other), watcher.machine.incarnation(other)
                self.promise(
                    watcher.in_flight.get(other) == 1, f"watches W1: {task} has no watch of {other}"
                )
                if running is not None:
                    up = not gone and seen == running.host.life
                    self.promise(up, f"watches W5: {task} does not see {other}, which runs")
                elif (
                    seen or other in watcher.heard_while_watched
                ) and other not in watcher.taken_on_trust:
                    self.promise(
                        bool(gone), f"watches W2: {other} has ended, and {task} does not know"
                    )

    def _start(self, task: Task) -> None:
        self.tasks[task] = SimTask(self, task)
        self.note(f"{self.tasks[task].host} starts")

    def _end(self, task: Task, returns: bool = True) -> None:
        if task in self.tasks:
            ended = self.tasks.pop(task).host
            self.note(f"{ended} ends")
            self.clock.after(NOTICED_S, lambda: self._check_noticed(task, ended.life))
            self.ends[task] += 1
            self.network.kill(task_name(task))
            if returns:
                self.clock.after(self.random.random() * DOWN_S, partial(self._start, task))

    def _check_noticed(self, task: Task, life: int) -> None:
        for watcher in self.tasks.values():
            if watcher.heard_while_watched.get(task) == life and task not in watcher.taken_on_trust:
                gone, seen = watcher.machine.gone_message(task), watcher.machine.incarnation(task)
                noticed = bool(gone) or seen not in (0, life)
                self.promise(noticed, f"watches W2: the end of {task} has not been noticed")

    def _fault(self) -> None:
        task, other = self.random.sample(TASKS, 2)
        if self.random.random() < 0.6:
            self._end(task)
        else:
            self.note(f"cut {task} to {other}")
            self._cuts[frozenset((task, other))] = self._cuts.get(frozenset((task, other)), 0) + 1
            self.network.cut(task_name(task), task_name(other))


def simulate_watches(seed: int, faults: int = 8) -> WatchesSim:
    """Run one seed. Raise AssertionError, with the seed, if a promise is broken."""
    world = WatchesSim(seed, faults)
    world.run()
    return world
