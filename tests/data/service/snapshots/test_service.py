"""distributed_save through a dispatcher and workers: what it refuses, what it writes, what it
tells."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.service.helpers import TestCluster, until, values
from tests.data.service.snapshots.helpers import names
from zmqdist.data import Dataset, experimental, service, snapshot_layout, storage
from zmqdist.data.service.policy import ShardingPolicy
from zmqdist.data.service.snapshots.distributed_save import distributed_save
from zmqdist.data.service.snapshots.machine import StreamState
from zmqdist.errors import (
    AlreadyExistsError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnimplementedError,
    UnknownError,
)
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.internal_client import start
from zmqdist.specs import TensorSpec
from zmqdist.transport.credentials import Credentials

WAIT_S = 30.0


def saved(cluster: TestCluster, dataset: Dataset, path: Path, **options: Any) -> Any:
    """A snapshot that is whole."""
    handle = distributed_save(dataset, str(path), cluster.dispatcher_address(), **options)
    handle.wait(WAIT_S)
    return handle


def loaded(path: Path, **options: Any) -> list[Any]:
    return sorted(values(Dataset.load(str(path), **options)))


class Gate:
    """A file for which a pipeline waits: pipelines are pickled, files are not."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "gate")

    def open(self) -> None:
        Path(self.path).touch()

    def reached(self) -> bool:
        """Whether an element waits for it."""
        return any(Path(self.path).parent.glob("gate-*"))

    def __call__(self, x: Any) -> Any:
        import os
        import time
        from pathlib import Path

        Path(f"{self.path}-{x}").touch()
        while not os.path.exists(self.path):
            time.sleep(0.005)
        return x


def gated(dataset: Dataset, gate: Gate) -> Dataset:
    return dataset.map(gate, output_signature=dataset.element_spec)


# -- what it writes --------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_save_load(tmp_path: Path, workers: int) -> None:
    with TestCluster(workers) as cluster:
        for count in (0, 10):
            saved(cluster, Dataset.range(count), tmp_path / str(count))
            assert loaded(tmp_path / str(count)) == list(range(count))


def test_compression_and_repeated_and_zipped_datasets(tmp_path: Path) -> None:
    with TestCluster(2) as cluster:
        for compression in ("AUTO", "GZIP", "SNAPPY", "ZLIB", None):
            saved(cluster, Dataset.range(20), tmp_path / str(compression), compression=compression)
            assert loaded(tmp_path / str(compression), compression=compression) == list(range(20))
        saved(cluster, Dataset.range(1000).repeat(10), tmp_path / "repeated")
        assert loaded(tmp_path / "repeated") == sorted([*range(1000)] * 10)
        saved(
            cluster,
            Dataset.zip(Dataset.range(20), Dataset.range(100)).repeat(3),
            tmp_path / "zipped",
        )
        found = [int(x) for x, _ in Dataset.load(str(tmp_path / "zipped"))]
        assert sorted(found) == sorted([*range(20)] * 3)


def test_structures_and_strings_survive(tmp_path: Path) -> None:
    dataset = Dataset.range(10).map(lambda x: {"x": np.full(int(x), x), "t": ("a" * int(x), b"\0")})
    with TestCluster(2) as cluster:
        saved(cluster, dataset, tmp_path / "s")
    found = sorted(Dataset.load(str(tmp_path / "s")), key=lambda one: len(one["x"]))
    assert [(one["x"].tolist(), one["t"]) for one in found] == [
        ([x] * x, ("a" * x, b"\0")) for x in range(10)
    ]


def test_write_multiple_datasets_at_once(tmp_path: Path) -> None:
    with TestCluster(2) as cluster:
        handles = [
            distributed_save(Dataset.range(n, n + 100), str(tmp_path / str(n)), cluster.target)
            for n in range(5)
        ]
        for handle in handles:
            handle.wait(WAIT_S)
    assert [loaded(tmp_path / str(n))[0] for n in range(5)] == list(range(5))


def test_load_follows_a_save_and_may_begin_before_it(tmp_path: Path) -> None:
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.extend(loaded(tmp_path / "s", wait=True)))
    reader.start()
    with TestCluster(1) as cluster:
        distributed_save(Dataset.range(50), str(tmp_path / "s"), cluster.dispatcher_address())
        reader.join(WAIT_S)
    assert found == list(range(50))


