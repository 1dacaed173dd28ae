"""cache_variable_reads: a variable is read once in a scope, also on workers and in replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.scheduling.coordinator import functions

pytestmark = pytest.mark.shares_cluster  # servers in this process start threads as they need them


@pytest.fixture
def v(strategy: zd.ParameterServerStrategy) -> Any:
    with strategy.scope():
        return zd.Variable(1.0)


def test_reads_are_equal_inside_the_scope(v: Any) -> None:
    with zd.cache_variable_reads():
        assert v.read_value() == 1.0
        v.assign(2.0)
        assert v.read_value() == 1.0
        assert v.value() == 1.0
        assert v.numpy() == 1.0
        assert v + 1.0 == 2.0
        assert float(v) == 1.0
    assert v.read_value() == 2.0
    with zd.cache_variable_reads():
        assert v.read_value() == 2.0
        v.assign(3.0)
        assert v.read_value() == 2.0


def test_cache_begins_at_the_first_read(v: Any) -> None:
    with zd.cache_variable_reads():
        v.assign(5.0)
        assert v.numpy() == 5.0


def test_cached_value_belongs_to_its_reader(strategy: zd.ParameterServerStrategy) -> None:
    with strategy.scope():
        v = zd.Variable(np.zeros(3))
    with zd.cache_variable_reads():
        first = v.numpy()
        first[:] = 7.0
        assert v.numpy().tolist() == [0.0, 0.0, 0.0]


def test_rows_are_never_cached(strategy: zd.ParameterServerStrategy) -> None:
    with strategy.scope():
        v = zd.Variable(np.zeros((2, 1)))
    with zd.cache_variable_reads():
        assert v.numpy().tolist() == [[0.0], [0.0]]
        assert v.sparse_read([1]).tolist() == [[0.0]]
        v.assign([[1.0], [2.0]])
        assert v.sparse_read([1]).tolist() == [[2.0]]
        assert v.gather_nd([[0, 0]]).tolist() == [1.0]
        assert v.numpy().tolist() == [[0.0], [0.0]]


def test_shards_are_cached(made: Any) -> None:
    strategy = made(lambda shape, dtype: [2, 1])
    with strategy.scope():
        v = zd.Variable(np.zeros((2, 1)))
    with zd.cache_variable_reads():
        assert v.numpy().tolist() == [[0.0], [0.0]]
        v.assign([[1.0], [2.0]])
        assert v.numpy().tolist() == [[0.0], [0.0]]
    assert v.numpy().tolist() == [[1.0], [2.0]]


def test_nested_scope_is_refused(v: Any) -> None:
    with zd.cache_variable_reads():
        assert v.numpy() == 1.0
        with pytest.raises(ValueError, match="nested"), zd.cache_variable_reads():
            pass
        v.assign(2.0)
        assert v.numpy() == 1.0
    assert v.numpy() == 2.0
    with zd.cache_variable_reads():
        assert v.numpy() == 2.0
        v.assign(3.0)
        assert v.numpy() == 2.0


@pytest.mark.parametrize("replicas", [1, 2])
def test_scope_in_function_covers_run(made: Any, replicas: int) -> None:
    strategy = made(replicas_per_worker=replicas)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = zd.Variable(1.0, aggregation="only_first_replica")

    def step() -> Any:
        def replica() -> Any:
            before = v.read_value()
            v.assign_add(1.0)
            return before + v.read_value() + v * 1.0

        with zd.cache_variable_reads():
            cached = strategy.reduce("MEAN", strategy.run(replica), axis=None)
        return cached, v.read_value()

    assert coordinator.schedule(step).fetch() == (3.0, 2.0)


def test_scope_around_schedule_goes_along(
    anywhere: zd.ParameterServerStrategy,
) -> None:
    coordinator = ClusterCoordinator(anywhere)
    with anywhere.scope():
        v = zd.Variable(1.0)

    def step() -> Any:
        first = v.read_value()
        v.assign_add(3.0)
        return first + v.read_value()

    with zd.cache_variable_reads():
        cached = coordinator.schedule(step)
    coordinator.join()
    assert cached.fetch() == 2.0
    assert v.numpy() == 4.0
    assert coordinator.schedule(step).fetch() == 4.0 + 7.0


def test_scope_around_map_goes_along(coordinator: ClusterCoordinator) -> None:
    def inside(_: int) -> bool:
        try:
            with zd.cache_variable_reads():
                return False
        except ValueError:  # it cannot be nested
            return True

    with zd.cache_variable_reads():
        values = coordinator.map(inside, range(3))
    assert coordinator.fetch(values) == [True] * 3
    assert coordinator.fetch(coordinator.map(inside, range(3))) == [False] * 3


def test_function_in_scope_opens_no_other(
    coordinator: ClusterCoordinator,
) -> None:
    def step() -> None:
        with zd.cache_variable_reads():
            pass

    with zd.cache_variable_reads():
        value = coordinator.schedule(step)
    with pytest.raises(ValueError, match="nested"):
        value.fetch()
    with pytest.raises(ValueError, match="nested"):
        coordinator.join()


def test_cached_function_is_sent_once(
    coordinator: ClusterCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    defined: list[Any] = []
    take = functions.FunctionNumbers.take

    def seen(self: Any) -> Any:
        taken = take(self)
        defined.extend(taken[0])
        return taken

    monkeypatch.setattr(functions.FunctionNumbers, "take", seen)
    with zd.cache_variable_reads():
        for _ in range(5):
            coordinator.schedule(_nothing)
    coordinator.join()
    assert len(defined) == 1


def _nothing() -> None:
    """By name on the workers."""
