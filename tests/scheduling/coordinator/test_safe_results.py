"""`results: safe`: a program takes from its workers what the closed set of types has, and unpickles
nothing of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.wire import results, trusted


@pytest.fixture(scope="module", params=[False, True], ids=["threads", "processes"])
def cluster(request: pytest.FixtureRequest) -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=2, processes=request.param) as cluster:
        yield cluster


@pytest.fixture
def coordinator(cluster: zd.local_cluster) -> Iterator[ClusterCoordinator]:
    with ClusterCoordinator(cluster, results="safe") as coordinator:
        yield coordinator


def test_safe_values_pass(coordinator: ClusterCoordinator) -> None:
    assert coordinator.schedule(lambda x: {"x": [x, None]}, args=(1,)).fetch() == {"x": [1, None]}
    large = coordinator.schedule(np.ones, args=(300_000,))
    assert large.fetch().sum() == 300_000
    kept_array = coordinator.schedule(np.ones, args=(300_000,), keep=True)
    assert (
        coordinator.schedule(lambda a, b: float((a + b).sum()), args=(kept_array, large)).fetch()
        == 600_000
    )
    assert kept_array.fetch().sum() == 300_000
    coordinator.join()


def test_unsafe_type_fails_its_function_by_name(
    coordinator: ClusterCoordinator,
) -> None:
    with pytest.raises(
        errors.InvalidArgumentError,
        match=r"value is a builtins.set: only None, bool, .* leave out `results: safe`",
    ):
        coordinator.schedule(lambda: {1}).get()
    with pytest.raises(errors.InvalidArgumentError):
        coordinator.join()


def test_error_has_remote_traceback(coordinator: ClusterCoordinator) -> None:
    def fails() -> None:
        raise KeyError("here")

    with pytest.raises(KeyError) as raised:
        coordinator.schedule(fails).get()
    assert "in fails" in str(raised.value.__cause__)
    with pytest.raises(KeyError):
        coordinator.join()


class Evil:
    """Unpickled in the program, it would leave a mark there."""

    loaded = 0

    def __reduce__(self) -> Any:
        return _mark, ()


def _mark() -> int:
    Evil.loaded += 1
    return 0


def test_pickle_of_worker_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(results, "pack", lambda value: trusted.pack(Evil()))
    monkeypatch.setattr(
        results, "pack_error", lambda error, unpickling=False: trusted.pack_error(error)
    )
    with (
        zd.local_cluster(workers=1, processes=False) as cluster,
        ClusterCoordinator(cluster, results="safe") as coordinator,
    ):
        value = coordinator.schedule(int)
        with pytest.raises(errors.FailedPreconditionError, match="replied with a pickle"):
            value.get()
        with pytest.raises(errors.FailedPreconditionError, match="replied with a pickle"):
            coordinator.schedule(lambda: 1 / 0).get()
        assert Evil.loaded == 0
        with pytest.raises(errors.FailedPreconditionError):
            coordinator.join()


def test_unknown_kind_of_results_is_refused(cluster: zd.local_cluster) -> None:
    with pytest.raises(
        errors.InvalidArgumentError, match="results is 'yes', wants 'any' or 'safe'"
    ):
        ClusterCoordinator(cluster, results="yes")