@pytest.mark.parametrize(("mode", "times"), [(ShardingPolicy.OFF, 2), (ShardingPolicy.DYNAMIC, 1)])
def test_distributed_load(tmp_path: Path, mode: ShardingPolicy, times: int) -> None:
    with TestCluster(2, snapshot_max_chunk_size_bytes=80) as cluster:
        for wait in (True, False):
            handle = distributed_save(Dataset.range(100), str(tmp_path / str(wait)), cluster.target)
            if wait:
                handle.wait(WAIT_S)
            for repetitions in (1, 5):
                dataset = Dataset.load(str(tmp_path / str(wait)), wait=True).repeat(repetitions)
                assert sorted(values(cluster.distribute(dataset, mode))) == sorted(
                    [*range(100)] * repetitions * times
                )


def test_drain_report_names_stream_and_successor(
    tmp_path: Path,
) -> None:
    gate, path = Gate(tmp_path), str(tmp_path / "s")
    with TestCluster(1) as cluster:
        dispatcher = cluster.dispatcher
        assert dispatcher.drain_reports()[0].lines == []
        handle = distributed_save(gated(Dataset.range(10), gate), path, cluster.target)
        until(lambda: bool(dispatcher.drain_reports()[0].streams))
        (alone,) = dispatcher.drain_reports()
        assert alone.lines == [
            f"continued by the next worker that joins: 1 snapshot stream: {path} (stream 0)"
        ]
        assert not alone.losses
        assert alone.to_dict()["streams"] == [[path, 0, False]]
        assert dispatcher.data_tasks_by_worker() == {"worker:0": 1}, "it counts as busy"
        cluster.add_worker()
        until(lambda: [each.streams != () for each in dispatcher.drain_reports()] == [True, True])
        assert [each.lines for each in dispatcher.drain_reports()] == [
            [f"continued by other workers: 1 snapshot stream: {path} (stream {number})"]
            for number in range(2)
        ]
        gate.open()
        handle.wait(WAIT_S)
        until(lambda: [each.lines for each in dispatcher.drain_reports()] == [[], []])
    assert loaded(tmp_path / "s") == list(range(10))


def test_skip_first_repetition(tmp_path: Path) -> None:
    """A worker that comes when a repetition has been handed out goes on with the next one."""
    gate = Gate(tmp_path)
    with TestCluster(1) as cluster:
        handle = distributed_save(
            gated(Dataset.range(10).repeat(2), gate), str(tmp_path / "s"), cluster.target
        )
        until(lambda: handle.progress()["handed_out"] > 0)
        cluster.add_worker()
        until(lambda: len(cluster.snapshot_streams(handle.path)) == 2)
        gate.open()
        handle.wait(WAIT_S)
    assert loaded(tmp_path / "s") == sorted([*range(10)] * 2)


def test_sample_before_and_after_a_save(tmp_path: Path) -> None:
    with TestCluster(1) as cluster:
        sources = [Dataset.from_tensors(np.int64(number)).repeat(50) for number in range(3)]
        saved(cluster, Dataset.sample_from_datasets(sources, seed=1), tmp_path / "before")
        assert loaded(tmp_path / "before") == sorted([*range(3)] * 50)
        for number, source in enumerate(sources):
            saved(cluster, source, tmp_path / str(number))
        after = Dataset.sample_from_datasets(
            [Dataset.load(str(tmp_path / str(n))) for n in range(3)], seed=1
        )
        assert sorted(values(after)) == sorted([*range(3)] * 50)


def test_single_repetition_has_no_second_folder(tmp_path: Path) -> None:
    with TestCluster(3) as cluster:
        saved(cluster, Dataset.range(100), tmp_path / "s")
    repetitions = {
        folder.name for folder in (tmp_path / "s").glob("streams/stream_*/splits/source_0/*")
    }
    assert repetitions == {"repetition_0"}


# -- what it refuses -------------------------------------------------------------------------------


