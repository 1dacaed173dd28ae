"""Scaler (opengris-scaler): a SchedulerClusterCombo of two workers."""

from __future__ import annotations

import os
from functools import cached_property
from importlib.metadata import version
from typing import Any

from benchmarks.peers.served import System, echoed, rate, run, timed


def nothing() -> None:
    pass


def echo(array: Any) -> Any:
    return array


class Scaler(System):
    package = "scaler"

    def version(self) -> str:
        return f"opengris-scaler {version('opengris-scaler')}"

    @cached_property
    def _client(self) -> Any:
        from scaler import Client, SchedulerClusterCombo

        combo = SchedulerClusterCombo(
            n_workers=2, logging_paths=(os.devnull,), logging_level="ERROR"
        )
        self.stack.callback(combo.shutdown)
        client = Client(address=combo.get_address())
        self.stack.callback(client.disconnect)
        return client

    def tasks(self, count: int) -> list[float]:
        client = self._client

        def work() -> None:
            for future in [client.submit(nothing) for _ in range(count)]:
                future.result()

        return rate(work, count)

    def roundtrip(self, count: int) -> list[float]:
        return timed(lambda: self._client.submit(nothing).result(), count)

    def bandwidth(self, count: int, size: int) -> list[float]:
        return echoed(lambda array: self._client.submit(echo, array).result(), size, count)

    def startup(self) -> list[float]:
        self._client.submit(nothing).result()
        return []


if __name__ == "__main__":
    run(Scaler)
