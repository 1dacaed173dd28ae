"""zmqdist itself: an RPC server in a process of its own, a cluster of two worker processes, and a
data service with two workers.

Variants: `threads`: the RPC handlers run in threads instead of inline. `sockets`: the same as
without a variant, but with ZMQDIST_ARENA=off in the environment, so that arrays travel by sockets
between processes of one host, too. `changeable`: an array that many tasks get is not frozen.
`inside`: dispatcher and workers of the data service are in the process that reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

from benchmarks.peers import streams
from benchmarks.peers.served import (
    SHRINKS,
    TABLE,
    Model,
    System,
    echoed,
    queued_bytes,
    rate,
    run,
    timed,
    waited,
)
from benchmarks.peers.streams import (
    ARRAY_MOD,
    ENDLESS,
    WORKERS,
    Servers,
    firsts,
    streamed,
    streamed_bytes,
)

ANSWER_MS = 60_000
QUESTIONS_OF = {
    "threads": {"latency", "calls", "bandwidth"},
    "sockets": {"bandwidth", "fanout", "captured", "data_arrays"},
    "inside": streams.QUESTIONS,
    "changeable": {"fanout"},
}


class Echo:
    def echo(self, value: Any) -> Any:
        return value


def nothing() -> None:
    pass


def touch(array: Any) -> int:
    return int(array[-1])


def counted(count: Any) -> None:
    count.assign_add(1.0)


def rows_touched(table: Any, rows: int, seed: int) -> None:
    import numpy as np

    from zmqdist import IndexedSlices

    ids = np.random.default_rng(seed).integers(0, table.shape[0], rows)
    table.scatter_add(IndexedSlices(table.sparse_read(ids) * np.float32(SHRINKS), ids))


def model_touched(model: Any) -> None:
    import numpy as np

    reads = [part.start_read() for part in model.variables]
    for part, read in zip(model.variables, reads, strict=True):
        part.assign_add(read.get_value() * np.float32(SHRINKS))


def adding(size: int) -> Callable[[Any], Any]:
    """Return a function that makes a new array of `size` bytes from a number."""
    import numpy as np

    base = np.ones(size, np.uint8)
    return lambda number: base + np.uint8(number % ARRAY_MOD)


class Zmqdist(System):
    package = "zmqdist"
    loads = ("zmqdist.launch.local_cluster", "zmqdist.coordinator", "zmqdist.rpc")

    def answers(self) -> list[str]:
        own = super().answers()
        return [name for name in own if name in QUESTIONS_OF.get(self.variant, own)]

    # -- calls -------------------------------------------------------------------------------------

    @cached_property
    def _client(self) -> Any:
        from zmqdist.observe.peer import peer_process
        from zmqdist.rpc import Client

        peer = self.stack.enter_context(peer_process())
        return self.stack.enter_context(Client.create("zmq", peer, "benchmarks", ANSWER_MS))

    @property
    def _echo(self) -> Any:
        client = self._client
        return client.echo_pool_blocking if self.variant == "threads" else client.echo_blocking

    def latency(self, count: int) -> list[float]:
        return timed(lambda: self._echo(7), count)

    def calls(self, count: int, window: int) -> list[float]:
        start = self._client.echo_pool if self.variant == "threads" else self._client.echo

        def work() -> None:
            for first in range(0, count, window):
                for result in [start(7) for _ in range(min(window, count - first))]:
                    result.get_value()

        return rate(work, count)

    def bandwidth(self, count: int, size: int) -> list[float]:
        return echoed(self._echo, size, count)

    # -- tasks -------------------------------------------------------------------------------------

    @cached_property
    def _coordinator(self) -> Any:
        import zmqdist as zd

        cluster = self.stack.enter_context(zd.local_cluster(workers=2))
        return self.stack.enter_context(cluster.coordinator())

    def actors(self, count: int, window: int) -> list[float]:
        call, gather = self._actor.echo, self._coordinator.gather

        def work() -> None:
            for first in range(0, count, window):
                gather([call(7) for _ in range(min(window, count - first))])

        return rate(work, count)

    @cached_property
    def _actor(self) -> Any:
        return self._coordinator.actor(Echo)

    def _all(self, count: int) -> list[Any]:
        schedule = self._coordinator.schedule
        return [schedule(nothing) for _ in range(count)]

    def tasks(self, count: int) -> list[float]:
        return rate(lambda: [value.fetch() for value in self._all(count)], count)

    def roundtrip(self, count: int) -> list[float]:
        return timed(lambda: self._coordinator.schedule(nothing).fetch(), count)

    def fanout(self, count: int, size: int) -> list[float]:
        import numpy as np

        from zmqdist import freeze

        array = np.ones(size, np.uint8)
        given = array if self.variant == "changeable" else freeze(array)
        return rate(
            lambda: self._coordinator.fetch(self._coordinator.map(touch, [given] * count)), count
        )

    def captured(self, count: int, size: int) -> list[float]:
        model = Model(size)
        return rate(
            lambda: self._coordinator.fetch(self._coordinator.map(model.predict, range(count))),
            count,
        )

    def memory(self, count: int) -> list[float]:
        return queued_bytes(
            self._all, lambda path: self._coordinator.map(waited, [path] * 2), count
        )

    def startup(self) -> list[float]:
        self._coordinator.schedule(nothing).fetch()
        return []

    # -- parameter servers -------------------------------------------------------------------------

    @cached_property
    def _strategy(self) -> Any:
        from zmqdist import ParameterServerStrategy, local_cluster, partitioners

        cluster = self.stack.enter_context(local_cluster(workers=2, ps=2))
        halves = partitioners.FixedShardsPartitioner(2)
        return self.stack.enter_context(ParameterServerStrategy(cluster, halves))

    @cache  # noqa: B019
    def _zeros(self, *shape: int) -> Any:
        import numpy as np

        from zmqdist import Variable

        with self._strategy.scope():
            return Variable(np.zeros(shape, np.float32))

    def ps_tasks(self, count: int) -> list[float]:
        schedule, variable = self._strategy.coordinator.schedule, self._zeros()
        return rate(
            lambda: [
                value.fetch() for value in [schedule(counted, (variable,)) for _ in range(count)]
            ],
            count,
        )

    def ps_rows(self, count: int, rows: int) -> list[float]:
        coordinator, table = self._strategy.coordinator, self._zeros(*TABLE)

        def work() -> None:
            coordinator.fetch(
                [coordinator.schedule(rows_touched, (table, rows, seed)) for seed in range(count)]
            )

        return [value * rows for value in rate(work, count)]

    def ps_model(self, count: int, size: int) -> list[float]:
        schedule, model = self._strategy.coordinator.schedule, self._zeros(size // 4)
        touched = rate(
            lambda: [schedule(model_touched, (model,)).fetch() for _ in range(count)], count
        )
        return [value * 2 * size for value in touched]

    # -- data --------------------------------------------------------------------------------------

    @cached_property
    def _servers(self) -> Servers:
        return Servers(self.stack)

    @cache  # noqa: B019 (as long as the process)
    def _dispatcher(self, workers: int) -> str:
        """Start a dispatcher and its workers. Return the dispatcher's address, perhaps before these
        processes are ready."""
        if self.variant == "inside":
            from zmqdist.data import service

            dispatcher = self.stack.enter_context(service.DispatchServer())
            for _ in range(workers):
                self.stack.enter_context(
                    service.WorkerServer(service.WorkerConfig(dispatcher.address))
                )
            return str(dispatcher.address)
        port = streams.free_port()
        self._servers.start("zmqdist_cli", "dispatcher", "--port", str(port))
        for _ in range(workers):
            self._servers.start("zmqdist_cli", "worker", "--dispatcher", f"localhost:{port}")
        return f"localhost:{port}"

    def _served(self, dataset: Any, workers: int = WORKERS) -> Any:
        from zmqdist.data import service

        where = self._dispatcher(workers)
        return dataset.apply(
            service.distribute(service.ShardingPolicy.OFF, where, compression=None)
        )

    @cache  # noqa: B019
    def _numbers(self, batch: int = 1) -> Any:
        from zmqdist.data import Dataset

        dataset = Dataset.range(ENDLESS)
        return self._served(dataset.batch(batch) if batch > 1 else dataset)

    @cache  # noqa: B019
    def _arrays(self, size: int) -> Any:
        from zmqdist.data import Dataset

        return self._served(Dataset.range(ENDLESS).map(adding(size)).prefetch(2))

    @cache  # noqa: B019
    def _images(self, workers: int) -> Any:
        from zmqdist.data import AUTOTUNE, Dataset

        names = Dataset.from_tensor_slices(streams.pictures()).repeat()
        return self._served(
            names.map(streams.picture, num_parallel_calls=AUTOTUNE).prefetch(AUTOTUNE), workers
        )

    def data_elements(self, count: int, batch: int) -> list[float]:
        dataset = self._numbers(batch)
        self._servers.ready()
        return streamed(lambda: dataset, count, batch)

    def data_arrays(self, count: int, size: int) -> list[float]:
        dataset = self._arrays(size)
        self._servers.ready()
        return streamed_bytes(lambda: dataset, count, size)

    def data_images(self, count: int, workers: int) -> list[float]:
        dataset = self._images(workers)
        self._servers.ready()
        return streamed(lambda: dataset, count)

    def data_first(self, count: int) -> list[float]:
        dataset = self._numbers()
        self._servers.ready()
        return firsts(lambda: dataset, count)

    def data_start(self) -> list[float]:
        if not self.variant:
            self._dispatcher(WORKERS)
        next(iter(self._numbers()))
        return []


if __name__ == "__main__":
    run(Zmqdist)
