"""Snapshots over restarts of dispatcher and workers, in good order and by kill -9."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.data.service.helpers import TestCluster, process_cluster, until, values
from tests.data.service.snapshots.test_service import WAIT_S, Gate, gated, loaded, saved
from zmqdist.data import Dataset
from zmqdist.data.service.policy import ShardingPolicy
from zmqdist.data.service.snapshots.distributed_save import distributed_save
from zmqdist.data.service.snapshots.machine import StreamState
from zmqdist.errors import AlreadyExistsError
from zmqdist.scheduling.shared.config import DispatcherConfig
from zmqdist.servers.dispatch_server import DispatchServer


def restart_all(cluster: TestCluster) -> None:
    """As tf.data service's tests do it."""
    for number in range(len(cluster.workers)):
        cluster.workers[number].stop()
        cluster.restart_dispatcher()
        cluster.restart_worker(number)


def begun(cluster: TestCluster, dataset: Dataset, path: Path, gate: Gate) -> Any:
    """A snapshot of which every worker has a stream, and none gets on."""
    handle = distributed_save(gated(dataset, gate), str(path), cluster.dispatcher_address())
    until(lambda: len(cluster.snapshot_streams(handle.path)) == len(cluster.workers))
    return handle


# -- the dispatcher --------------------------------------------------------------------------------


def test_recovery_succeeds_and_blocks_overwrite(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with TestCluster(1) as cluster:
        handle = begun(cluster, Dataset.range(100), tmp_path / "s", gate)
        cluster.restart_dispatcher()
        with pytest.raises(AlreadyExistsError, match="is already started or completed"):
            distributed_save(Dataset.range(100), str(tmp_path / "s"), cluster.target)
        gate.open()
        handle.wait(WAIT_S)
        cluster.restart_dispatcher()
        assert handle.progress()["state"] == "done"
        with pytest.raises(AlreadyExistsError):
            distributed_save(Dataset.range(100), str(tmp_path / "s"), cluster.target)
    assert loaded(tmp_path / "s") == list(range(100))


@pytest.mark.parametrize("now", ["nothing", "an empty folder", "a file", "another dataset"])
def test_removed_snapshot_does_not_prevent_start(tmp_path: Path, now: str) -> None:
    path = tmp_path / "s"
    with TestCluster(1) as cluster:
        distributed_save(Dataset.range(10), str(path), cluster.dispatcher_address()).wait(WAIT_S)
        shutil.rmtree(path)
        if now == "an empty folder":
            path.mkdir()
        elif now == "a file":
            path.write_text("mine")
        elif now == "another dataset":
            Dataset.range(3).save(str(path))
        cluster.restart_dispatcher()
        distributed_save(Dataset.range(10), str(tmp_path / "t"), cluster.dispatcher_address()).wait(
            WAIT_S
        )


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("stream_x/owner_worker", RuntimeError, "Can't parse"),
        ("stream_0/splits/source_9/repetition_0/split_0_0", RuntimeError, "Found conflict"),
        (
            "stream_0/splits/source_0/repetition_0/split_1",
            ValueError,
            "Expected split_<local_split_index>_<global",
        ),
        (
            "stream_0/splits/source_0/repetition_0/split_1_0",
            ValueError,
            "The local split index 1 exceeds",
        ),
        ("stream_0/splits/source_0/repetition_0/split_0_7", RuntimeError, "Found missing global"),
    ],
)
def test_invalid_folder_prevents_start(tmp_path: Path, name: str, error: Any, text: str) -> None:
    config = DispatcherConfig(work_dir=str(tmp_path / "work"), fault_tolerant_mode=True)
    with DispatchServer(config) as dispatcher:
        distributed_save(Dataset.range(10), str(tmp_path / "s"), dispatcher.address)
    owner, bad = (
        tmp_path / "s" / "streams" / "stream_0" / "owner_worker",
        tmp_path / "s" / "streams" / name,
    )
    for file in (owner, bad):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("localhost:1" if file is owner else "")
    with pytest.raises(error) as raised:
        DispatchServer(config)
    assert text in str(raised.value)
    bad.unlink()
    for folder in list(bad.parents)[:3]:
        if not any(folder.iterdir()) and folder.name != "stream_0":
            folder.rmdir()
    with DispatchServer(config):
        pass  # nothing was overwritten


def test_snapshot_without_folder_is_forgotten(tmp_path: Path) -> None:
    with TestCluster(1) as cluster:
        saved(cluster, Dataset.range(10), tmp_path / "s")
        (tmp_path / "s").rename(tmp_path / "moved")
        cluster.restart_dispatcher()
        saved(cluster, Dataset.range(10), tmp_path / "s")
    assert loaded(tmp_path / "moved") == loaded(tmp_path / "s") == list(range(10))


