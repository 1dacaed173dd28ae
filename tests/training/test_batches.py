"""Several variables in one message to each server, and synchronous steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.training.conftest import Cluster
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.optimizers import SGD, Adam
from zmqdist.variables.client import PsClient
from zmqdist.variables.variable_host import PREFIX

pytestmark = pytest.mark.shares_cluster  # servers in this process start threads as they need them


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is asked of servers from now on: (address, method)."""
    message: list[tuple[str, str]] = []
    ask = PsClient.call

    def counting(self: PsClient, question: Any) -> Any:
        message.append((self.address, question.method.removeprefix(PREFIX)))
        return ask(self, question)

    monkeypatch.setattr(PsClient, "call", counting)
    return message


def _halves(shape: Any, dtype: Any) -> list[int]:
    return [2] + [1] * (len(shape) - 1)


def test_apply_sends_one_request_per_ps(made: Any, requests: list[Any]) -> None:
    strategy = made(_halves)
    with strategy.scope():
        variables = [zd.Variable(np.ones((4, 2))) for _ in range(5)] + [zd.Variable(1.0)]
    outside = zd.Variable(1.0)
    requests.clear()
    grads = [np.full((4, 2), 0.5) for _ in range(4)] + [
        zd.IndexedSlices(np.full((1, 2), 0.5), np.array([3])),
        0.5,
    ]
    strategy.apply(
        SGD(1.0), [*zip(grads, variables, strict=True), (0.5, outside), (None, variables[0])]
    )
    assert sorted(requests) == sorted(
        (address, "update") for address in strategy.cluster_resolver.ps
    )
    for variable in variables[:4]:
        assert (variable.numpy() == 0.5).all()
    assert variables[4].numpy().tolist() == [[1, 1], [1, 1], [1, 1], [0.5, 0.5]]
    assert variables[5].numpy() == outside.numpy() == 0.5
    assert all(version == 2 for variable in variables[:5] for version in variable.version)


def test_read_sends_one_request_per_ps(made: Any, requests: list[Any]) -> None:
    strategy = made(_halves)
    with strategy.scope():
        w, b, s = zd.Variable(np.arange(6.0).reshape(3, 2)), zd.Variable([1.0]), zd.Variable(2.0)
    outside = zd.Variable([7.0])
    requests.clear()
    values = strategy.read({"w": w, "rest": (b, s, w), "here": [outside, 5, None]})
    assert sorted(requests) == sorted((address, "read") for address in strategy.cluster_resolver.ps)
    assert values["w"].tolist() == values["rest"][2].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert (values["rest"][0].tolist(), values["rest"][1]) == ([1.0], 2.0)
    assert (values["here"][0].tolist(), values["here"][1:]) == ([7.0], [5, None])


def test_read_keeps_views_iterators_and_dicts(made: Any) -> None:
    strategy = made(_halves)
    with strategy.scope():
        b, s = zd.Variable([1.0]), zd.Variable(2.0)
    assert strategy.read({"b": b, 3: s}.values()) == [1.0, 2.0]
    assert strategy.read(variable for variable in [b, s]) == [1.0, 2.0]
    assert strategy.read({"b": deque([b]), 3: s}) == {"b": deque([1.0]), 3: 2.0}


@pytest.mark.parametrize(
    "grad", [np.zeros((3, 2)), zd.IndexedSlices(np.zeros((1, 2)), np.array([4])), np.zeros(8), "x"]
)
def test_unfit_gradient_changes_no_variable(made: Any, grad: Any) -> None:
    strategy = made(_halves)
    with strategy.scope():
        one, two = zd.Variable(np.ones((4, 2))), zd.Variable(np.ones((4, 2)))
    with pytest.raises(ValueError, match="Variable_1"):
        strategy.apply(SGD(1.0), [(np.ones((4, 2)), one), (grad, two)])
    assert (one.numpy() == 1.0).all()
    assert (two.numpy() == 1.0).all()


def test_apply_works_in_scheduled_functions(anywhere: zd.ParameterServerStrategy) -> None:
    coordinator = ClusterCoordinator(anywhere)
    with anywhere.scope():
        variables = [zd.Variable(np.ones(3)) for _ in range(4)]

    def step() -> Any:
        values = anywhere.read(variables)
        anywhere.apply(
            Adam(0.1),
            [(np.sign(value), variable) for value, variable in zip(values, variables, strict=True)],
        )
        return anywhere.read(variables)

    found = coordinator.schedule(step).fetch()
    assert len(found) == 4
    for value in found:
        assert value == pytest.approx(np.full(3, 0.9))


