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
def test_an_address_has_a_host_and_perhaps_a_port(address: str, host: str, port: str) -> None:
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
def test_a_worker_has_the_place_of_the_entry_that_fits_it_best(
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
def test_a_worker_that_fits_no_entry_is_refused_and_changes_nothing(
    entries: list[str], there: list[str], worker: str
) -> None:
    hosts = joined(entries, *there)
    before = hosts.snapshot()
    with pytest.raises(FailedPreconditionError, match=REFUSED.format(worker.replace("[", r"\["))):
        hosts.join(worker)
    assert hosts.snapshot() == before


def test_an_empty_list_refuses_no_worker_and_has_no_places() -> None:
    hosts = joined([], "a:1")
    with pytest.raises(NotFoundError, match="Worker a:1 is not in the workers list"):
        hosts.index_of("a:1")


def test_a_worker_that_has_not_joined_has_no_place() -> None:
    with pytest.raises(NotFoundError, match="Worker a:2 is not in the workers list"):
        joined(["a"], "a:1").index_of("a:2")


def test_a_worker_that_joins_again_keeps_its_place_whether_it_was_lost_or_not() -> None:
    hosts = joined(["a", "a"], "a:1", "a:2", "a:1")
    hosts.leave("a:2")
    hosts.join("a:2")
    assert [hosts.index_of("a:1"), hosts.index_of("a:2")] == [0, 1]


def test_a_worker_that_starts_again_on_another_port_takes_its_old_place_before_a_new_one() -> None:
    hosts = joined(["a", "a", "a"], "a:1", "a:2")
    hosts.leave("a:2")
    hosts.join("a:9")
    assert hosts.index_of("a:9") == 1
    with pytest.raises(NotFoundError):
        hosts.index_of("a:2")


def test_a_worker_that_comes_back_after_its_place_was_given_away_is_refused() -> None:
    hosts = joined(["a"], "a:1")
    hosts.leave("a:1")
    hosts.join("a:2")
    with pytest.raises(FailedPreconditionError):
        hosts.join("a:1")


def test_an_entry_with_a_port_is_given_to_no_other_port() -> None:
    hosts = joined(["a:1"], "a:1")
    hosts.leave("a:1")
    with pytest.raises(FailedPreconditionError):
        hosts.join("a:2")


def test_the_state_of_a_list_is_plain_data_and_continues_in_another_process() -> None:
    hosts = joined(["a", "b:2", "a"], "a:1", "b:2")
    hosts.leave("a:1")
    other = WorkerList(["a", "b:2", "a"])
    other.restore(json.loads(json.dumps(hosts.snapshot())))
    assert other.snapshot() == hosts.snapshot() == (("a:1", False), ("b:2", True), ("", False))
    other.join("a:5")
    assert other.index_of("a:5") == 0


def test_after_a_change_of_the_list_only_places_that_fit_are_restored() -> None:
    hosts = WorkerList(["b", "b:2"])
    hosts.restore([("a:1", True), ("b:2", True), ("c:1", True)])
    assert hosts.snapshot() == (("", False), ("b:2", True))


def test_a_worker_without_a_place_may_leave() -> None:
    hosts = joined(["a"], "a:1")
    hosts.leave("b:1")
    assert hosts.snapshot() == (("a:1", True),)
