"""ClusterDef, JobDef, ServerDef, ClusterDeviceFilters: TensorFlow's protocol buffers of these
names, as plain dataclasses.

The objects are mutable, as in TensorFlow, and `==` compares their contents. They serialize to JSON
with sorted keys, so that equal contents give equal bytes, and any tool can read the bytes. These
classes check only types. `ClusterSpec` checks names and indices.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import msgspec

from zmqdist.addresses import join_address
from zmqdist.errors import InvalidArgumentError
from zmqdist.field_types import check_fields

_D = TypeVar("_D", bound="_Def")


class _Def:
    """The base class of the dataclasses below, with methods that copy an object and convert it to
    and from dicts and bytes."""

    def __post_init__(self) -> None:
        """Raises ArgumentTypeError if a field has a wrong type."""
        check_fields(self)

    def copy(self: _D) -> _D:
        """Return a deep copy.

        >>> job = zd.tf.JobDef(name="worker", tasks={0: "host1:5000"})
        >>> job.copy() == job
        True
        """
        return copy.deepcopy(self)

    def to_dict(self) -> dict[str, Any]:
        """Return a new dict that JSON and YAML can represent. The indices of tasks are text in this
        dict.

        >>> zd.tf.JobDef(name="worker").to_dict()["name"]
        'worker'
        """
        built: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return built

    @classmethod
    def from_dict(cls: type[_D], data: Mapping[str, Any]) -> _D:
        """Return the object that a dict describes, in the form of `to_dict`. Absent keys get their
        defaults. The object shares no list or dict with `data`.

        >>> zd.tf.JobDef.from_dict({"name": "worker"}).name
        'worker'

        Raises:
          ValueError: a key is unknown, or a value has a wrong type. The text names the place.
        """
        try:
            parsed = msgspec.convert(copy.deepcopy(data), cls, str_keys=True)
        except msgspec.ValidationError as error:
            raise ValueError(f"not a {cls.__name__}: {error}") from None
        _refuse_surplus(data, parsed.to_dict(), cls.__name__)
        return parsed

    def SerializeToString(self) -> bytes:
        """Return the object as JSON in UTF-8. Objects with equal contents give equal bytes.

        >>> job = zd.tf.JobDef(name="worker")
        >>> other = zd.tf.JobDef()
        >>> _ = other.ParseFromString(job.SerializeToString())
        >>> other.name
        'worker'
        """
        return msgspec.json.encode(self.to_dict(), order="deterministic")

    def ParseFromString(self, serialized: bytes) -> int:
        """Replace the contents of this object by those in `serialized`, which `SerializeToString`
        has returned.

        >>> job = zd.tf.JobDef()
        >>> _ = job.ParseFromString(zd.tf.JobDef(name="ps").SerializeToString())
        >>> job.name
        'ps'

        Returns:
          The number of bytes of `serialized`, as the method of protocol buffers does.

        Raises:
          ValueError: `serialized` does not describe an object of this class. This object is then
            unchanged.
        """
        try:
            parsed = type(self).from_dict(msgspec.json.decode(serialized))
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"not a {type(self).__name__}: {error}") from None
        for member in fields(parsed):  # type: ignore[arg-type]
            setattr(self, member.name, getattr(parsed, member.name))
        return len(serialized)


def _refuse_surplus(data: Any, accepted: Any, type_name: str) -> None:
    """Raise ValueError for a key of `data` that `accepted` lacks, because it is probably a typing
    mistake. msgspec ignores such keys."""
    if isinstance(data, Mapping) and isinstance(accepted, dict):
        for key, value in data.items():
            if str(key) not in accepted:
                raise ValueError(f"not a {type_name}: unknown key {key!r}")
            _refuse_surplus(value, accepted[str(key)], type_name)
    elif isinstance(data, list | tuple):
        for item, accepted_item in zip(data, accepted, strict=True):
            _refuse_surplus(item, accepted_item, type_name)


@dataclass
class JobDef(_Def):
    """The name of a job, and the addresses of its tasks by index. A sparse job has no address at
    some indices.

    >>> zd.tf.JobDef(name="worker", tasks={0: "host1:5000"}).tasks[0]
    'host1:5000'
    """

    name: str = ""
    tasks: dict[int, str] = field(default_factory=dict)


@dataclass
class ClusterDef(_Def):
    """The jobs of a cluster. `==` also compares the order of the jobs, as in a protocol buffer.

    >>> job = zd.tf.JobDef(name="worker", tasks={0: "host1:5000"})
    >>> zd.ClusterSpec(zd.tf.ClusterDef(job=[job])).jobs
    ['worker']
    """

    job: list[JobDef] = field(default_factory=list)


@dataclass
class ClusterDeviceFilters(_Def):
    """The filters that decide which other tasks each task sees.

    >>> filters = zd.tf.ClusterDeviceFilters()
    >>> filters.set_device_filters("worker", 0, ["/job:ps"])
    >>> filters.is_visible("worker", 0, "/job:worker/task:1")
    False

    A filter is a partial name like `/job:ps` or `/job:worker/task:3`. A task with filters sees
    itself and each task that matches at least one filter. A task without filters sees all tasks.
    """

    jobs: dict[str, dict[int, list[str]]] = field(default_factory=dict)

    def set_device_filters(
        self, job_name: str, task_index: int, device_filters: Iterable[str]
    ) -> None:
        """Replace the filters of one task.

        >>> filters = zd.tf.ClusterDeviceFilters()
        >>> filters.set_device_filters("worker", 0, ["/job:ps"])

        Raises:
          AssertionError: a filter is not a string. TensorFlow also raises AssertionError.
          ValueError: a filter is not of the form `/key:value/...`.
        """
        filters = list(device_filters)
        if not all(isinstance(device_filter, str) for device_filter in filters):
            raise AssertionError(f"device filters must be strings, got {filters!r}")
        for device_filter in filters:
            _parts(device_filter)
        self.jobs.setdefault(job_name, {})[task_index] = filters

    def is_visible(self, job_name: str, task_index: int, device: str) -> bool:
        """Return whether the task sees `device`, a name like `/job:ps/task:0`.

        >>> zd.tf.ClusterDeviceFilters().is_visible("worker", 0, "/job:ps/task:0")
        True

        Raises:
          ValueError: `device` does not have this form.
        """
        parts = _parts(device)
        own = {"job": job_name, "task": str(task_index)}
        filters = self.jobs.get(job_name, {}).get(task_index, [])
        if not filters or own.items() <= parts.items():
            return True
        return any(_parts(device_filter).items() <= parts.items() for device_filter in filters)


def _parts(device: str) -> dict[str, str]:
    head, *parts = device.split("/")
    pairs = [part.partition(":") for part in parts]
    if head or not pairs or not all(key and value for key, _, value in pairs):
        raise ValueError(f"{device!r} is not of the form /job:name/task:index")
    return {key: value for key, _, value in pairs}


@dataclass
class ServerDef(_Def):
    """The cluster and the task of one server.

    >>> cluster_def = zd.ClusterSpec({"worker": ["host1:5000"]}).as_cluster_def()
    >>> zd.tf.ServerDef(cluster=cluster_def, job_name="worker").task_index
    0

    Attributes:
      port: the port that the server binds. 0 means the port in the task's address.
      default_session_config: options for sessions, as values that JSON can represent.
    """

    cluster: ClusterDef = field(default_factory=ClusterDef)
    job_name: str = ""
    task_index: int = 0
    default_session_config: dict[str, Any] = field(default_factory=dict)
    protocol: str = ""
    port: int = 0
    cluster_device_filters: ClusterDeviceFilters = field(default_factory=ClusterDeviceFilters)
    replica: int = 0

    def own_address(self) -> str:
        """Return the address of this task in the cluster, without checking the address. If `port`
        is not 0, it replaces the port.

        >>> cluster_def = zd.ClusterSpec({"worker": ["host1:5000"]}).as_cluster_def()
        >>> zd.tf.ServerDef(cluster=cluster_def, job_name="worker").own_address()
        'host1:5000'

        Raises:
          InvalidArgumentError: the cluster has no such task.
        """
        for job in self.cluster.job:
            if job.name == self.job_name and self.task_index in job.tasks:
                return _with_port(job.tasks[self.task_index], self.port)
        raise InvalidArgumentError(
            f"task {self.task_index} of job {self.job_name!r} was not defined in cluster"
        )


def _with_port(address: str, port: int) -> str:
    if not port:
        return address
    has_port = ":" in address and not address.endswith("]")
    host = address.rpartition(":")[0] if has_port else address
    return join_address(host.strip("[]"), port)