# -- synchronous mode ------------------------------------------------------------------------------


def test_step_applies_the_mean_once(made: Any) -> None:
    strategy = made(aggregate="sync", workers_per_step=2)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v, w = zd.Variable(np.zeros(2)), zd.Variable(0.0)

    def train(worker: int, steps: int) -> None:
        for step in range(steps):
            strategy.apply(SGD(1.0), [(np.full(2, -1.0 - 2 * worker), v)], step=step)
            w.apply(SGD(1.0), -1.0 - 2 * worker, step=step)

    for worker in range(2):
        coordinator.schedule(train, (worker, 3))
    coordinator.join()
    assert v.numpy().tolist() == [6.0, 6.0]
    assert w.numpy() == 6.0
    assert v.version == w.version == 4


def test_map_functions_make_steps_together(made: Any) -> None:
    strategy = made(aggregate="sync", workers_per_step=2)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = zd.Variable(0.0)
    coordinator.map(lambda worker: v.apply(SGD(1.0), -1.0 - 2 * worker, step=0), range(2))
    coordinator.join()
    assert v.numpy() == 2.0


def test_step_size_is_the_number_of_workers(made: Any) -> None:
    strategy = made(aggregate="sync")
    with strategy.scope():
        v = zd.Variable(0.0)
    first = threading.Thread(target=lambda: v.apply(SGD(1.0), -1.0, step=0))
    first.start()
    v.apply(SGD(1.0), -3.0, step=0)
    first.join()
    assert v.numpy() == 2.0


def test_ended_step_takes_no_gradient(made: Any) -> None:
    strategy = made(aggregate="sync", workers_per_step=1)
    with strategy.scope():
        v = zd.Variable(0.0)
    v.apply(SGD(1.0), -1.0, step=5)
    v.apply(SGD(1.0), -1.0, step=5)
    v.apply(SGD(1.0), -1.0, step=4)
    assert v.numpy() == 1.0
    v.apply(SGD(1.0), -1.0, step=6)
    assert v.numpy() == 2.0


def test_synchronous_apply_needs_step(made: Any) -> None:
    strategy = made(aggregate="sync", workers_per_step=1)
    with strategy.scope():
        v = zd.Variable(0.0, name="w")
    with pytest.raises(ValueError, match=r"'w'.*step="):
        v.apply(SGD(1.0), 1.0)
    with pytest.raises(ValueError, match=r"'w'.*step="):
        strategy.apply(SGD(1.0), [(1.0, v)])
    assert v.assign_add(1.0).numpy() == 1.0


def test_lost_ps_is_an_error(
    cluster: Callable[..., Cluster],
) -> None:
    servers = cluster(1, 2)
    with zd.ParameterServerStrategy(servers.spec) as strategy:
        with strategy.scope():
            variables = [zd.Variable(1.0, name=f"v{number}") for number in range(2)]
        servers.kill("ps", 1)
        with pytest.raises(errors.PSUnavailableError, match=r"'v1' on ps:1"):
            strategy.read(variables)
        with pytest.raises(errors.PSUnavailableError, match=r"'v1' on ps:1"):
            strategy.apply(SGD(1.0), [(1.0, each) for each in variables])
        assert variables[0].numpy() == 0.0


def test_strategies_do_not_mix_variables(made: Any) -> None:
    one, other = made(), made()
    with one.scope():
        mine = [zd.Variable(float(number)) for number in range(4)]
    with other.scope():
        theirs = [zd.Variable(100.0 + number) for number in range(4)]
    assert one.read(mine + theirs) == [0, 1, 2, 3, 100, 101, 102, 103]
    one.apply(SGD(1.0), [(1.0, mine[0]), (1.0, theirs[3])])
    assert one.read(mine + theirs) == [-1, 1, 2, 3, 100, 101, 102, 102]


def test_repeated_variable_is_refused_first(made: Any) -> None:
    strategy = made()
    with strategy.scope():
        first, second = zd.Variable(1.0), zd.Variable(1.0)
    with pytest.raises(errors.InvalidArgumentError, match=f"{first.name}.* occurs twice"):
        strategy.apply(SGD(1.0), [(1.0, first), (1.0, second), (1.0, first)])
    assert strategy.read([first, second]) == [1, 1]
