"""RPC in virtual time: real call tables, turns, batches, bulk channels and paces at both ends, and
seeded faults.

A server with threads, some clients, and a network of which some links are slow. Calls are large and
small, in a pool, in batches, in the loop or answered later; some have deadlines, some are
cancelled. Connections are lost, the server is killed, frozen or leaves in good order and comes back
in a new incarnation; clients are frozen and killed. After FAULTS_UNTIL_S no more faults come, and
every call must end within CALM_LIMIT_S, with nothing left over.

The simulation checks the numbered promises of transport/calls_machine.py ("calls"),
rpc/admission_machine.py ("turns"), rpc/batching_machine.py ("batching"), transport/bulk_machine.py
("bulk") and transport/pace.py ("pace"), while it runs (rpc_oracle.py) and at the end.
"""

from __future__ import annotations

from functools import partial

from tests.sim.simulations.clock import seed_named
from tests.sim.simulations.network import SimConnection
from tests.sim.simulations.rpc_ends import SimRpcClient, SimRpcServer
from tests.sim.simulations.rpc_oracle import KIB, Question, RpcWorld
from zmqdist.messages import Message

FAULTS_UNTIL_S = 6.0
CALM_LIMIT_S = 300.0
HEARTBEAT_S = 2.0
"""How long after a process was frozen the other side ends its connections, in seconds."""

FAULTS = (
    "server",
    "server",
    "leave",
    "cut",
    "cut",
    "cut",
    "freeze server",
    "freeze client",
    "client",
    "burst",
    "burst",
)


