"""Ray: an actor for calls, remote functions on two CPUs for tasks, the object store for shared
arrays. No dashboard."""

from __future__ import annotations

import os
import tempfile
from functools import cache, cached_property
from typing import Any

from benchmarks.peers.served import (
    SHRINKS,
    TABLE,
    System,
    echoed,
    queued_bytes,
    rate,
    run,
    timed,
    waited,
)

STORE_BYTES = 4 * 2**30


class Ray(System):
    package = "ray"

    @cached_property
    def _ray(self) -> Any:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        import ray

        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=STORE_BYTES,
            _temp_dir=os.path.join(tempfile.gettempdir(), "ray"),
        )
        self.stack.callback(ray.shutdown)
        return ray

    @cached_property
    def _actor(self) -> Any:
        class Echo:
            def echo(self, value: Any) -> Any:
                return value

        return self._ray.remote(num_cpus=0)(Echo).remote()

    @cached_property
    def _nothing(self) -> Any:
        return self._ray.remote(lambda: None)

    def _all(self, count: int) -> list[Any]:
        remote = self._nothing.remote
        return [remote() for _ in range(count)]

    def latency(self, count: int) -> list[float]:
        get, remote = self._ray.get, self._actor.echo.remote
        return timed(lambda: get(remote(7)), count)

    def calls(self, count: int, window: int) -> list[float]:
        get, remote = self._ray.get, self._actor.echo.remote

        def work() -> None:
            for first in range(0, count, window):
                get([remote(7) for _ in range(min(window, count - first))])

        return rate(work, count)

    actors = calls

    def bandwidth(self, count: int, size: int) -> list[float]:
        get, remote = self._ray.get, self._actor.echo.remote
        return echoed(lambda array: get(remote(array)), size, count)

    def tasks(self, count: int) -> list[float]:
        return rate(lambda: self._ray.get(self._all(count)), count)

    def roundtrip(self, count: int) -> list[float]:
        get, remote = self._ray.get, self._nothing.remote
        return timed(lambda: get(remote()), count)

    def fanout(self, count: int, size: int) -> list[float]:
        import numpy as np

        touch = self._ray.remote(lambda array: int(array[-1]))
        array = np.ones(size, np.uint8)

        def work() -> None:
            shared = self._ray.put(array)
            self._ray.get([touch.remote(shared) for _ in range(count)])

        return rate(work, count)

    def memory(self, count: int) -> list[float]:
        hold = self._ray.remote(waited)
        return queued_bytes(self._all, lambda path: [hold.remote(path) for _ in range(2)], count)

    @cached_property
    def _servers(self) -> list[Any]:
        """Two actors that serve as parameter servers. Each holds half of every array."""

        class Server:
            def __init__(self) -> None:
                self._values: dict[str, Any] = {}

            def make(self, name: str, *shape: int) -> None:
                import numpy as np

                self._values[name] = np.zeros(shape, np.float32)

            def read(self, name: str) -> Any:
                return self._values[name]

            def rows(self, name: str, ids: Any) -> Any:
                return self._values[name][ids]

            def add(self, name: str, value: Any) -> None:
                self._values[name] += value

            def add_rows(self, name: str, ids: Any, rows: Any) -> None:
                import numpy as np

                np.add.at(self._values[name], ids, rows)

        remote = self._ray.remote(num_cpus=0)(Server)
        return [remote.remote() for _ in range(2)]

    @cache  # noqa: B019
    def _made(self, *shape: int) -> tuple[list[Any], str]:
        """Make an array of this shape at each server. Return the servers, and the name of the array
        there."""
        self._ray.get([server.make.remote(str(shape), *shape) for server in self._servers])
        return self._servers, str(shape)

    def ps_tasks(self, count: int) -> list[float]:
        import ray

        def counted(servers: list[Any], name: str) -> None:
            ray.get(servers[0].add.remote(name, 1.0))

        made, remote = self._made(), self._ray.remote(counted).remote
        return rate(lambda: self._ray.get([remote(*made) for _ in range(count)]), count)

    def ps_rows(self, count: int, rows: int) -> list[float]:
        import ray

        half = TABLE[0] // 2

        def touched(servers: list[Any], name: str, seed: int) -> None:
            import numpy as np

            ids = np.random.default_rng(seed).integers(0, 2 * half, rows)
            parts = [ids[ids < half], ids[ids >= half] - half]
            found = ray.get(
                [
                    server.rows.remote(name, part)
                    for server, part in zip(servers, parts, strict=True)
                ]
            )
            added = zip(servers, parts, found, strict=True)
            ray.get(
                [
                    server.add_rows.remote(name, part, some * np.float32(SHRINKS))
                    for server, part, some in added
                ]
            )

        made, remote = self._made(half, TABLE[1]), self._ray.remote(touched).remote
        each = rate(lambda: self._ray.get([remote(*made, seed) for seed in range(count)]), count)
        return [value * rows for value in each]

    def ps_model(self, count: int, size: int) -> list[float]:
        import ray

        def touched(servers: list[Any], name: str) -> None:
            import numpy as np

            halves = ray.get([server.read.remote(name) for server in servers])
            deltas = zip(servers, halves, strict=True)
            ray.get(
                [server.add.remote(name, half * np.float32(SHRINKS)) for server, half in deltas]
            )

        made, remote = self._made(size // 8), self._ray.remote(touched).remote
        return [
            value * 2 * size
            for value in rate(lambda: [ray.get(remote(*made)) for _ in range(count)], count)
        ]

    def startup(self) -> list[float]:
        self._ray.get(self._nothing.remote())
        return []


if __name__ == "__main__":
    run(Ray)
