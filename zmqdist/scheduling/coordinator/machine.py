"""The coordinator's machine: it decides how all scheduled work proceeds and ends; no I/O.

Theory of operation
    Each work item is one record (work.py), whose state says where it is. The coordinator owns its
    work; the dispatcher's queue is a copy. On each new connection to a dispatcher the coordinator
    submits all unfinished work again. Each submission has attempt numbers that no earlier submission
    of the work item has used, and so has each retry and each recomputation. A message about a work
    item names an attempt, and counts only if the attempt belongs to the present submission.
    A work item waits for its inputs, which are other work items. A kept value with a lineage that is
    lost is computed once more, after the lost inputs of its work item have been recomputed.
    When the program waits for the end of a round, the coordinator sends EndRound. Once the
    dispatcher reports that no work of the round can be executing, the coordinator resolves the
    remaining work as cancelled. In messages each round has a higher number than the round before.

Promises, checked by tests/scheduling/coordinator/transcripts and tests/sim
    P1  each work item is resolved exactly once, and again only if its lost value was recomputed or
        is lost for good
    P2  a bulk result is resolved when it has arrived in this process, not earlier
    P3  after a RoundSettled no work that was scheduled before it can be executing
    P4  after a reconnect exactly the unfinished work is submitted again, oldest first
    P5  lost starts are counted over all dispatchers: work that crashes its process fails after
        `attempts_max` lost starts
    P6  without a dispatcher, or without any worker, for `lost_limit_s` all unfinished work is
        resolved as unavailable, but for calls that their actors can finish
    P7  the coordinator, the dispatcher and the workers drop a function once no unfinished work uses
        it and the program's cache of functions has dropped it
    P8  if a worker is to keep a bulk result, the work is resolved with a reference; when the
        program drops the value, the worker releases the result
    P9  work is submitted to each dispatcher with the options with which it was scheduled
    P10 detached work takes no room in the queue, its error does not end a round, and the end of a
        round does not end detached work
    P11 work pinned to a worker that is absent for `recovery_limit_s`, while others are present, is
        resolved as unavailable
    P12 MembersChanged reports exactly once that a worker joined, and then that it left, even if the
        dispatcher changes; the first report lists all present workers as joined
    P13 with a `width` the dispatcher has at most `width` work items at a time, not counting
        detached work; the oldest are submitted first
    P14 work that the program takes back (cancels unless it has begun) is resolved as cancelled, or
        reported in WorkBegun, or resolved by its result; if the connection to the dispatcher is
        lost first, work that is cancelled or taken back is resolved as cancelled
    P15 the coordinator does not request the end of a round that is over or has not begun
    P16 a message about an attempt of an earlier submission, retry or recomputation does not end a
        later one
    P17 `unfinished`, `waiting` and `at_dispatcher` agree with the states of the work items
    P18 a round fails if and only if a work item fails after all its retries: by an error of the
        function, too many lost starts, a failed input, its timeout, or a lack of workers. Detached
        work never fails a round; with `rounds=False` no work does
    P19 Resolve precedes the effects that it makes possible: KeepInput, then SubmitWork
    P20 as soon as the dispatcher has refused the coordinator for good, all work ends with the
        dispatcher's error
    P21 a work item ends at the latest when its round ends, unless it is detached
    P22 a work item is submitted only when all its inputs are available
    P23 a work item with a failed input fails with INPUT_FAILED, and is not submitted after that
    P24 at most 1 + retries attempts of a work item end with an error of the function; further
        attempts begin only because a value was lost
    P25 from the request for the end of a round until the round has ended, no work of rounds is
        submitted
    P26 a work item that has not ended by its `until` ends then, and is cancelled at the dispatcher
    P27 a lost value with a lineage is recomputed on request, at most `recomputations_max` times;
        then the waiting requests are served
    P28 a function that the program no longer uses is dropped as soon as no remaining work item uses
        it, and not earlier
    P29 the data held to recompute a value is freed after the value was released
    P30 a retry with a policy begins only after the program has decided for it, and not before the
        wait that the policy computes from the number of the retry and the program's random number
    P31 the session of the next function has nothing of the session before: it registers as one that
        has submitted nothing, and submits only work that was scheduled for it
    P32 a work item that the program has cancelled, and whose function then raises, is resolved as
        cancelled, so that it does not fail its round

Not here: payloads, exceptions and held data, which are opaque to the machine, and threads that wait
(runtime.py).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, count, islice
from typing import Any, Final

from zmqdist.batches import split
from zmqdist.errors import LostStart
from zmqdist.events import Heard, Send, Ticked
from zmqdist.messages import (
    BULK,
    CANCELLED,
    ERROR,
    INPUT_LOST,
    KEPT,
    OUT_OF_MEMORY,
    SAID_GOODBYE,
    SUBMISSION_SHIFT,
    VALUE,
    ActorChanged,
    ActorFound,
    Begun,
    CancelWork,
    CoordinatorRegistered,
    Define,
    EndRound,
    Forget,
    Members,
    QueueProgress,
    RegisterCoordinator,
    Result,
    ResultReceived,
    Results,
    RoundEnded,
    StartsLost,
    Unsatisfied,
    Workers,
)
from zmqdist.scheduling.coordinator.affinity import WorkerAffinity
from zmqdist.scheduling.coordinator.called_actors import CalledActors
from zmqdist.scheduling.coordinator.coordinator_events import (
    ActorConnected,
    ActorDisconnected,
    ActorKilled,
    ActorMade,
    ActorSought,
    ActorWatched,
    BulkArrived,
    BulkUnreachable,
    CallsEnded,
    CancelRequested,
    CoordinatorRefused,
    DecideRetry,
    DispatcherDown,
    DispatcherUp,
    Effect,
    EndRoundRequested,
    Event,
    Fetch,
    ForgetRequested,
    Free,
    FunctionsDefined,
    FunctionsDropped,
    HandlesDropped,
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
    SessionRequested,
    StreamTaken,
    SubmitWork,
    TakeBackRequested,
    ValueLost,
    WorkBegun,
)
from zmqdist.scheduling.coordinator.options import PLAIN, WorkOptions
from zmqdist.scheduling.coordinator.work import (
    ACTOR_LOST,
    AT_DISPATCHER,
    ATTEMPTED,
    AWAITING_RESULT,
    IN_PROGRAM,
    INPUT_FAILED,
    LOST,
    NO_DEPENDENTS,
    NO_USED,
    NO_WORKS,
    RETRYING,
    TIMED_OUT,
    UNAVAILABLE,
    UNFINISHED,
    KeptAt,
    MethodCall,
    State,
    Work,
)

DISPATCHER: Final = "dispatcher"
"""The dispatcher, which is the only peer of this machine."""

ROUND: Final = 0
"""Stands for the whole round in a field that otherwise has a work number. No work item has this
number."""

FAILURES: Final = frozenset({ERROR, OUT_OF_MEMORY, LOST, UNAVAILABLE, INPUT_FAILED, TIMED_OUT})
"""The kinds of ends with which a work item fails its round."""

CANCEL_MAX: Final = 100_000
"""The largest number of work items in one message without payloads, so that the header of the
message stays far below the limit."""

DUE_SPARE: Final = 64
"""The heap of deadlines is rebuilt when the number of its entries exceeds twice the number of work
items by more than this."""

QUEUED, SUBMITTED, SUCCEEDED, FAILED = State.QUEUED, State.SUBMITTED, State.SUCCEEDED, State.FAILED
"""The states of nearly all work, bound here because the look-up in an enum is slow."""


class CoordinatorMachine:
    """The machine of a coordinator; the module's docstring has the rules.

    Args:
      coordinator: the coordinator's number in the cluster.
      queue_max: the bound of the dispatcher's queue for this coordinator.
      cancel_grace_s: how long a cancelled function may go on running before its slot is killed.
      lost_limit_s: how long all workers or the dispatcher may be absent before all unfinished work
        ends (P6).
      decode_loss: decodes the payload of an INPUT_LOST into the number of the lost input and the
        packed error.
      recomputations_max: how often the lost value of one work item is recomputed.
      recovery_limit_s: how long a worker may be missed before work pinned to it ends (P11). None
        means that members are not watched.
      rounds: whether failed work fails its round.
      starts: whether the dispatcher reports which work has begun (P14).
      width: the number of work items that the dispatcher may have (P13). None means no bound.
      parent: the lease of the function that schedules the work; 0 if a program does.

    Attributes:
      works: the unfinished work items, those whose value a worker keeps or has lost, and those that
        the dispatcher has yet to give up, by number. Other threads may only read it.
      unfinished, waiting: the number of work items that have not ended or are recomputed, and of
        those that wait in this process, for inputs or for a retry.
      at_dispatcher: the number of work items of rounds that the dispatcher has not ended.
      failed: the work item whose error was the first of the present round; ROUND if the round
        failed because the dispatcher refused the coordinator; None while the round has not failed.
    """

    def __init__(
        self,
        *,
        coordinator: int,
        queue_max: int,
        cancel_grace_s: float,
        lost_limit_s: float,
        now: float,
        decode_loss: Callable[[bytes], tuple[int, bytes]],
        recomputations_max: int,
        recovery_limit_s: float | None = None,
        rounds: bool = True,
        starts: bool = False,
        width: int | None = None,
        parent: int = 0,
    ) -> None:
        self.coordinator = coordinator
        self.affinity = WorkerAffinity(recovery_limit_s)
        self.works: dict[int, Work] = {}
        self.wire_round = self.round = 1
        self.unfinished = self.waiting = self.workers = 0
        self.failed: int | None = None
        self.ending = self.registered = False
        self._rounds, self._starts, self._width, self.parent = rounds, starts, width, parent
        self._queue_max = queue_max
        self._cancel_grace_s = cancel_grace_s
        self._lost_limit_s = lost_limit_s
        self._recomputations_max = recomputations_max
        self._decode_loss = decode_loss
        self._unsent: dict[Work, None] = {}
        """The queued work, in order."""
        self._unsent_detached = 0
        self._due: list[tuple[float, int, Work]] = []
        """A heap of the times at which work items time out or run again, with a serial number."""
        self._serial = count()
        self._functions: dict[int, bytes] = {}
        self._function_names: dict[int, str] = {}
        self._uses: dict[int, int] = {}
        self._dropped: set[int] = set()
        self._to_forget: list[int] = []
        """Numbers of objects that all slots must drop. These numbers were not sent to a dispatcher
        yet."""
        self._submitted_before = False
        self._may_run_unseen = False
        """Whether work of this round may be executing at a lost worker."""
        self._without_cluster_since: float | None = now
        self._submitted = self._left_queue = self.at_dispatcher = 0
        """Of the work of rounds: what was sent over this connection, what of this has left the
        dispatcher's queue according to its last report, and what the dispatcher has not ended."""
        self._was_full = False
        self._registrations = 0
        """The requests to register over this connection that have no reply yet."""
        self._value_was_lost = False
        """Whether queued work may need a value that has been lost since it was queued."""
        self._has_kept_inputs = False
        """Whether some unsent work has inputs that workers keep."""
        self._refusal: bytes | None = None
        self._now = now
        self._effects: list[Effect] = []
        self._resolved: list[tuple[Work, int, Any]] = []
        self._failures: set[Work] = set()
        self._cancels: list[tuple[int, int]] = []
        self.actors = CalledActors(self)
        self._keeps: list[tuple[int, int]] = []
        self._receipts: list[tuple[int, int]] = []
        self._unused: list[int] = []
        """What the present event has led to, which `_flush` sends."""
        self._followups: deque[tuple[Work, bool | None]] = deque()
        """What `handle` has yet to process: (work, whether it has succeeded) for inputs that ended,
        (work, None) for a value to recompute."""

    def lost_starts(self, number: int) -> int:
        """Return how many starts of this unfinished work item were lost."""
        return len(self.works[number].lost_starts) if number in self.works else 0

    def wants(self, number: int, attempt: int) -> bool:
        """Return whether the work item still waits for the bulk result of this attempt. Any thread
        may call this."""
        work = self.works.get(number)
        return (
            work is not None
            and (work.state is State.FETCHING or work.state is State.RECEIVING)
            and work.attempt == attempt
        )

    @property
    def queued(self) -> int:
        """An upper bound of the number of work items in the dispatcher's queue, computed from the
        dispatcher's latest report."""
        unsent = 0 if self.ending else len(self._unsent) - self._unsent_detached
        return unsent + min(self._submitted - self._left_queue, self.at_dispatcher)

    @property
    def deadline(self) -> float | None:
        """The time at which the runtime must next call `handle(Ticked(), now)`. None means
        never.
        """
        if self._without_cluster_since is None:
            first = self.affinity.deadline if self.affinity.missing_since else None
        else:
            since = self.without_cluster_since
            first = None if since is None else since + self._lost_limit_s
        if self.actors.news_until:
            news_until = next(iter(self.actors.news_until.values()))
            first = news_until if first is None else min(first, news_until)
        while self._due:
            at, _, work = self._due[0]
            if _times_out(work, at) or _runs_again(work, at):
                return at if first is None else min(first, at)
            heapq.heappop(self._due)
        return first

    @property
    def without_cluster_since(self) -> float | None:
        """The time since which unfinished work, or a round that is ending, has had no dispatcher or
        no worker; None if it has both."""
        return self._without_cluster_since if self.unfinished or self.ending else None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Apply one event and return the effects to carry out, in order. `now` is monotonic
        seconds."""
        self._now = now
        effects: list[Effect] = []
        self._effects = effects
        match event:
            case Heard():
                self._hear(event.message)
            case Scheduled():
                self._schedule(event.works)
            case BulkArrived(number, attempt, payload):
                if self.wants(number, attempt):
                    work = self.works[number]
                    self._end_attempt(work, attempt, VALUE, payload)
                if not self.actors.received(number):
                    self._receipts.append((number, attempt))
            case FunctionsDefined(functions, names):
                self._functions.update(functions)
                self._function_names.update(zip((fn for fn, _ in functions), names, strict=False))
                self._define(functions)
            case FunctionsDropped(functions):
                self._dropped.update(functions)
                self._unused += functions
            case ForgetRequested(numbers):
                self._to_forget += numbers
                self._forget_everywhere()
            case CancelRequested(numbers):
                self._cancel(numbers)
            case TakeBackRequested(numbers):
                self._cancel(numbers, unless_begun=True)
            case EndRoundRequested(number):
                # A round with another number is over or has not begun (P15).
                if number == self.round:
                    self._end_round()
            case BulkUnreachable(number, attempt, problem):
                is_of_call = self.actors.received(number)
                if self.wants(number, attempt):
                    if is_of_call:
                        self._finish(self.works[number], ACTOR_LOST, (problem, True))
                    else:
                        reason = problem.encode()
                        self._finish(self.works[number], UNAVAILABLE, reason, abandon=True)
            case KeptDropped(numbers):
                for number in numbers:
                    self._value_dropped(number)
            case ValueLost(work, attempt):
                self._value_lost(work, attempt)
            case RetryDecided():
                self._retry_decided(event)
            case DispatcherUp():
                self._request_registration()
            case SessionRequested(parent):
                requests, is_up = self._registrations, self.registered
                self._disconnected(for_good=False)
                self._registrations = requests
                self.parent, self._submitted_before = parent, False
                if requests or is_up:  # otherwise the next connection begins the session
                    self._request_registration()
            case DispatcherDown():
                self._disconnected(for_good=False)
            case CallsEnded(actor, items):
                self.actors.results(actor, items)
            case StreamTaken(call, count):
                self.actors.taken(call, count)
            case ActorMade(actor):
                self.actors.made(actor)
            case ActorWatched(actor):
                self.actors.watched(actor)
            case HandlesDropped(numbers):
                self.actors.handles_dropped(numbers)
            case ActorKilled(actor_number, reason):
                self.actors.killed(actor_number, reason)
            case ActorSought(request, name):
                self.actors.find(request, name)
            case ActorConnected(actor):
                self.actors.connected(actor)
            case ActorDisconnected(actor, problem):
                self.actors.disconnected(actor, problem, now)
            case CoordinatorRefused(error):
                self._refused(error)
            case PackingFailed(work, error):
                self._report(work, ERROR, error)
                work.move(FAILED)
            case Ticked():
                self._tick()
        if self._refusal is not None:
            self._fail_all(self._refusal)
            self.actors.refused()
        while True:
            if self.actors.touched:
                self.actors.send_calls()
                continue
            if self._value_was_lost and not self.ending:
                self._return_to_waiting()
                continue
            if not self._followups:
                break
            work, succeeded = self._followups.popleft()
            if succeeded is not None:
                self._input_ended(work, succeeded)
            elif work.state is State.VALUE_LOST and not self.ending:
                self._recompute(work)
        self._flush()
        self._effects = []
        return effects

    def _flush(self) -> None:
        """Send what the event has led to. Receipts precede a Forget: until the dispatcher has the
        receipt of a result, it assigns the work again if the worker with the result is lost, and
        needs the function for that."""
        if self._resolved:
            self._resolved, self._failures = [], set()
            if not self.works:
                # a new dict takes less memory, because a dict never shrinks
                self.works, self._unsent = {}, {}
        if self._keeps or self._receipts or self._cancels:
            if self.registered:
                self._send_parts(self._keeps, lambda items: ResultReceived(items, keep=True))
                self._send_parts(self._receipts, ResultReceived)
                self._send_parts(
                    self._cancels, lambda items: CancelWork(items, self._cancel_grace_s)
                )
            self._keeps, self._receipts, self._cancels = [], [], []
        if self._unused:
            self._forget_unused()
        if self.registered and not self.ending and self._unsent:
            self._submit()
        if self._was_full or self.queued >= self._queue_max:
            was_full, self._was_full = self._was_full, self.queued >= self._queue_max
            if was_full and not self._was_full:
                self._effects.append(RoomMade())

    def _send(self, message: Any) -> None:
        self._effects.append(Send(DISPATCHER, message))

    def _send_parts(self, items: list[Any], message: Callable[[list[Any]], Any]) -> None:
        for start in range(0, len(items), CANCEL_MAX):
            self._send(message(items[start : start + CANCEL_MAX]))

    # -- states ------------------------------------------------------------------------------------

    def _move(self, work: Work, state: State) -> None:
        """Change the state of a work item, and what is counted and queued by state."""
        before = work.state
        work.move(state)
        detached = work.is_detached
        if before is QUEUED:
            del self._unsent[work]
            self._unsent_detached -= detached
        elif state is QUEUED:
            self._unsent[work] = None
            self._unsent_detached += detached
        elif state is State.VALUE_LOST:
            self._value_was_lost = True
        self.unfinished += (state in UNFINISHED) - (before in UNFINISHED)
        self.waiting += (state in IN_PROGRAM) - (before in IN_PROGRAM)
        if not detached:
            self.at_dispatcher += _is_there(state) - _is_there(before)
        if work.extra is not None and (worker := work.extra.options.worker):
            is_attempted = state in ATTEMPTED
            if is_attempted and before not in ATTEMPTED:
                self.affinity.pin(work, worker, self._now)
            elif before in ATTEMPTED and not is_attempted:
                self.affinity.unpin(work, worker)

    def _report(self, work: Work, kind: int, payload: Any, *, again: bool = False) -> None:
        """Resolve a work item, and fail its round if it must (P18). `again`: it was resolved with a
        value before."""
        if not self._resolved:
            self._effects.append(Resolve(self._resolved, self._failures))
        self._resolved.append((work, kind, payload))
        if kind in FAILURES and self._rounds and not again and not work.is_detached:
            self._failures.add(work)
            if self.failed is None:
                self.failed = work.number

    def _finish(self, work: Work, kind: int, payload: Any = b"", *, abandon: bool = False) -> None:
        """End a work item for good. `abandon`: the dispatcher may still have it, and must cancel
        it."""
        extra = work.extra
        again = extra is not None and extra.value_attempt >= 0
        self._report(work, kind, payload, again=again)
        if extra is not None:
            self._stop_waiting(work)
            if again:
                self._receipts.append((work.number, extra.value_attempt))
                extra.value_attempt = -1
            if extra.dependents:
                if kind == VALUE:
                    self._effects.append(KeepInput(work, payload, tuple(extra.dependents)))
                self._followups.append((work, kind == VALUE))
        self._leave(work, SUCCEEDED if kind == VALUE else FAILED, abandon=abandon)

    def _leave(self, work: Work, state: State, *, abandon: bool = False) -> None:
        """Forget a work item that has ended. `abandon` as in `_finish`."""
        before = work.state
        if abandon and self.registered and work.state in AT_DISPATCHER:
            self._cancels.append((work.number, work.attempt))
            state = State.ABANDONED
        else:
            if abandon and work.state is State.FETCHING:
                # The worker may free the result. If it was lost, the work is queued again.
                self._receipts.append((work.number, work.attempt))
                self._cancels.append((work.number, work.attempt))
            del self.works[work.number]
        self._move(work, state)
        if isinstance(work, MethodCall):
            self.actors.left(work, before)
        else:
            self._release_function(work.function)
        if work.extra is not None:
            # they hold other records and their values
            work.extra.inputs, work.extra.used = (), NO_USED
        # A work item that ends before its deadline leaves its entry in the heap. Make the heap anew
        # when most entries are of ended work.
        if len(self._due) > 2 * len(self.works) + DUE_SPARE:
            self._due = [entry for entry in self._due if entry[2].state in UNFINISHED]
            heapq.heapify(self._due)

    def _discard(self, work: Work) -> None:
        """Forget the value of a work item, which is not needed or cannot be recomputed."""
        self._receipts.append((work.number, work.with_extra().value_attempt))
        self._stop_waiting(work)
        self._leave(work, SUCCEEDED, abandon=True)
        self._effects.append(Free(work))

    # -- from the program --------------------------------------------------------------------------

    def _schedule(self, works: list[Work]) -> None:
        if not self.unfinished and self._without_cluster_since is not None:
            # the time without a cluster counts only while work is unfinished (P6)
            self._without_cluster_since = self._now
        records, uses, unsent = self.works, self._uses, self._unsent
        plain = 0
        for work in works:
            records[work.number] = work
            if type(work) is MethodCall:
                if work.extra is not None and work.extra.until is not None:
                    heapq.heappush(self._due, (work.extra.until, work.number, work))
                self.actors.schedule(work)
                continue
            function = work.function
            uses[function] = uses.get(function, 0) + 1
            extra = work.extra
            if extra is None:
                work.state = QUEUED  # from NEW
                unsent[work] = None
                plain += 1
                continue
            if extra.until is not None:
                heapq.heappush(self._due, (extra.until, next(self._serial), work))
            self._move(work, State.WAITING)
            self._begin(work)
        self.unfinished += plain

    def _cancel(self, numbers: list[int], *, unless_begun: bool = False) -> None:
        at_dispatcher: list[tuple[int, int]] = []
        for number in numbers:
            work = self.works.get(number)
            if work is None or work.state not in UNFINISHED:
                continue
            if work.extra is not None:
                if work.extra.value_attempt >= 0:
                    continue  # only its value is recomputed
                work.extra.retries = 0
            if not self.registered or work.state not in AWAITING_RESULT:
                self._finish(work, CANCELLED)
                continue
            if work.state is State.FETCHING:
                if unless_begun:
                    # the dispatcher has nothing more to say of it, and the fetch may take long
                    self._effects.append(WorkBegun([number]))
                else:
                    self._finish(work, CANCELLED, abandon=True)
                continue
            state = work.state
            if unless_begun and state is SUBMITTED:
                self._move(work, State.TAKING_BACK)
            elif not unless_begun and state is not State.CANCELLING:
                self._move(work, State.CANCELLING)
            at_dispatcher.append((number, work.attempt))
        self._send_parts(
            at_dispatcher, lambda items: CancelWork(items, self._cancel_grace_s, unless_begun)
        )

    def _end_round(self) -> None:
        self.ending = True
        if self.registered:
            self._send(EndRound(self.wire_round, self._cancel_grace_s))
        elif not self._may_run_unseen:
            # Without a dispatcher the round can end only if no work can be executing (P3). A lost
            # worker goes on executing until it notices that it has lost the dispatcher, and only a
            # dispatcher knows when that is.
            self._round_ended()

    def _round_ended(self) -> None:
        self._may_run_unseen = False
        for work in list(self.works.values()):
            if work.is_detached:
                continue  # it outlives the round (P10)
            if work.state is State.ABANDONED:
                self._confirm_abandoned(work)
            elif work.state in UNFINISHED:
                if work.extra is not None and work.extra.value_attempt >= 0:
                    self._suspend_recomputation(work)
                else:
                    self._finish(work, CANCELLED)
        # If there is detached work, the next registration must say that work was submitted before.
        self._submitted_before = bool(self.unfinished)
        number = self.round
        self.wire_round += 1
        self.round += 1
        self.ending, self.failed = False, None
        self._effects.append(RoundSettled(number))
        for work in list(self.works.values()):
            if work.state is State.VALUE_LOST:
                extra = work.with_extra()
                if extra.is_dropped and not extra.dependents:
                    self._discard(work)
                elif extra.is_requested or extra.dependents:  # calls, which outlive the round
                    self._followups.append((work, None))

    # -- inputs, retries and lost values -----------------------------------------------------------

    def _begin(self, work: Work) -> None:
        """Queue a waiting work item once all its inputs are available. A kept input may have been
        lost since the last attempt."""
        extra = work.with_extra()
        if extra.is_dropped and not extra.dependents:
            self._discard(work)
            return
        missing: set[Work] = set()
        for source in extra.inputs:
            state = source.state
            if _is_available(source):
                continue
            if state is FAILED or state is State.ABANDONED:
                extra.missing = missing
                self._finish(work, INPUT_FAILED, source.number)
                return
            missing.add(source)
            of_source = source.with_extra()
            if not of_source.dependents:
                of_source.dependents = {}
            of_source.dependents[work] = None
            if state is State.VALUE_LOST:
                self._followups.append((source, None))
        if missing:
            extra.missing = missing
            extra.waits_since = extra.waits_since or self._now
        elif not self.ending or work.is_detached:
            if extra.inputs:
                extra.used = {
                    source: source.attempt for source in extra.inputs if source.state is State.KEPT
                }
                self._has_kept_inputs = self._has_kept_inputs or bool(extra.used)
            if isinstance(work, MethodCall):
                self.actors.hold(work)
            else:
                self._move(work, QUEUED)

    def _return_to_waiting(self) -> None:
        """Have queued work wait for the inputs that were lost since it was queued (P22)."""
        self._value_was_lost = False
        for work in list(self._unsent):
            if work.extra is not None and not all(map(_is_available, work.extra.used)):
                self._move(work, State.WAITING)
                self._begin(work)

    def _begin_again(self, work: Work) -> None:
        """Begin a retry or a recomputation."""
        work.begin_attempts()
        work.with_extra().lost_starts = ()
        self._move(work, State.WAITING)
        if not self.ending:
            self._begin(work)

    def _stop_waiting(self, work: Work) -> None:
        extra = work.with_extra()
        for source in extra.missing:
            source.with_extra().dependents.pop(work, None)
        extra.missing = NO_WORKS

    def _input_ended(self, source: Work, succeeded: bool) -> None:
        """If this input failed, fail the work items that wait for it. If it succeeded, queue those
        that wait for no other input."""
        extra = source.with_extra()
        dependents, extra.dependents = extra.dependents, NO_DEPENDENTS
        for work in dependents:
            missing = work.with_extra().missing
            missing.discard(source)
            ends_with_round = self.ending and not work.is_detached
            if not succeeded:
                if not ends_with_round:
                    self._finish(work, INPUT_FAILED, source.number)
            elif not missing:
                if ends_with_round:
                    self._suspend_recomputation(work)
                else:
                    self._begin(work)

    def _input_lost(self, work: Work, source: Work) -> None:
        if source.state is State.KEPT and source.attempt == work.with_extra().used.get(source):
            self._move(source, State.VALUE_LOST)
        self._begin_again(work)

    def _suspend_recomputation(self, work: Work) -> None:
        """Stop recomputing a value while the round ends. After the round, a value that the program
        has requested is recomputed."""
        extra = work.with_extra()
        if extra.value_attempt >= 0:
            self._stop_waiting(work)
            extra.recomputations -= 1
            self._move(work, State.VALUE_LOST)

    def _recompute(self, work: Work) -> None:
        """Recompute the lost value of a work item, at most `recomputations_max` times (P27)."""
        extra = work.with_extra()
        if extra.recomputations == self._recomputations_max:
            times = self._recomputations_max
            problem = (
                f"its value was lost with its worker, recomputed {times} times, and lost again"
            )
            self._finish(work, UNAVAILABLE, problem.encode())
            return
        extra.recomputations += 1
        self._begin_again(work)

    def _value_lost(self, work: Work, attempt: int) -> None:
        extra = work.with_extra()
        if (
            work.number not in self.works
            or not extra.lineage
            or work.state is State.ABANDONED
            or (work.state is State.KEPT and work.attempt != attempt)
        ):
            self._effects.append(Recomputed(work))
            return
        # if the end of the round stops a recomputation, `_round_ended` begins it again
        extra.is_requested = True
        if work.state is State.KEPT:
            self._move(work, State.VALUE_LOST)
        self._followups.append((work, None))  # nothing if it is being recomputed already

    def _value_dropped(self, number: int) -> None:
        work = self.works.get(number)
        if work is None or work.extra is None or work.state is State.ABANDONED:
            return
        extra = work.extra
        if work.state is State.KEPT and not extra.lineage:
            self._receipts.append((number, work.attempt))
            del self.works[number]
            self._move(work, SUCCEEDED)
        elif extra.value_attempt >= 0:
            if work.state in AWAITING_RESULT or extra.dependents:
                extra.is_dropped = True
            else:
                self._discard(work)

    # -- ends of attempts --------------------------------------------------------------------------

    def _results(self, items: list[Result]) -> None:
        """Resolve the work items among these results that wait for one (P1, P16)."""
        works, uses = self.works, self._uses
        for number, attempt, kind, payload in items:
            work = works.get(number)
            if (
                work is None
                or (work.attempt ^ attempt) >> SUBMISSION_SHIFT  # `is_of_present`, without a call
                or work.state not in AWAITING_RESULT
            ):
                if kind == BULK and not (
                    work is not None and work.state is State.KEPT and work.attempt == attempt
                ):
                    # the value is not needed, so this receipt only tells the worker to free it
                    self._receipts.append((number, attempt))
                if (
                    work is not None
                    and work.state is State.ABANDONED
                    and work.is_of_present(attempt)
                ):
                    self._confirm_abandoned(work)
                continue
            if work.extra is not None or (
                kind != VALUE
                and (kind in (BULK, INPUT_LOST, OUT_OF_MEMORY) or work.state is State.CANCELLING)
            ):
                self._end_attempt(work, attempt, kind, payload)
                continue
            # As `_finish`, for the work that nearly all is. State and kind were checked above.
            if not self._resolved:
                self._effects.append(Resolve(self._resolved, self._failures))
            self._resolved.append((work, kind, payload))
            if kind == VALUE:
                work.state = SUCCEEDED
            else:
                work.state = FAILED
                if kind == ERROR and self._rounds:
                    self._failures.add(work)
                    if self.failed is None:
                        self.failed = number
            del works[number]
            self.unfinished -= 1
            self.at_dispatcher -= 1
            uses[work.function] -= 1
            if not uses[work.function]:
                self._unused.append(work.function)

    def _end_attempt(self, work: Work, attempt: int, kind: int, payload: Any) -> None:
        extra = work.extra
        if kind == ERROR and work.state is State.CANCELLING:
            kind, payload = CANCELLED, b""  # P32: the error may come from the cancellation
        if kind == BULK and (extra is None or not extra.keep):
            work.attempt = attempt
            if work.state is not State.FETCHING:
                self._move(work, State.FETCHING)
            self._effects.append(Fetch(work, attempt, payload))
        elif extra is None:
            if kind == INPUT_LOST:
                kind, payload = ERROR, self._decode_loss(payload)[1]
            self._finish(work, kind, payload)
        elif kind == BULK:
            # The dispatcher releases this kept value when the round ends. So do not resolve the
            # work here: it ends as cancelled with its round.
            if not self.ending or extra.options.detached:
                self._keep_value(work, attempt, payload)
        elif kind == INPUT_LOST:
            number, error = self._decode_loss(payload)
            source = self.works.get(number)
            if work.state is State.CANCELLING:
                self._finish(work, CANCELLED)
            elif source is not None and source.extra is not None and source.extra.lineage:
                self._input_lost(work, source)
            else:
                self._finish(work, ERROR, error)
        elif kind in (ERROR, OUT_OF_MEMORY) and extra.retries and not self.ending:
            # P24, P25: the function itself failed
            extra.retries -= 1
            if extra.policy is None:
                self._begin_again(work)
            else:
                self._move(work, State.DECIDING)
                self._effects.append(DecideRetry(work, work.attempt, payload, kind))
        elif kind == CANCELLED and extra.value_attempt >= 0 and self.ending:
            self._suspend_recomputation(work)
        else:
            self._finish(work, kind, payload)

    def _retry_decided(self, decision: RetryDecided) -> None:
        question = decision.question
        work = question.work
        if work.state is not State.DECIDING or work.attempt != question.attempt:
            return
        if not decision.again or self.ending:
            self._finish(work, question.kind, question.error)
            return
        extra = work.with_extra()
        assert extra.policy is not None
        wait_s = extra.policy.delay_s(extra.policy.times - extra.retries, decision.draw)
        extra.again_at = self._now + wait_s
        self._move(work, State.DELAYED)
        heapq.heappush(self._due, (extra.again_at, next(self._serial), work))

    def _keep_value(self, work: Work, attempt: int, reference: bytes) -> None:
        extra = work.with_extra()
        self._keeps.append((work.number, attempt))
        again = extra.value_attempt >= 0
        if again:
            self._receipts.append((work.number, extra.value_attempt))
        self._report(work, KEPT, KeptAt(attempt, reference, extra.lineage), again=again)
        work.attempt = attempt
        self._move(work, State.KEPT)
        extra.is_dropped = extra.is_requested = False
        if extra.lineage:
            extra.value_attempt = attempt
        else:
            self._release_function(work.function)
            extra.inputs, extra.used = (), NO_USED
        if extra.dependents:
            self._followups.append((work, True))

    def _starts_lost(self, lost: StartsLost) -> None:
        for number, attempt, worker, exit_code, log, final in lost.items:
            work = self.works.get(number)
            if work is None or not work.is_of_present(attempt):
                continue
            if work.state is State.ABANDONED and final:
                self._confirm_abandoned(work)
            elif work.state in AWAITING_RESULT:
                # The next dispatcher continues to count the lost starts (P5).
                extra = work.with_extra()
                start = LostStart(worker, attempt, exit_code, log)
                extra.lost_starts = (*extra.lost_starts, start)
                if final:
                    self._finish(work, LOST, extra.lost_starts)

    def _unsatisfied(self, items: list[tuple[int, int]], text: str) -> None:
        """Resolve as unavailable the work for which no worker has the resources."""
        for number, attempt in items:
            work = self.works.get(number)
            if work is None or not work.is_of_present(attempt):
                continue
            if work.state is State.ABANDONED:
                self._confirm_abandoned(work)
            elif work.state in AWAITING_RESULT:
                self._finish(work, UNAVAILABLE, text.encode())

    def _confirm_abandoned(self, work: Work) -> None:
        del self.works[work.number]
        self._move(work, SUCCEEDED if _is_available(work) else FAILED)

    # -- from the dispatcher -----------------------------------------------------------------------

    def _hear(self, message: object) -> None:
        match message:
            case Results(items):
                self._results(items)
            case StartsLost():
                self._starts_lost(message)
            case Unsatisfied(items, text, True):
                self._unsatisfied(items, text)
            case Begun(items):
                self._begun(items)
            case QueueProgress(left_queue):
                self._left_queue = left_queue
            case Members():
                changed = self.affinity.update_members(message, self._now)
                if changed:
                    # A worker that left without a Goodbye may still execute work until it notices
                    # that it has lost the dispatcher (P3).
                    self._may_run_unseen |= any(
                        reason != SAID_GOODBYE for _, _, reason in changed.left
                    )
                    self._effects.append(changed)
            case CoordinatorRegistered(_, workers):
                self._registrations = max(0, self._registrations - 1)
                if not self._registrations:  # else the reply is for the session before
                    self._register(workers)
            case RoundEnded(ended_round):
                if self.ending and ended_round == self.wire_round:
                    self._round_ended()
            case Workers(count):
                self._count_workers(count)
            case ActorChanged():
                self.actors.changed(message)
            case ActorFound():
                self.actors.found(message)

    def _begun(self, items: list[tuple[int, int]]) -> None:
        numbers: list[int] = []
        for number, attempt in items:
            work = self.works.get(number)
            if work is None or not work.is_of_present(attempt):
                continue
            if work.state is State.TAKING_BACK:
                self._move(work, SUBMITTED)
            is_recomputed = work.extra is not None and work.extra.value_attempt >= 0
            if work.state in UNFINISHED and not is_recomputed:
                numbers.append(number)
        if numbers:
            self._effects.append(WorkBegun(numbers))

    def _request_registration(self) -> None:
        self._registrations += 1
        self._send(
            RegisterCoordinator(
                self.coordinator,
                self._queue_max,
                self.wire_round,
                self._submitted_before,
                self.affinity.recovery_limit_s is not None,
                self._starts,
                self.parent,
            )
        )

    def _register(self, workers: int) -> None:
        self.registered = True
        self.affinity.expect_all_members()
        self._count_workers(workers)
        self._submitted = self._left_queue = self.at_dispatcher = 0
        self._unsent, self._unsent_detached = {}, 0
        self._value_was_lost = True
        for work in self.works.values():
            if work.state in ATTEMPTED:
                if work.state is not QUEUED:
                    work.move(QUEUED)
                if self._submitted_before:
                    work.begin_attempts()
                self._unsent[work] = None
                self._unsent_detached += work.is_detached
        self._define(list(self._functions.items()))
        self._forget_everywhere()
        self.actors.dispatcher_registered()
        if self.ending:
            self._send(EndRound(self.wire_round, self._cancel_grace_s))

    def _disconnected(self, *, for_good: bool) -> None:
        self.registered = False
        self._registrations = 0
        self._may_run_unseen = (self._may_run_unseen or self.at_dispatcher > 0) and not for_good
        if self._without_cluster_since is None:
            self._without_cluster_since = self._now
        for work in list(self.works.values()):
            match work.state:
                case State.TAKING_BACK | State.CANCELLING:
                    # The reply was lost with the connection. The work is resolved as cancelled now
                    # (P14), because otherwise the coordinator would submit it again, and it would
                    # run.
                    self._finish(work, CANCELLED)
                case State.ABANDONED:
                    self._confirm_abandoned(work)
                case State.KEPT if work.extra is not None and not work.extra.lineage:
                    # the dispatcher forgets the kept values of this connection
                    del self.works[work.number]
                    self._move(work, SUCCEEDED)
        if for_good and self.ending:
            self._round_ended()

    def _refused(self, error: bytes) -> None:
        """Fail all unfinished work. If the coordinator is not registered, fail all later work as
        well (P20)."""
        # A coordinator that is not registered was refused when it registered, and the dispatcher
        # would refuse it again.
        for_good = not self.registered
        if self.failed is None:
            self.failed = ROUND
        self._effects.append(RoundRefused(error, for_good))
        self._fail_all(error)
        if for_good:
            self._refusal = error
            self._disconnected(for_good=True)

    def _fail_all(self, error: bytes) -> None:
        for work in list(self.works.values()):
            extra = work.extra
            if work.state is State.ABANDONED:
                continue
            if extra is not None and extra.value_attempt >= 0:
                self._effects.append(Recomputed(work))
                if work.state is State.KEPT:
                    # it stays, but is not recomputed any more
                    extra.lineage, extra.value_attempt = False, -1
                    extra.inputs, extra.used = (), NO_USED
                    self._release_function(work.function)
                    self._effects.append(Free(work))
                else:
                    self._discard(work)
            elif work.state in UNFINISHED:
                self._finish(work, ERROR, error, abandon=True)

    # -- time, functions and submission ------------------------------------------------------------

    def _tick(self) -> None:
        while self._due and self._due[0][0] <= self._now:
            at, _, work = heapq.heappop(self._due)
            if _times_out(work, at):
                self._finish(work, TIMED_OUT, abandon=True)
            elif _runs_again(work, at):
                self._begin_again(work)
        if self.actors.news_until:
            self.actors.tick(self._now)
        since = self.without_cluster_since
        if self._without_cluster_since is None:
            self._give_up_missed()
        elif since is not None and since + self._lost_limit_s <= self._now:
            self._give_up_all()

    def _give_up_missed(self) -> None:
        """Resolve as unavailable the work pinned to workers that were missed for too long (P11)."""
        for worker, works in self.affinity.overdue(self._now):
            limit_s = self.affinity.recovery_limit_s
            problem = f"it is pinned to {worker}, which was absent for {limit_s:g} s".encode()
            for work in works:
                self._finish(work, UNAVAILABLE, problem, abandon=True)

    def _give_up_all(self) -> None:
        missing = "any worker" if self.registered else "a dispatcher"
        problem = f"the cluster was without {missing} for {self._lost_limit_s:g} s".encode()
        if self.registered:
            # end the round at the dispatcher, too, so that no worker that joins later gets its work
            self._send(EndRound(self.wire_round, self._cancel_grace_s))
        for work in list(self.works.values()):
            if work.state in ATTEMPTED or work.state in RETRYING:
                self._finish(work, UNAVAILABLE, problem, abandon=work.is_detached)
        self.actors.give_up(problem)
        # calls of actors that are connected go on
        self._without_cluster_since = self._now
        if self.ending:
            self._round_ended()
        else:
            self.wire_round += 1

    def _count_workers(self, count: int) -> None:
        self.workers = count
        if count:
            self._without_cluster_since = None
        elif self._without_cluster_since is None:
            self._without_cluster_since = self._now

    def _define(self, functions: list[tuple[int, bytes]]) -> None:
        if self.registered:
            for part in split(functions):
                names = self._function_names
                self._send(Define(part, [names.get(fn, "") for fn, _ in part] if names else []))

    def _release_function(self, function: int) -> None:
        self._uses[function] -= 1
        if not self._uses[function]:
            self._unused.append(function)

    def _forget_unused(self) -> None:
        functions, self._unused = self._unused, []
        unused: list[int] = []
        for function in functions:
            if not self._uses.get(function):
                self._uses.pop(function, None)
                if function in self._dropped:
                    self._dropped.discard(function)
                    self._functions.pop(function, None)
                    self._function_names.pop(function, None)
                    unused.append(function)
        if unused and self.registered:
            self._send(Forget(self.coordinator, unused))

    def _forget_everywhere(self) -> None:
        if self._to_forget and self.registered:
            numbers, self._to_forget = self._to_forget, []
            self._send(Forget(self.coordinator, numbers, everywhere=True))

    def _submit(self) -> None:
        """Submit the unsent work, grouped by options; with a width, the oldest work that it
        admits."""
        detached: list[Work] = []
        if self._unsent_detached:
            detached = [work for work in self._unsent if work.is_detached]
            for work in detached:
                del self._unsent[work]
            self._unsent_detached = 0
        sending: Iterable[Work] = self._unsent
        if self._width is not None and len(self._unsent) > self._width - self.at_dispatcher:
            sending = list(islice(self._unsent, max(0, self._width - self.at_dispatcher)))
            for work in sending:
                del self._unsent[work]
        else:
            self._unsent = {}
        plain: list[Work] = []
        groups: dict[WorkOptions, list[Work]] = {}
        waited: dict[int, float] = {}
        # Detached work goes first, so that a resource is built before the functions that use it
        # begin.
        for work in chain(detached, sending):
            work.state = SUBMITTED  # unsent work is QUEUED
            extra = work.extra
            if extra is None or (extra.options == PLAIN and not extra.waits_since):
                if not plain:
                    plain = groups.setdefault(PLAIN, plain)
                plain.append(work)
            else:
                if extra.waits_since:
                    waited[work.number] = max(0.0, self._now - extra.waits_since)
                    extra.waits_since = 0.0
                groups.setdefault(extra.options, []).append(work)
        self._submitted_before = True
        for options, works in groups.items():
            if not options.detached:
                self._submitted += len(works)
                self.at_dispatcher += len(works)
            self._effects.append(
                SubmitWork(self.wire_round, works, options, self._has_kept_inputs, waited)
            )
        self._has_kept_inputs = False


def _is_there(state: State) -> bool:
    """Return whether the dispatcher has work in this state, as far as the coordinator knows."""
    return state in AWAITING_RESULT or state is State.ABANDONED


def _times_out(work: Work, at: float) -> bool:
    """Return whether this is the time by which the work item must have ended."""
    if work.state not in UNFINISHED:
        return False
    extra = work.with_extra()
    return extra.until == at and extra.value_attempt < 0


def _runs_again(work: Work, at: float) -> bool:
    """Return whether this is the time at which the work item runs again."""
    return work.state is State.DELAYED and work.with_extra().again_at == at


def _is_available(work: Work) -> bool:
    """Return whether this work item has a value that can be an input."""
    if work.state is State.ABANDONED:  # a recomputation was given up, and its value with it
        return work.with_extra().value_attempt >= 0
    return work.state is SUCCEEDED or work.state is State.KEPT
