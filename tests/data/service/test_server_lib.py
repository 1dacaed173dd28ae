"""The servers as tf.data service has them: starting, stopping, joining, figures of the config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.service.helpers import until
from tests.ports import free_port
from zmqdist.data import Dataset
from zmqdist.data.service import DispatcherConfig, DispatchServer, WorkerConfig, WorkerServer
from zmqdist.data.service.snapshots.distributed_save import distributed_save
from zmqdist.errors import OpError

STOPPED = "Server cannot be started after it has been stopped"


def test_dispatcher_can_start_later() -> None:
    dispatcher = DispatchServer(start=False)
    assert dispatcher.num_workers == 0
    dispatcher.start()
    dispatcher.stop()


def test_target_has_port_of_config() -> None:
    port = free_port()
    with DispatchServer(DispatcherConfig(port=port)) as dispatcher:
        assert dispatcher.target == f"zmq://localhost:{port}"


def test_test_names_of_tf_data_service_agree(tmp_path: Path) -> None:
    config = DispatcherConfig(work_dir=str(tmp_path / "work"), fault_tolerant_mode=True)
    with (
        DispatchServer(config) as dispatcher,
        WorkerServer(WorkerConfig(dispatcher.address)) as worker,
    ):
        counts, addresses, streams, progresses = (
            (dispatcher._num_workers(), worker._num_tasks()),
            (dispatcher._address, worker._address),
            dispatcher._snapshot_streams,
            worker._snapshot_task_progresses,
        )  # reach: TF's own names
        assert counts == (dispatcher.num_workers, worker.num_tasks) == (1, 0)
        assert addresses == (dispatcher.target.removeprefix("zmq://"), worker.advertised_address)
        distributed_save(Dataset.range(3), str(tmp_path / "saved"), dispatcher.address).wait(20)
        assert len(streams(str(tmp_path / "saved"))) == 1
        until(lambda: not worker.data_snapshot().writing)
        assert len(progresses()) == 1
        assert tuple(progresses()) == worker.data_snapshot().streams


def test_work_dir_without_fault_tolerance(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level("INFO", "zmqdist.data"),
        DispatchServer(DispatcherConfig(work_dir=str(tmp_path))),
    ):
        assert "does not recover jobs" in caplog.text


def test_fault_tolerant_dispatcher_starts_in_empty_folder(tmp_path: Path) -> None:
    config = DispatcherConfig(work_dir=str(tmp_path), fault_tolerant_mode=True)
    with DispatchServer(config) as dispatcher:
        assert dispatcher.num_workers == 0


def test_fault_tolerance_without_a_work_dir_is_refused() -> None:
    problem = "Cannot enable fault tolerant mode without configuring a work dir"
    with pytest.raises(ValueError, match=problem) as caught:
        DispatchServer(DispatcherConfig(fault_tolerant_mode=True))
    assert isinstance(caught.value, OpError)


def test_starting_a_server_again_is_harmless() -> None:
    with DispatchServer() as dispatcher, WorkerServer(WorkerConfig(dispatcher.address)) as worker:
        dispatcher.start()
        worker.start()
        assert dispatcher.num_workers == 1


def test_late_worker_is_counted_at_once() -> None:
    with DispatchServer() as dispatcher:
        worker = WorkerServer(WorkerConfig(dispatcher.address), start=False)
        assert (dispatcher.num_workers, worker.num_tasks) == (0, 0)
        worker.start()
        assert dispatcher.num_workers == 1
        with WorkerServer(WorkerConfig(dispatcher.address)):
            assert dispatcher.num_workers == 2
        worker.stop()


def test_worker_address_has_port_of_config() -> None:
    port = free_port()
    with DispatchServer() as dispatcher:
        with WorkerServer(WorkerConfig(dispatcher.address, port=port)) as worker:
            assert worker.advertised_address == f"localhost:{port}"
        with WorkerServer(WorkerConfig(dispatcher.address, "node7:%port%", port=port)) as worker:
            assert worker.advertised_address == f"node7:{port}"


@pytest.mark.parametrize("kind", ["dispatcher", "worker"])
def test_stopped_server_cannot_start_again(kind: str) -> None:
    with DispatchServer() as dispatcher:
        server: Any = (
            DispatchServer()
            if kind == "dispatcher"
            else WorkerServer(WorkerConfig(dispatcher_address=dispatcher.address))
        )
        server.stop()
        server.stop()
        server.join()
        with pytest.raises(RuntimeError, match=STOPPED):
            server.start()


def test_stopped_dispatcher_has_no_workers() -> None:
    with DispatchServer() as dispatcher, WorkerServer(WorkerConfig(dispatcher.address)):
        dispatcher.stop()
        assert dispatcher.num_workers == 0


def test_port_in_use_is_error() -> None:
    with (
        DispatchServer() as dispatcher,
        pytest.raises(RuntimeError, match=r"the port is in use"),
    ):
        DispatchServer(DispatcherConfig(port=int(dispatcher.address.rpartition(":")[2])))


def test_worker_needs_dispatcher_address() -> None:
    with pytest.raises(ValueError, match="Must specify a `dispatcher_address`"):
        WorkerServer(WorkerConfig(dispatcher_address=None))  # type: ignore[arg-type]


def test_empty_tag_is_refused() -> None:
    with (
        DispatchServer() as dispatcher,
        pytest.raises(RuntimeError, match=r"Worker tags cannot be empty\."),
    ):
        WorkerServer(WorkerConfig(dispatcher.address, worker_tags=["a", ""]))


def test_unknown_protocol_error_lists_protocols() -> None:
    problem = r"No credentials factory has been registered for protocol grpc. The available types are: \[ zmq tcp \]"
    with pytest.raises(RuntimeError, match=problem):
        DispatchServer(DispatcherConfig(protocol="grpc"))


def test_worker_may_start_before_dispatcher() -> None:
    import threading

    port = free_port()
    worker = WorkerServer(WorkerConfig(f"localhost:{port}"), start=False)
    starting = threading.Thread(target=worker.start)
    starting.start()
    with DispatchServer(DispatcherConfig(port=port)) as dispatcher:
        starting.join()
        assert dispatcher.num_workers == 1
        worker.stop()
        until(lambda: dispatcher.num_workers == 0)


MILLISECONDS = [
    ({}, (600.0, 300.0, 600.0, 300.0, 3)),
    (
        {"job_gc_check_interval_ms": 0, "job_gc_timeout_ms": 0, "worker_timeout_ms": 0},
        (0.001, 0.001, 600.0, 300.0, 3),
    ),
    ({"job_gc_timeout_ms": -1, "client_timeout_ms": 50}, (600.0, float("inf"), 600.0, 0.05, 3)),
    (
        {"worker_max_concurrent_snapshots": 7, "worker_timeout_ms": 200},
        (600.0, 300.0, 0.2, 300.0, 7),
    ),
]


@pytest.mark.parametrize(("told", "meant"), MILLISECONDS)
def test_figures_in_milliseconds_and_their_defaults(
    told: dict[str, Any], meant: tuple[float, ...]
) -> None:
    config = DispatcherConfig(**told)
    figures = (
        config.gc_check_s,
        config.gc_timeout_s,
        config.worker_timeout_s,
        config.client_timeout_s,
    )
    assert (*figures, config.snapshots_max) == meant


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({"job_gc_timeout_ms": -2}, "job_gc_timeout_ms is -2"),
        ({"worker_timeout_ms": -1}, "worker_timeout_ms is -1"),
        ({"deployment_mode": "NEAR"}, "deployment_mode is 'NEAR'"),
        ({"worker_addresses": "localhost"}, "worker_addresses is 'localhost', wants a list"),
        ({"port": 65536}, "port is 65536"),
    ],
)
def test_senseless_figure_is_refused(told: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DispatcherConfig(**told)
