"""A simulated coordinator: the real machine, and a user who schedules, cancels, and raises the errors of a round."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from zmqdist.events import Heard, Send, Ticked
from zmqdist.messages import CANCELLED, ERROR, KEPT, VALUE, Message, StartsLost, Submit
from zmqdist.scheduling.coordinator.closures import Closures
from zmqdist.scheduling.coordinator.coordinator_events import (
    LOST,
    UNAVAILABLE,
    BulkArrived,
    DispatcherDown,
    DispatcherUp,
    EndAsked,
    Event,
    FunctionsDefined,
    FunctionsDropped,
    KeptDropped,
    Scheduled,
    TakeBackAsked,
    WithdrawAsked,
)
from zmqdist.scheduling.coordinator.effects import (
    Effect,
    Fetch,
    Resolve,
    ResolveLost,
    RoomMade,
    RoundEnded,
    WorkBegun,
)
from zmqdist.scheduling.coordinator.pins import MembersChanged, WorkOptions
from zmqdist.testing.simulation.network import SimConnection

if TYPE_CHECKING:
    from zmqdist.testing.simulation.cluster import SimCluster

ANSWER_S = 2.0
"""While nothing goes wrong the user hears sooner whether work that is to be had back has begun: what is slow takes longer."""

KINDS = ("quick", "long", "slow", "polite", "raise", "bulk", "poison", "killer", "keep")


class SimCoordinator:
    """One coordinator; its process never dies, its connection may.

    Attributes:
      resolved: how often each piece of work was resolved.
      kinds: what each piece of work does.
      options: of work that has some: for one worker, before other work, apart from the rounds.
      members: incarnations of the workers that are there, by name, as it was told.
      rounds: for each generation that has ended, the last work of it.
      kept: results that the user has, and that are with their workers: number of the run -> our connection when it came.
    """

    def __init__(self, cluster: SimCluster, number: int, *, queue_max: int, works: int, calm: bool) -> None:
        self.cluster = cluster
        self.number = number
        self.resolved: Counter[int] = Counter()
        self.outcomes: dict[int, int] = {}
        self.kinds: dict[int, str] = {}
        self.options: dict[int, WorkOptions] = {}
        self.members: dict[str, int] = {}
        self._withdrawn: set[int] = set()
        self._wanted_back: set[int] = set()
        self._asked_back: dict[int, SimConnection | None] = {}
        """Work that is to be had back unless it has begun -> our connection when that was asked; it is not answered yet."""
        self._goes_on: set[int] = set()
        """What has begun, as the user was told who wanted it back."""
        self._with_dispatcher: set[int] = set()
        """What was submitted over this connection, and is counted by the width."""
        self.rounds_ended = 0
        self.kept: dict[int, SimConnection | None] = {}
        self.connection: SimConnection | None = None
        self._random: Random = cluster.random
        self._left = works
        self._strays = 0.0 if calm else 0.2
        self._weights = [8, 1, 0.3, 1, 0.15, 0.5, 0.1, 0.05, 0.5] if not calm else [10, 1, 0, 1, 0, 1, 0, 0, 1]
        self._tick_at: float | None = None
        self._ending = False
        self._fetching: dict[int, int] = {}
        self._queue_max = queue_max
        self._starts_told = cluster.random.random() < 0.5
        self._width = cluster.random.choice((None, 1, 3, 8)) if self._starts_told and not calm else None
        self.machine = Closures(
            coordinator=number,
            queue_max=queue_max,
            cancel_grace_s=cluster.rules.cancel_grace_s,
            lost_limit_s=60.0,
            recovery_limit_s=15.0,
            now=cluster.clock.now,
            starts=self._starts_told,
            width=self._width,
        )
        self._handle(FunctionsDefined([(fn, b"f") for fn in (1, 2, 3)]))
        self._next_fn = 4
        self.connect()
        self._schedule()

    @property
    def finished(self) -> bool:
        """The user has scheduled everything, and all of it has ended."""
        return not (self._left or self._ending or self.machine.unfinished or self.kept)

    def connect(self) -> None:
        if self.connection is not None and self.connection.open:
            return
        if not self.cluster.dispatcher_up:
            self.cluster.clock.after(self._random.uniform(0.05, 0.6), self.connect)
            return
        connection = self.connection = self.cluster.new_connection(f"c{self.number}", self._hear)

        def up() -> None:
            if connection.open:
                self._handle(DispatcherUp())

        self.cluster.clock.after(self._random.expovariate(1000.0), up)

    def lost_connection(self, connection: SimConnection) -> None:
        if connection is self.connection:
            self.connection = None
            self._with_dispatcher.clear()
            self._handle(DispatcherDown())
            assert not self._asked_back, (
                f"closures P14: {self._asked_back.keys()} are not answered at the end of the connection"
            )
            self.cluster.clock.after(self._random.uniform(0.05, 0.5), self.connect)

    # -- the user -------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Now and then a few more, while there is room and no error to raise."""
        if not self._left:
            return
        if not self._ending and self.machine.queued < self._queue_max:
            count = min(self._left, self._random.randint(1, 12))
            self._left -= count
            items = []
            keep = []
            options = {}
            for _ in range(count):
                work = len(self.kinds) + 1
                self.kinds[work] = self._random.choices(KINDS, self._weights)[0]
                items.append((work, self._fn(), f"{self.kinds[work]}|{self.number}|{work}".encode()))
                if self.kinds[work] == "keep":
                    keep.append(work)
                if self._random.random() < 0.4:
                    options[work] = self._options()
            self.options.update(options)
            self._handle(Scheduled(items, keep, options))
        self.cluster.clock.after(self._random.expovariate(8.0), self._schedule)

    def _options(self) -> WorkOptions:
        """For one of the workers, one of which may never come back; and now and then for one that never was."""
        worker = self._random.choices(("", "worker:0", "worker:1", "worker:2", "worker:9"), (4, 3, 3, 2, self._strays))[
            0
        ]
        return WorkOptions(worker, self._random.choice((-1, 0, 0, 1, 5)), self._random.random() < 0.3)

    def _fn(self) -> int:
        """One of the three that everybody uses, or one that is used once."""
        if self._random.random() < 0.9:
            return self._random.randint(1, 3)
        fn, self._next_fn = self._next_fn, self._next_fn + 1
        self._handle(FunctionsDefined([(fn, b"once")]))
        self.cluster.clock.after(0.0, lambda: self._handle(FunctionsDropped([fn])))
        return fn

    def withdraw(self) -> None:
        """The user cancels some."""
        pending = [work for work in self.kinds if not self.resolved[work]]
        if pending and not self._ending:
            works = self._random.sample(pending, min(3, len(pending)))
            self._withdrawn.update(works)
            self._handle(WithdrawAsked(works))

    def take_back(self) -> None:
        """The user cancels some futures: what has begun goes on."""
        pending = [work for work in self.kinds if not self.resolved[work] and not self.is_apart(work)]
        if not (pending and self._starts_told) or self._ending:
            return
        works = self._random.sample(pending, min(3, len(pending)))
        since = self.cluster.clock.now
        self._wanted_back.update(works)
        for work in works:
            self._goes_on.discard(work)
            self._asked_back[work] = self.connection
        self._handle(TakeBackAsked(works))
        self.cluster.clock.after(ANSWER_S, lambda: self._check_answered(works, since))

    def wanted_back(self, work: int) -> bool:
        """The user has asked for it, at some time."""
        return work in self._wanted_back

    def _check_answered(self, works: list[int], since: float) -> None:
        """Unless something went wrong since then: then that is what the answer may have been lost with. What is cut off ends as cancelled
        when it ends, which nobody can hasten in a thread; so does all of a round that ends."""
        left = [work for work in works if work in self._asked_back and work not in self._withdrawn]
        quiet_since = self.cluster.quiet_since
        if left and self._ending:
            self.cluster.clock.after(ANSWER_S, lambda: self._check_answered(left, since))
        elif left and quiet_since > since:
            self.cluster.clock.at(quiet_since + ANSWER_S, lambda: self._check_answered(left, quiet_since))
        else:
            assert not left, f"dispatch P17: nobody says of {left} whether they have begun"

    def raise_error(self) -> None:
        """The user calls `join`, which raises."""
        if self.machine.failed is not None and not self._ending:
            self._ending = True
            self._handle(EndAsked(self.rounds_ended + 1))

    # -- the shell ------------------------------------------------------------------------------------------------

    def _hear(self, message: Message) -> None:
        if isinstance(message, StartsLost):
            self._check_charges(message)
        self._handle(Heard("dispatcher", message))

    def _handle(self, event: Event) -> None:
        self._perform(self.machine.handle(event, self.cluster.clock.now))
        at = self.machine.deadline
        if at is not None and at != self._tick_at:
            self._tick_at = at
            self.cluster.clock.at(at, lambda: self._tick(at))
        failed = self.machine.failed
        assert failed is None or not self.is_apart(failed), (
            f"closures P10: the round fails by work {failed}, which is apart"
        )
        if failed is not None and not self._ending:
            self.cluster.clock.after(self._random.uniform(0.0, 1.0), self.raise_error)

    def _tick(self, at: float) -> None:
        if self._tick_at == at:
            self._tick_at = None
            self._handle(Ticked())

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(_, message):
                    if self.connection is not None:
                        self._check_width(message)
                        self.connection.send_up(message)
                case Resolve(items):
                    for work, kind, payload in items:
                        self._resolve(work, kind, payload)
                case ResolveLost(work, starts):
                    assert len(starts) == self.cluster.rules.attempts_max, (
                        "closures P5: fails after attempts_max lost starts"
                    )
                    self._resolve(work, LOST, b"")
                case Fetch(work, attempt, reference):
                    self._fetching[work] = attempt
                    self._fetch(work, attempt, reference)
                case RoundEnded():
                    self._round_ended()
                case WorkBegun(works):
                    self._note_begun(works)
                case RoomMade():
                    pass
                case MembersChanged():
                    self._note_members(effect)

    def _note_begun(self, works: list[int]) -> None:
        for work in works:
            assert self._starts_told, "closures P14: nobody asked what has begun"
            assert not self.resolved[work], f"closures P14: work {work} has begun after its end"
            if self._asked_back.pop(work, None) is not None:
                self._goes_on.add(work)

    def _check_width(self, message: Message) -> None:
        if isinstance(message, Submit) and not message.apart:
            self._with_dispatcher.update(item[0] for item in message.items)
            assert self._width is None or len(self._with_dispatcher) <= self._width, (
                f"closures P13: {len(self._with_dispatcher)} pieces of work are with the dispatcher, and the width is {self._width}"
            )

    def _resolve(self, work: int, kind: int, payload: bytes) -> None:
        self.resolved[work] += 1
        self._with_dispatcher.discard(work)
        self._asked_back.pop(work, None)
        assert kind != CANCELLED or self._ending or work not in self._goes_on - self._withdrawn, (
            f"closures P14: work {work} has begun, as was told who wanted it back, and is cancelled"
        )
        self.outcomes[work] = kind
        assert self.resolved[work] == 1, f"closures P1: work {work} was resolved twice"
        assert work not in self.machine._works, f"closures P1: work {work} was resolved and may be resolved again"
        if kind in (VALUE, ERROR, KEPT):
            _, coordinator, told, run = payload.decode().split("|")
            truth = self.cluster.truth.runs[int(run)]
            assert truth == (int(coordinator), int(told)) == (self.number, work), (
                "dispatch P2: a result of another work"
            )
            if kind == KEPT:
                self.kept[int(run)] = self.connection
                self.cluster.clock.after(self._random.uniform(0.0, 5.0), lambda: self._drop(work, int(run)))

        if self.is_apart(work) and work not in self._withdrawn:
            assert kind != CANCELLED, f"dispatch P14: work {work} is apart, and ends with a round"
        if kind == UNAVAILABLE:
            assert self.options[work].worker, f"closures P11: work {work} is for any worker, and fails for want of one"

    def is_apart(self, work: int) -> bool:
        return work in self.options and self.options[work].apart

    def _note_members(self, changed: MembersChanged) -> None:
        for name, incarnation, _ in changed.left:
            assert self.members.pop(name, None) == incarnation, f"closures P12: {name} leaves who was not there"
        for name, incarnation, _, _ in changed.joined:
            assert name not in self.members, f"closures P12: {name} comes twice"
            self.members[name] = incarnation

    def _drop(self, work: int, run: int) -> None:
        """The user has no further use for a value that its worker keeps."""
        del self.kept[run]
        self._handle(KeptDropped([work]))

    def _round_ended(self) -> None:
        self._ending = False
        self.rounds_ended += 1
        unresolved = [work for work in self.kinds if not self.resolved[work] and not self.is_apart(work)]
        assert not unresolved, f"closures P3: {unresolved} are not resolved at the end of their round"
        self.cluster.check_nothing_executes(self, len(self.kinds))

    def _check_charges(self, lost: StartsLost) -> None:
        for work, _, _, _, _, _ in lost.items:
            charged = 1 + len(self.machine._starts.get(work, ()))
            begun = len(self.cluster.truth.reported.get((self.number, work), ()))
            assert charged <= begun or self.resolved[work], (
                f"dispatch P3: work {work} was charged {charged} starts of {begun}"
            )

    # -- bulk -----------------------------------------------------------------------------------------------------

    def _fetch(self, work: int, attempt: int, reference: bytes) -> None:
        if not self.machine.wants(work, attempt):
            return  # it has ended, or was submitted again in the meantime
        holder = self.cluster.holder(reference)
        if holder is None:
            if not self.resolved[work]:
                self.cluster.clock.after(0.2, lambda: self._fetch(work, attempt, reference))
            return
        self.cluster.clock.after(self._random.uniform(0.0, 0.1), lambda: self._fetched(work, attempt, reference))

    def _fetched(self, work: int, attempt: int, reference: bytes) -> None:
        """The last byte is here, if the holder is still there."""
        holder = self.cluster.holder(reference)
        if holder is None or self._fetching.get(work) != attempt:
            self._fetch(work, attempt, reference)
            return
        assert not self.resolved[work] or self.outcomes[work] == CANCELLED, "closures P2: resolved before it was here"
        self._handle(BulkArrived(work, attempt, reference))
