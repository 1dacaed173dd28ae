"""The size of a launched cluster: promises of launch/elasticity_machine.py, one by one."""

from __future__ import annotations

from math import inf

import pytest

from zmqdist.events import Ticked
from zmqdist.launch.elasticity_machine import (
    BACKLOG_S,
    LEAVE_MARGIN_S,
    AcceptSize,
    Closing,
    ClusterSeen,
    DrainFailed,
    DrainWorker,
    Elasticity,
    ElasticityEffect,
    KillWorker,
    RefuseSize,
    RegisteredChanged,
    RoomChanged,
    SeenWorker,
    SizeBounds,
    SizeRequested,
    StartWorker,
    StopWorker,
    WorkerEnded,
)
from zmqdist.limits import GRACE_S


def registered(count: int, bounds: SizeBounds | None = None) -> Elasticity:
    """A machine whose workers 0 to count - 1 have registered."""
    machine = Elasticity(bounds or SizeBounds(), range(count))
    machine.handle(RegisteredChanged(frozenset(range(count))), 0.0)
    return machine


def idle(*indices: int, done_count: int = 0) -> tuple[SeenWorker, ...]:
    return tuple(SeenWorker(index, 1, 0, done_count) for index in indices)


def request(
    machine: Elasticity, count: int, workers: tuple[SeenWorker, ...] = (), force: bool = False
) -> list[ElasticityEffect]:
    return machine.handle(SizeRequested(1, count, 2.0, workers, force), 10.0)


def test_request_starts_lowest_free_indices() -> None:
    machine = registered(2)
    assert request(machine, 4) == [StartWorker(2), StartWorker(3), AcceptSize(1, 4, (2, 3), ())]
    assert (machine.wanted, machine.starting) == (4, [2, 3])


def test_manual_worker_keeps_its_index() -> None:
    machine = registered(1)
    machine.handle(RegisteredChanged(frozenset({0, 1})), 1.0)
    assert request(machine, 2)[0] == StartWorker(2)


def test_request_removes_workers_with_least_loss() -> None:
    workers = (SeenWorker(0, 1, 0, 0), SeenWorker(1, 1, 1, 0), SeenWorker(2, 1, 0, 0, burden=2))
    assert request(registered(3), 1, workers)[-1] == AcceptSize(1, 1, (), (0, 1))


def test_unregistered_worker_leaves_first_by_signal() -> None:
    machine = registered(2)
    request(machine, 3)
    assert request(machine, 2, idle(0, 1)) == [StopWorker(2), AcceptSize(1, 2, (), (2,))]


def test_size_refused_unless_forced() -> None:
    machine = registered(2)
    workers = (SeenWorker(0, 1, 0, 0, 1, refused=True), SeenWorker(1, 1, 0, 0, 1, refused=True))
    assert request(machine, 1, workers) == [RefuseSize(1, refused=(1,))]
    assert (machine.wanted, machine.leaving) == (2, [])
    assert request(machine, 1, workers, force=True) == [
        DrainWorker(1, 2.0),
        AcceptSize(1, 1, (), (1,)),
    ]


@pytest.mark.parametrize(
    ("bounds", "count", "problem"),
    [
        (SizeBounds(), 0, "worker=0 is out of bounds: a cluster has min 1 and max 10000"),
        (SizeBounds(2, 4), 1, "worker=1 is out of bounds: the cluster file has min 2 and max 4"),
        (SizeBounds(2, 4), 5, "worker=5 is out of bounds: the cluster file has min 2 and max 4"),
        (
            SizeBounds(room=3, room_reason="the hosts have 3 slots"),
            4,
            "there cannot be 4 workers: the hosts have 3 slots",
        ),
    ],
)
def test_size_out_of_bounds_is_refused(bounds: SizeBounds, count: int, problem: str) -> None:
    assert request(registered(2, bounds), count) == [RefuseSize(1, problem)]


def test_index_free_after_end_of_process() -> None:
    machine = registered(2)
    request(machine, 1, idle(0, 1))
    assert request(machine, 2, idle(0, 1))[0] == StartWorker(2)
    machine.handle(WorkerEnded(1, in_order=True, restarts=False), 11.0)
    assert request(machine, 3, idle(0))[0] == StartWorker(1)


def test_start_waits_for_room() -> None:
    machine = registered(2, SizeBounds(room=2))
    request(machine, 1, idle(0, 1))
    assert request(machine, 2, idle(0, 1)) == [AcceptSize(1, 2, (), ())]
    assert machine.handle(WorkerEnded(1, in_order=True, restarts=False), 11.0) == [StartWorker(1)]


def test_size_beyond_remaining_room_is_refused() -> None:
    machine = registered(3, SizeBounds(room=4, room_reason="the hosts have 4 slots"))
    assert machine.handle(RoomChanged(2, "the hosts have 2 slots"), 1.0) == []
    machine.handle(WorkerEnded(2, in_order=False, restarts=False), 1.0)
    assert request(machine, 3) == [
        RefuseSize(1, "there cannot be 3 workers: the hosts have 2 slots")
    ]
    assert request(machine, 2, idle(0, 1)) == [AcceptSize(1, 2, (), (2,))]
    assert machine.wanted == 2


def test_worker_of_lost_host_starts_with_room() -> None:
    machine = registered(4, SizeBounds(room=4))
    assert request(machine, 3, idle(0, 1, 2, 3))[0] == DrainWorker(3, 2.0)
    machine.handle(RoomChanged(3, "the hosts have 3 slots"), 11.0)
    machine.handle(WorkerEnded(0, in_order=False, restarts=False), 11.0)
    assert request(machine, 3, idle(1, 2, 3)) == [AcceptSize(1, 3, (), ())]
    assert machine.handle(WorkerEnded(3, in_order=True, restarts=False), 12.0) == [StartWorker(0)]


