"""Does the simulation of the data service find bugs? One is planted at a time; within SEEDS_MAX
seeds it must report a broken promise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from tests.sim.planted import Plant, around, effects, events, no_arrow, without
from tests.sim.simulations import data_service
from tests.sim.simulations.data_rounds import simulate_rounds
from tests.sim.simulations.data_service import simulate_data_service
from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import machine, tables
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine.machine import DataDispatcherMachine
from zmqdist.data.service.dispatcher.machine.state import DurableState
from zmqdist.data.service.reader import window_machine
from zmqdist.data.service.reader.coordinated_machine import CoordinatedDelivery
from zmqdist.data.service.reader.delivery import (
    END,
    SKIP,
    SOME,
    Deliver,
    DispatcherReplied,
    News,
    NotifyDispatcher,
    ReadingEnded,
    TaskReplied,
)
from zmqdist.data.service.reader.exactly_once_machine import ACKNOWLEDGE, ExactlyOnceDelivery
from zmqdist.data.service.reader.plain_machine import PlainDelivery
from zmqdist.data.service.worker.portions_machine import PortionsLane
from zmqdist.data.service.worker.rounds_machine import RoundsMachine
from zmqdist.messages import Register
from zmqdist.scheduling.worker.machine import Contact

# some are found after hundreds of seeds where the simulation has changed
pytestmark = pytest.mark.timeout(300)

SEEDS_MAX = 800

Dispatcher = DataDispatcherMachine


def altered(owner: type, kind: type, alter: Callable[[Any, Any], Any]) -> Plant:
    """Events of this kind are altered."""
    return events(
        owner, lambda self, event: alter(self, event) if isinstance(event, kind) else event
    )


def remade(owner: type, kind: type, alter: Callable[[Any], Any]) -> Plant:
    """Effects of this kind are altered."""
    return effects(
        owner,
        lambda self, event, made: [
            alter(each) if isinstance(each, kind) else each for each in made
        ],
    )


def bound(owner: object, name: str, value: Any) -> Plant:
    """A constant of a module has another value."""
    return lambda patch: patch.setattr(owner, name, value)


# -- records of the dispatcher ---------------------------------------------------------------------


def applied(kind: type, hook: Callable[[DurableState, Any], object]) -> Plant:
    """Call `hook` with the state before it applies a record of this kind."""

    def apply(former: Any, self: DurableState, record: Any) -> None:
        if isinstance(record, kind):
            hook(self, record)
        former(self, record)

    return around(DurableState, "apply", apply)


def standing_still(former: Any, self: DurableState, record: Any) -> None:
    former(self, record)
    if isinstance(record, r.GiveSplits) and record.task in self.tasks:
        cursor = self.iterations[self.tasks[record.task].iteration].cursors[record.source]
        if cursor.position > 20:
            cursor.position -= 1


def ends_with_the_first(former: Any, self: DurableState, record: Any) -> None:
    number = self.tasks[record.task].iteration if isinstance(record, r.FinishTask) else 0
    former(self, record)
    if number and self.iterations[number].state is r.IterationState.OPEN:
        former(self, r.FinishIteration(number))


def without_marks(state: DurableState, record: r.ReleaseClient) -> None:
    portions = state.iterations[state.clients[record.client].iteration].portions
    for portion in {} if portions is None else portions.open.values():
        portion.acked = 0


def unrecorded(kind: type) -> Plant:
    """Records of this kind do not reach the journal."""
    return remade(
        Dispatcher,
        ev.CommitJournal,
        lambda commit: ev.CommitJournal(
            tuple(each for each in commit.records if not isinstance(r.decode(each), kind))
        ),
    )


def hasty(former: Any, self: Dispatcher, event: Any, now: float) -> Any:
    """Each group of records counts as durable at once."""
    if isinstance(event, ev.JournalCommitted):
        return []
    made = former(self, event, now)
    if any(isinstance(each, ev.CommitJournal) for each in made):
        made = [*former(self, ev.JournalCommitted(), now), *made]
    return made


# -- events and effects of the dispatcher ----------------------------------------------------------

fresh = itertools.count(1 << 41)


def is_news(effect: Any, length: int) -> bool:
    """Whether an effect is the news for a worker (3 fields) or for a client (6 fields)."""
    return (
        isinstance(effect, ev.ReplyToRequest)
        and effect.news
        and effect.value is not None
        and len(effect.value) == length
    )


def without_tasks(effect: ev.ReplyToRequest) -> ev.ReplyToRequest:
    if not is_news(effect, 6):
        return effect
    version, _, *rest = effect.value
    return replace(effect, value=(version, [], *rest))


def unplaced(self: Dispatcher, event: ev.WorkerJoined) -> ev.WorkerJoined | None:
    known = any(event.incarnation == each.incarnation for each in self.place_rows())
    return event if known or not self.state.iterations else None


def unanswered_loss(former: Any, self: Dispatcher, event: Any, now: float) -> Any:
    if isinstance(event, ev.MissedRequest):
        return [ev.ReplyToRequest(event.token, None)]
    return former(self, event, now)


def whosever_they_are(self: Dispatcher, event: ev.WorkRequest) -> ev.WorkRequest:
    for row in self.state.workers.values():
        if row.incarnation == event.incarnation:
            for task in event.has:
                if task in self.state.tasks:
                    self.state.tasks[task].worker = row.number
    return event


def insistent(former: Any, self: Contact, code: int, now: float) -> bool:
    again: bool = former(self, code, now)
    self.index_conflict = False
    return again


# -- readers ---------------------------------------------------------------------------------------


def one_too_many(report: NotifyDispatcher) -> NotifyDispatcher:
    if report.method != ACKNOWLEDGE:
        return report
    marks = tuple((number, count + (not done), done) for number, count, done in report.payload)
    return report._replace(payload=marks)


def confirmed(self: ExactlyOnceDelivery, event: DispatcherReplied) -> DispatcherReplied:
    return event._replace(code=0) if event.report.method == ACKNOWLEDGE else event


def before_its_turn(deliver: Deliver) -> Deliver:
    """Later portions come before earlier ones."""
    return Deliver(sorted(deliver.items, key=lambda piece: -piece.number))


def giving_up(self: PlainDelivery, event: TaskReplied) -> TaskReplied:
    return event if event.error is None else event._replace(kind=END, error=None)


def at_the_first_end(self: PlainDelivery, event: Any, made: list[Any]) -> list[Any]:
    if isinstance(event, TaskReplied) and event.kind == END and event.error is None:
        return [*made, ReadingEnded(None)]
    return made


# -- portions of a task ----------------------------------------------------------------------------


def as_if_it_were_the_first(former: Any, self: PortionsLane, number: int, skip: int) -> Any:
    segment = former(self, number, skip)
    segment.first = 0
    return segment


def done(when: Callable[[tuple[Any, ...]], bool]) -> Plant:
    """The runs of replies are marked as done if `when(run)` says so."""

    def next_reply(former: Any, self: PortionsLane) -> Any:
        reply = former(self)
        if reply is not None and reply.kind == SOME:
            runs, nbytes, in_hand = reply.tag
            runs = tuple((*run[:4], when(run), *run[5:]) for run in runs)
            reply = reply._replace(tag=(runs, nbytes, in_hand))
        return reply

    return around(PortionsLane, "next_reply", next_reply)


class Bug(NamedTuple):
    """What is wrong, how it gets there, how the text of the broken promise begins, and where the
    search begins: some bugs are met by one seed in thousands, and sooner where the world has only
    these kinds of trouble, or more of it. Where a change of the simulation has made other runs of
    the seeds, search for another first seed."""

    what: str
    plant: Plant
    promise: str
    first_seed: int = 0
    kinds: tuple[str, ...] = data_service.KINDS
    faults: int = 12


BUGS: list[Bug] = [
    Bug("positions are given twice", around(DurableState, "apply", standing_still), "D"),
    Bug(
        "a repeated question gets new positions",
        altered(
            Dispatcher, ev.SplitsRequest, lambda self, event: replace(event, request=next(fresh))
        ),
        "D1",
        79,
    ),
    Bug("answers leave before they are durable", around(Dispatcher, "handle", hasty), ""),
    Bug("positions that were given are not written down", unrecorded(r.GiveSplits), "D1"),
    Bug("the end of a task is not written down", unrecorded(r.FinishTask), "", 25),
    Bug("the state is kept although the journal failed", without(Dispatcher, ev.Reload), "D"),
    Bug(
        "each iterator has an iteration of its own",
        altered(
            Dispatcher,
            ev.OpenRequest,
            lambda self, event: replace(
                event, job_name=event.job_name and f"{event.job_name} {next(fresh)}"
            ),
        ),
        "D2",
    ),
    Bug(
        "an iteration ends when the first task does",
        around(DurableState, "apply", ends_with_the_first),
        "",
    ),
    Bug("newcomers get no place", altered(Dispatcher, ev.WorkerJoined, unplaced), "D"),
    Bug("clients are told of no tasks", remade(Dispatcher, ev.ReplyToRequest, without_tasks), "D4"),
    Bug(
        "workers are not told when tasks change",
        effects(
            Dispatcher, lambda self, event, made: [each for each in made if not is_news(each, 3)]
        ),
        "D4",
    ),
    Bug(
        "a worker that does not come back is never given up",
        around(
            Dispatcher,
            "__init__",
            lambda former, self, rules, *args: former(
                self, replace(rules, worker_timeout_s=1e9), *args
            ),
        ),
        "D4",
    ),
    Bug(
        "members are not placed again after the journal failed",
        bound(machine, "LOOK_AGAIN_S", 1e9),
        "D",
    ),
    Bug(
        "a restart brings the state back without its end",
        around(
            Dispatcher,
            "restore",
            lambda former, self, snapshot, records, now: former(
                self, snapshot, list(records)[:-3], now
            ),
        ),
        "",
    ),
    Bug("a lost answer is not computed again", around(Dispatcher, "handle", unanswered_loss), "D4"),
    Bug("acknowledgements are not written down", unrecorded(r.Acknowledge), ""),
    Bug("portions that were given out are not written down", unrecorded(r.GivePortions), ""),
    Bug(
        "a worker insists on a number that another has", around(Contact, "refused", insistent), "D6"
    ),
    Bug(
        "a question that waits is forgotten with its worker",
        without(Dispatcher, ev.FailRequest, ev.WorkerGone),
        "D4",
        250,
        ("cut",),
        40,
    ),
    Bug(
        "a task belongs to any worker that has it",
        altered(Dispatcher, ev.WorkRequest, whosever_they_are),
        "",
        180,
    ),
    Bug(
        "a newcomer has the place of one that is on its way",
        altered(Dispatcher, ev.WorkerJoined, lambda self, event: replace(event, named=True)),
        "D",
        19,
    ),
    Bug("DYNAMIC ends while a worker is on its way", bound(tables, "RETURN_S", 0.0), "D1", 1290),
    Bug(
        "what was acknowledged is given out again",
        applied(r.ReleaseClient, without_marks),
        "exactly once",
        1135,
    ),
    Bug(
        "a reader delivers a batch twice",
        effects(
            ExactlyOnceDelivery,
            lambda self, event, made: [
                each for one in made for each in [one] * (1 + isinstance(one, Deliver))
            ],
        ),
        "",
    ),
    Bug(
        "a reader says nothing of lost answers",
        without(ExactlyOnceDelivery, NotifyDispatcher, TaskReplied),
        "D4",
    ),
    Bug(
        "a reader acknowledges what its consumer is at",
        remade(ExactlyOnceDelivery, NotifyDispatcher, one_too_many),
        "X3",
    ),
    Bug(
        "a reader forgets acknowledgments that failed",
        altered(ExactlyOnceDelivery, DispatcherReplied, confirmed),
        "D4",
    ),
    Bug(
        "a reader hands over what is not in its turn",
        remade(ExactlyOnceDelivery, Deliver, before_its_turn),
        "in order",
    ),
    Bug(
        "a portion that goes on counts from its beginning",
        around(PortionsLane, "begin", as_if_it_were_the_first),
        "",
    ),
    Bug("each answer says that its portions are done", done(lambda run: True), ""),
    Bug("a portion of one element is never done", done(lambda run: run[4] and run[3] > 1), "D4"),
    Bug(
        "a lost connection is a death",
        applied(r.LosePortions, lambda state, record: setattr(record, "crashed", True)),
        "a reader",
        520,
        ("cut", "reader"),
        60,
    ),
    Bug(
        "an index that was given counts as its own",
        bound(Register, "named", property(lambda self: self.index >= 0)),
        "D",
        430,
    ),
    Bug(
        "a reader gives up a worker that has not answered once",
        altered(PlainDelivery, TaskReplied, giving_up),
        "",
    ),
    Bug("a reader ends with its first task", effects(PlainDelivery, at_the_first_end), ""),
    Bug(
        "a reader asks more than its window holds",
        bound(window_machine, "AHEAD", window_machine.AHEAD + 1),
        "W2",
    ),
    *(
        Bug(
            f"there is no way from {before.name} to {after.name}",
            no_arrow(table, before, after),
            "",
        )
        for table, before, after in (
            (r.DATA_TASK_TRANSITIONS, r.DataTaskState.RUNNING, r.DataTaskState.FINISHED),
            (r.DATA_TASK_TRANSITIONS, r.DataTaskState.RUNNING, r.DataTaskState.INTERRUPTED),
            (r.ITERATION_TRANSITIONS, r.IterationState.OPEN, r.IterationState.FINISHED),
            (r.ITERATION_TRANSITIONS, r.IterationState.OPEN, r.IterationState.COLLECTED),
            (r.PORTION_TRANSITIONS, r.PortionState.WAITING, r.PortionState.COMPUTED),
            (r.PORTION_TRANSITIONS, r.PortionState.COMPUTED, r.PortionState.WAITING),
            (r.PORTION_TRANSITIONS, r.PortionState.COMPUTED, r.PortionState.FREE),
        )
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=[bug.what for bug in BUGS])
def test_simulation_finds_bug(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_service, "KINDS", bug.kinds)
    for seed in range(bug.first_seed, bug.first_seed + SEEDS_MAX):
        with pytest.MonkeyPatch.context() as patch:
            bug.plant(patch)
            try:
                simulate_data_service(seed, bug.faults)
                continue
            except AssertionError as error:
                assert str(error).startswith(bug.promise), error  # noqa: PT017
            except Exception:  # the state is inconsistent: the simulation reports this, too
                pass
        simulate_data_service(seed, bug.faults)  # nothing else was wrong
        return
    pytest.fail(f"{SEEDS_MAX} seeds from {bug.first_seed} on did not see that {bug.what}")


# -- coordinated reads -----------------------------------------------------------------------------


def before_all_have_it(self: CoordinatedDelivery, event: TaskReplied) -> TaskReplied:
    if event.error is not None:
        return event
    kind, elements, (next_round, _) = event.value
    return event._replace(value=(kind, elements, (next_round, next_round)))


def one_round_late(self: CoordinatedDelivery, event: News) -> News:
    late = {task: end + 1 for task, end in event.end_rounds.items()}
    return event._replace(end_rounds=late)


def though_it_is_held(patch: pytest.MonkeyPatch) -> None:
    """A consumer that has reported where it stops hears that it may go on."""
    news: dict[CoordinatedDelivery, News] = {}

    def handle(former: Any, self: CoordinatedDelivery, event: Any, now: float) -> Any:
        if isinstance(event, News):
            news[self] = event
            return former(self, event, now)
        held = self in news and news[self].hold
        before = former(self, news[self]._replace(hold=False), now) if held else []
        return [*before, *former(self, event, now)]

    around(CoordinatedDelivery, "handle", handle)(patch)


def with_a_group(patch: pytest.MonkeyPatch) -> None:
    """The next group after a skip is lost."""
    skipped: set[RoundsMachine] = set()

    def add(former: Any, self: RoundsMachine, *args: Any) -> None:
        if self in skipped:
            skipped.discard(self)
        else:
            former(self, *args)

    def note(self: RoundsMachine, effect: Any) -> Any:
        if effect.kind == SKIP:
            skipped.add(self)
        return effect

    around(RoundsMachine, "add", add)(patch)
    replies(note)(patch)


def replies(alter: Callable[[RoundsMachine, Any], Any]) -> Plant:
    """The replies of a task are altered."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        for name in ("add_request", "expired", "serve"):
            around(
                RoundsMachine,
                name,
                lambda former, self, *args: [alter(self, each) for each in former(self, *args)],
            )(patch)

    return plant


