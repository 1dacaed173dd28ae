"""`zmqdist.Session`: a client's end of a session with the tasks of a cluster.

Rules
    Nothing is asked of anybody before the first use. A use waits for the target, which tells who is in the cluster, and for the task
    that it is about, and for no other; its time-out covers all of it, to the millisecond.
    Each task is asked directly. What is on the way to a task when that task goes ends with UNAVAILABLE; nothing is asked twice.
    Arguments, values and what a function captures are snapshots. They are pickled, so the tasks run what they are sent: they serve only
    peers that may send code.

Not here: the tasks' end (sessions.py).
"""

from __future__ import annotations

import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Any, Final, NoReturn

from zmqdist.cluster.defs import ClusterDeviceFilters
from zmqdist.cluster.devices import device_of
from zmqdist.coordination.answers import Task, named
from zmqdist.coordination.client import number
from zmqdist.errors import (
    CANCELLED,
    FAILED_PRECONDITION,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
    UnavailableError,
)
from zmqdist.limits import TASK_PROBE_S
from zmqdist.rpc import StatusOrResult, ZmqClient
from zmqdist.rpc.internal_client import start
from zmqdist.specs import TensorSpec
from zmqdist.tasks import options
from zmqdist.tasks.named_variables import array_of
from zmqdist.tasks.node import grace_s, task_named
from zmqdist.tasks.sessions import RAISED, sendable, unpacked
from zmqdist.tasks.snapshot import SessionSnapshot
from zmqdist.transport.address import split
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.port_probe import listening
from zmqdist.wire import trusted
from zmqdist.wire.functions import FunctionCache

_SCHEME: Final = "zmq"
_LONG_MS: Final = 1e12
"""A time-out that is never over."""
_CLOSING_S: Final = 0.5
"""A task that has gone keeps `close` for so long at most."""


@dataclass(frozen=True)
class TaskInfo:
    """One task of a cluster, as `Session.list_tasks` sees it.

    Attributes:
      task: "worker:0".
      address: "host:port".
      device: its name in the canonical form, "/job:worker/replica:0/task:0/device:CPU:0".
      state: "up" or "missing".
      incarnation: of its present life; 0 while it is missing.
    """

    task: str
    address: str
    device: str
    state: str
    incarnation: int


class _Connection:
    """To one task; `name` is its address until it is known."""

    def __init__(self, name: str, address: str, credentials: Credentials) -> None:
        self.name = name
        self.address = address
        self.client = ZmqClient(address, f"session pid {os.getpid()}", security=credentials.client(address, "submit"))
        self.opened = False


@dataclass(frozen=True)
class _Cluster:
    """What the target tells."""

    me: Task
    addresses: dict[Task, str]
    filters: ClusterDeviceFilters
    config: dict[str, Any]

    def sees(self, task: Task) -> bool:
        return task in self.addresses and self.filters.is_visible(*self.me, device_of(*task))

    def find(self, task: Any) -> Task:
        """ "ps:1", ("ps", 1) or a device's name as a task that can be used. Raises InvalidArgumentError, with what there is."""
        found = task_named(task, self.me)
        if found is None or not self.sees(found):
            known = ", ".join(device_of(*each) for each in self.addresses if self.sees(each))
            text = f"no task {task!r} in the cluster of {named(self.me)}, or it is filtered out; available devices: {known}"
            raise InvalidArgumentError(text)
        return found


