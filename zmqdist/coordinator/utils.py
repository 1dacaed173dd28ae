"""Small things around a coordinator's program, under TensorFlow's names: being a task of its cluster, and doing something at intervals."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zmqdist.resolvers import ClusterResolver

log = logging.getLogger("zmqdist.coordinator")


def start_server(cluster_resolver: ClusterResolver, protocol: str | None = None) -> None:
    """Be the worker or ps that a resolver says; returns when the server was stopped, from elsewhere (`shutdown_cluster`) or by a signal.

    Args:
      protocol: as for `zmqdist.Server`.

    Raises:
      ValueError: the task is neither a worker nor a ps.
      What `Server` raises.
    """
    from zmqdist.server.server import Server  # programs that coordinate do not need it

    job, index = cluster_resolver.task_type, cluster_resolver.task_id
    if job not in ("worker", "ps"):
        raise ValueError(f"Unexpected task_type to start a server: {job}; workers and ps have servers")
    with Server(cluster_resolver.cluster_spec(), job, index, protocol) as server:
        log.info("%s at %s", server.task, server.target)
        server.join()


class RepeatedTimer:
    """Calls a function every so often, in a thread, from `interval` seconds after it was made until it is stopped.

    A call that takes longer than the interval delays the next; what it raises is logged.
    """

    def __init__(
        self, interval: float, function: Callable[..., Any], *args: Any, name: str = "zmqdist-repeated"
    ) -> None:
        """Args:
        interval: seconds.
        args: of `function`.
        name: of the thread.
        """
        self._interval = interval
        self._call = function, args
        self._began = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Call it no more; one that runs is waited for. Returns the whole seconds since it was made."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        return int(time.monotonic() - self._began)

    def _run(self) -> None:
        function, args = self._call
        while not self._stopped.wait(self._interval):
            try:
                function(*args)
            except Exception:
                log.exception("%r, which is called every %g s, has failed", function, self._interval)