def test_bad_dispatcher_address_and_bad_compression(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a string"):
        distributed_save(Dataset.range(1), str(tmp_path / "s"), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must not be empty"):
        distributed_save(Dataset.range(1), str(tmp_path / "s"), "")
    with pytest.raises(ValueError, match="Invalid `compression` argument: NONE"):
        distributed_save(Dataset.range(1), str(tmp_path / "s"), "localhost:1", compression="NONE")


def test_requires_fault_tolerant_mode(tmp_path: Path) -> None:
    with (
        TestCluster(1, work_dir="", fault_tolerant_mode=False) as cluster,
        pytest.raises(
            InvalidArgumentError,
            match=r"requires running tf\.data service in the fault tolerant mode",
        ),
    ):
        distributed_save(Dataset.range(1), str(tmp_path / "s"), cluster.target)
    assert not (tmp_path / "s").exists()


def test_impossible_saves_are_refused(
    tmp_path: Path,
) -> None:
    with TestCluster(1) as cluster:
        with pytest.raises(InvalidArgumentError, match="Saving an infinite dataset is not allowed"):
            distributed_save(Dataset.range(1).repeat(), str(tmp_path / "s"), cluster.target)
        with pytest.raises(UnimplementedError, match="from_generator"):
            distributed_save(
                Dataset.from_generator(list, output_signature=TensorSpec((), np.int64)),
                str(tmp_path / "s"),
                cluster.target,
            )
        saved(cluster, Dataset.range(10), tmp_path / "s")
        with pytest.raises(AlreadyExistsError, match="already started or completed"):
            distributed_save(Dataset.range(10), str(tmp_path / "s"), cluster.target)
        with pytest.raises(NotFoundError, match="no snapshot"):
            cluster.snapshot_streams(str(tmp_path / "elsewhere"))


def test_bad_element_spec_and_load_with_another_compression(tmp_path: Path) -> None:
    with TestCluster(1) as cluster:
        saved(cluster, Dataset.range(10), tmp_path / "s")
    with pytest.raises(ValueError, match="but the actual element_spec is"):
        Dataset.load(str(tmp_path / "s"), element_spec=TensorSpec((), np.str_))
    with pytest.raises(ValueError, match="but the actual compression is SNAPPY"):
        Dataset.load(str(tmp_path / "s"), compression="GZIP")


def check_numerics(x: Any) -> Any:
    if x == 5:
        raise InvalidArgumentError(None, None, "Tensor had NaN values")
    return x


def test_worker_failure(tmp_path: Path) -> None:
    with TestCluster(2) as cluster:
        handle = distributed_save(
            Dataset.range(10).map(check_numerics, output_signature=TensorSpec((), np.int64)),
            str(tmp_path / "s"),
            cluster.target,
        )
        with pytest.raises(InvalidArgumentError, match="NaN values"):
            handle.wait(WAIT_S)
        assert handle.progress()["state"] == "error"
        assert json.loads((tmp_path / "s" / "ERROR").read_text())["code"] == 3
        until(lambda: not streams_being_written(cluster))
    with pytest.raises(ValueError, match=r"The save job failed to write it\."):
        Dataset.load(str(tmp_path / "s"))


def test_stream_that_cannot_begin_fails_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(*args: Any) -> None:
        raise RuntimeError("spoiled")

    with TestCluster(1) as cluster:
        with monkeypatch.context() as broken:
            broken.setattr("zmqdist.data.service.snapshots.stream.SnapshotStream", spoiled)
            handle = distributed_save(Dataset.range(10), str(tmp_path / "s"), cluster.target)
            with pytest.raises(
                UnknownError, match="stream 0 cannot be begun: RuntimeError: spoiled"
            ):
                handle.wait(WAIT_S)
        saved(cluster, Dataset.range(10), tmp_path / "again")


def streams_being_written(cluster: TestCluster) -> int:
    return sum(worker.running.data_snapshot().writing for worker in cluster.workers)


def test_worker_failure_keeps_code_of_writer(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with TestCluster(1) as cluster:
        pipeline = gated(Dataset.range(10), gate).map(
            check_numerics, output_signature=TensorSpec((), np.int64)
        )
        distributed_save(pipeline, str(tmp_path / "s"), cluster.target)
        dataset = Dataset.load(str(tmp_path / "s"), wait=True)
        gate.open()
        with pytest.raises(InvalidArgumentError, match="NaN values"):
            list(dataset)


# -- what it tells ---------------------------------------------------------------------------------


def test_slow_disk_does_not_block_dispatcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the dispatcher hears no heartbeat while its disk is slow, and takes all workers for
    lost."""
    writes, written = threading.Event(), threading.Event()
    write = storage.write

    def slow(path: str, *args: Any) -> None:
        if path.endswith("owner_worker"):
            writes.set()
            written.wait(WAIT_S)
        write(path, *args)

    monkeypatch.setattr(storage, "write", slow)
    with TestCluster(1) as cluster, ThreadPoolExecutor() as threads:
        try:
            handle = distributed_save(Dataset.range(10), str(tmp_path / "s"), cluster.target)
            assert writes.wait(WAIT_S)
            address = cluster.dispatcher_address()
            security = Credentials(None, None, False).client(address, "submit")
            with ZmqClient(address, "test", security=security) as client:
                ours = threads.submit(cluster.snapshot_streams, handle.path)
                theirs = start(client, "zmqdist.data.snapshot_streams", handle.path)
                due = time.monotonic() + WAIT_S / 2  # the loop takes this call after the listing
                assert start(client, "zmqdist.data.config", due=due).get_value()
                assert not ours.done()
                written.set()
                assert theirs.get_value() == [(0, cluster.workers[0].worker_address(), "ASSIGNED")]
                assert [each.index for each in ours.result(WAIT_S)] == [0]
        finally:
            written.set()
        handle.wait(WAIT_S)


def test_handle_has_progress(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with TestCluster(2) as cluster:
        handle = distributed_save(
            gated(Dataset.range(10), gate), str(tmp_path / "s"), cluster.target
        )
        until(lambda: handle.progress()["streams"] == 2)
        progress = handle.progress()
        assert (progress["state"], progress["elements"], progress["positions"]) == ("active", 0, 10)
        with pytest.raises(DeadlineExceededError):
            handle.wait(0.05)
        gate.open()
        handle.wait(WAIT_S)
        assert handle.progress() == progress | {
            "state": "done",
            "streams_done": 2,
            "elements": 10,
            "chunks": len(names(tmp_path / "s")),
            "handed_out": 10,
        }
        assert [each.state for each in cluster.snapshot_streams(handle.path)] == [
            StreamState.DONE
        ] * 2


def test_cancelled_save_ends_on_all_workers(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with TestCluster(2) as cluster:
        handle = distributed_save(
            gated(Dataset.range(1000), gate), str(tmp_path / "s"), cluster.target
        )
        until(lambda: handle.progress()["streams"] == 2)
        handle.cancel()
        handle.cancel()
        with pytest.raises(CancelledError, match="was cancelled"):
            handle.wait(WAIT_S)
        gate.open()
        until(lambda: not streams_being_written(cluster))
        assert isinstance(snapshot_layout.read_error(handle.path), CancelledError)
        with pytest.raises(ValueError, match="The save job failed"):
            Dataset.load(handle.path)


def test_workers_tell_which_streams_they_write_and_wrote(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with TestCluster(1) as cluster:
        handle = distributed_save(
            gated(Dataset.range(10), gate), str(tmp_path / "s"), cluster.target
        )
        until(lambda: cluster.workers[0].snapshot_task_progresses())
        (progress,) = cluster.workers[0].snapshot_task_progresses()
        assert progress[:3] == (handle.path, 0, False)
        gate.open()
        handle.wait(WAIT_S)
        (progress,) = cluster.workers[0].snapshot_task_progresses()
        assert progress == (handle.path, 0, True, 1, 10)


@pytest.mark.parametrize("most", [1, 2])
def test_workers_dont_exceed_max_stream_assignments(tmp_path: Path, most: int) -> None:
    gate = Gate(tmp_path)
    with TestCluster(2, worker_max_concurrent_snapshots=most) as cluster:
        handles = [
            distributed_save(
                gated(Dataset.range(50), gate), str(tmp_path / str(number)), cluster.target
            )
            for number in range(10)
        ]

        def counts() -> list[int]:
            return [
                sum(not one.completed for one in worker.snapshot_task_progresses())
                for worker in cluster.workers
            ]

        until(lambda: counts() == [most, most])
        gate.open()
        while any(handle.progress()["state"] != "done" for handle in handles):
            assert max(counts()) <= most
    for number in range(10):
        assert loaded(tmp_path / str(number)) == list(range(50))


def test_leaving_worker_commits_its_stream(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with TestCluster(1) as cluster:
        dataset = Dataset.range(200)
        late = dataset.map(
            lambda x: gate(x) if x >= 100 else x, output_signature=dataset.element_spec
        )
        handle = distributed_save(late, str(tmp_path / "s"), cluster.target)
        until(gate.reached)
        leaver = threading.Thread(target=cluster.workers[0].stop, args=(WAIT_S,))
        leaver.start()
        gate.open()
        leaver.join()
        before = handle.progress()
        cluster.add_worker()
        handle.wait(WAIT_S)
        if before["state"] != "done":
            assert before["elements"] > 0
    assert loaded(tmp_path / "s") == list(range(200))


def test_distributed_save_has_names_of_tf_data() -> None:
    assert service.distributed_save is experimental.distributed_save is distributed_save


def test_file_system_without_rename_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    with TestCluster(1) as cluster:
        with pytest.raises(FailedPreconditionError, match="no atomic rename"):
            distributed_save(Dataset.range(10), "memory://s", cluster.target)
        distributed_save(Dataset.range(10), f"file://{tmp_path}/s", cluster.target).wait(WAIT_S)
    assert loaded(tmp_path / "s") == list(range(10))
