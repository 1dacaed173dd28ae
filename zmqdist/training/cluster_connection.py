"""How a program finds the tasks of a cluster with parameter servers, and how it adds, removes and
stops them.

`connect` makes a `ClusterConnection` from one of three kinds of source. A ClusterSpec, or a
    resolver that returns a ClusterSpec: the workers and ps are servers that run already. `connect`
    starts a dispatcher
        in this process and invites the workers to register with the dispatcher
        (worker_recruiter.py). A worker that starts later or restarts is invited when its server
        appears.
    A `local_cluster` with ps: it has its own dispatcher and workers.
    None, or what `zmqdist.connect` returned for a cluster file: the cluster that `zmqdist launch`
        runs. A resolver that describes the cluster of the environment has the same effect as None.

Evaluators are not part of the connection, and the program does not wait for them. Each worker must
be able to reach all ps. No other connections between workers and ps are needed.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from zmqdist import clock as time
from zmqdist import errors
from zmqdist.addresses import is_loopback
from zmqdist.background import in_background
from zmqdist.clock import duration
from zmqdist.cluster.defs import ClusterDef
from zmqdist.cluster.environment import CONFIG_ENV
from zmqdist.cluster.spec import ClusterSpec
from zmqdist.coordination.replies import Task, task_name
from zmqdist.limits import CONNECT_TIMEOUT_S, DESCRIBED_S, GRACE_S, TASK_PROBE_S, WAIT_LOG_S
from zmqdist.rpc import ZmqClient, internal_client
from zmqdist.scheduling.shared.config import DispatcherConfig
from zmqdist.servers.dispatch_server import DispatchServer
from zmqdist.training.checks import check_cluster, check_ps
from zmqdist.training.worker_recruiter import WorkerRecruiter
from zmqdist.transport import port_probe
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.endpoint import split
from zmqdist.transport.own_address import own_host
from zmqdist.transport.port_probe import listening

log = logging.getLogger("zmqdist.training")

ACCEPTED: Final = (
    "a cluster resolver, a ClusterSpec or a dict of jobs with workers and ps, a "
    "local_cluster(ps=...), "
    "what connect returned for a cluster file with ps, "
    "or nothing in a program that `zmqdist launch` started"
)
"""The kinds of source that `connect` accepts, for error texts."""
PROBES_AT_ONCE: Final = 16
LEAVE_S: Final = 0.0
"""Grace of the dispatcher's shutdown, in seconds. It is 0, because no process receives the results
of running functions once the program ends."""

_open: weakref.WeakSet[ClusterConnection] = weakref.WeakSet()


class ClusterConnection:
    """The tasks of a cluster, for a strategy and its coordinator.

    Attributes:
      target: the dispatcher's address, in the form that ClusterCoordinator takes.
      credentials: the places where the secrets are.
      ps: addresses of the parameter servers, by index.
    """

    def __init__(
        self,
        target: str,
        credentials: Credentials,
        ps: list[str],
        close: Callable[[bool], object],
        workers: Iterable[int] = (),
    ) -> None:
        """Refer to a cluster whose dispatcher runs already. `_call_dispatcher` connects to the
        dispatcher at its first use.

        Args:
          close: a function that stops the dispatcher and the threads that were started for the
            connection. Its argument says whether to stop the tasks of the cluster as well.
          workers: the workers' indices, if the dispatcher knows them.
        """
        self.target = target
        self.credentials = credentials
        self.ps = list(ps)
        self._close = close
        self._closed = False
        self._lock = threading.Lock()
        self._client: ZmqClient | None = None
        self._pid = os.getpid()
        self._indices = dict.fromkeys(workers, "")
        _open.add(self)

    @property
    def workers(self) -> dict[int, str]:
        """The addresses of the program's workers by index, in ascending order. The address of a
        worker that registered without an invitation is "".
        """
        return dict(self._indices)

    # -- states ------------------------------------------------------------------------------------

    def task_states(self) -> list[errors.UnavailableError | None]:
        """Return the states of the workers by index, followed by the states of the ps. Blocks for
        up to TASK_PROBE_S if a task does not answer.

        Returns:
          For each task None if it is alive, otherwise an UnavailableError that names it.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="zmqdist-states") as pool:
            probe = pool.submit(
                listening, {("ps", index): address for index, address in enumerate(self.ps)}
            )
            states = self._worker_states()
            listeners = probe.result()
        for index, address in enumerate(self.ps):
            states.append(
                None
                if ("ps", index) in listeners
                else errors.UnavailableError(
                    f"{_task_name('ps', index)} at {address} does not answer"
                )
            )
        return states

    def _worker_states(self) -> list[errors.UnavailableError | None]:
        workers = self.workers
        try:
            status = self._call_dispatcher("facts")
        except errors.OpError as error:
            text = f"is in an unknown state, because the dispatcher at {self.target} does not answer: {error.message}"
            return [
                errors.UnavailableError(f"{_task_name('worker', index)} {text}")
                for index in workers
            ]
        rows = {row["name"]: row["state"] for row in status["workers"]}
        losses = {loss["name"]: loss["reason"] for loss in status["losses"]}
        states: list[errors.UnavailableError | None] = []
        for index in workers:
            name = f"worker:{index}"
            # a worker that is leaving still serves this program
            if rows.get(name, "") in ("alive", "leaving"):
                states.append(None)
                continue
            why = (
                "its connection has ended"
                if name in rows
                else losses.get(name, "it has not registered")
            )
            states.append(
                errors.UnavailableError(f"{_task_name('worker', index)} is not available: {why}")
            )
        return states

    def why_gone(self, ps: int) -> str:
        """Return why a parameter server does not start again, or "" if it may start, or if the
        dispatcher does not answer. Blocks up to TASK_PROBE_S.
        """
        with contextlib.suppress(errors.OpError):
            return str(self._call_dispatcher("gone").get(f"ps:{ps}", ""))
        return ""

    # -- members -----------------------------------------------------------------------------------

    def add_worker(self, address: str = "", index: int | None = None) -> int:
        """Add a task as a worker of this program. Does not wait for the task.

        Args:
          address: "host:port" of a `zmqdist.Server` that runs or will run.
          index: index of the new worker. The index of a removed or lost worker may be reused. None
            means the highest index so far + 1.

        Returns:
          The index.

        Raises:
          FailedPreconditionError: in this kind of cluster, workers join by themselves. The error
            text says how.
        """
        raise errors.FailedPreconditionError(
            f"a worker joins this cluster by itself: zmqdist worker --dispatcher "
            f"{self.target.removeprefix('zmq://')}"
        )

    def remove_worker(self, index: int, grace_s: float = GRACE_S, *, force: bool = False) -> None:
        """Remove a worker from the cluster. The worker has at most `grace_s` seconds to finish the
        function that it runs. Other workers run the functions that it has not begun.

        Args:
          force: whether to remove the worker even if values or work are lost.

        Raises:
          ValueError: there is no such worker.
          DrainRefusedError: values or work would be lost. The error has their names.
          UnavailableError: the dispatcher does not answer.
        """
        workers = self.workers
        if not force:
            reply = self._drain(index, grace_s, dry_run=True)
            if reply is not None and reply["refused"]:
                raise errors.DrainRefusedError(reply["reports"])
        if index in workers:
            # Dismiss the worker before it leaves, because a wanted worker that has left is invited
            # again.
            self._dismiss(index)
        if self._drain(index, grace_s, dry_run=False) is None and index not in workers:
            raise ValueError(f"there is no worker {index} in this cluster; it has {list(workers)}")

    def _drain(self, index: int, grace_s: float, *, dry_run: bool) -> dict[str, Any] | None:
        """Have the dispatcher drain a worker, even if work or values are lost, and return the
        dispatcher's reply. With `dry_run`, the dispatcher drains nothing, and reports whether it
        would refuse a drain that is not forced. Return None if the worker is not registered: it may
        have left by itself.
        """
        try:
            reply: dict[str, Any] = self._call_dispatcher(
                "drain",
                "worker",
                index,
                duration("grace_s", grace_s),
                not dry_run,
                dry_run,
                within_s=TASK_PROBE_S + DESCRIBED_S,
            )
        except errors.NotFoundError:
            return None
        return reply

    def _dismiss(self, index: int) -> None:
        """Remove a worker from `workers`. The worker itself is not contacted."""
        self._indices.pop(index, None)

    def close(self, shutdown_cluster: bool = False) -> None:
        """Release the cluster, so that another program can use the invited workers. A second call
        does nothing.

        Args:
          shutdown_cluster: stop the servers of workers and ps as well, wherever they run.
        """
        # the cluster belongs to the program that has forked this process
        if self._pid != os.getpid():
            # do nothing in a forked child, because the connection belongs to the parent
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            client = self._client
        _open.discard(self)
        try:
            if shutdown_cluster:
                stop_servers([*self.workers.values(), *self.ps], self.credentials)
            self._close(shutdown_cluster)
        finally:
            if client is not None:
                client.close()

    def _call_dispatcher(self, method: str, *args: Any, within_s: float = TASK_PROBE_S) -> Any:
        """Call a method of the dispatcher, and return its result. Blocks up to `within_s`."""
        with self._lock:
            if self._closed:
                raise errors.FailedPreconditionError("this cluster was closed")
            if self._client is None:
                address = self.target.removeprefix("zmq://")
                self._client = ZmqClient(
                    address, "strategy", security=self.credentials.client(address, "submit")
                )
            client = self._client
        return internal_client.start(
            client, method, *args, due=time.monotonic() + within_s
        ).get_value()

    def __del__(self) -> None:
        if not self.__dict__.get("_closed", True):
            self._closed = True
            in_background("zmqdist-let-go", _let_go, self._close, self._client)


