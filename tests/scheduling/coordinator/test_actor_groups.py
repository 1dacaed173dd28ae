"""Groups of actors: calls of all members, places, collectives, and deaths of members."""

from __future__ import annotations

import gc
import os
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.work import until
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.scheduling.coordinator.actor_groups import MemberDeath, OnDeath, RestartBudget


class Member:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def pid(self) -> int:
        return os.getpid()

    def count_to(self, end: int) -> Iterator[int]:
        yield from range(end)

    def place(self) -> tuple[int, int]:
        me = zd.current_actor()
        return me.rank, me.size

    def sum(self, x: Any) -> Any:
        return zd.current_actor().group.all_reduce(x)

    def meet(self) -> int:
        zd.current_actor().group.barrier("here")
        return zd.current_actor().rank

    def sleep_by_rank(self) -> int:
        time.sleep(0.1 * (1 - zd.current_actor().rank))
        return zd.current_actor().rank

    def die(self, rank: int) -> int:
        if zd.current_actor().rank == rank:
            os._exit(7)
        return rank

    def wait_for(self, path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.005)


@pytest.fixture
def coordinator(in_processes: ClusterCoordinator) -> ClusterCoordinator:
    return in_processes


def test_method_of_class_calls_all_members(coordinator: ClusterCoordinator) -> None:
    team = coordinator.actors(Member, 2, 3)
    assert team[Member.add](2).result(20) == [5, 5]
    assert team[1][Member.add](2).result(20) == 7
    with pytest.raises(TypeError, match="is no public method"):
        team["add"]  # type: ignore[call-overload]


def test_call_of_group_gives_one_list(coordinator: ClusterCoordinator) -> None:
    team = coordinator.actors(Member, 3, 5)
    value = team.add(2)
    assert value.result(30) == [7, 7, 7]
    assert value.done()
    assert team[1].add(1).result(20) == 8
    assert team.add(0).result(20) == [7, 8, 7]
    assert len(team) == 3


def test_members_know_their_places(coordinator: ClusterCoordinator) -> None:
    team = coordinator.actors(Member, 3)
    assert team.place().result(30) == [(0, 3), (1, 3), (2, 3)]


def test_completed_members_come_first(coordinator: ClusterCoordinator) -> None:
    team = coordinator.actors(Member, 2)
    team.place().result(30)
    assert [value.result() for value in team.sleep_by_rank.as_completed()] == [1, 0]


def test_value_of_group_is_input_of_function(coordinator: ClusterCoordinator) -> None:
    team = coordinator.actors(Member, 2, 4)
    assert coordinator.submit(sum, team.add(1)).result(30) == 10


@pytest.mark.shares_cluster
def test_collectives_work_inside_group(coordinator: ClusterCoordinator) -> None:
    team = coordinator.actors(Member, 3)
    for _ in range(2):
        for total in team.sum(np.arange(4.0)).result(60):
            np.testing.assert_array_equal(total, 3 * np.arange(4.0))
    assert team.meet().result(60) == [0, 1, 2]


def test_actor_without_group_has_no_collectives(coordinator: ClusterCoordinator) -> None:
    member = coordinator.actor(Member)
    with pytest.raises(errors.FailedPreconditionError, match="has no group"):
        member.sum(1.0).result(20)
    with pytest.raises(errors.FailedPreconditionError, match="for methods of an actor"):
        zd.current_actor()


def test_death_fails_group_and_names_member(
    coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    team = coordinator.actors(Member, 3)
    team.place().result(30)
    waiting = team[0].wait_for(str(tmp_path / "never"))
    with pytest.raises(errors.ActorLostError, match="exit code 7"):
        team[1].die(1).result(20)
    with pytest.raises(errors.ActorLostError, match="member 1 of its group has died"):
        waiting.result(20)
    with pytest.raises(errors.ActorLostError):
        team.add(1).result(20)
    assert [(death.rank, death.action) for death in team.deaths] == [(1, "fail")]


def test_supervisor_hears_of_death_and_restart(coordinator: ClusterCoordinator) -> None:
    deaths: queue.Queue[MemberDeath] = queue.Queue()
    options = coordinator.options(on_death="restart", supervisor=deaths.put)
    team = options.actors(Member, 2, 1)
    assert team.add(1).result(30) == [2, 2]
    assert team.die(0).exception(20) is not None
    death = deaths.get(timeout=20)
    assert (death.rank, death.action) == (0, "restart")
    assert "exit code 7" in death.reason
    assert team.add(1).result(30) == [2, 3]


@pytest.mark.shares_cluster
def test_restart_all_begins_new_generation(coordinator: ClusterCoordinator) -> None:
    deaths: queue.Queue[MemberDeath] = queue.Queue()
    options = coordinator.options(on_death="restart_all", supervisor=deaths.put)
    team = options.actors(Member, 2)
    assert team.sum(1.0).result(60) == [2.0, 2.0]
    team[1].die(1)
    assert deaths.get(timeout=20).action == "restart_all"
    assert team.add(1).result(30) == [1, 1]
    assert team.sum(2.0).result(60) == [4.0, 4.0]


def test_dropped_group_ends(coordinator: ClusterCoordinator) -> None:
    team = coordinator.actors(Member, 2)
    pids = team.pid().result(20)
    del team
    gc.collect()
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def test_unfinished_call_keeps_supervision(coordinator: ClusterCoordinator) -> None:
    deaths: queue.SimpleQueue[MemberDeath] = queue.SimpleQueue()
    value = coordinator.options(supervisor=deaths.put).actors(Member, 2).die(1)
    gc.collect()
    assert deaths.get(timeout=20).rank == 1
    assert value.exception(20) is not None


def test_killed_group_ends_its_calls(coordinator: ClusterCoordinator) -> None:
    team = coordinator.actors(Member, 2)
    value = team.wait_for("/none")
    coordinator.kill(team)
    assert all(isinstance(v.exception(20), errors.ActorLostError) for v in value.values)
    assert team.deaths == []


def test_group_does_not_travel(coordinator: ClusterCoordinator) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"pass list\(group\)"):
        coordinator.submit(len, coordinator.actors(Member, 2))


def test_generator_of_group_is_refused(coordinator: ClusterCoordinator) -> None:
    with pytest.raises(TypeError, match="call it at each member"):
        coordinator.actors(Member, 2).count_to(3)


def test_restarts_are_bounded_in_a_time() -> None:
    budget = RestartBudget(OnDeath.RESTART, 2, 10.0)
    times = (0.0, 1.0, 2.0, 10.5, 10.6, 11.5)
    actions = [budget.member_died(now) for now in times]
    restart, fail = OnDeath.RESTART, OnDeath.FAIL
    assert actions == [restart, restart, fail, restart, fail, restart]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on_death": "retry"}, "did you mean"),
        ({"name": "team"}, "belongs to its program"),
        ({"supervisor": 3}, "wants a callable"),
    ],
)
def test_wrong_option_of_group_is_refused(
    coordinator: ClusterCoordinator, options: dict[str, Any], text: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        coordinator.options(**options).actors(Member, 2)
