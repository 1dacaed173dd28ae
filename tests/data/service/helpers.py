"""Clusters of the data service for tests: in one process (`TestCluster`, `TestWorker`, `serving`),
and with processes that can be killed. `Answer` takes the replies of a task's runner.

    with TestCluster(num_workers=2) as cluster:
        dataset = cluster.distribute(Dataset.range(10))
        cluster.restart_worker(0)

Figures are those of tf.data service's own tests. Readers take batches ahead: a test that wants to
see what comes after what is buffered needs a source longer than `READ_AHEAD` elements for each
worker.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from tests.zygote import ServerProcess, slots_zygote
from zmqdist.data.dataset import Dataset
from zmqdist.data.service.client import distribute
from zmqdist.data.service.elements import unpack
from zmqdist.data.service.policy import ShardingPolicy
from zmqdist.data.service.reader.delivery import ELEMENTS_MAX, END, FAILED, SOME
from zmqdist.data.service.worker.first_come_task import BUFFER_ELEMENTS_MAX
from zmqdist.data.service.worker.task_runner import Packed
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
from zmqdist.servers.dispatch_server import DispatchServer
from zmqdist.servers.worker_server import WorkerServer

PROTOCOL = "zmq"
HEARTBEAT_MS = 100
DISPATCHER_TIMEOUT_MS = 20_000
WORKER_TIMEOUT_MS = 200
GC_CHECK_MS = 1000
CHUNK_BYTES = 16 << 10
REFRESH_MS = 20

PATIENCE_S = 20.0

READ_AHEAD = BUFFER_ELEMENTS_MAX + 4 * ELEMENTS_MAX
"""Elements that are at most buffered of one worker: in its task, on their way, and in the
reader.
"""


def until(condition: Callable[[], Any], what: str = "", patience_s: float = PATIENCE_S) -> Any:
    """Wait until the condition holds, and return what it gives; fail after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never came: {what or condition}"
        time.sleep(0.005)
    return value


def values(dataset: Any) -> list[Any]:
    """All elements, as Python's own."""
    return [each.tolist() if hasattr(each, "tolist") else each for each in dataset]


class TestWorker:
    """A worker that can be stopped and started again, at the same port or another."""

    __test__ = False

    def __init__(
        self,
        dispatcher_address: str,
        shutdown_quiet_period_ms: int = 0,
        data_transfer_protocol: str | None = None,
        port: int = 0,
        worker_tags: Sequence[str] = (),
        cross_trainer_cache_size_bytes: int = 0,
        snapshot_max_chunk_size_bytes: int = CHUNK_BYTES,
        **config: Any,
    ) -> None:
        self._config = {
            "dispatcher_address": dispatcher_address,
            "shutdown_quiet_period_ms": shutdown_quiet_period_ms,
            "data_transfer_protocol": data_transfer_protocol,
            "worker_tags": tuple(worker_tags),
            "cross_trainer_cache_size_bytes": cross_trainer_cache_size_bytes,
            "snapshot_max_chunk_size_bytes": snapshot_max_chunk_size_bytes,
            "heartbeat_interval_ms": HEARTBEAT_MS,
            "dispatcher_timeout_ms": DISPATCHER_TIMEOUT_MS,
            **config,
        }
        self._port = port
        self.server: WorkerServer | None = None

    @property
    def running(self) -> WorkerServer:
        assert self.server is not None, "the worker is not running"
        return self.server

    def start(self) -> None:
        self.server = WorkerServer(WorkerConfig(port=self._port, **self._config))
        self._port = int(self.server.address.rpartition(":")[2])

    def stop(self, grace_s: float = 0.0) -> None:
        if self.server is not None:
            self.server.stop(grace_s)
            self.server = None

    def restart(self, use_same_port: bool = True) -> None:
        self.stop()
        if not use_same_port:
            self._port = 0
        self.start()

    def join(self) -> None:
        self.running.join()

    def num_tasks(self) -> int:
        return self.running.num_tasks

    def snapshot_task_progresses(self) -> Any:
        return self.running.data_snapshot().streams

    def worker_address(self) -> str:
        return self.running.advertised_address


