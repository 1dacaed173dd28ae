"""Which host a role is placed on."""

from __future__ import annotations

from zmqdist.launch.hosts import HostSlots


def test_roles_go_to_the_host_with_the_fewest_of_them_in_the_order_of_the_file() -> None:
    slots = HostSlots({"a": None, "b": 1, "c": None})
    assert [slots.place(f"worker:{index}") for index in range(6)] == ["a", "b", "c", "a", "c", "a"]


def test_a_role_that_ran_before_returns_to_its_host() -> None:
    slots = HostSlots({"a": 1, "b": 1})
    assert [slots.place(role) for role in ("worker:0", "worker:1", "worker:0")] == ["a", "b", "a"]


def test_a_role_whose_host_is_lost_is_placed_on_another() -> None:
    slots = HostSlots({"a": None, "b": 2})
    assert [slots.place(role) for role in ("worker:0", "worker:1", "ps:0")] == ["a", "b", "a"]
    slots.lose("a")
    assert slots.hosts == ["b"]
    assert slots.place("worker:0") == "b"
    assert slots.place("ps:0") is None, "b has two slots"


def test_a_slot_that_is_released_is_free_for_another_role() -> None:
    slots = HostSlots({"a": 1})
    assert slots.place("worker:0") == "a"
    assert slots.place("worker:1") is None
    slots.release("worker:0")
    assert slots.place("worker:1") == "a"


def test_the_room_of_hosts_is_known_if_each_has_a_bound() -> None:
    assert HostSlots({"a": 2, "b": 3}).room == 5
    assert HostSlots({"a": 2, "b": None}).room is None