def test_streams_are_reassigned_after_a_dispatcher_restart(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with TestCluster(5) as cluster:
        handle = begun(cluster, Dataset.range(1000), tmp_path / "s", gate)
        owners = {each.index: each.owner for each in cluster.snapshot_streams(handle.path)}
        cluster.restart_dispatcher()
        streams = cluster.snapshot_streams(handle.path)
        assert [each.index for each in streams] == [0, 1, 2, 3, 4]
        assert {each.index: each.owner for each in streams} == owners
        gate.open()
        handle.wait(WAIT_S)
        assert all(each.state is StreamState.DONE for each in cluster.snapshot_streams(handle.path))
    assert loaded(tmp_path / "s") == list(range(1000))


# -- everything, one after the other ---------------------------------------------------------------

DATASETS = {
    "dataset_recovers": lambda: Dataset.range(1000),
    "large_multi_source": lambda: Dataset.zip(tuple(Dataset.range(50) for _ in range(10))).map(
        lambda *row: row[0]
    ),
    "repeated": lambda: Dataset.range(2).repeat(10),
    "repeated_once": lambda: Dataset.range(1000).repeat(1),
    "one_element": lambda: Dataset.range(1).repeat(10),
    "nested": lambda: Dataset.from_tensor_slices([[1, 2], [3, 4]]).interleave(
        lambda row: Dataset.from_tensor_slices(row).repeat(3), cycle_length=2
    ),
}


@pytest.mark.parametrize(
    ("kind", "workers"), [("dataset_recovers", 1), ("large_multi_source", 3), ("repeated", 3)]
)
def test_save_completes_over_restarts(tmp_path: Path, kind: str, workers: int) -> None:
    save_over_restarts(tmp_path, kind, workers)


def save_over_restarts(tmp_path: Path, kind: str, workers: int) -> None:
    gate = Gate(tmp_path)
    dataset = DATASETS[kind]()
    with TestCluster(workers) as cluster:
        handle = begun(cluster, dataset, tmp_path / "s", gate)
        restart_all(cluster)
        gate.open()
        handle.wait(WAIT_S)
    assert loaded(tmp_path / "s") == sorted(values(dataset))


def test_several_saves_complete_over_restarts_of_everything(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with TestCluster(3) as cluster:
        handles = [
            begun(cluster, Dataset.range(100), tmp_path / str(number), gate) for number in range(3)
        ]
        restart_all(cluster)
        gate.open()
        for handle in handles:
            handle.wait(WAIT_S)
    assert all(loaded(tmp_path / str(number)) == list(range(100)) for number in range(3))


def test_stream_of_lost_worker_is_taken_over(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with TestCluster(1) as cluster:
        handle = begun(cluster, Dataset.range(100), tmp_path / "s", gate)
        gate.open()
        cluster.stop_worker(0)
        cluster.workers.clear()
        cluster.restart_dispatcher()
        cluster.add_worker()
        handle.wait(WAIT_S)
    assert loaded(tmp_path / "s") == list(range(100))


# -- kill -9 ---------------------------------------------------------------------------------------


@pytest.mark.processes("distributed snapshot")
@pytest.mark.killed("distributed snapshot")
def test_killed_processes_keep_elements_once(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    dataset = Dataset.range(3000).repeat(2).shuffle(100, seed=1)
    with process_cluster(2) as (dispatcher, workers):
        handle = distributed_save(gated(dataset, gate), str(tmp_path / "s"), dispatcher.address)
        until(lambda: handle.progress()["streams"] == 2)
        workers[0].kill()
        dispatcher.kill()
        gate.open()
        dispatcher.start()
        workers[0].start()
        until(lambda: handle.progress()["handed_out"] > 1000)
        workers[1].restart()
        dispatcher.restart()
        handle.wait(WAIT_S)
    assert loaded(tmp_path / "s") == sorted([*range(3000)] * 2)


# -- reading by a service meanwhile ----------------------------------------------------------------


@pytest.mark.parametrize(("mode", "times"), [(ShardingPolicy.OFF, 1), (ShardingPolicy.DYNAMIC, 1)])
def test_load_over_a_dispatcher_restart(tmp_path: Path, mode: ShardingPolicy, times: int) -> None:
    with TestCluster(1) as cluster:
        handle = distributed_save(Dataset.range(100), str(tmp_path / "s"), cluster.target)
        iterator = iter(cluster.distribute(Dataset.load(str(tmp_path / "s"), wait=True), mode))
        found = [int(next(iterator))]
        cluster.restart_dispatcher()
        found += values(iterator)
        handle.wait(WAIT_S)
        assert sorted(found) == sorted([*range(100)] * times)


def test_load_over_restarts_of_dispatcher_and_worker(tmp_path: Path) -> None:
    with TestCluster(1) as cluster:
        saved(cluster, Dataset.range(100), tmp_path / "s")
        iterator = iter(cluster.distribute(Dataset.load(str(tmp_path / "s"))))
        found = [int(next(iterator))]
        cluster.restart_dispatcher()
        cluster.restart_worker(0)
        found += values(iterator)
        assert set(found) == set(range(100))


@pytest.mark.parametrize(("mode", "times"), [(ShardingPolicy.OFF, 2), (ShardingPolicy.DYNAMIC, 1)])
def test_add_worker_midjob(tmp_path: Path, mode: ShardingPolicy, times: int) -> None:
    gate = Gate(tmp_path)
    with TestCluster(1) as cluster:
        handle = begun(cluster, Dataset.range(100), tmp_path / "s", gate)
        iterator = iter(cluster.distribute(Dataset.load(handle.path), mode))
        reader: list[Any] = []
        thread = threading.Thread(target=lambda: reader.extend(values(iterator)))
        thread.start()
        cluster.add_worker()
        until(lambda: cluster.num_tasks_on_workers() == 2)
        gate.open()
        thread.join(WAIT_S)
        assert sorted(reader) == sorted([*range(100)] * times)


def test_new_dataset_after_restart(tmp_path: Path) -> None:
    with TestCluster(1) as cluster:
        for number in range(2):
            saved(cluster, Dataset.range(100), tmp_path / str(number))
            cluster.restart_dispatcher()
            cluster.restart_worker(0)
            assert sorted(
                values(cluster.distribute(Dataset.load(str(tmp_path / str(number)))))
            ) == list(range(100))