class TestCluster:
    """A dispatcher and workers in this process. `work_dir` None: a folder of its own; "": none."""

    __test__ = False

    def __init__(
        self,
        num_workers: int,
        dispatcher_port: int = 0,
        work_dir: str | None = None,
        fault_tolerant_mode: bool = True,
        job_gc_check_interval_ms: int | None = GC_CHECK_MS,
        job_gc_timeout_ms: int | None = None,
        worker_timeout_ms: int | None = WORKER_TIMEOUT_MS,
        worker_shutdown_quiet_period_ms: int = 0,
        worker_max_concurrent_snapshots: int = 0,
        snapshot_max_chunk_size_bytes: int = CHUNK_BYTES,
        start: bool = True,
        worker_options: dict[str, Any] | None = None,
        **dispatcher_options: Any,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory() if work_dir is None else None
        self._config: dict[str, Any] = {
            "work_dir": (self._folder.name if self._folder is not None else work_dir) or None,
            "fault_tolerant_mode": fault_tolerant_mode,
            "job_gc_check_interval_ms": job_gc_check_interval_ms,
            "job_gc_timeout_ms": job_gc_timeout_ms,
            "worker_timeout_ms": worker_timeout_ms,
            "worker_max_concurrent_snapshots": worker_max_concurrent_snapshots,
            **dispatcher_options,
        }
        self._worker_options = {
            "shutdown_quiet_period_ms": worker_shutdown_quiet_period_ms,
            "snapshot_max_chunk_size_bytes": snapshot_max_chunk_size_bytes,
            **(worker_options or {}),
        }
        self.dispatcher = DispatchServer(
            DispatcherConfig(port=dispatcher_port, **self._config), start=False
        )
        self.workers: list[TestWorker] = []
        self._num_workers = num_workers
        if start:
            self.start()

    def start(self) -> None:
        self.start_dispatcher()
        self.start_workers()

    def start_dispatcher(self) -> None:
        self.dispatcher.start()

    def start_workers(self) -> None:
        for _ in range(self._num_workers):
            self.add_worker()

    def add_worker(self, start: bool = True, **options: Any) -> TestWorker:
        worker = TestWorker(self.dispatcher_address(), **{**self._worker_options, **options})
        if start:
            worker.start()
        self.workers.append(worker)
        return worker

    def stop_worker(self, index: int) -> None:
        self.workers[index].stop()

    def stop_workers(self) -> None:
        for worker in self.workers:
            worker.stop()

    def restart_worker(self, index: int, use_same_port: bool = True) -> None:
        self.workers[index].restart(use_same_port)

    def stop_dispatcher(self) -> None:
        self.dispatcher.stop()

    def restart_dispatcher(self, **options: Any) -> None:
        """Stop it, and start another one at its port and in its folder."""
        port = int(self.dispatcher.address.rpartition(":")[2])
        self.dispatcher.stop()
        self._config.update(options)
        self.dispatcher = DispatchServer(DispatcherConfig(port=port, **self._config))

    def num_registered_workers(self) -> int:
        return self.dispatcher.num_workers

    def num_tasks_on_workers(self) -> int:
        return sum(worker.num_tasks() for worker in self.workers if worker.server is not None)

    def snapshot_streams(self, path: str) -> Any:
        return self.dispatcher._snapshot_streams(path)  # reach: TF's own name

    def dispatcher_address(self) -> str:
        return self.dispatcher.address

    @property
    def target(self) -> str:
        return self.dispatcher.target

    @property
    def work_dir(self) -> str | None:
        return self._config["work_dir"]  # type: ignore[no-any-return]

    def distribute(
        self, dataset: Any, processing_mode: Any = ShardingPolicy.OFF, **options: Any
    ) -> Any:
        """The dataset as this cluster computes it."""
        return dataset.apply(distribute(processing_mode, self.target, **options))

    def close(self) -> None:
        self.stop_workers()
        self.dispatcher.stop()
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> TestCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- processes -------------------------------------------------------------------------------------


class MultiProcessCluster:
    """A dispatcher and `num_local_workers` workers in this process, `num_remote_workers` in
    processes of their own."""

    __test__ = False

    def __init__(
        self,
        num_local_workers: int,
        num_remote_workers: int,
        worker_tags: Sequence[str] = (),
        worker_addresses: Sequence[str] | None = None,
        deployment_mode: str | None = "COLOCATED",
    ) -> None:
        self.cluster = TestCluster(
            0, worker_addresses=worker_addresses, deployment_mode=deployment_mode
        )
        self.remote: list[ServerProcess] = []
        self._tags = list(worker_tags)
        try:
            for _ in range(num_local_workers):
                self.start_local_worker(worker_tags)
            for _ in range(num_remote_workers):
                self.start_remote_worker(worker_tags, wait=False)
            for each in self.remote:
                each.ready()
        except BaseException:
            self.close()
            raise

    def start_local_worker(self, worker_tags: Sequence[str] = ()) -> TestWorker:
        return self.cluster.add_worker(worker_tags=worker_tags)

    def start_remote_worker(
        self, worker_tags: Sequence[str] = (), wait: bool = True
    ) -> ServerProcess:
        worker = ServerProcess(
            "worker",
            wait=wait,
            dispatcher_address=self.cluster.dispatcher_address(),
            worker_tags=list(worker_tags),
            dispatcher_timeout_ms=DISPATCHER_TIMEOUT_MS,
        )
        self.remote.append(worker)
        return worker

    @property
    def target(self) -> str:
        return self.cluster.target

    def distribute(
        self, dataset: Any, processing_mode: Any = ShardingPolicy.OFF, **options: Any
    ) -> Any:
        return self.cluster.distribute(dataset, processing_mode, **options)

    def restart_dispatcher(self) -> None:
        self.cluster.restart_dispatcher()

    def restart_local_workers(self) -> None:
        for worker in self.cluster.workers:
            worker.restart()

    def close(self) -> None:
        for worker in self.remote:
            worker.stop()
        self.cluster.close()

    def __enter__(self) -> MultiProcessCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def worker_process(dispatcher: str, *, wait: bool = True) -> ServerProcess:
    """A worker with threads for its tasks."""
    return ServerProcess(
        "worker",
        wait=wait,
        dispatcher_address=dispatcher,
        dispatcher_timeout_ms=DISPATCHER_TIMEOUT_MS,
    )


@contextlib.contextmanager
def process_cluster(
    num_workers: int, **dispatcher: Any
) -> Iterator[tuple[ServerProcess, list[ServerProcess]]]:
    """A dispatcher with a journal and workers, each a process."""
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "work_dir": folder,
            "fault_tolerant_mode": True,
            "worker_timeout_ms": WORKER_TIMEOUT_MS,
            "job_gc_check_interval_ms": GC_CHECK_MS,
            **dispatcher,
        }
        made: list[ServerProcess] = []
        try:
            made.append(ServerProcess("dispatcher", **config))
            for _ in range(num_workers):
                made.append(worker_process(made[0].address, wait=False))
            for each in made[1:]:
                each.ready()
            yield made[0], made[1:]
        finally:
            for each in reversed(made):
                each.stop()


