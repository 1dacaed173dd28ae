"""Parsl: a HighThroughputExecutor with two workers on this host. Parsl has tasks, but no calls."""

from __future__ import annotations

import os
import tempfile
from functools import cached_property
from typing import Any

from benchmarks.peers.served import System, echoed, queued_bytes, rate, run, timed, waited


def nothing() -> None:
    pass


def echo(array: Any) -> Any:
    return array


def touch(array: Any) -> int:
    return int(array[-1])


class Parsl(System):
    package = "parsl"

    @cached_property
    def _app(self) -> Any:
        """A function that makes an app of Parsl from a Python function. The first use starts the
        executor."""
        import parsl
        from parsl.config import Config
        from parsl.executors import HighThroughputExecutor
        from parsl.providers import LocalProvider

        executor = HighThroughputExecutor(
            address="127.0.0.1",
            loopback_address="127.0.0.1",
            max_workers_per_node=2,
            provider=LocalProvider(init_blocks=1, min_blocks=1, max_blocks=1),
        )
        folder = os.path.join(tempfile.gettempdir(), "runinfo")
        self.stack.enter_context(
            parsl.load(Config(executors=[executor], run_dir=folder, strategy="none"))
        )
        return lambda function: parsl.python_app(function, cache=False)

    @cached_property
    def _nothing(self) -> Any:
        return self._app(nothing)

    def _all(self, count: int) -> list[Any]:
        return [self._nothing() for _ in range(count)]

    def tasks(self, count: int) -> list[float]:
        return rate(lambda: [future.result() for future in self._all(count)], count)

    def roundtrip(self, count: int) -> list[float]:
        app = self._nothing
        return timed(lambda: app().result(), count)

    def bandwidth(self, count: int, size: int) -> list[float]:
        app = self._app(echo)
        return echoed(lambda array: app(array).result(), size, count)

    def fanout(self, count: int, size: int) -> list[float]:
        import numpy as np

        app = self._app(touch)
        array = np.ones(size, np.uint8)
        return rate(
            lambda: [future.result() for future in [app(array) for _ in range(count)]], count
        )

    def memory(self, count: int) -> list[float]:
        hold = self._app(waited)
        return queued_bytes(self._all, lambda path: [hold(path) for _ in range(2)], count)

    def startup(self) -> list[float]:
        self._nothing().result()
        return []


if __name__ == "__main__":
    run(Parsl)