class RpcSim(RpcWorld):
    """One run.

    Args:
      faults: the number of faults; 0: there are none, and no call is cancelled.

    Raises (from `run`):
      AssertionError: a promise was broken; the text begins with the machine and the promise's
        number.
    """

    def __init__(
        self, seed: int, *, clients: int = 3, questions: int = 150, faults: int = 6
    ) -> None:
        super().__init__(seed, clients)
        random = self.random
        self.trace: list[str] = []
        self.questions: list[Question] = []
        self._ends: dict[SimConnection, tuple[SimRpcClient, SimRpcServer]] = {}
        self._calm = not faults
        self._lives = 0
        self.server: SimRpcServer | None = None
        self._start_server()
        self.clients = [SimRpcClient(self, number) for number in range(clients)]
        for key in range(questions):
            self.clock.at(random.uniform(0.0, FAULTS_UNTIL_S), partial(self._ask, key, self._calm))
        for _ in range(faults):
            self.clock.at(random.uniform(0.05, FAULTS_UNTIL_S), self._fault)

    def run(self) -> None:
        """Run the phase with faults, the phase without, and the final checks."""
        self.clock.run(FAULTS_UNTIL_S)
        self._be_calm()
        self.clock.run(self.clock.now + CALM_LIMIT_S, self._all_ended)
        left = [question.key for question in self._asked_by_the_living() if question.code == -1]
        assert not left, f"calls P1: questions {left} never end"
        self.clock.run(self.clock.now + 60.0)  # messages on the way arrive
        assert self.server is not None
        self.server.check_end()
        for client in self.clients:
            client.check_end()

    # -- calls -------------------------------------------------------------------------------------

    def _ask(self, key: int, calm: bool) -> None:
        random = self.random
        client = random.choice(self.clients)
        most = 6144 * KIB if self.bytes_per_s[client.number] > 1e6 else 400 * KIB
        method = random.choice(("pool", "pool", "pool", "batch", "later", "inline"))
        padding = random.choice((0, 0, 100, 3000, 20_000))
        question = Question(
            key, client.process, method, self._sizes(most), self._sizes(most), padding
        )
        if random.random() < 0.2:
            question.due = self.clock.now + random.choice((0.001, 0.05, 1.0, 5.0))
        question.waits_for_server = calm or random.random() < 0.9
        self.questions.append(question)
        self.by_key[key] = question
        client.process.post(partial(client.ask, question, random.random() < 0.3))
        if not calm and random.random() < 0.15:
            client.after(random.expovariate(10.0), partial(client.cancel, question))

    def _sizes(self, most: int) -> list[int]:
        """Return the sizes of the large parts of a call or a reply; mostly there are none."""
        if self.random.random() < 0.6:
            return []
        return [
            self.random.randint(1, int(most ** self.random.uniform(0.3, 1.0)))
            for _ in range(self.random.randint(1, 3))
        ]

    def _asked_by_the_living(self) -> list[Question]:
        return [question for question in self.questions if question.asker.alive]

    def _all_ended(self) -> bool:
        return all(question.code != -1 for question in self._asked_by_the_living())

    # -- the network -------------------------------------------------------------------------------

    def connect(self, client: SimRpcClient) -> SimConnection | None:
        """Return a connection to the current server, or None if its port is closed."""
        server = self.server
        if server is None or server.leaving:
            return None

        def up(connection: SimConnection, message: Message, *frames: bytes) -> None:
            server.process.post(partial(server.hear, connection, message, *frames))

        def down(message: Message, *frames: bytes) -> None:
            client.process.post(partial(client.hear, connection, message, *frames))

        connection = SimConnection(
            self.clock,
            self.random,
            f"client {client.number}",
            up,
            down,
            self.bytes_per_s[client.number],
        )
        self._ends[connection] = client, server
        connection.in_order(
            0, 0, lambda: server.process.post(partial(server.meet, client, connection))
        )
        return connection

    def end_connection(self, connection: SimConnection) -> None:
        """End a connection. Messages on the way are lost; each side notices at its own time."""
        client, server = self._ends.pop(connection, (None, None))
        if client is None or server is None:
            return
        connection.end()
        for end in (client, server):
            delay_s = self.random.uniform(0.0, 0.05)
            self.clock.after(delay_s, partial(end.process.post, partial(end.lose, connection)))

    def _connections(self, end: object) -> list[SimConnection]:
        return [connection for connection, ends in self._ends.items() if end in ends]

    # -- faults ------------------------------------------------------------------------------------

    def _log(self, text: str) -> None:
        self.trace.append(f"{self.clock.now:8.4f} {text}")

    def _start_server(self) -> None:
        if self.server is None:
            self._lives += 1
            self.server = SimRpcServer(self, self._lives)
            self._log(f"server {self._lives} starts")

    def _end_server(self, server: SimRpcServer) -> None:
        if server is not self.server:
            return
        self._log(f"server {server.incarnation} ends")
        self.server = None
        server.process.kill()
        for connection in self._connections(server):
            self.end_connection(connection)
        self.clock.after(0.0 if self._calm else self.random.uniform(0.0, 1.5), self._start_server)

    def _fault(self) -> None:
        kind = self.random.choice(FAULTS)
        client, server = self.random.choice(self.clients), self.server
        self._log(f"fault: {kind}")
        if kind == "cut" and client.connection is not None:
            self.end_connection(client.connection)
        elif kind == "burst":
            for _ in range(30):
                self._ask(len(self.by_key) + 10_000, False)
        elif kind == "client":
            client.process.kill()
            for connection in self._connections(client):
                self.end_connection(connection)
            self.clients[client.number] = SimRpcClient(self, client.number)
        elif kind == "freeze client":
            self._freeze(client)
        elif server is not None and kind == "server":
            self._end_server(server)
        elif server is not None and kind == "freeze server":
            self._freeze(server)
        elif (
            server is not None
            and kind == "leave"
            and not server.leaving
            and not server.process.frozen
        ):
            server.leave()
            self.clock.after(self.random.uniform(0.0, 1.0), partial(self._end_server, server))

    def _freeze(self, end: SimRpcClient | SimRpcServer) -> None:
        """Freeze a process. If the freeze lasts, the heartbeats of the other side end its
        connections."""
        end.process.freeze()
        self.server_was_late |= end is self.server
        frozen_s = self.random.choice((0.1, 1.0, 4.0))
        self.clock.after(frozen_s, end.process.thaw)
        if frozen_s > HEARTBEAT_S:
            for connection in self._connections(end):
                self.clock.after(HEARTBEAT_S, partial(self.end_connection, connection))

    def _be_calm(self) -> None:
        self._log("calm")
        self._calm = True
        for end in (*self.clients, self.server):
            if end is not None:
                end.process.thaw()
        if self.server is not None and self.server.leaving:
            self._end_server(self.server)
        self._start_server()


def simulate_rpc(seed: int, **options: int) -> RpcSim:
    """Run one seed to its end. Raise AssertionError, with the seed and the faults, if a promise is
    broken."""
    sim = RpcSim(seed, **options)
    with seed_named(seed, sim.trace):
        sim.run()
    return sim
