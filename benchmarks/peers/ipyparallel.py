"""ipyparallel: a controller and two engines; a direct view of one engine for calls, a load-balanced
view for tasks."""

from __future__ import annotations

import os
import tempfile
from functools import cached_property
from typing import Any

from benchmarks.peers.served import System, echoed, queued_bytes, rate, run, timed, waited


def nothing() -> None:
    pass


def echo(value: Any) -> Any:
    return value


def touch(array: Any) -> int:
    return int(array[-1])


class Ipyparallel(System):
    package = "ipyparallel"

    @cached_property
    def _client(self) -> Any:
        os.environ["IPYTHONDIR"] = os.path.join(tempfile.gettempdir(), "ipython")
        import ipyparallel

        cluster = ipyparallel.Cluster(n=2, controller_ip="127.0.0.1", log_level=40)
        self.stack.callback(cluster.stop_cluster_sync)
        client = cluster.start_and_connect_sync(activate=False)
        self.stack.callback(client.close)
        return client

    @cached_property
    def _engine(self) -> Any:
        return self._client[0]

    @cached_property
    def _balanced(self) -> Any:
        return self._client.load_balanced_view()

    def _all(self, count: int) -> list[Any]:
        submit = self._balanced.apply_async
        return [submit(nothing) for _ in range(count)]

    def _fetched(self, results: list[Any]) -> None:
        for result in results:
            result.get()
        self._client.purge_everything()  # otherwise the client keeps all results, and slows down

    def latency(self, count: int) -> list[float]:
        engine = self._engine
        return timed(lambda: engine.apply_sync(echo, 7), count)

    def calls(self, count: int, window: int) -> list[float]:
        engine = self._engine

        def work() -> None:
            for first in range(0, count, window):
                for result in [
                    engine.apply_async(echo, 7) for _ in range(min(window, count - first))
                ]:
                    result.get()

        return rate(work, count)

    def bandwidth(self, count: int, size: int) -> list[float]:
        engine = self._engine
        return echoed(lambda array: engine.apply_sync(echo, array), size, count)

    def tasks(self, count: int) -> list[float]:
        return rate(lambda: self._fetched(self._all(count)), count)

    def roundtrip(self, count: int) -> list[float]:
        balanced = self._balanced
        return timed(lambda: balanced.apply_sync(nothing), count)

    def fanout(self, count: int, size: int) -> list[float]:
        import ipyparallel
        import numpy as np

        array = np.ones(size, np.uint8)

        def work() -> None:
            self._client[:].push({"shared": array}, block=True)
            shared = ipyparallel.Reference("shared")
            self._fetched([self._balanced.apply_async(touch, shared) for _ in range(count)])

        return rate(work, count)

    def memory(self, count: int) -> list[float]:
        submit = self._balanced.apply_async
        return queued_bytes(self._all, lambda path: [submit(waited, path) for _ in range(2)], count)

    def startup(self) -> list[float]:
        self._balanced.apply_sync(nothing)
        return []


if __name__ == "__main__":
    run(Ipyparallel)
