"""Processes that die in the middle of a training program: contract 10.5; with one worker and one ps, and with two of each."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.launch.launched import eventually, stop
from tests.parameter_server.conftest import Cluster
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator

pytestmark = pytest.mark.shares_cluster

WITHIN_S = 30.0
PAUSE_S = 0.01

Lost = (errors.UnavailableError, errors.NotFoundError, errors.FailedPreconditionError)


class Program:
    """A training program on a cluster of its own.

    Attributes:
      iterations: how many steps have begun; at ps:0.
      go: steps that wait end when it is 1; at the last ps.
    """

    def __init__(self, cluster: zd.local_cluster) -> None:
        self.size = cluster.workers
        self.cluster = cluster
        heal(cluster)
        self.strategy = zd.ParameterServerStrategy(cluster)
        self.coordinator = ClusterCoordinator(self.strategy, cancel_grace_s=0.2)
        with self.strategy.scope():
            self.iterations, self.go = zd.Variable(0, name="iterations"), zd.Variable(0, name="go")

    def pid(self, task: str) -> int:
        return self.cluster._processes[task].pid

    def step(self) -> Callable[[], None]:
        iterations = self.iterations

        def step() -> None:
            iterations.assign_add(1)

        return step

    def waiting(self, uses_variables: bool = True) -> Callable[[], None]:
        """A step that does not end before `go`."""
        iterations, go = self.iterations, self.go

        def waiting() -> None:
            iterations.assign_add(1)
            while not uses_variables or go.numpy() == 0:
                threading.Event().wait(PAUSE_S)

        return waiting

    def begun(self, count: int) -> None:
        eventually(lambda: self.iterations.numpy() >= count, f"{count} steps have begun", WITHIN_S)

    def lost(self, *tasks: int) -> None:
        """Wait until the dispatcher misses these workers."""
        self.cluster.dispatcher.wait_for(lambda there: not any(("worker", index) in there for index in tasks), WITHIN_S)

    def works(self) -> None:
        """Three steps, and all is well."""
        before = self.iterations.numpy()
        for _ in range(3):
            self.coordinator.schedule(self.step())
        self.coordinator.join(WITHIN_S)
        assert self.iterations.numpy() == before + 3


def restart(cluster: zd.local_cluster, *names: str) -> None:
    """Start tasks again, all at once."""
    tasks = [(job, int(index)) for job, _, index in (name.partition(":") for name in names)]
    for job, index in tasks:
        cluster._kill(job, index)
    cluster.dispatcher.wait_for(lambda there: not there & set(tasks), WITHIN_S)
    cluster._wait_for(
        [
            cluster._start(cluster._worker(index, True) if job == "worker" else cluster._ps(index))
            for job, index in tasks
        ]
    )


def heal(cluster: zd.local_cluster) -> None:
    """Start again what the test before has killed."""
    dead = [name for name, child in cluster._processes.items() if child.ended.is_set()]
    if dead:
        restart(cluster, *dead)


@pytest.fixture(scope="module")
def clusters() -> Iterator[Callable[[int], zd.local_cluster]]:
    """A cluster of so many workers and as many ps, the same for all tests."""
    made: dict[int, zd.local_cluster] = {}

    def cluster(size: int) -> zd.local_cluster:
        if size not in made:
            made[size] = zd.local_cluster(workers=size, ps=size, lease_s=1.0)
        return made[size]

    yield cluster
    for each in made.values():
        each.close()


@pytest.fixture(params=[1, 2], ids=["1+1", "2+2"])
def program(request: pytest.FixtureRequest, clusters: Callable[[int], zd.local_cluster]) -> Iterator[Program]:
    program = Program(clusters(request.param))
    yield program
    program.strategy.close()


@pytest.fixture
def two(clusters: Callable[[int], zd.local_cluster]) -> Iterator[Program]:
    program = Program(clusters(2))
    yield program
    program.strategy.close()


# -- workers ------------------------------------------------------------------------------------------------------------------


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


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_thousands_of_schedules_while_a_worker_dies_and_comes_back(two: Program) -> None:
    """Of the tests with TensorFlow's multi-process runner. The worker is away for as long as the other one makes a thousand steps."""
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


