"""dask's graphs on a cluster. Needs the package dask: pip install zmqdist[engines]."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd

dask = pytest.importorskip("dask", reason="needs pip install zmqdist[engines]")
from zmqdist.integrations.dask import dask_scheduler  # noqa: E402

pytestmark = pytest.mark.shares_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def get(cluster: zd.local_cluster) -> Callable[..., Any]:
    return dask_scheduler(cluster)


def test_graph_of_many_levels_is_computed(get: Callable[..., Any]) -> None:
    level = [dask.delayed(abs)(-number) for number in range(64)]
    while len(level) > 1:
        level = [dask.delayed(operator.add)(a, b) for a, b in zip(*[iter(level)] * 2, strict=True)]
    assert level[0].compute(scheduler=get) == sum(range(64))


def test_arrays_are_those_of_numpy(get: Callable[..., Any]) -> None:
    array = pytest.importorskip("dask.array")
    numbers = np.arange(250_000.0).reshape(500, 500)
    chunks = array.from_array(numbers, chunks=(100, 250))
    product = (chunks.T @ chunks).compute(scheduler=get)
    np.testing.assert_allclose(product, numbers.T @ numbers)


def fail(number: int) -> int:
    raise ValueError(f"as asked: {number}")


def test_error_of_task_is_raised_as_it_was(get: Callable[..., Any]) -> None:
    value = dask.delayed(abs)(dask.delayed(fail)(3))
    with pytest.raises(ValueError, match="as asked: 3"):
        value.compute(scheduler=get)
    assert dask.delayed(abs)(-1).compute(scheduler=get) == 1


def test_graph_in_legacy_form_is_computed(get: Callable[..., Any]) -> None:
    graph = {"x": 1, "y": (operator.add, "x", 2), "z": (sum, ["x", "y"]), "same": "z"}
    assert get(graph, ["z", ["same", "x"]]) == (4, (4, 1))


def die_once(path: str, value: int) -> int:
    if not os.path.exists(path):
        open(path, "w").close()
        os._exit(9)
    return value


def test_worker_that_dies_costs_no_result(get: Callable[..., Any], tmp_path: Any) -> None:
    first = dask.delayed(np.ones)(200_000)
    died = dask.delayed(die_once)(str(tmp_path / "died"), 2)
    assert dask.delayed(lambda a, b: float(a.sum()) * b)(first, died).compute(scheduler=get) == 4e5


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("as asked")


def wait_for_cancel(path: Path) -> int:
    (path / "begun").touch()
    for _ in range(400):
        if zd.cancelled():
            (path / "cancelled").touch()
            return 0
        time.sleep(0.05)
    return 1


def wait_for(path: Path) -> None:
    until = time.monotonic() + 15
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.01)


def fail_after(path: Path) -> None:
    wait_for(path)
    raise ValueError("as asked")


@pytest.mark.parametrize("fails", ["when submitted", "when run"])
def test_error_cancels_inner_tasks_that_run(
    get: Callable[..., Any], tmp_path: Path, fails: str
) -> None:
    slow = dask.delayed(abs)(dask.delayed(wait_for_cancel)(tmp_path))
    if fails == "when run":
        bad = dask.delayed(fail_after)(tmp_path / "begun")
    else:
        bad = dask.delayed(Unpicklable())
    with pytest.raises(ValueError, match="as asked"):
        dask.delayed(max)(slow, bad).compute(scheduler=get)
    if (tmp_path / "begun").exists():
        wait_for(tmp_path / "cancelled")
    assert dask.delayed(abs)(-1).compute(scheduler=get) == 1


def test_scheduler_is_set_by_its_root_name(cluster: zd.local_cluster) -> None:
    with dask.config.set(scheduler=zd.dask_scheduler(cluster)):
        assert dask.delayed(sum)([dask.delayed(abs)(-1), 2]).compute() == 3


def inner(number: int) -> int:
    result: int = dask.delayed(abs)(-number).compute(scheduler=dask_scheduler())
    return result


def test_graph_in_function_runs_on_its_cluster(cluster: zd.local_cluster) -> None:
    with cluster.coordinator() as coordinator:
        assert coordinator.gather(coordinator.map(inner, range(4))) == list(range(4))
