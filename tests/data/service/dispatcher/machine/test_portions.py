"""Portions: the promises E1 to E7 of data/service/dispatcher/machine/portions.py, one by one and in
random histories."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from zmqdist.data.service.dispatcher.machine import events as ev
from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine import runs as sets
from zmqdist.data.service.dispatcher.machine.machine import DataDispatcherMachine
from zmqdist.data.service.dispatcher.machine.state import DurableState
from zmqdist.data.service.dispatcher.machine.tables import Rules
from zmqdist.errors import ABORTED, FAILED_PRECONDITION, NOT_FOUND, RESOURCE_EXHAUSTED, UNAVAILABLE
from zmqdist.events import Ticked

NUMBER = 77
NONE_YET = "none yet"


class World:
    """A machine with a journal that commits each record at once, unless it is `full`."""

    def __init__(
        self,
        positions: int = 20,
        repetitions: int = 1,
        grain: int = 1,
        ordered: bool = False,
        consumers: int = 0,
    ) -> None:
        self.rules = Rules(fault_tolerant=True)
        self.machine = DataDispatcherMachine(self.rules, NUMBER, 0.0)
        self.now = 0.0
        self.records: list[bytes] = []
        self.full = False
        self.answers: dict[int, Any] = {}
        self.tokens = 0
        self.terms = r.Terms("a", r.DYNAMIC, consumers, delivery=r.EXACTLY_ONCE, ordered=ordered)
        self.grain = (positions, repetitions, grain)
        self.handle(ev.RegisterRequest(self.token(), 1, "a", "print", "{}"))

    def token(self) -> int:
        self.tokens += 1
        return self.tokens

    def handle(self, event: ev.Event) -> None:
        effects = self.machine.handle(event, self.now)
        while effects:
            more: list[ev.Effect] = []
            for effect in effects:
                match effect:
                    case ev.ReplyToRequest(token, value):
                        self.answers[token] = value
                    case ev.FailRequest(token, code, message):
                        self.answers[token] = (code, message)
                    case ev.CommitJournal() if self.full:
                        more += self.machine.handle(
                            ev.JournalFailed(RESOURCE_EXHAUSTED, "disk full"), self.now
                        )
                    case ev.Reload():
                        self.machine.restore(self.replayed(), [], self.now)
                    case ev.CommitJournal(records):
                        self.records += records
                        more += self.machine.handle(ev.JournalCommitted(), self.now)
            effects = more

    def ask(self, kind: Any, *args: Any, **more: Any) -> int:
        token = self.token()
        self.handle(kind(token, *args, **more))
        return token

    def answer(self, token: int) -> Any:
        return self.answers.get(token, NONE_YET)

    def worker(self, incarnation: int) -> int:
        self.handle(ev.WorkerJoined(f"worker:{incarnation}", f"host:{incarnation}", incarnation))
        return incarnation

    def open(self, saved: ev.SavedRequest | None = None, consumer: int = -1, **more: Any) -> int:
        given = {"consumer": consumer, "grain": self.grain, "saved": saved, **more}
        token = self.ask(ev.OpenRequest, self.token(), "job", 0, self.terms, (20,), **given)
        told = self.answer(token)
        if isinstance(told[1], str):
            raise AssertionError(told)
        return int(told[0])

    def task(self, incarnation: int) -> int:
        number = next(
            each.number
            for each in self.machine.state.workers.values()
            if each.incarnation == incarnation
        )
        return next(each.id for each in self.machine.state.tasks.values() if each.worker == number)

    def want(
        self, incarnation: int, client: int, count: int = 1, request: int | None = None
    ) -> int:
        request = self.token() if request is None else request
        return self.ask(
            ev.PortionsRequest, NUMBER, self.task(incarnation), incarnation, client, request, count
        )

    def given(self, incarnation: int, client: int, count: int = 1) -> list[int]:
        told = self.answer(self.want(incarnation, client, count))
        return [] if told == NONE_YET else [each[0] for each in told]

    def acknowledge(self, client: int, *marks: tuple[int, int, bool]) -> Any:
        return self.answer(self.ask(ev.AcknowledgeRequest, NUMBER, client, marks))

    @property
    def iteration(self) -> r.Iteration:
        return next(iter(self.machine.state.iterations.values()))

    @property
    def portions(self) -> r.PortionsEntry:
        assert self.iteration.portions is not None
        return self.iteration.portions

    def saved(
        self,
        client: int,
        done: list[tuple[int, int]],
        open_: list[tuple[int, int]] = [],  # noqa: B006
    ) -> ev.SavedRequest:
        p = self.portions
        cut = p.positions, p.repetitions, p.length
        return ev.SavedRequest(
            NUMBER, self.iteration.id, client, cut, len(p.next), tuple(done), tuple(open_)
        )

    def replayed(self) -> DurableState:
        state = DurableState(number=NUMBER)
        for record in self.records:
            state.apply(r.decode(record))
        return state


@pytest.mark.parametrize(
    ("positions", "grain", "length"),
    [
        (10, 1, 1),
        (256, 1, 1),
        (1024, 1, 4),
        (1024, 3, 3),
        (10**9, 1, 1024),
        (10**9, 100, 1000),
        (10, 5000, 5000),
        (-1, 1, 256),
    ],
)
def test_the_length_of_a_portion_is_a_multiple_of_the_grain_and_bounded(
    positions: int, grain: int, length: int
) -> None:
    assert r.PortionsEntry.cut(positions, 1, grain, 1).length == length


def test_portions_cover_each_position_of_each_repetition_once() -> None:
    portions = r.PortionsEntry.cut(1000, 3, 7, 1)
    places = [portions.place_of(number) for number in range(int(portions.total()))]
    covered = [
        (repetition, position)
        for repetition, start, length in places
        for position in range(start, start + length)
    ]
    assert covered == [
        (repetition, position) for repetition in range(3) for position in range(1000)
    ]


def test_runs_are_sets() -> None:
    chance = random.Random(5)
    for _ in range(300):
        runs: sets.Runs = []
        other: sets.Runs = []
        wanted: dict[int, set[int]] = {0: set(), 1: set()}
        for _ in range(chance.randrange(8)):
            which = chance.randrange(2)
            start = chance.randrange(20)
            stop = start + chance.randrange(5)
            sets.add((runs, other)[which], start, stop)
            wanted[which] |= set(range(start, stop))
        assert list(sets.members(runs)) == sorted(wanted[0])
        assert all(one[1] < two[0] for one, two in pairwise(runs))
        assert list(sets.members(sets.without(runs, other))) == sorted(wanted[0] - wanted[1])
        assert {n for n in range(30) if sets.end_of(runs, n) is not None} == wanted[0]


def test_e1_a_portion_is_given_to_one_task_for_one_client_and_again_to_a_repeated_request() -> None:
    world = World()
    first, second = world.worker(1), world.worker(2)
    a, b = world.open(), world.open()
    token = world.want(first, a, 2, request=99)
    assert [each[0] for each in world.answer(token)] == [0, 1]
    assert world.given(second, a) == [2]
    assert world.given(first, b) == [3]
    again = world.want(first, a, 2, request=99)
    assert world.answer(again) == world.answer(token)


def test_e2_the_iteration_ends_with_the_last_acknowledgement() -> None:
    world = World(positions=2)
    incarnation = world.worker(1)
    client = world.open()
    assert world.given(incarnation, client) + world.given(incarnation, client) == [0, 1]
    waits = world.want(incarnation, client)
    world.acknowledge(client, (1, 5, True), (0, 4, False))
    assert world.answer(waits) == NONE_YET
    assert world.iteration.state is not r.IterationState.FINISHED
    world.acknowledge(client, (0, 5, True))
    assert world.iteration.state is r.IterationState.FINISHED
    assert world.answer(waits) == []
    late = world.open()
    assert world.answer(world.ask(ev.WatchRequest, NUMBER, late, 0))[2] is True


def test_e2_an_iteration_without_positions_ends_at_once() -> None:
    world = World(positions=0)
    world.worker(1)
    world.open()
    assert world.iteration.state is r.IterationState.FINISHED


def test_e3_portions_of_a_lost_worker_are_given_out_first_without_acknowledged_elements() -> None:
    world = World()
    one, two = world.worker(1), world.worker(2)
    client = world.open()
    assert world.given(one, client) == [0]
    waits = world.want(one, client, 2)
    assert [each[0] for each in world.answer(waits)] == [1, 2]
    world.acknowledge(client, (0, 3, True), (1, 2, False))
    world.handle(ev.WorkerGone(one))
    token = world.want(two, client)
    assert world.answer(token) == [(1, 0, 1, 1, 2)]


def test_e3_a_worker_that_gets_its_place_back_from_another_continues() -> None:
    """The worker must not take a refusal meanwhile for the end, because no task would request
    portions for the client any more."""
    world = World(positions=1)
    one = world.worker(1)
    client = world.open()
    task = world.task(one)
    world.handle(ev.WorkerGone(one))
    world.handle(ev.WorkerJoined("worker:1", "host:2", 2, (), False))
    assert (
        world.answer(world.ask(ev.PortionsRequest, NUMBER, task, one, client, 50, 1))[0]
        == UNAVAILABLE
    )
    world.handle(ev.WorkerGone(2))
    world.handle(ev.WorkerJoined("worker:1", "host:1", one, (), False))
    assert world.task(one) == task
    assert world.given(one, client) == [0]


def test_e3_a_waiting_request_gets_freed_portions_and_is_refused_when_its_worker_is_lost() -> None:
    """The request came over another connection than the broken one. Without a reply the task would
    wait for ever."""
    world = World(positions=1)
    one, two = world.worker(1), world.worker(2)
    client = world.open()
    assert world.given(one, client) == [0]
    waits = world.want(two, client)
    assert world.answer(waits) == NONE_YET
    world.handle(ev.WorkerGone(one))
    assert [each[0] for each in world.answer(waits)] == [0]
    world.worker(one)
    waits = world.want(one, client)
    assert world.answer(waits) == NONE_YET
    world.handle(ev.WorkerGone(one))
    assert world.answer(waits)[0] == UNAVAILABLE


def test_e3_a_worker_whose_connection_broke_is_given_nothing_until_it_is_back() -> None:
    """The request came over another connection than the broken one; no process would compute the
    portions, or give them out again."""
    world = World(positions=2)
    one, two = world.worker(1), world.worker(2)
    client = world.open()
    world.handle(ev.WorkerGone(one))
    assert world.answer(world.want(one, client))[0] == UNAVAILABLE
    assert world.given(two, client) == [0]
    world.worker(one)
    assert world.given(one, client) == [1]


def test_e3_in_order_portions_before_one_that_is_computed_alone_are_given_out() -> None:
    """Two workers die one after the other. A third has the later portion already, which cannot be
    acknowledged before the earlier one."""
    world = World(ordered=True)
    one, two, three = world.worker(1), world.worker(2), world.worker(3)
    client = world.open()
    assert world.given(one, client) == [0]
    assert world.given(two, client) == [1]
    world.handle(ev.WorkerGone(two))
    assert world.given(three, client) == [1]
    waits = world.want(three, client, 4)
    assert world.answer(waits) == NONE_YET
    world.handle(ev.WorkerGone(one))
    assert [each[0] for each in world.answer(waits)] == [0]
    waits = world.want(three, client)
    assert world.answer(waits) == NONE_YET
    world.acknowledge(client, (0, 1, True), (1, 1, True))
    assert [each[0] for each in world.answer(waits)] == [2]


def test_e3_the_elements_of_a_lost_reply_are_computed_again() -> None:
    world = World(positions=1)
    incarnation = world.worker(1)
    client = world.open()
    assert world.given(incarnation, client) == [0]
    waits = world.want(incarnation, client)
    world.ask(ev.MissedRequest, NUMBER, client, incarnation)
    assert [each[0] for each in world.answer(waits)] == [0]


def test_e3_a_worker_that_was_restarted_while_no_dispatcher_ran_has_no_portions() -> None:
    world = World(positions=1)
    one = world.worker(1)
    client = world.open()
    assert world.given(one, client) == [0]
    world.handle(ev.WorkerJoined("worker:1", "host:1", 2))
    assert world.given(2, client) == [0]


def test_e4_a_released_client_leaves_the_rest_to_others() -> None:
    world = World()
    incarnation = world.worker(1)
    a, b = world.open(), world.open()
    assert world.given(incarnation, a) == [0]
    world.acknowledge(a, (0, 3, False))
    world.ask(ev.ReleaseRequest, NUMBER, a)
    token = world.want(incarnation, b)
    assert world.answer(token) == [(0, 0, 0, 1, 3)]
    assert world.acknowledge(a, (0, 9, True))[0] == NOT_FOUND


def test_e4_a_client_that_is_silent_is_released() -> None:
    world = World()
    incarnation = world.worker(1)
    a = world.open()
    assert world.given(incarnation, a) == [0]
    world.ask(ev.WatchRequest, NUMBER, a, 0)
    world.now = world.rules.gc_check_s + 1
    b = world.open()
    world.handle(Ticked())
    assert a not in world.machine.state.clients
    assert world.given(incarnation, b) == [0]


@pytest.mark.parametrize("taken", [False, True])
def test_e5_a_reader_that_loads_a_state_gets_the_elements_acknowledged_after_it(
    taken: bool,
) -> None:
    world = World(positions=5)
    incarnation = world.worker(1)
    old = world.open()
    for number in range(5):
        assert world.given(incarnation, old) == [number]
    world.acknowledge(old, *((number, 4, True) for number in range(5 if taken else 3)))
    assert (world.iteration.state is r.IterationState.FINISHED) == taken
    new = world.open(world.saved(old, [(0, 1)], [(1, 2)]))
    assert world.iteration.state is not r.IterationState.FINISHED
    told = [world.answer(world.want(incarnation, new))[0] for _ in range(4)]
    assert [(each[0], each[4]) for each in told] == [(1, 2), (2, 0), (3, 0), (4, 0)]
    world.acknowledge(new, *((number, 4, True) for number in range(1, 5)))
    assert world.iteration.state is r.IterationState.FINISHED


def test_e5_the_earlier_reader_gets_an_error_when_another_takes_over() -> None:
    world = World()
    incarnation = world.worker(1)
    old = world.open()
    watch = world.ask(
        ev.WatchRequest, NUMBER, old, world.answer(world.ask(ev.WatchRequest, NUMBER, old, 0))[0]
    )
    new = world.open(world.saved(old, []))
    assert world.answer(watch) is None
    for kind, args in ((ev.WatchRequest, (0,)), (ev.AcknowledgeRequest, ((),))):
        code, message = world.answer(world.ask(kind, NUMBER, old, *args))
        assert code == ABORTED
        assert "taken over" in message
    newest = world.open(world.saved(old, []))  # the same state again
    assert list(world.machine.state.clients) == [newest] != [new]
    assert world.given(incarnation, newest) == [0]


def test_e5_a_closed_reader_may_continue_if_no_other_has_continued_with_its_part() -> None:
    world = World()
    incarnation = world.worker(1)
    old = world.open()
    assert world.given(incarnation, old) == [0]
    world.acknowledge(old, (0, 3, False))
    saved = world.saved(old, [], [(0, 1)])
    world.ask(ev.ReleaseRequest, NUMBER, old)
    new = world.open(saved)
    assert world.answer(world.want(incarnation, new)) == [(0, 0, 0, 1, 1)]


def test_e5_a_state_whose_elements_would_be_lost_is_refused() -> None:
    world = World()
    incarnation = world.worker(1)
    old, other = world.open(), world.open()
    assert world.given(incarnation, old) == [0]
    world.acknowledge(old, (0, 3, False))
    saved = world.saved(old, [], [(0, 1)])
    world.ask(ev.ReleaseRequest, NUMBER, old)
    assert world.given(incarnation, other) == [0]
    before = len(world.machine.state.clients)
    with pytest.raises(AssertionError, match=r"elements 1 to 2 of portion 0 would be lost"):
        world.open(saved)
    assert len(world.machine.state.clients) == before


@pytest.mark.parametrize("left", ["open", "released", "finished"])
def test_e5_a_reader_that_continues_from_an_earlier_pass_gets_all_again_that_it_had_of_this_one(
    left: str,
) -> None:
    world = World(positions=4)
    incarnation = world.worker(1)
    old, other = world.open(reader=7), world.open(reader=8)
    for client in (old, other) * 2:
        world.given(incarnation, client)
    mine, others = (
        [number for number, each in world.portions.open.items() if each.client == c]
        for c in (old, other)
    )
    world.acknowledge(other, (others[0], 5, True))
    world.acknowledge(old, (mine[0], 3, True), (mine[1], 2, False))
    if left == "finished":
        world.acknowledge(old, (mine[1], 3, True))
        world.acknowledge(other, (others[1], 3, True))
    if left != "open":
        world.ask(ev.ReleaseRequest, NUMBER, old)
    assert (world.iteration.state is r.IterationState.FINISHED) == (left == "finished")
    new = world.open(reader=7, again=True)
    told = [world.answer(world.want(incarnation, new))[0] for _ in range(2)]
    assert [(each[0], each[4]) for each in told] == [(number, 0) for number in mine]
    assert other in world.machine.state.clients
    assert world.open(reader=9, again=True)
    assert world.iteration.state is not r.IterationState.FINISHED
    world.acknowledge(new, *((number, 3, True) for number in mine))
    world.acknowledge(other, (others[1], 3, True))
    assert world.iteration.state is r.IterationState.FINISHED
    assert world.replayed() == world.machine.state


@pytest.mark.parametrize("done", [False, True])
def test_e5_a_reader_that_loads_a_state_gets_no_elements_that_another_had_before_it(
    done: bool,
) -> None:
    world = World()
    incarnation = world.worker(1)
    old, other = world.open(), world.open()
    saved = world.saved(old, [])
    assert world.given(incarnation, other) == [0]
    world.acknowledge(other, (0, 3, False))
    world.ask(ev.ReleaseRequest, NUMBER, other)
    assert world.given(incarnation, old) == [0]
    world.acknowledge(old, (0, 5, done))
    new = world.open(saved)
    assert world.answer(world.want(incarnation, new)) == [(0, 0, 0, 1, 3)]


def test_e5_without_a_state_a_reader_joins_a_pass_beside_the_earlier_one() -> None:
    world = World(positions=4)
    incarnation = world.worker(1)
    old = world.open(reader=7)
    assert world.given(incarnation, old) == [0]
    world.acknowledge(old, (0, 3, True))
    new = world.open(reader=7)
    assert world.given(incarnation, new) == [1]
    assert list(world.machine.state.clients) == [old, new]


@pytest.mark.parametrize("left", ["open", "released"])
def test_e5_a_state_of_another_dispatcher_may_be_loaded_again(left: str) -> None:
    world = World(positions=6)
    incarnation = world.worker(1)
    saved = msgspec.structs.replace(
        world.saved(world.open(reader=8), [(0, 2)], [(2, 1), (5, 2)]), state=NUMBER + 1
    )
    old = world.open(saved, reader=7)
    for number, skipped in ((2, 1), (5, 2), (3, 0)):
        assert world.answer(world.want(incarnation, old)) == [(number, 0, number, 1, skipped)]
    world.acknowledge(old, (2, 3, True), (3, 3, True), (5, 3, False))
    if left == "released":
        world.ask(ev.ReleaseRequest, NUMBER, old)
    new = world.open(saved, reader=7)
    told = [world.answer(world.want(incarnation, new)) for _ in range(4)]
    assert sorted(told) == [
        [(2, 0, 2, 1, 1)],
        [(3, 0, 3, 1, 0)],
        [(4, 0, 4, 1, 0)],
        [(5, 0, 5, 1, 2)],
    ]
    world.acknowledge(new, *((number, 3, True) for number in (2, 3, 4, 5)))
    assert world.iteration.state is r.IterationState.FINISHED
    assert world.replayed() == world.machine.state


def test_e5_a_pass_that_others_have_continued_is_refused_to_the_reader_of_a_state() -> None:
    world = World()
    incarnation = world.worker(1)
    old, other = world.open(reader=7), world.open(reader=8)
    assert world.given(incarnation, old) == [0]
    world.acknowledge(old, (0, 3, False))
    world.ask(ev.ReleaseRequest, NUMBER, old)
    assert world.given(incarnation, other) == [0]
    before = len(world.machine.state.clients)
    with pytest.raises(AssertionError, match=r"elements 0 to 2 of portion 0 would be lost"):
        world.open(reader=7, again=True)
    assert len(world.machine.state.clients) == before


def test_e5_a_state_of_another_dataset_is_refused() -> None:
    world = World(positions=20)
    client = world.open()
    saved = world.saved(client, [])
    other = World(positions=21)
    other.open()
    with pytest.raises(
        AssertionError, match=rf"\({FAILED_PRECONDITION}, .*the state is of a dataset"
    ):
        other.open(saved)


def test_e5_another_dispatcher_leaves_out_the_elements_in_the_state() -> None:
    world = World(positions=6)
    saved = ev.SavedRequest(NUMBER + 1, 2000, 3000, (6, 1, 1), 1, ((0, 2), (3, 4)), ((4, 7),))
    incarnation = world.worker(1)
    client = world.open(saved)
    told = [world.answer(world.want(incarnation, client))[0] for _ in range(3)]
    assert [(each[0], each[4]) for each in told] == [(4, 7), (2, 0), (5, 0)]
    world.acknowledge(client, *((number, 9, True) for number in (2, 4, 5)))
    assert world.iteration.state is r.IterationState.FINISHED


def test_e6_consumers_have_fixed_shares_and_each_ends_by_itself() -> None:
    world = World(positions=5, consumers=2)
    one, two = world.worker(1), world.worker(2)
    even, odd = world.open(consumer=0), world.open(consumer=1)
    assert world.given(one, odd) + world.given(two, odd) == [1, 3]
    assert world.given(two, even) + world.given(one, even) == [0, 2]
    version = world.answer(world.ask(ev.WatchRequest, NUMBER, odd, 0))[0]
    watch = world.ask(ev.WatchRequest, NUMBER, odd, version)
    world.acknowledge(odd, (1, 1, True), (3, 1, True))
    assert world.answer(watch)[2] is True
    assert world.iteration.state is not r.IterationState.FINISHED
    assert world.given(one, odd) == []


def test_e6_a_second_reader_of_a_consumer_takes_over() -> None:
    world = World(consumers=2)
    incarnation = world.worker(1)
    first = world.open(consumer=1)
    assert world.given(incarnation, first) == [1]
    world.acknowledge(first, (1, 3, False))
    second = world.open(consumer=1)
    assert world.answer(world.want(incarnation, second)) == [(1, 0, 1, 1, 3)]
    assert world.answer(world.ask(ev.WatchRequest, NUMBER, first, 0))[0] == ABORTED


def test_e6_in_order_nothing_is_given_out_far_ahead() -> None:
    world = World(positions=200, ordered=True)
    incarnation = world.worker(1)
    client = world.open()
    numbers = []
    while given := world.given(incarnation, client, 100):
        numbers += given
    assert numbers == list(range(4))
    world.acknowledge(client, (1, 1, True))
    assert world.given(incarnation, client) == []
    world.acknowledge(client, (0, 1, True))
    assert world.given(incarnation, client, 100) == [5]  # the earlier request got 4


def test_e7_a_portion_that_kills_workers_ends_the_iteration() -> None:
    world = World(positions=1000)
    client = world.open()
    for incarnation in (1, 2, 3):
        world.worker(incarnation)
        token = world.want(incarnation, client, 4)
        assert [each[0] for each in world.answer(token)] == (
            [0, 1, 2, 3] if incarnation == 1 else [0]
        )
        if incarnation > 1:
            assert world.given(incarnation, client, 4) == []
        world.handle(ev.WorkerGone(incarnation))
    failed = world.answer(world.ask(ev.WatchRequest, NUMBER, client, 0))[5]
    assert "positions 0 to 2" in failed
    assert all(f"worker:{incarnation}" in failed for incarnation in (1, 2, 3))


def test_e7_a_death_counts_when_the_reader_saw_it_before_the_dispatcher() -> None:
    world = World()
    client = world.open()
    for incarnation in (1, 2, 3):
        world.worker(incarnation)
        assert world.given(incarnation, client) == [0]
        world.ask(ev.MissedRequest, NUMBER, client, incarnation)
        world.handle(ev.WorkerGone(incarnation))
    assert "positions 0 to 0" in world.portions.failed


def computed_by_a_fourth_worker(
    how_freed: Callable[[World, int, int], object],
) -> tuple[World, int]:
    """Have three workers in turn get portion 0, which is freed from each of them, and a fourth
    compute it."""
    world = World(positions=1)
    client = world.open()
    for incarnation in (1, 2, 3, 4):
        world.worker(incarnation)
        assert world.given(incarnation, client) == [0]
        if incarnation < 4:
            how_freed(world, client, incarnation)
    return world, client


def reply_lost(world: World, client: int, incarnation: int) -> None:
    world.ask(ev.MissedRequest, NUMBER, client, incarnation)


def ended_for_its_worker(world: World, client: int, incarnation: int) -> None:
    world.ask(ev.CrashReport, NUMBER, world.task(incarnation), incarnation, "")


def reply_lost_and_ended_for_its_worker(world: World, client: int, incarnation: int) -> None:
    reply_lost(world, client, incarnation)
    ended_for_its_worker(world, client, incarnation)


def reply_lost_and_asked_for_more(world: World, client: int, incarnation: int) -> None:
    reply_lost(world, client, incarnation)
    assert world.given(incarnation, client) == [0]
    reply_lost(world, client, incarnation)


def test_e7_deaths_count_when_the_next_worker_died_before_the_dispatcher_saw_the_first() -> None:
    world, _ = computed_by_a_fourth_worker(reply_lost)
    for incarnation in (1, 2, 3):
        world.handle(ev.WorkerGone(incarnation))
    assert "worker:1, worker:2, worker:3" in world.portions.failed


@pytest.mark.parametrize("how_freed", [ended_for_its_worker, reply_lost_and_ended_for_its_worker])
def test_e7_a_worker_whose_process_no_longer_computes_the_portion_is_not_charged(
    how_freed: Callable[[World, int, int], object],
) -> None:
    world, _ = computed_by_a_fourth_worker(how_freed)
    for incarnation in (1, 2, 3):
        world.handle(ev.WorkerGone(incarnation))
    assert world.portions.open[0].charged == []


@pytest.mark.parametrize("how_freed", [reply_lost, reply_lost_and_asked_for_more])
def test_e7_a_worker_that_has_asked_for_more_is_not_charged_with_what_it_had(
    how_freed: Callable[[World, int, int], object],
) -> None:
    world, client = computed_by_a_fourth_worker(how_freed)
    for incarnation in (1, 2, 3):
        assert world.given(incarnation, client) == []
        world.handle(ev.WorkerGone(incarnation))
    assert world.portions.open[0].charged == []
    assert world.replayed().iterations == world.machine.state.iterations


def test_e7_a_worker_whose_reply_was_lost_and_that_left_is_not_charged() -> None:
    world, _ = computed_by_a_fourth_worker(reply_lost)
    for incarnation in (1, 2, 3):
        world.handle(ev.WorkerGone(incarnation, left=True))
    portion = world.portions.open[0]
    assert (portion.charged, portion.missed) == ([], [])


def test_e7_a_worker_whose_address_another_process_has_is_charged() -> None:
    world = World()
    client = world.open()
    for incarnation in (1, 2, 3, 4):
        world.handle(ev.WorkerJoined(f"worker:{incarnation}", "host:0", incarnation))
        world.handle(ev.WorkerGone(incarnation - 1))  # it becomes known only now
        if incarnation < 4:
            assert world.given(incarnation, client) == [0]
    assert "worker:1, worker:2, worker:3" in world.portions.failed


def test_a_portion_in_the_journal_of_an_earlier_version_can_be_read() -> None:
    row = msgspec.msgpack.encode([5, 6, 7, 8, ["worker:1 (fell over)"], 9, {10: "worker:2"}])
    portion = msgspec.msgpack.decode(row, type=r.Portion)
    assert (portion.charged, portion.missed) == (["worker:1 (fell over)", "worker:2"], [])


def test_e7_a_process_of_a_worker_that_died_is_charged_as_a_worker_is() -> None:
    world = World(positions=1)
    client, incarnation = world.open(), world.worker(1)
    for death in range(3):
        assert world.given(incarnation, client) == [0]
        waits = world.want(incarnation, client)
        for _ in range(2 if death < 2 else 1):  # the second report is a repetition
            assert (
                world.answer(
                    world.ask(
                        ev.CrashReport, NUMBER, world.task(incarnation), incarnation, "fell over"
                    )
                )
                is None
            )
        if death < 2:
            assert world.portions.open[0].deaths == ["worker:1 (fell over)"] * (death + 1)
            assert world.answer(waits) == NONE_YET
    assert "3 processes died" in world.portions.failed
    assert world.iteration.state is r.IterationState.FINISHED


def test_e7_a_process_that_was_ended_for_its_worker_is_not_charged() -> None:
    world = World()
    client, incarnation = world.open(), world.worker(1)
    assert world.given(incarnation, client) == [0]
    world.ask(ev.CrashReport, NUMBER, world.task(incarnation), incarnation, "")
    assert world.portions.open[0].deaths == []
    assert world.given(incarnation, client) == [0]


def test_e7_a_worker_that_had_only_lost_its_connection_is_not_charged() -> None:
    world = World(positions=1000)
    client = world.open()
    for incarnation in (1, 2, 1, 2, 1):
        world.worker(incarnation)
        assert world.given(incarnation, client, 4) == [0, 1, 2, 3], (
            "no worker has died because of it, so it is not given out alone"
        )
        world.handle(ev.WorkerGone(incarnation))
        assert world.portions.open[0].charged == [f"worker:{incarnation}"]
        world.worker(incarnation)
        assert world.portions.open[0].charged == []
        world.handle(ev.WorkerGone(incarnation, left=True))
    assert world.portions.failed == ""


def test_e7_the_next_incarnation_of_a_worker_revokes_no_charge() -> None:
    world = World()
    client = world.open()
    for incarnation in (1, 2, 3):
        world.handle(ev.WorkerJoined("worker:0", "host:0", incarnation))
        assert world.given(incarnation, client) == [0]
        world.handle(ev.WorkerGone(incarnation))
    assert "3 processes died" in world.portions.failed


def test_e7_a_process_that_died_stays_charged_when_its_worker_loses_its_connection_and_is_back() -> (
    None
):
    world = World()
    client, incarnation = world.open(), world.worker(1)
    assert world.given(incarnation, client) == [0]
    world.ask(ev.CrashReport, NUMBER, world.task(incarnation), incarnation, "fell over")
    assert world.given(incarnation, client) == [0]
    world.handle(ev.WorkerGone(incarnation))
    assert world.portions.open[0].charged == ["worker:1 (fell over)", "worker:1"]
    world.worker(incarnation)
    assert world.portions.open[0].charged == ["worker:1 (fell over)"]


def test_e7_a_charge_that_was_revoked_while_the_journal_failed_does_not_count_at_the_next_loss() -> (
    None
):
    world = World()
    client = world.open()
    for incarnation in (1, 2):
        world.worker(incarnation)
        assert world.given(incarnation, client) == [0]
        world.handle(ev.WorkerGone(incarnation))
    world.worker(3)
    assert world.given(3, client) == [0]
    world.full = True
    world.worker(1)
    world.full = False
    assert world.portions.open[0].charged == ["worker:1", "worker:2"]
    world.handle(ev.WorkerGone(3))
    assert world.portions.open[0].charged == ["worker:2", "worker:3"]
    assert world.portions.failed == ""


def test_e7_workers_that_leave_are_not_blamed() -> None:
    world = World()
    client = world.open()
    for incarnation in range(1, 6):
        world.worker(incarnation)
        assert world.given(incarnation, client) == [0]
        world.handle(ev.WorkerGone(incarnation, left=True))
    assert world.portions.failed == ""


def test_a_worker_that_has_gone_gets_no_portions() -> None:
    world = World(positions=1)
    one, two = world.worker(1), world.worker(2)
    client = world.open()
    assert world.given(one, client) == [0]
    waits = world.want(two, client)
    world.handle(ev.CallerGone(waits))
    world.handle(ev.WorkerGone(one))
    assert world.answer(waits) == NONE_YET
    assert world.portions.open[0].incarnation == 0


# -- at random -------------------------------------------------------------------------------------


class Reader:
    """A reader that acknowledges its elements, and can go back to an earlier state."""

    def __init__(self, client: int, had: dict[int, int], done: set[int]) -> None:
        self.client, self.had, self.done = client, had, done

    def state(self, world: World) -> ev.SavedRequest:
        runs: sets.Runs = []
        for number in self.done:
            sets.add(runs, number, number + 1)
        return world.saved(
            self.client, runs, [(n, count) for n, count in self.had.items() if n not in self.done]
        )


def size_of(number: int) -> int:
    return number * 7 % 4


def test_in_random_histories_each_element_is_delivered_once(seed: int) -> None:
    chance = random.Random(seed)
    world = World(
        positions=chance.choice([1, 5, 40]),
        repetitions=chance.choice([1, 2]),
        ordered=chance.random() < 0.3,
    )
    lives = [world.worker(1)]
    reader = Reader(world.open(), {}, set())
    state = (reader.state(world), {}, set())
    outstanding: dict[int, int] = {}
    holds: dict[int, list[tuple[int, int]]] = {1: []}
    total = int(world.portions.total())
    for _ in range(5000):
        if world.iteration.state is r.IterationState.FINISHED and chance.random() < 0.7:
            break
        incarnation = chance.choice(lives)
        action = chance.random()
        if (
            action < 0.3
            and incarnation not in outstanding
            and world.iteration.state is not r.IterationState.FINISHED
        ):
            outstanding[incarnation] = world.want(
                incarnation, reader.client, chance.randrange(1, 5)
            )
        elif action < 0.6 and holds[incarnation]:
            number, skip = holds[incarnation].pop(0)
            if skip <= reader.had.get(number, 0) and number not in reader.done:
                # else a reply on it was lost
                stop = (
                    size_of(number)
                    if chance.random() < 0.8
                    else chance.randrange(skip, size_of(number) + 1)
                )
                reader.had[number] = max(reader.had.get(number, 0), stop)
                if reader.had[number] == size_of(number) and (stop == size_of(number)):
                    reader.done.add(number)
                if chance.random() < 0.7:
                    world.acknowledge(
                        reader.client, (number, reader.had[number], number in reader.done)
                    )
                if stop < size_of(number):
                    world.ask(ev.MissedRequest, NUMBER, reader.client, incarnation)
        elif action < 0.7:
            marks = [(n, count, n in reader.done) for n, count in reader.had.items()]
            world.acknowledge(
                reader.client, *marks, *((n, 0, True) for n in reader.done if n not in reader.had)
            )
        elif action < 0.75:
            world.handle(ev.WorkerGone(incarnation, left=chance.random() < 0.9))
            lives.remove(incarnation)
            outstanding.pop(incarnation, None)
            new = max(holds) + 1
            lives.append(world.worker(new))
            holds[new] = []
        elif action < 0.8:
            state = (reader.state(world), dict(reader.had), set(reader.done))
        elif action < 0.83:
            reader = Reader(world.open(state[0]), dict(state[1]), set(state[2]))
            outstanding, holds = {}, {each: [] for each in holds}
            state = (reader.state(world), dict(reader.had), set(reader.done))
        for asked, token in list(outstanding.items()):
            if (told := world.answer(token)) != NONE_YET:
                del outstanding[asked]
                if told[:1] == (NOT_FOUND,):
                    continue  # the iteration has ended
                holds[asked] += [(each[0], each[4]) for each in told]
                assert all(each[4] <= reader.had.get(each[0], 0) for each in told), (
                    "an element was left out that no reader had"
                )
        assert all(portion.client in (0, reader.client) for portion in world.portions.open.values())
        if world.portions.failed:
            break
    assert r.encode(world.replayed()) == r.encode(world.machine.state)
    if not world.portions.failed:
        assert world.iteration.state is r.IterationState.FINISHED, "the iteration never ended"
        assert reader.done == set(range(total))


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize(
    ("positions", "repetitions", "grain"), [(0, 3, 1), (5, 1, 2), (700, 5, 7), (701, 4, 3)]
)
def test_the_positions_that_are_left_are_those_of_portions_that_were_not_given_out(
    positions: int, repetitions: int, grain: int, lanes: int
) -> None:
    chance = random.Random(positions + lanes)
    portions = r.PortionsEntry.cut(positions, repetitions, grain, lanes)
    portions.length *= 3
    last = int(portions.total())
    assert portions.positions_left() == positions * repetitions
    for lane in range(lanes):
        steps = len(range(lane, last, lanes))
        portions.next[lane] = chance.randint(0, steps)
        portions.skip[lane] = [
            (start, start + 2) for start in range(portions.next[lane] + 1, steps - 2, 7)
        ]
    waiting = [
        number
        for number in range(last)
        if number // lanes >= portions.next[number % lanes]
        and sets.end_of(portions.skip[number % lanes], number // lanes) is None
    ]
    left = sum(portions.place_of(number)[2] for number in waiting)
    assert portions.positions_left() == left


def test_no_number_of_positions_is_left_of_endless_data() -> None:
    assert r.PortionsEntry.cut(r.INFINITE, 1, 1, 2).positions_left() is None
    assert r.PortionsEntry.cut(5, r.INFINITE, 1, 2).positions_left() is None
