"""Barriers, held to the bullets of TensorFlow's coordination_service_test.cc; each test has the
name of its bullet."""

from __future__ import annotations

import pytest

from tests.coordination.coordinated import Call, cluster, worker, workers
from zmqdist.coordination.barriers_machine import Barriers
from zmqdist.errors import (
    CANCELLED,
    DEADLINE_EXCEEDED,
    FAILED_PRECONDITION,
    INTERNAL,
    INVALID_ARGUMENT,
    OK,
    RESOURCE_EXHAUSTED,
)

A, B, C = workers(3)


def test_Barrier() -> None:
    there = cluster()
    calls = [there.barrier(A), there.barrier(B)]
    assert not any(call.done for call in calls)
    calls.append(there.barrier(C))
    assert [(call.code, call.counter) for call in calls] == [(OK, 0)] * 3


def test_BarrierWithSubsetOfTasks() -> None:
    there = cluster()
    calls = [there.barrier(A, [A, B]), there.barrier(B, [B, A])]
    assert [call.code for call in calls] == [OK, OK]


def test_BarrierWithMismatchedTasks() -> None:
    there = cluster()
    calls = [there.barrier(A, [A, B]), there.barrier(B, [B, C])]
    assert [call.code for call in calls] == [INVALID_ARGUMENT] * 2
    assert (
        "worker:0 called barrier 'b' for worker:0, worker:1, worker:1 for worker:1, worker:2"
        in calls[0].message
    )


def test_BarrierByNonParticipatingTask() -> None:
    there = cluster()
    calls = [there.barrier(A, [A, B]), there.barrier(C, [A, B])]
    assert [call.code for call in calls] == [INVALID_ARGUMENT] * 2
    assert "worker:2" in calls[0].message
    first = there.barrier(C, [A, B], name="another")
    assert first.code == INVALID_ARGUMENT


def test_BarrierByNonParticipatingTaskThreeTasks() -> None:
    there = cluster()
    calls = [there.barrier(A, [A, B]), there.barrier(B, [A, B])]
    assert [call.code for call in calls] == [OK, OK]
    assert there.barrier(C, [A, B]).code == INVALID_ARGUMENT


def test_BarrierByNonClusterTask() -> None:
    there = cluster()
    call = there.barrier(A, [A, ("elsewhere", 2)])
    assert call.code == INVALID_ARGUMENT
    assert (
        "elsewhere:2 is not in the cluster, which has worker:0, worker:1, worker:2" in call.message
    )


def test_BarrierTimeout() -> None:
    there = cluster()
    calls = [there.barrier(B, timeout_s=1), there.barrier(A, timeout_s=9)]
    there.advance(0.9)
    assert not any(call.done for call in calls)
    there.advance(0.2)
    assert calls[0].code == calls[1].code == DEADLINE_EXCEEDED
    assert calls[0].message == calls[1].message
    assert "2/3 tasks came, the first was worker:1; missing: worker:2" in calls[0].message
    assert "worker:0" not in calls[0].message
    late = there.barrier(C)
    assert (late.code, late.message, late.counter) == (DEADLINE_EXCEEDED, calls[0].message, 0)


def test_a_deadline_that_a_later_caller_gives_holds_where_the_first_gave_none() -> None:
    there = cluster()
    calls = [there.barrier(A), there.barrier(B, timeout_s=1)]
    there.advance(1.1)
    assert [call.code for call in calls] == [DEADLINE_EXCEEDED] * 2


def test_a_late_task_gets_the_error_and_joins_the_others_in_the_current_round() -> None:
    there = cluster()
    for counter in range(3):
        there.barrier(A, counter=counter, timeout_s=0.1)
        there.advance(0.2)
    waiting = [there.barrier(A, counter=3), there.barrier(B, counter=0)]
    assert (waiting[1].code, waiting[1].counter) == (DEADLINE_EXCEEDED, 2)
    assert not waiting[0].done
    late = there.barrier(C, counter=0)
    assert (late.code, late.counter) == (DEADLINE_EXCEEDED, 2)
    assert [
        there.barrier(B, counter=3).done,
        there.barrier(C, counter=3).code,
        waiting[0].code,
    ] == [False, OK, OK]


def test_BarrierReturnsPreviousError() -> None:
    there = cluster()
    first = there.barrier(A)
    assert there.report(A, INTERNAL, "test_error").code == OK
    second = there.barrier(B)
    assert first.code == second.code == INTERNAL
    assert first.message == second.message
    assert "test_error" in second.message


