"""Tasks of a cluster, held to the bullets of TensorFlow's coordination_service_test.cc; each test
has the name of its bullet.

The bullets about barriers are in test_barriers.py, those about keys in test_keys.py. Two kinds of
bullets do not apply. TensorFlow's service may have a connection back to its tasks
(`has_service_to_client_connection`); ours has none, and tasks always poll for errors. And
TensorFlow's service stops when it cannot report an error to any task; ours continues.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.coordination.coordinated import BACK_S, OURS, TIMEOUT_S, cluster, workers
from zmqdist.errors import (
    ABORTED,
    CANCELLED,
    DEADLINE_EXCEEDED,
    FAILED_PRECONDITION,
    INTERNAL,
    INVALID_ARGUMENT,
    OK,
    UNAVAILABLE,
)

A, B, C = workers(3)
RECOVERABLE = replace(OURS, recoverable_jobs=frozenset(("worker",)))
TOGETHER = replace(OURS, shutdown_timeout_s=0.5)
REGISTER_TOGETHER = replace(OURS, register_together=True, register_timeout_s=5.0)

# -- register --------------------------------------------------------------------------------------


def test_TestStandaloneService() -> None:
    there = cluster(2, up=False)
    there.register(A)
    first = there.wait_for_all(A)
    assert not first.done
    there.register(B)
    assert there.wait_for_all(B).code == first.code == OK
    assert [there.beat(A).code, there.beat(B).code, there.beat(C).code] == [
        OK,
        OK,
        INVALID_ARGUMENT,
    ]
    poll = there.poll(A)
    assert [there.beat(B, 1).code, there.beat(B, 1).code] == [ABORTED] * 2
    assert poll.value[0].code == ABORTED
    assert poll.value[0].task == B


def test_TestCoordinatedJobs() -> None:
    chief, evaluator = ("chief", 0), ("evaluator", 0)
    there = cluster([chief, A, B], up=False)
    calls = []
    for task in (chief, A, B):
        assert there.register(task).code == OK
        calls.append(there.wait_for_all(task))
    assert [call.code for call in calls] == [OK] * 3
    refused = there.register(evaluator)
    assert refused.code == INVALID_ARGUMENT
    assert (
        "evaluator:0 is not in the cluster, which has chief:0, worker:0, worker:1"
        in refused.message
    )


def test_RegisterTask_AlreadyConnected_Succeeds() -> None:
    assert cluster(1).register(A).code == OK


def test_RegisterTask_AlreadyConnectedDifferentIncarnation_Fails() -> None:
    there = cluster(1)
    refused = there.register(A, 1)
    assert refused.code == ABORTED
    assert "worker:0 registered again as another incarnation" in refused.message


def test_RegisterTask_AlreadyInError_Fails() -> None:
    there = cluster(1)
    there.report(A, INTERNAL, "test_error")
    refused = there.register(A)
    assert refused.code == ABORTED
    assert "must be reset first: worker:0 reported an error: test_error" in refused.message


def test_TestTaskRestart() -> None:
    there = cluster(2)
    poll = there.poll(A)
    assert there.register(B, 1).code == ABORTED
    assert [(error.task, error.code) for error in poll.value] == [(B, ABORTED)]


def test_ResetAndRegisterAgain() -> None:
    there = cluster(1)
    assert there.reset(A).code == OK
    assert there.state(A) == "left"
    assert there.register(A).code == OK
    assert there.reset(("worker", 7)).code == INVALID_ARGUMENT


def test_RegisterWithBarrier_OldHeartbeat_RestartedTasksCanReconnect() -> None:
    there = cluster(2, up=False, config=REGISTER_TOGETHER)
    assert there.beat(A, 1).code == INVALID_ARGUMENT
    first = there.register(A)
    assert there.beat(B, 1).code == INVALID_ARGUMENT
    assert there.beat(A, 1).code == ABORTED
    assert there.register(B).code == first.code == OK
    assert there.state(A) == "up"


def test_RegisterWithBarrier_RestartBeforeBarrier_Succeeds() -> None:
    there = cluster(2, up=False, config=REGISTER_TOGETHER)
    first = there.register(A, 1)
    again = there.register(A, 2)
    assert first.code == ABORTED
    assert there.register(B).code == again.code == OK
    assert [state.incarnation for state in there.machine.states()] == [2, there.lives[B]]
    assert there.register(A, 1).code == ABORTED


def test_RegisterWithBarrier_RestartAfterBarrier_Fails() -> None:
    there = cluster(2, up=False, config=REGISTER_TOGETHER)
    calls = [there.register(A, 1), there.register(B)]
    assert [call.code for call in calls] == [OK, OK]
    assert there.register(A, 2).code == ABORTED
    assert there.barrier(B).code == INTERNAL


def test_registering_together_ends_at_its_deadline_and_names_the_missing_tasks() -> None:
    there = cluster(3, up=False, config=REGISTER_TOGETHER)
    calls = [there.register(A), there.register(C)]
    there.advance(5)
    assert [call.code for call in calls] == [DEADLINE_EXCEEDED] * 2
    assert calls[0].message == "2/3 tasks registered in time; missing: worker:1"
    dropped = there.register(A)
    there.machine.dropped(dropped)
    assert there.state(A) == "missing"


def test_UnavailableTaskCanReconnect() -> None:
    there = cluster(2, config=replace(OURS, new_incarnation_may_return=True))
    there.report(A, UNAVAILABLE, "test_error")
    assert there.register(A, 1).code == OK
    there.report(A, INTERNAL, "worse")
    assert there.register(A, 2).code == ABORTED


def test_what_an_earlier_incarnation_still_says_does_not_harm_its_successor() -> None:
    there = cluster(2)
    there.reset(A)
    assert there.register(A, 1).code == OK
    assert there.beat(A, 100).code == ABORTED
    assert there.register(A, 100).code == ABORTED
    assert there.state(A) == "up"


def test_a_task_that_has_left_may_not_report_an_error() -> None:
    there = cluster(2)
    there.shut_down(A)
    assert there.report(A, INTERNAL, "too late").code == FAILED_PRECONDITION
    assert there.state(A) == "left"


def test_a_cluster_without_a_list_accepts_every_task_that_registers() -> None:
    there = cluster(None)
    assert there.register(A).code == there.register(("trainer", 3)).code == OK
    assert [(state.task, state.state) for state in there.machine.states()] == [
        (A, "up"),
        (("trainer", 3), "up"),
    ]


# -- heartbeat -------------------------------------------------------------------------------------


def test_TestTaskHeartbeatTimeout() -> None:
    there = cluster(2)
    there.advance(2 * TIMEOUT_S)
    assert [there.beat(A).code, there.beat(B).code] == [UNAVAILABLE] * 2


def test_HeartbeatTimeoutWithoutServerToClientConnection() -> None:
    """TensorFlow's service then stops, and replies INTERNAL; ours continues, and reports what has
    happened to this task."""
    test_TestTaskHeartbeatTimeout()


def test_HeartbeatTimeoutErrorCanPropagateThroughErrorPolling() -> None:
    there = cluster(2)
    polls = [there.poll(A), there.poll(B)]
    there.advance(2 * TIMEOUT_S)
    assert {error.code for poll in polls for error in poll.value} == {UNAVAILABLE}


def test_HeartbeatTimeoutErrorFromOneTaskCanPropagateThroughErrorPolling() -> None:
    there = cluster(2)
    polls = [there.poll(A), there.poll(B)]
    for _ in range(2):
        there.advance(0.9 * TIMEOUT_S)
        assert there.beat(A).code == OK
    there.advance(0.9 * TIMEOUT_S)
    for poll in polls:
        assert [(error.task, error.code) for error in poll.value] == [(B, UNAVAILABLE)]
        assert "worker:1" in poll.value[0].message
    assert there.state(A) == "up"


def test_Reset_HeartbeatsAreAcceptedForAGracePeriod() -> None:
    there = cluster(2)
    there.reset(A)
    assert there.beat(A).code == OK
    there.advance(3 * TIMEOUT_S)
    assert there.beat(A).code == INVALID_ARGUMENT


def test_Shutdown_HeartbeatsAreAcceptedForAGracePeriod() -> None:
    there = cluster(2)
    assert there.shut_down(A).code == OK
    assert there.beat(A).code == OK
    there.advance(3 * TIMEOUT_S)
    assert there.beat(A).code == INVALID_ARGUMENT


def test_a_task_whose_connection_ended_may_be_back_within_the_grace() -> None:
    there = cluster(2)
    call = there.barrier(B)
    there.tell(there.machine.away(A, there.lives[A], there.now))
    there.advance(BACK_S / 2)
    assert there.register(A).code == OK
    there.advance(BACK_S)
    assert not call.done
    there.tell(there.machine.away(A, there.lives[A], there.now))
    there.advance(BACK_S)
    assert call.code == INTERNAL
    assert "worker:0 is lost: its connection ended and it did not come back" in call.message


def test_a_task_whose_process_was_seen_to_end_is_lost_at_once() -> None:
    there = cluster(2)
    call = there.barrier(B)
    there.tell(there.machine.lost(A, 1, "of another life", there.now))
    assert not call.done
    there.tell(there.machine.lost(A, there.lives[A], "its process has ended", there.now))
    assert (call.code, there.state(A)) == (INTERNAL, "error")
    record = there.machine.states()[0]
    assert (record.task, record.incarnation) == (A, 100)
    assert (record.code, record.message) == (
        UNAVAILABLE,
        "worker:0 is lost: its process has ended",
    )


# -- shutdown --------------------------------------------------------------------------------------


def test_ShutdownWithBarrier_BarrierSucceeds() -> None:
    there = cluster(2, config=TOGETHER)
    calls = [there.shut_down(A), there.shut_down(B)]
    assert [call.code for call in calls] == [OK, OK]
    assert [there.register(A).code, there.register(B).code] == [OK, OK]


def test_ShutdownWithBarrier_BarrierFails_TaskDisconnectsOtherTaskIsAlerted() -> None:
    there = cluster(2, config=TOGETHER)
    poll = there.poll(B)
    call = there.shut_down(A)
    assert not call.done
    there.advance(0.6)
    assert call.code == DEADLINE_EXCEEDED
    assert there.register(A).code == OK
    assert [(error.task, error.code) for error in poll.value] == [(B, INTERNAL)]
    assert "worker:1 did not shut down with the others" in poll.value[0].message


def test_ShutdownWithBarrier_BarrierFailsWithoutClientConnection_ServiceStops() -> None:
    """TensorFlow's service then stops; ours continues, and the task that did not call is in
    error.
    """
    there = cluster(2, config=TOGETHER)
    call = there.shut_down(A)
    there.advance(0.6)
    assert call.code == DEADLINE_EXCEEDED
    assert there.beat(B).code == INTERNAL


def test_shutting_down_does_not_wait_for_tasks_that_left_or_failed_and_ends_when_one_dies() -> None:
    there = cluster(3, config=replace(OURS, shutdown_timeout_s=60.0))
    there.report(C, INTERNAL, "test_error")
    call = there.shut_down(A)
    again = there.shut_down(A)
    assert (call.code, again.done, there.state(A)) == (CANCELLED, False, "up")
    there.tell(there.machine.lost(B, there.lives[B], "killed", there.now))
    assert (again.code, there.state(A)) == (INTERNAL, "left")
    alone = cluster(2, config=TOGETHER)
    assert alone.shut_down(B, together=False).code == alone.shut_down(A).code == OK


# -- errors ----------------------------------------------------------------------------------------


def test_UnrecoverableTaskPropagatesError() -> None:
    there = cluster(2)
    poll = there.poll(B)
    there.report(A, INTERNAL, "test_error")
    assert there.beat(A).code == INTERNAL
    assert [(error.task, error.code) for error in poll.value] == [(A, INTERNAL)]


def test_RecoverableTaskWillNotPropagateError() -> None:
    there = cluster(2, config=RECOVERABLE)
    poll, own = there.poll(B), there.poll(A)
    there.report(A, INTERNAL, "test_error")
    assert there.beat(A).code == INTERNAL
    assert not poll.done
    assert [error.task for error in own.value] == [A]
    assert there.beat(B).code == OK


def test_RecoverableTaskReportErrorResetAndRegisterAgain() -> None:
    there = cluster(2, config=RECOVERABLE)
    poll = there.poll(B)
    there.report(A, INTERNAL, "test_error")
    assert there.register(A, 1).code == ABORTED
    there.reset(A)
    assert there.register(A, 1).code == OK
    assert there.beat(A, 1).code == OK
    assert not poll.done


def test_errors_of_a_cluster_of_chief_and_workers_spread_from_those_that_do_not_recover() -> None:
    chief = ("chief", 0)
    there = cluster([chief, A], config=RECOVERABLE)
    poll = there.poll(chief)
    there.report(A, INTERNAL, "of the worker")
    assert not poll.done
    there.reset(A)
    there.register(A)
    poll = there.poll(A)
    there.report(chief, INTERNAL, "of the chief")
    assert [error.task for error in poll.value] == [chief]


def test_a_recoverable_task_that_was_lost_just_registers_again() -> None:
    there = cluster(2, config=RECOVERABLE)
    there.tell(there.machine.lost(A, there.lives[A], "killed", there.now))
    assert there.register(A, 1).code == OK
    waiting = there.barrier(A)
    # before the keeper has noticed that its earlier incarnation has ended
    assert there.register(B, 1).code == OK
    assert waiting.code == INTERNAL


def test_ErrorPollingRequestsGotCancelledErrorUponServiceShutdown() -> None:
    there = cluster(2)
    polls = [there.poll(A), there.poll(B)]
    alive = there.alive(A)
    assert not any(poll.done for poll in polls)
    there.stop()
    assert [call.code for call in (*polls, alive)] == [CANCELLED] * 3
    assert there.machine.waiting == 0


def test_ReportedErrorCanPropagateThroughErrorPolling() -> None:
    there = cluster(2)
    polls = [there.poll(A), there.poll(B)]
    assert there.report(B, INTERNAL, "test_error").code == OK
    assert [error.code for poll in polls for error in poll.value] == [INTERNAL] * 2


def test_DoNotAllowPollForErrorIfNotInCluster() -> None:
    refused = cluster(2).poll(C)
    assert refused.code == INVALID_ARGUMENT
    assert "not in the cluster" in refused.message


def test_DoNotAllowPollForErrorIfTaskNotRegistered() -> None:
    refused = cluster(2, up=False).poll(A)
    assert refused.code == FAILED_PRECONDITION
    assert "has not been registered" in refused.message


def test_AllowPollForErrorWithinGracePeriodIfTaskHasShutDown() -> None:
    there = cluster(2)
    there.shut_down(A)
    there.shut_down(B)
    poll = there.poll(A)
    assert not poll.done
    there.stop()
    assert poll.code == CANCELLED


@pytest.mark.parametrize("how", ["shut_down", "reset"])
def test_DoNotAllowPollForErrorIfTaskHasShutDown_or_AfterReset(how: str) -> None:
    there = cluster(2)
    getattr(there, how)(A)
    there.advance(2 * TIMEOUT_S)
    refused = there.poll(A)
    assert refused.code == FAILED_PRECONDITION
    assert "has disconnected" in refused.message


def test_DoNotAllowPollForErrorWhenInErrorState() -> None:
    there = cluster(2)
    there.report(A, INTERNAL, "test_error")
    refused = there.poll(A)
    assert refused.code == FAILED_PRECONDITION
    assert "test_error" in refused.message


def test_CanPropagateTaskRegistrationErrorThroughErrorPolling() -> None:
    there = cluster(2)
    poll = there.poll(A)
    assert there.register(B, there.lives[A]).code == ABORTED
    assert [error.code for error in poll.value] == [ABORTED]


def test_LatePollingTaskCanGetError() -> None:
    there = cluster(2)
    first = there.poll(A)
    there.report(A, FAILED_PRECONDITION, "test_error_from_task_0")
    late = there.poll(B)
    for poll in (first, late):
        assert [(error.code, error.task) for error in poll.value] == [(FAILED_PRECONDITION, A)]
        assert "test_error_from_task_0" in poll.value[0].message
    assert not there.poll(B, after=late.value[-1].number).done


def test_a_poll_without_news_gets_a_reply_at_its_deadline_and_is_a_sign_of_life() -> None:
    there = cluster(1)
    for _ in range(10):
        poll = there.poll(A, until=there.now + 0.5)
        there.advance(0.5)
        assert poll.value == []
    assert there.state(A) == "up"


# -- which tasks are up ----------------------------------------------------------------------------


def test_ListClusterDevices_TfDevice() -> None:
    there = cluster()
    calls = [
        there.wait_for_all(A, ["a0", "a1"]),
        there.wait_for_all(B, ["b0"]),
        there.wait_for_all(C, ["c0"]),
    ]
    assert [call.value for call in calls] == [["a0", "a1", "b0", "c0"]] * 3


def test_ListClusterDevices_XlaDevice() -> None:
    """The list has the order of the tasks, not of their calls. (TensorFlow's function that numbers
    devices does not apply.)"""
    there = cluster()
    there.wait_for_all(B, ["b0"])
    there.wait_for_all(A, ["a0", "a1"])
    assert there.wait_for_all(C, ["c0"]).value == ["a0", "a1", "b0", "c0"]


def test_ListClusterDevices_DevicesAreNotAddedTwice() -> None:
    there = cluster(2)
    first = there.wait_for_all(A, ["a0"])
    again = there.wait_for_all(A, ["a0"])
    assert there.wait_for_all(B, ["b0"]).value == again.value == ["a0", "b0"]
    assert first.code == CANCELLED


def test_waiting_for_all_ends_at_its_deadline_and_when_a_task_is_lost() -> None:
    there = cluster()
    late = there.wait_for_all(A, timeout_s=0.5)
    there.advance(0.5)
    assert late.code == DEADLINE_EXCEEDED
    assert "missing: worker:1, worker:2" in late.message
    there = cluster()
    call = there.wait_for_all(A)
    there.report(B, INTERNAL, "test_error")
    assert call.code == INTERNAL


def test_get_alive_tasks_is_a_barrier_among_running_tasks_and_all_get_the_same_reply() -> None:
    there = cluster()
    first = there.alive(A)
    second = there.alive(B)
    assert [first.done, second.done] == [False, False]
    there.tell(there.machine.lost(C, there.lives[C], "killed", there.now))
    assert first.value == second.value == [A, B]
    assert there.alive(A, [A, C]).value == [A]


def test_get_alive_tasks_is_for_members_of_the_set_that_live() -> None:
    there = cluster()
    assert there.alive(A, [B, C]).code == INVALID_ARGUMENT
    assert there.alive(A, [A, ("worker", 9)]).code == INVALID_ARGUMENT
    dying, other = there.alive(A), there.alive(B)
    there.report(A, INTERNAL, "test_error")
    assert (dying.code, other.done) == (FAILED_PRECONDITION, False)
    there.machine.dropped(other)
    assert there.machine.waiting == 0


def test_get_task_states() -> None:
    there = cluster([("chief", 0), A, B], up=False)
    there.register(A)
    there.register(B)
    there.report(B, INTERNAL, "test_error")
    assert [(state.task, state.state) for state in there.machine.states(["worker"])] == [
        (A, "up"),
        (B, "error"),
    ]
    assert [state.state for state in there.machine.states()] == ["missing", "up", "error"]
