"""A coordination machine that a test drives: tasks call it, and the test can read the reply to each
call at any time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from zmqdist.coordination.barriers_machine import RoundOutcome
from zmqdist.coordination.keys_machine import Keys
from zmqdist.coordination.machine import Coordination, CoordinationConfig
from zmqdist.coordination.replies import Effect, ReplyValue, Task
from zmqdist.errors import OK

TIMEOUT_S = 2.0
BACK_S = 0.5
OURS = CoordinationConfig(heartbeat_timeout_s=TIMEOUT_S, reconnect_grace_s=BACK_S)


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
    keys: Keys = field(default_factory=Keys)
    now: float = 0.0
    lives: dict[Task, int] = field(default_factory=dict)

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

    def report(self, task: Task, code: int, message: str) -> Call:
        call = Call()
        self.tell(self.machine.reported(call, task, self.life(task), code, message, self.now))
        return call

    def reset(self, task: Task) -> Call:
        call = Call()
        self.tell(self.machine.reset(call, task, self.now))
        return call

    def shut_down(self, task: Task, together: bool = True) -> Call:
        call = Call()
        self.tell(self.machine.left(call, task, self.life(task), together, self.now))
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

    def cancel(self, task: Task, *, name: str = "b", counter: int = 0) -> Call:
        call = Call()
        self.tell(self.machine.barrier_cancelled(call, name, counter, task, self.now))
        return call

    def wait_for_all(self, task: Task, devices: Iterable[str] = (), timeout_s: float = inf) -> Call:
        call = Call()
        due = self.now + timeout_s
        self.tell(
            self.machine.waited_for_all(call, task, self.life(task), list(devices), due, self.now)
        )
        return call

    def alive(self, task: Task, tasks: Iterable[Task] | None = None) -> Call:
        call = Call()
        self.tell(self.machine.alive_requested(call, task, self.life(task), tasks, self.now))
        return call

    def stop(self) -> None:
        self.tell(self.machine.stopped("the service has stopped", self.now))

    def advance(self, seconds: float) -> None:
        """Let time pass, with a tick at each deadline of the machine."""
        end = self.now + seconds
        while (at := self.machine.deadline) <= end:
            self.now = max(self.now, at)
            self.tell(self.machine.ticked(self.now))
            assert self.machine.deadline > self.now, "the machine has the same deadline again"
        self.now = end

    def state(self, task: Task) -> str:
        return {state.task: state.state for state in self.machine.states()}[task]


def cluster(
    tasks: int | list[Task] | None = 3, *, up: bool = True, config: CoordinationConfig = OURS
) -> Cluster:
    """Return a cluster of so many workers, or of these tasks, which have registered if `up`."""
    names = workers(tasks) if isinstance(tasks, int) else tasks
    made = Cluster(Coordination(names, config))
    for task in (names or []) if up else []:
        assert made.register(task).code == OK
    return made
