"""Clusters of servers in this process, which do things at the same time, for the tests of this
folder."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.coordination.helpers import until
from tests.ports import free_addresses
from zmqdist.tasks import ring_schedules
from zmqdist.tasks.server import Server

Child = Callable[..., "subprocess.Popen[str]"]

PATIENCE_S = 60.0

LARGE = 300_000
"""Numbers of 8 bytes: too many to ride along with the announcement of a collective."""


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
    return [
        side.wait().error
        for side in [Side(fn, server, rank) for rank, server in enumerate(servers)]
    ]


def same(got: list[Any], wanted: Any) -> None:
    """Everybody has this."""
    for each in got:
        assert np.asarray(each).dtype == np.asarray(wanted).dtype
        np.testing.assert_array_equal(each, wanted)
        assert np.asarray(each).tobytes() == np.asarray(got[0]).tobytes()


def works(servers: list[Server], **kwargs: Any) -> None:
    """The group still does what it should."""
    same(
        together(servers, lambda server, rank: server.all_reduce(np.array([1]), **kwargs)),
        np.array([len(servers)]),
    )


def state_of(server: Server, other: str) -> str | None:
    """Whether another task is up or gone, as `server` sees it; None before `server` has begun to
    watch it."""
    watched = server.snapshot().watched.get(other)
    return None if watched is None else watched.state


def until_announced(leader: Server, count: int = 1) -> None:
    """So many have come to the open round of a group of this leader."""
    until(lambda: any(len(row.arrived) == count for row in leader.snapshot().groups))


class Silent:
    """One member of a large collective has come, and sends nothing until it is let go.

    Attributes:
      begun: it has come.
      go: set, it goes on; with `error` it fails instead.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        kind: str,
        rank: int,
        error: BaseException | None = None,
    ) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        real = getattr(ring_schedules, kind)

        def held(own: int, *args: Any) -> Iterator[Any]:
            schedules = real(own, *args)
            if own == rank:
                self.begun.set()
                assert self.go.wait(50)
                if error is not None:
                    raise error
            return schedules  # type: ignore[no-any-return]

        monkeypatch.setattr(ring_schedules, kind, held)


SERVE = """
import sys, json, zmqdist
cluster, job, index = json.loads(sys.argv[1])
with zmqdist.Server(cluster, job, index) as server:
    print(server.target, flush=True)
    server.join()
print("ended", flush=True)
"""


def cluster_of(**jobs: int) -> dict[str, list[str]]:
    addresses = free_addresses(sum(jobs.values()))
    return {job: [addresses.pop() for _ in range(count)] for job, count in jobs.items()}


def start_child(
    child: Child, cluster: dict[str, list[str]], job: str, index: int
) -> subprocess.Popen[str]:
    process = child(SERVE, json.dumps([cluster, job, index]))
    assert process.stdout is not None
    assert process.stdout.readline().startswith("zmq://")
    return process
