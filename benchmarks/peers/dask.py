"""dask.distributed: a LocalCluster of two worker processes with one thread each; an actor for
calls. No dashboard."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from benchmarks.peers.served import System, echoed, queued_bytes, rate, run, timed, waited


def nothing() -> None:
    pass


def touch(array: Any, _number: int) -> int:
    return int(array[-1])


class Echo:
    def echo(self, value: Any) -> Any:
        return value


class Dask(System):
    package = "distributed"

    @cached_property
    def _client(self) -> Any:
        from distributed import Client, LocalCluster

        cluster = LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            silence_logs=40,
        )
        return self.stack.enter_context(Client(self.stack.enter_context(cluster)))

    @cached_property
    def _actor(self) -> Any:
        return self._client.submit(Echo, actor=True).result()

    def _all(self, count: int) -> list[Any]:
        submit = self._client.submit
        return [submit(nothing, pure=False) for _ in range(count)]

    def latency(self, count: int) -> list[float]:
        echo = self._actor.echo
        return timed(lambda: echo(7).result(), count)

    def calls(self, count: int, window: int) -> list[float]:
        echo = self._actor.echo

        def work() -> None:
            for first in range(0, count, window):
                for future in [echo(7) for _ in range(min(window, count - first))]:
                    future.result()

        return rate(work, count)

    actors = calls

    def bandwidth(self, count: int, size: int) -> list[float]:
        echo = self._actor.echo
        return echoed(lambda array: echo(array).result(), size, count)

    def tasks(self, count: int) -> list[float]:
        return rate(lambda: self._client.gather(self._all(count)), count)

    def roundtrip(self, count: int) -> list[float]:
        submit = self._client.submit
        return timed(lambda: submit(nothing, pure=False).result(), count)

    def fanout(self, count: int, size: int) -> list[float]:
        import numpy as np

        client = self._client
        array = np.ones(size, np.uint8)

        def work() -> None:
            shared = client.scatter(array, broadcast=True, hash=False)
            client.gather(
                [client.submit(touch, shared, number, pure=False) for number in range(count)]
            )

        return rate(work, count)

    def memory(self, count: int) -> list[float]:
        submit = self._client.submit
        return queued_bytes(
            self._all, lambda path: [submit(waited, path, pure=False) for _ in range(2)], count
        )

    def startup(self) -> list[float]:
        self._client.submit(nothing).result()
        return []


if __name__ == "__main__":
    run(Dask)
