"""The connections of readers: what a later reader of the same dataset takes over, and how long the
first request to a task waits for its process."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from tests.data.service.helpers import PATIENCE_S, TestCluster, until, values
from tests.data.service.test_forked import in_child
from zmqdist import errors
from zmqdist.addresses import join_address
from zmqdist.data import Dataset
from zmqdist.data.service.policy import ShardingPolicy
from zmqdist.data.service.reader import runtime, task_clients
from zmqdist.data.service.reader.delivery import FAILED, SOME, Demand
from zmqdist.data.service.reader.task_clients import RemoteTask
from zmqdist.rpc import internal_client
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.server import ZmqServer
from zmqdist.transport.loop import Loop
from zmqdist.transport.own_address import listen

pytestmark = pytest.mark.shares_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    with TestCluster(1) as cluster:
        yield cluster


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[ZmqClient]:
    """The clients that readers have made."""
    clients: list[ZmqClient] = []

    def make(*args: Any, **options: Any) -> ZmqClient:
        clients.append(ZmqClient(*args, **options))
        return clients[-1]

    monkeypatch.setattr(runtime, "ZmqClient", make)
    return clients


def test_next_pass_takes_connection_of_last(cluster: TestCluster, made: list[ZmqClient]) -> None:
    dataset = cluster.distribute(Dataset.range(10))
    assert [sorted(values(dataset)) for _ in range(3)] == [list(range(10))] * 3
    assert len(made) == 1
    assert made[0].snapshot().calls_in_flight == 0


def test_two_readers_at_a_time_share_no_connection(
    cluster: TestCluster, made: list[ZmqClient]
) -> None:
    dataset = cluster.distribute(Dataset.range(10))
    for _ in range(2):
        with iter(dataset) as first, iter(dataset) as second:
            assert sorted(map(int, first)) == sorted(map(int, second)) == list(range(10))
    assert ["closed" in repr(client) for client in made].count(False) == 1
    assert len(made) == 3


def test_connection_ends_with_its_dataset(cluster: TestCluster, made: list[ZmqClient]) -> None:
    gc.disable()  # without the collector's help
    try:
        dataset = cluster.distribute(Dataset.range(10))
        values(dataset)
        client = weakref.ref(made.pop())
        assert client() is not None
        del dataset
        until(lambda: client() is None)
    finally:
        gc.enable()


def test_few_connections_are_kept_for_many_datasets(
    cluster: TestCluster, made: list[ZmqClient]
) -> None:
    datasets = [cluster.distribute(Dataset.range(10)) for _ in range(runtime.CLIENTS_KEPT + 2)]
    for dataset in datasets:
        assert len(values(dataset)) == 10
    closed = ["closed" in repr(client) for client in made]
    assert closed.count(False) <= runtime.CLIENTS_KEPT
    assert not closed[-1]
    values(datasets[-1])
    assert len(made) == len(datasets)


def test_forked_child_connects_itself(cluster: TestCluster, made: list[ZmqClient]) -> None:
    dataset = cluster.distribute(Dataset.range(10), ShardingPolicy.DYNAMIC)
    values(dataset)
    assert in_child(lambda: len(values(dataset))) == 10
    assert len(values(dataset)) == 10
    assert len(made) == 1


def test_next_pass_reaches_next_dispatcher() -> None:
    with TestCluster(1) as cluster:
        dataset = cluster.distribute(Dataset.range(10))
        for _ in range(2):
            assert sorted(values(dataset)) == list(range(10))
            cluster.restart_dispatcher()
        assert sorted(values(dataset)) == list(range(10))


def test_connection_without_server_is_not_kept(made: list[ZmqClient]) -> None:
    with TestCluster(1) as cluster:
        dataset = cluster.distribute(Dataset.range(10))
        iterator = iter(dataset)
        next(iterator)
        cluster.stop_dispatcher()
        until(lambda: not made[0].snapshot().connected)
        iterator.close()
        assert "closed" in repr(made[0])


@pytest.mark.parametrize("when", ["before the request", "after the reply"])
def test_iterator_that_is_closed_while_it_opens_has_ended(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    dataset = cluster.distribute(Dataset.range(10), ShardingPolicy.DYNAMIC, delivery="exactly_once")
    iterator = iter(dataset)
    start, call = internal_client.start, runtime.call_until_answered

    def close(client: ZmqClient) -> None:
        threading.Thread(target=iterator.close).start()
        until(lambda: "closed" in repr(client))

    def close_and_start(client: ZmqClient, *args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        close(client)
        return start(client, *args, **options)

    def call_and_close(client: ZmqClient, *args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        value = call(client, *args, **options)
        close(client)
        return value

    if when == "before the request":
        monkeypatch.setattr(internal_client, "start", close_and_start)
    else:
        monkeypatch.setattr(runtime, "call_until_answered", call_and_close)
    with pytest.raises(StopIteration):
        next(iterator)


# -- the first request to a task -------------------------------------------------------------------


class Requests:
    """Requests to a task at a port at which no server listens yet."""

    def __init__(self) -> None:
        self.loop = Loop("zmqdist-test")
        self.loop.start()
        self.listener = listen("127.0.0.1")
        self.address = join_address("127.0.0.1", self.listener.getsockname()[1])
        self.client = ZmqClient(self.address)
        self.task = RemoteTask(self.client, 1, 2, None, self.loop)
        self.replies: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def ask(self) -> None:
        self.loop.run(self.task.ask, Demand(1, 1), lambda *reply: self.replies.put(reply))

    def release_later(self, released: threading.Event) -> None:
        """Set the event when every request that waits for its connection was given up."""
        at = self.loop.now() + task_clients.CONNECT_S
        self.loop.set_timer(released, at, released.set)

    def reply(self) -> tuple[int, int]:
        """Return the kind, and the code of the error."""
        kind, _, error = self.replies.get(timeout=PATIENCE_S)
        return kind, errors.OK if error is None else error.error_code

    def close(self) -> None:
        self.client.close()
        self.loop.stop()
        self.listener.close()


@pytest.fixture
def requests() -> Iterator[Requests]:
    requests = Requests()
    yield requests
    requests.close()


def test_first_requests_wait_for_process_of_task(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_clients, "ELEMENTS", "elements")  # users may register no zmqdist.*
    for _ in range(2):
        requests.ask()
    requests.listener.close()
    server = ZmqServer(requests.address)
    server.register("elements", lambda state, task, demand, codec: (SOME, "elements", None))
    with server:
        assert [requests.reply() for _ in range(2)] == [(SOME, errors.OK)] * 2


def test_first_request_that_was_sent_waits_for_its_reply(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_clients, "ELEMENTS", "elements")
    monkeypatch.setattr(task_clients, "CONNECT_S", 0.05)
    released = threading.Event()
    requests.listener.close()
    server = ZmqServer(requests.address)

    def elements(state: int, task: int, demand: list[Any], codec: str) -> tuple[Any, ...]:
        requests.loop.run(requests.release_later, released)
        assert released.wait(PATIENCE_S)
        return SOME, "elements", None

    server.register("elements", elements)
    with server:
        requests.client.call("zmqdist.about").get_value()
        requests.ask()
        assert requests.reply() == (SOME, errors.OK)


def test_answered_request_is_not_kept(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_clients, "ELEMENTS", "elements")
    calls: list[weakref.ref[Any]] = []
    start = internal_client.start

    def noted(*args: Any, **options: Any) -> Any:
        call = start(*args, **options)
        calls.append(weakref.ref(call))
        return call

    monkeypatch.setattr(internal_client, "start", noted)
    requests.listener.close()
    server = ZmqServer(requests.address)
    server.register("elements", lambda state, task, demand, codec: (SOME, "elements", None))
    with server:
        requests.ask()
        assert requests.reply() == (SOME, errors.OK)
        until(lambda: calls[0]() is None)


def test_first_request_does_not_wait_for_ever(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_clients, "CONNECT_S", 0.05)
    requests.ask()
    assert requests.reply() == (FAILED, errors.CANCELLED)
    requests.ask()
    assert requests.reply() == (FAILED, errors.UNAVAILABLE)
