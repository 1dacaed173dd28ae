"""The two ends of RPC in the simulation: the real call tables, turns, batches, bulk channels and
paces, with models of their runtimes.

A client is a model of transport/channel.py, a server one of
rpc/service.py, rpc/handler_pool.py and rpc/service.py. The calls, their results, and the accounts
of both ends are in rpc_oracle.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Final

from tests.sim.simulations.network import SimConnection, SimProcess
from tests.sim.simulations.rpc_oracle import LaneAccount, Question, RpcWorld, ServerAccount
from zmqdist.errors import OK, OpError
from zmqdist.messages import (
    Call,
    Calls,
    CancelCall,
    Chunk,
    Credit,
    Goodbye,
    Message,
    Replies,
    Reply,
    SendParts,
)
from zmqdist.rpc.admission_machine import FairAdmission
from zmqdist.rpc.batching_machine import Batches, CallBatch
from zmqdist.rpc.handler_errors import failed, no_room, stopping
from zmqdist.transport.calls_machine import (
    ClientCall,
    ClientCalls,
    ServedCall,
    ServerCalls,
    counted_bytes,
)
from zmqdist.transport.transfers import BulkChannel, allocate_fresh, announced_bytes

NAP_S: Final = 0.002
"""The same bound as in transport/channel.py."""


class SimEnd:
    """The base of both ends: a process, and timers that wait while it is frozen."""

    def __init__(self, sim: RpcWorld) -> None:
        self.sim = sim
        self.process = SimProcess()

    def after(self, delay_s: float, fn: Callable[[], object]) -> None:
        """Call `fn` after some seconds, if the process is alive then."""
        self.sim.clock.after(delay_s, lambda: self.process.post(fn))

    def bulk(self, name: str, connection: SimConnection, send: Callable[..., None]) -> BulkChannel:
        """Return the bulk channel of a connection, whose chunks an account checks."""
        account = LaneAccount(name, self.sim.clock, connection.bytes_per_s)

        def put(message: Message, frames: Sequence[Any]) -> bool:
            account.put(message, frames)
            send(message, *map(bytes, frames))
            return True

        bulk = BulkChannel(name, put, lambda: self.sim.clock.now)
        credited, let_in = bulk.credited, bulk.send_held_parts

        def acknowledged(message: Credit) -> None:
            account.credited(message.nbytes)
            credited(message)

        def begun(message: SendParts) -> None:
            account.begun(message.id)
            let_in(message)

        bulk.credited, bulk.send_held_parts = acknowledged, begun  # type: ignore[method-assign]
        return bulk


class SimRpcClient(SimEnd):
    """One client: it sends calls, waits for its server, cancels calls, and loses connections.

    Attributes:
      losses: the number of connections that have ended, or whose server has announced that it
        leaves.
    """

    def __init__(self, sim: RpcWorld, number: int) -> None:
        super().__init__(sim)
        self.number = number
        self.table = ClientCalls("server", sim.pending_max, sim.unasked_max)
        self.connection: SimConnection | None = None
        self.losses = 0
        self.questions: dict[ClientCall, Question] = {}
        self._unasked: dict[ClientCall, int] = {}
        self._last_left = {"small": 0, "large": 0}
        self._tick_at = inf
        self._napping = False
        self._bulk: BulkChannel | None = None
        self._connect()

    # -- the program -------------------------------------------------------------------------------

    def ask(self, question: Question, waits: bool) -> None:
        """Send a call. `waits`: a thread waits for the reply, so that the call does not wait for
        others to be sent with it."""
        call = ClientCall(question.method, question.body, question.frames, question.due)
        call.bounded = question.method in ("pool", "batch")
        call.waits_for_server = question.waits_for_server
        self.questions[call] = question
        question.losses = self.losses
        leave = self.table.submitted(call)
        if call.ended:
            self._ended([call])
            return
        if leave or waits:
            self._send_waiting()
        idle = self.table.incarnation and not self.table.in_flight and not self.table.held_back
        assert not (idle and self.table.waiting and self._can_send()), (
            f"calls P8: question {question.key} waits for company although nothing is in flight"
        )
        if self.table.waiting and not self._napping:
            self._napping = True
            self.after(NAP_S, self._flush)
        self._set_tick()

    def cancel(self, question: Question) -> None:
        """Cancel a call on behalf of the program."""
        call = next((call for call, asked in self.questions.items() if asked is question), None)
        if call is None or call.ended:
            return
        question.cancelled = True
        message = self.table.cancelled(call)
        self._over(call.id)
        if message is not None:
            self._put(message)
        self._ended([call])
        if self.table.held_back:
            self._send_waiting()

    def _flush(self) -> None:
        self._napping = False
        self._send_waiting()

    # -- out ---------------------------------------------------------------------------------------

    def _can_send(self) -> bool:
        return self.connection is not None and self.connection.open

    def _put(self, message: Message) -> bool:
        """Send a message. Return False if it was not sent. Over a connection whose end was not
        noticed yet, it is lost or refused."""
        connection = self.connection
        if connection is None or (not connection.open and self.sim.random.random() < 0.5):
            return False
        connection.send_up(message)
        return True

    def _send_waiting(self) -> None:
        table = self.table
        while (table.waiting or table.held_back) and (calls := table.next_message()):
            requests = [table.request(call, self.sim.clock.now) for call in calls]
            frames = calls[0].frames
            assert len(calls) == 1 or not any(call.frames for call in calls), (
                "calls P7: frames in a message of several"
            )
            if len(calls) > 1:
                sent = self._put(Calls(requests))
            elif frames:
                sent = self._bulk is not None and self._bulk.send(requests[0], frames)
            else:
                sent = self._put(requests[0])
            if not sent:
                table.undelivered(calls)
                return
            for call, request in zip(calls, requests, strict=True):
                self._left(call, request)
                call.body, call.frames = b"", ()

    def _left(self, call: ClientCall, request: Call) -> None:
        """Check the table's promises about a call that leaves."""
        question = self.questions[call]
        question.sent += 1
        assert question.sent == 1, f"calls P2: question {question.key} was sent twice"
        assert request.incarnation == self.known_life != 0, (
            f"calls P3: {question.key} names another life of the server"
        )
        if request.held:
            assert not counted_bytes(request.body, ()) or question.frames, (
                "calls P9: a call without large parts is held"
            )
            return
        count = counted_bytes(call.body, call.frames) if call.bounded else 0
        kind = "large" if count else "small"
        assert call.id > self._last_left[kind], (
            f"calls P7: question {question.key} left behind a later one"
        )
        self._last_left[kind] = call.id
        if count:
            self._unasked[call] = count
            total = sum(self._unasked.values())
            assert total <= self.sim.unasked_max or len(self._unasked) == 1, (
                f"calls P9: {total} bytes were sent unasked"
            )

    # -- in ----------------------------------------------------------------------------------------

    def hear(self, connection: SimConnection, message: Message, *frames: bytes) -> None:
        """Handle a message that has arrived over a connection."""
        if connection is not self.connection or self._bulk is None:
            return
        if isinstance(message, Reply):
            if message.parts:
                self._take_parts(self._bulk, message)
            else:
                self._answered(message, frames)
        elif isinstance(message, Replies):
            for reply in message.items:
                self._answered(reply, ())
        elif isinstance(message, Chunk):
            self._bulk.chunk_arrived(message, frames)
        elif isinstance(message, Credit):
            self._bulk.credited(message)
        elif isinstance(message, SendParts):
            self._bulk.send_held_parts(message)
        elif isinstance(message, Goodbye):
            self.losses += 1
            self.table.server_leaving()
        self._send_waiting()

    def _take_parts(self, bulk: BulkChannel, message: Reply) -> None:
        if message.id not in self.table.in_flight:
            bulk.decline(message.parts)
            self._put(CancelCall(message.id))
            return
        frames = bulk.receive(
            message.id, message.parts, allocate_fresh, partial(self._parts_arrived, message)
        )
        assert frames is None, "no memory is shared here"

    def _parts_arrived(self, message: Reply, frames: list[Any] | None, problem: str) -> None:
        assert frames is not None, f"bulk P1: {problem}"
        self._answered(message, frames)

    def _answered(self, message: Reply, frames: Sequence[Any]) -> None:
        self._over(message.id)
        call = self.table.replied(message, frames)
        if call is not None:
            self._ended([call])

    def _over(self, id: int) -> None:
        if self._bulk is not None:
            self._bulk.call_ended(id)

    def _ended(self, calls: list[ClientCall]) -> None:
        for call in calls:
            self._unasked.pop(call, None)
            self.questions.pop(call).ended(call, self.sim.clock.now, self.losses)

    # -- time, and the connection ------------------------------------------------------------------

    def _set_tick(self) -> None:
        if self.table.deadline < self._tick_at:
            self._tick_at = self.table.deadline
            self.sim.clock.at(self._tick_at, lambda: self.process.post(self._tick))

    def _tick(self) -> None:
        self._tick_at = inf
        ended = self.table.ticked(self.sim.clock.now)
        for call in ended:
            if self._bulk is not None and self._bulk.call_ended(call.id):
                self._put(CancelCall(call.id))
        self._ended(ended)
        self._send_waiting()
        self._set_tick()

    def _connect(self) -> None:
        """Try to connect until it succeeds. A frozen server is reachable, because its kernel
        accepts connections."""
        self.known_life = 0
        self.connection = self.sim.connect(self)
        if self.connection is None:
            self.after(self.sim.random.uniform(0.05, 0.5), self._connect)
        else:
            self._bulk = self.bulk(
                f"client {self.number}", self.connection, self.connection.send_up
            )
            self._last_left = dict.fromkeys(self._last_left, 0)

    def welcome(self, connection: SimConnection, incarnation: int) -> None:
        """Handle the hello of a server."""
        if connection is self.connection:
            self.known_life = incarnation
            self.table.server_up(incarnation)
            self._send_waiting()

    def lose(self, connection: SimConnection) -> None:
        """Handle the end of the connection, after all its messages were read."""
        if connection is not self.connection or self._bulk is None:
            return
        self.losses += 1
        self._unasked.clear()
        ended = self.table.connection_lost()
        self._bulk.connection_lost()
        self._bulk = None
        self._ended(ended)
        self._connect()

    def check_end(self) -> None:
        """Check that the client has kept nothing of calls that have ended."""
        table, who = self.table, f"client {self.number}"
        left = [*table.in_flight.values(), *table.held_back.values(), *table.waiting.values()]
        assert not left, f"calls P4: {who} has {len(left)} calls at the end"
        assert table.eager_bytes == table.waiting_bytes == 0, (
            f"calls P4: {who} counts bytes of calls that have ended"
        )
        if self._bulk is not None:
            assert not self._bulk.tracked, f"bulk P6: {who} has transfers at the end"
            assert not self._bulk.transfers.pace.unacknowledged, (
                f"bulk P5: {who} waits for acknowledgments at the end"
            )
            assert not self._bulk.faults, f"bulk P4: {who} counts faults of its server"