class Session:
    """A connection to the tasks of a cluster: runs functions on them, keeps named variables there. From any thread.

    Close it, or use it in a with-statement.
    """

    def __init__(
        self,
        target: Any,
        config: Mapping[str, Any] | None = None,
        *,
        keys_dir: str | os.PathLike[str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
    ) -> None:
        """Waits for nothing.

        Args:
          target: "zmq://host:port" of any task, as `Server.target` has it, or the Server.
          config: `isolate_session_state`: variables of its own, which go with it. `operation_timeout_in_ms`: the default time-out of each
            operation; 0 for none. They stand above the config of the server. TensorFlow's options for graphs, threads and devices do
            nothing and are warned about.
          keys_dir, token_file: as in `zmqdist.transport.security`.

        Raises:
          NotFoundError: the target is of another kind.
          InvalidArgumentError: `config` is no dict, has an option that there is not, or its time-out is no number.
          FailedPreconditionError: the target needs keys.
        """
        address, self._credentials = _place(target, keys_dir, token_file)
        self._config = _checked(config)
        self._id = secrets.randbits(62) | 1
        self._lock = threading.Lock()
        self._closed = False
        self._pending: set[StatusOrResult] = set()
        self._pickling = threading.Lock()
        self._functions = FunctionCache()
        self._master = _Connection(address, address, self._credentials)
        self._cluster: _Cluster | None = None
        self._other_connections: dict[Task, _Connection] = {}

    # -- what users do -----------------------------------------------------------------------------------------------------

    def run(self, fn: Callable[..., Any], *args: Any, timeout_in_ms: float = 0, task: Any = None) -> Any:
        """Have a task call `fn(*args)` in a thread of its process, and wait for what it returns.

        There `zmqdist.Server.current()` is the task's server, with its variables; `zmqdist.cancelled()` turns true when nobody
        waits for the function any more, and it should look at that if it takes long: a thread cannot be ended.

        Args:
          timeout_in_ms: of the whole; 0: the config's, or none.
          task: where: "ps:1", ("ps", 1) or "/job:ps/task:1"; None: the target.

        Raises:
          Exception: what the function raised, the same class where that can be pickled, with the remote traceback as its cause;
            else an UnknownError.
          InvalidArgumentError: no such task, or something cannot be pickled; the text says what.
          DeadlineExceededError: the time was over; the text names the tasks that were not there. The function may go on.
          UnavailableError: the task went while it ran; it may have been carried out.
          CancelledError: this session was closed meanwhile.
          AbortedError: the target was reset, or the task was started again.
        """
        with self._pickling:
            constant = self._functions.constant(fn)
            function = sendable(self._functions.changing(fn) if constant is None else constant)
        parts = sendable(trusted.pack_call(args, {}))
        operation, is_constant = trusted.describe(fn), constant is not None
        answer = self._call_task(operation, task, timeout_in_ms, "session.run", function, is_constant, *parts)
        if answer[0] == RAISED:
            raise trusted.unpack_error(answer[1])
        return unpacked(answer[1:])

    def assign(self, name: str, value: Any, container: str = "", *, task: Any = None, timeout_in_ms: float = 0) -> None:
        """Set a named variable on a task to anything that lends itself to an array; dtype and shape may be others than before.

        Args:
          container: a name by which `reset` can clear it; "": the task's own, named as its job.
          task, timeout_in_ms, and what is raised besides: as in `run`.

        Raises:
          InvalidArgumentError: `value` is no array of numbers or text.
        """
        array = array_of(name, value)
        self._call_task(f"assign of {name!r}", task, timeout_in_ms, "session.assign", name, array, container)

    def read(self, name: str, container: str = "", *, task: Any = None, timeout_in_ms: float = 0) -> Any:
        """A copy of a named variable: an array, the caller's own. Arguments and what is raised besides: as in `assign`.

        Raises:
          FailedPreconditionError: it was not assigned, or cleared.
        """
        return self._call_task(f"read of {name!r}", task, timeout_in_ms, "session.read", name, container)

    def variables(self, container: str = "", *, task: Any = None, timeout_in_ms: float = 0) -> dict[str, TensorSpec]:
        """The variables of a container: name -> shape and dtype. Arguments and what is raised: as in `assign`."""
        found = self._call_task("variables", task, timeout_in_ms, "session.variables", container)
        return dict(found)

    def list_tasks(self, timeout_in_ms: float = 0) -> list[TaskInfo]:
        """Every task of the cluster, and whether it is there; waits for the target only."""
        cluster = self._get_cluster(self._due(timeout_in_ms), "list_tasks")
        up = listening(cluster.addresses)
        due = time.monotonic() + TASK_PROBE_S
        replies = {task: start(self._connection(task).client, "server.about", due=due) for task in up}
        found = []
        for task, address in cluster.addresses.items():
            here = task in replies and replies[task].is_ok()
            incarnation = replies[task].get_value()["incarnation"] if here else 0
            found.append(TaskInfo(named(task), address, device_of(*task), "up" if here else "missing", incarnation))
        return found

    def stop_task(self, task: Any = None, grace: float | None = None, *, timeout_in_ms: float = 0) -> None:
        """Have the server of a task stop, as its `stop(grace)` does; returns when it was told."""
        connection = self._reach(task, due := self._due(timeout_in_ms), "stop_task")
        self._wait(connection, "stop_task", due, "server.stop", grace_s(grace))

    def shutdown(self, grace: float | None = None, *, timeout_in_ms: float = 0) -> list[str]:
        """Have all tasks of the cluster that are up stop; the names of those that were told."""
        connection = self._reach(None, due := self._due(timeout_in_ms), "shutdown")
        stopped = self._wait(connection, "shutdown", due, "server.shutdown", grace_s(grace))
        return list(stopped)

    @staticmethod
    def reset(
        target: Any,
        containers: Sequence[str] | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        timeout_in_ms: float = 0,
        keys_dir: str | os.PathLike[str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
    ) -> None:
        """Clear containers on all tasks of the target's cluster that are up, and end every session that has this target.

        Args:
          containers: their names; None or empty: all.
          config: `operation_timeout_in_ms`, where `timeout_in_ms` is 0.

        Raises:
          NotFoundError: the target is of another kind.
          DeadlineExceededError: nobody answered in time.
          UnavailableError: a task could not be told; the text names it.
        """
        address, credentials = _place(target, keys_dir, token_file)
        began = time.monotonic()
        due = _due(timeout_in_ms, _checked(config))
        names = [containers] if isinstance(containers, str) else list(containers or ())
        with ZmqClient(address, f"reset pid {os.getpid()}", security=credentials.client(address, "submit")) as client:
            try:
                start(client, "session.reset", names, due=due).get_value()
            except DeadlineExceededError:
                text = f"no task's server at {address} answered to the reset within {due - began:.3g} s"
                raise DeadlineExceededError(text) from None

    def close(self) -> None:
        """End it: what waits gets a CancelledError, and the variables of an isolated session are freed. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pending = tuple(self._pending)
            connections = [self._master, *self._other_connections.values()]
        for result in pending:
            result.cancel()
        due = time.monotonic() + _CLOSING_S
        closing = [start(each.client, "session.close", self._id, due=due) for each in connections if each.opened]
        for result in closing:
            result.is_ok()
        for each in connections:
            each.client.close()

    def snapshot(self) -> SessionSnapshot:
        """An immutable record of now: what waits, to whom it is connected. Asks nobody."""
        with self._lock:
            connections = [self._master, *self._other_connections.values()]
        names = tuple(each.name for each in connections if each.opened)
        return SessionSnapshot(len(self._pending), names, self._functions.pickles)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Session with {self._master.name}{', closed' if self._closed else ''}>"

    # -- asking ------------------------------------------------------------------------------------------------------------

    def _call_task(self, operation: str, task: Any, timeout_in_ms: float, method: str, *args: Any) -> Any:
        due = self._due(timeout_in_ms)
        return self._wait(self._reach(task, due, operation), operation, due, method, self._id, *args)

    def _due(self, timeout_in_ms: float) -> float:
        config = self._config if self._cluster is None else self._cluster.config
        return _due(timeout_in_ms, config)

    def _reach(self, task: Any, due: float, operation: str) -> _Connection:
        """A task that has this session, when it is there."""
        cluster = self._get_cluster(due, operation)
        if task is None:
            return self._master
        connection = self._connection(cluster.find(task))
        if not connection.opened:
            self._open(connection, due, operation, False)
        return connection

    def _connection(self, task: Task) -> _Connection:
        assert self._cluster is not None
        if task == self._cluster.me:
            return self._master
        with self._lock:
            self._check_open()
            connection = self._other_connections.get(task)
            if connection is None:
                address = self._cluster.addresses[task]
                connection = self._other_connections[task] = _Connection(named(task), address, self._credentials)
            return connection

    def _get_cluster(self, due: float, operation: str) -> _Cluster:
        """What the target tells of its cluster; waits for it at the first use."""
        if self._cluster is None:
            me, jobs, filters, config = self._open(self._master, due, operation, True)
            job, index = me
            addresses = {(name, number): address for name, tasks in jobs.items() for number, address in tasks.items()}
            self._master.name = named((job, index))
            self._cluster = _Cluster((job, index), addresses, ClusterDeviceFilters({job: {index: filters}}), config)
        return self._cluster

    def _open(self, connection: _Connection, due: float, operation: str, is_master: bool) -> Any:
        try:
            answer = self._wait(connection, operation, due, "session.open", self._id, is_master, self._config)
        except DeadlineExceededError:
            raise DeadlineExceededError(_missing(operation, connection)) from None
        except InvalidArgumentError as error:
            if not error.message.endswith("is not registered."):
                raise
            text = f"what listens at {connection.address} is no task's server (zmqdist.Server)"
            raise FailedPreconditionError(text) from None
        connection.opened = True
        return answer

    def _wait(self, connection: _Connection, operation: str, due: float, method: str, *args: Any) -> Any:
        self._check_open()
        result = start(connection.client, method, *args, due=due)
        try:
            with self._lock:
                if not self._closed:
                    self._pending.add(result)
            if self._closed:  # between the check and now: `close` did not see this call
                result.cancel()
            return result.get_value()
        except OpError as error:
            self._fail(error, connection, operation)
        finally:
            self._pending.discard(result)
            result.cancel()  # Ctrl-C: nobody wants it any more; nothing otherwise

    def _fail(self, error: OpError, connection: _Connection, operation: str) -> NoReturn:
        """The same error, with the names that a user knows."""
        name = connection.name
        if self._closed and error.error_code in (
            CANCELLED,
            FAILED_PRECONDITION,
        ):  # the latter: its client was closed before the call
            raise CancelledError(f"{operation} on {name}: the session was closed (Session.close)") from None
        if isinstance(error, UnavailableError):
            raise UnavailableError(f"{operation} on {name}: {error.message}") from None
        if isinstance(error, DeadlineExceededError):
            sent = "waited for a server" not in error.message
            text = (
                f"{operation} on {name} did not end in time; it may go on there"
                if sent
                else _missing(operation, connection)
            )
            raise DeadlineExceededError(text) from None
        raise error

    def _check_open(self) -> None:
        if self._closed:
            raise FailedPreconditionError("this session was closed: make a new one")


def _missing(operation: str, connection: _Connection) -> str:
    of = "" if connection.name == connection.address else f" at {connection.address}"
    return f"{operation} was not begun in time: missing task {connection.name}{of}"


def _place(target: Any, keys_dir: Any, token_file: Any) -> tuple[str, Credentials]:
    """ "host:port", and with which secrets to go there."""
    credentials = getattr(target, "credentials", None)
    text = target if isinstance(target, str) else getattr(target, "target", None)
    scheme, separator, address = text.rpartition("://") if isinstance(text, str) else ("", "", "")
    try:
        split(address)
        known = scheme == _SCHEME or not separator
    except InvalidArgumentError:
        known = False
    if not known:
        message = f'no session can be had with {target!r}: wanted "{_SCHEME}://host:port", the target of a zmqdist.Server, or that server'
        raise NotFoundError(message)
    if keys_dir is None and token_file is None and isinstance(credentials, Credentials):
        return address, credentials
    paths = (None if path is None else os.fspath(path) for path in (token_file, keys_dir))
    token, keys = paths
    return address, Credentials(token, keys, Credentials.of_environment().insecure)


def _checked(config: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(config or {}, Mapping):
        raise InvalidArgumentError(f"the config of a session is a dict of options, not {config!r}")
    settings = dict(config or {})
    for key in options.check(settings, options.OF_SESSIONS, "session"):
        warnings.warn(f"session option {key!r} is TensorFlow's and does nothing here", stacklevel=3)
    _limit_s(settings.get(options.TIMEOUT, 0))
    return {key: value for key, value in settings.items() if key in options.OF_SESSIONS}


def _due(timeout_in_ms: float, config: Mapping[str, Any]) -> float:
    """When an operation that begins now is due; without a time-out of its own, that of the config."""
    limit_s = min(_limit_s(timeout_in_ms), inf if timeout_in_ms > 0 else _limit_s(config.get(options.TIMEOUT, 0)))
    return time.monotonic() + limit_s


def _limit_s(timeout_in_ms: Any) -> float:
    known = number(timeout_in_ms)
    if isnan(known):
        text = f"a time-out is a number of milliseconds, 0 for none, not {timeout_in_ms!r}"
        raise InvalidArgumentError(text)
    return known / 1000 if 0 < known < _LONG_MS else inf
