"""Functions that make a program a task of a cluster: `connect_to_cluster`, `connect_to_host`,
`check_alive`.

A program is in one cluster at a time, so connecting again leaves the previous cluster. After
connecting, the program uses the Server that it gets, or a Session with that server.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from zmqdist.cluster.defs import ClusterDeviceFilters, ServerDef
from zmqdist.cluster.devices import Device
from zmqdist.cluster.spec import ClusterSpec
from zmqdist.errors import InvalidArgumentError
from zmqdist.tasks.server import Server

_lock = threading.Lock()
_connected: Server | None = None


def connect_to_cluster(
    cluster_spec_or_resolver: Any,
    job_name: str = "localhost",
    task_index: int = 0,
    protocol: str | None = None,
    cluster_device_filters: ClusterDeviceFilters | None = None,
    *,
    keys_dir: str | os.PathLike[str] | None = None,
    token_file: str | os.PathLike[str] | None = None,
) -> Server | None:
    """Make this program a task of a cluster, without waiting for any other task.

    >>> with zd.connect_to_cluster(zd.ClusterSpec({"worker": [task.address]})) as server:
    ...     server.check_alive("worker:0")
    True

    Args:
      cluster_spec_or_resolver: a ClusterSpec, or an object with `cluster_spec()` and `master()`,
        such as a cluster resolver.
      job_name, task_index: the task that this program is to be. If the cluster has no such task,
        this program becomes an extra task on a free loopback port: it can call the other tasks, but
        they do not know it.
      protocol, keys_dir, token_file: as for `Server`; by default `protocol` is the resolver's
        `rpc_layer`.
      cluster_device_filters: filters that decide which other tasks this task sees.

    Returns:
      The server of this task, which serves until it is stopped or the program connects again. None
      if a resolver's master is "" or "local", which means that there is no cluster. Then this
      function changes nothing.

    Raises:
      ValueError: the first argument is neither a ClusterSpec nor a resolver.
      Any error of `Server`: this program is then in no cluster.
    """
    spec, layer = _cluster(cluster_spec_or_resolver)
    if spec is None:
        return None
    jobs = {
        job: {index: spec.task_address(job, index) for index in spec.task_indices(job)}
        for job in spec.jobs
    }
    jobs.setdefault(job_name, {}).setdefault(task_index, "localhost:0")
    definition = ServerDef(
        ClusterSpec(jobs).as_cluster_def(),
        job_name,
        task_index,
        protocol=protocol or layer or "",
        cluster_device_filters=cluster_device_filters or ClusterDeviceFilters(),
    )
    with _lock:
        global _connected
        # leave the earlier cluster first, because the new server may want its port
        previous, _connected = _connected, None
        if previous is not None:
            previous.stop(0.0)
        _connected = Server(definition, keys_dir=keys_dir, token_file=token_file)
        return _connected


def disconnect() -> None:
    """Leave the cluster to which this program is connected, if any: stop this program's server at
    once, and abandon the calls that the server runs.
    """
    global _connected
    with _lock:
        previous, _connected = _connected, None
        if previous is not None:
            previous.stop(0.0)


def connect_to_host(
    remote_host: str | Sequence[str] | None,
    job_name: str = "worker",
    *,
    keys_dir: str | os.PathLike[str] | None = None,
    token_file: str | os.PathLike[str] | None = None,
) -> Server | None:
    """Connect to the server at one address, or to several servers that are the tasks of one job.

    >>> with zd.connect_to_host(task.address) as server:
    ...     server.check_alive("worker:0")
    True

    Args:
      remote_host: "host:port", or a list of addresses; a leading "zmq://" is accepted.
      job_name: the job whose tasks these servers are, numbered from 0.
      keys_dir, token_file: as for `Server`.

    The result and the errors are those of `connect_to_cluster`. Also raises ValueError if there is
    no address, or an address is malformed.
    """
    if not remote_host:
        raise ValueError("connect_to_host needs at least one address, as 127.0.0.1:5050")
    hosts = [remote_host] if isinstance(remote_host, str) else remote_host
    if not isinstance(hosts, Sequence) or not all(isinstance(host, str) for host in hosts):
        raise ValueError(f"connect_to_host takes an address or a list of them, not {remote_host!r}")
    spec = ClusterSpec({job_name: [host.removeprefix("zmq://") for host in hosts]})
    if problems := spec.validate():
        raise ValueError(f"connect_to_host: {problems[0]}")
    return connect_to_cluster(spec, keys_dir=keys_dir, token_file=token_file)


def check_alive(name: str) -> bool:
    """Return whether a task replies. The task must belong to the cluster to which this program is
    connected.

    >>> with zd.connect_to_host(task.address):
    ...     zd.check_alive("/job:worker/replica:0/task:0")
    True

    Args:
      name: the full name, "/job:NAME/replica:0/task:N".

    Raises:
      ValueError: this program is connected to no cluster.
      InvalidArgumentError: the cluster has no such task, or the name is not complete.
    """
    server = _connected
    if server is None or server.join(0.0):
        raise ValueError(
            "check_alive: this program is connected to no cluster (connect_to_cluster)"
        )
    try:
        device = Device.parse(name)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None
    if None in (device.job, device.replica, device.task):
        raise InvalidArgumentError(f"{name!r} is not complete: wanted /job:NAME/replica:0/task:N")
    return server.check_alive(name)


def _cluster(source: Any) -> tuple[ClusterSpec | None, str | None]:
    """Return the cluster that `source` describes, and its `rpc_layer`. Each is None if `source` has
    none."""
    if isinstance(source, ClusterSpec):
        return source, None
    if not (
        callable(getattr(source, "cluster_spec", None))
        and callable(getattr(source, "master", None))
    ):
        raise ValueError(
            f"connect_to_cluster takes a ClusterSpec or a cluster resolver, not {source!r}"
        )
    if source.master() in ("", "local"):
        return None, None
    return source.cluster_spec(), getattr(source, "rpc_layer", None)