def as_many_as_each_wants(self: RoundsMachine, effect: Any) -> Any:
    if effect.kind != SOME:
        return effect
    wanted = effect.reply.wanted
    elements = effect.value[: 1 + wanted.consumer]
    return effect._replace(value=elements, tag=(wanted.round + len(elements), effect.tag[1]))


def skipped_when_repeated(patch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[RoundsMachine, int, int]] = set()

    def alter(self: RoundsMachine, effect: Any) -> Any:
        if effect.kind != SOME:
            return effect
        wanted = effect.reply.wanted
        key = self, wanted.consumer, wanted.round
        if key in seen:
            return effect._replace(kind=SKIP, value=None)
        seen.add(key)
        return effect

    replies(alter)(patch)


def unanswered(former: Any, self: RoundsMachine, wanted: Any, reply: Any) -> Any:
    """The reply to a request is lost if no other request has its reply at the same time."""
    made = former(self, wanted, reply)
    return [] if len(made) == 1 and made[0].reply is reply else made


ROUNDS_BUGS: list[Bug] = [
    Bug(
        "a consumer shows what others may not have",
        altered(CoordinatedDelivery, TaskReplied, before_all_have_it),
        "",
    ),
    Bug(
        "a consumer shows rounds after the end",
        altered(CoordinatedDelivery, News, one_round_late),
        "",
    ),
    Bug(
        "a held consumer begins a round",
        though_it_is_held,
        "C",
    ),
    Bug(
        "what is lost is not told to the dispatcher",
        around(CoordinatedDelivery, "watch_args", lambda former, self: (former(self)[0], {})),
        "consumer",
    ),
    Bug("a round that is skipped takes a group with it", with_a_group, "K2", 925),
    Bug("consumers get different numbers of rounds", replies(as_many_as_each_wants), ""),
    Bug("a lost answer is skipped when it is asked for again", skipped_when_repeated, ""),
    Bug(
        "what is answered at once is not answered",
        around(RoundsMachine, "add_request", unanswered),
        "",
    ),
]


@pytest.mark.parametrize("bug", ROUNDS_BUGS, ids=[bug.what for bug in ROUNDS_BUGS])
def test_simulation_finds_bug_of_coordinated_reads(bug: Bug) -> None:
    for seed in range(bug.first_seed, bug.first_seed + SEEDS_MAX):
        with pytest.MonkeyPatch.context() as patch:
            bug.plant(patch)
            try:
                simulate_rounds(seed)
                continue
            except AssertionError as error:
                assert str(error).startswith(bug.promise), error  # noqa: PT017
        simulate_rounds(seed)  # nothing else was wrong
        return
    pytest.fail(f"{SEEDS_MAX} seeds from {bug.first_seed} on did not see that {bug.what}")
