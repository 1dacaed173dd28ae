"""The coordinator's runtime, the code around machine.py: it talks to the dispatcher, fetches large
results and settles RemoteValues.

The threads of the program append work to an outbox under the coordinator's lock, and the loop's
thread passes the work in the outbox to the machine. The program's threads hold the same lock while
they read the runtime's state.

How an input is sent
    An input whose result is in this process is sent inside the payload, still packed. If the result
    is large, the coordinator's store holds it for the processes that run the function. A result that
    the program has already unpacked with `result` is packed again in its present state, because the
    program may have changed it.
    An input whose value a worker keeps is sent as a reference, so that the value travels from
    worker to worker.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from _thread import get_ident
from collections import Counter, deque
from collections.abc import Callable, Collection
from contextlib import closing
from functools import partial
from random import Random
from typing import Any, Final, Protocol, TypeAlias
from weakref import WeakSet

from zmqdist import clock, errors, platforms
from zmqdist.addresses import join_address
from zmqdist.callbacks import Callbacks
from zmqdist.conditions import Condition
from zmqdist.events import Heard, Send, Ticked
from zmqdist.limits import ATTEMPTS_MAX, FACTS_S, INLINE_BYTES_MAX
from zmqdist.messages import (
    CANCELLED,
    ERROR,
    KEPT,
    SAID_GOODBYE,
    ActorFound,
    DescribeWork,
    Goodbye,
    Message,
    ProgramFacts,
    Read,
    Refused,
    Unsatisfied,
)
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.service import RpcService
from zmqdist.scheduling.coordinator import metrics
from zmqdist.scheduling.coordinator.actor_connections import ActorConnections
from zmqdist.scheduling.coordinator.affinity import Joined, Left, MembersChanged
from zmqdist.scheduling.coordinator.coordinator_events import (
    ActorReported,
    ActorSearched,
    BulkArrived,
    BulkUnreachable,
    CancelRequested,
    ConnectActor,
    CoordinatorRefused,
    DecideRetry,
    DisconnectActor,
    DispatcherDown,
    DispatcherUp,
    Effect,
    EndRoundRequested,
    Event,
    Fetch,
    Free,
    FunctionsDefined,
    FunctionsDropped,
    KeepInput,
    KeptDropped,
    PackingFailed,
    Recomputed,
    Resolve,
    RetryDecided,
    RoomMade,
    RoundRefused,
    RoundSettled,
    Scheduled,
    SendCalls,
    SendToActor,
    SessionRequested,
    SubmitWork,
    WorkBegun,
)
from zmqdist.scheduling.coordinator.dispatcher_target import Target
from zmqdist.scheduling.coordinator.failures import Failure, Failures
from zmqdist.scheduling.coordinator.function_stream import Streams
from zmqdist.scheduling.coordinator.functions import FunctionNumbers
from zmqdist.scheduling.coordinator.machine import DISPATCHER, ROUND, CoordinatorMachine
from zmqdist.scheduling.coordinator.queue_bounds import QueueBounds
from zmqdist.scheduling.coordinator.remote_value import (
    Packing,
    RemoteValue,
    copied,
    part_of,
    reference_of,
    work_of,
)
from zmqdist.scheduling.coordinator.result_fetcher import ResultFetcher
from zmqdist.scheduling.coordinator.unreachable_log import UnreachableLog
from zmqdist.scheduling.coordinator.watchdog import WatchDog
from zmqdist.scheduling.coordinator.work import (
    ENDED,
    INPUT_FAILED,
    NO_BULKS,
    NO_INPUTS,
    NO_PACKED,
    TIMED_OUT,
    CalledActor,
    Extra,
    MethodCall,
    Work,
)
from zmqdist.scheduling.coordinator.work_names import described
from zmqdist.scheduling.shared.actors import ActorState
from zmqdist.scheduling.shared.references import (
    INPUTS,
    KEEP,
    PARTS,
    decode_reference,
    encode_inputs,
    encode_reference,
)
from zmqdist.scheduling.shared.remote_results import decode_loss
from zmqdist.scheduling.shared.result_parts import COUNT_BYTES
from zmqdist.scheduling.shared.server_reports import ServerReports
from zmqdist.scheduling.shared.store import BulkStore
from zmqdist.transport.dealer import DealerConnection
from zmqdist.transport.loop import Loop
from zmqdist.transport.memory_limits import TRIM_WORTH_ITEMS, trim_heap
from zmqdist.transport.own_address import own_host
from zmqdist.transport.router import Router
from zmqdist.wire.hello import Hello, our_hello

log = logging.getLogger("zmqdist.coordinator")

Watcher: TypeAlias = "Callable[[list[Joined], list[Left]], None]"
"""A function that the loop calls with the workers that joined, each (name, incarnation, pid, host),
and the workers that left, each (name, incarnation, reason)."""

NEAR_BYTES_MIN = 2**20
"""Work with fewer bytes of inputs at a worker may run on any host, because they move in a
millisecond."""

UNSATISFIED = "%s waits: %s"

ActorWatcher: TypeAlias = "Callable[[CalledActor, ActorState, str], object]"
"""A function that the loop calls with an actor, its new state and the reason."""

WORKERS = frozenset({"worker"})

REQUEST_MS: Final = 20_000
"""The time limit in milliseconds of one request to the dispatcher, including the time to
connect.
"""

_jitter = Random()
"""The random numbers of retries, which leave those of the program alone."""

opened: WeakSet[CoordinatorRuntime] = WeakSet()
"""The runtimes of this process. A closed runtime remains here until it is garbage-collected."""


def _forked() -> None:
    """Prepare a forked child, so that no `schedule` or `join` uses the parent's coordinator or
    blocks on its locks.

    The locks are replaced, because a lock that another thread of the parent held would never be
    released in the child. `room` becomes 0, so that the next `schedule` checks the process id; to
    check it in each `schedule` would be too slow.
    """
    for runtime in opened:
        runtime.queue.room = 0
        runtime.schedule_lock = threading.Lock()
        runtime.packing.unpacking = threading.RLock()
        runtime.lock = runtime.changed = Condition()


platforms.register_at_fork(after_in_child=_forked)


class Progress:
    """How far the work of rounds has got. Any thread may read the first three, which only grow, and
    must hold the coordinator's lock to change one.

    Attributes:
      scheduled, resolved, rounds_ended: the number of scheduled work items, of those that have
        ended, and of rounds that have ended. They do not count detached work.
      heap_grown: whether so much work was unfinished that the heap is trimmed once all has ended.
      waiting, waiting_for_room: the number of threads that wait on `changed`, and the number of
        those that wait for room in the queue.
    """

    def __init__(self) -> None:
        self.scheduled = self.resolved = self.rounds_ended = 0
        self.waiting = self.waiting_for_room = 0
        self.heap_grown = False

    @property
    def unfinished(self) -> int:
        return self.scheduled - self.resolved


class WorkTrace(Protocol):
    """What records work items for a trace."""

    def submitted(self, work: Work) -> None: ...

    def ended(self, works: list[Work]) -> None: ...


class Listeners:
    """What other parts have the loop call.

    Attributes:
      watchers: called when workers join or leave.
      on_begun: called with the work that has begun, if the coordinator has no rounds.
      names_of_resources: returns the names of the per-worker resources.
      streams: gets the values of generator functions from their slots.
      retries: the thread that calls `retry_if` of the program. A callback of the program may wait
        for it.
      trace: what records submitted and ended work; None mostly.
      servers: reports servers to the dispatcher once a second.
      on_actor_found, on_actor_changed: return the functions to call with the answer to a search for
        an actor, and with an actor, its new state and the reason.
    """

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []
        self.on_begun: Callable[[list[int]], object] = lambda works: None
        self.names_of_resources: Callable[[], list[str]] = list
        self.retries = Callbacks("zmqdist-retries")
        self.streams: Streams
        self.trace: WorkTrace | None = None
        self.servers = ServerReports()
        self.on_actor_found: Callable[[], Callable[[ActorFound], object] | None] = lambda: None
        self.on_actor_changed: Callable[[], ActorWatcher | None] = lambda: None


class CoordinatorRuntime:
    """The runtime of one coordinator, with its connection to a dispatcher.

    Args:
      rounds: whether failures are recorded for `join`. If False, the runtime instead reports which
        work has begun (`on_begun`).
      width: the number of work items that the dispatcher may have at a time; None means no bound.
      parent: the lease of the function whose end ends this coordinator's work; 0 if there is none.

    Attributes (guarded by `lock`):
      target: the dispatcher: address, credentials and the form in which the program accepts results.
      lock, changed: one Condition, held for microseconds only. It is notified when a waiting thread
        may continue, because all work is resolved, work has failed, detached work or a round has
        ended, workers have changed, or the queue may have room while threads wait for that.
      schedule_lock: admits one `schedule` or `join` at a time.
      packing, progress, listeners: see these classes.
      refusal: makes the error with which the dispatcher has refused this coordinator for good; None
        without such a refusal.
      failures: the errors of the round.
      callbacks, settling: the thread for the program's callbacks; the thread for callbacks of this
        package, none of which waits.
      outbox: the work items that the loop has not passed to the machine yet, in order.
      queue: the bounds of the queue, and what is counted.
      machine, store, result_fetcher, absence: the machine, the store of large arguments, the
        fetcher of large results, and the log of the cluster's absence. Any thread may read these
        attributes.
    """

    def __init__(
        self,
        target: Target,
        *,
        queue_max: int,
        queue_bytes_max: int,
        cancel_grace_s: float,
        lost_limit_s: float,
        recovery_limit_s: float,
        rounds: bool,
        width: int | None = None,
        parent: int = 0,
    ) -> None:
        self.target, self.packing = target, Packing(target.form.mark, Packing(target.form.mark))
        self.schedule_lock = threading.Lock()
        self.lock = self.changed = Condition()
        self.progress, self.listeners = Progress(), Listeners()
        self.failures = Failures(reported=rounds)
        self.closed = False
        self.pid = os.getpid()
        self.functions = FunctionNumbers(lambda bulk: self.store.holds(bulk))
        self.refusal: Failure | None = None
        self.outbox: list[Work] = []
        self._requests: deque[tuple[Callable[[list[int]], Event], int]] = deque()
        self.queue = QueueBounds(queue_max, queue_bytes_max, lambda bulk: self.store.size_of(bulk))
        self.callbacks, self.settling = Callbacks(), Callbacks("zmqdist-settling")
        self._loop = Loop("zmqdist-coordinator")
        incarnation = secrets.randbits(62) | 1
        self.machine = CoordinatorMachine(
            coordinator=incarnation,
            queue_max=queue_max,
            cancel_grace_s=cancel_grace_s,
            lost_limit_s=lost_limit_s,
            recovery_limit_s=recovery_limit_s,
            recomputations_max=ATTEMPTS_MAX,
            decode_loss=decode_loss,
            rounds=rounds,
            starts=not rounds,
            width=width,
            parent=parent,
            now=self._loop.now(),
        )
        try:
            self._open(target)
        except BaseException:
            self._loop.stop()
            raise
        self._dealer.connect()
        self._loop.start()
        self._watchdog = WatchDog(
            progress=lambda: (self.progress.resolved, self.progress.unfinished)
        )
        opened.add(self)

    # -- for the program's threads -----------------------------------------------------------------

    def call_dispatcher(self, method: str, *args: Any, timeout_ms: int = REQUEST_MS) -> Any:
        """Call an RPC method of the dispatcher over a new connection, and return the reply."""
        security = self.target.credentials.client(self.target.address, "submit")
        with closing(
            ZmqClient(self.target.address, "", True, timeout_ms, security=security)
        ) as client:
            return getattr(client, f"{method}_blocking")(*args)

    def hold(
        self, parts: list[Any], inline_max: int = INLINE_BYTES_MAX, *, shared: bool = True
    ) -> tuple[bytes, list[int]]:
        """Put a copy of data that is too large for a message into the store. Return a reference,
        and numbers for `enqueue`, or for `store.free` if the work was not enqueued. `shared` as in
        `BulkStore.hold`."""
        reference = self.store.hold(parts, shared=shared, inline_max=inline_max)
        return encode_reference(reference), reference.bulks

    def enqueue(
        self, number: int, function: int, name: str, payload: bytes, extra: Extra | None, alive: Any
    ) -> RemoteValue:
        """Hand in a work item, which takes over the held data in `extra.bulks`, and return its
        RemoteValue. The caller must hold `lock`.

        Args:
          extra: the rare fields. Detached work takes no room in the queue, `join` does not wait for
            it, its error is in its RemoteValue only, and the end of a round does not cancel it.
          alive: a token that is kept while the RemoteValue is pending, so that this runtime stays
            open.
        """
        work = Work(number, function, name, payload, alive)
        if metrics.enable_metrics:
            extra = extra or Extra()
            extra.scheduled_at = clock.perf_counter()
        work.extra = extra
        value = RemoteValue(self, work)
        if not self.outbox:
            # before the work is counted, because Ctrl-C must not leave it without the call; the loop
            # waits for the lock
            self._loop.call_soon(self._drain)
        detached = False
        if extra is not None:
            detached = extra.options.detached
            # the work item owns the data now, so the caller must not drop it
            bulks = extra.bulks
            if bulks:
                extra.bulks = list(bulks)
            if not detached:
                self.queue.begin(extra, len(payload), bulks)
            if bulks:
                bulks.clear()
        if not detached:
            self.progress.scheduled += 1
            self.queue.room -= 1
        self.outbox.append(work)
        if self.listeners.trace is not None:
            self.listeners.trace.submitted(work)
        return value

    def enqueue_call(self, call: MethodCall, extra: Extra | None) -> RemoteValue:
        """Hand in a call of an actor, as `enqueue`."""
        call.extra = extra
        value = RemoteValue(self, call)
        with self.lock:
            if self.closed or self.queue.room <= 0:  # `room` is 0 in a forked child
                self.check_open()
            if not self.outbox:
                self._loop.call_soon(self._drain)
            self.outbox.append(call)
        if self.listeners.trace is not None:
            self.listeners.trace.submitted(call)
        return value

    def packing_here(self) -> Packing | None:
        """Return the Packing with which this thread is packing arguments; None if it is not."""
        thread = get_ident()
        for packing in (self.packing, self.packing.of_calls):
            if packing.thread == thread:
                return packing
        return None

    def copy_inputs(self, extra: Extra) -> None:
        """Pack each input whose result is in this process, in its present state.

        Raises InvalidArgumentError if the program has changed a result in such a way that it cannot
        be pickled any more.
        """
        for number, value in extra.input_values.items():
            if number not in extra.packed_inputs:
                copied(value, lambda packed, number=number: self._put_input(extra, number, packed))  # type: ignore[misc]

    def _put_input(self, extra: Extra, number: int, packed: Any) -> None:
        """Store the packed value of an input, or a reference to the value if `packed` is a list of
        large parts."""
        if isinstance(packed, list):
            packed, bulks = self.hold(packed)
            extra.bulks += bulks
        extra.packed_inputs[number] = packed

    def request(self, event: Callable[[list[int]], Event], number: int) -> None:
        """Have the loop pass the machine this event with a number, together with the numbers of
        other such requests, because the dispatcher scans its queue for each message. Does nothing
        in a forked child. Finalizers call this method, so it takes no lock.
        """
        if self.pid == os.getpid():
            self._requests.append((event, number))
            self.call_in_loop(self._handle_requests)

    def watch(self, watcher: Watcher) -> None:
        """Have the loop call `watcher(joined, left)`: now with all workers, then at each change.
        `watcher` must neither wait nor raise."""

        def begin() -> None:
            self.listeners.watchers.append(watcher)
            watcher(list(self.machine.affinity.members.values()), [])

        self.call_in_loop(begin)

    @property
    def members(self) -> dict[str, Joined] | None:
        """The present workers by name; None until the dispatcher has reported them. The loop
        replaces the dict at each change."""
        affinity = self.machine.affinity
        return affinity.members if affinity.members_known else None

    def check_open(self) -> None:
        """Raise FailedPreconditionError if the coordinator was closed, or this process was forked
        from its own."""
        if self.closed:
            raise errors.FailedPreconditionError(
                "this ClusterCoordinator has been closed: make a new one"
            )
        if self.pid != os.getpid():
            raise errors.FailedPreconditionError(
                "this ClusterCoordinator was made before a fork: make a new one in the child "
                "process"
            )

    def has_room(self, nbytes: int, bulks: list[int]) -> bool:
        """Return whether the queue has room for one more work item with these arguments, and update
        `room`. The caller must hold `lock`.

        Work that waits for inputs is not in the dispatcher's queue. Its number has a bound of its
        own, which is also `queue_max`.
        """
        queued = self.machine.queued + len(self.outbox)
        self.queue.room = self.queue.works_max - max(queued, self.machine.waiting)
        return self.queue.room > 0 and self.queue.fits(nbytes, bulks)

    @property
    def is_idle(self) -> bool | None:
        """Whether all work of rounds has ended without a failure, so that another session can
        begin. None if this runtime cannot be used any more.
        """
        if self.closed or self.refusal is not None or self.pid != os.getpid():
            return None
        return not self.progress.unfinished and not self.failures

    def begin_session(self, parent: int) -> None:
        """Begin a new session at the dispatcher, for the function with the lease `parent`. The
        runtime must be idle.
        """
        self.post_event(SessionRequested(parent))

    def end_round(self) -> None:
        """Request the end of the round. The loop increases `rounds_ended` when the round has ended.
        The caller must hold `lock`."""
        self._loop.call_soon(self._handle, EndRoundRequested(self.progress.rounds_ended + 1))

    def cancel_all(self, bound: int, first: int = 0) -> int:
        """Request the cancellation of all unfinished work with a number below `bound` that is not
        detached, and return the number of these work items. With `first` only of work from this
        number on, but also of calls of actors.
        """
        with self.lock:
            count = self.progress.unfinished
        self.call_in_loop(self._cancel_all, bound, first)
        return count

    def give_up(self) -> None:
        """Disconnect from the dispatcher and cancel all unfinished work. Idempotent. Any thread may
        call this, even the loop's."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
        try:
            self._loop.run(self._say_goodbye, timeout_s=5.0)
        except errors.OpError:
            pass
        self._loop.stop()
        self._watchdog.stop()
        self.result_fetcher.close()
        self.store.close()
        with self.lock:
            works = [*self.machine.works.values(), *self.outbox]
            waiters = [waiter for work in works for waiter in _taken_waiters(work)]
            released = [
                (extra.input_values, extra.uses)
                for work in works
                if (extra := work.extra) is not None
            ]
            for work in works:
                if work.kind is None:
                    work.outcome, work.kind, work.alive = b"", CANCELLED, None
                if work.extra is not None:
                    self.queue.end(work.extra)
                    work.extra.input_values, work.extra.uses = NO_INPUTS, ()
            self.outbox = []
            self.progress.resolved = self.progress.scheduled
            self.changed.notify_all()
        released.clear()  # without the lock, because finalizers of the program may run
        self.failures.report()
        for waiter in waiters:
            waiter.release()
        self.settling.close()
        self.listeners.retries.close()
        self.callbacks.close()

    # -- in the loop -------------------------------------------------------------------------------

    def _open(self, target: Target) -> None:
        loop, credentials, incarnation = self._loop, target.credentials, self.machine.coordinator
        name = f"coordinator {socket.gethostname()}:{self.pid}"
        host = own_host(target.address)
        router = Router(
            loop,
            security := credentials.server(host, "submit"),
            our_hello("server", incarnation, name),
        )
        service = RpcService("coordinator")
        service.label = f"program {socket.gethostname()}:{self.pid}"
        self.store: BulkStore = BulkStore(service, WORKERS, incarnation)
        self.listeners.streams = Streams(service)
        service.attach(router, loop, incarnation)
        self.store.address, self.store.key = router.bind(join_address(host, 0)), security.public
        self.result_fetcher = ResultFetcher(
            credentials,
            target.address,
            self.machine.wants,
            lambda work, attempt, parts: self.post_event(BulkArrived(work, attempt, parts)),
            lambda work, attempt, problem: self.post_event(BulkUnreachable(work, attempt, problem)),
            safe_only=target.form.safe_only,
        )
        self._dealer: DealerConnection = DealerConnection(
            loop,
            target.address,
            credentials.client(target.address, "submit"),
            our_hello("coordinator", incarnation, name),
            on_up=self._connected,
            on_message=self._handle_message,
            on_down=lambda: self._handle(DispatcherDown()),
            on_refused=self._refused,
        )
        self._actors = ActorConnections(
            loop, credentials, our_hello("coordinator", incarnation, name), self._handle
        )
        self.absence = UnreachableLog(loop, self.machine, self._dealer)

    def _connected(self, _hello: Hello) -> None:
        with self.lock:
            # have the next `schedule` count the room: all unfinished work goes into the queue of
            # the new dispatcher
            self.queue.room = 0
        self._handle(DispatcherUp())
        self.listeners.servers.forget()
        self._tell_facts(ProgramFacts(0, 0))

    def _tell_facts(self, last: ProgramFacts) -> None:
        """Tell the dispatcher what only this program knows of its work, if it has changed."""
        facts = ProgramFacts(self.machine.waiting, self.store.holdings.bytes)
        if self.machine.registered:
            if facts != last:
                self._dealer.send(last := facts)
            for server in self.listeners.servers.changes():
                self._dealer.send(server)
        due = self._loop.now() + FACTS_S
        self._loop.set_timer((self, "facts"), due, partial(self._tell_facts, last))

    def _handle_message(self, message: Message, _frames: list[memoryview]) -> None:
        if isinstance(message, Read):
            self._dealer.send(*self.store.read_reply(message))
        elif isinstance(message, DescribeWork):
            names = self.listeners.names_of_resources()
            self._dealer.send(described(message, self.machine.works, names))
        elif isinstance(message, Unsatisfied) and not message.final:
            works = (self.machine.works.get(number) for number, _ in message.works)
            waiting = ", ".join(dict.fromkeys(work.name for work in works if work is not None))
            log.warning(UNSATISFIED, waiting, message.text)
        elif isinstance(message, Refused):
            # A final Refused after the registration means that another connection has the session
            # now. The dispatcher ignores this one.
            if message.final and self.machine.registered:
                self._dealer.close()
                self._handle(DispatcherDown())
            self._refused(errors.from_code(message.code, message.message))
        else:
            self._handle(Heard(DISPATCHER, message))

    def _refused(self, error: errors.OpError) -> None:
        """End all work with the dispatcher's reason, because the dispatcher refuses this
        coordinator."""
        address = self.target.address
        log.error("dispatcher at %s: %s", address, error)
        error = errors.from_code(error.error_code, f"dispatcher at {address}: {error.message}")
        self._drain()
        self._handle(CoordinatorRefused(self.target.form.pack_error(error)))

    def _drain(self) -> None:
        with self.lock:
            outbox, self.outbox = self.outbox, []
            defined, names, dropped = self.functions.take()
        if defined:
            self._handle(FunctionsDefined(defined, names))
        start = 0
        for position, work in enumerate(outbox):
            if work.extra is None or not work.extra.inputs:
                continue
            if position > start:
                # an input may be among these, so the machine must have them
                self._handle(Scheduled(outbox[start:position]))
                start = position
            try:
                self.copy_inputs(work.extra)
            except Exception as error:
                # another thread of the program has changed an input since it was packed
                self._handle(PackingFailed(work, self.target.form.pack_error(error)))
                start = position + 1
        if start < len(outbox):
            self._handle(Scheduled(outbox[start:] if start else outbox))
        if dropped:
            self._handle(FunctionsDropped(dropped))

    def _handle_requests(self) -> None:
        # `popleft` rather than `clear`, because other threads may append meanwhile
        requests = [self._requests.popleft() for _ in range(len(self._requests))]
        if requests:
            self._drain()  # the machine does not know work that is still in the outbox
        for event in dict.fromkeys(event for event, _ in requests):
            self._handle(event([number for of, number in requests if of is event]))

    def _cancel_all(self, bound: int, first: int) -> None:
        self._drain()
        numbers = [
            work.number
            for work in self.machine.works.values()
            if first <= work.number < bound
            and (not work.is_detached or (first and isinstance(work, MethodCall)))
        ]
        self._handle(CancelRequested(numbers))

    def _handle(self, event: Event) -> None:
        """Pass an event to the machine and carry out the effects."""
        waiting = self.machine.waiting
        self._perform(self.machine.handle(event, self._loop.now()))
        self._loop.set_timer(self, self.machine.deadline, self._tick)
        if self.machine.without_cluster_since != self.absence.since:
            self.absence.watch()
        if self.progress.waiting_for_room and self.machine.waiting != waiting:
            with self.lock:
                self.changed.notify_all()

    def _tick(self) -> None:
        self._handle(Ticked())

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Resolve(items, failures):
                    self._settle(items, failures)
                case SubmitWork():
                    # if a message is lost, the next connection submits all work again
                    for message in effect.messages(self._pack, _near):
                        self._dealer.send(message)
                case Send(_, message):
                    self._dealer.send(message)
                case KeepInput(work, payload, dependents):
                    for dependent in dependents:
                        if (extra := dependent.extra) is None:
                            continue  # it has ended
                        for number, value in extra.input_values.items():
                            if work_of(value) is work:
                                self._put_input(extra, number, part_of(value, payload))
                case Recomputed(work):
                    with self.lock:
                        waiters = _taken_waiters(work)
                    for waiter in waiters:
                        waiter.release()
                case Free(work):
                    self._free(work)
                    work.payload = b""
                case DecideRetry():
                    self.listeners.retries.put(self._decide_retry, effect)
                case Fetch(work, attempt, reference):
                    self._fetch(work, attempt, reference)
                case RoundSettled(number):
                    with self.lock:
                        self.progress.rounds_ended = number
                        self.changed.notify_all()
                case RoundRefused(error, for_good):
                    self._round_refused(
                        Failure(ERROR, error, "", safe_only=self.target.form.safe_only), for_good
                    )
                case SendCalls(actor, calls):
                    self._actors.send_calls(actor, calls, self._pack)
                case SendToActor(actor, message):
                    self._actors.send(actor, message)
                case ConnectActor(actor):
                    self._actors.connect(actor)
                case DisconnectActor(actor):
                    self._actors.disconnect(actor)
                case ActorReported(actor, state, reason):
                    self.absence.watch_actors()
                    if (changed := self.listeners.on_actor_changed()) is not None:
                        changed(actor, state, reason)
                case ActorSearched(answer):
                    if (found := self.listeners.on_actor_found()) is not None:
                        found(answer)
                case WorkBegun(works):
                    self.listeners.on_begun(works)
                case RoomMade():
                    with self.lock:
                        self.changed.notify_all()
                case MembersChanged(joined, left):
                    metrics.count(
                        "worker_failures", sum(reason != SAID_GOODBYE for _, _, reason in left)
                    )
                    with self.lock:
                        # wake `workers()`, which waits for the first report
                        self.changed.notify_all()
                    for watcher in self.listeners.watchers:
                        watcher(joined, left)

    def _decide_retry(self, question: DecideRetry) -> None:
        """Have the program's `retry_if` decide. Called in the thread `listeners.retries`."""
        work, again, safe_only = question.work, False, self.target.form.safe_only
        try:
            extra = work.extra
            if extra is not None and extra.policy is not None:  # it has not ended
                failure = Failure(
                    question.kind, question.error, work.name, work.attempts, safe_only
                )
                again = extra.policy.accepts(failure())
        except BaseException:
            log.exception("retry_if of %s failed, so the function does not run again", work.name)
        self.post_event(RetryDecided(question, again, _jitter.random()))

    def _round_refused(self, failure: Failure, for_good: bool) -> None:
        with self.lock:
            if for_good:
                self.refusal = failure
            self.failures.add(ROUND, failure)
            self.changed.notify_all()

    def _pack(self, work: Work) -> bytes:
        """Return the payload of the next attempt of this work item."""
        payload, extra = work.payload, work.extra
        if extra is None:
            return self.packing.mark + payload
        if extra.input_values:
            inputs = {
                number: reference_of(value) if packed is None else packed
                for number, value in extra.input_values.items()
                for packed in (extra.packed_inputs.get(number),)
            }
            payload = encode_inputs(inputs, payload)
            if len(payload) > INLINE_BYTES_MAX:
                payload, bulks = self.hold([payload])
                extra.bulks += bulks
            payload = INPUTS + payload
        if extra.parts:
            payload = PARTS + extra.parts.to_bytes(COUNT_BYTES, "big") + payload
        return self.packing.mark + (KEEP + payload if extra.keep else payload)

    def _settle(self, items: list[tuple[Work, int, Any]], failures: Collection[Work]) -> None:
        """Settle the RemoteValues of ended work items, each (work, kind, payload). The items in
        `failures` fail the round."""
        waiters: list[Any] = []
        released: list[Any] = []
        safe_only = self.target.form.safe_only
        if (trace := self.listeners.trace) is not None:
            # before a thread can see the end, because it may then end the trace
            trace.ended([work for work, _, _ in items])
        with self.lock:
            resolved = len(items)
            for work, kind, payload in items:
                extra = work.extra
                if extra is not None:
                    if work.kind is not None or work.is_detached:
                        resolved -= 1
                    payload = self._settle_extra(extra, kind, payload)
                    if kind != KEPT or not payload.lineage:
                        released += (extra.input_values, extra.uses)
                        self._free(work)
                elif type(work) is MethodCall:
                    resolved -= 1  # as detached work, which has an Extra
                if failures and work in failures:
                    failure = Failure(kind, payload, work.name, work.attempts, safe_only)
                    self.failures.add(work.number, failure)
                # if the program has dropped the RemoteValue, nothing reads the outcome
                work.outcome = payload if kind == KEPT or work.alive is not None else None
                work.kind = kind
                if kind != KEPT:
                    work.alive = None
                elif work.alive is None:
                    self.request(KeptDropped, work.number)
                if kind != KEPT or not payload.lineage:
                    work.payload = b""
                if work.waiters is not None:
                    waiters += _taken_waiters(work)
            self.progress.resolved += resolved
            if self.progress.waiting and (
                self.progress.resolved == self.progress.scheduled
                or self.failures
                or self.progress.waiting_for_room
                or resolved < len(items)
            ):
                self.changed.notify_all()
        released.clear()  # without the lock, because finalizers of the program may run
        unfinished = self.machine.unfinished
        if unfinished >= TRIM_WORTH_ITEMS:
            self.progress.heap_grown = True
        elif self.progress.heap_grown and not unfinished:
            self.progress.heap_grown = False
            trim_heap()
        for waiter in waiters:
            waiter.release()

    def _settle_extra(self, extra: Extra, kind: int, payload: Any) -> Any:
        """Return the payload that the RemoteValue expects. The work item is no longer counted."""
        self.queue.end(extra)
        if extra.scheduled_at:
            metrics.record("closure_execution", clock.perf_counter() - extra.scheduled_at)
            extra.scheduled_at = 0.0
        if kind == INPUT_FAILED:
            values = extra.input_values.values()
            source: RemoteValue = next(value for value in values if value.work == payload)
            work = work_of(source)
            return work.outcome if work.kind == INPUT_FAILED else source
        return extra.timeout if kind == TIMED_OUT else payload

    def _free(self, work: Work) -> None:
        """Release the data held for a work item, because no further attempt needs it."""
        extra = work.with_extra()
        if extra.bulks:
            self.store.free(extra.bulks)
        extra.bulks, extra.uses = NO_BULKS, ()
        extra.input_values, extra.packed_inputs = NO_INPUTS, NO_PACKED
        if work.state in ENDED:
            work.drop_extra()

    # -- bulk results ------------------------------------------------------------------------------

    def _fetch(self, work: Work, attempt: int, reference: bytes) -> None:
        # If neither the program nor other work needs the result, do not fetch it, but report it as
        # arrived.
        is_needed = work.alive is not None or (work.extra is not None and work.extra.dependents)
        parts: list[Any] | None = []
        if is_needed:
            parts = self.result_fetcher.fetch(work.number, attempt, reference)
        if parts is not None:
            self._loop.call_soon(self._handle, BulkArrived(work.number, attempt, parts))

    def post_event(self, event: Event) -> None:
        """Have the loop pass this event to the machine. Any thread may call this. Takes no lock of
        the coordinator."""
        self.call_in_loop(self._handle, event)

    def call_in_loop(self, fn: Callable[..., object], *args: Any) -> None:
        """Have the loop call `fn(*args)`, or do nothing if the loop has ended. Takes no lock of the
        coordinator."""
        try:
            self._loop.call_soon(fn, *args)
        except errors.FailedPreconditionError:  # the loop has ended
            pass

    def _say_goodbye(self) -> None:
        self._dealer.send(Goodbye())
        self._dealer.close(linger_s=0.5)


def _taken_waiters(work: Work) -> list[Any]:
    """Return the waiters of a work item, which the caller must release. The caller holds the
    lock."""
    waiters, work.waiters = work.waiters or [], None
    return waiters


def _near(work: Work) -> tuple[str, int]:
    """Return the worker that holds most of the inputs of a work item, and about how many bytes; ("",
    0) if they are small."""
    sizes: Counter[str] = Counter()
    extra = work.extra
    for value in extra.input_values.values() if extra is not None else ():
        source = work_of(value)
        if source.kind == KEPT:
            reference = decode_reference(source.outcome.reference)
            sizes[reference.holder] += reference.nbytes
    for holder, nbytes in sizes.most_common(1):
        if nbytes >= NEAR_BYTES_MIN:
            return holder, 1 << nbytes.bit_length()  # about, so that items share messages
    return "", 0