class Service:
    """What `serving` gives."""

    def __init__(self, dispatcher: DispatchServer, workers: list[WorkerServer]) -> None:
        self.dispatcher = dispatcher
        self.workers = workers

    def dealt(self, dataset: Dataset, **options: Any) -> Dataset:
        """Each element once, from whichever worker."""
        return dataset.apply(distribute(ShardingPolicy.DYNAMIC, self.dispatcher.target, **options))

    def whole(self, dataset: Dataset, **options: Any) -> Dataset:
        """All elements from each worker."""
        return dataset.apply(distribute(ShardingPolicy.OFF, self.dispatcher.target, **options))


@contextlib.contextmanager
def serving(workers: int = 1, *, processes: bool = True) -> Iterator[Service]:
    with DispatchServer(DispatcherConfig()) as dispatcher, contextlib.ExitStack() as stack:
        config = WorkerConfig(dispatcher.address, processes=processes)
        made = []
        for _ in range(workers):
            worker = WorkerServer(config, zygote=slots_zygote() if processes else None)
            made.append(stack.enter_context(worker))
        yield Service(dispatcher, made)


class Answer:
    """A Reply. `result` waits; SKIPPED stands for a skip, END for the end."""

    SKIPPED, END = "skipped", "end"

    def __init__(self) -> None:
        self._future: Future[Any] = Future()
        self.tag: Any = None
        self.is_wanted = True
        self.answered = False

    def result(self) -> Any:
        return self._future.result(PATIENCE_S)

    @property
    def waits(self) -> bool:
        return not self._future.done()

    def wanted(self) -> bool:
        return self.is_wanted

    def soon(self, fn: Callable[[], None]) -> bool:
        threading.Thread(target=fn, name="zmqdist-soon").start()
        return True

    def answer(self, kind: int, value: Any = None, tag: Any = None) -> None:
        self.tag, self.answered = tag, True
        if kind == FAILED:
            self._future.set_exception(value)
        elif kind == SOME:
            elements = unpack(value.form(""), "test") if isinstance(value, Packed) else value
            self._future.set_result([element.tolist() for element in elements])
        else:
            self._future.set_result(self.END if kind == END else self.SKIPPED)
