"""The coordinator's runtime, the code around machine.py: it talks to the dispatcher, fetches large
results and settles RemoteValues.

The threads of the program append work to an outbox under the coordinator's lock, and the loop's
thread passes the work in the outbox to the machine. The program's threads hold the same lock while
they read the runtime's state.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import closing
from typing import Any, Final, TypeAlias
from weakref import WeakSet, ref

from zmqdist import errors
from zmqdist.addresses import join_address
from zmqdist.callbacks import Callbacks
from zmqdist.events import Heard, Send, Ticked
from zmqdist.limits import ATTEMPTS_MAX, INLINE_BYTES_MAX
from zmqdist.messages import (
    CANCELLED,
    ERROR,
    KEPT,
    SAID_GOODBYE,
    DescribeWork,
    Goodbye,
    Message,
    Read,
    Refused,
    Stalled,
)
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.service import RpcService
from zmqdist.scheduling.coordinator import metrics
from zmqdist.scheduling.coordinator.affinity import (
    PLAIN,
    Joined,
    Left,
    MembersChanged,
    Scheduled,
    WorkOptions,
)
from zmqdist.scheduling.coordinator.closures import DISPATCHER, Closures
from zmqdist.scheduling.coordinator.coalesced_queue import CoalescedQueue
from zmqdist.scheduling.coordinator.coordinator_events import (
    AttemptPacked,
    BulkArrived,
    BulkUnreachable,
    CancelRequested,
    CoordinatorRefused,
    DispatcherDown,
    DispatcherUp,
    EndRoundRequested,
    Event,
    ForgetRequested,
    FunctionsDefined,
    FunctionsDropped,
    KeptDropped,
    TakeBackRequested,
)
from zmqdist.scheduling.coordinator.dependencies_and_retries import (
    Dependencies,
    Free,
    HandIn,
    Recomputed,
)
from zmqdist.scheduling.coordinator.dispatcher_target import Target
from zmqdist.scheduling.coordinator.effects import (
    Effect,
    Fetch,
    KeepInput,
    Replace,
    Resolve,
    RoomMade,
    RoundRefused,
    RoundSettled,
    WorkBegun,
)
from zmqdist.scheduling.coordinator.failures import Failure, Failures
from zmqdist.scheduling.coordinator.functions import FunctionNumbers
from zmqdist.scheduling.coordinator.machine import ROUND, CoordinatorMachine
from zmqdist.scheduling.coordinator.queue_bounds import SMALL_BYTES_MAX, QueueBytes
from zmqdist.scheduling.coordinator.remote_value import Kept, Registered, RemoteValue, settle, wake
from zmqdist.scheduling.coordinator.result_fetcher import ResultFetcher
from zmqdist.scheduling.coordinator.task_specs import Plans
from zmqdist.scheduling.coordinator.unreachable_log import UnreachableLog
from zmqdist.scheduling.coordinator.watchdog import WatchDog
from zmqdist.scheduling.coordinator.work_names import WorkNames
from zmqdist.scheduling.shared.heap_trimming import HeapTrimmer
from zmqdist.scheduling.shared.references import encode_reference
from zmqdist.scheduling.shared.remote_results import decode_loss
from zmqdist.scheduling.shared.store import BulkStore
from zmqdist.task_context import scheduled
from zmqdist.transport.dealer import DealerConnection
from zmqdist.transport.loop import Loop
from zmqdist.transport.own_address import own_host
from zmqdist.transport.router import Router
from zmqdist.wire.hello import Hello, our_hello

log = logging.getLogger("zmqdist.coordinator")

Watcher: TypeAlias = "Callable[[list[Joined], list[Left]], None]"
"""A function that the loop calls with the workers that joined, each (name, incarnation, pid, host),
and the workers that left, each (name, incarnation, reason)."""

STALLED = (
    "%d functions that functions have scheduled wait for a slot, all %d slots at %s are busy, and "
    "for some seconds none has "
    "begun or ended a function: a function that waits (get, fetch, join) keeps its slot, so they "
    "may wait for ever. Have the program "
    "schedule and wait, or start more slots than functions that wait; cancel() ends them"
)

WORKERS = frozenset({"worker"})

REQUEST_MS: Final = 20_000
"""The time limit in milliseconds of one request to the dispatcher, including the time to
connect.
"""

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
        runtime.room = 0
        runtime.schedule_lock, runtime.lock, runtime.unpacking = (
            threading.Lock(),
            threading.Lock(),
            threading.RLock(),
        )
        runtime.changed = threading.Condition(runtime.lock)


os.register_at_fork(after_in_child=_forked)


class CoordinatorRuntime:
    """The runtime of one coordinator, with its connection to a dispatcher.

    Args:
      rounds: whether failures are recorded for `join`. If False, the runtime instead reports which
        work has begun (`on_begun`).
      width: the number of work items that the dispatcher may have at a time; None means no bound.

    Attributes (guarded by `lock`, but any thread may read `scheduled`, `resolved` and
      `rounds_ended`, which only grow, without it): number: this coordinator's number in the
      cluster.
      lock, changed: held for microseconds only. `changed` is notified when a waiting thread may
        continue, because all work is resolved, work has failed, detached work or a round has ended,
        workers have changed, or the queue may have room while `waiting_for_room` > 0.
      schedule_lock: admits one `schedule` or `join` at a time.
      unpacking: held while a result is unpacked, so that each result is unpacked once.
      refusal: makes the error with which the dispatcher has refused this coordinator for good; None
        without such a refusal.
      scheduled, resolved, rounds_ended: the number of scheduled work items, of those that have
        ended, and of rounds that have ended.
      waiting, waiting_for_room: the number of threads that wait on `changed`, and the number of
        those that wait for room in the queue.
      failures: the errors of the round.
      callbacks, settling: the thread for the program's callbacks; the thread for callbacks of this
        package, none of which waits.
      room: the number of work items that may be handed in before `has_room` must count again.
      queue_bytes, form: the counter of the bytes of arguments of unfinished work; the form in which
        the program accepts results.
      packing_thread, uses: the thread that is packing arguments, or None; the resources and kept
        values found in these arguments.
      inputs: the RemoteValues found in the arguments that are being packed, by work number.
      by_reference: whether each RemoteValue is packed as a reference to its kept value, because the
        packed call cannot wait for inputs.
      values, with_callbacks: weak references to unsettled RemoteValues, by work number; the
        unsettled RemoteValues that have callbacks.
      lost_values, names: the lost kept values for which a thread waits, by work number; the names
        of the program's work for drain reports.
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
    ) -> None:
        self.address = target.address
        self.credentials = target.credentials
        self.form, self._mark = target.form, target.form.mark
        self.queue_max = queue_max
        self.schedule_lock, self.lock, self.unpacking = (
            threading.Lock(),
            threading.Lock(),
            threading.RLock(),
        )
        self.changed = threading.Condition(self.lock)
        self.scheduled = self.resolved = self.rounds_ended = self.waiting = (
            self.waiting_for_room
        ) = self.room = 0
        self.packing_thread: int | None = None
        self.uses: list[Any] = []
        self.inputs: dict[int, RemoteValue] = {}
        self.by_reference = False
        self.failures = Failures(reported=rounds)
        self.closed = False
        self.pid = os.getpid()
        self.functions = FunctionNumbers(lambda bulk: self.store.holds(bulk))
        self._rounds, self._width = rounds, width
        self.on_begun: Callable[[list[int]], object] = lambda works: None
        self.refusal: Failure | None = None
        self.values: dict[int, ref[RemoteValue]] = {}
        self.with_callbacks: set[RemoteValue] = set()
        self.lost_values: dict[int, RemoteValue] = {}
        self.names = WorkNames(self)
        self.outbox: list[tuple[int, int, bytes]] = []
        self._to_keep: list[int] = []
        self._options: dict[int, WorkOptions] = {}
        """The options of the work in the outboxes, by work number."""
        self._detached: set[int] = set()
        """Unfinished work that is detached from the rounds; `scheduled` and `resolved` do not count
        it."""
        self._detached_outbox: list[tuple[int, int, bytes]] = []
        self._cancels = CoalescedQueue(self.call_in_loop, self._cancel)
        self._take_backs = CoalescedQueue(self.call_in_loop, self._take_back)
        self._dropped = CoalescedQueue(self.call_in_loop, self._release_kept)
        self._forgotten = CoalescedQueue(
            self.call_in_loop, lambda numbers: self._handle(ForgetRequested(numbers))
        )
        self._watchers: list[Watcher] = []
        self.held_by_work: dict[int, list[int]] = {}
        self._uses_by_work: dict[int, list[Any]] = {}
        self.plans = Plans(self)
        self.queue_bytes = QueueBytes(queue_bytes_max, lambda bulk: self.store.size_of(bulk))
        self._draining = False
        self._due: float | None = None
        self._heap_trimmer, self._executions = HeapTrimmer(), metrics.Executions()
        self.callbacks, self.settling = Callbacks(), Callbacks("zmqdist-settling")
        self._loop = Loop("zmqdist-coordinator")
        try:
            self._open(target, cancel_grace_s, lost_limit_s, recovery_limit_s)
        except BaseException:
            self._loop.stop()
            raise
        self._dealer.connect()
        self._loop.start()
        self._watchdog = WatchDog(progress=lambda: (self.resolved, self.scheduled - self.resolved))
        opened.add(self)

    # -- for the program's threads -----------------------------------------------------------------

    def call_dispatcher(self, method: str, *args: Any, timeout_ms: int = REQUEST_MS) -> Any:
        """Call an RPC method of the dispatcher over a new connection, and return the reply."""
        security = self.credentials.client(self.address, "submit")
        with closing(ZmqClient(self.address, "", True, timeout_ms, security=security)) as client:
            return getattr(client, f"{method}_blocking")(*args)

    def hold(self, parts: list[Any], inline_max: int = INLINE_BYTES_MAX) -> tuple[bytes, list[int]]:
        """Put a copy of data that is too large for a message into the store. Return a reference,
        and numbers for `enqueue` or `drop`."""
        reference = self.store.hold(parts, shared=True, inline_max=inline_max)
        return encode_reference(reference), reference.bulks

    def drop(self, bulks: list[int]) -> None:
        """Release the data for which `hold` returned these numbers. Call this if the work that
        needs the data was not enqueued."""
        self.store.free(bulks)

    def enqueue(
        self,
        work: int,
        number: int,
        name: str,
        payload: bytes,
        bulks: list[int],
        keep: bool,
        uses: list[Any],
        options: WorkOptions = PLAIN,
        alive: object = None,
    ) -> RemoteValue:
        """Hand in a work item, which takes over the held data in `bulks`, and return its
        RemoteValue. The caller must hold `lock`.

        Args:
          keep: whether the worker keeps the value.
          uses: objects that must stay alive until the work has ended.
          options: whether the work is pinned, its priority, and whether it is detached from the
            rounds. Detached work takes no room in the queue, `join` does not wait for it, its error
            is in its RemoteValue only, and the end of a round does not cancel it.
          alive: a token that the RemoteValue holds, so that this runtime stays open while the value
            is pending.
        """
        if (bulks or len(payload) > SMALL_BYTES_MAX) and not options.detached:
            self.queue_bytes.begin(work, len(payload), bulks)
        if bulks:
            self.held_by_work[work] = list(bulks)
            bulks.clear()  # the work item owns the data now, so the caller must not drop it
        if keep:
            self._to_keep.append(work)
        if uses:
            self._uses_by_work[work] = uses
        value = RemoteValue(self, work, name, alive)
        self.values[work] = ref(value)
        if options is not PLAIN:
            self._options[work] = options
        if options is not PLAIN and options.detached:
            self._detached.add(work)
            self._detached_outbox.append((work, number, self._mark + payload))
        else:
            self.outbox.append((work, number, self._mark + payload))
            self.scheduled += 1
            self.room -= 1
        if metrics.enable_metrics or not self._draining:
            self._announce(work)
        return value

    def expect(self, work: int, value: RemoteValue) -> None:
        """Count a plan as scheduled, and register its value to be settled when the plan ends. The
        caller must hold `lock`."""
        self.values[work] = ref(value)
        self.scheduled += 1
        self.room -= 1
        self._announce(work)

    def _announce(self, work: int) -> None:
        self._executions.begin(work)
        if not self._draining:
            # before the flag: Ctrl-C must not leave the flag set without the call
            self._loop.call_soon(self._drain)
            self._draining = True

    def release_kept(self, work: int) -> None:
        """Have the worker release the value of this work item. Finalizers call this method, so it
        takes no lock of the coordinator."""
        if self.pid == os.getpid():
            self._dropped.put(work)

    def forget_everywhere(self, number: int) -> None:
        """Have all slots drop the object with this number. Finalizers call this method, so it takes
        no lock of the coordinator."""
        if self.pid == os.getpid():
            self._forgotten.put(number)

    def watch(self, watcher: Watcher) -> None:
        """Have the loop call `watcher(joined, left)`: now with all workers, then at each change.
        `watcher` must neither wait nor raise."""

        def begin() -> None:
            self._watchers.append(watcher)
            watcher(list(self.machine.closures.affinity.members.values()), [])

        self.call_in_loop(begin)

    @property
    def members(self) -> dict[str, Joined] | None:
        """The present workers by name; None until the dispatcher has reported them. The loop
        replaces the dict at each change."""
        affinity = self.machine.closures.affinity
        return affinity.members if affinity.members_known else None

    def has_room(self, nbytes: int, bulks: list[int]) -> bool:
        """Return whether the queue has room for one more work item with these arguments, and update
        `room`. The caller must hold `lock`.

        Plans that wait for inputs are not in the dispatcher's queue. Their number has a bound of
        its own, which is also `queue_max`.
        """
        queued = self.machine.closures.queued + len(self.outbox)
        self.room = (
            self.queue_max - len(self.plans.planned) - max(queued, self.machine.plans.waiting)
        )
        return self.room > 0 and self.queue_bytes.fits(nbytes, bulks)

    def end_round(self) -> None:
        """Request the end of the round. The loop increases `rounds_ended` when the round has ended.
        The caller must hold `lock`."""
        self._loop.call_soon(self._handle, EndRoundRequested(self.rounds_ended + 1))

    def cancel(self, work: int) -> None:
        """Request the cancellation of a work item. Requests share messages, because the dispatcher
        scans its queue for each message."""
        self._cancels.put(work)

    def cancel_all(self) -> int:
        """Request the cancellation of all unfinished work that is not detached, and return the
        number of these work items.
        """
        with self.lock:
            works = [work for work in self.values if work not in self._detached]
        self.call_in_loop(self._cancel, works)
        return len(works)

    def take_back(self, work: int) -> None:
        """Cancel a work item unless it has begun. The loop reports begun work to `on_begun`. Only
        for work without options."""
        self._take_backs.put(work)

    def keep(self, value: RemoteValue) -> None:
        """Keep a value alive until it is settled, because it has callbacks. The caller must hold
        `lock`."""
        self.with_callbacks.add(value)

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
            ended = [
                value for reference in self.values.values() if (value := reference()) is not None
            ]
            self.values.clear()
            calls = [(value, settle(value, CANCELLED, b"") or ()) for value in ended]
            for lost in self.lost_values.values():
                wake(lost)
            self.lost_values.clear()
            self.resolved = self.scheduled
            self.queue_bytes.clear()
            self.plans.close()
            self.changed.notify_all()
        self.failures.report()
        _call_back(calls)
        self.with_callbacks.clear()
        self._uses_by_work.clear()
        self.settling.close()
        self.callbacks.close()

    # -- in the loop -------------------------------------------------------------------------------

    def _open(
        self, target: Target, cancel_grace_s: float, lost_limit_s: float, recovery_limit_s: float
    ) -> None:
        loop, credentials = self._loop, target.credentials
        incarnation = self.number = secrets.randbits(62) | 1
        name = f"coordinator {socket.gethostname()}:{self.pid}"
        host = own_host(self.address)
        router = Router(
            loop,
            security := credentials.server(host, "submit"),
            our_hello("server", incarnation, name),
        )
        service = RpcService("coordinator")
        self.store: BulkStore = BulkStore(service, WORKERS, incarnation)
        service.attach(router, loop, incarnation)
        self.store.address, self.store.key = router.bind(join_address(host, 0)), security.public
        self.result_fetcher = ResultFetcher(
            credentials,
            self.address,
            lambda work, attempt: self.machine.closures.wants(work, attempt),
            lambda work, attempt, parts: self.post_event(BulkArrived(work, attempt, parts)),
            lambda work, attempt, problem: self.post_event(BulkUnreachable(work, attempt, problem)),
            safe_only=self.form.safe_only,
        )
        closures = Closures(
            coordinator=incarnation,
            queue_max=self.queue_max,
            cancel_grace_s=cancel_grace_s,
            lost_limit_s=lost_limit_s,
            recovery_limit_s=recovery_limit_s,
            starts=not self._rounds,
            width=self._width,
            nested=scheduled(),
            now=loop.now(),
        )
        plans = Dependencies(recomputations_max=ATTEMPTS_MAX)
        self.machine: CoordinatorMachine = CoordinatorMachine(
            closures, plans, decode_loss, rounds=self._rounds
        )
        self._dealer: DealerConnection = DealerConnection(
            loop,
            self.address,
            credentials.client(self.address, "submit"),
            our_hello("coordinator", incarnation, name),
            on_up=self._connected,
            on_message=self._handle_message,
            on_down=lambda: self._handle(DispatcherDown()),
            on_refused=self._refused,
        )
        self.absence = UnreachableLog(loop, self.machine.closures, self._dealer)

    def _connected(self, _hello: Hello) -> None:
        with self.lock:
            # have the next `schedule` count the room: all unfinished work goes into the queue of
            # the new dispatcher
            self.room = 0
        self._handle(DispatcherUp())

    def _handle_message(self, message: Message, _frames: list[memoryview]) -> None:
        if isinstance(message, Read):
            self._dealer.send(*self.store.read_reply(message))
        elif isinstance(message, DescribeWork):
            self._dealer.send(self.names.described(message))
        elif isinstance(message, Stalled):
            log.warning(STALLED, message.waiting, message.slots, self.address)
        elif isinstance(message, Refused):
            # A final Refused after the registration means that another connection has the session
            # now. The dispatcher ignores this one.
            if message.final and self.machine.closures.registered:
                self._dealer.close()
                self._handle(DispatcherDown())
            self._refused(errors.from_code(message.code, message.message))
        else:
            self._handle(Heard(DISPATCHER, message))

    def _refused(self, error: errors.OpError) -> None:
        """End all work with the dispatcher's reason, because the dispatcher refuses this
        coordinator."""
        log.error("dispatcher at %s: %s", self.address, error)
        text = f"dispatcher at {self.address}: {error.message}"
        self._drain()
        self._handle(
            CoordinatorRefused(self.form.pack_error(errors.from_code(error.error_code, text)))
        )

    def _drain(self) -> None:
        with self.lock:
            outbox, self.outbox = self.outbox, []
            planned, self.plans.planned = self.plans.planned, []
            to_keep, self._to_keep = self._to_keep, []
            options, self._options = self._options or None, {}
            detached, self._detached_outbox = self._detached_outbox, []
            defined, dropped = self.functions.take()
            self._draining = False
        if defined:
            self._handle(FunctionsDefined(defined))
        if detached:
            # pass detached work first, so that a resource is built before the functions that use it
            # begin
            self._handle(Scheduled(detached, (), options))
        if planned:
            position = 0
            for plan in planned:
                if plan.position > position:
                    self._handle(Scheduled(outbox[position : plan.position], to_keep, options))
                    position = plan.position
                self._handle(self.plans.begin(plan))
            outbox = outbox[position:]
        if outbox:
            self._handle(Scheduled(outbox, to_keep, options))
        if dropped:
            self._handle(FunctionsDropped(dropped))

    def _cancel(self, works: list[int]) -> None:
        self._drain()
        self._handle(CancelRequested(works))

    def _take_back(self, works: list[int]) -> None:
        self._drain()  # the machine does not know work that is still in the outbox
        self._handle(TakeBackRequested(works))

    def _release_kept(self, works: list[int]) -> None:
        self._handle(KeptDropped(works))

    def _handle(self, event: Event) -> None:
        """Pass an event to the machine and carry out the effects. Then do so with each event that
        these effects produce."""
        events: deque[Event] = deque((event,))
        waiting = self.machine.plans.waiting
        while events:
            self._perform(self.machine.handle(events.popleft(), self._loop.now()), events)
        due = self.machine.deadline
        if due != self._due:
            self._due = due
            self._loop.set_timer(self, due, self._tick)
        self.absence.watch()
        if self.waiting_for_room and self.machine.plans.waiting != waiting:
            with self.lock:
                self.changed.notify_all()

    def _tick(self) -> None:
        self._due = None
        self._handle(Ticked())

    def _perform(self, effects: list[Effect], replies: deque[Event]) -> None:
        for effect in effects:
            match effect:
                case Send(_, message):
                    # if the message is lost, the next connection submits all work again
                    self._dealer.send(message)
                case Resolve(items, failures):
                    self.settle(self.plans.ended(items) if self.plans else items, failures)
                case HandIn(work, attempt):
                    replies.append(AttemptPacked(attempt, self.plans.pack(work)))
                case KeepInput(work, payload, plans):
                    self.plans.put(work, payload, plans)
                case Replace(work, kind, payload):
                    self.plans.replace(work, kind, payload)
                case Recomputed(work):
                    self.plans.wake(work)
                case Free(work):
                    self.plans.free(work)
                case Fetch(work, attempt, reference):
                    self._fetch(work, attempt, reference)
                case RoundSettled(number):
                    with self.lock:
                        self.rounds_ended = number
                        self.changed.notify_all()
                case RoundRefused(error, for_good):
                    self._round_refused(Failure(ERROR, error, "", self.form.safe_only), for_good)
                case WorkBegun(works):
                    self.on_begun(works)
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
                    for watcher in self._watchers:
                        watcher(joined, left)

    def _round_refused(self, failure: Failure, for_good: bool) -> None:
        with self.lock:
            if for_good:
                self.refusal = failure
            self.failures.add(ROUND, failure)
            self.changed.notify_all()

    def settle(self, items: list[Any], failures: Collection[int]) -> None:
        """Settle the RemoteValues of ended work items, each (work, kind, payload). The items whose
        work is in `failures` fail the round."""
        calls: list[tuple[RemoteValue, Registered]] = []
        released: list[list[Any]] = []
        with self.lock:
            values, before = self.values, len(self.values)
            detached, detached_count, counted = self._detached, 0, self.queue_bytes.works
            for work, kind, payload in items:
                if kind and kind == KEPT and type(payload) is bytes:
                    payload = Kept(self, work, payload)
                reference = values.pop(work, None)
                if reference is None:
                    continue
                if counted and work in counted:
                    self.queue_bytes.end(work)
                if self.held_by_work and work in self.held_by_work:
                    self.store.free(self.held_by_work.pop(work))
                if self._uses_by_work and work in self._uses_by_work:
                    released.append(self._uses_by_work.pop(work))
                value = reference()
                if detached and work in detached:
                    detached.discard(work)
                    detached_count += 1
                elif failures and work in failures:
                    name = "a scheduled function" if value is None else value.name
                    self.failures.add(work, Failure(kind, payload, name, self.form.safe_only))
                if value is None:
                    continue
                if callbacks := settle(value, kind, payload):
                    calls.append((value, callbacks))
                    self.with_callbacks.discard(value)
            self.resolved += before - len(values) - detached_count
            if not values:
                self.values = {}  # a new dict takes less memory, because a dict never shrinks
            if self.waiting and (
                self.resolved == self.scheduled
                or self.failures
                or self.waiting_for_room
                or detached_count
            ):
                self.changed.notify_all()
        self._executions.end(items)
        self._heap_trimmer.update(len(self.values), lambda: True)
        _call_back(calls)

    # -- bulk results ------------------------------------------------------------------------------

    def _fetch(self, work: int, attempt: int, reference: bytes) -> None:
        held = self.values.get(self.machine.user_of(work))
        # If the program has dropped the RemoteValue, do not fetch the result, but report it as
        # arrived.
        wanted = held is not None and held() is not None
        parts = self.result_fetcher.fetch(work, attempt, reference) if wanted else []
        if parts is not None:
            self._loop.call_soon(self._handle, BulkArrived(work, attempt, parts))

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


def _call_back(calls: list[tuple[RemoteValue, Registered]]) -> None:
    for value, registered in calls:
        for thread, fn in registered:
            thread.put(fn, value)