@dataclass(eq=False)
class _Work:
    """A call whose arguments have all arrived."""

    served: ServedCall
    peer: SimConnection
    question: Question
    frames: Sequence[Any]


class SimRpcServer(SimEnd):
    """One incarnation of the server."""

    def __init__(self, sim: RpcWorld, incarnation: int) -> None:
        super().__init__(sim)
        self.incarnation = incarnation
        self.leaving = False
        self.account = ServerAccount(sim)
        self.calls = ServerCalls(incarnation, sim.pending_max)
        self.turns = FairAdmission(*sim.turn_bounds)
        self.batches: Batches[_Work] = Batches(sim.rows_max, sim.delay_s)
        self.peers: dict[SimConnection, BulkChannel] = {}
        self._replies: dict[SimConnection, list[Reply]] = {}
        self._busy = 0
        self._batch_runs = False

    # -- the connection ----------------------------------------------------------------------------

    def meet(self, client: SimRpcClient, connection: SimConnection) -> None:
        """Handle a new connection. A client that comes while the server leaves gets no hello, as in
        transport/router.py."""
        if self.leaving:
            return
        self.peers[connection] = self.bulk(
            f"server {self.incarnation}", connection, connection.send_down
        )
        greet = partial(client.welcome, connection, self.incarnation)
        connection.in_order(1, 0, lambda: client.process.post(greet))

    def lose(self, connection: SimConnection) -> None:
        """Handle the end of a client's connection, after all its messages were read."""
        bulk = self.peers.pop(connection, None)
        if bulk is None:
            return
        self.account.gone(connection)
        self.turns.client_lost(connection)
        self._replies.pop(connection, None)
        for served in self.calls.peer_gone(connection):
            if served.on_dropped is not None:
                served.on_dropped()
        bulk.connection_lost()
        self._let_in()
        self._send_replies()

    def hear(self, connection: SimConnection, message: Message, *frames: bytes) -> None:
        """Handle a message that has arrived over a connection."""
        bulk = self.peers.get(connection)
        if bulk is None:
            return
        if isinstance(message, Call):
            self._take(connection, message, frames)
        elif isinstance(message, Calls):
            for call in message.items:
                self._take(connection, call, ())
        elif isinstance(message, CancelCall):
            self._cancelled(connection, bulk, message.id)
        elif isinstance(message, Chunk):
            bulk.chunk_arrived(message, frames)
        elif isinstance(message, Credit):
            bulk.credited(message)
        self._send_replies()

    # -- calls -------------------------------------------------------------------------------------

    def _take(self, peer: SimConnection, call: Call, frames: Sequence[Any]) -> None:
        stale = self.calls.stale_reply(call)
        if stale is not None or self.leaving:
            self._gather(peer, stale or failed(call.id, stopping()))
            return
        question = self.sim.question(call.body)
        if call.method == "inline" and not call.parts:
            question.begin(None, frames, self.sim.clock.now)
            self._gather(peer, Reply(call.id, OK, "", question.body), question.result())
            return
        served = self.calls.call_arrived(peer, call, self.sim.clock.now)
        if isinstance(served, Reply):
            self._gather(peer, served)
            return
        question.taken += 1
        assert question.taken == 1, f"calls P2: question {question.key} arrived twice"
        self.account.taken(peer, served)
        if not call.parts:
            nbytes = counted_bytes(call.body, frames) if call.method in ("pool", "batch") else 0
            if not nbytes or self._count(served, peer, call, nbytes):
                self._run(served, peer, call, frames)
        elif call.held:
            nbytes = len(call.body) + announced_bytes(call.parts)
            self.turns.announced(peer, served, nbytes, (served, peer, call))
            self.account.announced(peer, served, nbytes)
            self._let_in()
        elif call.method in ("later", "inline") or self._count(
            served, peer, call, len(call.body) + announced_bytes(call.parts)
        ):
            self._receive(served, peer, call)

    def _count(self, served: ServedCall, peer: SimConnection, call: Call, nbytes: int) -> bool:
        refused = self.turns.arrived(peer, served, nbytes)
        self.account.arrived(peer, served, nbytes, refused)
        if refused:
            self.peers[peer].decline(call.parts)
            self._finished(served, peer, no_room(served.id, refused))
        return not refused

    def _let_in(self) -> None:
        while not self.leaving and self.turns.outside and (item := self.turns.let_in()) is not None:
            served, peer, call = item
            self.account.let_in(peer, served)
            self.sim.held += 1
            if served.is_wanted(self.sim.clock.now):
                self._receive(served, peer, call)
            else:
                self._drop_turn(served)
                self._finished(served, peer, None)

    def _receive(self, served: ServedCall, peer: SimConnection, call: Call) -> None:
        try:
            frames = self.peers[peer].receive(
                call.id, call.parts, allocate_fresh, partial(self._arrived, served, peer, call)
            )
        except OpError as error:
            self._drop_turn(served)
            self._finished(served, peer, failed(call.id, error))
            return
        assert frames is None, "no memory is shared here"
        if call.held:
            peer.send_down(SendParts(call.id))

    def _arrived(
        self,
        served: ServedCall,
        peer: SimConnection,
        call: Call,
        frames: list[Any] | None,
        problem: str,
    ) -> None:
        assert frames is not None, f"bulk P1: {problem}"
        self._run(served, peer, call, frames)

    def _run(
        self, served: ServedCall, peer: SimConnection, call: Call, frames: Sequence[Any]
    ) -> None:
        question = self.sim.question(call.body)
        if call.method == "pool":
            self.turns.ready(peer, served, _Work(served, peer, question, frames))
            self.account.ready(peer, served)
            self._serve()
        elif call.method == "batch":
            work = _Work(served, peer, question, frames)
            batch = self.batches.arrived(work, question.kind, question.rows, self.sim.clock.now)
            self.account.batches.arrived(question, self.sim.clock.now)
            served.on_dropped = partial(self._drop_batched, work, batch)
            self._run_batches()
        elif call.method == "later":
            question.begin(served, frames, self.sim.clock.now)
            served.on_dropped = partial(self._drop, served)
            self.after(
                self.sim.random.expovariate(20.0), partial(self._answer, served, peer, question)
            )
        elif served.is_wanted(self.sim.clock.now):
            question.begin(served, frames, self.sim.clock.now)
            self._answer(served, peer, question)
        else:
            self._finished(served, peer, None)

    def _answer(self, served: ServedCall, peer: SimConnection, question: Question) -> None:
        self._finished(served, peer, Reply(served.id, OK, "", question.body), question.result())
        self._send_replies()

    def _finished(
        self, served: ServedCall, peer: SimConnection, reply: Reply | None, sources: Any = ()
    ) -> None:
        self.account.finished(peer, served)
        if self.calls.finished(served, self.sim.clock.now) and reply is not None:
            self._gather(peer, reply, sources)

    def _gather(self, peer: SimConnection, reply: Reply, sources: Sequence[bytes] = ()) -> None:
        if sources:
            self.peers[peer].send(reply, sources)
        else:
            self._replies.setdefault(peer, []).append(reply)

    def _send_replies(self) -> None:
        gathered, self._replies = self._replies, {}
        for peer, replies in gathered.items():
            peer.send_down(replies[0] if len(replies) == 1 else Replies(replies))

    def _cancelled(self, peer: SimConnection, bulk: BulkChannel, id: int) -> None:
        served = self.calls.cancelled(peer, id)
        if served is not None and served.on_dropped is not None:
            served.on_dropped()
        if bulk.transfers.is_receiving(id):
            self.calls.arguments_lost(peer, id)
            if served is not None:
                self.account.finished(peer, served)
        bulk.call_ended(id)
        if served is not None and served.on_dropped is None:
            if self._drop_turn(served):
                self._finished(served, peer, None)
            self._let_in()

    def _drop(self, served: ServedCall) -> None:
        self._drop_turn(served)
        self._let_in()
        self._finished(served, served.peer, None)  # type: ignore[arg-type]

    def _drop_turn(self, served: ServedCall) -> bool:
        self.account.dropped(served.peer, served)
        return self.turns.dropped(served.peer, served)

    # -- threads -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Begin the calls whose turn it is, as far as there are threads."""
        while self._busy < self.sim.threads_max and (item := self.turns.next()) is not None:
            self._busy += 1
            if isinstance(item, list):
                self.account.begun(None, item)
                self.after(self.sim.random.expovariate(30.0), partial(self._batch_done, item))
                continue
            served, peer = item.served, item.peer
            self.account.begun(peer, served)
            if self.turns.outside:
                self.after(0.0, self._let_in)
            if served.is_wanted(self.sim.clock.now):
                item.question.begin(served, item.frames, self.sim.clock.now)
                self.after(
                    self.sim.random.expovariate(30.0),
                    partial(self._done, served, peer, item.question),
                )
            else:
                self.after(0.0, partial(self._done, served, peer, None))

    def _done(self, served: ServedCall, peer: SimConnection, question: Question | None) -> None:
        self._busy -= 1
        if question is None:
            self._finished(served, peer, None)
        elif peer in self.peers:
            self._answer(served, peer, question)
        else:
            self._finished(served, peer, None)
        self._serve()

    # -- batches -----------------------------------------------------------------------------------

    def _drop_batched(self, work: _Work, batch: CallBatch[_Work]) -> None:
        self._drop(work.served)
        self.batches.dropped(work, batch)
        self.account.batches.dropped(work.question)

    def _run_batches(self) -> None:
        while not self._batch_runs:
            batch = self.batches.ready(self.sim.clock.now)
            if not batch:
                if self.batches.deadline != inf:
                    self.after(
                        max(0.0, self.batches.deadline - self.sim.clock.now), self._run_batches
                    )
                return
            self.account.batches.begun([work.question for work in batch], self.sim)
            wanted = [work for work in batch if work.served.is_wanted(self.sim.clock.now)]
            for work in batch:
                self._drop_turn(work.served)
                if work not in wanted:
                    self._finished(work.served, work.peer, None)
            self._let_in()
            if wanted:
                self._batch_runs = True
                self._submit_batch(wanted)

    def _submit_batch(self, batch: list[_Work]) -> None:
        self.turns.ready(None, object(), batch)
        self.account.ready(None, batch)
        self._serve()

    def _batch_done(self, batch: list[_Work]) -> None:
        self._busy -= 1
        for work in batch:
            if work.served.is_wanted(self.sim.clock.now):
                work.question.begin(work.served, work.frames, self.sim.clock.now)
                self._answer(work.served, work.peer, work.question)
            else:
                self._finished(work.served, work.peer, None)
        self._batch_runs = False
        self.account.batches.free_since = self.sim.clock.now
        self._run_batches()
        self._serve()

    # -- the end -----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Say goodbye to the clients, refuse the calls that have not begun, and continue with the
        others for a while."""
        self._send_replies()
        self.leaving = True
        for peer in self.peers:
            peer.send_down(Goodbye("the server stops"))
        for batch in self.batches.drain():
            self.account.batches.closed([work.question for work in batch])
            for work in batch:
                self._drop_turn(work.served)
            self._submit_batch(batch)
        for peer, served, item in self.turns.cut_off(False):
            self.account.dropped(peer, served)
            if item is None:
                self.peers[peer].call_ended(served.id)
            else:
                self.peers[peer].decline(item[2].parts)
            self._finished(served, peer, failed(served.id, stopping()))
        self._send_replies()

    def check_end(self) -> None:
        """Check that the server has kept nothing of calls that have ended."""
        assert not len(self.calls), f"calls P4: the server has {len(self.calls)} calls at the end"
        assert not self.calls.repeated, "calls P2: a number was used twice"
        assert not len(self.turns), f"turns P6: {len(self.turns)} calls wait for a turn at the end"
        assert self.turns.unasked == self.turns.pulled == self.turns.count == 0, (
            "turns P6: bytes are counted at the end"
        )
        assert not len(self.batches), (
            f"batching P5: {len(self.batches)} calls wait for company at the end"
        )
        for bulk in self.peers.values():
            assert not bulk.tracked, "bulk P6: the server has transfers at the end"
            assert not bulk.transfers.pace.unacknowledged, (
                "bulk P5: the server waits for acknowledgments at the end"
            )
            assert not bulk.faults, "bulk P4: the server counts faults of a client"
