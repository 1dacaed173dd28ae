"""Strategies: scopes, where variables go, one coordinator, stubs on workers."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.parameter_server import (
    get_replica_context,
    get_strategy,
    in_cross_replica_context,
    variable_creator_scope,
)
from zmqdist.training.strategy import OnWorkers, StrategyStub
from zmqdist.training.strategy_coordinator import CoordinatorStub
from zmqdist.wire import trusted

pytestmark = pytest.mark.shares_cluster  # servers in this process start threads as they need them

PS = "/job:ps/replica:0/task:{}/device:CPU:0"
CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


# -- the program of the beginning ------------------------------------------------------------------


def test_scheduled_function_changes_variables(
    anywhere: zd.ParameterServerStrategy,
) -> None:
    coordinator = ClusterCoordinator(anywhere)
    with anywhere.scope():
        v1 = zd.Variable(0.0)
        v2 = zd.Variable(1.0)

    def step() -> Any:
        v1.assign_add(0.1)
        v2.assign_sub(0.2)
        return v1.read_value() / v2.numpy()

    assert coordinator.schedule(step).fetch() == pytest.approx(0.125)
    assert len(anywhere.placement) == 2
    assert v1.numpy() == pytest.approx(0.1)
    assert v2.numpy() == pytest.approx(0.8)


def test_additions_are_counted_once(
    anywhere: zd.ParameterServerStrategy,
) -> None:
    coordinator = ClusterCoordinator(anywhere)
    coordinator.join()
    with anywhere.scope():
        v = zd.Variable(0)

    def add() -> None:
        v.assign_add(2)

    results = [coordinator.schedule(add) for _ in range(5)]
    coordinator.join()
    assert v.numpy() == 10
    for _ in range(5):
        coordinator.schedule(add)
    for _ in range(3):
        coordinator.join()
    assert coordinator.done()
    assert v.numpy() == 20
    assert [result.fetch() for result in results] == [None] * 5


# -- where variables go ----------------------------------------------------------------------------


def test_variables_go_round_the_servers(
    strategy: zd.ParameterServerStrategy,
) -> None:
    outside = zd.Variable(0.0)
    with strategy.scope():
        inside = [zd.Variable(0.0) for _ in range(4)]
    assert outside.device == CHIEF
    assert [each.device for each in inside] == [PS.format(index) for index in (0, 1, 2, 0)]
    assert [each.task for each in inside] == ["ps:0", "ps:1", "ps:2", "ps:0"]
    assert outside.task is None
    assert [(each.name, each.ps) for each in strategy.placement] == [
        ("Variable", 0),
        ("Variable_1", 1),
        ("Variable_2", 2),
        ("Variable_3", 0),
    ]


def test_colocated_variable_is_whole(
    made: Any,
) -> None:
    strategy = made(lambda shape, dtype: [2] + [1] * (len(shape) - 1))
    with strategy.scope():
        first = zd.Variable(0.0)
        second = zd.Variable(0.0)
        with strategy.extended.colocate_vars_with(second):
            beside = zd.Variable(np.zeros((4, 2)))
        third = zd.Variable(0.0)
    assert [each.task for each in (first, second, beside, third)] == [
        "ps:0",
        "ps:1",
        "ps:1",
        "ps:2",
    ]
    assert (
        strategy.extended._variable_count == 3
    )  # reach: TensorFlow's own name, which this test is about


def test_colocation_needs_own_variable(made: Any) -> None:
    one, two = made(), made()
    with one.scope():
        variable = zd.Variable(0.0)
    with pytest.raises(ValueError, match="no variable of this strategy"):
        two.extended.colocate_vars_with(variable)


def test_outer_creator_decides_the_device(
    strategy: zd.ParameterServerStrategy,
) -> None:
    def to_second(next_creator: Any, **kwargs: Any) -> Any:
        kwargs["device"] = "/job:ps/task:1"
        return next_creator(**kwargs)

    def here(next_creator: Any, **kwargs: Any) -> Any:
        kwargs["device"] = CHIEF
        return next_creator(**kwargs)

    with strategy.scope(), variable_creator_scope(to_second):
        assert zd.Variable(0.0).device == PS.format(0)
    with variable_creator_scope(here), strategy.scope():
        assert zd.Variable(0.0).device == CHIEF


def test_creator_changes_the_arguments(
    strategy: zd.ParameterServerStrategy,
) -> None:
    names = []

    def named(next_creator: Any, **kwargs: Any) -> Any:
        names.append(kwargs["name"])
        kwargs["trainable"] = False
        return next_creator(**kwargs)

    with strategy.scope(), variable_creator_scope(named):
        made = zd.Variable(1.0, name="w")
    assert names == ["w"]
    assert made.trainable is False


def test_least_bytes_fills_emptiest_ps(made: Any) -> None:
    strategy = made(placement="least_bytes")
    with strategy.scope():
        tasks = [zd.Variable(np.zeros(size)).task for size in (100, 10, 10, 10, 200, 1)]
    assert tasks == ["ps:0", "ps:1", "ps:2", "ps:1", "ps:2", "ps:1"]


def test_placement_function_gets_loads(made: Any) -> None:
    seen = []

    def place(name: str, shape: tuple[int, ...], dtype: Any, loads: Any) -> int:
        seen.append((name, shape, dtype, tuple(loads)))
        return 2

    strategy = made(placement=place)
    with strategy.scope():
        zd.Variable(np.zeros(4, "f4"), name="a")
        assert zd.Variable(np.zeros((1, 2), "f8"), name="b").task == "ps:2"
    assert seen == [
        ("a", (4,), np.dtype("f4"), (0, 0, 0)),
        ("b", (1, 2), np.dtype("f8"), (0, 0, 16)),
    ]


@pytest.mark.parametrize("index", [3, -1, "0", None])
def test_bad_placement_is_refused(made: Any, index: Any) -> None:
    with (
        made(placement=lambda *_: index).scope(),
        pytest.raises(ValueError, match=r"placement returned .* below 3"),
    ):
        zd.Variable(0.0)


@pytest.mark.parametrize(
    "options",
    [
        {"replicas_per_worker": 0},
        {"placement": "somewhere"},
        {"aggregate": "always"},
        {"workers_per_step": 2},
        {"aggregate": "sync", "workers_per_step": 0},
        {"partitioner": 3},
        {"recovery_s": "60"},
        {"recovery_s": -1},
        {"recovery_s": float("nan")},
    ],
)
def test_bad_options_are_refused(made: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not|wants"):
        made(**options)


def test_steps_beyond_workers_are_warned_of(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    made(aggregate="sync", workers_per_step=5)
    assert "a step takes the gradients of 5 workers, but there are 2" in caplog.text


def test_unfit_gradient_is_refused_first(made: Any) -> None:
    strategy = made()
    with strategy.scope():
        variable = zd.Variable(np.zeros(2))
    grad = np.ones(2)
    for wrong, kind, message in (
        (
            lambda: variable.apply(zd.optimizers.SGD, grad),
            errors.InvalidArgumentError,
            "takes an optimizer",
        ),
        (lambda: variable.apply(None, grad), errors.InvalidArgumentError, "takes an optimizer"),
        (
            lambda: strategy.apply(zd.optimizers.SGD(0.1), [(variable, grad)]),
            TypeError,
            r"pairs \(gradient, variable\)",
        ),
    ):
        with pytest.raises(kind, match=message):
            wrong()
    assert variable.version == 1


def test_taken_name_gets_a_number(made: Any) -> None:
    one, two = made(), made()
    with one.scope():
        assert [zd.Variable(0.0, name="w").name for _ in range(3)] == ["w", "w_1", "w_2"]
    with two.scope():
        assert zd.Variable(0.0, name="w").name == "w"


# -- scopes and contexts ---------------------------------------------------------------------------


def test_strategies_share_no_variables(made: Any) -> None:
    strategies = [made() for _ in range(3)]
    variables = []
    for number, strategy in enumerate(strategies):
        with strategy.scope():
            variables.append(zd.Variable(number))
    assert [each.task for each in variables] == ["ps:0"] * 3
    assert [int(each) for each in variables] == [0, 1, 2]
    strategies[1].close()
    assert [int(variables[0]), int(variables[2])] == [0, 2]
    with pytest.raises(errors.UnavailableError):
        variables[1].numpy()


def test_scopes_of_two_strategies_do_not_nest(made: Any) -> None:
    one, two = made(), made()
    with one.scope(), one.scope():
        with pytest.raises(RuntimeError, match="mixed"), two.scope():
            pass
        assert get_strategy() is one
    with two.scope():
        assert get_strategy() is two
    assert get_strategy() is None


def test_scheduling_in_foreign_scope_is_refused(made: Any) -> None:
    one, two = made(), made()
    coordinator = ClusterCoordinator(one)
    for call in (
        coordinator.schedule,
        coordinator.submit,
        coordinator.options(priority=1).submit,
        coordinator.run,
    ):
        with two.scope(), pytest.raises(RuntimeError, match="mixed"):
            call(int)
    with one.scope():
        assert coordinator.schedule(int).fetch() == 0
    assert coordinator.schedule(int).fetch() == 0


def test_contexts_of_scope_and_run(
    strategy: zd.ParameterServerStrategy,
) -> None:
    assert not in_cross_replica_context()
    alone = get_replica_context()
    assert alone is not None
    assert alone.strategy is None

    def replica() -> tuple[Any, bool]:
        return get_replica_context(), in_cross_replica_context()

    with strategy.scope():
        assert in_cross_replica_context()
        assert get_replica_context() is None
        context, cross = strategy.run(replica)
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync, cross) == (0, 1, False)
    assert context.strategy is strategy


# -- one coordinator -------------------------------------------------------------------------------


def test_strategy_has_one_coordinator(strategy: zd.ParameterServerStrategy) -> None:
    def threads() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "zmqdist-coordinator"}

    with strategy.scope():
        pass
    first = ClusterCoordinator(strategy)
    before = threads()
    assert ClusterCoordinator(strategy) is first
    assert threads() <= before
    assert first.schedule(int).fetch() == 0
    assert first.strategy is strategy


def test_threads_share_one_coordinator(
    strategy: zd.ParameterServerStrategy,
) -> None:
    found: list[Any] = []
    begin = threading.Barrier(8)

    def make() -> None:
        begin.wait()
        found.append(ClusterCoordinator(strategy))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in found}) == 1
    assert found[0].schedule(int).fetch() == 0


def test_closed_coordinator_is_replaced(
    strategy: zd.ParameterServerStrategy,
) -> None:
    first = ClusterCoordinator(strategy)
    first.close()
    second = ClusterCoordinator(strategy)
    assert second is not first
    assert second.schedule(int).fetch() == 0


def test_refused_options_leave_no_coordinator(
    strategy: zd.ParameterServerStrategy,
) -> None:
    with pytest.raises(ValueError, match="queue_max"):
        ClusterCoordinator(strategy, queue_max=-1)
    assert ClusterCoordinator(strategy).schedule(int).fetch() == 0


def test_different_options_are_refused(
    strategy: zd.ParameterServerStrategy,
) -> None:
    first = ClusterCoordinator(strategy, queue_max=5)
    assert ClusterCoordinator(strategy) is first
    assert ClusterCoordinator(strategy, queue_max=5) is first
    with pytest.raises(
        errors.InvalidArgumentError,
        match=r"already has its coordinator, made with .*'queue_max': 5",
    ):
        ClusterCoordinator(strategy, queue_max=6)


@pytest.mark.parametrize(
    "call",
    [
        lambda options: OnWorkers().run(int, options=options),
        lambda options: OnWorkers().experimental_distribute_dataset([], options),
        lambda options: OnWorkers().distribute_datasets_from_function(int, options),
        lambda options: OnWorkers().experimental_distribute_datasets_from_function(int, options),
    ],
)
def test_tensorflow_options_are_refused(call: Callable[[Any], object]) -> None:
    with pytest.raises(
        errors.InvalidArgumentError, match=r"has no options: .*Leave `options` out, got 3"
    ):
        call(3)


@pytest.mark.parametrize("other", [3, object(), {"worker": ["localhost:1"]}])
def test_bad_source_of_coordinator_is_refused(other: Any) -> None:
    with pytest.raises(ValueError, match="ParameterServerStrategy"):
        ClusterCoordinator(other)


# -- on workers ------------------------------------------------------------------------------------


def test_strategy_stub_runs_and_reduces(
    anywhere: zd.ParameterServerStrategy,
) -> None:
    coordinator = ClusterCoordinator(anywhere)

    def step() -> Any:
        results = anywhere.run(lambda a, b: a + b, args=(1,), kwargs={"b": 2})
        total = anywhere.reduce("sum", results, axis=None)
        extended = anywhere.extended
        message = (
            extended._num_workers,
            extended._num_ps,
        )  # reach: TensorFlow's own names, which a stub has too
        return (
            type(anywhere).__name__,
            total,
            anywhere.gather(results, axis=0),
            (anywhere.num_replicas_in_sync, *message),
            anywhere.experimental_local_results(3),
        )

    kind, total, gathered, message, local = coordinator.schedule(step).fetch()
    assert (kind, total, gathered) == ("StrategyStub", 3, 3)
    assert message == (1, 2, len(anywhere.cluster_resolver.ps))
    assert local == (3,)


def test_coordinator_stub_cannot_schedule(
    strategy: zd.ParameterServerStrategy, coordinator: ClusterCoordinator
) -> None:
    def step() -> Any:
        assert isinstance(coordinator.strategy, StrategyStub)
        coordinator.schedule(int)

    with pytest.raises(RuntimeError, match="this is a worker"):
        coordinator.schedule(step).fetch()
    with pytest.raises(RuntimeError, match="this is a worker"):
        coordinator.join()
    assert isinstance(trusted.unpack(trusted.pack(coordinator)), CoordinatorStub)


def test_methods_can_be_scheduled(
    anywhere: zd.ParameterServerStrategy,
) -> None:
    class Model:
        def __init__(self) -> None:
            self.strategy = anywhere
            self.coordinator = ClusterCoordinator(anywhere)
            with anywhere.scope():
                self.weights = zd.Variable(np.zeros(3))

        def step(self, x: Any) -> Any:
            def replica() -> Any:
                self.weights.assign_add(x)
                return self.weights.numpy().sum()

            return self.strategy.reduce("SUM", self.strategy.run(replica), axis=None)

    model = Model()
    assert model.coordinator.schedule(model.step, (np.ones(3),)).fetch() == 3.0
    assert model.weights.numpy().tolist() == [1.0, 1.0, 1.0]


def test_scheduled_function_makes_no_variable(
    anywhere: zd.ParameterServerStrategy,
) -> None:
    coordinator = ClusterCoordinator(anywhere)

    def inside() -> None:
        with anywhere.scope():
            zd.Variable(0.0)

    def outside() -> None:
        zd.Variable(0.0)

    for fn in (inside, outside):
        with pytest.raises(RuntimeError, match="cannot be made in a scheduled function"):
            coordinator.schedule(fn).fetch()
        with pytest.raises(RuntimeError):
            coordinator.join()


# -- run and reduce outside scheduled functions ----------------------------------------------------


def _warnings(caplog: pytest.LogCaptureFixture) -> int:
    message = [
        record
        for record in caplog.records
        if "without ClusterCoordinator.schedule" in record.getMessage()
    ]
    caplog.clear()
    return len(message)


def test_run_outside_functions_warns(
    anywhere: zd.ParameterServerStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = ClusterCoordinator(anywhere)
    caplog.set_level(logging.WARNING, "zmqdist.training")

    def step() -> Any:
        value = anywhere.run(lambda: ((2, 0),))
        return anywhere.reduce("SUM", value, axis=None)

    assert step() == ((2, 0),)
    assert _warnings(caplog) == 2
    assert coordinator.schedule(step).fetch() == ((2, 0),)
    assert _warnings(caplog) == 0
    step()
    assert _warnings(caplog) == 2
    anywhere.extended._allow_run_without_coordinator = (
        True  # reach: TensorFlow's own name, which this test is about
    )
    step()
    assert _warnings(caplog) == 0


@pytest.mark.parametrize("axis", [None, 0])
def test_reduce_needs_axis_and_operation(strategy: zd.ParameterServerStrategy, axis: Any) -> None:
    with pytest.raises(TypeError):
        strategy.reduce("SUM", 1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="SUM"):
        strategy.reduce("MAX", 1, axis=axis)
    assert strategy.reduce("SUM", None, axis=None) is None
    assert strategy.reduce("mean", np.array([[1.0, 3.0]]), axis=1).tolist() == [2.0]
    assert strategy.reduce("SUM", np.array([[1.0, 3.0]]), axis=(0, 1)) == 4.0


def test_resolver_and_devices_of_strategy(
    strategy: zd.ParameterServerStrategy, threads: Any
) -> None:
    assert strategy.cluster_resolver is threads
    assert len(strategy.cluster_resolver.ps) == 3
    assert strategy.extended.worker_devices == (
        "/job:worker/replica:0/task:0/device:CPU:0",
        "/job:worker/replica:0/task:1/device:CPU:0",
    )
    assert strategy.num_replicas_in_sync == 1
    with pytest.raises(TypeError):
        zd.ParameterServerStrategy()  # type: ignore[call-arg]


def test_dropped_strategy_ends_its_thread(
    threads: zd.local_cluster,
) -> None:
    before = set(threading.enumerate())
    strategy = zd.ParameterServerStrategy(threads)
    with strategy.scope():
        variable = zd.Variable(0.0)
    mine = [
        each for each in set(threading.enumerate()) - before if each.name == "zmqdist-coordinator"
    ]
    assert len(mine) == 1
    del strategy, variable
    gc.collect()
    mine[0].join(30.0)
    assert not mine[0].is_alive()
