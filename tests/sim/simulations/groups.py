"""A group of tasks in virtual time: the real Agreements of its leader, and the real schedules and
mailboxes of its members.

Each member does one operation after the other, sometimes with an array that must be exchanged, over
several incarnations. Faults: members and the leader die and come back in another incarnation, lose
connections, cancel, time out, fail by themselves, or bring a value that differs from the others';
the group is aborted and reset. After FAULTS_S no more faults come, and the group must work again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tests.sim.simulations.calls import SimCall, SimHost, SimWorld
from zmqdist.coordination.replies import Task
from zmqdist.errors import ABORTED, CANCELLED, DEADLINE_EXCEEDED
from zmqdist.tasks import collectives_machine as collectives
from zmqdist.tasks.agreement_machine import Agreed, Agreements, Announcement, Verdict
from zmqdist.tasks.mailbox_machine import Key, Mailbox, Wait

FAULTS_S = 3.0
END_S = 11.0
PAUSE_S = 0.2
TIMEOUTS_S = (0.3, 1.0, 3.0)
GRACE_S = 0.5
"""The leader reports when the time of an announcement has passed. The member itself gives up this
many seconds later."""
DOWN_S = 0.4
FAULTS = ("kill", "cut", "abort")
OWN_FAULTS = ("cancel", "fail", "mismatch")


@dataclass(eq=False)
class Operation:
    """One operation at one member.

    Attributes:
      index: the number of the operation in this incarnation.
      value: the array that the member brings; no other operation has it.
      code: the code with which it has ended; None before that.
      unnumbered: the operation has failed, and its member does not know the number of its round.
    """

    member: SimMember
    index: int
    what: str
    due: float
    value: Any
    failure: tuple[int, str] | None = None
    code: int | None = None
    announced: bool = False
    unnumbered: bool = False


class _LocalCall:
    """The announcement of the leader's own member."""

    def __init__(self, host: SimHost, then: Callable[[Any, int, str], object]) -> None:
        self._host, self._then = host, then
        self._over = False

    def answer(self, value: Any) -> None:
        self._end(value, 0, "")

    def fail(self, code: int, message: str) -> None:
        self._end(None, code, message)

    def _end(self, *outcome: Any) -> None:
        assert not self._over, "a member is told twice"
        self._over = True
        self._host.network.clock.after(0.0, lambda: self._host.post(lambda: self._then(*outcome)))


