"""Which host a role is placed on."""

from __future__ import annotations

from zmqdist.launch.hosts import HostSlots


def test_roles_go_to_host_with_fewest() -> None:
    slots = HostSlots({"a": None, "b": 1, "c": None})
    assert [slots.assign(f"worker:{index}") for index in range(6)] == ["a", "b", "c", "a", "c", "a"]


def test_restarted_role_returns_to_its_host() -> None:
    slots = HostSlots({"a": 1, "b": 1})
    assert [slots.assign(role) for role in ("worker:0", "worker:1", "worker:0")] == ["a", "b", "a"]


def test_role_of_lost_host_moves() -> None:
    slots = HostSlots({"a": None, "b": 2})
    assert [slots.assign(role) for role in ("worker:0", "worker:1", "ps:0")] == ["a", "b", "a"]
    slots.lose("a")
    assert slots.hosts == ["b"]
    assert slots.assign("worker:0") == "b"
    assert slots.assign("ps:0") is None, "b has two slots"


def test_released_slot_is_free() -> None:
    slots = HostSlots({"a": 1})
    assert slots.assign("worker:0") == "a"
    assert slots.assign("worker:1") is None
    slots.release("worker:0")
    assert slots.assign("worker:1") == "a"


def test_room_known_with_bounded_hosts() -> None:
    assert HostSlots({"a": 2, "b": 3}).room == 5
    assert HostSlots({"a": 2, "b": None}).room is None
