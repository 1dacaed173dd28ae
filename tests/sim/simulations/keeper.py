"""A keeper of barriers, keys and task states, with its tasks, in virtual time: the real
Coordination, Barriers and Keys.

Each task registers, polls for errors, goes from barrier to barrier, and sets and gets keys. Faults:
tasks die and come back in another incarnation, lose their connection, freeze, report an error and
are reset, cancel a barrier, or time out too early. After FAULTS_S no more faults come, and all
tasks must meet at barriers again.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any

from tests.sim.simulations.calls import SimCall, SimHost, SimWorld
from zmqdist.coordination.keys_machine import Keys
from zmqdist.coordination.machine import ERROR, UP, Coordination, CoordinationConfig
from zmqdist.coordination.replies import Effect, ReplyValue, Task, task_name
from zmqdist.errors import (
    ALREADY_EXISTS,
    CANCELLED,
    DEADLINE_EXCEEDED,
    INTERNAL,
    NOT_FOUND,
    OK,
    UNAVAILABLE,
)

FAULTS_S = 5.0
END_S = 15.0
PAUSE_S = 0.1
AGAIN_S = 0.05
DOWN_S = 0.5
POLL_S = 0.25
CONFIG = CoordinationConfig(
    heartbeat_timeout_s=1.0, reconnect_grace_s=0.4, new_incarnation_may_return=True
)
FAULTS = ("kill", "kill", "cut", "freeze", "report", "cancel")


class SimKeeper:
    """A model of coordination/service.py."""

    def __init__(self, world: KeeperSim) -> None:
        self.world = world
        self.host = SimHost(world.network, "keeper", world.new_life())
        self.tasks = Coordination(world.tasks, CONFIG)
        self.keys = Keys()
        self.host.methods |= {
            "register": self._register,
            "poll": self._poll,
            "barrier": self._barrier,
            "cancel": lambda call, task, counter: self._perform(
                self.tasks.barrier_cancelled(call, "b", counter, task, self._now)
            ),
            "report": lambda call, task, life: self._perform(
                self.tasks.reported(call, task, life, INTERNAL, "it has failed", self._now)
            ),
            "reset": lambda call, task: self._perform(self.tasks.reset(call, task, self._now)),
            "put": self._put,
            "get": self._get,
        }
        self.host.on_left = self._left
        self.ended: set[Any] = set()
        self.waiting: dict[Any, tuple[Task, int, int, float]] = {}
        """The callers of the barrier: task, incarnation, counter, deadline of the caller."""
        self.life: dict[Task, int] = {}
        """The incarnation of each task that has registered last."""
        self.last_passed: dict[Task, tuple[int, int]] = {}
        self._values: dict[str, int] = {}
        self._getting: dict[Any, tuple[str, float]] = {}
        world.network.start(self.host)

    @property
    def _now(self) -> float:
        return self.world.clock.now

    # -- calls of tasks ----------------------------------------------------------------------------

    def _keep(self, call: SimCall) -> None:
        call.on_dropped = partial(self._dropped, call)

    def _dropped(self, call: SimCall) -> None:
        self.ended.add(call)
        self.waiting.pop(call, None)
        self._getting.pop(call, None)
        self.keys.dropped(call)
        self._perform(self.tasks.dropped(call))

    def _register(self, call: SimCall, task: Task, life: int) -> None:
        self._keep(call)
        before = self.life.get(task, 0)
        effects = self.tasks.registered(call, task, life, self._now)
        if self.tasks.is_registered(task, life):
            self.world.promise(
                life >= before, "coordination P1: a former life is taken for the present one"
            )
            self.life[task] = life
        self._perform(effects)

    def _poll(self, call: SimCall, task: Task, life: int, after: int) -> None:
        self._keep(call)
        self._perform(self.tasks.polled(call, task, life, after, self._now + POLL_S, self._now))

    def _barrier(
        self, call: SimCall, task: Task, life: int, counter: int, timeout_s: float
    ) -> None:
        self._keep(call)
        due = self._now + timeout_s
        self.waiting[call] = task, life, counter, due
        self._perform(self.tasks.barrier(call, task, life, "b", counter, None, due, self._now))

    def _put(self, call: SimCall, key: str, value: int, overwrite: bool) -> None:
        there = key in self._values
        effects = self.keys.put(call, key, value, 8, overwrite)
        code = 0 if isinstance(effects[-1], ReplyValue) else effects[-1].code
        self.world.promise(
            code == (ALREADY_EXISTS if there and not overwrite else OK),
            "keys P1: the wrong value stays",
        )
        if code == OK:
            self._values[key] = value
        self._perform(effects)

    def _get(self, call: SimCall, key: str, timeout_s: float) -> None:
        self._keep(call)
        self._getting[call] = key, self._now + timeout_s
        if timeout_s:
            self._perform(self.keys.get(call, key, self._now + timeout_s))
        else:
            self._perform(self.keys.try_get(call, key))

    # -- replies -----------------------------------------------------------------------------------

    def _perform(self, effects: list[Effect]) -> None:
        world = self.world
        passed: list[tuple[Task, int, int, float]] = []
        for effect in effects:
            call: Any = effect.ticket
            world.promise(call not in self.ended, "coordination P2: a ticket is answered twice")
            self.ended.add(call)
            waiting, getting = self.waiting.pop(call, None), self._getting.pop(call, None)
            if isinstance(effect, ReplyValue):
                if waiting is not None and effect.value.code == OK:
                    passed.append(waiting)
                if getting is not None:
                    world.promise(
                        effect.value == self._values.get(getting[0]),
                        "keys P1: not the value that was set last",
                    )
                call.answer(effect.value)
            else:
                if getting is not None:
                    late = effect.code == DEADLINE_EXCEEDED and self._now >= getting[1]
                    world.promise(
                        late or effect.code == NOT_FOUND, "keys P2: a wait ends before its time"
                    )
                call.fail(effect.code, effect.message)
        if passed:
            self._passed(passed)
        self._check()
        world.wake(self.tasks, self.host, lambda: self._perform(self.tasks.ticked(self._now)))
        world.wake(self.keys, self.host, lambda: self._perform(self.keys.ticked(self._now)))

    def _passed(self, callers: list[tuple[Task, int, int, float]]) -> None:
        world = self.world
        repeated = [
            self.last_passed.get(task) == (life, counter) for task, life, counter, _ in callers
        ]
        if all(repeated):  # the reply was lost, and the keeper repeats it
            return
        world.rounds += 1
        world.rounds_in_calm += self._now > FAULTS_S
        world.note(f"the barrier passes: {callers}")
        world.promise(
            {task for task, *_ in callers} == set(world.tasks), "barriers P1: passed without all"
        )
        world.promise(
            len({counter for _, _, counter, _ in callers}) == 1,
            "barriers P5: passed in different rounds",
        )
        for task, life, _, _ in callers:
            world.promise(self.life[task] == life, "barriers P5: passed by a former life")
        self.last_passed = {task: (life, counter) for task, life, counter, _ in callers}

    def _check(self) -> None:
        states = {state.task: state.state for state in self.tasks.states()}
        missing = self.tasks.missing("b")
        dead = [task for task in missing if states[task] == ERROR]
        self.world.promise(
            not dead, f"coordination P3: a barrier waits for {dead}, which is in error"
        )
        for _, _, _, due in self.waiting.values():
            self.world.promise(due >= self._now - 5.0, "barriers P4: a caller waits for ever")

    def _left(self, peer: SimHost) -> None:
        task = self.world.task_of(peer)
        if not peer.alive and self.world.sees_ends:
            self._perform(self.tasks.lost(task, peer.life, "its process has ended", self._now))
        else:
            self._perform(self.tasks.away(task, peer.life, self._now))


class SimKeptTask:
    """A model of coordination/client.py and client.py, for one incarnation of a task."""

    def __init__(self, world: KeeperSim, index: int) -> None:
        self.world = world
        self.task: Task = ("worker", index)
        self.host = SimHost(world.network, task_name(self.task), world.new_life())
        self.counter = 0
        self.passed = 0
        self._after = -1
        self._up = False
        world.network.start(self.host)
        self._register()
        self._meet()
        self._use_keys()

    def _ask(self, method: str, *args: Any, then: Any = lambda *_: None) -> None:
        self.world.network.call(self.host, "keeper", method, *args, then=then)

    def _later(self, fn: Any, pause_s: float = PAUSE_S) -> None:
        self.world.clock.after(self.world.random.random() * pause_s, lambda: self.host.post(fn))

    def _register(self) -> None:
        self._ask("register", self.task, self.host.life, then=self._registered)

    def _registered(self, welcome: Any, code: int, message: str) -> None:
        if code == UNAVAILABLE:
            self._later(self._register, AGAIN_S)
        elif code:  # the task is in error, because it has reported one: reset it
            self._up = False
            self._ask("reset", self.task, then=lambda *_: self._later(self._register, AGAIN_S))
        else:
            self._up = True
            self._after = max(self._after, welcome.errors_count)
            self._poll()

    def _poll(self) -> None:
        self._ask("poll", self.task, self.host.life, self._after, then=self._polled)

    def _polled(self, errors: Any, code: int, message: str) -> None:
        if code:
            self._register()
            return
        for error in errors:
            self.world.promise(
                error.number == self._after + 1,
                "coordination P4: an error is told twice, or not at all",
            )
            self._after = error.number
        self._poll()

    def _meet(self) -> None:
        if self.world.over:
            return
        timeout_s = self.world.random.choice((0.2, 1.0, 4.0))
        self._ask("barrier", self.task, self.host.life, self.counter, timeout_s, then=self._met)
        if self.world.random.random() < self.world.cancels:
            self._later(lambda: self._ask("cancel", self.task, self.counter))

    def _met(self, outcome: Any, code: int, message: str) -> None:
        if code == OK:
            self.world.promise(
                outcome.counter >= self.counter - 1 or outcome.code == CANCELLED,
                "barriers P2: of an older round",
            )
            self.counter = max(self.counter, outcome.counter + 1)
            self.passed = self.passed + 1 if outcome.code == OK else 0
        self._later(self._meet)

    def _use_keys(self) -> None:
        if self.world.over:
            return
        random = self.world.random
        key = random.choice(("x", "y", "dir/z"))
        if random.random() < 0.5:
            self._ask("put", key, self.world.new_life(), random.random() < 0.5)
        else:
            self._ask("get", random.choice((key, "never")), random.choice((0.0, 0.5)))
        self._later(self._use_keys, 0.5)


class KeeperSim(SimWorld):
    """One run of a keeper with seeded faults."""

    def __init__(self, seed: int, faults: int = 12) -> None:
        super().__init__(seed)
        self.size = self.random.randint(1, 4)
        self.tasks: list[Task] = [("worker", index) for index in range(self.size)]
        self.sees_ends = self.random.random() < 0.5
        self.cancels = 0.05 if faults else 0.0
        self.rounds = self.rounds_in_calm = 0
        self.over = False
        self.keeper = SimKeeper(self)
        self.programs = [SimKeptTask(self, index) for index in range(self.size)]
        for _ in range(faults):
            self.clock.after(self.random.uniform(0.1, FAULTS_S), self._fault)
        self.clock.at(FAULTS_S, self._calm)

    def run(self) -> None:
        self.clock.run(END_S)
        self.promise(
            all(each.passed >= 3 for each in self.programs),
            "barriers: the tasks do not meet any more",
        )
        states = {state.state for state in self.keeper.tasks.states()}
        self.promise(states == {UP}, f"coordination: in the end not all are up: {states}")
        self.over = True
        self.clock.run(END_S + 5.0)
        self.promise(not self.keeper.waiting, "coordination P2: a caller of a barrier is left")
        self.promise(self.keeper.keys.waiting == 0, "keys P3: a question is left")
        self.promise(
            self.keeper.tasks.waiting <= self.size,
            "coordination P2: more waits than the question for errors of each",
        )
        self.promise(
            self.keeper.tasks.deadline < inf, "coordination: nobody looks for tasks that are silent"
        )

    def task_of(self, host: SimHost) -> Task:
        return "worker", int(host.name.rpartition(":")[2])

    def _calm(self) -> None:
        self.cancels = 0.0
        self.note("calm")
        for program in self.programs:
            program.host.thaw()

    def _fault(self) -> None:
        kind, index = self.random.choice(FAULTS), self.random.randrange(self.size)
        program = self.programs[index]
        self.note(f"{kind} {index}")
        if not program.host.alive:
            return
        if kind == "kill":
            self.network.kill(program.host.name)
            self.clock.after(self.random.random() * DOWN_S, lambda: self._start(index))
        elif kind == "cut":
            self.network.cut(program.host.name, "keeper")
        elif kind == "freeze":
            program.host.frozen = True
            self.clock.after(self.random.random() * 2.0, program.host.thaw)
        elif kind == "report":
            self.network.call(program.host, "keeper", "report", program.task, program.host.life)
        else:
            self.network.call(program.host, "keeper", "cancel", program.task, program.counter)

    def _start(self, index: int) -> None:
        self.programs[index] = SimKeptTask(self, index)


def simulate_keeper(seed: int, faults: int = 12) -> KeeperSim:
    """Run one seed. Raise AssertionError, with the seed, if a promise is broken."""
    world = KeeperSim(seed, faults)
    world.run()
    return world
