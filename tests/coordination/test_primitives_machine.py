"""The keeper of locks, semaphores, queues and events: tables of events, with the replies to each."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest

from zmqdist import limits
from zmqdist.coordination.primitives_machine import (
    ITEM_OVERHEAD_BYTES,
    TRANSITIONS,
    Hold,
    PrimitiveRequest,
    Primitives,
    RequestState,
)
from zmqdist.coordination.replies import Effect, ReplyValue
from zmqdist.errors import ABORTED, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, InternalError
from zmqdist.transitions import enter

LEASE_S = 10.0
A, B, C = 1, 2, 3
LOCK, PLACES, JOBS, STOP = ("lock", "l"), ("semaphore", "s"), ("queue", "q"), ("event", "e")
SIZES = {"lock": 1, "semaphore": 2}


@dataclass
class Keeper:
    """The machine, the time, and what it has replied to each ticket, a text like "a1"."""

    settled_at: float = -inf
    now: float = 0.0
    replies: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machine = Primitives(LEASE_S, self.settled_at)

    @classmethod
    def of_clients(cls, *clients: int, settled_at: float = -inf) -> Keeper:
        keeper = cls(settled_at)
        for client in clients:
            keeper.open(client)
        return keeper

    def tell(self, effects: list[Effect]) -> dict[str, Any]:
        """Record the replies, and return those of this event."""
        news = {}
        for effect in effects:
            ticket = str(effect.ticket)
            assert ticket not in self.replies, "the machine replied twice"
            is_value = isinstance(effect, ReplyValue)
            news[ticket] = effect.value if is_value else -effect.code
        self.replies |= news
        return news

    def open(self, client: int, *holds: Hold) -> Any:
        ticket = f"open {client} {len(self.replies)}"
        return self.tell(self.machine.opened(ticket, client, holds, self.now))[ticket]

    def ask(self, client: int, number: int, verb: str, key: Any, **more: Any) -> dict[str, Any]:
        size = more.pop("size", SIZES.get(key[0]))
        wait_s = more.pop("wait_s", inf)
        demand = PrimitiveRequest(client, number, verb, key, size, due=self.now + wait_s, **more)
        ticket = f"{'?abc'[client]}{number}"
        return self.tell(self.machine.requested(ticket, demand, self.now))

    def renew(self, client: int, confirmed: Any = (), withdrawn: Any = ()) -> dict[str, Any]:
        ticket = f"renew {client} {len(self.replies)}"
        effects = self.machine.renewed(ticket, client, confirmed, withdrawn, self.now)
        news = self.tell(effects)
        own = news.pop(ticket)
        return news if own is None else {"renewed": own, **news}

    def pass_time(self, seconds: float) -> dict[str, Any]:
        """Let time pass, with a tick at each deadline."""
        end, news = self.now + seconds, dict[str, Any]()
        while self.machine.deadline <= end:
            self.now = max(self.now, self.machine.deadline)
            news |= self.tell(self.machine.ticked(self.now))
            assert self.machine.deadline > self.now, "the machine has the same deadline again"
        self.now = end
        return news


def test_lock_passes_along_its_line() -> None:
    keeper = Keeper.of_clients(A, B, C)
    assert keeper.ask(A, 1, "acquire", LOCK) == {"a1": 1}
    assert keeper.ask(B, 1, "acquire", LOCK) == {}
    assert keeper.ask(C, 1, "acquire", LOCK) == {}
    assert keeper.renew(A, withdrawn=[1]) == {"b1": 2}
    assert keeper.renew(B, withdrawn=[1]) == {"c1": 3}
    assert keeper.renew(C, withdrawn=[1]) == {}
    assert len(keeper.machine) == 0


def test_semaphore_has_its_number_of_places() -> None:
    keeper = Keeper.of_clients(A, B)
    assert keeper.ask(A, 1, "acquire", PLACES) == {"a1": 1}
    assert keeper.ask(A, 2, "acquire", PLACES) == {"a2": 2}
    assert keeper.ask(B, 1, "acquire", PLACES) == {}
    assert keeper.ask(B, 2, "look", PLACES) == {"b2": [2, 0, False, 2]}
    assert keeper.renew(A, withdrawn=[2]) == {"b1": 3}


def test_late_release_of_lost_client_changes_nothing() -> None:
    keeper = Keeper.of_clients(A, B)
    keeper.ask(A, 1, "acquire", LOCK)
    keeper.ask(B, 1, "acquire", LOCK)
    keeper.pass_time(LEASE_S / 2)
    keeper.renew(B)
    assert keeper.pass_time(LEASE_S / 2) == {"b1": 2}
    assert keeper.renew(A, withdrawn=[1]) == {"renewed": -ABORTED}
    assert keeper.ask(A, 2, "put", JOBS, item=b"x") == {"a2": -ABORTED}
    assert keeper.ask(B, 2, "look", LOCK) == {"b2": [1, 0, False, 1]}


def test_late_open_of_former_client_ends_no_later_client() -> None:
    keeper = Keeper.of_clients(A)
    keeper.tell(keeper.machine.opened("open", B, [], keeper.now, former=A))
    keeper.ask(B, 1, "acquire", LOCK)
    late = keeper.tell(keeper.machine.opened("late", A, [], keeper.now, former=B))
    assert late == {"late": -ABORTED}
    assert keeper.ask(B, 2, "look", LOCK) == {"b2": [1, 0, False, 1]}


def test_killed_client_frees_places_and_leaves_lines() -> None:
    keeper = Keeper.of_clients(A, B, C)
    for number, client in ((1, A), (1, B), (2, A), (1, C)):
        keeper.ask(client, number, "acquire", LOCK)
    assert keeper.tell(keeper.machine.lost(A)) == {"a2": -ABORTED, "b1": 2}
    assert keeper.tell(keeper.machine.lost(A)) == {}
    assert keeper.tell(keeper.machine.lost(B)) == {"c1": 3}


def test_dropped_request_leaves_its_line() -> None:
    keeper = Keeper.of_clients(A, B, C)
    for client in (A, B, C):
        keeper.ask(client, 1, "acquire", LOCK)
    assert keeper.tell(keeper.machine.dropped(B, 1)) == {}
    assert keeper.tell(keeper.machine.dropped(A, 1)) == {}, "it holds, so it does not wait"
    assert keeper.tell(keeper.machine.dropped(9, 1)) == {}
    assert keeper.renew(A, withdrawn=[1]) == {"c1": 2}


@pytest.mark.parametrize("wait_s", [0.0, 3.0])
@pytest.mark.parametrize(
    ("verb", "key", "size"),
    [("acquire", LOCK, 1), ("get", JOBS, None), ("wait", STOP, None)],
)
def test_late_request_ends_without_effect(verb: str, key: Any, size: Any, wait_s: float) -> None:
    keeper = Keeper.of_clients(A, B)
    if verb == "acquire":
        keeper.ask(A, 1, "acquire", LOCK)
    news = keeper.ask(B, 1, verb, key, size=size, wait_s=wait_s)
    assert {**news, **keeper.pass_time(wait_s)} == {"b1": None}
    assert keeper.machine.waiting == 0
    assert keeper.machine.deadline > keeper.now


def test_late_put_leaves_no_bytes() -> None:
    keeper = Keeper.of_clients(A, B)
    keeper.ask(A, 1, "put", JOBS, item=b"1", size=1)
    assert keeper.ask(B, 1, "put", JOBS, item=b"2", size=1, wait_s=1.0) == {}
    assert keeper.machine.nbytes == 2 * (1 + ITEM_OVERHEAD_BYTES)
    assert keeper.pass_time(1.0) == {"b1": None}
    assert keeper.machine.nbytes == 1 + ITEM_OVERHEAD_BYTES
    assert keeper.ask(A, 2, "get", JOBS) == {"a2": b"1"}
    assert keeper.renew(A, confirmed=[2]) == {}
    assert (keeper.machine.nbytes, len(keeper.machine)) == (0, 0)


def test_queue_is_first_in_first_out() -> None:
    keeper = Keeper.of_clients(A, B)
    for number in range(1, 4):
        keeper.ask(A, number, "put", JOBS, item=b"%d" % number)
    assert [keeper.ask(B, number, "get", JOBS)[f"b{number}"] for number in (1, 2, 3)] == [
        b"1",
        b"2",
        b"3",
    ]


def test_full_queue_holds_putters_back_in_order() -> None:
    keeper = Keeper.of_clients(A, B)
    assert keeper.ask(A, 1, "put", JOBS, item=b"1", size=1) == {"a1": True}
    assert keeper.ask(A, 2, "put", JOBS, item=b"2", size=1) == {}
    assert keeper.ask(A, 3, "put", JOBS, item=b"3", size=1, wait_s=0.0) == {"a3": None}
    assert keeper.ask(B, 1, "get", JOBS) == {"b1": b"1", "a2": True}
    assert keeper.ask(B, 2, "get", JOBS) == {"b2": b"2"}


def test_getter_waits_for_put() -> None:
    keeper = Keeper.of_clients(A, B, C)
    assert keeper.ask(A, 1, "get", JOBS) == {}
    assert keeper.ask(B, 1, "get", JOBS) == {}
    assert keeper.ask(C, 1, "put", JOBS, item=b"1") == {"c1": True, "a1": b"1"}
    assert keeper.ask(C, 2, "put", JOBS, item=b"2") == {"c2": True, "b1": b"2"}


def test_unconfirmed_items_of_dead_getters_return_in_order() -> None:
    keeper = Keeper.of_clients(A, B, C)
    for number in range(1, 4):
        keeper.ask(C, number, "put", JOBS, item=b"%d" % number)
    assert keeper.ask(A, 1, "get", JOBS) == {"a1": b"1"}
    assert keeper.ask(B, 1, "get", JOBS) == {"b1": b"2"}
    keeper.tell(keeper.machine.lost(A))
    keeper.tell(keeper.machine.lost(B))
    assert [keeper.ask(C, number, "get", JOBS)[f"c{number}"] for number in (4, 5, 6)] == [
        b"1",
        b"2",
        b"3",
    ]


def test_many_items_of_dead_getter_return_quickly() -> None:
    keeper = Keeper.of_clients(A, B)
    count = 20_000
    for number in range(1, count + 1):
        keeper.ask(A, number, "get", JOBS)
    for number in range(1, count + 1):
        keeper.ask(B, number, "put", JOBS, item=b"%d" % number)
    keeper.tell(keeper.machine.lost(A))
    for number in range(1, count + 1):
        assert keeper.ask(B, count + number, "get", JOBS) == {f"b{count + number}": b"%d" % number}


def test_confirmed_item_is_gone_with_its_getter() -> None:
    keeper = Keeper.of_clients(A, B)
    keeper.ask(B, 1, "put", JOBS, item=b"1")
    keeper.ask(A, 1, "get", JOBS)
    assert keeper.renew(A, confirmed=[1]) == {}
    assert keeper.renew(A, confirmed=[1]) == {}, "a second time"
    keeper.tell(keeper.machine.lost(A))
    assert keeper.ask(B, 2, "get", JOBS, wait_s=0.0) == {"b2": None}


def test_confirmation_releases_no_place() -> None:
    keeper = Keeper.of_clients(A, B)
    keeper.ask(A, 1, "acquire", LOCK)
    assert keeper.renew(A, confirmed=[1]) == {}
    assert keeper.ask(B, 1, "acquire", LOCK, wait_s=0.0) == {"b1": None}


def test_withdrawn_item_goes_to_next_getter() -> None:
    keeper = Keeper.of_clients(A, B)
    keeper.ask(A, 1, "get", JOBS)
    keeper.ask(B, 1, "get", JOBS)
    keeper.ask(B, 2, "put", JOBS, item=b"1")
    assert keeper.renew(A, withdrawn=[1]) == {"b1": b"1"}


def test_event_ends_all_waits_until_it_is_cleared() -> None:
    keeper = Keeper.of_clients(A, B, C)
    assert keeper.ask(A, 1, "wait", STOP) == keeper.ask(B, 1, "wait", STOP) == {}
    assert keeper.ask(C, 1, "set", STOP) == {"c1": True, "a1": True, "b1": True}
    assert keeper.ask(A, 2, "wait", STOP) == {"a2": True}
    keeper.tell(keeper.machine.lost(C))
    assert keeper.ask(A, 3, "look", STOP) == {"a3": [0, 0, True, 0]}
    assert keeper.ask(A, 4, "clear", STOP) == {"a4": True}
    assert keeper.ask(A, 5, "wait", STOP) == {}
    assert len(keeper.machine) == 1


def test_new_keeper_waits_for_places_of_earlier_one() -> None:
    keeper = Keeper.of_clients(A, settled_at=LEASE_S)
    assert keeper.ask(A, 1, "acquire", LOCK) == {}
    assert keeper.ask(A, 2, "put", JOBS, item=b"1") == {"a2": True}, "queues need not wait"
    assert keeper.open(B, Hold(7, LOCK, 1, 5)) == [7]
    keeper.pass_time(LEASE_S / 2)
    keeper.renew(A)
    keeper.renew(B)
    assert keeper.pass_time(LEASE_S / 2) == {}, "the lock is B's"
    assert keeper.renew(B, withdrawn=[7]) == {"a1": 1}


def test_new_keeper_grants_free_places_once_settled() -> None:
    keeper = Keeper.of_clients(A, settled_at=1.0)
    assert keeper.ask(A, 1, "acquire", LOCK) == {}
    assert keeper.ask(A, 2, "acquire", PLACES, wait_s=0.5) == {}
    assert keeper.pass_time(0.5) == {"a2": None}
    assert keeper.pass_time(0.5) == {"a1": 1}


@pytest.mark.parametrize(
    ("settled_at", "holds", "kept"),
    [
        (LEASE_S, [Hold(1, LOCK, 1, 5)], []),
        (LEASE_S, [Hold(1, PLACES, 2, 5), Hold(2, PLACES, 2, 6)], [1, 2]),
        (LEASE_S, [Hold(1, PLACES, 2, 5), Hold(2, PLACES, 3, 6)], [1]),
        (LEASE_S, [Hold(1, ("lock", "m"), 1, 5), Hold(1, ("lock", "n"), 1, 5)], [1]),
        (-inf, [Hold(1, ("lock", "free"), 1, 5)], []),
        (0.0, [Hold(1, ("lock", "free"), 1, 5)], []),
    ],
    ids=["taken", "two places", "other size", "number twice", "first keeper", "too late"],
)
def test_places_of_earlier_keeper_are_restored(
    settled_at: float, holds: list[Hold], kept: list[int]
) -> None:
    keeper = Keeper(settled_at)
    keeper.open(A, Hold(3, LOCK, 1, 4))
    assert keeper.open(B, *holds) == kept
    assert keeper.open(B, *holds) == kept, "the message comes twice"


@pytest.mark.parametrize("bound", ["PRIMITIVES_MAX", "PRIMITIVE_REQUESTS_MAX", "QUEUED_BYTES_MAX"])
def test_request_beyond_bound_changes_nothing(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper.of_clients(A, B)
    keeper.ask(A, 1, "acquire", LOCK)
    keeper.ask(A, 2, "put", JOBS, item=b"1")
    before = len(keeper.machine), keeper.machine.nbytes, keeper.machine.waiting
    monkeypatch.setattr(limits, bound, 200 if bound == "QUEUED_BYTES_MAX" else 2)
    if bound == "QUEUED_BYTES_MAX":
        assert keeper.ask(B, 1, "put", JOBS, item=b"2") == {"b1": -RESOURCE_EXHAUSTED}
    else:
        keeper.ask(A, 3, "acquire", LOCK)
        assert keeper.ask(A, 4, "wait", STOP) == {"a4": -RESOURCE_EXHAUSTED}
        keeper.tell(keeper.machine.dropped(A, 3))
    assert before == (len(keeper.machine), keeper.machine.nbytes, keeper.machine.waiting)


def test_clients_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PRIMITIVE_CLIENTS_MAX", 2)
    keeper = Keeper.of_clients(A, B)
    assert keeper.open(C) == -RESOURCE_EXHAUSTED
    keeper.pass_time(LEASE_S)
    assert keeper.open(C) == []


def test_number_in_use_is_refused() -> None:
    keeper = Keeper.of_clients(A)
    keeper.ask(A, 1, "acquire", LOCK)
    assert keeper.tell(
        keeper.machine.requested("again", PrimitiveRequest(A, 1, "get", JOBS), keeper.now)
    ) == {"again": -INVALID_ARGUMENT}
    assert len(keeper.machine) == 1


@pytest.mark.parametrize("size", [1, 3])
def test_primitive_in_use_refuses_other_size(size: int) -> None:
    keeper = Keeper.of_clients(A)
    keeper.ask(A, 1, "acquire", PLACES, size=2)
    assert keeper.ask(A, 2, "acquire", PLACES, size=size) == {"a2": -INVALID_ARGUMENT}
    keeper.renew(A, withdrawn=[1])
    assert keeper.ask(A, 3, "acquire", PLACES, size=size) == {"a3": 2}


def test_size_of_queue_comes_from_first_process_that_names_it() -> None:
    keeper = Keeper.of_clients(A)
    assert keeper.ask(A, 1, "put", JOBS, item=b"1") == {"a1": True}
    assert keeper.ask(A, 2, "put", JOBS, item=b"2", size=1) == {}
    assert keeper.ask(A, 3, "put", JOBS, item=b"3") == {}
    assert keeper.ask(A, 4, "get", JOBS, size=2) == {"a4": -INVALID_ARGUMENT}


def test_idle_primitives_take_no_memory() -> None:
    keeper = Keeper.of_clients(A)
    for number in range(1, 1000):
        keeper.ask(A, number, "acquire", ("lock", str(number)))
        keeper.renew(A, withdrawn=[number])
        keeper.ask(A, 1000 + number, "get", ("queue", str(number)), wait_s=0.0)
    assert len(keeper.machine) == 0


def test_served_waits_with_time_outs_leave_no_rows() -> None:
    keeper = Keeper.of_clients(A, B)
    for number in range(1, 2000):
        keeper.ask(A, number, "get", JOBS, wait_s=3600.0)
        keeper.ask(B, number, "put", JOBS, item=b"1")
        keeper.renew(A, confirmed=[number])
    rows = keeper.machine._dues  # reach: a leak has no other sign
    assert len(rows) < 200


def test_thousand_waiters_get_lock_in_order() -> None:
    keeper = Keeper.of_clients(A)
    order: list[str] = []
    for number in range(1, 1001):
        order += keeper.ask(A, number, "acquire", LOCK)
    for number in range(1, 1001):
        order += keeper.renew(A, withdrawn=[number])
    assert order == [f"a{number}" for number in range(1, 1001)]


@pytest.mark.parametrize("before", RequestState)
@pytest.mark.parametrize("after", RequestState)
def test_request_only_makes_listed_transitions(before: RequestState, after: RequestState) -> None:
    if after in TRANSITIONS[before]:
        assert enter(TRANSITIONS, before, after) is after
    else:
        with pytest.raises(InternalError):
            enter(TRANSITIONS, before, after)
