"""Options of a worker's server of elements: a second port for them, how long it answers when the
worker stops, and how it compresses."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.data.service.helpers import PATIENCE_S, TestCluster, until
from zmqdist.data import Dataset
from zmqdist.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, OpError
from zmqdist.scheduling.shared.config import WorkerConfig

QUIET_MS = 60_000


def fails(x: Any) -> Any:
    raise ValueError(x)


@pytest.fixture
def cluster() -> Iterator[TestCluster]:
    """A dispatcher; a test adds its worker."""
    with TestCluster(num_workers=0) as made:
        yield made


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("protocol", [None, "zmq", "tcp"])
def test_readers_are_sent_to_the_second_port_where_there_is_one(
    cluster: TestCluster, protocol: str | None, processes: bool
) -> None:
    usual, host = ("127.0.0.1", "localhost") if processes else ("localhost", "127.0.0.1")
    options = {} if protocol is None else {"data_transfer_address": f"{host}:%dts_port%"}
    worker = cluster.add_worker(data_transfer_protocol=protocol, processes=processes, **options)
    with pytest.raises(OpError, match=r"Failed to get element from worker (\S+):") as raised:
        list(cluster.distribute(Dataset.range(1).map(fails), data_transfer_protocol="zmq"))
    found = re.search(r"from worker (\S+):(\d+): ", raised.value.message)
    assert found is not None
    assert found[1] == (usual if protocol is None else host)
    own_port = worker.worker_address().rpartition(":")[2]
    assert (found[2] == own_port) == (protocol is None and not processes)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        (
            {"data_transfer_port": 5},
            InvalidArgumentError,
            "set data_transfer_protocol='zmq' as well",
        ),
        (
            {"data_transfer_address": "a:1"},
            InvalidArgumentError,
            "set data_transfer_protocol='zmq' as well",
        ),
        (
            {"data_transfer_protocol": "pigeon"},
            NotFoundError,
            "No data transfer server factory .* protocol pigeon",
        ),
        (
            {"data_transfer_protocol": "zmq", "data_transfer_port": 5, "processes": True},
            InvalidArgumentError,
            "data_transfer_port needs processes=False",
        ),
        (
            {"data_transfer_protocol": "zmq", "data_transfer_address": "a:1", "processes": True},
            InvalidArgumentError,
            "data_transfer_address needs %dts_port% in it",
        ),
        (
            {"data_transfer_protocol": "zmq", "data_transfer_port": 70000},
            InvalidArgumentError,
            "wants 0 to 65535",
        ),
    ],
)
def test_unreachable_second_port_is_refused(
    options: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        WorkerConfig("127.0.0.1:1", **options)


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("quiet_ms", [0, QUIET_MS])
def test_pending_requests_are_answered_in_quiet_period(
    cluster: TestCluster, quiet_ms: int, processes: bool, tmp_path: Any
) -> None:
    begun, gate = tmp_path / "begun", tmp_path / "gate"

    def waits(x: Any) -> Any:
        import time

        if not x:
            return x
        begun.touch()
        until_s = time.monotonic() + 30
        while not gate.exists() and time.monotonic() < until_s:
            time.sleep(0.005)
        return x

    worker = cluster.add_worker(shutdown_quiet_period_ms=quiet_ms, processes=processes)
    iterator = iter(cluster.distribute(Dataset.range(2).map(waits), data_transfer_protocol="zmq"))
    found: list[Any] = []
    reading = threading.Thread(target=lambda: found.extend(iterator))
    reading.start()
    until(lambda: found and begun.exists(), "the reader has one element and asks for the next one")
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    until(lambda: not cluster.num_registered_workers())
    if not quiet_ms:
        stopping.join()
    gate.touch()
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive(), (
        "a worker that has answered all that was asked waits for no more"
    )
    if quiet_ms:
        until(lambda: len(found) == 2, "what was asked before is answered")
    iterator.close()
    reading.join()
    assert [int(each) for each in found] == ([0, 1] if quiet_ms else [0])


def test_missing_codec_costs_no_element(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("zstandard")
    cluster.add_worker()
    iterator = iter(
        cluster.distribute(Dataset.range(3), compression="ZSTD", data_transfer_protocol="zmq")
    )
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(
            FailedPreconditionError,
            match=r"compression ZSTD needs zstandard: pip install zstandard, on workers and readers",
        ):
            next(iterator)
    found: list[int] = []
    while len(found) < 3:
        try:
            found.append(int(next(iterator)))
        except FailedPreconditionError:  # what was asked ahead
            continue
    iterator.close()
    assert found == [0, 1, 2]
