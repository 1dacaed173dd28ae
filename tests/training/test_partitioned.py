"""Variables that a strategy cuts into shards, on parameter servers: where they go, what they begin
with, what workers do with them."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest

import zmqdist as zd
from tests.training.conftest import Cluster
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.data.composites import Sparse
from zmqdist.errors import InvalidArgumentError, PSUnavailableError, UnknownError
from zmqdist.parameter_server import get_replica_context
from zmqdist.training.embedding import (
    embedding_lookup,
    embedding_lookup_sparse,
    safe_embedding_lookup_sparse,
)
from zmqdist.variables.client import client_of

pytestmark = pytest.mark.shares_cluster  # servers in this process start threads as they need them

Make = Callable[..., zd.ParameterServerStrategy]
F32 = np.float32


def cut(shards: int) -> zd.partitioners.Partitioner:
    return zd.partitioners.FixedShardsPartitioner(shards)


def tasks(variable: Any) -> list[str]:
    return [shard.task for shard in variable]


def sizes(variable: Any) -> list[tuple[int, ...]]:
    return [shard.shape for shard in variable]


# -- how variables are cut -------------------------------------------------------------------------


def test_variable_without_partitioner_is_whole(
    strategy: zd.ParameterServerStrategy,
) -> None:
    with strategy.scope():
        variable = zd.Variable([[0, 1, 2]])
    assert isinstance(variable, zd.Variable)


def test_shards_go_round_the_servers(made: Make) -> None:
    with made(cut(2)).scope():
        first = zd.Variable(np.arange(10, dtype=F32).reshape(5, 2), name="w")
        second = zd.Variable(np.zeros((6, 1), F32), name="w")
    assert isinstance(first, zd.ShardedVariable)
    assert (first.name, [shard.name for shard in first]) == ("w", ["w/part_0", "w/part_1"])
    assert (second.name, [shard.name for shard in second]) == ("w_1", ["w_1/part_0", "w_1/part_1"])
    assert (sizes(first), tasks(first)) == ([(3, 2), (2, 2)], ["ps:0", "ps:1"])
    assert (sizes(second), tasks(second)) == ([(3, 1), (3, 1)], ["ps:2", "ps:0"])
    assert first.variables[1].numpy().tolist() == [[6, 7], [8, 9]]
    assert second.numpy().tolist() == [[0]] * 6


def test_array_value_is_cut(made: Make) -> None:
    with made(cut(4)).scope():
        variable = zd.Variable([float(number) for number in range(10)])
    assert [shard.numpy().tolist() for shard in variable] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert tasks(variable) == ["ps:0", "ps:1", "ps:2", "ps:0"]


def test_shards_are_not_more_than_rows(made: Make) -> None:
    with made(cut(4)).scope():
        variable = zd.Variable([[1], [2], [3]])
    assert sizes(variable) == [(1, 1)] * 3


def test_single_shard_is_a_variable(made: Make) -> None:
    with made(cut(1)).scope():
        variables = [zd.Variable(np.zeros((2, 2))) for _ in range(4)]
    assert [type(variable) for variable in variables] == [zd.Variable] * 4
    assert [variable.task for variable in variables] == ["ps:0", "ps:1", "ps:2", "ps:0"]


def test_scalar_and_colocated_stay_whole(made: Make) -> None:
    strategy = made(cut(2))
    with strategy.scope():
        scalar = zd.Variable(1.0)
        with strategy.extended.colocate_vars_with(scalar):
            beside = zd.Variable(np.zeros((4, 2)))
        after = zd.Variable(np.zeros((2, 2)))
    assert (scalar.task, beside.task, tasks(after)) == ("ps:0", "ps:0", ["ps:1", "ps:2"])


@pytest.mark.parametrize("wrong", [None, [], [0, 1, 1], [2, 2, 1]])
def test_bad_partitioner_makes_nothing(made: Make, wrong: Any) -> None:
    strategy = made(lambda shape, dtype: wrong)
    with strategy.scope(), pytest.raises(ValueError, match="variable_partitioner"):
        zd.Variable(np.zeros((4, 3, 2)))
    assert strategy.placement == []


class Identity:
    """Makes parts of an identity matrix, and refuses to make all of it."""

    def __call__(self, shape: Any, dtype: Any, **part: Any) -> Any:
        rows, columns = part["partition_shape"]
        first = part["partition_offset"][0]
        if rows == shape[0]:
            raise AssertionError("called for the whole")
        return np.eye(rows, columns, first, dtype=dtype)


def test_part_initializer_runs_at_each_ps(
    cut_in: Any,
) -> None:
    with cut_in(2).scope():
        variable = zd.Variable(functools.partial(Identity(), (4, 4), F32), shape=(4, 4), dtype=F32)
    assert sizes(variable) == [(2, 4), (2, 4)]
    assert np.array_equal(variable.numpy(), np.eye(4))


def test_whole_initializer_is_cut(cut_in: Any) -> None:
    with cut_in(2).scope():
        variable = zd.Variable(lambda: np.arange(5.0), shape=(5,), dtype=F32)
    assert [shard.numpy().tolist() for shard in variable] == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("given", [{}, {"shape": (4, 4)}, {"dtype": np.float64}])
def test_function_without_shape_is_cut(made: Make, given: dict[str, Any]) -> None:
    with made(cut(2)).scope():
        variable = zd.Variable(lambda: np.eye(4), **given)
    assert isinstance(variable, zd.ShardedVariable)
    assert np.array_equal(variable.numpy(), np.eye(4))


def test_failed_initializer_names_shard_and_task(made: Make) -> None:
    with (
        made(cut(2)).scope(),
        pytest.raises(UnknownError, match=r"'w/part_0' on ps:0.* ZeroDivisionError"),
    ):
        zd.Variable(lambda: 1 / 0, shape=(4,), dtype=F32, name="w")


def test_missing_value_is_refused(made: Make) -> None:
    with made(cut(2)).scope(), pytest.raises(ValueError, match="needs an initial_value"):
        zd.Variable(shape=(4,), dtype=F32)


def test_lazy_variables_are_made_once(
    made: Make,
) -> None:
    kept: list[Any] = []

    def lazily() -> Any:
        if not kept:
            kept.append(zd.Variable(np.zeros((4, 1), F32)))
        return kept[0].assign_add(np.ones((4, 1)))

    with made(cut(2)).scope():
        assert lazily() is lazily()
    assert kept[0].numpy().tolist() == [[2]] * 4


# -- replicas --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
def test_replicas_update_each_shard_once(made: Make, shards: int) -> None:
    strategy = made(cut(shards), replicas_per_worker=2)
    with strategy.scope():
        variable = zd.Variable(np.zeros(2, F32), aggregation="sum")

    def replica() -> None:
        context = get_replica_context()
        assert context is not None
        number = context.replica_id_in_sync_group
        variable.assign(np.array([number + 10, number + 1], F32))

    def step() -> None:
        strategy.run(replica)

    coordinator = ClusterCoordinator(strategy)
    coordinator.schedule(step)
    coordinator.join()
    assert variable.numpy().tolist() == [21, 3]


# -- on workers ------------------------------------------------------------------------------------


def test_scheduled_function_changes_the_original(cut_in: Any) -> None:
    strategy = cut_in(2)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        table = zd.Variable(np.arange(8, dtype=F32).reshape(4, 2), name="table")

    def step(variable: Any, captured_too: bool = False) -> Any:
        assert isinstance(variable, zd.ShardedVariable)
        variable.assign_add(np.ones((4, 2)))
        variable.scatter_add(zd.IndexedSlices(np.full((2, 2), 10), [3, 0]))
        return (
            variable[1:3],
            variable.sparse_read([3, 0]),
            (table + 0).shape,
            len(variable),
            variable is table,
        )

    middle, ends, shape, length, same = coordinator.schedule(step, args=(table,)).fetch()
    assert middle.tolist() == [[3, 4], [5, 6]]
    assert ends.tolist() == [[17, 18], [11, 12]]
    assert (shape, length, same) == ((4, 2), 4, True)
    assert table.numpy().tolist() == [[11, 12], [3, 4], [5, 6], [17, 18]]


def test_handle_has_constant_size(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from zmqdist.scheduling.coordinator import functions

    strategy = made(cut(2))
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        tables = [zd.Variable(np.full((rows, 2), rows, F32)) for rows in (4, 4, 40_000)]
    defined: list[Any] = []
    take = functions.FunctionNumbers.take

    def seen(self: Any) -> Any:
        taken = take(self)
        defined.extend(taken[0])
        return taken

    monkeypatch.setattr(functions.FunctionNumbers, "take", seen)

    def double(variable: Any) -> None:
        variable.assign(variable * 2)

    for table in tables:
        coordinator.schedule(double, args=(table,))
    coordinator.join()
    assert [table[0, 0] for table in tables] == [8, 8, 80_000]
    assert len(defined) == 1
    weights = [len(cloudpickle.dumps(table)) for table in tables]
    assert max(weights) - min(weights) < 50


def test_returned_handle_is_the_same(made: Make) -> None:
    with made(cut(2)).scope():
        table = zd.Variable(np.zeros(4))
    assert cloudpickle.loads(cloudpickle.dumps(table)) is table
    shards = table.variables
    blob = cloudpickle.dumps(table)
    del table
    gc.collect()
    again = cloudpickle.loads(blob)
    assert [one is other for one, other in zip(again, shards, strict=True)] == [True, True]
    assert cloudpickle.loads(cloudpickle.dumps(again)) is again


def test_reads_are_cached_like_one_variable(made: Make) -> None:
    with made(cut(2)).scope():
        table = zd.Variable(np.zeros(4))
    with zd.cache_variable_reads():
        assert table.numpy().tolist() == [0] * 4
        table.assign_add(np.ones(4))
        assert table.numpy().tolist() == [0] * 4
        assert table.sparse_read([3]).tolist() == [1]
    assert table.numpy().tolist() == [1] * 4


# -- what moves ------------------------------------------------------------------------------------


class Moved:
    """Bytes of values that left the parameter servers."""

    def __init__(self, strategy: zd.ParameterServerStrategy) -> None:
        self._addresses = strategy.cluster_resolver.ps
        self._session = strategy.session
        self._before = self._total()

    def _total(self) -> int:
        message = [client_of(address).status().get_value() for address in self._addresses]
        return sum(
            one["bytes_out"]
            for each in message
            for one in each["variables"]
            if one["session"] == self._session
        )

    def since(self) -> int:
        before, self._before = self._before, self._total()
        return self._before - before


def sparse(bags: list[list[Any]], dtype: Any = np.int64) -> Sparse:
    places = [(row, column) for row, bag in enumerate(bags) for column in range(len(bag))]
    values = np.array([value for bag in bags for value in bag], dtype)
    return Sparse(np.array(places), values, np.array([len(bags), max(map(len, bags))]))


def test_lookup_moves_only_its_rows(cut_in: Any) -> None:
    strategy = cut_in(3)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        table = zd.Variable(np.arange(1, 11, dtype=F32).reshape(5, 2), name="table")
    assert sizes(table) == [(2, 2), (2, 2), (1, 2)]
    moved = Moved(strategy)
    row = 2 * 4

    def dense() -> Any:
        return embedding_lookup(table, [4, 0, 3])

    def mean() -> Any:
        return embedding_lookup_sparse(table, sparse([[0, 3], [4], [1]]))

    def safe() -> Any:
        return safe_embedding_lookup_sparse(
            table, sparse([[0, -1], [4], [1]]), sparse([[1, 1], [-1], [1]], F32)
        )

    assert coordinator.schedule(dense).fetch().tolist() == [[9, 10], [1, 2], [7, 8]]
    assert moved.since() == 3 * row
    assert coordinator.schedule(mean).fetch().tolist() == [[4, 5], [9, 10], [3, 4]]
    assert moved.since() == 4 * row
    assert coordinator.schedule(safe).fetch().tolist() == [[1, 2], [0, 0], [3, 4]]
    assert moved.since() == 2 * row


def test_lookup_in_two_variables_moves_its_rows(
    cut_in: Any,
) -> None:
    strategy = cut_in(1)
    with strategy.scope():
        halves = [zd.Variable(np.full((1000, 4), number, F32)) for number in (1, 2)]
    moved = Moved(strategy)
    for tables in (halves, cloudpickle.loads(cloudpickle.dumps(halves))):
        assert embedding_lookup(tables, [0, 1999, 1000])[:, 0].tolist() == [1, 2, 2]
        assert moved.since() == 3 * 4 * 4


@pytest.mark.parametrize(
    ("key", "rows"),
    [
        (7, 1),
        (slice(2, 8, 3), 2),
        (slice(9, 2, -1), 7),
        ([9, 0], 2),
        (slice(5, 5), 0),
        (slice(None), 10),
    ],
)
def test_index_moves_only_its_rows(made: Make, key: Any, rows: int) -> None:
    strategy = made(cut(3))
    value = np.arange(80, dtype=F32).reshape(10, 8)
    with strategy.scope():
        table = zd.Variable(value)
    moved = Moved(strategy)
    assert np.array_equal(table[key], value[key])
    assert moved.since() == rows * 8 * 4


def test_index_of_whole_variable_moves_its_rows(
    strategy: Any,
) -> None:
    with strategy.scope():
        table = zd.Variable(np.arange(80, dtype=F32).reshape(10, 8))
    moved = Moved(strategy)
    assert table[3:5, 0].tolist() == [24, 32]
    assert moved.since() == 2 * 8 * 4


# -- optimizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "optimizer",
    [
        zd.optimizers.SGD(0.1),
        zd.optimizers.Momentum(0.1, 0.9),
        zd.optimizers.Adagrad(0.1),
        zd.optimizers.Adam(0.1),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_optimizer_trains_shards_like_one_variable(
    made: Make, optimizer: Any, batched: bool
) -> None:
    whole, cut_up = made(), made(cut(3))
    value = np.arange(14, dtype=F32).reshape(7, 2)
    with whole.scope():
        one = zd.Variable(value)
    with cut_up.scope():
        table = zd.Variable(value)
    random = np.random.default_rng(1)
    for _ in range(3):
        gradients = [
            random.normal(size=(7, 2)).astype(F32),
            zd.IndexedSlices(random.normal(size=(4, 2)).astype(F32), np.array([6, 0, 6, 1])),
            zd.IndexedSlices(np.zeros((0, 2), F32), np.zeros(0, np.int64)),
        ]
        for grad in gradients:
            if batched:
                whole.apply(optimizer, [(grad, one)])
                cut_up.apply(optimizer, [(grad, table)])
            else:
                one.apply(optimizer, grad)
                table.apply(optimizer, grad)
    assert np.allclose(table.numpy(), one.numpy(), rtol=1e-6)


def test_unfit_gradient_is_refused_first(made: Make) -> None:
    strategy = made(cut(2))
    with strategy.scope():
        table = zd.Variable(np.zeros((4, 2), F32), name="table")
    before = table.version
    for grad in (
        np.zeros((3, 2)),
        np.zeros(8),
        zd.IndexedSlices(np.zeros((1, 2)), [4]),
        zd.IndexedSlices(np.zeros((1, 3)), [0]),
    ):
        for apply in (
            lambda grad: table.apply(zd.optimizers.SGD(0.1), grad),
            lambda grad: strategy.apply(zd.optimizers.SGD(0.1), [(grad, table)]),
        ):
            with pytest.raises(InvalidArgumentError, match="variable 'table'"):
                apply(grad)
    assert table.version == before


def test_failed_function_names_shard_and_task(made: Make) -> None:
    with made(cut(2)).scope():
        table = zd.Variable(np.zeros(4, F32), name="table")

    def fails_for_ones(value: Any, grad: Any, slots: Any, step: int) -> Any:
        if grad[0] == 1:
            raise OverflowError("too much")
        return value - grad

    with pytest.raises(
        UnknownError, match=r"'table/part_1' on ps:1.*fails_for_ones raised OverflowError: too much"
    ):
        table.apply(fails_for_ones, [2, 2, 1, 1])
    assert table.numpy().tolist() == [-2, -2, 0, 0]


# -- a parameter server that dies ------------------------------------------------------------------


def test_lost_shard_is_named(
    cluster: Callable[..., Cluster],
) -> None:
    servers = cluster(1, 2)
    strategy = zd.ParameterServerStrategy(servers.spec, cut(2))
    with strategy.scope():
        table = zd.Variable(np.arange(4, dtype=F32), name="table")
    servers.kill("ps", 1)
    rows = zd.IndexedSlices(np.ones(2, F32), [0, 3])
    for ask in (
        lambda: table.numpy(),
        lambda: table[3],
        lambda: table.sparse_read([0, 2]),
        lambda: table.assign(np.zeros(4)),
        lambda: table.scatter_add(rows),
        lambda: table.apply(zd.optimizers.SGD(0.1), rows),
    ):
        with pytest.raises(PSUnavailableError, match=r"'table/part_1' on ps:1"):
            ask()
    assert table[:2].tolist() == pytest.approx([0.9, 0])
    assert table.embedding_lookup([1]).tolist() == [0]
    assert table.scatter_add(zd.IndexedSlices(np.ones(1, F32), [1])) is table
    strategy.close()
