"""Processes that die in the middle of a training program: contract 10.5, with two workers and two
ps. More of it is in full/."""

from __future__ import annotations

import os
import threading
from os import _exit

import numpy as np
import pytest

import zmqdist as zd
from tests.training.helpers import WITHIN_S, Program
from zmqdist import errors

pytestmark = pytest.mark.shares_cluster


@pytest.mark.processes("parameter servers")
@pytest.mark.killed("parameter servers")
@pytest.mark.parametrize("once", [False, True])
def test_worker_preemption_midst_function(program: Program, once: bool) -> None:
    """F-9: with `once` a step that is run again counts once."""
    for _ in range(4):
        program.coordinator.schedule(program.waiting(), once=once)
    program.begun(program.size)
    assert not program.coordinator.done()
    program.cluster.restart_worker(0)
    program.go.assign(1)
    program.coordinator.join(WITHIN_S)
    count = program.iterations.numpy()
    assert count == 4 if once else count > 4


def test_async_wait_is_no_op(two: Program) -> None:
    """With a dead worker nothing that is for all workers raises or hangs, and the other one does
    all there is."""
    two.cluster.kill_worker(0)
    results = [two.coordinator.schedule(two.step()) for _ in range(10)]
    assert two.coordinator.done(WITHIN_S)
    two.coordinator.join(WITHIN_S)
    assert two.iterations.numpy() == 10
    assert two.coordinator.fetch(results) == [None] * 10


def test_retry_with_once_skips_updates(two: Program) -> None:
    """F-9: each update of each variable, whatever it is, also from threads of the function; its
    answer is that of the first run."""
    with two.strategy.scope():
        rows = zd.Variable(np.zeros((4, 2)))
        tries = zd.Variable(0)
    count, read = two.iterations, two.go

    def update(fail: bool) -> bool:
        count.assign_add(1)
        rows.scatter_add(zd.IndexedSlices(np.ones((1, 2)), np.array([1])))
        swapped = bool(count.compare_and_set(10, expected=1))
        thread = threading.Thread(
            target=lambda: rows.apply(zd.optimizers.SGD(1.0), np.ones((4, 2)))
        )
        thread.start()
        thread.join()
        if read.compare_and_set(1, expected=0) and fail:
            raise ValueError("the first time")
        count.assign_add(1)
        if tries.read_value() == 0:
            tries.assign(1)
            _exit(1)
        return swapped

    swapped = two.coordinator.schedule(update, (False,), once=True)
    two.coordinator.join(WITHIN_S)
    assert swapped.fetch()
    assert count.numpy() == 11
    assert rows.numpy().tolist() == [[-1, -1], [0, 0], [-1, -1], [-1, -1]]


@pytest.mark.processes("variables")
@pytest.mark.killed("variables")
@pytest.mark.parametrize("back", [False, True])
def test_ps_preemption_error_type(program: Program, back: bool) -> None:
    """Also when it is back at its address before anybody has asked."""
    program.coordinator.schedule(program.step())
    program.coordinator.join(WITHIN_S)
    program.cluster.kill_ps(0)
    if back:
        program.cluster.restart_ps(0)
    for use in (program.iterations.numpy, program.coordinator.schedule(program.step()).fetch):
        with pytest.raises(errors.PSUnavailableError, match=r"'iterations' on ps:0") as caught:
            use()
        assert "worker" not in caught.value.message
        assert caught.value.address == program.cluster.ps[0]


@pytest.mark.parametrize("uses_variables", [True, False])
def test_join_raises_unavailable_error_at_ps_failure(
    program: Program, uses_variables: bool
) -> None:
    """Endless functions are cut off, also those that use no variable any more."""
    for _ in range(program.size + 2):
        program.coordinator.schedule(program.waiting(uses_variables))
    program.begun(program.size)
    program.cluster.kill_ps(0)
    with pytest.raises(errors.PSUnavailableError):
        program.coordinator.join(WITHIN_S)
    assert program.coordinator.done()
    program.coordinator.join(WITHIN_S)
    assert program.coordinator.schedule(os.getpid).fetch(WITHIN_S)
    program.coordinator.join(WITHIN_S)
