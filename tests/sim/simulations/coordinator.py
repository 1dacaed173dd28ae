"""A simulated coordinator: the real machine, and a model of the program, which schedules and
cancels work and calls `join`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from math import inf
from random import Random
from typing import Any, Protocol

from tests.sim.simulations.clock import SimClock
from tests.sim.simulations.coordinator_plans import (
    INPUT_GONE,
    RECOMPUTATIONS_MAX,
    SimPlans,
    decode_loss,
)
from tests.sim.simulations.network import SimConnection
from tests.sim.simulations.worker import SUBMISSIONS_SHIFT, Oracle, SimWorker, submission_of
from zmqdist.events import Heard, Send, Ticked
from zmqdist.messages import (
    CANCELLED,
    ERROR,
    KEPT,
    OUT_OF_MEMORY,
    VALUE,
    CancelWork,
    Forget,
    Message,
    Results,
    StartsLost,
    Submit,
)
from zmqdist.scheduling.coordinator.affinity import MembersChanged
from zmqdist.scheduling.coordinator.coordinator_events import (
    BulkArrived,
    CancelRequested,
    DecideRetry,
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
    Recomputed,
    Resolve,
    RoomMade,
    RoundSettled,
    Scheduled,
    SubmitWork,
    TakeBackRequested,
    WorkBegun,
)
from zmqdist.scheduling.coordinator.machine import CoordinatorMachine
from zmqdist.scheduling.coordinator.options import PLAIN, WorkOptions
from zmqdist.scheduling.coordinator.work import (
    AWAITING_RESULT,
    IN_PROGRAM,
    INPUT_FAILED,
    LOST,
    TIMED_OUT,
    UNAVAILABLE,
    UNFINISHED,
    Extra,
    KeptAt,
    State,
    Work,
)
from zmqdist.scheduling.shared.broker_settings import BrokerSettings
from zmqdist.scheduling.shared.quantities import Quantities

ANSWER_S = 2.0
"""Seconds within which, without faults, the program gets the reply to a request to take back work.
The reply says whether the work has begun."""

LATE_COPIES = 0.1
"""The share of results that come once more, late."""

KINDS = ("quick", "long", "slow", "polite", "raise", "bulk", "poison", "killer", "keep")


class CoordinatorSurroundings(Protocol):
    """The simulated cluster around a coordinator (cluster.py).

    Attributes:
      quiet_since: the time of the last fault, or of the last new or ended connection.
    """

    clock: SimClock
    random: Random
    settings: BrokerSettings
    oracle: Oracle
    dispatcher_up: bool
    quiet_since: float
    can_kill: bool

    def new_connection(self, name: str, down: Callable[[Message], None]) -> SimConnection:
        """Return a new connection of a client to the dispatcher; `down` gets the messages for the
        client."""

    def holder(self, reference: bytes) -> SimWorker | None:
        """Return the live worker that holds the value of this reference, or None."""

    def could_run(self, request: Quantities) -> bool:
        """Return whether one of the workers that always come back has these resources."""

    def check_nothing_executes(self, coordinator: SimCoordinator, last_work: int) -> None:
        """Raise AssertionError if work of an ended round still executes."""


REQUESTS: tuple[dict[str, float], ...] = (
    {},
    {"gpu": 1},
    {"gpu": 0.5, "licence": 0.25},
    {"gpu": 2},
    {"licence": 1},
    {"licence": 2},
    {"gpu": 3},
)
"""What scheduled functions need. No worker has three GPUs."""


class SimCoordinator:
    """One coordinator. Its process never dies; its connection may end.

    Attributes:
      resolved: how often each work item was resolved.
      outcomes: the kind of outcome of each work item that has ended.
      kinds: the kind of function that each work item runs, one of KINDS or "plan".
      options: worker, priority and whether the work is detached, for each work item that has such
        options.
      members: name -> incarnation of each current worker, according to the MembersChanged effects
        of the machine.
      kept_results: the results that the program holds and a worker keeps: number of the
        function's run -> the connection that brought the result.
    """

    def __init__(
        self,
        cluster: CoordinatorSurroundings,
        number: int,
        *,
        queue_max: int,
        works: int,
        calm: bool,
    ) -> None:
        self.cluster = cluster
        self.number = number
        self.resolved: Counter[int] = Counter()
        self.outcomes: dict[int, int] = {}
        self.kinds: dict[int, str] = {}
        self.options: dict[int, WorkOptions] = {}
        self.near: set[int] = set()
        """The work that was submitted with the holder of its inputs."""
        self.members: dict[str, int] = {}
        self._cancelled: set[int] = set()
        self._wanted_back: set[int] = set()
        self._pending_take_backs: dict[int, tuple[SimConnection | None, float]] = {}
        """The work items that the program wants to take back and for which no reply has arrived:
        work -> the connection at the time of the last request, and this time."""
        self._goes_on: set[int] = set()
        """Work that has begun, according to the replies to requests to take it back."""
        self._with_dispatcher: set[int] = set()
        """The work that was submitted over the current connection and that counts towards `width`,
        the limit of submitted work."""
        self.round_count = 0
        self.kept_results: dict[int, SimConnection | None] = {}
        self.connection: SimConnection | None = None
        self._random: Random = cluster.random
        self._late = Random(number)
        """Decides which results come twice, so that this does not change all other events."""
        self._left = works
        self._strays = 0.0 if calm else 0.2
        self._weights = (
            [8, 1, 0.3, 1, 0.15, 0.5, 0.1, 0.05, 0.5] if not calm else [10, 1, 0, 1, 0, 1, 0, 0, 1]
        )
        self._tick_at: float | None = None
        self.ending = False
        self.order: dict[int, int] = {}
        self._submissions = itertools.count()
        self._cancels_sent: set[tuple[int, int]] = set()
        self._first_failure: int | None = None
        self.plans = SimPlans(self, cluster.random, calm=calm)
        self._fetching: dict[int, int] = {}
        self._queue_max = queue_max
        self._starts_reported = cluster.random.random() < 0.5
        self._width = (
            cluster.random.choice((None, 1, 3, 8)) if self._starts_reported and not calm else None
        )
        self.machine = CoordinatorMachine(
            coordinator=number,
            queue_max=queue_max,
            cancel_grace_s=cluster.settings.cancel_grace_s,
            lost_limit_s=60.0,
            recovery_limit_s=15.0,
            recomputations_max=RECOMPUTATIONS_MAX,
            decode_loss=decode_loss,
            now=cluster.clock.now,
            starts=self._starts_reported,
            width=self._width,
        )
        self.works: dict[int, Work] = {}
        self.handle(FunctionsDefined([(fn, b"f") for fn in (1, 2, 3)]))
        self._next_fn = 4
        self.connect()
        self._schedule()

    @property
    def finished(self) -> bool:
        """Whether the program has scheduled all its work, all of it has ended, and the program
        holds no value."""
        busy = self._left or self.ending or self.machine.works
        return not (busy or self.kept_results) and self.plans.finished

    def connect(self) -> None:
        if self.connection is not None and self.connection.open:
            return
        if not self.cluster.dispatcher_up:
            self.cluster.clock.after(self._random.uniform(0.05, 0.6), self.connect)
            return
        connection = self.connection = self.cluster.new_connection(f"c{self.number}", self._receive)

        def up() -> None:
            if connection.open:
                self.handle(DispatcherUp())

        self.cluster.clock.after(self._random.expovariate(1000.0), up)

    def lost_connection(self, connection: SimConnection) -> None:
        if connection is self.connection:
            self.connection = None
            self._with_dispatcher.clear()
            self.handle(DispatcherDown())
            assert not self._pending_take_backs, (
                f"coordinator P14: {self._pending_take_backs.keys()} have no reply at the end of the "
                f"connection"
            )
            self.cluster.clock.after(self._random.uniform(0.05, 0.5), self.connect)

    # -- the program -------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Schedule some more work now and then, while the queue has room and no round is ending."""
        if not self._left:
            self.plans.look()
            if not self.finished:
                self.cluster.clock.after(1.0, self._schedule)
            return
        if not self.ending and self.machine.queued < self._queue_max:
            count = min(self._left, self._random.randint(1, 12))
            self._left -= count
            for _ in range(count):
                self._schedule_next()
        self.plans.look()
        self.cluster.clock.after(self._random.expovariate(8.0), self._schedule)

    def _schedule_next(self) -> None:
        work = len(self.kinds) + 1
        if self._random.random() < 0.4:
            self.options[work] = self._options()
        if self._random.random() < 0.3 and not self.is_detached(work):
            self.kinds[work] = "plan"
            record = self.plans.plan(work, self._fn())
        else:
            kind = self.kinds[work] = self._random.choices(KINDS, self._weights)[0]
            record = Work(work, self._fn(), kind, b"")
            if work in self.options or kind == "keep":
                record.extra = Extra(self.options_of(work), keep=kind == "keep")
        self.works[work] = record
        self.handle(Scheduled([record]))

    def options_of(self, work: int) -> WorkOptions:
        return self.options.get(work, PLAIN)

    def was_cancelled(self, work: int) -> bool:
        """Return whether the program has ever cancelled this work."""
        return work in self._cancelled

    def later(self, event: Event) -> None:
        """Have the machine handle an event after the current event. The real program defers the
        events of its finalizers, too."""
        self.cluster.clock.after(0.0, lambda: self.handle(event))

    def _options(self) -> WorkOptions:
        """Return random options. They may name a worker that never comes back, or one that never
        existed."""
        worker = self._random.choices(
            ("", "worker:0", "worker:1", "worker:2", "worker:9"), (4, 3, 3, 2, self._strays)
        )[0]
        request = self._random.choices(REQUESTS, (6, 2, 2, 1, 2, 1, self._strays / 2))[0]
        if worker and not self._strays:
            request = {}  # this worker may have too little
        if not self.cluster.can_kill:
            request = {name: amount for name, amount in request.items() if name != "gpu"}
        options = WorkOptions.checked(
            worker or None, self._random.choice((-1, 0, 0, 1, 5)), request
        )
        return options._replace(detached=self._random.random() < 0.3)

    def _fn(self) -> int:
        """Return one of the three shared functions, or a new one that is used once."""
        if self._random.random() < 0.9:
            return self._random.randint(1, 3)
        fn, self._next_fn = self._next_fn, self._next_fn + 1
        self.handle(FunctionsDefined([(fn, b"once")]))
        self.cluster.clock.after(0.0, lambda: self.handle(FunctionsDropped([fn])))
        return fn

    def cancel(self) -> None:
        """Have the program cancel some work, whether or not it has begun."""
        pending = [work for work in self.kinds if not self.resolved[work]]
        if pending and not self.ending:
            works = self._random.sample(pending, min(3, len(pending)))
            self._cancelled.update(works)
            self.handle(CancelRequested(works))

    def take_back(self) -> None:
        """Have the program take back some work, by cancelling its futures. Work that has begun
        continues."""
        pending = [
            work
            for work in self.kinds
            if not self.resolved[work] and not self.is_detached(work) and self.kinds[work] != "plan"
        ]
        if not (pending and self._starts_reported) or self.ending:
            return
        works = self._random.sample(pending, min(3, len(pending)))
        since = self.cluster.clock.now
        self._wanted_back.update(works)
        for work in works:
            self._goes_on.discard(work)
            self._pending_take_backs[work] = self.connection, since
        self.handle(TakeBackRequested(works))
        self.cluster.clock.after(ANSWER_S, lambda: self._check_answered(works, since, since))

    def wanted_back(self, work: int) -> bool:
        """Return whether the program has ever cancelled the future of this work (`take_back`)."""
        return work in self._wanted_back

    def _check_answered(self, works: list[int], asked_at: float, since: float) -> None:
        """Check that the program has got a reply for each work item that it wanted to take back.
        Work that it has wanted back once more after `asked_at` has a later check.
        Check later if a fault has just happened, because the fault may have lost a reply. Also
        check later while a round ends, because running work is cancelled only when its function
        ends, and a function in a thread cannot be ended early.
        """
        left = [
            work
            for work in works
            if self._pending_take_backs.get(work, (None, inf))[1] == asked_at
            and work not in self._cancelled
        ]
        quiet_since = self.cluster.quiet_since
        if left and self.ending:
            self.cluster.clock.after(ANSWER_S, lambda: self._check_answered(left, asked_at, since))
        elif left and quiet_since > since:
            self.cluster.clock.at(
                quiet_since + ANSWER_S, lambda: self._check_answered(left, asked_at, quiet_since)
            )
        else:
            assert not left, f"dispatch P17: it is not reported whether {left} have begun"

    def raise_error(self) -> None:
        """Have the program call `join`, which raises the round's error."""
        if self.machine.failed is not None and not self.ending:
            self.ending = True
            self.handle(EndRoundRequested(self.round_count + 1))

    # -- the runtime -------------------------------------------------------------------------------

    def _receive(self, message: Message) -> None:
        if isinstance(message, StartsLost):
            self._check_charges(message)
        if isinstance(message, Results) and self._late.random() < LATE_COPIES:
            self._hear_again(message, self.connection)
        self.plans.hear(message)
        self.handle(Heard("dispatcher", message))

    def _hear_again(self, message: Results, connection: SimConnection | None) -> None:
        """Have the machine get results once more some time later, over the same connection. No real
        dispatcher sends them twice, but a late message about an earlier attempt must not count for
        a later one."""
        items = [item for item in message.items if item[2] in (VALUE, ERROR, CANCELLED)]

        def hear() -> None:
            if connection is self.connection and items:
                self.handle(Heard("dispatcher", Results(items)))

        self.cluster.clock.after(self._late.uniform(0.0, 1.0), hear)

    def handle(self, event: Event) -> None:
        self._perform(self.machine.handle(event, self.cluster.clock.now))
        self._check_counts()
        at = self.machine.deadline
        if at is not None and at != self._tick_at:
            self._tick_at = at
            self.cluster.clock.at(at, lambda: self._tick(at))
        failed = self.machine.failed
        assert failed == self._first_failure, (
            f"coordinator P18: the round fails by {failed}, not by {self._first_failure}"
        )
        if failed is not None and not self.ending:
            self.cluster.clock.after(self._random.uniform(0.0, 1.0), self.raise_error)

    def _tick(self, at: float) -> None:
        if self._tick_at == at:
            self._tick_at = None
            self.handle(Ticked())

    def _check_counts(self) -> None:
        """Check that what the machine counts agrees with the states of the records."""
        machine, works = self.machine, self.machine.works.values()
        states = Counter(work.state for work in works)
        assert machine.unfinished == sum(states[state] for state in UNFINISHED), "unfinished"
        assert machine.waiting == sum(states[state] for state in IN_PROGRAM), "waiting"
        in_rounds = Counter(work.state for work in works if not work.is_detached)
        there = sum(in_rounds[state] for state in (*AWAITING_RESULT, State.ABANDONED))
        assert machine.at_dispatcher == there, (machine.at_dispatcher, there, works)
        for work in works:
            if work.state is State.ABANDONED:
                assert (work.number, work.attempt) in self._cancels_sent, (
                    f"coordinator P26: work {work.number} goes on at the dispatcher"
                )
        assert not states[State.SUCCEEDED] + states[State.FAILED], "an ended work item is kept"

    def _submit(self, effect: SubmitWork) -> None:
        for work in effect.works:
            self.order[work.number] = next(self._submissions)
            if work.number in self.plans.plans:
                self.plans.submitted(work)
        if self.connection is None:
            return
        for message in effect.messages(self._pack, self._near):
            self._check_width(message)
            self.connection.send_up(message)

    def _near(self, work: Work) -> tuple[str, int]:
        """Return a worker, as if it held large inputs of this work."""
        holder = self._random.choice(("", "worker:0", "worker:1", "worker:2"))
        holder_bytes = int(self._random.choice((1e8, 1e9)))
        if not holder:
            self.near.discard(work.number)
            return "", 0
        self.near.add(work.number)
        return holder, holder_bytes

    def _pack(self, work: Work) -> bytes:
        kind, *runs = work.name.split("|")
        submission = submission_of(work.number, work.attempt)
        return "|".join((kind, str(self.number), str(submission), *runs)).encode()

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(_, message):
                    if isinstance(message, Forget):
                        self.plans.check_forgotten(message.functions)
                    if isinstance(message, CancelWork):
                        self._cancels_sent.update(message.works)
                    if self.connection is not None:
                        self.connection.send_up(message)
                case SubmitWork():
                    self._submit(effect)
                case Resolve(items, failures):
                    for work, kind, payload in items:
                        if self.resolved[work.number] and work.number in self.plans.plans:
                            assert work not in failures, "P18: a lost value fails the round"
                            self.plans.replaced(work.number, kind, payload)
                        else:
                            self._resolve(work.number, kind, payload)
                            self._check_failure(work.number, kind, work in failures)
                case KeepInput():
                    self.plans.keep_input(effect)
                case Recomputed(work):
                    self.plans.remade(work.number)
                case DecideRetry():
                    self.plans.decide(effect)
                case Free(work):
                    self.plans.free(work.number)
                case Fetch(work, attempt, reference):
                    self._fetching[work.number] = attempt
                    self._fetch(work.number, attempt, reference)
                case RoundSettled():
                    self._settle_round()
                case WorkBegun(works):
                    self._note_starts(works)
                case RoomMade():
                    pass
                case MembersChanged():
                    self._note_members(effect)

    def _check_failure(self, work: int, kind: int, fails: bool) -> None:
        expected = kind in (
            ERROR,
            OUT_OF_MEMORY,
            LOST,
            UNAVAILABLE,
            INPUT_FAILED,
            TIMED_OUT,
        ) and not self.is_detached(work)
        promise = "coordinator P10" if self.is_detached(work) else "coordinator P18"
        assert fails == expected, (
            f"{promise}: work {work} ends by kind {kind}, and fails its round: {fails}"
        )
        if fails and self._first_failure is None:
            self._first_failure = work

    def _note_starts(self, works: list[int]) -> None:
        for work in works:
            assert self._starts_reported, (
                "coordinator P14: a report of begun work that was not requested"
            )
            assert not self.resolved[work], f"coordinator P14: work {work} has begun after its end"
            if self._pending_take_backs.pop(work, (None,))[0] is not None:
                self._goes_on.add(work)

    def _check_width(self, message: Submit) -> None:
        if not message.detached:
            self._with_dispatcher.update(item[0] for item in message.items)
            with_dispatcher = {
                number
                for number in self._with_dispatcher
                if number in self.machine.works
                and self.machine.works[number].state in {*AWAITING_RESULT, State.ABANDONED}
            }
            self._with_dispatcher = with_dispatcher
            assert self._width is None or len(with_dispatcher) <= self._width, (
                f"coordinator P13: {len(with_dispatcher)} pieces of work are with the "
                f"dispatcher, and the width is {self._width}"
            )

    def _resolve(self, work: int, kind: int, payload: Any) -> None:
        self.resolved[work] += 1
        self._with_dispatcher.discard(work)
        self._pending_take_backs.pop(work, None)
        assert kind != CANCELLED or self.ending or work not in self._goes_on - self._cancelled, (
            f"coordinator P14: work {work} has begun, as was reported to the user, and is cancelled"
        )
        assert kind != ERROR or work not in self._cancelled, (
            f"coordinator P32: work {work} was cancelled, and fails"
        )
        self.outcomes[work] = kind
        assert kind != LOST or len(payload) == self.cluster.settings.attempts_max, (
            "coordinator P5: fails after attempts_max lost starts"
        )
        assert self.resolved[work] == 1, f"coordinator P1: work {work} was resolved twice"
        if kind in (VALUE, ERROR, KEPT) and payload != INPUT_GONE:
            self._check_result(work, payload.reference if isinstance(payload, KeptAt) else payload)
        if work in self.plans.plans:
            self.plans.resolved(work, kind, payload)
        elif kind == KEPT:
            run = int(payload.reference.split(b"|")[3])
            self.kept_results[run] = self.connection
            self.cluster.clock.after(self._random.uniform(0.0, 5.0), lambda: self._drop(work, run))
        if self.is_detached(work) and work not in self._cancelled:
            assert kind != CANCELLED, (
                f"dispatch P14: work {work} is detached, and ends with a round"
            )
        if kind == UNAVAILABLE:
            worker, request = self.options[work].worker, self.options[work].resources
            assert worker or request, (
                f"coordinator P11: work {work} is for any worker, and fails for want of one"
            )
            assert worker or not self.cluster.could_run(request), (
                f"dispatch P20: work {work} fails, although a worker has the resources for it"
            )

    def _check_result(self, work: int, payload: bytes) -> None:
        _, coordinator, number, run = payload.decode().split("|")
        oracle = self.cluster.oracle.runs[int(run)]
        assert oracle == (int(coordinator), int(number)), "dispatch P2: a result of another work"
        assert (int(coordinator), int(number) >> SUBMISSIONS_SHIFT) == (self.number, work), (
            "dispatch P2: a result of another work"
        )
        assert int(number) == submission_of(work, self.works[work].attempt), (
            f"coordinator P16: work {work} ends by a result of an earlier submission"
        )

    def is_detached(self, work: int) -> bool:
        return work in self.options and self.options[work].detached

    def _note_members(self, changed: MembersChanged) -> None:
        for name, incarnation, _ in changed.left:
            assert self.members.pop(name, None) == incarnation, (
                f"coordinator P12: {name} leaves and was not a member"
            )
        for name, incarnation, *_ in changed.joined:
            assert name not in self.members, f"coordinator P12: {name} joins twice"
            self.members[name] = incarnation

    def _drop(self, work: int, run: int) -> None:
        """Have the program drop a value that its worker keeps."""
        del self.kept_results[run]
        self.handle(KeptDropped([work]))

    def _settle_round(self) -> None:
        self.ending = False
        self._first_failure = None
        self.round_count += 1
        unresolved = [
            work for work in self.kinds if not self.resolved[work] and not self.is_detached(work)
        ]
        assert not unresolved, (
            f"coordinator P3: {unresolved} are not resolved at the end of their round"
        )
        self.cluster.check_nothing_executes(self, len(self.kinds))

    def _check_charges(self, lost: StartsLost) -> None:
        for work, _, _, _, _, _ in lost.items:
            charged = 1 + self.machine.lost_starts(work)
            starts = len(self.cluster.oracle.reported.get((self.number, work), ()))
            assert charged <= starts or self.resolved[work], (
                f"dispatch P3: work {work} was charged {charged} starts of {starts}"
            )

    # -- bulk --------------------------------------------------------------------------------------

    def _fetch(self, work: int, attempt: int, reference: bytes) -> None:
        if not self.machine.wants(work, attempt):
            # no result of this attempt is wanted, because the work has ended or was submitted again
            return
        holder = self.cluster.holder(reference)
        if holder is None:
            if not self.resolved[work]:
                self.cluster.clock.after(0.2, lambda: self._fetch(work, attempt, reference))
            return
        self.cluster.clock.after(
            self._random.uniform(0.0, 0.1), lambda: self._fetched(work, attempt, reference)
        )

    def _fetched(self, work: int, attempt: int, reference: bytes) -> None:
        """Report the arrival of a large result. If the worker that held the result ended during the
        transfer, fetch the result again."""
        holder = self.cluster.holder(reference)
        if holder is None or self._fetching.get(work) != attempt:
            self._fetch(work, attempt, reference)
            return
        assert not self.resolved[work] or self.outcomes[work] == CANCELLED, (
            "coordinator P2: resolved before its value had arrived"
        )
        self.handle(BulkArrived(work, attempt, reference))
