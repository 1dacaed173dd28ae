"""The fixed list of workers: which place a worker gets, which worker gets its place back, and which
is refused."""

from __future__ import annotations

import json

import pytest

from zmqdist.data.service.dispatcher.machine.worker_list import WorkerList, host_and_port
from zmqdist.errors import FailedPreconditionError, NotFoundError

REFUSED = "Failed to assign an index for worker {}. .*The worker's address is not configured, or other workers are already running"


def joined(entries: list[str], *workers: str) -> WorkerList:
    hosts = WorkerList(entries)
    for worker in workers:
        hosts.join(worker)
    return hosts


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("localhost", "localhost", ""),
        ("localhost:1234", "localhost", "1234"),
        ("localhost:%port%", "localhost", ""),
        ("localhost:%port_worker%", "localhost", ""),
        ("localhost:worker", "localhost", "worker"),
        ("grpc://localhost:1234", "localhost", "1234"),
        ("tcp://localhost", "localhost", ""),
        ("[::1]:1234", "[::1]", "1234"),
        ("[2001:db8::2:1]", "[2001:db8::2:1]", ""),
        ("tcp://[::1]:%port%", "[::1]", ""),
        ("/job/a:b:1234", "/job/a:b", "1234"),
        ("/job/a:b:%port_x%", "/job/a:b", ""),
        ("", "", ""),
    ],
)
def test_address_has_host_and_optional_port(address: str, host: str, port: str) -> None:
    assert host_and_port(address) == (host, port)


@pytest.mark.parametrize(
    ("entries", "workers", "indices"),
    [
        (["a:1", "b:2"], ["b:2", "a:1"], [1, 0]),
        (["a", "a", "a"], ["a:7", "a:5", "a:6"], [0, 1, 2]),
        (["a:%port%", "b:%port_foo%", "a"], ["a:1", "b:1", "a:2"], [0, 1, 2]),
        (["a", "a:1"], ["a:1", "a:2"], [1, 0]),
        (["tcp://a", "grpc://a:1"], ["a:1", "ipc://a:5"], [1, 0]),
        (["[::1]", "[::1]:9"], ["[::1]:9", "tcp://[::1]:8"], [1, 0]),
        (["x:y:1", "x:y"], ["x:y:1"], [0]),
        (["host:name"], ["host:name"], [0]),
        (["a", "b"], ["a"], [0]),
    ],
)
def test_worker_gets_best_fitting_entry(
    entries: list[str], workers: list[str], indices: list[int]
) -> None:
    hosts = joined(entries, *workers)
    assert [hosts.index_of(worker) for worker in workers] == indices


@pytest.mark.parametrize(
    ("entries", "there", "worker"),
    [
        (["a:1"], [], "a:2"),
        (["a"], [], "b"),
        (["a:worker"], [], "a:1234"),
        (["a", "a"], ["a:1", "a:2"], "a:3"),
        (["a:1"], ["a:1"], "a:2"),
        (["[::1]"], [], "[::2]:1"),
        (["a"], ["a:1"], "a"),
    ],
)
def test_worker_without_fitting_entry_is_refused(
    entries: list[str], there: list[str], worker: str
) -> None:
    hosts = joined(entries, *there)
    before = hosts.snapshot()
    with pytest.raises(FailedPreconditionError, match=REFUSED.format(worker.replace("[", r"\["))):
        hosts.join(worker)
    assert hosts.snapshot() == before


def test_empty_list_refuses_no_worker() -> None:
    hosts = joined([], "a:1")
    with pytest.raises(NotFoundError, match="Worker a:1 is not in the workers list"):
        hosts.index_of("a:1")


def test_absent_worker_has_no_index() -> None:
    with pytest.raises(NotFoundError, match="Worker a:2 is not in the workers list"):
        joined(["a"], "a:1").index_of("a:2")


def test_rejoining_worker_keeps_its_entry() -> None:
    hosts = joined(["a", "a"], "a:1", "a:2", "a:1")
    hosts.leave("a:2")
    hosts.join("a:2")
    assert [hosts.index_of("a:1"), hosts.index_of("a:2")] == [0, 1]


def test_worker_on_another_port_gets_its_old_entry() -> None:
    hosts = joined(["a", "a", "a"], "a:1", "a:2")
    hosts.leave("a:2")
    hosts.join("a:9")
    assert hosts.index_of("a:9") == 1
    with pytest.raises(NotFoundError):
        hosts.index_of("a:2")


def test_returning_worker_without_its_entry_is_refused() -> None:
    hosts = joined(["a"], "a:1")
    hosts.leave("a:1")
    hosts.join("a:2")
    with pytest.raises(FailedPreconditionError):
        hosts.join("a:1")


def test_entry_with_port_fits_only_that_port() -> None:
    hosts = joined(["a:1"], "a:1")
    hosts.leave("a:1")
    with pytest.raises(FailedPreconditionError):
        hosts.join("a:2")


def test_list_continues_from_plain_data() -> None:
    hosts = joined(["a", "b:2", "a"], "a:1", "b:2")
    hosts.leave("a:1")
    other = WorkerList(["a", "b:2", "a"])
    other.restore(json.loads(json.dumps(hosts.snapshot())))
    assert other.snapshot() == hosts.snapshot() == (("a:1", False), ("b:2", True), ("", False))
    other.join("a:5")
    assert other.index_of("a:5") == 0


def test_changed_list_restores_only_fitting_entries() -> None:
    hosts = WorkerList(["b", "b:2"])
    hosts.restore([("a:1", True), ("b:2", True), ("c:1", True)])
    assert hosts.snapshot() == (("", False), ("b:2", True))


def test_worker_without_entry_may_leave() -> None:
    hosts = joined(["a"], "a:1")
    hosts.leave("b:1")
    assert hosts.snapshot() == (("a:1", True),)