def test_TwoConsecutiveBarriers_Succeed() -> None:
    there = cluster()
    for counter in (0, 1):
        calls = [there.barrier(task, counter=counter) for task in (A, B, C)]
        assert [(call.code, call.counter) for call in calls] == [(OK, counter)] * 3


def test_Barrier_MismatchedCounter() -> None:
    there = cluster()
    calls = [there.barrier(A, counter=0), there.barrier(B, counter=1)]
    assert [call.code for call in calls] == [INTERNAL] * 2
    assert "worker:1 came to round 1 of barrier 'b', the others to round 0" in calls[0].message


def test_a_restarted_task_that_begins_anew_fails_the_round_for_all_and_goes_on_with_them() -> None:
    there = cluster()
    for counter in range(5):
        assert [there.barrier(task, counter=counter).done for task in (A, B, C)] == [
            False,
            False,
            True,
        ]
    there.reset(C)
    assert there.register(C, 999).code == OK
    calls = [there.barrier(A, counter=5), there.barrier(C, counter=0)]
    assert [(call.code, call.counter) for call in calls] == [(INTERNAL, 5)] * 2
    assert there.barrier(B, counter=5).code == INTERNAL
    assert [there.barrier(task, counter=6).code for task in (A, B, C)][2] == OK


def test_a_restarted_task_does_not_pass_what_its_earlier_incarnation_has_passed() -> None:
    there = cluster()
    assert [there.barrier(task).code for task in (A, B, C)][2] == OK
    there.reset(C)
    there.register(C, 999)
    again = there.barrier(C)
    assert (again.code, again.counter) == (INTERNAL, 1)
    assert "was the task restarted?" in again.message


def test_a_restarted_task_that_comes_first_fails_the_next_round_for_all_and_goes_on_with_them() -> (
    None
):
    there = cluster()
    for counter in range(3):
        assert [there.barrier(task, counter=counter).done for task in (A, B, C)] == [
            False,
            False,
            True,
        ]
    there.reset(C)
    there.register(C, 999)
    again = there.barrier(C, counter=0)
    calls = [there.barrier(task, counter=3) for task in (A, B)]
    assert [(call.code, call.message, call.counter) for call in calls] == [
        (INTERNAL, again.message, 3)
    ] * 2
    assert [there.barrier(task, counter=4).code for task in (A, B, C)][2] == OK


def test_SecondBarrier_UseWrongCounter() -> None:
    there = cluster()
    assert [there.barrier(task).done for task in (A, B, C)] == [False, False, True]
    wrong = there.barrier(A, counter=2)
    assert (wrong.code, wrong.counter) == (INTERNAL, 0)
    assert [there.barrier(task, counter=1).code for task in (A, B, C)][2] == OK


def test_BarrierCancelled() -> None:
    there = cluster()
    call = there.barrier(A)
    assert there.cancel(B).code == OK
    assert call.code == CANCELLED
    assert "worker:1" in call.message
    assert there.barrier(C).code == CANCELLED


def test_CancelAfterBarrierHasPassed() -> None:
    there = cluster()
    calls = [there.barrier(task) for task in (A, B, C)]
    assert there.cancel(A).code == FAILED_PRECONDITION
    assert [call.code for call in calls] == [OK] * 3


def test_CancelBarrier_WrongCounter() -> None:
    there = cluster()
    call = there.barrier(A)
    assert there.cancel(A, counter=1).code == FAILED_PRECONDITION
    assert there.cancel(A, name="nobody has called it").code == FAILED_PRECONDITION
    assert not call.done


def test_PassedBarrierReturnsImmediately() -> None:
    there = cluster()
    for task in (A, B, C):
        there.barrier(task)
    assert there.barrier(B).code == OK


def test_BarrierFailsIfTaskIsAlreadyInError() -> None:
    there = cluster()
    there.report(A, INTERNAL, "test_error")
    call = there.barrier(B)
    assert call.code == INTERNAL
    assert "worker:0 reported an error: test_error" in call.message
    assert not there.barrier(B, [B, C], name="without it").done


def test_BarrierFailsUponTaskError() -> None:
    there = cluster()
    call = there.barrier(A)
    there.report(A, INTERNAL, "test_error")
    assert call.code == INTERNAL


def test_BarrierFailsIfTaskIsStale() -> None:
    """TensorFlow's service stops if it cannot notify its tasks, and then fails every barrier; ours
    names the task and continues."""
    there = cluster()
    call = there.barrier(A)
    for _ in range(3):
        there.advance(0.9)
        there.beat(A)
        there.beat(B)
    assert call.code == INTERNAL
    assert "worker:2 is lost: nothing was heard of it for 2 s" in call.message