def test_one_worker_preemption_with_cancellation(program: Program) -> None:
    for _ in range(3):
        program.coordinator.schedule(program.step())
    long = program.coordinator.schedule(program.waiting())

    def failing() -> None:
        raise errors.InvalidArgumentError(None, None, "on purpose")

    failed = program.coordinator.schedule(failing)
    program.begun(4)
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

    datasets = program.coordinator.create_per_worker_dataset(dataset if from_function else dataset())
    iterations = program.iterations

    def step(iterator: Any) -> int:
        iterations.assign_add(1)
        return int(next(iterator))

    program.coordinator.join(WITHIN_S)
    first = iter(datasets)
    results = [program.coordinator.schedule(step, (first,)) for _ in range(3)]
    program.coordinator.join(WITHIN_S)
    program.cluster.kill_worker(0)
    eventually(lambda: "worker:0" not in program.coordinator.workers(), "the coordinator misses it", WITHIN_S)
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
    """What was fetched stays; what stayed with its worker is lost with it, and the error says so."""
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
    """Variables are polled while a worker goes and comes, and nobody who only reads them sees that."""
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


def test_async_wait_is_no_op(two: Program) -> None:
    """With a dead worker nothing that is for all workers raises or hangs, and the other one does all there is."""
    two.cluster.kill_worker(0)
    results = [two.coordinator.schedule(two.step()) for _ in range(10)]
    assert two.coordinator.done(WITHIN_S)
    two.coordinator.join(WITHIN_S)
    assert two.iterations.numpy() == 10
    assert two.coordinator.fetch(results) == [None] * 10


def test_a_worker_is_found_dead_by_name_while_all_others_are_well(two: Program) -> None:
    """WorkerPreemptionErrorType."""
    there = two.coordinator.schedule(lambda: np.zeros(1 << 20), worker=0, keep=True)
    two.coordinator.join(WITHIN_S)
    two.cluster.kill_worker(0)
    two.lost(0)
    with pytest.raises(errors.UnavailableError, match=r"was kept by the worker at .* and is lost") as caught:
        there.fetch(WITHIN_S)
    assert not isinstance(caught.value, errors.PSUnavailableError)
    assert "ps:" not in caught.value.message


def test_a_stopped_worker_is_missed_and_what_it_does_later_changes_nothing(two: Program) -> None:
    """F-4, F-9: its slot goes on, and its outcome comes when the step was run elsewhere."""
    for _ in range(4):
        two.coordinator.schedule(two.waiting(), once=True)
    two.begun(2)
    stopped = two.pid("worker:0")
    stop(stopped)
    try:
        two.go.assign(1)
        two.coordinator.join(WITHIN_S)
        assert two.iterations.numpy() == 4
    finally:
        os.kill(stopped, signal.SIGCONT)
    two.works()
    assert two.iterations.numpy() == 7


def test_a_late_outcome_of_an_earlier_life_of_a_worker_is_dropped(two: Program) -> None:
    begun, go = two.iterations, two.go

    def pid() -> int:
        begun.assign_add(1)
        while go.numpy() == 0:
            threading.Event().wait(PAUSE_S)
        return os.getpid()

    value = two.coordinator.schedule(pid, worker=0)
    two.begun(1)
    stopped = two.pid("worker:0")
    stop(stopped)
    try:
        two.go.assign(1)
        with zd.WorkerServer(two.cluster._worker(0, False)):
            assert value.fetch(WITHIN_S) == os.getpid()
            os.kill(stopped, signal.SIGCONT)
            two.coordinator.join(WITHIN_S)
            two.works()
            assert value.fetch() == os.getpid()
    finally:
        os.kill(stopped, signal.SIGCONT)
    two.cluster.kill_worker(0)


def test_a_function_that_ends_every_worker_is_given_up() -> None:
    """F-8."""
    with zd.local_cluster(workers=3, ps=1, attempts_max=2) as cluster, zd.ParameterServerStrategy(cluster) as strategy:
        coordinator = ClusterCoordinator(strategy)
        with strategy.scope():
            starts = zd.Variable(0)
        pids = [cluster._processes[f"worker:{index}"].pid for index in range(3)]

        def deadly() -> None:
            starts.assign_add(1)
            os.kill(pids[zd.coordinator.get_current_worker_index()], signal.SIGKILL)
            threading.Event().wait()

        coordinator.schedule(deadly)
        with pytest.raises(errors.WorkerLost, match="was started 2 times"):
            coordinator.join(WITHIN_S)
        assert starts.numpy() == 2
        assert coordinator.schedule(starts.numpy).fetch(WITHIN_S) == 2


