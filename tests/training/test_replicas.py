"""Replicas of one worker: what `run` calls in each, how their values come together, and what their
assignments become."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.coordinator.helpers import refuse_threads
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.optimizers import SGD
from zmqdist.parameter_server import PerReplica, get_replica_context, in_cross_replica_context

pytestmark = pytest.mark.shares_cluster  # servers in this process start threads as they need them


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


@pytest.fixture(params=[1, 2, 3])
def replicated(request: pytest.FixtureRequest, made: Any) -> zd.ParameterServerStrategy:
    """A strategy with 1, 2 or 3 replicas on a worker."""
    strategy: zd.ParameterServerStrategy = made(replicas_per_worker=request.param)
    return strategy


@pytest.fixture
def two(made: Any) -> zd.ParameterServerStrategy:
    """A strategy with two replicas on a worker."""
    strategy: zd.ParameterServerStrategy = made(replicas_per_worker=2)
    return strategy


def _replica() -> int:
    context = get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


# -- run, reduce, gather ---------------------------------------------------------------------------


@pytest.mark.parametrize("in_scope", [True, False])
def test_run_and_reduce_add_replicas(
    replicated: zd.ParameterServerStrategy, in_scope: bool
) -> None:
    coordinator = ClusterCoordinator(replicated)
    count = replicated.num_replicas_in_sync

    def replica() -> Any:
        assert not in_cross_replica_context()
        return np.int64(2) + np.int64(2), np.int64(_replica())

    def step() -> Any:
        values = replicated.run(replica)
        return replicated.reduce("SUM", values, axis=None), replicated.reduce(
            "mean", values, axis=None
        )

    def schedule() -> Any:
        return coordinator.schedule(step).fetch()

    if in_scope:
        with replicated.scope():
            total, mean = schedule()
    else:
        total, mean = schedule()
    assert total == (4 * count, sum(range(count)))
    assert mean == (4, (count - 1) / 2)


def test_replica_gets_its_part_of_arguments(two: zd.ParameterServerStrategy) -> None:
    given = two.experimental_distribute_values_from_function(
        lambda context: {
            "id": context.replica_id_in_sync_group,
            "of": context.num_replicas_in_sync * 1000,
        }
    )
    results = two.run(
        lambda values, same, other: (values["id"], values["of"], same, other),
        (given, [5]),
        {"other": "x"},
    )
    assert two.experimental_local_results(results) == ((0, 2000, [5], "x"), (1, 2000, [5], "x"))


def test_replica_gets_its_part_of_dataclass(
    two: zd.ParameterServerStrategy,
) -> None:
    parts = PerReplica([1, 2])
    results = two.run(
        lambda pair, table: (pair, list(table.values())),
        (Pair(parts, [parts]), {"a": parts, 3: parts}),
    )
    assert two.experimental_local_results(results) == (
        (Pair(1, [1]), [1, 1]),
        (Pair(2, [2]), [2, 2]),
    )


def test_mean_along_axes_is_weighted(two: zd.ParameterServerStrategy) -> None:
    value = PerReplica([np.array([1.0, 2.0, 3.0]), np.array([10.0])])
    assert two.reduce("MEAN", value, axis=0) == 4.0
    assert two.reduce("SUM", value, axis=0) == 16.0
    table = PerReplica([np.ones((2, 3)), np.zeros((2, 3))])
    assert two.reduce("sum", table, axis=(0, 1)) == 6.0
    assert two.reduce("MEAN", table, axis=1).tolist() == [0.5, 0.5]


def test_sum_of_equal_values_is_refused(
    two: zd.ParameterServerStrategy,
) -> None:
    with pytest.raises(ValueError, match="the same in all 2 replicas"):
        two.reduce("SUM", 3.0, axis=None)
    assert two.reduce("MEAN", 3.0, axis=None) == 3.0
    assert two.reduce("SUM", two.run(lambda: None), axis=None) is None


def test_gather_concatenates_replicas(
    two: zd.ParameterServerStrategy,
) -> None:
    value = PerReplica([np.array([[1], [2]]), np.array([[3]])])
    assert two.gather(value, axis=0).tolist() == [[1], [2], [3]]
    assert two.gather(5, axis=0) == 5


def test_error_of_a_replica_is_raised(two: zd.ParameterServerStrategy) -> None:
    def replica() -> None:
        if _replica() == 1:
            raise LookupError("mine")
        get_replica_context().merge_call(lambda strategy: None)  # type: ignore[union-attr]

    with pytest.raises(LookupError, match="mine"):
        two.run(replica)
    assert two.reduce("SUM", two.run(lambda: np.int64(_replica())), axis=None) == 1


# -- merging ---------------------------------------------------------------------------------------


def test_merge_call_runs_once(
    two: zd.ParameterServerStrategy,
) -> None:
    calls = []

    def merge(strategy: Any, value: Any, *, name: Any) -> Any:
        calls.append(
            (strategy, in_cross_replica_context(), get_replica_context(), value.values, name.values)
        )
        return PerReplica([f"{name.values[0]}{each}" for each in value.values]), "both"

    def replica() -> Any:
        context = get_replica_context()
        assert context is not None
        return [
            context.merge_call(merge, (10 * _replica() + time,), {"name": "n"}) for time in range(2)
        ]

    first, second = two.experimental_local_results(two.run(replica))
    assert first == [("n0", "both"), ("n1", "both")]
    assert second == [("n10", "both"), ("n11", "both")]
    assert calls == [(two, True, None, (0, 10), ("n", "n")), (two, True, None, (1, 11), ("n", "n"))]


def test_error_of_merge_reaches_all_replicas(two: zd.ParameterServerStrategy) -> None:
    caught = []

    def merge(strategy: Any) -> None:
        raise LookupError("merged")

    def replica() -> None:
        try:
            get_replica_context().merge_call(merge)  # type: ignore[union-attr]
        except LookupError as error:
            caught.append(error)
            raise

    with pytest.raises(LookupError, match="merged"):
        two.run(replica)
    assert len(caught) == 2


def test_unfinished_merge_is_an_error(
    two: zd.ParameterServerStrategy,
) -> None:
    def replica() -> None:
        if _replica() == 0:
            get_replica_context().merge_call(lambda strategy: None)  # type: ignore[union-attr]

    with pytest.raises(RuntimeError, match="without making this merge_call"):
        two.run(replica)


def test_all_reduce_is_equal_everywhere(two: zd.ParameterServerStrategy) -> None:
    def replica() -> Any:
        return get_replica_context().all_reduce("SUM", np.float64(_replica() + 1))  # type: ignore[union-attr]

    assert two.experimental_local_results(two.run(replica)) == (3.0, 3.0)
    assert two.reduce("SUM", two.run(lambda: 3), axis=None) == 6


# -- assignments of replicas -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "wanted"), [("SUM", 3.0), ("mean", 1.5), ("only_first_replica", 1.0)]
)
def test_assignment_is_made_once(
    two: zd.ParameterServerStrategy, aggregation: str, wanted: float
) -> None:
    coordinator = ClusterCoordinator(two)
    with two.scope():
        v = zd.Variable(0.0, aggregation=aggregation)

    def step() -> Any:
        two.run(lambda: v.assign_add(_replica() + 1.0))
        return v.version

    assert coordinator.schedule(step).fetch() == 2
    assert v.numpy() == wanted
    two.run(lambda: v.assign(_replica() + 1.0))
    assert v.numpy() == wanted
    two.run(lambda: v.assign_sub(_replica() + 1.0))
    assert v.numpy() == 0.0


@pytest.mark.parametrize(("values", "wanted"), [((2, 4), 3), ((2, 3), 2), ((-2, -3), -2)])
def test_mean_of_integers_rounds_to_zero(
    two: zd.ParameterServerStrategy, values: tuple[int, int], wanted: int
) -> None:
    with two.scope():
        v = zd.Variable(0, aggregation="mean")
        rows = zd.Variable(np.zeros((2, 1), np.int64), aggregation="mean")
    two.run(lambda: v.assign(values[_replica()]))
    assert v.numpy() == wanted
    two.run(
        lambda: rows.scatter_add(zd.IndexedSlices(np.array([[values[_replica()]]]), [_replica()]))
    )
    assert rows.numpy().tolist() == [[int(each / 2)] for each in values]


def test_missing_threads_are_an_error(
    two: zd.ParameterServerStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two.scope():
        v = zd.Variable(0.0, aggregation="sum")
    with monkeypatch.context() as full:
        refuse_threads(full, "zmqdist-replica-1")
        with pytest.raises(RuntimeError, match="can't start new thread"):
            two.run(lambda: v.assign_add(1.0))
    assert v.numpy() == 0.0


def test_assignment_outside_replicas(two: zd.ParameterServerStrategy) -> None:
    with two.scope():
        v = zd.Variable(0.0, aggregation="mean")
        w = zd.Variable(0.0)
    v.assign_add(2.0)
    w.assign_add(2.0)
    with two.scope():
        v.assign_add(2.0)
    assert (v.numpy(), w.numpy()) == (4.0, 2.0)


def test_equal_values_by_sum_and_mean(
    two: zd.ParameterServerStrategy,
) -> None:
    with two.scope():
        total, mean = zd.Variable(1.0, aggregation="sum"), zd.Variable(1.0, aggregation="mean")
    two.run(lambda: (total.assign_add(2.0), mean.assign_add(2.0)))
    assert (total.numpy(), mean.numpy()) == (5.0, 3.0)


def test_assignment_needs_aggregation(
    two: zd.ParameterServerStrategy,
) -> None:
    with two.scope():
        v = zd.Variable(0.0, name="w")
    with pytest.raises(ValueError, match=r"'w'.*aggregation"):
        two.run(lambda: v.assign(1.0))
    assert v.numpy() == 0.0


def test_first_replica_counts_in_functions(
    replicated: zd.ParameterServerStrategy,
) -> None:
    coordinator = ClusterCoordinator(replicated)
    with replicated.scope():
        v = zd.Variable(0, aggregation="only_first_replica")

    def step() -> Any:
        def replica() -> Any:
            v.assign_add(3)
            return np.int64(1)

        return replicated.reduce("SUM", replicated.run(replica), axis=None)

    results = [coordinator.schedule(step) for _ in range(2)]
    coordinator.join()
    assert v.numpy() == 6
    assert [each.fetch() for each in results] == [replicated.num_replicas_in_sync] * 2


def test_sparse_and_sharded_aggregate(made: Any) -> None:
    strategy = made(lambda shape, dtype: [2] + [1] * (len(shape) - 1), replicas_per_worker=2)
    with strategy.scope():
        v = zd.Variable(np.zeros((4, 1)), aggregation="sum")
    assert isinstance(v, zd.ShardedVariable)

    def replica() -> None:
        number = _replica()
        v.assign_add(np.full((4, 1), number + 1.0))
        v.variables[1].scatter_add(zd.IndexedSlices(np.full((1, 1), 10.0), np.array([number])))

    strategy.run(replica)
    assert v.numpy().ravel().tolist() == [3.0, 3.0, 13.0, 13.0]

    def step() -> None:
        strategy.apply(SGD(1.0), [(np.full((4, 1), _replica() + 1.0), v), (None, v)])

    strategy.run(step)
    assert v.numpy().ravel().tolist() == [0.0, 0.0, 10.0, 10.0]


def test_replicas_run_in_own_threads(
    two: zd.ParameterServerStrategy,
) -> None:
    together = threading.Barrier(2)

    def replica() -> Any:
        together.wait(30.0)
        return threading.get_ident()

    one, other = two.experimental_local_results(two.run(replica))
    assert one != other


def test_refusal_of_ps_ends_all_replicas(two: zd.ParameterServerStrategy) -> None:
    with two.scope():
        v = zd.Variable(np.zeros(2), aggregation="sum")
    with pytest.raises(errors.InvalidArgumentError, match="shape"):
        two.run(lambda: v.assign_add(np.zeros(3)))


def test_replicas_change_different_shards(made: Any) -> None:
    strategy = made(lambda shape, dtype: [2, 1], replicas_per_worker=2)
    with strategy.scope():
        table = zd.Variable(np.zeros((4, 2)), aggregation="sum")

    def change() -> None:
        row = 3 * _replica()  # of another shard for each replica
        table.scatter_add(zd.IndexedSlices(np.full((1, 2), row + 1.0), np.array([row])))
        table.assign_add(np.full((4, 2), 0.5))
        table.apply(SGD(1.0), zd.IndexedSlices(np.ones((1, 2)), np.array([row])))

    strategy.run(change)
    assert table.numpy().tolist() == [[1, 1], [1, 1], [1, 1], [4, 4]]


def test_replicas_must_change_one_variable(
    two: zd.ParameterServerStrategy,
) -> None:
    with two.scope():
        both = [zd.Variable(0.0, aggregation="sum", name=name) for name in ("left", "right")]
    with pytest.raises(RuntimeError, match="at the same time: all replicas"):
        two.run(lambda: both[_replica()].assign_add(1.0))
    assert two.read(both) == [0, 0]