class _RecruitedCluster(ClusterConnection):
    """The connection to servers that run already, with a dispatcher in this process."""

    def __init__(
        self,
        dispatcher: DispatchServer,
        credentials: Credentials,
        ps: list[str],
        recruiter: WorkerRecruiter,
    ) -> None:
        def close(_: bool) -> None:
            recruiter.close()
            dispatcher.shutdown(LEAVE_S)

        super().__init__(dispatcher.target, credentials, ps, close)
        self._recruiter = recruiter
        self._next = 0

    @property
    def workers(self) -> dict[int, str]:
        return self._recruiter.wanted

    def add_worker(self, address: str = "", index: int | None = None) -> int:
        address = address.removeprefix("zmq://")
        split(address)
        if index is not None and index < 0:
            raise ValueError(f"index is {index}, wants 0 or more")
        with self._lock:
            self._next = (
                max(self._next, *self.workers, -1) + 1 if index is None else max(self._next, index)
            )
            index = self._next if index is None else index
        self._recruiter.want(index, address)
        return index

    def _dismiss(self, index: int) -> None:
        self._recruiter.drop(index)


class _LocalCluster(ClusterConnection):
    """The connection to a `local_cluster`. `close` closes the local cluster only with
    `shutdown_cluster=True`."""

    def __init__(self, cluster: Any) -> None:
        super().__init__(
            cluster.target,
            cluster.credentials,
            cluster.ps,
            lambda shut_down: cluster.close() if shut_down else None,
        )
        self._cluster = cluster
        self._dismissed: set[int] = set()

    @property
    def workers(self) -> dict[int, str]:
        return {index: "" for index in range(self._cluster.workers) if index not in self._dismissed}

    def add_worker(self, address: str = "", index: int | None = None) -> int:
        """Start a worker, wait until it has registered, and return its index."""
        if address or index is not None:
            raise ValueError(
                "a local_cluster starts its workers itself: call add_worker() without an address "
                "and an index"
            )
        return int(self._cluster.add_worker())

    def _dismiss(self, index: int) -> None:
        self._dismissed.add(index)


