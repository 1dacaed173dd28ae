"""The accounts of what really happened in the simulation of RPC. They are separate from the
machines, and check their promises."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any

from tests.sim.simulations.clock import SimClock
from zmqdist.errors import CANCELLED, DEADLINE_EXCEEDED, OK, RESOURCE_EXHAUSTED, UNAVAILABLE
from zmqdist.limits import BULK_CHANNEL_WINDOW_BYTES, CHUNK_BYTES, HEARTBEAT_TIMEOUT_S
from zmqdist.messages import Call, Chunk, Message, Reply
from zmqdist.wire.hello import our_hello

if TYPE_CHECKING:
    from tests.sim.simulations.network import SimConnection, SimProcess
    from zmqdist.transport.calls_machine import ClientCall, ServedCall

LATE_S = 0.001
KIB = 1024


class RpcWorld:
    """The state that both ends and their accounts share in a run: clock, random numbers, bounds and
    calls.

    Attributes:
      turn_bounds: the arguments of FairAdmission.
      bytes_per_s: the bandwidth of each client's link.
      server_was_late: the server has been frozen at least once.
      held: the number of calls whose client has kept their large arguments until the server
        admitted them.
    """

    def __init__(self, seed: int, clients: int) -> None:
        self.seed = seed
        random = self.random = Random(seed)
        self.clock = SimClock()
        self.hello = our_hello("server", 1, "simulated")
        self.by_key: dict[int, Question] = {}
        self.pending_max = random.choice((4, 20, 1000))
        self.unasked_max = random.choice((32, 256)) * KIB
        all_max, client_max = random.choice(((4096, 2048), (1024, 1024), (600, 256)))
        self.turn_bounds = (all_max * KIB, all_max * KIB, client_max * KIB, client_max * KIB)
        self.threads_max = random.choice((1, 2, 5))
        self.rows_max = random.choice((1, 4, 12))
        self.delay_s = random.choice((0.0, 0.002, 0.05))
        self.bytes_per_s = [
            random.choice((inf, inf, 12_500_000, 250_000, 62_500)) for _ in range(clients)
        ]
        self.server_was_late = False
        self.held = 0

    def question(self, body: bytes) -> Question:
        """Return the call with these arguments."""
        return self.by_key[int(body.partition(b"|")[0])]

    def connect(self, client: Any) -> SimConnection | None:
        """Return a connection of a client to the current server, or None if its port is closed."""
        raise NotImplementedError


class Question:
    """One call, from its client's program to its outcome.

    Attributes:
      asker: the process of its client.
      sizes, result_sizes: the sizes of the large parts of its arguments and of its result, in
        bytes; each part is filled with a byte of its own.
      sent, taken, begun: how often it left its client, was taken by an incarnation of the server,
        and was run.
      code: of its outcome; -1 before that.
      losses: the number of connections that its client had lost when the call was made.
    """

    def __init__(
        self,
        key: int,
        asker: SimProcess,
        method: str,
        sizes: Sequence[int],
        result_sizes: Sequence[int],
        padding: int,
    ) -> None:
        self.key = key
        self.asker = asker
        self.method = method
        self.sizes = sizes
        self.result_sizes = result_sizes
        self.body = b"%d|" % key + bytes(padding)
        self.due = inf
        self.waits_for_server = True
        self.kind = key % 2
        self.rows = 1 + key % 3
        self.sent = self.taken = self.begun = self.losses = 0
        self.code = -1
        self.cancelled = False

    @property
    def frames(self) -> list[bytes]:
        """Return the large parts of its arguments."""
        return [bytes([(self.key + part) % 251]) * size for part, size in enumerate(self.sizes)]

    def result(self) -> list[bytes]:
        """Return the large parts of its result."""
        return [
            bytes([(self.key + part + 7) % 251]) * size
            for part, size in enumerate(self.result_sizes)
        ]

    def begin(self, served: ServedCall | None, frames: Sequence[Any], now: float) -> None:
        """Note that the server runs the call, and check that it may."""
        self.begun += 1
        assert self.begun == 1, f"turns P1: question {self.key} was begun twice"
        if served is not None:
            assert not served.dropped, (
                f"turns P1: question {self.key} was begun after it was dropped"
            )
            in_time = now < served.due or self.method == "later"
            assert in_time, f"turns P1: question {self.key} was begun after its time"
        assert list(map(bytes, frames)) == self.frames, (
            f"bulk P1: the arguments of question {self.key} are not what was sent"
        )

    def ended(self, call: ClientCall, now: float, losses: int) -> None:
        """Note that the client has the outcome, and check it."""
        assert self.code == -1, f"calls P1: question {self.key} ended twice"
        assert call.ended, f"calls P1: question {self.key} is over without an outcome"
        code = self.code = call.code
        if code == OK:
            assert self.begun, f"calls P1: question {self.key} has a value, and was never run"
            assert call.body == self.body, f"calls P1: question {self.key} has the value of another"
            assert list(map(bytes, call.frames)) == self.result(), (
                f"bulk P1: the result of question {self.key} is not what was sent"
            )
        elif code == CANCELLED:
            assert self.cancelled, f"calls P1: question {self.key} was cancelled by nobody"
        elif code == DEADLINE_EXCEEDED:
            assert now >= self.due, f"calls P1: question {self.key} ended before its time"
        elif code == UNAVAILABLE:
            text = (
                f"calls P1: question {self.key} is UNAVAILABLE, and its connection was never lost"
            )
            assert losses > self.losses or not self.waits_for_server, text
        else:
            assert code == RESOURCE_EXHAUSTED, (
                f"calls P1: question {self.key} ended with {code}: {call.message}"
            )
        assert now <= self.due + LATE_S or self.asker.was_frozen, (
            f"calls P1: question {self.key} ended after its time"
        )


class LaneAccount:
    """The chunks that leave through one end of one connection."""

    def __init__(self, name: str, clock: SimClock, bytes_per_s: float) -> None:
        self._name = name
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._on_the_way: deque[int] = deque()
        self._since: dict[int, dict[int, int]] = {}
        """For each transfer that has begun: the chunks of the others since its own last one."""

    def put(self, message: Message, frames: Sequence[Any]) -> None:
        """Note a message that leaves, and check its chunk."""
        if (
            isinstance(message, (Call, Reply))
            and message.parts
            and not (isinstance(message, Call) and message.held)
        ):
            self.begun(message.id)
        if not isinstance(message, Chunk):
            return
        nbytes = len(frames[0])
        self._on_the_way.append(nbytes)
        total = sum(self._on_the_way)
        assert nbytes <= CHUNK_BYTES, f"bulk P1: {self._name} sends a chunk of {nbytes} bytes"
        assert total <= BULK_CHANNEL_WINDOW_BYTES, (
            f"bulk P2: {self._name} has {total} bytes on the way"
        )
        wait_s = total / self._bytes_per_s
        assert wait_s <= HEARTBEAT_TIMEOUT_S, (
            f"pace P3: {self._name} has chunks of {wait_s:.1f} s on the way"
        )
        others = self._since.pop(message.id, {})
        twice = [id for id, count in others.items() if count > 1]
        assert not twice, (
            f"bulk P3: {self._name} sends transfer {twice[0]} twice while {message.id} waits"
        )
        for counts in self._since.values():
            counts[message.id] = counts.get(message.id, 0) + 1
        self._since[message.id] = {}

    def begun(self, id: int) -> None:
        """Note that the chunks of a transfer may leave."""
        self._since[id] = {}

    def credited(self, nbytes: int) -> None:
        """Note that the other side has taken some bytes."""
        while nbytes and self._on_the_way:
            oldest = self._on_the_way.popleft()
            if oldest > nbytes:
                self._on_the_way.appendleft(oldest - nbytes)
            nbytes -= min(oldest, nbytes)


class _Waiting:
    """The calls of one client that have arrived at the server and have not begun."""

    def __init__(self) -> None:
        self.outside: list[Hashable] = []
        self.unasked: dict[Hashable, int] = {}
        self.pulled: dict[Hashable, int] = {}
        self.ready: list[Hashable] = []
        self.ready_since = 0
        self.last_turn = 0


class ServerAccount:
    """The calls that one incarnation of the server has taken and not replied to, and the order in
    which they may begin."""

    def __init__(self, sim: RpcWorld) -> None:
        self.batches = BatchAccount(sim)
        self._sim = sim
        self._held: dict[Hashable, set[ServedCall]] = {}
        self._waiting: dict[Hashable, _Waiting] = {}
        self._sizes: dict[Hashable, int] = {}
        self._turn = 0

    def _of(self, peer: Hashable) -> _Waiting:
        return self._waiting.setdefault(peer, _Waiting())

    def taken(self, peer: Hashable, served: ServedCall) -> None:
        """Note that the server's table has taken a call."""
        calls = self._held.setdefault(peer, set())
        calls.add(served)
        assert len(calls) <= self._sim.pending_max, (
            f"calls P6: {len(calls)} calls of one client are unanswered"
        )

    def finished(self, peer: Hashable, served: ServedCall) -> None:
        """Note that a call has got its reply, or needs none any more."""
        self._held.get(peer, set()).discard(served)

    def arrived(self, peer: Hashable, key: Hashable, nbytes: int, refused: str) -> None:
        """Note a call that has arrived with its arguments, without a request for them."""
        _, all_max, _, client_max = self._sim.turn_bounds
        its = self._of(peer).unasked
        total = sum(sum(each.unasked.values()) for each in self._waiting.values())
        fits = (sum(its.values()) + nbytes <= client_max or not its) and (
            total + nbytes <= all_max or not total
        )
        assert fits != bool(refused), (
            f"turns P5: {nbytes} bytes beside {sum(its.values())} and {total}: {refused or 'taken'}"
        )
        if not refused:
            its[key] = nbytes

    def announced(self, peer: Hashable, key: Hashable, nbytes: int) -> None:
        """Note a call whose client keeps its large arguments until the server admits them."""
        self._of(peer).outside.append(key)
        self._sizes[key] = nbytes

    def let_in(self, peer: Hashable, key: Hashable) -> None:
        """Note that the server has admitted the arguments of a call."""
        all_max, _, client_max, _ = self._sim.turn_bounds
        its = self._of(peer)
        assert its.outside[:1] == [key], (
            "turns P4: a call was let in before an earlier one of its client"
        )
        its.outside.remove(key)
        its.pulled[key] = self._sizes.pop(key)
        own = sum(its.pulled.values())
        every = [nbytes for each in self._waiting.values() for nbytes in each.pulled.values()]
        assert own <= client_max or len(its.pulled) == 1, (
            f"turns P3: {own} pulled bytes of a client"
        )
        assert sum(every) <= all_max or len(every) == 1, (
            f"turns P3: {sum(every)} pulled bytes of all clients"
        )

    def ready(self, peer: Hashable, key: Any) -> None:
        """Note that all arguments of a call have arrived, and that it waits for a thread."""
        its = self._of(peer)
        if not its.ready:
            its.ready_since = self._turn
        its.ready.append(id(key))

    def begun(self, peer: Hashable, key: Any) -> None:
        """Note that a call begins, and check that it is its turn."""
        its = self._of(peer)
        assert its.ready[:1] == [id(key)], (
            "turns P2: the calls of a client begin out of their order"
        )
        before = its.last_turn
        for other in self._waiting.values():
            passed = (
                other is not its
                and other.ready
                and max(other.ready_since, other.last_turn) < before
            )
            assert not passed, "turns P2: a client has two turns while another one waits"
        self._turn += 1
        its.last_turn = self._turn
        del its.ready[0]
        self._forget(its, key)

    def dropped(self, peer: Hashable, key: Any) -> None:
        """Note that a call will not begin."""
        its = self._of(peer)
        if key in its.outside:
            its.outside.remove(key)
        if id(key) in its.ready:
            its.ready.remove(id(key))
        self._forget(its, key)

    def _forget(self, its: _Waiting, key: Any) -> None:
        if isinstance(key, Hashable):
            its.unasked.pop(key, None)
            its.pulled.pop(key, None)

    def gone(self, peer: Hashable) -> None:
        """Note the end of a client's connection."""
        self._waiting.pop(peer, None)
        self._held.pop(peer, None)