def test_BarrierFailsAfterErrorPollingResponse() -> None:
    there = cluster(2)
    polls = [there.poll(A), there.poll(B)]
    there.advance(2.5)
    assert all(poll.done for poll in polls)
    assert there.barrier(A).code == INTERNAL


def test_BarrierWithSubsetFailsIfServiceHasStopped() -> None:
    """Our service does not stop: only a barrier of the stale task fails, because that task is in
    error."""
    there = cluster(2)
    there.advance(2.5)
    assert there.barrier(A, [A]).code == INTERNAL


def test_BarrierWithNonParticipatingTaskFailsIfServiceHasStopped() -> None:
    """As in TensorFlow, the caller gets its own error rather than the error of its wrong
    argument.
    """
    there = cluster(2)
    there.advance(2.5)
    assert there.barrier(A, [B]).code == INTERNAL


def test_BarrierFailsIfServiceHasStopped() -> None:
    there = cluster(2)
    call = there.barrier(A)
    there.stop()
    assert call.code == CANCELLED


def test_Reset_FailsOngoingBarrier() -> None:
    there = cluster(2)
    call = there.barrier(A)
    assert there.reset(A).code == OK
    assert call.code == INTERNAL
    assert "worker:0 was reset" in call.message


def test_Shutdown_FailsOngoingBarrier() -> None:
    there = cluster(2)
    call = there.barrier(A)
    assert there.shut_down(A).code == OK
    assert call.code == INTERNAL
    assert "worker:0 has shut down" in call.message
    assert "worker:0 has left" in there.barrier(B, counter=1).message


def test_a_repeated_call_of_one_task_cancels_its_earlier_one() -> None:
    """This is TensorFlow's BarrierStillBlocksIfSameTaskCallsOngoingBarrierRepeatedly, in its
    version since rounds have numbers."""
    there = cluster()
    first, second = there.barrier(A, [A, B]), there.barrier(A, [A, B])
    assert first.code == CANCELLED
    assert not second.done
    assert there.barrier(B, [A, B]).code == second.code == OK


def test_a_task_that_has_disconnected_has_not_called() -> None:
    there = cluster(2)
    call = there.barrier(A)
    there.machine.dropped(call)
    assert not there.barrier(B).done
    assert there.machine.waiting == 1
    assert there.barrier(A).code == OK
    assert there.machine.waiting == 0


def test_a_round_whose_callers_have_all_left_has_not_begun() -> None:
    there = cluster(2)
    there.machine.dropped(there.barrier(A, timeout_s=1))
    there.advance(0.5)
    call = there.barrier(B, timeout_s=1)
    there.advance(0.9)
    assert not call.done
    assert there.barrier(A).code == OK


def test_an_unregistered_caller_gets_an_error_and_the_others_continue_to_wait() -> None:
    there = cluster(3, up=False)
    there.register(A)
    call = there.barrier(A)
    assert there.barrier(B).code == FAILED_PRECONDITION
    assert there.barrier(("worker", 9)).code == INVALID_ARGUMENT
    assert not call.done
    assert there.machine.missing("b") == [B, C]


def test_in_a_cluster_without_a_list_of_tasks_a_barrier_must_name_its_tasks() -> None:
    there = cluster(None)
    there.register(A)
    there.register(B)
    assert there.barrier(A).code == INVALID_ARGUMENT
    assert [there.barrier(A, [A, B]).done, there.barrier(B, [A, B]).code] == [False, OK]


def test_the_longest_unused_name_is_forgotten_and_names_that_are_waited_at_are_kept() -> None:
    barriers = Barriers(names_max=2)
    both = frozenset((A, B))
    waiting = Call()
    assert barriers.arrived(waiting, "waited at", 0, A, both) == []
    for number in range(5):
        barriers.arrived(Call(), f"passed {number}", 3, A, frozenset((A,)))
    barriers.arrived(Call(), "second", 0, A, both)
    [refused] = barriers.arrived(Call(), "third", 0, A, both)
    assert refused.code == RESOURCE_EXHAUSTED  # type: ignore[union-attr]
    assert len(barriers.arrived(Call(), "waited at", 0, B, both)) == 2


@pytest.mark.parametrize("count", [1, 2, 64])
def test_a_barrier_of_any_size_passes_with_its_last_task(count: int) -> None:
    there = cluster(count)
    calls = [there.barrier(worker(index)) for index in range(count)]
    assert {call.code for call in calls} == {OK}
