"""What is opened and closed again leaves no descriptor and no memory file, also while the garbage
collector is off."""

from __future__ import annotations

import contextlib
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import zmqdist as zd
from tests.transport.helpers import until
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.data import Dataset, service
from zmqdist.data.service.reader.runtime import CLIENTS_KEPT

TIMES = 20


def client(cluster: zd.DispatchServer) -> None:
    with contextlib.closing(zd.rpc.Client.create("zmq", cluster.address)) as made:
        made.call("zmqdist.no_such_method").get_error()


def server(cluster: zd.DispatchServer) -> None:
    made = zd.rpc.Server.create("zmq", "127.0.0.1:0")
    made.register("length", lambda *leaves: len(leaves))
    made.start()
    with contextlib.closing(zd.rpc.Client.create("zmq", made.address)) as asking:
        assert asking.call("length", [1, 2]).get_value() == [2]
    made.stop()


def coordinator(cluster: zd.DispatchServer) -> None:
    with ClusterCoordinator(cluster) as made:
        assert made.schedule(len, ("three",)).get(60) == 5


def executor(cluster: zd.DispatchServer) -> None:
    with zd.Executor(cluster) as pool:
        assert pool.submit(len, "three").result(60) == 5


def iterator(cluster: zd.DispatchServer) -> None:
    reading = service.distribute("distributed_epoch", cluster.target)
    assert sorted(Dataset.range(5).apply(reading)) == [0, 1, 2, 3, 4]


def iterator_of_large(cluster: zd.DispatchServer) -> None:
    reading = service.distribute("distributed_epoch", cluster.target)
    with iter(Dataset.range(4).map(lambda x: np.full(300_000, x)).apply(reading)) as elements:
        assert sorted(int(element[0]) for element in elements) == [0, 1, 2, 3]


USES = (client, server, coordinator, executor, iterator, iterator_of_large)


@pytest.fixture(scope="module")
def cluster() -> Iterator[zd.DispatchServer]:
    """A cluster that has been used in each way, so that its slots and their memory are there
    already."""
    with (
        zd.DispatchServer() as dispatcher,
        zd.WorkerServer(service.WorkerConfig(dispatcher.address, processes=True)),
    ):
        for use in USES:
            use(dispatcher)
        yield dispatcher


def descriptors() -> Counter[str]:
    """Return how many descriptors of each kind this process has. The eventfds of clients do not
    count:
    each is closed when its client is collected, because another thread may be about to write to it.
    """
    kinds: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of the folder itself
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name == "anon_inode:[eventfd]":
                continue
            kinds["memory file" if "memfd" in name else name.partition(":")[0]] += 1
    return kinds


@pytest.mark.shares_cluster
@pytest.mark.parametrize("use", USES)
def test_service_leaves_no_descriptors(
    cluster: zd.DispatchServer, use: Callable[[zd.DispatchServer], None]
) -> None:
    gc.collect()
    gc.disable()
    try:
        for _ in range(CLIENTS_KEPT):  # a reader's connection is kept for the next one
            use(cluster)
        before = descriptors()
        for _ in range(TIMES):
            use(cluster)
        with contextlib.suppress(AssertionError):  # the assertion below says what is left
            until(lambda: not descriptors() - before)
        assert not descriptors() - before
    finally:
        gc.enable()
