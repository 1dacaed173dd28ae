"""zmqdist itself: an RPC server in a process of its own, and a cluster of two worker processes.

Variants: `threads`: the RPC handlers run in threads instead of inline. `sockets`: the same as without a word; whoever starts it sets
ZMQDIST_ARENA=off, so that arrays go through sockets between processes of one host, too.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from benchmarks.peers.served import System, echoed, queued_bytes, rate, run, timed, waited

ANSWER_MS = 60_000
QUESTIONS_OF = {"threads": {"latency", "calls"}, "sockets": {"bandwidth", "fanout"}}


def nothing() -> None:
    pass


def touch(array: Any) -> int:
    return int(array[-1])


class Zmqdist(System):
    package = "zmqdist"
    loads = ("zmqdist.launch.local_cluster", "zmqdist.coordinator", "zmqdist.rpc")

    def answers(self) -> list[str]:
        own = super().answers()
        return [name for name in own if name in QUESTIONS_OF.get(self.variant, own)]

    # -- calls ----------------------------------------------------------------------------------------------------

    @cached_property
    def _client(self) -> Any:
        from zmqdist.observe.peer import peer_process
        from zmqdist.rpc import Client

        peer = self.stack.enter_context(peer_process())
        return self.stack.enter_context(Client.create("zmq", peer, "benchmarks", ANSWER_MS))

    def latency(self, count: int) -> list[float]:
        blocking = self._client.echo_pool_blocking if self.variant == "threads" else self._client.echo_blocking
        return timed(lambda: blocking(7), count)

    def calls(self, count: int, window: int) -> list[float]:
        start = self._client.echo_pool if self.variant == "threads" else self._client.echo

        def work() -> None:
            for first in range(0, count, window):
                for result in [start(7) for _ in range(min(window, count - first))]:
                    result.get_value()

        return rate(work, count)

    def bandwidth(self, count: int, size: int) -> list[float]:
        return echoed(self._client.echo_blocking, size, count)

    # -- tasks ----------------------------------------------------------------------------------------------------

    @cached_property
    def _coordinator(self) -> Any:
        from zmqdist import local_cluster
        from zmqdist.coordinator import ClusterCoordinator

        return self.stack.enter_context(ClusterCoordinator(self.stack.enter_context(local_cluster(workers=2))))

    def _all(self, count: int) -> list[Any]:
        schedule = self._coordinator.schedule
        return [schedule(nothing) for _ in range(count)]

    def tasks(self, count: int) -> list[float]:
        return rate(lambda: [value.fetch() for value in self._all(count)], count)

    def roundtrip(self, count: int) -> list[float]:
        return timed(lambda: self._coordinator.schedule(nothing).fetch(), count)

    def fanout(self, count: int, size: int) -> list[float]:
        import numpy as np

        from zmqdist import freeze

        array = np.ones(size, np.uint8)
        return rate(lambda: self._coordinator.fetch(self._coordinator.map(touch, [freeze(array)] * count)), count)

    def memory(self, count: int) -> list[float]:
        return queued_bytes(self._all, lambda path: self._coordinator.map(waited, [path] * 2), count)

    def startup(self) -> list[float]:
        self._coordinator.schedule(nothing).fetch()
        return []


if __name__ == "__main__":
    run(Zmqdist)