def test_backlog_never_lowers_size_beyond_room() -> None:
    machine = registered(3, SizeBounds(1, 4, 5.0, room=4))
    machine.handle(RoomChanged(2, "the hosts have 2 slots"), 1.0)
    busy = (SeenWorker(0, 2, 2, 0),)
    for now in (1.0, 1.0 + BACKLOG_S):
        assert machine.handle(ClusterSeen(9, busy), now) == []
    assert machine.wanted == 3


def test_overdue_worker_killed_once() -> None:
    machine = registered(2)
    request(machine, 1, idle(0, 1))
    due = 10.0 + 2.0 + LEAVE_MARGIN_S
    assert machine.deadline == due
    assert machine.handle(Ticked(), due) == [KillWorker(1)]
    assert machine.deadline is None
    assert machine.handle(Ticked(), due + 100) == []


def test_undrained_worker_stopped_by_signal() -> None:
    machine = registered(2)
    request(machine, 1, idle(0, 1))
    assert machine.handle(DrainFailed(1), 11.0) == [StopWorker(1)]


def test_failed_worker_replaced_only_by_request() -> None:
    machine = registered(2)
    assert machine.handle(WorkerEnded(1, in_order=False, restarts=False), 1.0) == []
    assert (machine.wanted, machine.failed) == (2, [1])
    assert request(machine, 2, idle(0)) == [StartWorker(1), AcceptSize(1, 2, (1,), ())]


def test_restarting_worker_counts() -> None:
    machine = registered(2)
    assert machine.handle(WorkerEnded(1, in_order=False, restarts=True), 1.0) == []
    assert (machine.wanted, machine.starting) == (2, [1])


def test_size_follows_drained_worker_down_to_min() -> None:
    machine = registered(3, SizeBounds(2, 4, 5.0))
    assert machine.handle(WorkerEnded(2, in_order=True, restarts=False), 1.0) == []
    assert machine.wanted == 2
    assert machine.handle(WorkerEnded(1, in_order=True, restarts=False), 2.0) == [StartWorker(1)]


def test_size_grows_with_backlog_up_to_max() -> None:
    machine = registered(1, SizeBounds(1, 4, 5.0))
    busy = (SeenWorker(0, 2, 2, 0),)
    assert machine.handle(ClusterSeen(3, busy), 1.0) == []
    assert machine.handle(ClusterSeen(3, busy), 1.0 + BACKLOG_S) == [StartWorker(1), StartWorker(2)]
    assert machine.handle(ClusterSeen(50, busy), 9.0) == [], "two workers are starting"
    machine.handle(RegisteredChanged(frozenset({0, 1, 2})), 9.0)
    assert machine.handle(ClusterSeen(50, busy), 10.0) == [StartWorker(3)]


def test_work_that_a_worker_has_beyond_its_slots_waits_as_well() -> None:
    machine = registered(1, SizeBounds(1, 4, 5.0))
    machine.handle(ClusterSeen(0, (SeenWorker(0, 1, 3, 0),)), 1.0)
    assert machine.handle(ClusterSeen(0, (SeenWorker(0, 1, 3, 0),)), 2.0) == [
        StartWorker(1),
        StartWorker(2),
    ]


def test_short_burst_starts_nothing() -> None:
    machine = registered(1, SizeBounds(1, 4, 5.0))
    for now, queued in ((1.0, 9), (1.5, 0), (2.0, 9), (2.5, 9)):
        assert machine.handle(ClusterSeen(queued, idle(0)), now) == []


def test_idle_workers_leave_down_to_min() -> None:
    machine = registered(4, SizeBounds(1, 4, 5.0))
    workers = (*idle(0, 1), SeenWorker(2, 1, 0, 0, burden=1), *idle(3))
    assert machine.handle(ClusterSeen(0, workers), 1.0) == []
    assert machine.handle(ClusterSeen(0, workers), 5.9) == []
    assert machine.handle(ClusterSeen(0, workers), 6.0) == [
        DrainWorker(index, GRACE_S) for index in (3, 1, 0)
    ]
    assert machine.wanted == 1


def test_worker_with_finished_work_is_not_idle() -> None:
    machine = registered(2, SizeBounds(1, 4, 5.0))
    machine.handle(ClusterSeen(0, idle(0, 1)), 1.0)
    machine.handle(ClusterSeen(0, idle(0, 1, done_count=7)), 4.0)
    assert machine.handle(ClusterSeen(0, idle(0, 1, done_count=7)), 8.0) == []
    assert machine.handle(ClusterSeen(0, idle(0, 1, done_count=7)), 9.0) == [
        DrainWorker(1, GRACE_S)
    ]


def test_size_constant_without_bounds() -> None:
    machine = registered(2, SizeBounds(idle_s=inf))
    for now in (0.0, 50.0, 1e6):
        assert machine.handle(ClusterSeen(99, idle(0, 1)), now) == []


def test_closed_machine_refuses_requests() -> None:
    machine = registered(2, SizeBounds(1, 4, 5.0))
    machine.handle(Closing(), 1.0)
    assert request(machine, 4) == [RefuseSize(1, "the cluster shuts down")]
    assert machine.handle(WorkerEnded(1, in_order=True, restarts=False), 2.0) == []
    assert machine.deadline is None
