"""The remote traceback of an error names function, attempt, worker, process and host."""

from __future__ import annotations

import os
import pickle
import platform
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator


def fail() -> None:
    raise ValueError(os.getpid())


def fail_after_crash(folder: Path) -> None:
    if not (folder / "crashed").exists():
        (folder / "crashed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    fail()


def fail_within() -> None:
    """Pass on the error of a function that this one has scheduled."""
    with ClusterCoordinator() as coordinator:
        coordinator.submit(fail).result()


class Failing:
    def go(self) -> None:
        fail()

    async def go_async(self) -> None:
        fail()


@pytest.fixture(scope="module")
def cluster() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=1, slots=2) as made:
        yield made


@pytest.fixture
def coordinator(cluster: zd.local_cluster) -> Iterator[ClusterCoordinator]:
    with cluster.coordinator() as made:
        yield made


def place(error: BaseException, attempt: int) -> str:
    return f"attempt {attempt} on worker:0 (process {error} on {platform.node()}):\nTraceback"


def error_of(value: zd.RemoteValue[object]) -> BaseException:
    error = value.exception(20)
    assert error is not None
    return error


def test_error_names_its_place(coordinator: ClusterCoordinator) -> None:
    error = error_of(coordinator.submit(fail))
    assert f"fail, {place(error, 1)}" in str(error.__cause__)


def test_attempts_count_retries(coordinator: ClusterCoordinator) -> None:
    error = error_of(coordinator.options(retries=2).submit(fail))
    assert place(error, 3) in str(error.__cause__)


def test_attempts_count_lost_starts(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    error = error_of(coordinator.submit(fail_after_crash, tmp_path))
    assert place(error, 2) in str(error.__cause__)


@pytest.mark.parametrize("method", ["go", "go_async"])
def test_error_of_actor_names_its_place(coordinator: ClusterCoordinator, method: str) -> None:
    actor = coordinator.actor(Failing)
    error = error_of(getattr(actor, method)())
    assert f"Failing.{method}, {place(error, 1)}" in str(error.__cause__)


@pytest.mark.shares_cluster
def test_error_that_was_passed_on_names_both_places(coordinator: ClusterCoordinator) -> None:
    error = error_of(coordinator.submit(fail_within))
    text = str(error.__cause__)
    assert "fail_within, attempt 1 on worker:0 (process " in text
    assert f"fail, {place(error, 1)}" in text


def test_place_survives_raising_and_pickling(coordinator: ClusterCoordinator) -> None:
    value = coordinator.submit(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"\d+") as caught:
            value.result(20)
        cause = pickle.loads(pickle.dumps(caught.value.__cause__))
        assert str(cause).count(place(caught.value, 1)) == 1


def test_safe_form_names_the_place(cluster: zd.local_cluster) -> None:
    with cluster.coordinator(results="safe") as coordinator:
        error = error_of(coordinator.submit(fail))
        assert place(error, 1) in str(error.__cause__)
