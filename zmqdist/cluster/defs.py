"""ClusterDef, JobDef, ServerDef, ClusterDeviceFilters: TensorFlow's protocol buffers of these names, as plain dataclasses.

They are mutable, as in TensorFlow; `==` compares the content. They serialize to JSON with sorted keys, so that equal content has equal
bytes, which any tool can read. They check types only; `ClusterSpec` checks the meaning.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import msgspec

from zmqdist.addresses import join_address
from zmqdist.errors import InvalidArgumentError

_D = TypeVar("_D", bound="_Def")


class _Def:
    """Methods for the dataclasses below: they copy, and convert to and from dicts and bytes."""

    def copy(self: _D) -> _D:
        """Return a deep copy."""
        return copy.deepcopy(self)

    def to_dict(self) -> dict[str, Any]:
        """Return a new dict that JSON and YAML can represent; the indices of tasks are text in it."""
        built: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return built

    @classmethod
    def from_dict(cls: type[_D], data: Mapping[str, Any]) -> _D:
        """Invert `to_dict`; absent keys get their defaults. The result shares no object with `data`.

        Raises:
          ValueError: an unknown key, or a value of a wrong type; the text names the place.
        """
        try:
            made = msgspec.convert(copy.deepcopy(data), cls, str_keys=True)
        except msgspec.ValidationError as error:
            raise ValueError(f"not a {cls.__name__}: {error}") from None
        _refuse_surplus(data, made.to_dict(), cls.__name__)
        return made

    def SerializeToString(self) -> bytes:
        """Return JSON as UTF-8. Equal content has equal bytes."""
        return msgspec.json.encode(self.to_dict(), order="deterministic")

    def ParseFromString(self, serialized: bytes) -> int:
        """Replace the content by that of `serialized`, which `SerializeToString` has returned.

        Returns:
          The number of bytes, as protocol buffers do.

        Raises:
          ValueError: `serialized` does not describe an object of this class; the content is unchanged.
        """
        try:
            parsed = type(self).from_dict(msgspec.json.decode(serialized))
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"not a {type(self).__name__}: {error}") from None
        for each in fields(parsed):  # type: ignore[arg-type]
            setattr(self, each.name, getattr(parsed, each.name))
        return len(serialized)


def _refuse_surplus(data: Any, kept: Any, place: str) -> None:
    """Raise ValueError for an unknown key, which is probably a typing mistake; msgspec ignores unknown keys of a dataclass."""
    if isinstance(data, Mapping) and isinstance(kept, dict):
        for key, value in data.items():
            if str(key) not in kept:
                raise ValueError(f"not a {place}: unknown key {key!r}")
            _refuse_surplus(value, kept[str(key)], place)
    elif isinstance(data, list | tuple):
        for one, other in zip(data, kept, strict=True):
            _refuse_surplus(one, other, place)


@dataclass
class JobDef(_Def):
    """A named job and the addresses of its tasks by index. A sparse job leaves indices out."""

    name: str = ""
    tasks: dict[int, str] = field(default_factory=dict)


@dataclass
class ClusterDef(_Def):
    """The jobs of a cluster. `==` takes their order into account, as in a protocol buffer."""

    job: list[JobDef] = field(default_factory=list)


@dataclass
class ClusterDeviceFilters(_Def):
    """Which other tasks a task sees.

    A filter is a partial name like `/job:ps` or `/job:worker/task:3`. A task with filters sees itself and the tasks that match at least one
    filter; a task without filters sees all tasks.
    """

    jobs: dict[str, dict[int, list[str]]] = field(default_factory=dict)

    def set_device_filters(self, job_name: str, task_index: int, device_filters: Iterable[str]) -> None:
        """Replace the filters of one task.

        Raises:
          AssertionError: a filter is not a string (the class is TensorFlow's choice).
          ValueError: a filter is not of the form `/key:value/...`.
        """
        filters = list(device_filters)
        if not all(isinstance(each, str) for each in filters):
            raise AssertionError(f"device filters must be strings, got {filters!r}")
        for each in filters:
            _parts(each)
        self.jobs.setdefault(job_name, {})[task_index] = filters

    def is_visible(self, job_name: str, task_index: int, device: str) -> bool:
        """Return whether the task sees `device`, a name like `/job:ps/task:0`.

        Raises:
          ValueError: the device is not of that form.
        """
        seen = _parts(device)
        own = {"job": job_name, "task": str(task_index)}
        filters = self.jobs.get(job_name, {}).get(task_index, [])
        if not filters or own.items() <= seen.items():
            return True
        return any(_parts(each).items() <= seen.items() for each in filters)


def _parts(device: str) -> dict[str, str]:
    head, *parts = device.split("/")
    pairs = [part.partition(":") for part in parts]
    if head or not pairs or not all(key and value for key, _, value in pairs):
        raise ValueError(f"{device!r} is not of the form /job:name/task:index")
    return {key: value for key, _, value in pairs}


@dataclass
class ServerDef(_Def):
    """One task of a cluster, as its own server sees it.

    Attributes:
      port: if not 0, replaces the port in the task's address, so that only the host of that address is used.
      default_session_config: options for sessions, which JSON can represent.
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
        """Return the `host:port` that the cluster has for this task, unchecked. If `port` is not 0, it replaces the port.

        Raises:
          InvalidArgumentError: the cluster has no such task.
        """
        for job in self.cluster.job:
            if job.name == self.job_name and self.task_index in job.tasks:
                return _with_port(job.tasks[self.task_index], self.port)
        raise InvalidArgumentError(f"task {self.task_index} of job {self.job_name!r} was not defined in cluster")


def _with_port(address: str, port: int) -> str:
    if not port:
        return address
    has_port = ":" in address and not address.endswith("]")
    host = address.rpartition(":")[0] if has_port else address
    return join_address(host.strip("[]"), port)