def connect(
    source: Any = None,
    *,
    timeout: float = CONNECT_TIMEOUT_S,
    slots: int = 1,
    credentials: Credentials | None = None,
) -> ClusterConnection:
    """Find the tasks of a cluster, and wait until all workers and ps have answered.

    Args:
      source: where to find the tasks, of a kind that ACCEPTED lists.
      timeout: how long to wait, in seconds.
      slots: number of functions that an invited worker runs at a time, unless its server has a
        number of its own.
      credentials: where the secrets are, for a ClusterSpec or its resolver; None means the secrets
        of the environment. A `local_cluster` and the cluster of `zmqdist launch` have secrets of
        their own.

    Raises:
      ValueError: `source` is not of an accepted kind, or describes a cluster that cannot be used
        (checks.py).
      UnavailableError: tasks did not answer in time. The error text names them, and says what was
        found at their addresses.
      AlreadyExistsError: a worker works for another program.
      OpError: a secret is refused, keys are missing, a ps is another task, or the dispatcher's port
        cannot be bound.
    """
    limit_s = duration("timeout", timeout)
    is_target = isinstance(getattr(source, "target", None), str)
    if is_target and (config := _running(getattr(source, "config", None))) is not None:
        return _launched(limit_s, config)
    if is_target and hasattr(source, "ps"):
        if not source.ps:
            raise ValueError(
                "There must be at least one ps. This local_cluster has none: "
                "local_cluster(workers=2, ps=1)"
            )
        return _LocalCluster(source)
    from zmqdist.cluster.resolvers.base import check_rpc_layer

    check_rpc_layer(source)
    if source is None or _is_launched(source):
        return _launched(limit_s, _config())
    if hasattr(source, "cluster_spec") and not isinstance(source, ClusterSpec):
        spec, task_type, task_id = (
            ClusterSpec(source.cluster_spec()),
            source.task_type,
            source.task_id,
        )
    elif isinstance(source, ClusterSpec | ClusterDef | Mapping):
        spec, task_type, task_id = ClusterSpec(source), None, None
    else:
        raise ValueError(
            f"cluster_resolver: no cluster with parameter servers: {source!r}; wanted {ACCEPTED}"
        )
    check_cluster(spec, task_type, task_id)
    return _invited(spec, limit_s, slots, credentials or Credentials.from_environment())