class SimLeader:
    """A model of tasks/collective_leader.py, for one incarnation of the member of rank 0."""

    def __init__(self, world: GroupSim, host: SimHost) -> None:
        self._world = world
        self._host = host
        self.machine = Agreements()
        self._exchanges = 0
        self._gone: set[Task] = set()
        host.methods |= {
            "announce": self.announce,
            "withdraw": lambda call, operation: self.withdrew(operation),
            "abort": lambda call: self._hear(
                self.machine.aborted("g", world.tasks, ABORTED, "aborted")
            ),
            "reset": lambda call: self.machine.reset("g"),
        }
        self._tokens: dict[int, Any] = {}

    def announce(
        self,
        call: Any,
        rank: int,
        counter: int | None,
        what: str,
        timeout_s: float,
        failure: Any,
        load: Any,
    ) -> None:
        self._gone.discard(self._world.tasks[rank])
        self._tokens[load] = call
        if isinstance(call, SimCall):
            call.on_dropped = partial(self.withdrew, load)
        due = self._world.clock.now + timeout_s
        one = Announcement(rank, counter, what, due, load, failure, call)
        verdicts = self.machine.announced("g", self._world.tasks, one)
        for task in self._gone:
            verdicts += self.machine.member_gone(task, "gone")
        self._hear(verdicts)

    def withdrew(self, load: int) -> None:
        if load in self._tokens:
            self._hear(self.machine.announcement_withdrawn("g", self._tokens[load]))

    def left(self, peer: SimHost) -> None:
        task = self._world.task_of(peer)
        self._gone.add(task)
        self._hear(self.machine.member_gone(task, f"{peer} has gone"))

    def _hear(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            for one in verdict.members:
                self._world.promise(
                    one.due >= self._world.clock.now - 1e-9,
                    "A3: an announcement outlives its deadline",
                )
            if isinstance(verdict, Agreed):
                self._world.agreed([self._world.operations[one.load] for one in verdict.members])
                self._exchanges += 1
                answer = (
                    verdict.counter,
                    0,
                    f"{self._host.life}.{self._exchanges}",
                    [one.load for one in verdict.members],
                )
                for one in verdict.members:
                    one.token.answer(answer)
            else:
                for one in verdict.members:
                    if one.failure and one.counter and verdict.counter is not None:
                        self._world.promise(
                            verdict.counter <= one.counter, "A6: a late failure ends a later round"
                        )
                    if verdict.counter is None:
                        one.token.fail(verdict.code, verdict.message)
                    else:
                        one.token.answer((verdict.counter, verdict.code))
        self._world.wake(
            self.machine, self._host, lambda: self._hear(self.machine.ticked(self._world.clock.now))
        )


class SimMember:
    """A model of tasks/collectives.py, for one incarnation of a member."""

    def __init__(self, world: GroupSim, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.host = SimHost(world.network, f"worker:{rank}", world.new_life())
        self.counter: int | None = 0
        self.index = 0
        self.errors: list[int] = []
        """The operations that have ended with an error, as far as this member knows."""
        self.succeeded = 0
        self._boxes: dict[str, Mailbox] = {}
        self.leader = SimLeader(world, self.host) if rank == 0 else None
        self.host.methods |= {"piece": self._piece, "failed": self._failed}
        self.host.on_left = self._peer_left
        world.network.start(self.host)
        world.clock.after(world.random.random() * PAUSE_S, lambda: self.host.post(self._next))

    # -- the announcement --------------------------------------------------------------------------

    def _next(self) -> None:
        world = self.world
        if world.over:
            return
        own = world.random.choice(OWN_FAULTS) if world.random.random() < world.own_faults else ""
        timeout_s = world.random.choice(TIMEOUTS_S)
        what = "max" if own == "mismatch" else "sum"
        self.index += 1
        load = len(world.operations)
        operation = Operation(
            self, self.index, what, world.clock.now + timeout_s, np.arange(7) * 1000 + load
        )
        world.operations.append(operation)
        counter, self.counter = self.counter, None
        self._boxes.clear()
        if own == "fail":
            operation.failure = CANCELLED, f"{self.host} cannot take part"
            operation.unnumbered = counter is None
            self.counter = None if counter is None else counter + 1
        then = partial(self._replied, operation)
        args = self.rank, counter, what, timeout_s, operation.failure, load
        world.note(
            f"{self.host} announces {load}: {what}, round "
            f"{counter}{', as failed' if own == 'fail' else ''}"
        )
        if self.leader is not None:
            self.leader.announce(_LocalCall(self.host, then), *args)
        else:
            world.network.call(self.host, "worker:0", "announce", *args, then=then)
        if own == "fail":
            self.end(operation, CANCELLED)
        elif own == "cancel":
            world.clock.after(
                world.random.random() * 0.1,
                lambda: self.host.post(partial(self._gives_up, load, CANCELLED)),
            )
        world.clock.at(
            operation.due + GRACE_S,
            lambda: self.host.post(partial(self._gives_up, load, DEADLINE_EXCEEDED)),
        )

    def _gives_up(self, load: int, code: int) -> None:
        operation = self.world.operations[load]
        if operation.code is None and not operation.announced:
            if self.leader is not None:
                self.leader.withdrew(load)
            else:
                self.world.network.call(self.host, "worker:0", "withdraw", load)
            self.end(operation, code)

    def _replied(self, operation: Operation, answer: Any, code: int, message: str) -> None:
        if operation.unnumbered:
            self.counter = None if code else answer[0] + 1
            self._pause()
        if operation.code is not None:
            return
        if code:
            self.end(operation, code)
            return
        counter, code, *exchange = answer
        if code:
            self.counter = counter + 1
            self.end(operation, code)
            return
        name, loads = exchange
        operation.announced = True
        self._exchange(
            operation, counter + 1, name, [self.world.operations[load] for load in loads]
        )

    def end(self, operation: Operation, code: int) -> None:
        self.world.promise(
            operation.code is None, f"A1: {self.host} is told twice of operation {operation.index}"
        )
        operation.code = code
        self.world.note(f"{self.host}: operation {operation.index} ends with {code}")
        if code:
            self.succeeded = 0
            if operation.failure is None:
                self.errors.append(operation.index)
        else:
            self.succeeded += 1
        if not operation.unnumbered:  # otherwise the reply says which round is next
            self._pause()

    def _pause(self) -> None:
        self.world.clock.after(
            self.world.random.random() * PAUSE_S, lambda: self.host.post(self._next)
        )

    # -- the exchange ------------------------------------------------------------------------------

    def _exchange(
        self, operation: Operation, counter: int, name: str, agreed: list[Operation]
    ) -> None:
        if not self.world.exchanges or len(agreed) == 1:
            self.counter = counter
            self.end(operation, 0)
            return
        out = np.zeros_like(operation.value)
        own, parts = (
            [whole[part] for part in collectives.shares(len(out), len(agreed))]
            for whole in (operation.value, out)
        )

        def fold(arrived: Any, chunk: Any, last: bool) -> Any:
            piece = arrived + chunk
            if last:
                parts[self.rank][:] = piece
            return piece

        def keep(source: int, arrived: Any) -> None:
            parts[source][:] = arrived

        ring = collectives.all_reduce_ring(self.rank, len(agreed), own, fold, keep)
        _Exchange(
            self, operation, counter, name, agreed, collectives.pipelined(iter([ring]), 2), out
        ).go_on(None)

    def box(self, name: str) -> Mailbox:
        return self._boxes.setdefault(name, Mailbox())

    def _piece(self, call: SimCall, name: str, source: int, index: int, piece: Any) -> None:
        ended, _ = self.box(name).sent(Key(str(source), 1, "x", str(index)), piece)
        call.answer(None)
        wake(ended)

    def _failed(self, call: SimCall, name: str, code: int, message: str) -> None:
        wake(self.box(name).aborted(code, message))

    def _peer_left(self, peer: SimHost) -> None:
        if self.leader is not None:
            self.leader.left(peer)
        for box in list(self._boxes.values()):
            wake(box.sender_gone(str(self.world.task_of(peer)[1]), f"{peer} has gone"))


def wake(ended: list[Wait]) -> None:
    for wait in ended:
        if wait.wake is not None:
            wait.wake()


@dataclass
class _Exchange:
    """One exchange at one member."""

    member: SimMember
    operation: Operation
    counter: int
    name: str
    agreed: list[Operation]
    steps: Any
    out: Any
    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    unanswered: int = 0
    finished: bool = False

    def go_on(self, arrived: Any) -> None:
        world, me = self.member.world, self.member
        try:
            while True:
                step = self.steps.send(arrived)
                arrived = None
                if step.to is not None:
                    index = self.sent[step.to] = self.sent.get(step.to, -1) + 1
                    self.unanswered += 1
                    args = self.name, me.rank, index, step.piece
                    world.network.call(
                        me.host, f"worker:{step.to}", "piece", *args, then=self._sent
                    )
                    continue
                index = self.received[step.source] = self.received.get(step.source, -1) + 1
                box = me.box(self.name)
                wait = box.wanted(Key(str(step.source), 1, "x", str(index)), world.clock.now + 3.0)
                if not wait.ended:
                    wait.wake = partial(self._woken, wait)
                    world.wake(box, me.host, partial(self._tick, box))
                    return
                if wait.code:
                    self._fail(wait.code, wait.message)
                    return
                arrived = wait.letter
        except StopIteration:
            total = sum(operation.value for operation in self.agreed)
            world.promise(
                np.array_equal(self.out, total), f"collectives: {me.host} has not the sum of all"
            )
            self.finished = True
            self._end_if_answered()

    def _sent(self, value: Any, code: int, message: str) -> None:
        self.unanswered -= 1
        if code:
            self._fail(code, message)
        else:
            self._end_if_answered()

    def _end_if_answered(self) -> None:
        if self.finished and not self.unanswered and self.operation.code is None:
            self.member.counter = self.counter
            self.member.end(self.operation, 0)

    def _tick(self, box: Mailbox) -> None:
        wake(box.ticked(self.member.world.clock.now))

    def _woken(self, wait: Wait) -> None:
        if self.operation.code is None:
            if wait.code:
                self._fail(wait.code, wait.message)
            else:
                self.go_on(wait.letter)

    def _fail(self, code: int, message: str) -> None:
        me = self.member
        if self.operation.code is not None:
            return
        for rank in range(len(self.agreed)):
            if rank != me.rank:
                me.world.network.call(me.host, f"worker:{rank}", "failed", self.name, code, message)
        me.end(self.operation, code)


class GroupSim(SimWorld):
    """One run of a group with seeded faults."""

    def __init__(self, seed: int, faults: int = 12) -> None:
        super().__init__(seed)
        self.size = self.random.randint(1, 5)
        self.tasks = [("worker", rank) for rank in range(self.size)]
        self.operations: list[Operation] = []
        self.agreements = self.agreed_in_calm = 0
        self.over = False
        self.exchanges = self.random.random() < 0.7
        self.own_faults = self.random.choice((0.0, 0.05, 0.2)) if faults else 0.0
        self._met: dict[tuple[SimMember, SimMember], tuple[int, int]] = {}
        self.members = [SimMember(self, rank) for rank in range(self.size)]
        for _ in range(faults):
            self.clock.after(self.random.uniform(0.1, FAULTS_S), self._fault)
        self.clock.at(FAULTS_S, self._calm)

    def run(self) -> None:
        self.clock.run(END_S)
        self.promise(
            all(member.succeeded >= 3 for member in self.members),
            "A4: the group does not work any more",
        )
        self.over = True
        self.clock.run(END_S + 5.0)
        leader = self.members[0].leader
        assert leader is not None
        self.promise(
            not leader.machine.waiting(), "A3: an announcement is left when all have ended"
        )
        self.promise(leader.machine.deadline > self.clock.now, "A3: a deadline has passed")

    def task_of(self, host: SimHost) -> Task:
        return "worker", int(host.name.rpartition(":")[2])

    def agreed(self, operations: list[Operation]) -> None:
        """Note the operations that the leader has agreed on as one round."""
        self.note(f"agreed: {[f'{each.member.host}/{each.index}' for each in operations]}")
        self.agreements += 1
        self.agreed_in_calm += self.clock.now > FAULTS_S
        self.promise(
            [each.member.rank for each in operations] == list(range(self.size)),
            "A1: agreed without all",
        )
        self.promise(len({each.what for each in operations}) == 1, "A2: agreed on different things")
        self.promise(
            all(each.failure is None for each in operations), "A2: agreed with one that has failed"
        )
        for first in operations:
            for other in operations:
                pair = first.member, other.member
                was = self._met.get(pair)
                self._met[pair] = first.index, other.index
                if was is not None and not any(
                    since <= error < each.index
                    for each, since in zip((first, other), was, strict=True)
                    for error in each.member.errors
                ):
                    apart = other.index - was[1] == first.index - was[0]
                    self.promise(apart, "A5: announcements of different rounds meet")

    def _calm(self) -> None:
        self.own_faults = 0.0
        self.note("calm")

    def _fault(self) -> None:
        kind = self.random.choice(FAULTS)
        rank = self.random.randrange(self.size)
        self.note(f"{kind} {rank}")
        if kind == "kill" and self.members[rank].host.alive:
            self.network.kill(f"worker:{rank}")
            self.clock.after(self.random.random() * DOWN_S, lambda: self._start(rank))
        elif kind == "cut":
            other = self.random.choice((0, self.random.randrange(self.size)))
            if other != rank:
                self.network.cut(f"worker:{rank}", f"worker:{other}")
        elif kind == "abort" and self.members[rank].host.alive:
            self.network.call(self.members[rank].host, "worker:0", "abort")
            self.clock.after(0.3, lambda: self._reset())

    def _start(self, rank: int) -> None:
        self.members[rank] = SimMember(self, rank)

    def _reset(self) -> None:
        host = self.members[0].host
        if host.alive and self.members[0].leader is not None:
            self.members[0].leader.machine.reset("g")


def simulate_group(seed: int, faults: int = 12) -> GroupSim:
    """Run one seed. Raise AssertionError, with the seed, if a promise is broken."""
    world = GroupSim(seed, faults)
    world.run()
    return world
