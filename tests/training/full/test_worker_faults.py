"""Workers that die in the middle of a training program: contract 10.5; with one worker and one ps,
and with two of each."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.launch.helpers import eventually
from tests.training.helpers import PAUSE_S, WITHIN_S, Program, restart
from tests.training.test_faults import test_worker_preemption_midst_function
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.variables.client import client_of

pytestmark = pytest.mark.shares_cluster

__all__ = ["test_worker_preemption_midst_function"]  # with one worker and one ps, too


def test_worker_preemption_between_functions(program: Program) -> None:
    for _ in range(2):
        program.coordinator.schedule(program.step())
    program.coordinator.join(WITHIN_S)
    assert program.iterations.numpy() == 2
    program.cluster.kill_worker(0)
    program.cluster.restart_worker(0)
    for _ in range(2):
        program.coordinator.schedule(program.step())
    program.coordinator.join(WITHIN_S)
    assert program.iterations.numpy() == 4


@pytest.mark.timeout(180)
def test_schedules_continue_while_worker_restarts(two: Program) -> None:
    """Of the tests with TensorFlow's multi-process runner. The worker is away for as long as the
    other one makes a thousand steps."""
    step = two.step()
    for _ in range(5000):
        two.coordinator.schedule(step)
    two.begun(500)
    two.cluster.kill_worker(0)
    two.begun(1500)
    two.cluster.restart_worker(0)
    last = two.coordinator.schedule(lambda: 4)
    two.coordinator.join(120.0)
    assert last.fetch() == 4
    assert two.iterations.numpy() >= 5000


def running(program: Program) -> int:
    """As the dispatcher knows."""
    return sum(worker.running for worker in program.cluster.dispatcher.snapshot().workers)


def test_one_worker_preemption_with_cancellation(program: Program) -> None:
    steps = [program.coordinator.schedule(program.step()) for _ in range(3)]
    long = program.coordinator.schedule(program.waiting())

    def failing() -> None:
        raise errors.InvalidArgumentError(None, None, "on purpose")

    failed = program.coordinator.schedule(failing)
    program.begun(4)
    program.coordinator.fetch(steps)  # a step that runs is not the long one
    if program.size == 1:
        # As long as the dispatcher has not heard of it, it goes first again, and what fails waits
        # for it.
        eventually(
            lambda: running(program) == 1,
            "the dispatcher knows that the long one has begun",
            WITHIN_S,
        )
    program.cluster.restart_worker(0)
    with pytest.raises(errors.InvalidArgumentError, match="on purpose"):
        program.coordinator.join(WITHIN_S)
    with pytest.raises(errors.CancelledError):
        long.fetch()
    with pytest.raises(errors.InvalidArgumentError):
        failed.fetch()
    program.works()


@pytest.mark.parametrize("from_function", [True, False])
def test_handle_dataset_creation_failure(program: Program, from_function: bool) -> None:
    def dataset() -> Any:
        return zd.data.Dataset.range(1, 100)

    datasets = program.coordinator.create_per_worker_dataset(
        dataset if from_function else dataset()
    )
    iterations = program.iterations

    def step(iterator: Any) -> int:
        iterations.assign_add(1)
        return int(next(iterator))

    program.coordinator.join(WITHIN_S)
    first = iter(datasets)
    results = [program.coordinator.schedule(step, (first,)) for _ in range(3)]
    program.coordinator.join(WITHIN_S)
    program.cluster.kill_worker(0)
    eventually(
        lambda: "worker:0" not in program.coordinator.workers(),
        "the coordinator misses it",
        WITHIN_S,
    )
    second, third = iter(datasets), iter(datasets)
    for iterator in (first, second, third):
        results += [program.coordinator.schedule(step, (iterator,)) for _ in range(3)]
    program.cluster.restart_worker(0)
    program.coordinator.join(WITHIN_S)
    assert iterations.numpy() == 12
    assert min(program.coordinator.fetch(results)) == 1


def test_two_workers_preempted(program: Program) -> None:
    for _ in range(10):
        program.coordinator.schedule(program.waiting())
    program.begun(program.size)
    for index in range(program.size):
        program.cluster.kill_worker(index)
    restart(program.cluster, *(f"worker:{index}" for index in range(program.size)))
    program.go.assign(1)
    program.coordinator.join(WITHIN_S)
    assert program.iterations.numpy() >= 10 + program.size


def test_worker_continuous_failure(program: Program) -> None:
    for _ in range(10):
        program.coordinator.schedule(program.waiting(), worker=0)
    program.begun(1)
    program.cluster.restart_worker(0)
    program.begun(2)
    program.cluster.restart_worker(0)
    program.begun(3)
    program.go.assign(1)
    program.coordinator.join(WITHIN_S)
    assert program.iterations.numpy() == 12


def test_numpy_fetched_after_worker_failure(program: Program) -> None:
    before = program.coordinator.schedule(lambda: np.array([1, -1]))
    assert before.fetch(WITHIN_S).tolist() == [1, -1]
    unread = program.coordinator.schedule(lambda: np.array([1, -1]))
    program.coordinator.join(WITHIN_S)
    for index in range(program.size):
        program.cluster.kill_worker(index)
    assert before.fetch().tolist() == unread.fetch(WITHIN_S).tolist() == [1, -1]


def test_tensor_got_after_worker_failure(program: Program) -> None:
    """What was fetched stays; what stayed with its worker is lost with it, and the error says
    so.
    """
    kept = program.coordinator.schedule(lambda: np.array([1, -1]), keep=True)
    there = program.coordinator.schedule(lambda: np.zeros(1 << 20), keep=True)
    assert kept.fetch(WITHIN_S).tolist() == [1, -1]
    program.coordinator.join(WITHIN_S)
    for index in range(program.size):
        program.cluster.kill_worker(index)
    program.lost(*range(program.size))
    with pytest.raises(errors.UnavailableError):
        there.fetch(WITHIN_S)


def test_fetch_from_ps_after_worker_failure(program: Program) -> None:
    """Variables are polled while a worker goes and comes, and nobody who only reads them sees
    that.
    """
    over = threading.Event()
    failed: list[BaseException] = []

    def poll() -> None:
        seen = 0
        try:
            while not over.wait(PAUSE_S):
                now = int(program.iterations.numpy())
                assert now >= seen
                seen = now
        except BaseException as error:
            failed.append(error)

    polling = threading.Thread(target=poll)
    polling.start()
    for turn in range(20):
        program.coordinator.schedule(program.step())
        if turn == 10:
            program.cluster.kill_worker(0)
            program.cluster.restart_worker(0)
        program.coordinator.join(WITHIN_S)
    over.set()
    polling.join()
    assert not failed
    assert program.iterations.numpy() >= 20


def test_dead_worker_is_named(two: Program) -> None:
    """WorkerPreemptionErrorType."""
    there = two.coordinator.schedule(lambda: np.zeros(1 << 20), worker=0, keep=True)
    two.coordinator.join(WITHIN_S)
    two.cluster.kill_worker(0)
    two.lost(0)
    with pytest.raises(
        errors.UnavailableError, match=r"was kept by the worker at .* and is lost"
    ) as caught:
        there.fetch(WITHIN_S)
    assert not isinstance(caught.value, errors.PSUnavailableError)
    assert "ps:" not in caught.value.message


def test_function_that_ends_workers_is_given_up() -> None:
    """F-8."""
    with (
        zd.local_cluster(workers=3, ps=1, attempts_max=2) as cluster,
        zd.ParameterServerStrategy(cluster) as strategy,
    ):
        coordinator = ClusterCoordinator(strategy)
        with strategy.scope():
            starts = zd.Variable(0)
        pids = [cluster.pids[f"worker:{index}"] for index in range(3)]

        def deadly() -> None:
            starts.assign_add(1).numpy()  # a read waits for the update
            os.kill(pids[zd.coordinator.get_current_worker_index()], signal.SIGKILL)
            threading.Event().wait()

        coordinator.schedule(deadly)
        with pytest.raises(errors.WorkerLost, match="was started 2 times"):
            coordinator.join(WITHIN_S)
        assert starts.numpy() == 2
        assert coordinator.schedule(starts.numpy).fetch(WITHIN_S) == 2


def test_lost_worker_counts_once_in_a_step(two: Program, tmp_path: Path) -> None:
    with zd.ParameterServerStrategy(two.cluster, aggregate="sync", workers_per_step=2) as strategy:
        with strategy.scope():
            mean = zd.Variable(np.zeros(1), name="mean")
        client = client_of(two.cluster.ps[0])

        def push(gradient: float) -> None:
            (tmp_path / str(os.getpid())).touch()
            mean.apply(zd.optimizers.SGD(1.0), np.array([gradient]), step=0)

        def pushed() -> bool:
            message = client.status().get_value()["variables"]
            return [each["bytes"] for each in message if each["session"] == strategy.session] == [
                16
            ]

        strategy.coordinator.schedule(push, (1.0,), worker=0)
        eventually(pushed, "the gradient waits in its step", WITHIN_S)
        two.cluster.restart_worker(0)
        eventually(lambda: len(list(tmp_path.iterdir())) == 2, "it is pushed again", WITHIN_S)
        strategy.coordinator.schedule(push, (3.0,), worker=1)
        strategy.coordinator.join(WITHIN_S)
        assert mean.numpy().tolist() == [-2.0]


def test_cluster_state_not_disrupted(two: Program) -> None:
    """One after the other on one coordinator."""
    for case in (
        test_worker_preemption_between_functions,
        test_one_worker_preemption_with_cancellation,
    ):
        two.go.assign(0)
        two.iterations.assign(0)
        case(two)
        two.works()
