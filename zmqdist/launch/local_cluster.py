"""`local_cluster`: a cluster on this host for a with-statement. The dispatcher runs in this
process. Workers and parameter servers run in child processes, or in threads of this process.

The zygote, from which workers are forked, is started before this process imports the dispatcher.
Imports take most of the start-up time, and those of the zygote and of this process then run at the
same time on two cores.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from zmqdist import clock as time
from zmqdist import errors, limits
from zmqdist.addresses import join_address
from zmqdist.background import check_threads, in_background
from zmqdist.blas_threads import thread_variables
from zmqdist.clock import duration
from zmqdist.field_types import check_type, checked, checks_options, safe_repr
from zmqdist.files import fill_standard_streams
from zmqdist.html_repr import HtmlRows, html_repr
from zmqdist.launch.children import Child, Children, check_descriptors
from zmqdist.launch.connection import Cluster, check_count, client_of, serve_dashboard
from zmqdist.lazy_names import without_collection
from zmqdist.process import zygote_client
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig
from zmqdist.transport.credentials import Credentials, own_clusters

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from zmqdist.cluster.spec import ClusterSpec
    from zmqdist.launch.log_follower import LogFollower
    from zmqdist.launch.roles import TaskConfig
    from zmqdist.scheduling.shared.option_types import DispatcherOptions
    from zmqdist.servers.dispatch_server import DispatchServer
    from zmqdist.servers.worker_server import WorkerServer
    from zmqdist.tasks.server import Server

START_LIMIT_S = 30.0
STOP_GRACE_S = 2.0
POLL_S = 0.005


class local_cluster(Cluster):
    """A cluster on this host. `with zmqdist.local_cluster(workers=2) as cluster:` starts a
    dispatcher and workers, and waits until they are ready.

    >>> with zd.local_cluster(workers=2, processes=False) as cluster:
    ...     with cluster.coordinator() as coordinator:
    ...         print(coordinator.submit(pow, 2, 3).result())
    8

    Args:
      workers: number of workers.
      slots: number of functions that each worker runs at a time. If slots are processes, the cores
        of this host are divided among the slots of the workers that the constructor starts. In each
        slot NumPy's BLAS has as many threads as the slot has cores, unless OMP_NUM_THREADS or a
        similar variable is set.
      resources, memory_max_gb: what functions may use of each worker, and the bound on the memory
        of each slot, as in WorkerConfig.
      ps: number of parameter servers, for `zmqdist.ParameterServerStrategy`.
      processes: if True, workers and their slots are processes. They are not forked from this
        process, so that scripts and notebooks need no `__main__` guard. If False, they are threads
        of this process, which start faster. Use threads for examples and debugging.
      actors_max: the number of actors that each worker may have, if workers are processes.
      nested_slots_max: the number of extra slots of each worker, as in WorkerConfig.
      dashboard: if True, serve the dashboard on this host, and write its link to standard error.
        `dashboard_url` is a new link.
      logs: if True and workers are processes, this program prints what functions print, whole lines
        after the name of the worker (docs/watch.md). If False, the processes write to the standard
        output and error of this program themselves.
      cancel_on_interrupt: whether an interrupted cell of a notebook cancels the functions and calls
        of actors that it has scheduled (docs/notebooks.md).
      options: fields of DispatcherConfig, such as `attempts_max` or `lease_s`, except `token_file`,
        `keys_dir` and `insecure`.

    The cluster closes at the end of the with-statement, on `close`, when the program ends, or when
    the cluster is garbage-collected. A coordinator or strategy keeps the cluster alive if it was
    made with the cluster object, and does not if it was made with `target`. `close` also closes the
    coordinators that were made with the cluster object: their unfinished work is cancelled.

    The cluster has its own token, so that no other process of this user joins the cluster by
    accident. This program has the token; another one that is to connect to `target` reads it from
    the file that its ZMQDIST_TOKEN_FILE names.

    `status`, `scale` and `coordinator` are those of every cluster (zmqdist/launch/connection.py).

    Attributes:
      target: "zmq://host:port". ClusterCoordinator and Executor also accept the cluster object
        itself.
      credentials: the place of the cluster's token, `credentials.token_file`.
      dispatcher: the DispatchServer.
      workers: the number of workers that the cluster is to have, killed ones included. The indices
        of all workers are below this number.
      ps: the addresses of the parameter servers, by index. A restarted parameter server has the
        same address.
      spec: the ClusterSpec with the addresses of the dispatcher and the parameter servers.
      pids: pids of the running child processes by task name, such as "worker:0". If `processes` is
        False, only `add_worker` starts such processes.

    Raises:
      UnavailableError: a process ended before it was ready, and the text has its exit code; or it
        was not ready after 30 s.
      UnknownError: the port could not be bound.
      ResourceExhaustedError: the operating system gives this process too few descriptors, threads
        or bytes of disk.
      InvalidArgumentError: `workers` or `ps` is not a whole number of 0 or more, or `slots` or an
        option is invalid.
      TypeError: there is no option of this name.
      FailedPreconditionError: the cluster is used after `close`.
    """

    @checks_options(
        "local_cluster()", DispatcherConfig.__init__, but=("token_file", "keys_dir", "insecure")
    )
    @errors.naming_system_errors()
    def __init__(
        self,
        workers: int = 2,
        slots: int = 1,
        ps: int = 0,
        processes: bool = True,
        resources: Mapping[str, float | str] | None = None,
        memory_max_gb: float | None = None,
        actors_max: int = limits.WORKER_ACTORS_MAX,
        nested_slots_max: int = limits.NESTED_SLOTS_MAX,
        dashboard: bool = False,
        logs: bool = True,
        cancel_on_interrupt: bool = False,
        **options: Unpack[DispatcherOptions],
    ) -> None:
        check_count("workers", workers)
        check_count("ps", ps)
        check_type("slots", slots, int, "a whole number")
        check_type("processes", processes, bool, "True or False")
        check_type("dashboard", dashboard, bool, "True or False")
        check_type("logs", logs, bool, "True or False")
        check_type("cancel_on_interrupt", cancel_on_interrupt, bool, "True or False")
        self.cancel_on_interrupt = cancel_on_interrupt
        if dashboard:
            from zmqdist.observe.dashboard.server import check_installed

            check_installed()
        # The config is made before a process is started, because its constructor raises if an
        # option is wrong.
        config = DispatcherConfig(**options)
        self._worker_options: dict[str, Any] = {
            "slots": slots,
            "resources": resources,
            "memory_max_gb": memory_max_gb,
            "actors_max": actors_max,
            "echo": not logs,
            "nested_slots_max": nested_slots_max,
        }
        WorkerConfig("127.0.0.1:1", processes=processes, **self._worker_options)
        fill_standard_streams()
        check_descriptors("a local_cluster", workers + ps if processes else 0)
        check_threads()
        threads = thread_variables(None, workers * slots, os.environ)
        if processes and (workers or ps):
            zygote_client.prepare(
                "zmqdist.launch.roles",
                "-1",
                "WorkerConfig" if workers else "TaskConfig",
                environment={**os.environ, **threads},
            )
        with without_collection():  # imported here, while the zygote imports its own modules
            from zmqdist.launch.folders import RunFolder
            from zmqdist.launch.ports import Reserved, bound_socket
            from zmqdist.servers.dispatch_server import DispatchServer
            from zmqdist.transport import keys
            from zmqdist.transport.own_address import bindable
        config = dataclasses.replace(config, host=bindable(config.host))
        with contextlib.ExitStack() as undo:
            hint = "; port 0 takes a free one"
            self._listener = undo.enter_context(bound_socket(config.host, config.port, hint))
            self._listener.listen()
            self._address = join_address(config.host, self._listener.getsockname()[1])
            self._folder = RunFolder()
            undo.callback(self._folder.close)
            super().__init__(
                f"zmq://{self._address}", Credentials(token_file=str(self._folder.path / "token"))
            )
            keys.create(self._folder.path / "token")
            self._ports = [
                undo.enter_context(contextlib.closing(Reserved(config.host))) for _ in range(ps)
            ]
            undo.pop_all()
        self.ps = [port.address for port in self._ports]
        self._children: Children | None = None
        self._processes: dict[str, Child] = {}
        self._threads: list[WorkerServer | Server] = []
        self._workers = 0
        self._closed = threading.Lock()
        self._executors: weakref.WeakSet[Any] = weakref.WeakSet()
        """The open Executors of this cluster. `close` breaks them before it stops the workers."""
        self._coordinators: weakref.WeakSet[Any] = weakref.WeakSet()
        """The runtimes of coordinators of this cluster. `close` ends their work, which would wait
        for another dispatcher otherwise."""
        self._dispatcher: DispatchServer | None = None
        self._follower: LogFollower | None = None
        self._dashboard_end = contextlib.ExitStack()
        self._pid = os.getpid()
        own_clusters[self._address] = self.credentials
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)
        self._variables = {**self.credentials.variables(), **threads}
        try:
            config = dataclasses.replace(config, token_file=self.credentials.token_file)
            self._dispatcher = DispatchServer(config, listener=self._listener.detach())
            if dashboard:
                self._dashboard = serve_dashboard(
                    self._address, self.credentials, _write, self._dashboard_end
                )
            if processes and logs:
                from zmqdist.launch.log_follower import LogFollower

                self._follower = LogFollower(client_of(self._address, self.credentials), since=0)
            if processes:
                children = self._start_processes(workers, range(ps))
                with without_collection():  # the program soon needs it, and the workers start
                    import zmqdist.scheduling.coordinator.coordinator  # noqa: F401

                self._wait_for(children)
            else:
                self._start_threads(workers)
        except BaseException:
            self.close()
            raise

    def _start_threads(self, count: int) -> None:
        from zmqdist.servers.worker_server import WorkerServer

        self._threads += [WorkerServer(self._worker(index, False)) for index in range(count)]
        self._workers = count
        if self.ps:
            from zmqdist.tasks.server import Server

            secret = self.credentials.token_file
            self._threads += [
                Server({"ps": self.ps}, "ps", index, token_file=secret)
                for index in range(len(self.ps))
            ]

    @property
    def dispatcher(self) -> DispatchServer:
        assert self._dispatcher is not None
        return self._dispatcher

    @property
    def servers(self) -> tuple[WorkerServer | Server, ...]:
        """The workers and then the parameter servers that the constructor started as threads, in
        the order of their indices. Empty if `processes` is True.
        """
        return tuple(self._threads)

    @property
    def target(self) -> str:
        self._check_open()
        return self.dispatcher.target

    @property
    def workers(self) -> int:
        return self._workers

    @property
    def cancel_grace_s(self) -> float:
        """The `cancel_grace_s` of the dispatcher, which is the default of coordinators that get
        this cluster as their target."""
        return self.dispatcher.cancel_grace_s

    @property
    def spec(self) -> ClusterSpec:
        from zmqdist.cluster.spec import ClusterSpec

        return ClusterSpec(
            {"dispatcher": [self.dispatcher.address], **({"ps": self.ps} if self.ps else {})}
        )

    @property
    def pids(self) -> dict[str, int]:
        return {
            name: child.pid
            for name, child in list(self._processes.items())
            if not child.ended.is_set()
        }

    @checked
    def kill_worker(self, index: int) -> None:
        """Kill a worker's process with SIGKILL, to imitate a crash. Other workers run its work.

        >>> with zd.local_cluster(workers=2) as cluster:
        ...     cluster.kill_worker(1)  # its functions run again on the other worker

        Raises:
          ValueError: there is no such worker process.
        """
        self._kill("worker", index)

    @checked
    def kill_ps(self, index: int) -> None:
        """Kill a parameter server with SIGKILL, to imitate a crash. Its variables are lost, and its
        port stays reserved.

        >>> with zd.local_cluster(workers=1, ps=1) as cluster:
        ...     cluster.kill_ps(0)

        Raises:
          ValueError: there is no such process of a parameter server.
        """
        self._kill("ps", index)

    @checked
    def restart_worker(self, index: int) -> None:
        """Start a worker again under its index, after killing the old process if it runs. Return
        when the worker has registered.

        >>> with zd.local_cluster(workers=1) as cluster:
        ...     cluster.kill_worker(0)
        ...     cluster.restart_worker(0)

        Raises:
          ValueError: there is no such worker process.
          UnavailableError: the new process ended before it had registered, or had not registered
            after 30 s.
        """
        self._kill("worker", index)
        # Wait until the dispatcher has dropped the old worker. `_wait_for` would take it for the
        # new worker, which has the same name.
        self.dispatcher.wait_for(lambda present: ("worker", index) not in present, START_LIMIT_S)
        self._wait_for([self._start(self._worker(index, True))])

    @checked
    def restart_ps(self, index: int) -> None:
        """Start a parameter server again at its address, after killing the old process if it runs.
        Its variables are lost. Return when the parameter server serves.

        >>> with zd.local_cluster(workers=1, ps=1) as cluster:
        ...     cluster.kill_ps(0)
        ...     cluster.restart_ps(0)

        Raises:
          ValueError: there is no such process of a parameter server.
          UnavailableError: the new process ended before it served, or did not serve after 30 s.
        """
        self._kill("ps", index)
        self._wait_for([self._start(self._ps(index))])

    @safe_repr
    def __repr__(self) -> str:
        if self._closed.locked():
            return "closed"
        return f"at {self.target}, workers={self._workers}, ps={len(self.ps)}"

    @html_repr
    def _repr_html_(self) -> HtmlRows:
        if self._closed.locked():
            return [("state", "closed")]
        return [
            ("dispatcher", self.target),
            ("workers", self._workers),
            ("parameter servers", len(self.ps) or None),
            ("dashboard", self.dashboard_url),
        ]

    def _check_open(self) -> None:
        if self._closed.locked():
            raise errors.FailedPreconditionError("this local_cluster has been closed")

    def _check_own(self) -> None:
        self._check_open()
        if os.getpid() != self._pid:
            raise errors.FailedPreconditionError(
                "this local_cluster was started before a fork: only the process that "
                "started it changes it"
            )

    def _kill(self, job: str, index: int) -> None:
        self._check_own()
        child = self._processes.get(f"{job}:{index}")
        if child is None:
            count = sum(name.startswith(f"{job}:") for name in self._processes)
            raise ValueError(
                f"this cluster has no process {job}:{index}; the number of its {job} processes is "
                f"{count}"
            )
        child.signal(signal.SIGKILL)
        child.ended.wait(5.0)

    def add_worker(self) -> int:
        """Start one more worker process, wait until the worker has registered, and return its
        index.

        >>> with zd.local_cluster(workers=1, processes=False) as cluster:
        ...     _ = cluster.add_worker()
        ...     print(cluster.workers)
        2

        Raises UnavailableError as `restart_worker` does, and FailedPreconditionError after `close`.
        """
        self._check_own()
        self._wait_for(self._start_processes(1))
        return self._workers - 1

    def scale(
        self,
        count: int,
        *,
        grace_s: float = limits.GRACE_S,
        force: bool = False,
        timeout: float = START_LIMIT_S,
    ) -> None:
        """Set the number of workers, and wait until the new ones have registered and the others,
        with the highest indices, have left.

        >>> with zd.local_cluster(workers=1, processes=False) as cluster:
        ...     cluster.scale(2)
        ...     print(cluster.workers)
        2

        Raises:
          InvalidArgumentError: `count` is not a whole number of 0 or more.
          DrainRefusedError: values or work would be lost with the workers that would leave, and
            `force` is False. Nothing has changed.
          UnavailableError: a new worker ended or was not in time, or a worker has not left within
            `grace_s` and `timeout`.
        """
        self._check_own()
        check_count("count", count)
        check_type("force", force, bool, "True or False")
        grace_s = duration("grace_s", grace_s)
        leaving = {f"worker:{index}": index for index in range(count, self._workers)}
        reports = [report for report in self.dispatcher.drain_reports() if report.worker in leaving]
        if not force and any(report.losses for report in reports):
            raise errors.DrainRefusedError([report.to_dict() for report in reports])
        # Lower the number first: a leaving worker is not one that the cluster is to have.
        self._workers = min(self._workers, count)
        for report in reports:
            with contextlib.suppress(errors.NotFoundError):  # the worker was lost meanwhile
                self.dispatcher.drain("worker", leaving[report.worker], grace_s)
        within_s = grace_s + duration("timeout", timeout)
        if not self.dispatcher.wait_for(
            lambda present: present.isdisjoint(("worker", index) for index in leaving.values()),
            within_s,
        ):
            raise errors.UnavailableError(
                f"not all of {', '.join(leaving)} have left after {within_s:g} s"
            )
        for name in leaving.keys() & self._processes.keys():
            self._processes.pop(name).ended.wait(within_s)
        if count > self._workers:
            self._wait_for(self._start_processes(count - self._workers))

    def close(self) -> None:
        """Stop the workers, the parameter servers and the dispatcher. A second call does nothing,
        nor does a call in a forked child of the program.

        >>> zd.local_cluster(workers=1, processes=False).close()
        """
        if os.getpid() != self._pid or not self._closed.acquire(blocking=False):
            return
        atexit.unregister(self._at_exit)
        self._dashboard = None  # no link to it is of use any more
        # The stack runs the steps in reverse order, so the last step below is the first. If Ctrl-C
        # interrupts a step, the others still run.
        with contextlib.ExitStack() as steps:
            steps.callback(self._folder.close)
            steps.callback(own_clusters.pop, self._address, None)
            steps.callback(self._listener.close)
            for port in self._ports:
                steps.callback(port.close)
            if self._dispatcher is not None:
                steps.callback(self._dispatcher.stop)
            if self._follower is not None:
                steps.callback(self._follower.finish)
            if self._children is not None:
                steps.callback(self._children.close, STOP_GRACE_S)
            for server in self._threads:
                steps.callback(server.stop, 0.0)
            steps.callback(self._dashboard_end.close)
            steps.callback(super().close)
            for runtime in list(self._coordinators):
                steps.callback(runtime.give_up)
            for executor in list(self._executors):
                from zmqdist.scheduling.coordinator.executor import cluster_closed

                steps.callback(cluster_closed, executor)

    def __del__(self) -> None:
        """Close a cluster that is no longer referenced, for example because a cell of a notebook
        was run again. A new thread closes it, because a finalizer must not block.
        """
        if "_at_exit" in self.__dict__ and os.getpid() == self._pid and not self._closed.locked():
            in_background("zmqdist-local-cluster-close", self.close)

    def _worker(self, index: int, processes: bool) -> WorkerConfig:
        return WorkerConfig(
            self._address,
            index=index,
            processes=processes,
            orphan_limit_s=limits.ORPHAN_LIMIT_S,
            token_file=self.credentials.token_file,
            **self._worker_options,
        )

    def _ps(self, index: int) -> TaskConfig:
        from zmqdist.launch.roles import TaskConfig

        return TaskConfig(
            {"ps": dict(enumerate(self.ps))}, "ps", index, token_file=self.credentials.token_file
        )

    def _start_processes(self, workers: int, ps: Iterable[int] = ()) -> list[Child]:
        """Start `workers` more workers, and the parameter servers with the indices `ps`. Return the
        processes."""
        first, self._workers = self._workers, self._workers + workers
        configs: list[WorkerConfig | TaskConfig] = [
            self._worker(index, True) for index in range(first, self._workers)
        ]
        return [self._start(config) for config in [*configs, *map(self._ps, ps)]]

    def _start(self, config: WorkerConfig | TaskConfig) -> Child:
        if self._children is None:
            # `Children` gets only a weak reference, so that its thread does not keep the cluster
            # alive.
            self._children = Children(functools.partial(_exited, weakref.ref(self)))
        child = self._children.start_role(config, self._variables)
        self._processes[child.name] = child
        return child

    def _wait_for(self, children: list[Child]) -> None:
        """Wait until the started workers have registered and the started parameter servers serve.
        Raise UnavailableError if one of the processes ends first, or if this takes longer than
        START_LIMIT_S.
        """
        until = time.monotonic() + START_LIMIT_S
        tasks = [
            (job, int(index)) for job, _, index in (child.name.partition(":") for child in children)
        ]
        workers = {task for task in tasks if task[0] == "worker"}
        servers = {task: self.ps[task[1]] for task in tasks if task[0] == "ps"}
        if not self.dispatcher.wait_for(
            lambda present: workers <= present or any(child.ended.is_set() for child in children),
            START_LIMIT_S,
        ):
            raise errors.UnavailableError(
                f"not all workers had registered after {START_LIMIT_S:g} s; see standard error"
            )
        while servers and not any(child.ended.is_set() for child in children):
            from zmqdist.transport.port_probe import listening

            for task in listening(servers):
                del servers[task]
            if servers and time.monotonic() > until:
                raise errors.UnavailableError(
                    f"not all ps served after {START_LIMIT_S:g} s; see standard error"
                )
            children[0].ended.wait(POLL_S)
        for child in children:
            if child.ended.is_set():
                how = errors.describe_exit(child.exit_code or 0)
                ready = "had registered" if child.name.startswith("worker:") else "served"
                raise errors.UnavailableError(
                    f"{child.name} ended before it {ready} ({how}); its reason is on standard error"
                )


def _exited(reference: weakref.ref[local_cluster], child: Child) -> None:
    cluster = reference()
    job, _, index = child.name.partition(":")
    if cluster is not None and cluster._dispatcher is not None and job == "worker":
        from zmqdist.servers.dispatch_server import report_exit

        report_exit(cluster._dispatcher, job, int(index), child.pid, child.exit_code, child.tail)


def _write(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error was closed
        print(line, file=sys.stderr, flush=True)


def _close_at_exit(reference: weakref.ref[local_cluster]) -> None:
    if (cluster := reference()) is not None:
        cluster.close()