def stop_servers(
    addresses: list[str], credentials: Credentials, grace_s: float = GRACE_S
) -> list[str]:
    """Stop the servers at `addresses`, all at the same time. Servers that do not answer, and empty
    addresses, are skipped.

    Returns:
      The addresses of the servers that have confirmed that they stop.
    """
    listeners = listening(
        {("", number): address for number, address in enumerate(addresses) if address}
    )
    calls = []
    due = time.monotonic() + grace_s
    for _, number in sorted(listeners):
        address = addresses[number]
        client = ZmqClient(
            address, "ends the cluster", security=credentials.client(address, "submit")
        )
        calls.append(
            (address, client, internal_client.start(client, "server.stop", grace_s, due=due))
        )
    confirmed = []
    for address, client, call in calls:
        code, text = call.get_error()
        client.close()
        if code:
            log.warning("the server at %s did not confirm that it stops: %s", address, text)
        else:
            confirmed.append(address)
    return confirmed


# -- servers that run already ----------------------------------------------------------------------


def _invited(
    spec: ClusterSpec, timeout_s: float, slots: int, credentials: Credentials
) -> ClusterConnection:
    workers = {index: spec.task_address("worker", index) for index in spec.task_indices("worker")}
    ps = [spec.task_address("ps", index) for index in spec.task_indices("ps")]
    for address in (*workers.values(), *ps):
        split(address)
    until = time.monotonic() + timeout_s
    dispatcher = _dispatcher(spec, [*workers.values(), *ps], credentials)
    recruiter = WorkerRecruiter(dispatcher, credentials, slots)
    connection = _RecruitedCluster(dispatcher, credentials, ps, recruiter)
    try:
        for index, address in workers.items():
            recruiter.want(index, address)
        _wait(connection, recruiter, until, timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection


def _dispatcher(
    spec: ClusterSpec, addresses: list[str], credentials: Credentials
) -> DispatchServer:
    """Start a dispatcher in this process. The dispatcher binds the chief's address if this address
    belongs to this host and is free. Otherwise it binds a free port at an address of this host that
    the tasks can reach.
    """
    endpoints = [(_host_for(addresses), 0)]
    if "chief" in spec.jobs and spec.num_tasks("chief"):
        host, port = split(spec.task_address("chief", spec.task_indices("chief")[0]))
        with contextlib.suppress(OSError):
            # leave out a name of the chief that this host cannot resolve
            number = port_probe.resolve_host(host, TASK_PROBE_S)
            if port_probe.is_local_address(number):
                endpoints.insert(0, (number, port))
    for endpoint in endpoints:
        config = DispatcherConfig(
            host=endpoint[0],
            port=endpoint[1],
            token_file=credentials.token_file,
            keys_dir=credentials.keys_dir,
            insecure=credentials.insecure,
        )
        try:
            return DispatchServer(config)
        except errors.UnknownError:
            # try the next endpoint if the port is in use, for example by the chief's Server
            if endpoint is endpoints[-1]:
                raise
    raise AssertionError("the last endpoint either serves or raises")


def _host_for(addresses: list[str]) -> str:
    """Return an address of this host that the tasks can reach. It is a loopback address only if all
    tasks are on this host."""
    best = "127.0.0.1"
    for address in addresses:
        try:
            host = own_host(address)
        except errors.UnavailableError:
            # Skip a task whose name cannot be resolved, because the wait for this task reports the
            # fault later.
            continue
        if not is_loopback(host):
            return host
        best = host
    return best


def _wait(
    connection: ClusterConnection, recruiter: WorkerRecruiter, until: float, timeout_s: float
) -> None:
    """Wait until all workers have registered and all ps have answered. At the time `until`, raise
    an error that names the missing tasks."""
    clients = {
        ("ps", index): ZmqClient(
            address, "strategy", security=connection.credentials.client(address, "submit")
        )
        for index, address in enumerate(connection.ps)
    }
    try:
        calls = {
            task: internal_client.start(client, "server.about", due=until)
            for task, client in clients.items()
        }
        for call in calls.values():
            # The callback does nothing, but has the client read the reply in its own thread while
            # this thread waits for the workers.
            call.add_done_callback(lambda _: None)
        while missing := recruiter.wait(min(until, time.monotonic() + WAIT_LOG_S)):
            names = ", ".join(f"worker:{index} at {recruiter.wanted[index]}" for index in missing)
            if time.monotonic() >= until:
                break
            log.warning("still waiting for workers to register: %s", names)
        absent: dict[Task, str] = {("worker", index): recruiter.wanted[index] for index in missing}
        for task, call in calls.items():
            code, text = call.get_error()
            if code in (errors.DEADLINE_EXCEEDED, errors.UNAVAILABLE):
                absent[task] = clients[task].address
            elif code:
                raise errors.from_code(
                    code, f"{task_name(task)} at {clients[task].address}: {text}"
                )
            elif call.get_value()["task"] != task_name(task):
                found_task = call.get_value()["task"]
                raise errors.InvalidArgumentError(
                    f"the server at {clients[task].address} is {found_task}, but the cluster has "
                    f"{task_name(task)} at this address"
                )
    finally:
        for client in clients.values():
            client.close()
    if absent:
        text = f"not all tasks of the cluster answered within {timeout_s:g} s: {'; '.join(_describe_absent(absent))}"
        raise errors.UnavailableError(text)


def _describe_absent(absent: dict[Task, str]) -> list[str]:
    """Probe the address of each absent task. Return a phrase for each task that says what the probe
    found at its address."""

    def look(task: Task) -> str:
        address = absent[task]
        probed = port_probe.probe(address, TASK_PROBE_S)
        why = "it accepts connections and does not answer"
        if probed.failure is not None:
            why = port_probe.explain_failure(address, probed, TASK_PROBE_S)[0]
        return f"{task_name(task)} at {address}: {why}"

    with ThreadPoolExecutor(PROBES_AT_ONCE, thread_name_prefix="zmqdist-look") as pool:
        return list(pool.map(look, absent))


# -- the cluster of the environment ----------------------------------------------------------------


def _config() -> Any:
    # import here, because the import of YAML takes 20 ms
    from zmqdist.cluster.config import ClusterConfig

    config = ClusterConfig.from_environment() if os.environ.get(CONFIG_ENV) else None
    return _running(config)


def _running(config: Any) -> Any:
    return None if getattr(config, "runtime", None) is None else config


def _is_launched(source: Any) -> bool:
    """Return whether `source` is a resolver of the cluster that `zmqdist launch` has described in
    the environment."""
    from zmqdist.cluster.resolvers.base import ClusterResolver

    if not isinstance(source, ClusterResolver):
        return False
    config = _config()
    return config is not None and source.cluster_spec() == config.task_spec


def _launched(timeout_s: float, config: Any) -> ClusterConnection:
    if config is None:
        raise ValueError(
            f"no cluster was passed, and {CONFIG_ENV} names no running cluster: wanted {ACCEPTED}"
        )
    runtime, jobs = config.runtime, config.jobs
    ps = {} if jobs.ps is None else jobs.ps.addresses()
    if not ps:
        raise ValueError(
            f"There must be at least one ps. Cluster {config.name!r} has none: write jobs.ps: "
            f"{{count: 1}}"
        )
    check_ps(sorted(ps))
    credentials = Credentials(runtime.token_file, runtime.keys_dir).vouched_by(runtime.dispatcher)
    workers = [] if jobs.worker is None else jobs.worker.indices()
    addresses = [ps[index] for index in sorted(ps)]
    connection = ClusterConnection(
        runtime.dispatcher, credentials, addresses, lambda _: None, workers
    )
    until = time.monotonic() + timeout_s
    pause = threading.Event()
    while troubles := [state for state in connection.task_states() if state is not None]:
        ends = [
            f"{_task_name('ps', index)}: {why}"
            for index in range(len(connection.ps))
            if (why := connection.why_gone(index))
        ]
        if ends or time.monotonic() >= until:
            connection.close()
            text = f"not all tasks of the cluster answered within {timeout_s:g} s: "
            raise errors.UnavailableError(
                "; ".join(ends) or text + "; ".join(state.message for state in troubles)
            )
        pause.wait(0.05)
    return connection


def _task_name(job: str, index: int) -> str:
    """Return TensorFlow's name of the task, without a device: "/job:ps/replica:0/task:1"."""
    return f"/job:{job}/replica:0/task:{index}"


def _let_go(close: Callable[[bool], object], client: ZmqClient | None) -> None:
    close(False)
    if client is not None:
        client.close()


@atexit.register
def _close_open() -> None:
    for connection in list(_open):
        connection.close()
