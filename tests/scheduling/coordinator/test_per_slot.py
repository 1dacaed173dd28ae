"""`per_slot`: objects that each slot makes once."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.scheduling.work import until
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator

pytestmark = pytest.mark.timeout(60)


def loads(folder: Path, well_at: int = 1) -> dict[str, Any]:
    """Return a new object, and create a file; fail until it has been called so often."""
    calls = loaded(folder) + 1
    (folder / f"load-{calls}-{os.getpid()}-{threading.get_ident()}").touch()
    if calls < well_at:
        raise OSError(f"load {calls}")
    return {"slot": (os.getpid(), threading.get_ident()), "runs": 0}


async def loads_later(folder: Path) -> dict[str, Any]:
    return loads(folder)


def loaded(folder: Path) -> int:
    return len(list(folder.glob("load-*")))


def runs(model: dict[str, Any]) -> tuple[tuple[int, int], int]:
    """Count the runs in the slot that runs this, and return the slot with the number."""
    assert model["slot"] == (os.getpid(), threading.get_ident())
    model["runs"] += 1
    return model["slot"], model["runs"]


BOTH = threading.Barrier(2)


def meets(model: dict[str, Any]) -> int:
    """Return the thread, once the other slot runs this, too."""
    BOTH.wait(20)
    return runs(model)[0][1]


@pytest.mark.parametrize("load", [loads, loads_later])
def test_slot_makes_its_object_once(
    in_slots: ClusterCoordinator, tmp_path: Path, load: Any
) -> None:
    model = in_slots.per_slot(load, tmp_path)
    assert loaded(tmp_path) == 0, "no slot has used it"
    seen = in_slots.gather([in_slots.submit(runs, model) for _ in range(50)], timeout=20)
    captured = in_slots.gather(in_slots.map(lambda _: runs(model), range(50)), timeout=20)
    slots = {slot for slot, _ in seen + captured}
    assert loaded(tmp_path) == len(slots)
    assert sum(max(n for s, n in seen + captured if s == slot) for slot in slots) == 100


def test_threads_of_one_worker_have_objects_of_their_own(tmp_path: Path) -> None:
    with (
        zd.local_cluster(workers=1, slots=2, processes=False) as cluster,
        ClusterCoordinator(cluster) as coordinator,
    ):
        model = coordinator.per_slot(loads, tmp_path)
        threads = coordinator.gather([coordinator.submit(meets, model) for _ in (0, 1)], timeout=30)
        assert len(set(threads)) == 2


def test_new_slot_process_makes_its_object_anew(single: zd.local_cluster, tmp_path: Path) -> None:
    with ClusterCoordinator(single) as coordinator:
        model = coordinator.per_slot(loads, tmp_path)
        (pid, _), _ = coordinator.submit(runs, model).result(20)
        os.kill(pid, signal.SIGKILL)
        assert coordinator.submit(runs, model).result(20)[1] == 1
        assert loaded(tmp_path) == 2


def test_error_of_maker_fails_its_function_only(
    in_threads: ClusterCoordinator, tmp_path: Path
) -> None:
    options, state = in_threads.options(worker=0), in_threads.per_slot(loads, tmp_path, 3)
    with pytest.raises(errors.ClosureInputError, match="load 1") as caught:
        options.submit(runs, state).result(20)
    assert isinstance(caught.value.original_exception, OSError)
    assert options.options(retries=1).submit(runs, state).result(20)[1] == 1
    assert loaded(tmp_path) == 3


def test_slots_drop_what_program_has_dropped(
    in_threads: ClusterCoordinator, threads: zd.local_cluster, tmp_path: Path
) -> None:
    def held() -> int:
        return sum(worker.snapshot().resources or 0 for worker in threads.servers)

    before = held()
    model = in_threads.per_slot(loads, tmp_path)
    in_threads.gather([in_threads.submit(runs, model) for _ in range(9)], timeout=20)
    assert held() == before + loaded(tmp_path)
    del model
    gc.collect()
    until(lambda: held() == before)


def test_state_is_for_functions_of_its_coordinator(
    in_threads: ClusterCoordinator, tmp_path: Path
) -> None:
    model = in_threads.per_slot(loads, tmp_path)
    assert repr(model) == "<PerSlot of tests.scheduling.coordinator.test_per_slot.loads>"
    with pytest.raises(ValueError, match="functions that are scheduled by its own coordinator"):
        pickle.dumps(model)
    with pytest.raises(TypeError, match="fn: per_slot"):
        in_threads.per_slot(5)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgumentError, match="generator"):
        in_threads.per_slot(loads, (number for number in ()))