# -- once ---------------------------------------------------------------------------------------------------------------------


def test_what_is_tried_again_with_once_passes_over_the_updates_that_were_made(two: Program) -> None:
    """F-9: each update of each variable, whatever it is, also from threads of the function; its answer is that of the first run."""
    with two.strategy.scope():
        rows = zd.Variable(np.zeros((4, 2)))
        tries = zd.Variable(0)
    count, read = two.iterations, two.go

    def update(fail: bool) -> bool:
        count.assign_add(1)
        rows.scatter_add(zd.IndexedSlices(np.ones((1, 2)), np.array([1])))
        swapped = bool(count.compare_and_set(10, expected=1))
        thread = threading.Thread(target=lambda: rows.apply(zd.optimizers.SGD(1.0), np.ones((4, 2))))
        thread.start()
        thread.join()
        if read.compare_and_set(1, expected=0) and fail:
            raise ValueError("the first time")
        count.assign_add(1)
        if tries.read_value() == 0:
            tries.assign(1)
            os._exit(1)
        return swapped

    swapped = two.coordinator.schedule(update, (False,), once=True)
    two.coordinator.join(WITHIN_S)
    assert swapped.fetch()
    assert count.numpy() == 11
    assert rows.numpy().tolist() == [[-1, -1], [0, 0], [-1, -1], [-1, -1]]


def test_a_worker_that_dies_in_a_synchronous_step_counts_in_it_once(two: Program, tmp_path: Path) -> None:
    with zd.ParameterServerStrategy(two.cluster, aggregate="sync", workers_per_step=2) as strategy:
        with strategy.scope():
            mean = zd.Variable(np.zeros(1), name="mean")
        client = strategy._session.clients[0]

        def push(gradient: float) -> None:
            (tmp_path / str(os.getpid())).touch()
            mean.apply(zd.optimizers.SGD(1.0), np.array([gradient]), step=0)

        def pushed() -> bool:
            told = client.about().get_value()["variables"]
            return [each["bytes"] for each in told if each["session"] == strategy.session] == [16]

        strategy.coordinator.schedule(push, (1.0,), worker=0)
        eventually(pushed, "the gradient waits in its step", WITHIN_S)
        two.cluster.restart_worker(0)
        eventually(lambda: len(list(tmp_path.iterdir())) == 2, "it is pushed again", WITHIN_S)
        strategy.coordinator.schedule(push, (3.0,), worker=1)
        strategy.coordinator.join(WITHIN_S)
        assert mean.numpy().tolist() == [-2.0]


def test_each_scheduled_function_counts_for_itself(two: Program) -> None:
    step = two.step()
    for _ in range(5):
        two.coordinator.schedule(step, once=True)
    two.coordinator.schedule(step)
    two.coordinator.join(WITHIN_S)
    assert two.iterations.numpy() == 6
    with pytest.raises(TypeError):
        two.coordinator.schedule(step, 5, once=True)  # type: ignore[arg-type]


def test_a_function_with_once_that_raises_and_is_tried_again_counts_once(two: Program) -> None:
    iterations, go = two.iterations, two.go

    def step(by: int) -> None:
        iterations.assign_add(by)
        if go.numpy() == 0:
            go.assign(1)
            raise ValueError("the first time")

    two.coordinator.schedule(step, kwargs={"by": 2}, once=True, retries=1)
    two.coordinator.join(WITHIN_S)
    assert two.iterations.numpy() == 2


# -- parameter servers --------------------------------------------------------------------------------------------------------


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
def test_join_raises_unavailable_error_at_ps_failure(program: Program, uses_variables: bool) -> None:
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


@pytest.mark.parametrize("uses_variables", [True, False])
def test_schedule_raises_unavailable_error_at_ps_failure(program: Program, uses_variables: bool) -> None:
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


