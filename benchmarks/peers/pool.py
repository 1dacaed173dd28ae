"""concurrent.futures.ProcessPoolExecutor(2): the process pool of the standard library, which runs
on one host and has no broker."""

from __future__ import annotations

import platform
from concurrent.futures import Future
from functools import cached_property
from typing import Any

from benchmarks.peers.served import Model, System, echoed, queued_bytes, rate, run, timed, waited


def nothing() -> None:
    pass


def echo(array: Any) -> Any:
    return array


def touch(array: Any) -> int:
    return int(array[-1])


class Pool(System):
    package = "concurrent.futures.process"

    def version(self) -> str:
        return f"Python {platform.python_version()}"

    @cached_property
    def _pool(self) -> Any:
        from concurrent.futures import ProcessPoolExecutor

        return self.stack.enter_context(ProcessPoolExecutor(2))

    def _all(self, count: int) -> list[Future[None]]:
        return [self._pool.submit(nothing) for _ in range(count)]

    def tasks(self, count: int) -> list[float]:
        return rate(lambda: [future.result() for future in self._all(count)], count)

    def roundtrip(self, count: int) -> list[float]:
        return timed(lambda: self._pool.submit(nothing).result(), count)

    def bandwidth(self, count: int, size: int) -> list[float]:
        return echoed(lambda array: self._pool.submit(echo, array).result(), size, count)

    def fanout(self, count: int, size: int) -> list[float]:
        import numpy as np

        array = np.ones(size, np.uint8)

        def work() -> None:
            for future in [self._pool.submit(touch, array) for _ in range(count)]:
                future.result()

        return rate(work, count)

    def captured(self, count: int, size: int) -> list[float]:
        model = Model(size)
        return rate(lambda: list(self._pool.map(model.predict, range(count))), count)

    def memory(self, count: int) -> list[float]:
        return queued_bytes(
            self._all, lambda path: [self._pool.submit(waited, path) for _ in range(2)], count
        )

    def startup(self) -> list[float]:
        self._pool.submit(nothing).result()
        return []


if __name__ == "__main__":
    run(Pool)
