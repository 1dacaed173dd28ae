"""A cluster that runs already: `connect` finds its dispatcher, and `Cluster` is what programs do
with it.

`zmqdist.local_cluster` is a Cluster as well, one that starts and ends its processes itself.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from zmqdist import clock as time
from zmqdist import errors, limits
from zmqdist.background import in_background
from zmqdist.clock import duration
from zmqdist.field_types import check_options, checked, checks_options, safe_repr
from zmqdist.html_repr import HtmlRows, html_repr, in_notebook
from zmqdist.limits import CONNECT_S

if TYPE_CHECKING:
    from contextlib import ExitStack

    from typing_extensions import Unpack

    from zmqdist.cluster.config import ClusterConfig
    from zmqdist.observe.dashboard.server import Dashboard
    from zmqdist.rpc.client import ZmqClient
    from zmqdist.scheduling.coordinator.coordinator import ClusterCoordinator
    from zmqdist.scheduling.shared.option_types import CoordinatorOptions
    from zmqdist.transport.credentials import Credentials

C = TypeVar("C", bound="Cluster")

IS_NO_DISPATCHER: Final = "is no dispatcher"

LEAST_S: Final = 0.001
"""The shortest time-out, because one of 0 ms means none to a client."""

DECIDED_S: Final = 15.0
"""Seconds beyond its time-out that the launcher may take to decide about a size, because it asks
the programs what workers have for them.
"""

SCALE_S: Final = 60.0
"""Seconds that new workers have to register."""

LOOK_S: Final = 0.05
"""Seconds between two checks whether workers have registered or left."""


class Cluster:
    """A running cluster: its dispatcher and workers. `connect` makes one, and `local_cluster` is
    one.

        >>> import zmqdist as zd
        >>> with zd.local_cluster(workers=2, processes=False) as cluster:
        ...     with cluster.coordinator() as coordinator:
        ...         print(cluster.workers, coordinator.schedule(sum, ([1, 2],)).fetch())
        2 3

    ClusterCoordinator, Executor and, if the cluster has parameter servers, ParameterServerStrategy
    accept a Cluster as their target.

    Attributes:
      target: "zmq://host:port" of the dispatcher.
      credentials: the places of the secrets for the cluster, never the secrets.
      config: the ClusterConfig of a cluster that `zmqdist launch` runs; None without a cluster
        file.
      cancel_on_interrupt: whether an interrupted cell of a notebook cancels the functions and calls
        of actors that it has scheduled, by coordinators and Executors made with this object.
    """

    cancel_on_interrupt = False

    def __init__(
        self, target: str, credentials: Credentials, config: ClusterConfig | None = None
    ) -> None:
        """Refer to a cluster without connecting to it; `connect` also connects."""
        self._target = target
        self.credentials = credentials
        self.config = config
        self._client: DispatcherClient | None = None
        self._end_logs: Callable[[], object] = int
        self._disconnected = False
        self._dashboard: Dashboard | None = None
        self._client_lock = threading.Lock()

    @property
    def target(self) -> str:
        return self._target

    @property
    def workers(self) -> int:
        """The number of workers that the cluster is to have: what `scale` sets, lost workers
        included. Without a launcher that holds the workers, the number of registered ones.
        """
        record = self.status()
        return int(
            len(record["workers"]) if record["scaling"] is None else record["scaling"]["wanted"]
        )

    @property
    def dashboard_url(self) -> str | None:
        """A link that opens the dashboard of this cluster once: each use of this property makes a
        new one. None if this process serves no dashboard: see `zmqdist dashboard`."""
        return None if self._dashboard is None else self._dashboard.url

    def status(self) -> dict[str, Any]:
        """Return what `zmqdist status --json` prints: workers, queues, losses, data service.
        Durations are in seconds.

        >>> type(cluster.status()).__name__
        'dict'

        Raises UnavailableError if the dispatcher does not answer.
        """
        record: dict[str, Any] = self._dispatcher_client().call("facts")
        return record

    def scale(
        self,
        count: int,
        *,
        grace_s: float = limits.GRACE_S,
        force: bool = False,
        timeout: float = SCALE_S,
    ) -> None:
        """Set the number of workers, and wait until the new ones have registered and the others
        have left.

        >>> with zd.connect(cluster.target) as connection:
        ...     try:
        ...         connection.scale(3)
        ...     except zd.errors.FailedPreconditionError:
        ...         print("no zmqdist launch holds these workers")
        no zmqdist launch holds these workers

        Args:
          grace_s: how long the running functions of leaving workers may take.
          force: whether workers leave even if values or work are lost with them.
          timeout: seconds to wait for new workers; the wait for leaving ones is longer by
            `grace_s`.

        Raises:
          DrainRefusedError: values or work would be lost, and `force` is False. Nothing has
            changed.
          FailedPreconditionError: no launcher holds the workers, or `count` is out of the bounds of
            the cluster file.
          UnavailableError: a worker failed or was not in time; the text names it.
        """
        check_count("count", count)
        client, grace_s = self._dispatcher_client(), duration("grace_s", grace_s)
        # the launcher decides first, because it may refuse without any change
        decision = client.call(
            "scale", "worker", count, grace_s, force, timeout_s=CONNECT_S + DECIDED_S
        )
        if decision["refused"]:
            raise errors.DrainRefusedError(decision["reports"])
        if problem := client.wait_scaled(decision, duration("timeout", timeout), grace_s):
            raise errors.UnavailableError(problem)

    def coordinator(self, **options: Unpack[CoordinatorOptions]) -> ClusterCoordinator:
        """Return a new ClusterCoordinator of this cluster. `options` are those of
        ClusterCoordinator.

        >>> with cluster.coordinator() as coordinator:
        ...     print(coordinator.submit(pow, 2, 3).result())
        8
        """
        from zmqdist.scheduling.coordinator.coordinator import ClusterCoordinator

        check_options("coordinator()", options, (ClusterCoordinator.__init__,), ("target",))
        return ClusterCoordinator(self, **options)

    def close(self) -> None:
        """End the connection. The cluster goes on running, and so do coordinators and Executors
        that were made with this object. A later call of `status` or `scale` raises
        FailedPreconditionError.

        >>> with zd.DispatchServer() as dispatcher:
        ...     zd.connect(dispatcher.address).close()
        """
        with self._client_lock:
            client, self._client, self._disconnected = self._client, None, True
        self._end_logs()
        if client is not None:
            client.close()

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @safe_repr
    def __repr__(self) -> str:
        return f"at {self.target}{', closed' if self._disconnected else ''}"

    @html_repr
    def _repr_html_(self) -> HtmlRows:
        yield "dispatcher", self.target
        yield "state", "closed" if self._disconnected else None
        yield "dashboard", self.dashboard_url

    def _dispatcher_client(self, timeout_s: float = CONNECT_S) -> DispatcherClient:
        with self._client_lock:
            if self._disconnected:
                problem = f"the connection to the cluster at {self.target} has been closed"
                raise errors.FailedPreconditionError(problem)
            if self._client is None:
                address = self.target.removeprefix("zmq://")
                self._client = DispatcherClient(address, self.credentials, "submit", timeout_s)
            return self._client


@checks_options("connect()")
@checked
def connect(
    address_or_file: str | os.PathLike[str] | None = None,
    *,
    timeout: float = CONNECT_S,
    logs: bool | None = None,
    cancel_on_interrupt: bool = False,
) -> Cluster:
    """Connect to a cluster that runs already, and return it once its dispatcher has answered.

        >>> import zmqdist as zd
        >>> with zd.DispatchServer() as dispatcher, zd.connect(dispatcher.target) as cluster:
        ...     cluster.workers
        0

    Args:
      address_or_file: "host:port" or "zmq://host:port" of the dispatcher, or the cluster file
        (`.yaml` or `.yml`) that `zmqdist launch` runs on this host. None means the cluster that
        `zmqdist launch` has named in the environment. The secrets of an address are those of the
        environment, or of this program's own `local_cluster`.
      timeout: seconds to wait for the dispatcher, now and at each later call.
      logs: whether this program prints what functions print from now on, with the names of their
        workers. None means that it does in a notebook.
      cancel_on_interrupt: as the attribute of Cluster.

    Raises:
      ValueError: `address_or_file` has another form, or the environment names no cluster.
      ConfigError, NotFoundError: the file has a mistake, or no cluster of the file runs on this
        host.
      UnavailableError: no dispatcher answers within `timeout`.
      UnauthenticatedError, FailedPreconditionError: the dispatcher refuses the secret, the secret
        is missing, or another kind of server listens there.
    """
    from zmqdist.cluster.config import ClusterConfig
    from zmqdist.scheduling.coordinator.dispatcher_target import resolve, target_of

    timeout_s = max(duration("timeout", timeout), LEAST_S)
    name = None if address_or_file is None else os.fspath(address_or_file)
    config = ClusterConfig.from_environment() if name is None else None
    if name is not None and name.endswith((".yaml", ".yml")):
        config = running_cluster(name)
    location = (
        resolve(name)
        if config is None or config.runtime is None
        else target_of(config, config.runtime)
    )
    cluster = Cluster(f"zmq://{location.address}", location.credentials, config)
    cluster._dispatcher_client(timeout_s)
    cluster.cancel_on_interrupt = cancel_on_interrupt
    if in_notebook() if logs is None else logs:
        from zmqdist.launch.log_follower import LogFollower

        follower = LogFollower(client_of(location.address, location.credentials))
        cluster._end_logs = follower.close
        # a cluster that was dropped without `close`
        weakref.finalize(cluster, in_background, "zmqdist-logs-end", follower.close)
    return cluster


def running_cluster(file: str) -> ClusterConfig:
    """Return the config of the cluster that runs on this host under the `name` in a cluster
    file.
    """
    from zmqdist.cluster.config import ClusterConfig
    from zmqdist.launch.folders import folders_in_use

    name = ClusterConfig.load(file, runtime_allowed=True).name
    clusters: list[ClusterConfig] = []
    for folder in folders_in_use():
        with contextlib.suppress(errors.ConfigError):
            # the file is incomplete while its launcher starts or ends
            running = ClusterConfig.load(folder / "cluster.yaml", runtime_allowed=True)
            if running.name == name and running.runtime is not None:
                clusters.append(running)
    if not clusters:
        raise errors.NotFoundError(
            f"no cluster {name!r} of {file} runs on this host: start it with `zmqdist launch "
            f"{file}`"
        )
    if len(clusters) > 1:
        # a file may be launched twice: never guess which of its clusters is meant
        targets = ", or ".join(map(_target_and_options, clusters))
        raise errors.FailedPreconditionError(
            f"{len(clusters)} clusters {name!r} run on this host: name one by its address, with "
            f"the option for its secret: {targets}"
        )
    return clusters[0]


def _target_and_options(cluster: ClusterConfig) -> str:
    """Return the words of a command line that name a running cluster: its dispatcher's address, and
    the option for its token or keys."""
    runtime = cluster.runtime
    assert runtime is not None
    words = [runtime.dispatcher.removeprefix("zmq://")]
    words += [] if runtime.token_file is None else ["--token-file", runtime.token_file]
    words += [] if runtime.keys_dir is None else ["--keys", runtime.keys_dir]
    return shlex.join(words)


class DispatcherClient:
    """A connection to a dispatcher, for a with-statement.

    Args:
      role: the role whose key is used. "observe" may read the inside of the cluster (with the key
        of "client" if there is no other), "submit" may also drain workers and stop the dispatcher,
        and "admin" may also manage keys.
      timeout_s: time limit of each call, including the time to connect.

    Raises:
      UnavailableError: no server replies within `timeout_s`.
      UnauthenticatedError: the server refuses the token or key.
      FailedPreconditionError: the server is not a dispatcher, or the secret cannot be read.
    """

    def __init__(self, address: str, credentials: Credentials, role: str, timeout_s: float) -> None:
        from zmqdist.rpc.client import ZmqClient
        from zmqdist.transport.keys import NOT_OBSERVABLE

        self.address = address
        self._timeout_s = timeout_s
        try:
            security = credentials.client(address, role)
        except errors.FailedPreconditionError as error:
            try:  # a program that only calls methods may have only this key
                security = credentials.client(address, "client" if role == "observe" else role)
            except errors.FailedPreconditionError:
                raise error from None
        try:
            self._client: ZmqClient = ZmqClient(
                address, "zmqdist", True, round(timeout_s * 1000), security=security
            )
        except errors.DeadlineExceededError:
            raise self._silent() from None
        except errors.PermissionDeniedError as error:
            if NOT_OBSERVABLE not in error.message:
                raise
            raise _no_dispatcher(address) from None
        # another zmqdist server, such as a task of a cluster, accepts the connection as well
        if not hasattr(self._client, "facts_blocking"):
            self._client.close()
            raise _no_dispatcher(address)

    def call(self, method: str, *arguments: Any, timeout_s: float = 0.0) -> Any:
        """Call a method of the dispatcher and return its result. If `timeout_s` is 0, use the
        constructor's `timeout_s`. Raises OpError."""
        try:
            return getattr(self._client, f"{method}_blocking")(
                *arguments, timeout_in_ms=round(timeout_s * 1000)
            )
        except errors.DeadlineExceededError:
            raise self._silent() from None

    def wait_scaled(self, decision: dict[str, Any], wait_s: float, grace_s: float) -> str:
        """Wait until the workers that the launcher starts and ends by this decision have registered
        or left, and return "". If a worker fails or a time limit passes, return a sentence that
        names them.
        """
        starts, leaves = set(decision["starts"]), set(decision["leaves"])
        start_s = time.monotonic()
        while True:
            scaling = self.call("facts")["scaling"]
            failed = sorted(starts & set(scaling["failed"]))
            if failed:
                return f"{', '.join(failed)} failed; the launcher shows why"
            # Wait only for new workers that are still starting, because another command may
            # meanwhile have told a new worker to leave.
            waiting, staying = starts & set(scaling["starting"]), leaves & set(scaling["leaving"])
            passed_s = time.monotonic() - start_s
            if waiting and passed_s >= wait_s:
                return f"{', '.join(sorted(waiting))} did not register within {wait_s:g} s"
            if staying and passed_s >= wait_s + grace_s:
                return f"{', '.join(sorted(staying))} did not leave within {wait_s + grace_s:g} s"
            if not waiting and not staying:
                return ""
            time.sleep(LOOK_S)

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> DispatcherClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _silent(self) -> Exception:
        from zmqdist.transport.endpoint import split

        host, port = split(self.address.removeprefix("zmq://"))
        try:
            socket.getaddrinfo(host, port)
        except OSError as error:
            return errors.UnavailableError(
                f"{self.address}: the name {host!r} cannot be looked up ({error.strerror})"
            )
        return errors.UnavailableError(
            f"no dispatcher answered at {self.address} within {self._timeout_s:g} s: is it "
            f"running, and is this its address?",
        )


def _no_dispatcher(address: str) -> errors.FailedPreconditionError:
    return errors.FailedPreconditionError(
        f"the server at {address} {IS_NO_DISPATCHER}: use the address that `zmqdist dispatcher` "
        f"printed"
    )


def serve_dashboard(
    address: str, credentials: Credentials, say: Callable[[str], object], stack: ExitStack
) -> Dashboard:
    """Start a dashboard of the dispatcher at "host:port", which `stack` ends, and say its link."""
    from zmqdist.observe.dashboard.server import Dashboard

    client = DispatcherClient(address, credentials, "observe", CONNECT_S)
    dispatcher = stack.enter_context(client)
    return stack.enter_context(Dashboard(dispatcher.call, say=say))


def client_of(address: str, credentials: Credentials) -> Callable[[float], DispatcherClient]:
    """Return a function that makes a client with the role "observe", with this time-out."""
    return partial(DispatcherClient, address, credentials, "observe")


def check_count(name: str, count: int) -> None:
    if type(count) is not int or count < 0:
        raise errors.InvalidArgumentError(f"{name} is {count!r}, wants a number, 0 or more")
