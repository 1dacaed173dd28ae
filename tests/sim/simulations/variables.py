"""A parameter server with its clients in virtual time: the real Updates, Steps, KeptSessions and
AppliedUpdates. A value is the list of its updates.

Workers send updates, some with a key, some in synchronous steps, and repeat each request until they
get a reply. A program saves the value now and then, and creates the variable again from the saved
value if the server has lost it. Faults: workers die, and another one repeats their update with its
key; the server dies and comes back empty; the program dies, and another one takes its place after a
while; connections end with replies on the way; updates are refused. In the end every request has
its reply.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.sim.simulations.calls import SimCall, SimHost, SimWorld
from tests.sim.simulations.network import SimConnection
from zmqdist.errors import ABORTED, INVALID_ARGUMENT, OK, UNAVAILABLE, OpError
from zmqdist.variables.updates_machine import (
    APPLIED,
    LATE,
    KeptSessions,
    Repeated,
    Steps,
    Update,
    Updates,
)
from zmqdist.variables.variable_host import AppliedUpdates

FAULTS_S = 5.0
WORKING_S = 7.0
END_S = 20.0
GONE_S = 0.5
"""How long a program's connection may be gone until the server drops the program's session, in
seconds."""
AGAIN_S = 0.05
DOWN_S = 0.4
TAKES_S = 0.02
FAULTS = ("server", "worker", "worker", "cut", "cut", "program")


class SimSession:
    """The variable of one session at the server."""

    def __init__(self) -> None:
        self.once = AppliedUpdates()
        self.version = 1
        self.value: list[str] = []
        self.steps = Steps(10)
        self.made = False
        self.gone = False


class SimServer:
    """A model of variables/variable_host.py, for one incarnation of a parameter server."""

    def __init__(self, world: VariablesSim) -> None:
        self.world = world
        self.host = SimHost(world.network, "ps:0", world.new_life())
        self.updates = Updates(100)
        self.known = KeptSessions(GONE_S)
        self.sessions: dict[int, SimSession] = {}
        self.gone_at: dict[int, float] = {}
        self._connections: dict[SimConnection, int] = {}
        """The connections of programs whose end the server has not noticed."""
        self._applied: set[tuple[int, int]] = set()
        self._answers: dict[tuple[int, int], Any] = {}
        self._steps_ended: dict[tuple[int, int], dict[str, str]] = {}
        self.host.methods |= {
            "open": self._open,
            "create": self._create,
            "saved": self._saved,
            "update": self._update,
        }
        self.host.on_left = self._left
        world.network.start(self.host)

    # -- sessions ----------------------------------------------------------------------------------

    def _open(self, call: SimCall, program: int, session: int) -> None:
        now, world = self.world.clock.now, self.world
        self._connections[call.connection] = program
        present = list(self._connections.values())
        self.gone_at.pop(program, None)
        for dropped in self.known.open(program, session, program, present, now):
            away_s = now - self.gone_at.get(world.program_of[dropped], now)
            world.promise(
                away_s >= GONE_S,
                "U7: the session of a program is dropped that was not away for long",
            )
            self._drop(dropped)
        self.sessions.setdefault(session, SimSession())
        call.answer(None)

    def _drop(self, session: int) -> None:
        dropped = self.sessions.pop(session, None)
        if dropped is not None:
            dropped.gone = True
            waiting: Any = dropped.steps.waiting()
            for update, _ in waiting:
                self._fail(update, ABORTED)

    def _left(self, peer: SimHost) -> None:
        if peer.name == "program":
            self._connections = {
                each: life
                for each, life in self._connections.items()
                if each.open or life != peer.life
            }
            self.known.disconnected(peer.life, self.world.clock.now)
            self.gone_at.setdefault(peer.life, self.world.clock.now)

    def _create(self, call: SimCall, session: int, earlier: tuple[int, list[str], bytes]) -> None:
        found = self.sessions.get(session)
        if found is None:
            call.fail(ABORTED, "no such session")
            return
        if not found.made:
            found.version, found.value = earlier[0], list(earlier[1])
            found.steps.applied = found.once.restore(0, earlier[2])
            found.made = True
        call.answer(None)

    def _saved(self, call: SimCall, session: int) -> None:
        found = self.sessions.get(session)
        if found is None or not found.made:
            call.fail(ABORTED, "no such variable")
            return
        call.answer((found.version, found.value, found.once.saved(0, found.steps.applied)))

    # -- updates -----------------------------------------------------------------------------------

    def _update(
        self,
        call: SimCall,
        session: int,
        id: tuple[int, int, int],
        key: str,
        step: int,
        wanted: int,
        token: str,
    ) -> None:
        found = self.sessions.get(session)
        if found is None or not found.made:
            call.fail(ABORTED, "no such variable")
            return
        client, sequence, _ = id
        self.world.asked[client, sequence] = token
        update = self.updates.begin(call, *id, key, found)
        if isinstance(update, Repeated):
            self._again(client, sequence, update.result)
            call.answer(update.result)
        elif update is not None:
            delay_s = self.world.random.random() * TAKES_S
            carry_out = partial(self._carry_out, found, update, step, wanted, token)
            self.world.clock.after(delay_s, lambda: self.host.post(carry_out))

    def _again(self, client: int, sequence: int, answer: Any) -> None:
        before = self._answers.setdefault((client, sequence), answer)
        self.world.promise(
            answer is None or before == answer,
            "U2: a question that comes again gets another answer",
        )

    def _carry_out(
        self, session: SimSession, update: Update, step: int, wanted: int, token: str
    ) -> None:
        if session.gone or self.world.random.random() < self.world.refused:
            self._fail(update, ABORTED if session.gone else INVALID_ARGUMENT)
            return
        had = session.once.of(update.key).get(0) if update.key else None
        if had is not None:
            self._end(update, had)
        elif step < 0:
            self._apply(session, update, token)
            self._end(update, (session.version, True))
        else:
            self._push(session, update, step, wanted, token)

    def _apply(self, session: SimSession, update: Update, token: str) -> None:
        world = self.world
        world.promise(update.id not in self._applied, "U1: carried out twice by its id")
        world.promise(
            not update.key or token not in session.value, "U1: carried out twice by its key"
        )
        self._applied.add(update.id)
        session.value.append(token)
        session.version += 1
        if update.key:
            session.once.note(update.key, [(0, session.version, True)])

    def _push(
        self, session: SimSession, update: Update, step: int, wanted: int, token: str
    ) -> None:
        world = self.world
        try:
            before = session.steps.applied
            pushed = session.steps.push(step, (update, token), wanted)
        except OpError as error:
            self._fail(update, error.error_code)
            return
        if pushed.verdict == LATE:
            self._end(update, (session.version, False))
        elif pushed.verdict == APPLIED:
            world.steps += 1
            world.promise(step > before, "U5: a step is applied after a later one")
            world.promise(len(pushed.applied) == wanted, "U5: a step is not of exactly k updates")
            taking_part: Any = pushed.applied
            for other, brought in taking_part:
                self._apply(session, other, brought)
            for other, _ in taking_part:
                self._end(other, (session.version, True))
            late: Any = pushed.late
            for other, _ in late:
                self._end(other, (session.version, False))

    def _end(self, update: Update, answer: Any) -> None:
        self.world.promise(not update.over, "U6: an update has two verdicts")
        self.updates.ended(update, answer)
        self._again(*update.id, answer)
        for call in update.tickets:
            call.answer(answer)

    def _fail(self, update: Update, code: int) -> None:
        if self.updates.failed(update):
            for call in update.tickets:
                call.fail(code, "refused")


class SimUpdater:
    """A model of variables/client.py, for one process that updates the variable."""

    def __init__(self, world: VariablesSim, name: str) -> None:
        self.world = world
        self.host = SimHost(world.network, name, world.new_life())
        self.unfinished: dict[int, tuple[str, int]] = {}
        """The updates that wait for a reply: sequence number -> (key, step)."""
        self._last = 0
        world.network.start(self.host)
        for _ in range(2):
            self._next()

    def _next(self) -> None:
        world = self.world
        if world.repeated:
            key, step = world.repeated.pop()
        elif world.clock.now < WORKING_S:
            kind = world.random.choice(("plain", "key", "step"))
            step = -1
            if kind == "step":
                step = world.pushes // world.per_step
                world.pushes += 1
            key = (
                f"key {world.new_life()}"
                if kind == "key" or (kind == "step" and world.random.random() < 0.5)
                else ""
            )
        else:
            return
        self._last += 1
        self.unfinished[self._last] = key, step
        settled = min(self.unfinished) - 1
        token = key or f"{self.host.life}/{self._last}"
        id = self.host.life, self._last, settled
        self._ask(self._last, (world.session, id, key, step, world.per_step, token))

    def _ask(self, number: int, question: tuple[Any, ...]) -> None:
        then = partial(self._answered, number, question)
        self.world.network.call(self.host, "ps:0", "update", *question, then=then)

    def _answered(
        self, number: int, question: tuple[Any, ...], answer: Any, code: int, message: str
    ) -> None:
        world = self.world
        ours = question[0] == world.session
        if code in (UNAVAILABLE, ABORTED) and ours:  # the same request, with the same id
            world.clock.after(AGAIN_S, lambda: self.host.post(partial(self._ask, number, question)))
            return
        _, step = self.unfinished.pop(number)
        if code and ours and step < 0:
            world.refusals += 1
        elif code == OK and ours and answer is not None and answer[1]:
            world.acknowledged.add((world.servers, question[0], question[-1]))
            world.answers += 1
        world.clock.after(world.random.random() * 0.05, lambda: self.host.post(self._next))


class SimProgram:
    """The program that owns the variable: it creates the variable, saves its value, and creates it
    again after a loss."""

    def __init__(self, world: VariablesSim) -> None:
        self.world = world
        self.host = SimHost(world.network, "program", world.new_life())
        self.session = world.session = world.new_life()
        world.program_of[self.session] = self.host.life
        world.saved = (1, [], b"")
        world.repeated.clear()
        world.network.start(self.host)
        self._look()

    def _look(self, *_: Any) -> None:
        """Open the session, which is also a sign of life of the program."""
        call = self.world.network.call
        call(self.host, "ps:0", "open", self.host.life, self.session, then=self._opened)

    def _opened(self, value: Any, code: int, message: str) -> None:
        if code == OK:
            self.world.network.call(self.host, "ps:0", "create", self.session, self.world.saved)
        if code == OK and self.world.random.random() < 0.3:
            self.world.network.call(self.host, "ps:0", "saved", self.session, then=self._saved)
        self.world.clock.after(AGAIN_S, lambda: self.host.post(self._look))

    def _saved(self, saved: Any, code: int, message: str) -> None:
        if code == OK:
            self.world.saved = saved


class VariablesSim(SimWorld):
    """One run of a parameter server with seeded faults."""

    def __init__(self, seed: int, faults: int = 10) -> None:
        super().__init__(seed)
        self.per_step = self.random.randint(1, 3)
        self.refused = self.random.choice((0.0, 0.1)) if faults else 0.0
        self.pushes = self.steps = self.answers = self.refusals = 0
        self.session = 0
        self.servers = 1
        """All incarnations of the server."""
        self.saved: tuple[int, list[str], bytes] = (1, [], b"")
        self.repeated: list[tuple[str, int]] = []
        """The updates with a key whose worker has died, for another worker to repeat."""
        self.acknowledged: set[tuple[int, int, str]] = set()
        self.asked: dict[tuple[int, int], str] = {}
        self.program_of: dict[int, int] = {}
        self.server = SimServer(self)
        self.program = SimProgram(self)
        self.workers = [SimUpdater(self, f"worker:{index}") for index in range(3)]
        for _ in range(faults):
            self.clock.after(self.random.uniform(0.1, FAULTS_S), self._fault)

    def run(self) -> None:
        self.clock.run(END_S)
        session = self.server.sessions[self.session]
        in_steps = len(session.steps.waiting())
        unanswered = sum(len(worker.unfinished) for worker in self.workers)
        self.promise(unanswered <= in_steps, "U2: a question has no answer")
        value = session.value
        keyed = [token for token in value if token.startswith("key")]
        self.promise(
            len(keyed) == len(set(keyed)), "U1: an update with a key is in the value twice"
        )
        kept = {
            token
            for life, number, token in self.acknowledged
            if (life, number) == (self.servers, self.session)
        }
        self.promise(kept <= set(value), "U1: an update that was answered is not in the value")

    def _fault(self) -> None:
        kind = self.random.choice(FAULTS)
        self.note(kind)
        if kind == "server" and self.server.host.alive:
            self.network.kill("ps:0")
            self.servers += 1
            self.clock.after(self.random.random() * DOWN_S, self._server_starts)
        elif kind == "worker":
            self._kill_worker(self.random.randrange(len(self.workers)))
        elif kind == "program" and self.program.host.alive:
            self.network.kill("program")
            self.clock.after(self.random.random() * 2 * GONE_S, self._program_starts)
        else:
            self.network.cut(
                self.random.choice(("program", "worker:0", "worker:1", "worker:2")), "ps:0"
            )

    def _server_starts(self) -> None:
        self.server = SimServer(self)

    def _program_starts(self) -> None:
        self.program = SimProgram(self)

    def _kill_worker(self, index: int) -> None:
        worker = self.workers[index]
        if worker.host.alive:
            self.network.kill(worker.host.name)
            self.repeated += [(key, step) for key, step in worker.unfinished.values() if key]
            self.clock.after(self.random.random() * DOWN_S, lambda: self._worker_starts(index))

    def _worker_starts(self, index: int) -> None:
        self.workers[index] = SimUpdater(self, f"worker:{index}")


def simulate_variables(seed: int, faults: int = 10) -> VariablesSim:
    """Run one seed. Raise AssertionError, with the seed, if a promise is broken."""
    world = VariablesSim(seed, faults)
    world.run()
    return world
