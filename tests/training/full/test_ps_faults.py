"""Parameter servers that die in the middle of a training program: contract 10.5; with one worker
and one ps, and with two of each."""

from __future__ import annotations

import pytest

import zmqdist as zd
from tests.launch.helpers import eventually
from tests.training.helpers import WITHIN_S, Program, heal
from tests.training.test_faults import (
    test_join_raises_unavailable_error_at_ps_failure,
    test_ps_preemption_error_type,
)
from zmqdist import errors

pytestmark = pytest.mark.shares_cluster

__all__ = [
    "test_join_raises_unavailable_error_at_ps_failure",
    "test_ps_preemption_error_type",
]  # with one worker and one ps, too


def test_ps_failure_while_recovery_from_worker_failure(program: Program) -> None:
    """P-6: what waits for a worker gets the ps error."""
    program.coordinator.schedule(program.waiting(), worker=0)
    program.begun(1)
    program.cluster.kill_worker(0)
    program.lost(0)
    program.cluster.kill_ps(0)
    with pytest.raises(errors.PSUnavailableError, match="ps:0"):
        program.coordinator.join(WITHIN_S)
    assert program.coordinator.done()


@pytest.mark.parametrize("uses_variables", [True, False])
def test_schedule_raises_unavailable_error_at_ps_failure(
    program: Program, uses_variables: bool
) -> None:
    for _ in range(program.size):
        program.coordinator.schedule(program.waiting(uses_variables))
    program.begun(program.size)
    program.cluster.kill_ps(0)

    def raises() -> bool:
        try:
            program.coordinator.schedule(program.waiting(uses_variables))
        except errors.PSUnavailableError:
            return True
        return False

    eventually(raises, "schedule tells of the loss", WITHIN_S)
    assert program.coordinator.done()


def test_worker_execution_after_ps_failure_raises_expected_error(program: Program) -> None:
    for index in range(program.size):
        program.cluster.kill_ps(index)
    for index in range(program.size):
        with pytest.raises(errors.PSUnavailableError, match="'iterations' on ps:0"):
            program.coordinator.schedule(program.step(), worker=index).fetch(WITHIN_S)
        with pytest.raises(errors.PSUnavailableError):
            program.coordinator.join(WITHIN_S)


def test_reported_loss_fails_one_round(two: Program) -> None:
    two.coordinator.schedule(two.waiting(False))
    two.begun(1)
    two.cluster.kill_ps(1)
    with pytest.raises(errors.PSUnavailableError, match="ps:1"):
        two.coordinator.join(WITHIN_S)
    two.works()
    two.coordinator.schedule(two.waiting(False))
    two.begun(5)
    two.cluster.kill_ps(0)
    with pytest.raises(errors.PSUnavailableError, match="ps:0"):
        two.coordinator.join(WITHIN_S)


def test_faults_all_at_once(program: Program) -> None:
    """Everything is killed: the program is told, and goes on in the same process with new objects
    when it is there again (P-4)."""
    for _ in range(program.size + 1):
        program.coordinator.schedule(program.waiting())
    program.begun(program.size)
    for index in range(program.size):
        program.cluster.kill_worker(index)
        program.cluster.kill_ps(index)
    with pytest.raises(errors.PSUnavailableError):
        program.coordinator.join(WITHIN_S)
    program.strategy.close()
    heal(program.cluster)
    strategy = zd.ParameterServerStrategy(program.cluster)
    with strategy.scope():
        count = zd.Variable(0)
    for _ in range(4):
        strategy.coordinator.schedule(lambda: count.assign_add(1) and None)
    strategy.coordinator.join(WITHIN_S)
    assert count.numpy() == 4
    strategy.close()
