"""The coordinator's record of scheduled work: submission, results, lost starts and the end of a
round. No I/O.

Theory of operation
    The coordinator owns its work; the dispatcher's queue is a copy. On each new connection to a
    dispatcher the coordinator submits all unfinished work again, with attempt numbers that no
    earlier submission has used, and with the number of starts lost so far. It accepts the first
    result of each unfinished work item and discards later results.
    When the program waits for the end of a round, the coordinator sends EndRound. Once the
    dispatcher reports that no work of the round can be executing, the coordinator resolves the
    remaining work as cancelled. In messages each round has a higher number than the round before.

Promises, checked by tests/machines/test_closures.py and tests/sim
    P1  each scheduled work item is resolved exactly once
    P2  a bulk result is resolved when it has arrived in this process, not earlier
    P3  after a RoundSettled no work that was scheduled before it can be executing
    P4  after a reconnect exactly the unfinished work is submitted again, oldest first
    P5  lost starts are counted over all dispatchers: work that crashes its process fails after
        `attempts_max` lost starts
    P6  without a dispatcher, or without any worker, for `lost_limit_s` all unfinished work is
        resolved as unavailable
    P7  the coordinator, the dispatcher and the workers drop a function once no unfinished work uses
        it and the program's cache of functions has dropped it
    P8  if a worker is to keep a bulk result, the work is resolved with a reference; when the
        program drops the reference, the worker releases the result
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
        lost first, the work is resolved as cancelled
    P15 the coordinator does not request the end of a round that is over or has not begun

Not here: values and exceptions (payloads are opaque), plans (dependencies_and_retries.py), threads
that wait (runtime.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from zmqdist.batches import split
from zmqdist.errors import LostStart
from zmqdist.events import Heard, Send, Ticked
from zmqdist.messages import (
    BULK,
    CANCELLED,
    ERROR,
    KEPT,
    SAID_GOODBYE,
    Begun,
    CancelWork,
    CoordinatorRegistered,
    Define,
    EndRound,
    Forget,
    Item,
    Members,
    QueueProgress,
    RegisterCoordinator,
    Result,
    ResultReceived,
    Results,
    RoundEnded,
    StartsLost,
    Submit,
    Workers,
)
from zmqdist.scheduling.coordinator.affinity import Scheduled, WorkerAffinity
from zmqdist.scheduling.coordinator.coordinator_events import (
    BulkArrived,
    BulkUnreachable,
    CancelRequested,
    DispatcherDown,
    DispatcherUp,
    EndRoundRequested,
    Event,
    ForgetRequested,
    FunctionsDefined,
    FunctionsDropped,
    KeptDropped,
    TakeBackRequested,
    UnfinishedFailed,
)
from zmqdist.scheduling.coordinator.dependencies_and_retries import LOST, UNAVAILABLE
from zmqdist.scheduling.coordinator.effects import (
    Effect,
    Fetch,
    Resolve,
    RoomMade,
    RoundSettled,
    WorkBegun,
)

DISPATCHER: Final = "dispatcher"
"""The dispatcher, which is the only peer of this machine."""

CANCEL_MAX = 100_000
"""The largest number of work numbers in one message, so that the header of the message stays far
below the limit."""

SUBMISSION_SHIFT = 16
"""The bits of an attempt number that count within one submission: each submission of a work item
begins a new range of 65,536 numbers."""


class Closures:
    """The state of all scheduled work of one coordinator; the module's docstring has the rules.

    An unfinished work item is stored only as the tuple that its message will contain, because a
    million items may be unfinished.

    Args:
      coordinator: the coordinator's number in the cluster.
      queue_max: the bound of the dispatcher's queue for this coordinator.
      cancel_grace_s: how long a cancelled function may go on running before its slot is killed.
      lost_limit_s: how long all workers or the dispatcher may be absent before all unfinished work
        ends (P6).
      recovery_limit_s: how long a worker may be missed before work pinned to it ends (P11). None
        means that members are not watched.
      starts: whether the dispatcher reports which work has begun (P14).
      width: the number of work items that the dispatcher may have (P13). None means no bound.
      nested: whether a scheduled function schedules the work.
    """

    def __init__(
        self,
        *,
        coordinator: int,
        queue_max: int,
        cancel_grace_s: float,
        lost_limit_s: float,
        now: float,
        recovery_limit_s: float | None = None,
        starts: bool = False,
        width: int | None = None,
        nested: bool = False,
    ) -> None:
        self.coordinator = coordinator
        self.wire_round = self.round = 1
        self.workers, self.ending = 0, False
        self.affinity = WorkerAffinity(recovery_limit_s)
        self._watch_members = recovery_limit_s is not None
        self._report_starts, self._width, self._nested = starts, width, nested
        self._take_backs: set[int] = set()
        """Work that the coordinator has asked the dispatcher to cancel unless it has begun. Some of
        this work may have ended."""
        self._queue_max = queue_max
        self._cancel_grace_s = cancel_grace_s
        self._lost_limit_s = lost_limit_s
        self._works: dict[int, Item] = {}
        self._lost_starts: dict[int, tuple[LostStart, ...]] = {}
        """The lost starts of unfinished work items, by work number. A work item without lost starts
        has no entry."""
        self._unsent: dict[int, None] = {}
        """Unfinished work that was not sent to the present dispatcher yet, in order. `_submitted`
        counts sent work that is not detached."""
        self._to_keep: set[int] = set()
        """Unfinished work whose value is to stay with its worker."""
        self._kept: dict[int, int] = {}
        """Values that workers keep: work -> attempt. The dispatcher forgets them when the
        connection is lost."""
        self._functions: dict[int, bytes] = {}
        self._uses: dict[int, int] = {}
        self._dropped: set[int] = set()
        self._to_forget: list[int] = []
        """Numbers of objects that all slots must drop. These numbers were not sent to a dispatcher
        yet."""
        self._registered = False
        self._submitted_before = False
        self._may_run_unseen = False
        """Whether work of this round may be executing at a lost worker."""
        self._without_cluster_since: float | None = now
        self._submitted = self._left_queue = self._finished = 0
        self._was_full = False

    @property
    def unfinished(self) -> int:
        return len(self._works)

    def __contains__(self, work: int) -> bool:
        """Return whether this work item is unfinished."""
        return work in self._works

    def lost_starts(self, work: int) -> int:
        """Return how many starts of this unfinished work item were lost."""
        return len(self._lost_starts.get(work, ()))

    def wants(self, work: int, attempt: int) -> bool:
        """Return whether the work item still waits for the bulk result of this attempt. Any thread
        may call this."""
        item = self._works.get(work)
        return item is not None and item[1] == attempt

    @property
    def kept(self) -> int:
        """The number of values that workers keep."""
        return len(self._kept)

    @property
    def registered(self) -> bool:
        return self._registered

    @property
    def queued(self) -> int:
        """An upper bound of the number of work items in the dispatcher's queue, computed from the
        dispatcher's latest report."""
        unsent = 0 if self.ending else len(self._unsent)
        if unsent and self.affinity.detached:
            unsent -= len(self._unsent.keys() & self.affinity.detached)
        return unsent + self._submitted - max(self._left_queue, self._finished)

    @property
    def deadline(self) -> float | None:
        """The time at which the runtime must next call `handle(Ticked(), now)`. None means
        never.
        """
        if self._without_cluster_since is None:
            return self.affinity.deadline if self.affinity.options else None
        since = self.without_cluster_since
        return None if since is None else since + self._lost_limit_s

    @property
    def without_cluster_since(self) -> float | None:
        """The time since which unfinished work, or a round that is ending, has had no dispatcher or
        no worker; None if it has both."""
        return self._without_cluster_since if self._works or self.ending else None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Apply one event and return the effects to carry out, in order. `now` is monotonic
        seconds."""
        match event:
            case Heard():
                effects = self._handle_message(event.message, now)
            case Scheduled():
                self._to_keep.update(event.keep)
                if event.options:
                    self.affinity.add(event.options, now)
                effects = self._schedule(event.items, now)
            case BulkArrived(work, attempt, payload):
                effects = self._bulk_arrived(work, attempt, payload)
            case FunctionsDefined(functions):
                self._functions.update(functions)
                effects = self._define(functions) if self._registered else []
            case FunctionsDropped(functions):
                self._dropped.update(functions)
                effects = self._forget_unused(functions)
            case ForgetRequested(numbers):
                self._to_forget += numbers
                effects = self._forget_everywhere() if self._registered else []
            case CancelRequested(works):
                effects = self._cancel(works)
            case TakeBackRequested(works):
                effects = self._cancel(works, unless_begun=True)
            case EndRoundRequested(number):
                # A round with another number is over or has not begun (P15).
                effects = self._end() if number == self.round else []
            case BulkUnreachable(work, attempt, problem):
                effects = self._unreachable(work, attempt, problem)
            case UnfinishedFailed(error):
                sent = (
                    [work for work in self._works if work not in self._unsent]
                    if self._registered
                    else []
                )
                effects = self._resolve(
                    _ended_alike(list(self._works), ERROR, error)
                ) + self._cancel_at_dispatcher(sent)
            case KeptDropped(works):
                effects = self._release_kept(works)
            case DispatcherUp():
                register = RegisterCoordinator(
                    self.coordinator,
                    self._queue_max,
                    self.wire_round,
                    self._submitted_before,
                    self._watch_members,
                    self._report_starts,
                    self._nested,
                )
                effects = [Send(DISPATCHER, register)]
            case DispatcherDown(for_good):
                self._registered = False
                lost = self._may_run_unseen or len(self._works) > len(self.affinity.detached)
                self._may_run_unseen = lost and not for_good
                self._kept.clear()
                self._start_lost_clock(now)
                # The replies about work that the program takes back were lost with the connection.
                # The work is resolved as cancelled now (P14), because otherwise the coordinator
                # would submit the work again, and it would run.
                unanswered, self._take_backs = sorted(self._take_backs & self._works.keys()), set()
                effects = self._resolve(_ended_alike(unanswered, CANCELLED)) if unanswered else []
                effects += self._round_ended() if for_good and self.ending else []
            case Ticked():
                effects = self._tick(now)
            case _:
                effects = []
        if self._unsent and self._registered and not self.ending:
            effects = effects + self._submit()
        if self._was_full or self.queued >= self._queue_max:
            effects = effects + self._note_room()
        return effects

    # -- from the program --------------------------------------------------------------------------

    def _schedule(self, items: list[tuple[int, int, bytes]], now: float) -> list[Effect]:
        if not self._works and self._without_cluster_since is not None:
            # the time without a cluster counts only while work is unfinished (P6)
            self._without_cluster_since = now
        works, uses, unsent = self._works, self._uses, self._unsent
        for work, fn, payload in items:
            works[work] = (work, 0, 0, fn, payload)
            uses[fn] = uses.get(fn, 0) + 1
            unsent[work] = None
        return []

    def _cancel(self, works: list[int], *, unless_begun: bool = False) -> list[Effect]:
        known = [work for work in works if work in self._works]
        if not known:
            return []
        sent = [work for work in known if work not in self._unsent] if self._registered else []
        effects = self._resolve(
            _ended_alike(
                known if not sent else [work for work in known if work in self._unsent], CANCELLED
            )
        )
        if unless_begun:
            self._take_backs.update(sent)
        return effects + self._cancel_at_dispatcher(sent, unless_begun)

    def _cancel_at_dispatcher(self, works: list[int], unless_begun: bool = False) -> list[Effect]:
        parts = (works[start : start + CANCEL_MAX] for start in range(0, len(works), CANCEL_MAX))
        return [
            Send(DISPATCHER, CancelWork(part, self._cancel_grace_s, unless_begun)) for part in parts
        ]

    def _release_kept(self, works: list[int]) -> list[Effect]:
        items = [(work, self._kept.pop(work)) for work in works if work in self._kept]
        return [
            Send(DISPATCHER, ResultReceived(items[start : start + CANCEL_MAX]))
            for start in range(0, len(items), CANCEL_MAX)
        ]

    def _end(self) -> list[Effect]:
        self.ending = True
        if self._registered:
            return [self._end_round()]
        # Without a dispatcher the round can end only if no work can be executing (P3). A lost
        # worker goes on executing until it notices that it has lost the dispatcher, and only a
        # dispatcher knows when that is.
        return (
            []
            if self._may_run_unseen or len(self._works) > len(self.affinity.detached)
            else self._round_ended()
        )

    def _end_round(self) -> Send:
        return Send(DISPATCHER, EndRound(self.wire_round, self._cancel_grace_s))

    def _round_ended(self) -> list[Effect]:
        detached = self.affinity.detached
        effects = self._resolve(
            _ended_alike([work for work in self._works if work not in detached], CANCELLED)
        )
        ended = self.round
        self.wire_round += 1
        self.round += 1
        self.ending = self._may_run_unseen = False
        # Detached work outlives the round (P10). If there is such work, the next registration must
        # say that work was submitted before.
        self._submitted_before = bool(self._works)
        return [*effects, RoundSettled(ended)]

    def _define(self, functions: list[tuple[int, bytes]]) -> list[Effect]:
        return [Send(DISPATCHER, Define(part)) for part in split(functions)]

    # -- from the dispatcher -----------------------------------------------------------------------

    def _handle_message(self, message: object, now: float) -> list[Effect]:
        match message:
            case Results(items):
                return self._resolve(items)
            case StartsLost():
                return self._starts_lost(message)
            case Begun(works):
                self._take_backs.difference_update(works)
                unfinished = [work for work in works if work in self._works]
                return [WorkBegun(unfinished)] if unfinished else []
            case QueueProgress(left_queue):
                self._left_queue = left_queue
                return []
            case Members():
                changed = self.affinity.update_members(message, now)
                # A worker that left without a Goodbye may still execute work until it notices that
                # it has lost the dispatcher (P3).
                left = changed.left if changed else []
                self._may_run_unseen |= any(reason != SAID_GOODBYE for _, _, reason in left)
                return [changed] if changed else []
            case CoordinatorRegistered(_, workers):
                return self._handle_registered(workers, now)
            case RoundEnded(ended_round):
                return self._round_ended() if self.ending and ended_round == self.wire_round else []
            case Workers(count):
                self._count_workers(count, now)
                return []
            case _:
                return []

    def _handle_registered(self, workers: int, now: float) -> list[Effect]:
        self._registered = True
        self.affinity.expect_all_members()
        self._count_workers(workers, now)
        self._submitted = self._left_queue = self._finished = 0
        self._unsent = dict.fromkeys(self._works)
        effects: list[Effect] = []
        effects += self._define(list(self._functions.items()))
        effects += self._forget_everywhere() if self._to_forget else []
        if self._submitted_before:
            # Each work item gets a new range of attempt numbers, so that late results of earlier
            # submissions are not accepted.
            for work, attempt, lost, fn, payload in self._works.values():
                again = ((attempt >> SUBMISSION_SHIFT) + 1) << SUBMISSION_SHIFT
                self._works[work] = (work, again, lost, fn, payload)
        return [*effects, self._end_round()] if self.ending else effects

    def _resolve(self, items: list[Result]) -> list[Effect]:
        """Resolve the unfinished work items among these results. A second result of a work item is
        discarded (P1)."""
        resolved: list[tuple[int, int, bytes]] = []
        effects: list[Effect] = []
        freed: list[int] = []
        kept: list[tuple[int, int]] = []
        detached_ended: tuple[int, ...] = ()
        works, uses, unsent, affinity = self._works, self._uses, self._unsent, self.affinity
        for work, attempt, kind, payload in items:
            if kind == BULK:
                if work not in self._to_keep:
                    effects.append(self._bulk_reported(work, attempt, payload))
                    continue
                # The dispatcher releases this kept value when the round ends. So do not resolve the
                # work here: it ends as cancelled with its round.
                if self.ending and work not in affinity.detached:
                    continue
                kind = KEPT
                self._kept[work] = attempt
                kept.append((work, attempt))
            item = works.pop(work, None)
            if item is None:
                continue
            fn = item[3]
            left = uses[fn] - 1
            uses[fn] = left
            if not left:
                freed.append(fn)
            detached = affinity.options and affinity.ended(work)
            if detached:
                detached_ended = (*detached_ended, work)
            if unsent and work in unsent:
                del unsent[work]
            elif not detached:
                self._finished += 1
            resolved.append((work, kind, payload))
        if self._lost_starts:
            for work, _, _ in resolved:
                self._lost_starts.pop(work, None)
        if self._to_keep:
            self._to_keep.difference_update([work for work, _, _ in resolved])
        if kept:
            effects.append(Send(DISPATCHER, ResultReceived(kept, keep=True)))
        if not works:
            # new dicts take less memory, because a dict never shrinks
            self._works, self._unsent = {}, {}
            self._take_backs.clear()
        if resolved:
            effects.append(Resolve(resolved, (), detached_ended))
        return effects + self._forget_unused(freed) if freed else effects

    def _bulk_reported(self, work: int, attempt: int, reference: bytes) -> Effect:
        item = self._works.get(work)
        if item is None:
            # the work was resolved meanwhile, so this receipt only tells the worker to free the
            # value
            return Send(DISPATCHER, ResultReceived([(work, attempt)]))
        self._works[work] = (work, attempt, *item[2:])
        return Fetch(work, attempt, reference)

    def _starts_lost(self, lost: StartsLost) -> list[Effect]:
        effects: list[Effect] = []
        for work, attempt, worker, exit_code, log, final in lost.items:
            item = self._works.get(work)
            if item is None:
                continue
            # The work item contains its number of lost starts, so that the next dispatcher
            # continues to count them (P5).
            starts = (*self._lost_starts.get(work, ()), LostStart(worker, attempt, exit_code, log))
            self._lost_starts[work] = starts
            _, submitted, _, fn, payload = item
            self._works[work] = (work, submitted, len(starts), fn, payload)
            if final:
                del self._works[work], self._lost_starts[work]
                self._to_keep.discard(work)
                self._uses[fn] -= 1
                detached = self.affinity.ended(work)
                self._finished += not detached
                effects.append(Resolve([(work, LOST, starts)], (), (work,) if detached else ()))
                effects += self._forget_unused([fn])
        return effects

    def _bulk_arrived(self, work: int, attempt: int, payload: Any) -> list[Effect]:
        return self._with_receipt(work, attempt, self._resolve([(work, attempt, 0, payload)]))

    def _unreachable(self, work: int, attempt: int, problem: str) -> list[Effect]:
        item = self._works.get(work)
        if item is None or item[1] != attempt:
            return []  # the work has ended, or runs again in a later attempt
        return self._with_receipt(
            work, attempt, self._resolve([(work, attempt, UNAVAILABLE, problem.encode())])
        )

    def _with_receipt(self, work: int, attempt: int, resolved: list[Effect]) -> list[Effect]:
        """Insert ResultReceived, the receipt of a large result, after the Resolve of its work, and
        so before a Forget of the function.

        Until the dispatcher has the receipt, it assigns the work again if the worker with the
        result is lost. For that it needs the function.
        """
        receipt: list[Effect] = (
            [Send(DISPATCHER, ResultReceived([(work, attempt)]))] if self._registered else []
        )
        return resolved[:1] + receipt + resolved[1:]

    # -- time and numbers --------------------------------------------------------------------------

    def _tick(self, now: float) -> list[Effect]:
        if self.deadline is None or now < self.deadline:
            return []
        if self._without_cluster_since is None:
            return self._give_up_missed(now)
        missing = "any worker" if self._registered else "a dispatcher"
        problem = f"the cluster was without {missing} for {self._lost_limit_s:g} s".encode()
        effects: list[Effect] = []
        if self._registered:
            # cancel at the dispatcher, too, so that no worker that joins later gets this work
            effects.append(self._end_round())
            effects += self._cancel_at_dispatcher(
                [work for work in self.affinity.detached if work not in self._unsent]
            )
        was_ending = self.ending
        effects += self._resolve(_ended_alike(self._works, UNAVAILABLE, problem))
        if was_ending:
            effects += self._round_ended()
        else:
            self.wire_round += 1
        return effects

    def _give_up_missed(self, now: float) -> list[Effect]:
        """Resolve as unavailable the work pinned to workers that were missed for too long (P11)."""
        effects: list[Effect] = []
        for worker, works in self.affinity.overdue(now):
            sent = [work for work in works if work not in self._unsent]
            problem = f"it is pinned to {worker}, which was absent for {self.affinity.recovery_limit_s:g} s".encode()
            effects += self._resolve(
                _ended_alike(works, UNAVAILABLE, problem)
            ) + self._cancel_at_dispatcher(sent)
        return effects

    def _start_lost_clock(self, now: float) -> None:
        if self._without_cluster_since is None:
            self._without_cluster_since = now

    def _count_workers(self, count: int, now: float) -> None:
        self.workers = count
        if count:
            self._without_cluster_since = None
        else:
            self._start_lost_clock(now)

    def _submit(self) -> list[Effect]:
        """Return the messages that submit the unsent work, each of limited size."""
        sending = (
            self._unsent
            if self._width is None
            else self.affinity.within(self._width, len(self._works), self._unsent)
        )
        items = [self._works[work] for work in sending]
        if len(sending) == len(self._unsent):
            self._unsent = {}
        else:
            for work in sending:
                del self._unsent[work]
        self._submitted_before = True
        effects: list[Effect] = []
        for options, group in self.affinity.grouped(items):
            if not options.detached:
                self._submitted += len(group)
            effects += [
                Send(DISPATCHER, Submit(self.wire_round, part, *options)) for part in split(group)
            ]
        return effects

    def _forget_unused(self, functions: list[int]) -> list[Effect]:
        unused = [fn for fn in functions if fn in self._dropped and not self._uses.get(fn)]
        for fn in unused:
            self._dropped.discard(fn)
            self._functions.pop(fn, None)
            self._uses.pop(fn, None)
        return (
            [Send(DISPATCHER, Forget(self.coordinator, unused))]
            if unused and self._registered
            else []
        )

    def _forget_everywhere(self) -> list[Effect]:
        numbers, self._to_forget = self._to_forget, []
        return [Send(DISPATCHER, Forget(self.coordinator, numbers, everywhere=True))]

    def _note_room(self) -> list[Effect]:
        was_full, self._was_full = self._was_full, self.queued >= self._queue_max
        return [RoomMade()] if was_full and not self._was_full else []


def _ended_alike(works: Iterable[int], kind: int, payload: bytes = b"") -> list[Result]:
    """Return results with the same kind and payload for all these work items."""
    return [(work, 0, kind, payload) for work in works]
