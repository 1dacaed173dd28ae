"""Ray: an actor for calls, remote functions on two CPUs for tasks, the object store for shared arrays. No dashboard."""

from __future__ import annotations

import os
import tempfile
from functools import cached_property
from typing import Any

from benchmarks.peers.served import System, echoed, queued_bytes, rate, run, timed, waited

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

    def startup(self) -> list[float]:
        self._ray.get(self._nothing.remote())
        return []


if __name__ == "__main__":
    run(Ray)