class BatchAccount:
    """The calls that wait to run in a batch.

    Attributes:
      free_since: when the last batch ended.
    """

    def __init__(self, sim: RpcWorld) -> None:
        self.free_since = 0.0
        self._sim = sim
        self._came: dict[Question, float] = {}
        self._dropped: dict[int, list[float]] = {}
        """Kind -> the times at which dropped calls of it came. A dropped call may have opened a
        batch, which keeps that time."""

    def arrived(self, question: Question, now: float) -> None:
        """Note that a call waits for a batch."""
        self._came[question] = now

    def dropped(self, question: Question) -> None:
        """Note that a waiting call was dropped."""
        if question in self._came:
            self._dropped.setdefault(question.kind, []).append(self._came.pop(question))

    def closed(self, batch: list[Question]) -> None:
        """Check the calls of a batch, and remove them."""
        waiting = [question for question in self._came if question.kind == batch[0].kind]
        assert batch == waiting[: len(batch)], (
            "batching P1: a batch is not the first calls of one kind"
        )
        rows = sum(question.rows for question in batch)
        assert rows <= self._sim.rows_max or len(batch) == 1, f"batching P2: a batch of {rows} rows"
        last = max(self._came.pop(question) for question in batch)
        kind = batch[0].kind
        # A call that came in the same instant as the batch's last call may have opened the next
        # batch.
        self._dropped[kind] = [came for came in self._dropped.get(kind, ()) if came >= last]

    def begun(self, batch: list[Question], sim: RpcWorld) -> None:
        """Note that a batch runs, and check its time and size."""
        now, first = sim.clock.now, self._came[batch[0]]
        ripe = [came for came in self._came.values() if came + sim.delay_s <= now]
        opened = min([first, *self._dropped.get(batch[0].kind, ())])
        assert opened <= min(ripe, default=inf), (
            "batching P4: an older batch that may run is passed over"
        )
        may_wait = max(first + sim.delay_s, self.free_since) + LATE_S
        assert now <= may_wait or sim.server_was_late, (
            f"batching P3: a batch has waited {now - first:.3f} s"
        )
        self.closed(batch)
