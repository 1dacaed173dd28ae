"""Monarch (torchmonarch): an actor in a process of this host, for calls."""

from __future__ import annotations

from functools import cached_property
from importlib.metadata import version
from typing import Any

from benchmarks.peers.served import System, echoed, rate, run, timed


class Monarch(System):
    package = "monarch"
    loads = ("monarch.actor",)

    def version(self) -> str:
        return version("torchmonarch")

    @cached_property
    def _actor(self) -> Any:
        from monarch.actor import Actor, endpoint, this_host

        class Echo(Actor):
            @endpoint
            def echo(self, value: Any) -> Any:
                return value

        processes = this_host().spawn_procs(per_host={"n": 1})
        self.stack.callback(lambda: processes.stop().get())
        return processes.spawn("echo", Echo)

    def latency(self, count: int) -> list[float]:
        call = self._actor.echo.call_one
        return timed(lambda: call(7).get(), count)

    def actors(self, count: int, window: int) -> list[float]:
        call = self._actor.echo.call_one

        def work() -> None:
            for first in range(0, count, window):
                for future in [call(7) for _ in range(min(window, count - first))]:
                    future.get()

        return rate(work, count)

    def bandwidth(self, count: int, size: int) -> list[float]:
        call = self._actor.echo.call_one
        return echoed(lambda array: call(array).get(), size, count)


if __name__ == "__main__":
    run(Monarch)
