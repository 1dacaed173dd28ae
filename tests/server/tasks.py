"""Clusters of servers in this process, which do things at the same time, for the tests of this folder."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.ports import free_addresses
from zmqdist.server.server import Server

PATIENCE_S = 60.0


def cluster(made: Callable[..., Server], count: int, **kwargs: Any) -> list[Server]:
    """So many servers of job "worker"."""
    spec = {"worker": free_addresses(count)}
    return [made(spec, "worker", index, **kwargs) for index in range(count)]


class Side:
    """Something that runs in a thread: its outcome."""

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(fn, *args), daemon=True)
        self._thread.start()

    def _run(self, fn: Callable[..., Any], *args: Any) -> None:
        try:
            self.value = fn(*args)
        except BaseException as error:
            self.error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> Side:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "it hangs"
        return self

    def get(self) -> Any:
        self.wait()
        if self.error is not None:
            raise self.error
        return self.value


def together(servers: list[Server], fn: Callable[[Server, int], Any]) -> list[Any]:
    """`fn(server, rank)` for all at once; the values, or the first error."""
    return [side.get() for side in [Side(fn, server, rank) for rank, server in enumerate(servers)]]


def errors(servers: list[Server], fn: Callable[[Server, int], Any]) -> list[BaseException | None]:
    """The same; the errors."""
    return [side.wait().error for side in [Side(fn, server, rank) for rank, server in enumerate(servers)]]
