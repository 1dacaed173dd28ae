"""Which client's call begins next, and which arguments are admitted: the promises of
rpc/admission_machine.py."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from zmqdist.rpc.admission_machine import FairAdmission, StallDetector

ALL, UNASKED, CLIENT, CLIENT_UNASKED = 1000, 500, 100, 50


def turns() -> FairAdmission:
    return FairAdmission(ALL, UNASKED, CLIENT, CLIENT_UNASKED)


def drained(machine: FairAdmission) -> list[object]:
    """Return the calls that begin now, in order."""
    begun = []
    while (item := machine.next()) is not None:
        begun.append(item)
    return begun


def entered(machine: FairAdmission) -> list[object]:
    """Return the calls whose arguments are admitted now, in order."""
    items = []
    while (item := machine.let_in()) is not None:
        items.append(item)
    return items


def test_clients_take_turns() -> None:
    machine = turns()
    for number in range(5):
        machine.ready("greedy", number, f"greedy {number}")
    for client in ("one", "other"):
        machine.ready(client, 0, f"{client} 0")
    assert drained(machine) == [
        "greedy 0",
        "one 0",
        "other 0",
        "greedy 1",
        "greedy 2",
        "greedy 3",
        "greedy 4",
    ]
    assert (len(machine), machine.count) == (0, 0)


def test_returning_client_queues_behind_waiting_ones() -> None:
    machine = turns()
    machine.ready("a", 1, "a1")
    machine.ready("b", 1, "b1")
    assert machine.next() == "a1"
    machine.ready("a", 2, "a2")
    assert drained(machine) == ["b1", "a2"]


def test_arguments_are_admitted_up_to_bound_of_client() -> None:
    machine = turns()
    for number in range(5):
        machine.announced("a", number, 40, number)
    assert entered(machine) == [0, 1]
    machine.ready("a", 1, "one")
    assert machine.let_in() is None  # the call has arrived, and has not begun
    assert machine.next() == "one"
    assert entered(machine) == [2]
    assert machine.pulled == 80


def test_arguments_are_admitted_up_to_bound_of_all() -> None:
    machine = FairAdmission(100, UNASKED, CLIENT, CLIENT_UNASKED)
    for client in ("a", "b", "c"):
        for number in range(3):
            machine.announced(client, number, 25, f"{client}{number}")
    assert entered(machine) == ["a0", "b0", "c0", "a1"]
    machine.dropped("c", 0)
    assert entered(machine) == ["b1"]


def test_oversized_call_is_admitted_alone() -> None:
    machine = turns()
    machine.announced("a", 1, 10, "small")
    machine.announced("a", 2, 400, "large")
    machine.announced("b", 1, 10, "other")
    assert entered(machine) == ["small", "other"]
    machine.dropped("a", 1)
    assert entered(machine) == ["large"]


def test_small_calls_do_not_starve_large_call() -> None:
    machine = FairAdmission(100, UNASKED, 100, CLIENT_UNASKED)
    machine.announced("a", 0, 25, "a0")
    machine.announced("b", 0, 90, "large")
    for number in range(1, 9):
        machine.announced("a", number, 25, f"a{number}")
    assert entered(machine) == ["a0"]
    machine.dropped("a", 0)
    assert entered(machine) == ["large"]


def test_call_above_total_bound_waits_for_others() -> None:
    machine = turns()
    machine.announced("a", 1, 10, "small")
    machine.announced("b", 1, 5 * ALL, "huge")
    assert entered(machine) == ["small"]
    machine.ready("a", 1, "small")
    machine.next()
    assert entered(machine) == ["huge"]


def test_excess_unasked_bytes_are_refused() -> None:
    machine = turns()
    assert machine.arrived("a", 1, 30) == ""
    assert machine.arrived("a", 2, 30) == (
        "calls of this client that have not begun hold 30 bytes here, of at most 50"
    )
    assert machine.arrived("b", 1, 30) == ""
    machine.dropped("a", 1)
    assert machine.arrived("a", 2, 30) == ""


def test_unasked_bytes_of_all_clients_are_bounded() -> None:
    machine = turns()
    for number in range(10):
        assert machine.arrived(number, 0, 50) == ""
    assert "of at most 500" in machine.arrived("late", 0, 1)
    assert (len(machine), machine.unasked) == (10, 500)
    assert not machine.dropped("late", 0)


def test_single_call_of_any_size_is_accepted() -> None:
    assert turns().arrived("a", 1, 10 * ALL) == ""


def test_requested_arguments_leave_room_for_small_calls() -> None:
    machine = turns()
    machine.announced("a", 1, 10 * ALL, "large")
    assert entered(machine) == ["large"]
    assert machine.arrived("a", 2, 50) == machine.arrived("b", 1, 50) == ""


@pytest.mark.parametrize("where", ["outside", "let in", "ready"])
def test_dropped_call_leaves_nothing_and_never_begins(where: str) -> None:
    machine = turns()
    machine.announced("a", 1, 40, "item")
    if where != "outside":
        entered(machine)
    if where == "ready":
        machine.ready("a", 1, "item")
    assert machine.dropped("a", 1) == (where != "let in")
    assert not machine.dropped("a", 1)
    assert machine.next() is machine.let_in() is None
    assert (len(machine), machine.count, machine.pulled, machine.unasked) == (0, 0, 0, 0)


def test_disconnected_client_leaves_nothing() -> None:
    machine = turns()
    machine.arrived("a", 1, 10)
    machine.ready("a", 1, "ready")
    for number in (2, 3, 4):
        machine.announced("a", number, 90, number)
    entered(machine)
    machine.client_lost("a")
    assert machine.next() is machine.let_in() is None
    assert (len(machine), machine.count, machine.pulled, machine.unasked) == (0, 0, 0, 0)
    assert not machine.dropped("a", 2)


def test_stop_cuts_off_calls_without_arguments() -> None:
    machine = turns()
    machine.announced("a", 1, 90, "let in")
    assert entered(machine) == ["let in"]
    machine.announced("a", 2, 90, "outside")
    machine.arrived("b", 1, 30)
    machine.arrived("b", 2, 10)
    machine.ready("b", 2, "ready")
    machine.ready(None, 3, "small")
    assert machine.cut_off(False) == [("a", 2, "outside"), ("a", 1, None), ("b", 1, None)]
    assert (machine.pulled, machine.unasked, machine.let_in()) == (0, 10, None)
    assert machine.next() == "ready"
    assert machine.cut_off(True) == [(None, 3, "small")]
    assert machine.next() is None
    assert (len(machine), machine.count, machine.pulled, machine.unasked) == (0, 0, 0, 0)


@pytest.mark.parametrize("seed", range(10))
def test_bounds_and_turns_hold_at_random(
    seed: int,
) -> None:
    rng = random.Random(seed)
    machine = turns()
    coming: set[tuple[int, int]] = set()
    waiting: set[tuple[int, int]] = set()
    begun: set[tuple[int, int]] = set()
    behind: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    sizes: dict[tuple[int, int], int] = {}
    for number in range(600):
        call = (rng.randrange(5), number)
        roll = rng.random()
        if roll < 0.3:
            sizes[call] = rng.randrange(1, 90)
            machine.announced(*call, sizes[call], call)
        elif roll < 0.5:
            if not machine.arrived(*call, rng.randrange(40)):
                machine.ready(*call, call)
                waiting.add(call)
        elif roll < 0.7 and coming:
            call = rng.choice(sorted(coming))
            coming.discard(call)
            machine.ready(*call, call)
            waiting.add(call)
        elif roll < 0.75 and coming | waiting:
            call = rng.choice(sorted(coming | waiting))
            machine.dropped(*call)
            coming.discard(call)
            waiting.discard(call)
        elif (item := machine.next()) is not None:
            assert item in waiting - begun
            waiting.discard(item)
            begun.add(item)
            for client in {client for client, _ in waiting} - {item[0]}:
                behind[client][item[0]] += 1
                # one turn may have passed before the call arrived
                assert behind[client][item[0]] <= 2
            behind.pop(item[0], None)
            for client in set(behind) - {client for client, _ in waiting}:
                del behind[client]
        coming.update(entered(machine))  # type: ignore[arg-type]
        assert machine.pulled == sum(sizes.get(each, 0) for each in coming | waiting) <= ALL
        assert machine.count == len(waiting)
    for call in coming:
        machine.ready(*call, call)
    while len(machine):
        drained(machine)
        for call in entered(machine):  # type: ignore[assignment]
            machine.ready(*call, call)
    assert (machine.count, machine.pulled, machine.unasked) == (0, 0, 0)


# -- no call ends ----------------------------------------------------------------------------------


def test_jam_is_reported_once() -> None:
    jam = StallDetector(10.0)
    assert not jam.look(True, 5, 0.0)
    assert jam.deadline == 10.0
    assert jam.look(True, 5, 10.0)
    assert not jam.look(True, 5, 20.0)
    assert not jam.look(True, 6, 30.0)  # a call has ended
    assert not jam.look(True, 6, 39.0)
    assert jam.look(True, 6, 40.0)
    assert not jam.look(False, 6, 45.0)
    assert jam.deadline is None


def test_calls_that_end_are_no_jam() -> None:
    jam = StallDetector(10.0)
    assert not any(jam.look(True, second // 9, float(second)) for second in range(200))
