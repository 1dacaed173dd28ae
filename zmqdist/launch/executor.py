"""`zmqdist.Executor`: an executor on a cluster, which it starts itself where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from zmqdist.blas_threads import cores
from zmqdist.cluster.config import ClusterConfig
from zmqdist.field_types import checked, checks_options
from zmqdist.platforms import check_linux
from zmqdist.scheduling.coordinator.coordinator import ClusterCoordinator
from zmqdist.scheduling.coordinator.executor import ClusterExecutor
from zmqdist.scheduling.shared import own_cluster

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from zmqdist.launch.local_cluster import local_cluster
    from zmqdist.scheduling.shared.option_types import CoordinatorOptions


class Executor(ClusterExecutor):
    """Runs submitted functions on the workers of a cluster, as ProcessPoolExecutor runs them in its
    processes.

        >>> import zmqdist as zd
        >>> with zd.Executor(max_workers=2) as executor:
        ...     print(executor.submit(pow, 2, 5).result(), list(executor.map(abs, [-1, -2])))
        32 [1, 2]

    Without `target` it uses, in a scheduled function, the cluster that runs the function, and in a
    program the cluster that `zmqdist launch` has named in the environment. If there is none, it
    starts a `local_cluster` with one worker process for each core that this process may use (or
    with `max_workers`), and ends it with `shutdown`, at the end of the program, or when the program
    is killed. No `__main__` guard is needed.

    Args:
      target, and other keyword arguments: the arguments of ClusterCoordinator.
      max_workers: the largest number of functions that the executor hands to the cluster at a time.
        None means no bound, so that the workers' slots are the limit.
      initializer, initargs: each slot process (if slots are threads, each worker) that runs
        functions of this executor calls `initializer(*initargs)` before its first function. With an
        initializer, the first `submit` waits for a worker. If the initializer raises, the executor
        is broken.

    Before the program ends, it waits for submitted functions, even after `shutdown(wait=False)`,
    `sys.exit` or an uncaught error, but not after Ctrl-C. If the cluster is lost at that time, the
    program ends after `cluster_lost_limit_s` with exit code 1.

    Raises:
      ValueError: `max_workers` is below 1, or the constructor of ClusterCoordinator raises it.
      TypeError: `initializer` is not callable.
      UnavailableError, ResourceExhaustedError: the `local_cluster` could not be started.
    """

    @checks_options("Executor()", ClusterCoordinator.__init__)
    @checked
    def __init__(
        self,
        target: Any = None,
        *,
        max_workers: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        **options: Unpack[CoordinatorOptions],
    ) -> None:
        self._own: local_cluster | None = None
        if target is None and (max_workers is None or max_workers > 0):
            target = self._own = _cluster_if_none(max_workers)
        try:
            super().__init__(
                target,
                max_workers=max_workers,
                initializer=initializer,
                initargs=initargs,
                **options,
            )
        except BaseException:
            self._end_cluster()
            raise

    def kill_workers(self) -> None:
        super().kill_workers()
        self._end_cluster()

    def _close_when_idle(self) -> None:
        super()._close_when_idle()
        self._end_cluster()

    def _end_cluster(self) -> None:
        if self._own is not None:
            self._own.close()


def _cluster_if_none(max_workers: int | None) -> local_cluster | None:
    """Start a cluster on this host, unless the environment names one or this is a scheduled
    function.
    """
    config = ClusterConfig.from_environment()
    named = config is not None and config.runtime is not None
    if named or own_cluster.present() is not None:
        return None
    check_linux("an Executor without a target", "name the cluster's dispatcher as the target")
    from zmqdist.launch.local_cluster import local_cluster

    return local_cluster(workers=max_workers or cores())
