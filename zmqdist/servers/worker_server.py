"""`WorkerServer`: a worker of a cluster for users, with slots for functions and data tasks."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from zmqdist import errors
from zmqdist.background import in_background
from zmqdist.clock import duration, seconds
from zmqdist.data.service.worker.runtime import DataWorker, TaskHost, WorkerDataSnapshot
from zmqdist.data.service.worker.task_process import TaskProcesses
from zmqdist.field_types import checked, checks_options, safe_repr
from zmqdist.process.zygote_client import ZygoteProcess
from zmqdist.scheduling.shared.config import WorkerConfig, config_of
from zmqdist.scheduling.shared.parts import WorkerSurroundings
from zmqdist.scheduling.worker.runtime import WorkerRuntime, WorkerSnapshot
from zmqdist.scheduling.worker.worker_events import Exit
from zmqdist.servers import children


class WorkerServer:
    """A worker in this process: it registers with a dispatcher and runs scheduled functions in its
    slots.

    >>> with zd.DispatchServer() as dispatcher:
    ...     with zd.WorkerServer(zd.data.service.WorkerConfig(dispatcher.address)):
    ...         with zd.ClusterCoordinator(dispatcher) as coordinator:
    ...             print(coordinator.submit(pow, 2, 3).result())
    8

    The slots are threads unless the config has `processes=True`, which the command `zmqdist worker`
    sets. The dispatcher may be started later, because `start` waits for the dispatcher, and logs
    that it waits.

    Stop the worker with `stop`, or use it in a with-statement. A worker to which the program no
    longer refers stops in the background and aborts its running functions.

    Args:
      config: a WorkerConfig. None means the config with `fields`.
      start: whether the constructor starts the worker. If False, call `start()` later.
      zygote: the process from which slot processes are forked. With None, the worker starts a
        zygote if it needs one.
      fields: fields of the config, as in TensorFlow 2.3: `WorkerServer(port=0,
        dispatcher_address="host:port")`.

    Raises (from `start`):
      UnauthenticatedError, PermissionDeniedError: the dispatcher refuses the token or key.
      AlreadyExistsError: another worker is registered under this job and index.
      FailedPreconditionError: the minor version of Python or zmqdist is not the dispatcher's, or
        the dispatcher's `worker_addresses` have no free entry for this worker.
      UnavailableError: no dispatcher accepted the worker within `orphan_limit_s`.
      UnknownError: the worker's own port could not be bound.
      ResourceExhaustedError: the slots need more descriptors than this process may have.
    """

    @checks_options("WorkerServer()", WorkerConfig.__init__)
    @checked
    def __init__(
        self,
        config: WorkerConfig | None = None,
        start: bool = True,
        *,
        zygote: ZygoteProcess | None = None,
        **fields: Any,
    ) -> None:
        config = config_of(WorkerConfig, config, fields)
        self._runtime = WorkerRuntime(
            config, zygote, children.MODULES, partial(_data_service, config)
        )
        self._lock = threading.Lock()
        if start:
            self.start()

    # -- for users ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the worker, and return once the dispatcher has registered it. If the worker is
        started already, only wait.

        >>> with zd.DispatchServer() as dispatcher:
        ...     with zd.WorkerServer(zd.data.service.WorkerConfig(dispatcher.address)) as worker:
        ...         worker.start()  # a second call does nothing

        Raises:
          FailedPreconditionError: the worker was stopped before. The docstring of the class lists
            the other errors.
        """
        runtime = self._runtime
        with self._lock:
            if runtime.stopped.is_set():
                raise errors.FailedPreconditionError(
                    "Server cannot be started after it has been stopped"
                )
            if not runtime.start_requested:
                runtime.start_requested = True
                runtime.open()
        # Wait without the lock, so that another thread can stop a worker that finds no dispatcher.
        runtime.wait_registered()

    def stop(self, grace_s: float = 0.0) -> None:
        """Leave the dispatcher and end the slots. Blocks until the worker has ended. Idempotent.

        >>> with zd.DispatchServer() as dispatcher:
        ...     zd.WorkerServer(zd.data.service.WorkerConfig(dispatcher.address)).stop()

        Functions that have not begun are returned to the dispatcher at once, for other workers.

        Args:
          grace_s: how long running functions may go on before they are aborted.
        """
        grace_s = duration("grace_s", grace_s)
        with self._lock:
            if not self._runtime.opened:
                self._runtime.stopped.set()  # `join` returns, although the worker never ran
                return
        self._runtime.stop(grace_s)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the worker has ended, for any reason. Return False if `timeout` seconds pass
        first; None waits without a limit.

        >>> with zd.DispatchServer() as dispatcher:
        ...     worker = zd.WorkerServer(zd.data.service.WorkerConfig(dispatcher.address))
        ...     worker.stop()
        ...     worker.join()
        True
        """
        return self._runtime.stopped.wait(seconds(timeout))

    @property
    def ended(self) -> Exit | None:
        """How the worker ended; None while it runs."""
        return self._runtime.exit

    @property
    def in_contact(self) -> bool:
        """Whether the worker is registered with a dispatcher and connected to it."""
        runtime = self._runtime
        return (
            runtime.opened and runtime.machine.contact.registered and not runtime.stopped.is_set()
        )

    @property
    def address(self) -> str:
        """ "host:port" of the worker's own server, with the port that was bound."""
        return self._runtime.address

    @property
    def advertised_address(self) -> str:
        """ "host:port" at which readers of the data service reach the worker: `worker_address` of
        the config, or `address`.

        If this is `address`, "localhost" replaces 127.0.0.1, as in tf.data service.
        """
        return self._runtime.advertised

    @property
    def _address(self) -> str:
        """The advertised address. The name `_address` is the one in tf.data service."""
        return self.advertised_address

    @property
    def target(self) -> str:
        return f"zmq://{self._runtime.address}"

    @property
    def name(self) -> str:
        """ "job:index", the name under which the dispatcher knows the worker."""
        machine = self._runtime.machine
        return f"{machine.job}:{machine.index}"

    @property
    def num_tasks(self) -> int:
        """The number of functions that run or wait in the worker, plus the number of its data tasks
        that have not ended."""
        return self._runtime.machine.running + self._num_tasks() if self._runtime.opened else 0

    def snapshot(self) -> WorkerSnapshot:
        """Return an immutable record of the worker's running and waiting work, and of the data that
        it holds. Waits for the loop.

        >>> with zd.DispatchServer() as dispatcher:
        ...     with zd.WorkerServer(zd.data.service.WorkerConfig(dispatcher.address)) as worker:
        ...         print(type(worker.snapshot()).__name__)
        WorkerSnapshot

        Raises:
          FailedPreconditionError: the worker was not started, or has stopped.
        """
        runtime = self._runtime
        if not runtime.opened:
            raise errors.FailedPreconditionError("this worker was not started: call start() first")
        return runtime.loop.run(runtime.snapshot)

    def _num_tasks(self) -> int:
        """Return how many data tasks have not ended. The name `_num_tasks` is the one in tf.data
        service."""
        return self._runtime.part.num_tasks if self._runtime.opened else 0

    def data_snapshot(self) -> WorkerDataSnapshot:
        """Return an immutable record of the worker's data tasks and of the streams of distributed
        snapshots that it writes.

        >>> with zd.DispatchServer() as dispatcher:
        ...     with zd.WorkerServer(zd.data.service.WorkerConfig(dispatcher.address)) as worker:
        ...         print(type(worker.data_snapshot()).__name__)
        WorkerDataSnapshot
        """
        return self._runtime.loop.run(self._runtime.part.snapshot)

    def _snapshot_task_progresses(self) -> list[Any]:
        """Return the streams of snapshots that the worker writes. The name of this method is the
        one in tf.data service."""
        return list(self.data_snapshot().streams)

    @safe_repr
    def __repr__(self) -> str:
        state = (
            ""
            if self.in_contact
            else ", stopped"
            if self._runtime.stopped.is_set()
            else ", without dispatcher"
        )
        return f"{self.name or 'without name'} at {self.address or 'no address'}{state}"

    def __enter__(self) -> WorkerServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __del__(self) -> None:
        runtime = self.__dict__.get("_runtime")
        if runtime is not None and runtime.needs_stop:
            in_background("zmqdist-worker-stop", runtime.stop, 0.0)


def _data_service(config: WorkerConfig, worker: WorkerSurroundings) -> DataWorker:
    """Make the data service of a worker."""
    timeout_s = config.dispatcher_timeout_s
    host: TaskHost
    if worker.children is not None:
        spawn = partial(worker.children.spawn, children.TASK)
        host = TaskProcesses(
            worker.loop, spawn, worker.host, worker.dispatcher, worker.incarnation, timeout_s
        )
    else:
        # imported here, because a worker with processes runs no pipeline itself
        from zmqdist.data.service.worker.task_threads import TaskThreads

        host = TaskThreads(
            worker.loop,
            worker.service,
            worker.dispatcher,
            worker.credentials,
            worker.incarnation,
            timeout_s,
        )
    data = DataWorker(
        worker.loop,
        worker.service,
        worker.calls,
        worker.dispatcher,
        worker.credentials,
        worker.incarnation,
        timeout_s,
        host,
        config.chunk_bytes_max,
    )
    data.host.cache_bytes = config.cache_bytes
    if worker.children is not None:
        data.snapshots.processes = partial(worker.children.spawn, children.STREAM)
    return data
