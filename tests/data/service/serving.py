"""A dispatcher and workers with processes for their tasks, for tests of user code."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.zygote import slots_zygote
from zmqdist.data.dataset import Dataset
from zmqdist.data.service.client import distribute
from zmqdist.data.service.policy import ShardingPolicy
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
from zmqdist.servers.dispatch_server import DispatchServer
from zmqdist.servers.worker_server import WorkerServer

PATIENCE_S = 30.0


def until(condition: Callable[[], Any], what: str) -> Any:
    """What the condition gives, when it is true at last."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.005)
    return found


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