def test_a_stopped_ps_is_missed_and_the_rest_goes_on(two: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    two.coordinator.schedule(two.waiting(False))
    two.begun(1)
    monkeypatch.setattr("zmqdist.variables.client.PS_PATIENCE_S", 0.2)
    stopped = two.pid("ps:1")
    stop(stopped)
    try:
        with pytest.raises(errors.PSUnavailableError, match=r"ps:1 .*no answer from"):
            two.coordinator.join(WITHIN_S)
        two.works()
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert two.go.numpy() == 0


def test_a_loss_that_one_round_has_told_fails_no_other(two: Program) -> None:
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


def test_all_at_once(program: Program) -> None:
    """Everything is killed: the program is told, and goes on in the same process with new objects when it is there again (P-4)."""
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


# -- the coordinator ----------------------------------------------------------------------------------------------------------


def test_cluster_coordinator_destroyed(program: Program) -> None:
    cluster = program.cluster
    program.strategy.close()
    before = set(threading.enumerate())
    strategy = zd.ParameterServerStrategy(cluster)
    with strategy.scope():
        variable = zd.Variable(0)
    assert strategy.coordinator.schedule(variable.numpy).fetch(WITHIN_S) == 0
    assert set(threading.enumerate()) - before
    del strategy, variable
    gc.collect()
    eventually(lambda: not [each for each in set(threading.enumerate()) - before if each.is_alive()], "its threads end")


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


PROGRAM = """
import json, sys, threading
import zmqdist as zd

strategy = zd.ParameterServerStrategy(json.loads(sys.argv[1]))
with strategy.scope():
    count = zd.Variable(7, name="count")

def endless():
    count.assign_add(1)
    threading.Event().wait()

strategy.coordinator.schedule(endless)
while count.numpy() == 7:
    threading.Event().wait(0.01)
print("it runs", flush=True)
sys.stdin.read()
"""


def test_a_program_that_was_killed_and_started_again_begins_clean_on_the_same_servers(
    cluster: Callable[..., Cluster],
    child: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P-5: what ran for it is ended, and its variables are dropped."""
    monkeypatch.setattr("zmqdist.variables.host.PS_PROGRAM_GONE_S", 0.0)
    servers = cluster(1, 1)
    servers.kill("worker", 0)
    servers.threads = False
    servers.start("worker", 0, {"worker_processes": True})
    first = child(PROGRAM, json.dumps(servers.spec))
    assert first.stdout is not None
    assert first.stdout.readline() == "it runs\n"
    first.kill()
    first.wait(WITHIN_S)
    with zd.ParameterServerStrategy(servers.spec, connect_timeout_s=WITHIN_S) as strategy:
        with strategy.scope():
            count = zd.Variable(0, name="count")
        told = strategy._session.clients[0].about().get_value()["variables"]
        assert [(each["session"], each["name"]) for each in told] == [(strategy.session, "count")]
        for _ in range(4):
            strategy.coordinator.schedule(lambda: count.assign_add(1) and None)
        strategy.coordinator.join(WITHIN_S)
        assert count.numpy() == 4


# -- workers that come --------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_added_between_and_in_the_middle_of_functions_has_its_resources_first() -> None:
    """10.6 on a local cluster."""
    with zd.local_cluster(workers=1, ps=1) as cluster:
        program = Program(cluster)
        coordinator, iterations, go = program.coordinator, program.iterations, program.go
        own = coordinator.create_per_worker_resource(zd.coordinator.get_current_worker_index)

        def step(own: int) -> bool:
            iterations.assign_add(1)
            while go.numpy() == 0:
                threading.Event().wait(PAUSE_S)
            return own == zd.coordinator.get_current_worker_index()

        results = [coordinator.schedule(step, (own,)) for _ in range(4)]
        program.begun(1)
        assert not coordinator.done()
        assert cluster.add_worker() == 1
        program.begun(2)
        go.assign(1)
        coordinator.join(WITHIN_S)
        assert iterations.numpy() == 4
        assert cluster.add_worker() == 2
        results.append(coordinator.schedule(step, (own,), worker=2))
        coordinator.join(WITHIN_S)
        assert iterations.numpy() == 5
        assert all(coordinator.fetch(results))
        assert program.strategy.task_states() == [None] * 4
        program.strategy.close()
