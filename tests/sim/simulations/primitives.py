"""Locks, semaphores, queues and events of a dispatcher, with the processes that use them, in virtual
time: the real Primitives and PrimitivesClients.

Each process has threads that take places, put and get items, and use an event. Faults: processes
die, freeze, lose their connections, or give up waits; the keeper dies, and its successor knows
nothing. After FAULTS_S no more faults come, and all operations must end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from tests.sim.simulations.calls import SimCall, SimHost, SimWorld
from zmqdist.coordination.primitives_client_machine import KeeperCall, Operation, PrimitivesClient
from zmqdist.coordination.primitives_machine import Hold, Key, PrimitiveRequest, Primitives
from zmqdist.coordination.replies import Effect, ReplyValue
from zmqdist.errors import (
    ABORTED,
    DEADLINE_EXCEEDED,
    UNAVAILABLE,
    AbortedError,
    OpError,
    from_code,
)

FAULTS_S = 6.0
OVER_S = 12.0
END_S = 20.0
LEASE_S = 1.0
PAUSE_S = 0.4
DOWN_S = 1.5
AGAIN_S = 0.05
FAULTS = ("kill", "kill", "cut", "cut", "freeze", "freeze", "give up", "kill keeper")
PLACES: tuple[tuple[Key, int], ...] = ((("lock", "l"), 1), (("semaphore", "s"), 2))
JOBS: Key = ("queue", "q")
STOP: Key = ("event", "e")
SIZE = 3
"""The maxsize of the queue."""

Then = Callable[[Any, OpError | None], object]


class SimPrimitivesKeeper:
    """A model of coordination/primitives_service.py."""

    def __init__(self, world: PrimitivesSim, settled_at: float) -> None:
        self.world = world
        self.host = SimHost(world.network, "keeper", world.new_life())
        self.machine = Primitives(LEASE_S, settled_at, first_fence=self.host.life * 1_000_000)
        self.host.methods |= {
            "open": self._open,
            "renew": self._renew,
            "request": self._request,
        }
        self.host.on_left = self._left
        self._clients: dict[SimHost, int] = {}
        self._lines: dict[tuple[Key, bool], list[Any]] = {}
        """The waiting calls of each line, in their order."""
        self._demands: dict[Any, PrimitiveRequest] = {}
        self._given: dict[tuple[int, int], bytes] = {}
        world.network.start(self.host)
        self.perform([])

    def _open(self, call: SimCall, client: int, pid: int, holds: Any) -> None:
        peer = self.world.host_of(pid)
        former = client
        if peer is not None:
            if self.world.network.is_connected(peer, self.host):
                former = self._clients.get(peer, client)
            self._clients[peer] = max(former, client)
        *effects, reply = self.machine.opened(
            call,
            client,
            [Hold(number, (kind, name), size, fence) for number, kind, name, size, fence in holds],
            self.world.clock.now,
            former,
        )
        if isinstance(reply, ReplyValue):
            reply = ReplyValue(call, (self.host.life, LEASE_S, reply.value))
        self.perform([*effects, reply])

    def _renew(self, call: SimCall, client: int, pid: int, confirmed: Any, withdrawn: Any) -> None:
        peer = self.world.host_of(pid)
        if peer is not None:
            self._clients[peer] = max(client, self._clients.get(peer, 0))
        effects = self.machine.renewed(call, client, confirmed, withdrawn, self.world.clock.now)
        if isinstance(effects[-1], ReplyValue):
            for number in confirmed:
                if (item := self._given.pop((client, number), None)) is not None:
                    self.world.item_confirmed(item)
            for number in withdrawn:
                self._given.pop((client, number), None)
        self.perform(effects)

    def _request(
        self,
        call: SimCall,
        client: int,
        number: int,
        verb: str,
        kind: str,
        name: str,
        size: Any,
        item: bytes,
        timeout_s: Any,
    ) -> None:
        now = self.world.clock.now
        due = inf if timeout_s is None else now + timeout_s
        demand = PrimitiveRequest(client, number, verb, (kind, name), size, item, due)
        call.on_dropped = partial(self._dropped, call, client, number)
        effects = self.machine.requested(call, demand, now)
        self._demands[call] = demand
        self._line(demand).append(call)
        self.perform(effects)

    def _line(self, demand: PrimitiveRequest) -> list[Any]:
        return self._lines.setdefault((demand.key, demand.verb == "put"), [])

    def _dropped(self, call: SimCall, client: int, number: int) -> None:
        self._leave(call)
        self.perform(self.machine.dropped(client, number))

    def _leave(self, call: Any) -> None:
        demand = self._demands.pop(call, None)
        if demand is not None:
            self._line(demand).remove(call)

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            call: Any = effect.ticket
            demand = self._demands.get(call)
            if isinstance(effect, ReplyValue):
                if demand is not None:
                    self._check(call, demand, effect.value)
                call.answer(effect.value)
            else:
                call.fail(effect.code, effect.message)
            self._leave(call)
        self.world.wake(
            self.machine,
            self.host,
            lambda: self.perform(self.machine.ticked(self.world.clock.now)),
        )

    def _check(self, call: Any, demand: PrimitiveRequest, outcome: Any) -> None:
        """Compare an outcome with the line, and note what it says about an item."""
        world = self.world
        if outcome is not None and demand.verb in ("acquire", "get", "put"):
            world.promise(
                self._line(demand)[0] is call,
                f"primitives P4: {demand.verb} of {demand.key} overtook another one",
            )
        if demand.verb == "put" and outcome is True:
            world.item_accepted(demand.item, self.host.life)
        if demand.verb == "get" and outcome is not None:
            self._given[demand.client, demand.number] = outcome
            world.item_given(outcome)

    def _left(self, peer: SimHost) -> None:
        client = self._clients.pop(peer, None)
        if client is not None and not peer.alive and self.world.sees_ends:
            self.perform(self.machine.lost(client))


class SimUser:
    """One incarnation of a process that uses primitives: a model of primitives_client.py and of its
    program."""

    def __init__(self, world: PrimitivesSim, index: int) -> None:
        self.world = world
        self.index = index
        self.host = SimHost(world.network, f"user{index}", world.new_life())
        self.client = PrimitivesClient("keeper", self.host.life, 1000 * self.host.life)
        self.waits: list[tuple[Operation[Any], list[bool], Then]] = []
        self.put_count = 0
        self.progress: Counter[str] = Counter()
        self._keepers: Counter[Key] = Counter()
        self._requests: set[Operation[Any]] = set()
        """The operations that the program may give up."""
        world.network.start(self.host)
        self._keep_lease(AGAIN_S)
        for loop in (self._take, self._take, self._put, self._get, self._use_event):
            self._later(loop)

    def _later(self, fn: Callable[[], object], pause_s: float = PAUSE_S) -> None:
        self.world.clock.after(self.world.random.random() * pause_s, lambda: self.host.post(fn))

    def _keep_lease(self, pause_s: float) -> None:
        self.world.clock.after(
            pause_s,
            lambda: self.host.post(
                lambda: self.run(self.client.renew(), lambda next_s, _: self._keep_lease(next_s))
            ),
        )

    def run(self, operation: Operation[Any], then: Then) -> None:
        """Run an operation to its end; `then` gets its result or its error."""
        self._advance(operation, None, [False], then)

    def _advance(
        self, operation: Operation[Any], outcome: Any, over: list[bool], then: Then
    ) -> None:
        if over[0]:
            return
        self.client.now = self.world.clock.now
        try:
            is_error = isinstance(outcome, OpError)
            step = operation.throw(outcome) if is_error else operation.send(outcome)
        except StopIteration as end:
            then(end.value, None)
        except OpError as error:
            then(None, error)
        else:
            self._call(operation, step, over, then)

    def _call(
        self, operation: Operation[Any], step: KeeperCall, over: list[bool], then: Then
    ) -> None:
        has_ended = [False]
        wait = operation, over, then
        self.waits.append(wait)

        def end(value: Any, code: int, message: str) -> None:
            if has_ended[0] or over[0]:
                return
            if code == UNAVAILABLE and step.waits and message.endswith("is not there"):
                self.world.clock.after(AGAIN_S, lambda: self.host.post(send))
                return
            has_ended[0] = True
            self.waits.remove(wait)
            self._advance(operation, from_code(code, message) if code else value, over, then)

        def send() -> None:
            if not has_ended[0] and not over[0]:
                self.world.network.call(self.host, "keeper", step.method, *step.args, then=end)

        if step.due < inf:
            late = partial(end, None, DEADLINE_EXCEEDED, "late")
            self.world.clock.at(step.due, lambda: self.host.post(late))
        send()

    def give_up(self) -> None:
        """Close an operation that waits, as Ctrl-C does."""
        requests = [wait for wait in self.waits if wait[0] in self._requests]
        if requests:
            wait = self.world.random.choice(requests)
            operation, over, then = wait
            self.waits.remove(wait)
            over[0] = True
            self.client.now = self.world.clock.now
            operation.close()
            then(None, AbortedError("given up"))

    def _request(
        self, verb: str, key: Key, then: Then, size: int | None = None, item: bytes = b""
    ) -> None:
        timeout_s = self.world.random.choice((0.0, 0.3, 1.0, 3.0))
        due = self.client.now = self.world.clock.now
        keeper, self._keepers[key] = self._keepers[key], 0

        request = self.client.request(verb, key, size, item, due + timeout_s, keeper)
        self._requests.add(request)

        def ended(result: Any, error: OpError | None) -> None:
            self._requests.discard(request)
            if result is not None:
                self._keepers[key] = result[1]
                self.progress[key[0]] += 1
            if error is not None:
                self.world.promise(error.error_code == ABORTED, f"P4 of clients: {error}")
            then(None if result is None else result[0], error)

        self.run(request, ended)

    # -- the program -------------------------------------------------------------------------------

    def _take(self) -> None:
        if self.world.is_over:
            return
        key, size = self.world.random.choice(PLACES)
        self._request("acquire", key, lambda fence, _: self._took(key, size, fence), size)

    def _took(self, key: Key, size: int, fence: Any) -> None:
        if fence is None:
            self._later(self._take)
            return
        self.world.place_taken(self, key, size, fence)
        hold_s = self.world.random.choice((0.05, 0.3, 2.0))
        self._later(
            lambda: self.run(self.client.release(key), partial(self._released, key)), hold_s
        )

    def _released(self, key: Key, has_held: Any, error: OpError | None) -> None:
        self.world.promise(
            has_held is True or (error is not None and error.error_code in (ABORTED, UNAVAILABLE)),
            f"P1 of clients: {key} is released twice",
        )
        self._later(self._take)

    def _put(self) -> None:
        if self.world.is_over:
            return
        self.put_count += 1
        item = b"%d %d" % (self.host.life, self.put_count)
        self._request("put", JOBS, partial(self._putted, item), SIZE, item)

    def _putted(self, item: bytes, outcome: Any, error: OpError | None) -> None:
        if outcome is None and error is None:
            self.world.refused.add(item)
        self._later(self._put)

    def _get(self) -> None:
        if not self.world.is_over:
            self._request("get", JOBS, self._got, SIZE)

    def _got(self, item: Any, error: OpError | None) -> None:
        if item is not None:
            self.world.item_received(item)
        self._later(self._get)

    def _use_event(self) -> None:
        if not self.world.is_over:
            verb = self.world.random.choice(("set", "clear", "wait"))
            self._request(verb, STOP, lambda *_: self._later(self._use_event))


class PrimitivesSim(SimWorld):
    """One run with seeded faults."""

    def __init__(self, seed: int, faults: int = 12) -> None:
        super().__init__(seed)
        self.is_over = False
        self.sees_ends = self.random.random() < 0.5
        self.accepted: dict[bytes, int] = {}
        """The items that were put, each with the incarnation of the keeper."""
        self.refused: set[bytes] = set()
        self.confirmed: set[bytes] = set()
        self.received: set[bytes] = set()
        self.fences: dict[Key, int] = {}
        self.takes = self.takes_in_calm = self.restarts = 0
        self._last_given: dict[tuple[int, int], int] = {}
        self._ever_given: set[bytes] = set()
        self.users: list[SimUser] = []
        self.keeper = SimPrimitivesKeeper(self, -inf)
        for index in range(self.random.randint(2, 4)):
            self.users.append(SimUser(self, index))
        for _ in range(faults):
            self.clock.after(self.random.uniform(0.1, FAULTS_S), self._fault)
        self.clock.at(FAULTS_S + DOWN_S, self._calm)
        self.clock.at(OVER_S, self._end)

    def host_of(self, life: int) -> SimHost | None:
        return next((user.host for user in self.users if user.host.life == life), None)

    # -- what is seen ------------------------------------------------------------------------------

    def place_taken(self, user: SimUser, key: Key, size: int, fence: int) -> None:
        now = self.clock.now
        self.note(f"{user.host} has {key} {fence}")
        self.takes += 1
        self.takes_in_calm += now > FAULTS_S + DOWN_S
        if user.client.hold(key, now) is None:
            return  # the lease ended while the reply was on its way
        holders = [
            other
            for other in self.users
            if other.host.alive and other.client.hold(key, now) is not None
        ]
        self.promise(
            len(holders) <= size, f"primitives P1: {key} is held by {[o.host for o in holders]}"
        )
        if size == 1:
            self.promise(fence > self.fences.get(key, 0), "primitives P1: the fence is not larger")
            self.fences[key] = fence

    def item_accepted(self, item: bytes, keeper: int) -> None:
        self.promise(item not in self.accepted, f"primitives P2: {item!r} was put twice")
        self.accepted[item] = keeper

    def item_given(self, item: bytes) -> None:
        life, number = map(int, item.split())
        self.promise(item in self.accepted, f"primitives P2: {item!r} came of a dropped request")
        self.promise(item not in self.confirmed, f"primitives P5: {item!r} is given again")
        if item not in self._ever_given:
            self._ever_given.add(item)
            row = life, self.accepted[item]
            self.promise(
                number > self._last_given.get(row, 0), f"primitives P4: {item!r} leaves too late"
            )
            self._last_given[row] = number

    def item_confirmed(self, item: bytes) -> None:
        self.note(f"{item!r} is confirmed")
        self.promise(item not in self.confirmed, f"primitives P5: {item!r} is confirmed twice")
        self.confirmed.add(item)

    def item_received(self, item: bytes) -> None:
        self.promise(item in self.confirmed, f"P3 of clients: {item!r} came without confirmation")
        self.promise(item not in self.received, f"primitives P5: {item!r} was received twice")
        self.promise(item not in self.refused, f"primitives P6: {item!r} was put too late")
        self.received.add(item)

    # -- faults ------------------------------------------------------------------------------------

    def _fault(self) -> None:
        kind, user = self.random.choice(FAULTS), self.random.choice(self.users)
        self.note(f"{kind} {user.host}")
        if kind == "kill keeper":
            if "keeper" in self.network.hosts:
                self.network.kill("keeper")
                self.clock.after(self.random.random() * DOWN_S, self._start_keeper)
        elif not user.host.alive:
            return
        elif kind == "kill":
            self.network.kill(user.host.name)
            self.clock.after(self.random.random() * DOWN_S, lambda: self._start_user(user.index))
        elif kind == "cut":
            self.network.cut(user.host.name, "keeper")
        elif kind == "freeze":
            user.host.freeze()
            self.clock.after(self.random.random() * 2.5 * LEASE_S, user.host.thaw)
            if self.random.random() < 0.5:  # long enough for the heartbeat of the connection
                self.clock.after(0.1, lambda: self.network.cut(user.host.name, "keeper"))
        else:
            user.host.post(user.give_up)

    def _start_keeper(self) -> None:
        self.restarts += 1
        self.keeper = SimPrimitivesKeeper(self, self.clock.now + LEASE_S)

    def _start_user(self, index: int) -> None:
        self.users[index] = SimUser(self, index)

    def _calm(self) -> None:
        self.note("calm")
        for user in self.users:
            user.host.thaw()
            user.progress.clear()

    def _end(self) -> None:
        for user in self.users:
            kinds = {kind.replace("semaphore", "lock") for kind in user.progress}
            self.promise(
                kinds == {"lock", "queue", "event"}, f"primitives P4: {user.host} only did {kinds}"
            )
        self.promise(self.takes_in_calm > 0, "primitives P4: no place is granted any more")
        self.is_over = True

    def run(self) -> None:
        self.clock.run(END_S)
        machine = self.keeper.machine
        self.promise(machine.waiting == 0, "primitives P4: a request waits for ever")
        self.promise(
            not any(user.client.is_needed for user in self.users), "P1 of clients: a place is left"
        )
        names = {"q", "e"}
        self._drain()
        self.promise(len(machine) <= len(names), "primitives P3: a place is not free")
        lost = [
            item
            for item, keeper in self.accepted.items()
            if keeper == self.keeper.host.life and item not in self.confirmed
        ]
        self.promise(not lost, f"primitives P5: items are lost: {lost}")

    def _drain(self) -> None:
        """Get what is left in the queue."""
        user = self.users[0]
        items: list[Any] = []

        def get() -> None:
            user.client.now = self.clock.now
            request = user.client.request("get", JOBS, SIZE, b"", self.clock.now, 0)
            user.run(request, got)

        def got(result: Any, error: OpError | None) -> None:
            items.append(None if result is None else result[0])
            if items[-1] is not None:
                self.item_received(items[-1])
                get()

        get()
        self.clock.run(END_S + 5.0)
        self.promise(items[-1] is None, "primitives P4: the queue is not drained")


def simulate_primitives(seed: int, faults: int = 12) -> PrimitivesSim:
    """Run one seed. Raise AssertionError, with the seed, if a promise is broken."""
    world = PrimitivesSim(seed, faults)
    world.run()
    return world
