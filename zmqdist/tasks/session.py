"""`zmqdist.Session`: the client's side of a session with the tasks of a cluster.

Rules
    A session calls no task before its first operation. An operation waits for the target, which
    reports the tasks of the cluster, and for the task on which the operation acts, but for no other
    task. The time-out of the operation covers both waits.
    A session calls each task directly. If a task ends, the operations in flight to it end with
    UNAVAILABLE; no operation is sent twice. Arguments, values and the variables that a function
    captures are snapshots. They are pickled, and unpickling runs code of the client. So tasks
    accept sessions only from peers that may send code.

Not here: the tasks' side (sessions.py).
"""

from __future__ import annotations

import os
import secrets
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Any, Final, NoReturn

from zmqdist import clock as time
from zmqdist.clock import number
from zmqdist.cluster.defs import ClusterDeviceFilters
from zmqdist.cluster.devices import device_of
from zmqdist.coordination.replies import Task, task_name
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
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.endpoint import split
from zmqdist.transport.port_probe import listening
from zmqdist.wire import trusted
from zmqdist.wire.functions import FunctionCache

_SCHEME: Final = "zmq"
_LONG_MS: Final = 1e12
"""Milliseconds. A time-out of this length or longer counts as no time-out."""
_CLOSING_S: Final = 0.5
"""Seconds for which `close` waits for the replies of the tasks."""


@dataclass(frozen=True)
class TaskInfo:
    """One task of a cluster, as `Session.list_tasks` reports it.

    Attributes:
      task: name of the task, such as "worker:0".
      address: "host:port".
      device: the canonical name of the task's device, "/job:worker/replica:0/task:0/device:CPU:0".
      state: "up" or "missing".
      incarnation: incarnation of the task's process; 0 while the task is missing.
    """

    task: str
    address: str
    device: str
    state: str
    incarnation: int


class _Connection:
    """A connection to one task. `name` is the name of the task, or its address until the name is
    known."""

    def __init__(self, name: str, address: str, credentials: Credentials) -> None:
        self.name = name
        self.address = address
        self.client = ZmqClient(
            address, f"session pid {os.getpid()}", security=credentials.client(address, "submit")
        )
        self.opened = False


@dataclass(frozen=True)
class _Cluster:
    """The target's reply to "session.open": the cluster, device filters and config of the
    target.
    """

    me: Task
    addresses: dict[Task, str]
    filters: ClusterDeviceFilters
    config: dict[str, Any]

    def sees(self, task: Task) -> bool:
        return task in self.addresses and self.filters.is_visible(*self.me, device_of(*task))

    def find(self, task: Any) -> Task:
        """Return the task that a name means: "ps:1", ("ps", 1) or the name of a device.

        Raises:
          InvalidArgumentError: there is no such task, or a device filter hides it; the text lists
            the visible tasks.
        """
        match = task_named(task, self.me)
        if match is None or not self.sees(match):
            names = ", ".join(
                device_of(*other_task) for other_task in self.addresses if self.sees(other_task)
            )
            raise InvalidArgumentError(
                f"no task {task!r} in the cluster of {task_name(self.me)}, or it is "
                f"filtered out; available devices: {names}"
            )
        return match


class Session:
    """A connection to the tasks of a cluster, which runs functions on them and keeps named
    variables there.

    >>> with zd.Session(task.target) as session:
    ...     print(session.run(np.add, 1, 2))
    3

    Methods may be called from any thread. Close the session, or use it in a with-statement.
    """

    def __init__(
        self,
        target: Any,
        config: Mapping[str, Any] | None = None,
        *,
        keys_dir: str | os.PathLike[str] | None = None,
        token_file: str | os.PathLike[str] | None = None,
    ) -> None:
        """Make a session. This does not block.

        Args:
          target: "zmq://host:port" of any task, as in `Server.target`, or the Server itself.
          config: a dict of options. With `isolate_session_state` the session has variables of its
            own, which are freed with the session. `operation_timeout_in_ms` is the default time-out
            of each operation; 0 means no time-out. Both options override the config of the server,
            whose time-out does not hold for the first operation. TensorFlow's options for graphs,
            threads and devices have no effect and cause a warning.
          keys_dir, token_file: as for `zmqdist.Server`.

        Raises:
          NotFoundError: `target` is not the target of a task.
          InvalidArgumentError: `config` is not a dict, has an unknown option, or a time-out that is
            not a number.
          FailedPreconditionError: the target needs keys, and no keys are given.
        """
        address, self._credentials = _target_of(target, keys_dir, token_file)
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

    # -- operations --------------------------------------------------------------------------------

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout_in_ms: float = 0, task: Any = None
    ) -> Any:
        """Run `fn(*args)` in a thread of a task's process, wait for it, and return its value.

        >>> zd.Session(task.target).run(sorted, [2, 3, 1])
        [1, 2, 3]

        In the function, `zmqdist.Server.current()` is the server of that task, with its variables.
        `zmqdist.cancelled()` becomes true when no caller waits for the function any more. A long
        function should poll it, because a thread cannot be stopped from outside.

        Args:
          timeout_in_ms: time-out of the whole operation; 0 means the time-out in the config, or no
            time-out if the config has none.
          task: the task that runs the function: "ps:1", ("ps", 1) or "/job:ps/task:1". `None` means
            the target.

        Raises:
          Exception: the exception of the function, with the remote traceback as its cause. If the
            exception cannot be pickled, an UnknownError is raised in its place.
          InvalidArgumentError: there is no such task, or an object cannot be pickled; the text
            names the object.
          DeadlineExceededError: the time-out has passed; if a task was missing, the text names that
            task. The function may continue to run.
          UnavailableError: the task has ended meanwhile; the function may have run.
          CancelledError: this session was closed meanwhile.
          FailedPreconditionError: this session was closed before.
          AbortedError: the target was reset, the task was restarted, or the session had no
            connection to the task for a minute.
        """
        with self._pickling:
            constant = self._functions.pack_constant(fn)
            function = sendable(self._functions.pack_changing(fn) if constant is None else constant)
        parts = sendable(trusted.pack_call(args, {}))
        operation, is_constant = trusted.describe(fn), constant is not None
        reply = self._call_task(
            operation, task, timeout_in_ms, "session.run", function, is_constant, *parts
        )
        if reply[0] == RAISED:
            raise trusted.unpack_error(reply[1])
        return unpacked(reply[1:])

    def assign(
        self,
        name: str,
        value: Any,
        container: str = "",
        *,
        task: Any = None,
        timeout_in_ms: float = 0,
    ) -> None:
        """Set a named variable on a task. Dtype and shape may differ from those of the previous
        value.

        >>> session = zd.Session(task.target)
        >>> session.assign("rate", 0.1)
        >>> float(session.read("rate"))
        0.1

        Args:
          value: anything that NumPy can turn into an array of numbers or text.
          container: a name by which `reset` can clear the variable; "" means the task's default
            container, which has the name of the task's job.
          task, timeout_in_ms: as in `run`.

        Raises:
          InvalidArgumentError: `value` is not an array of numbers or text.
          OpError: any error of `run`.
        """
        array = array_of(name, value)
        self._call_task(
            f"assign of {name!r}", task, timeout_in_ms, "session.assign", name, array, container
        )

    def read(
        self, name: str, container: str = "", *, task: Any = None, timeout_in_ms: float = 0
    ) -> Any:
        """Return a copy of a named variable, as an array that the caller owns. The arguments are
        those of `assign`.

        >>> session = zd.Session(task.target)
        >>> session.assign("weights", np.arange(3))
        >>> session.read("weights")
        array([0, 1, 2])

        Raises:
          FailedPreconditionError: the variable was not assigned, or was cleared.
          OpError: any error of `run`.
        """
        return self._call_task(
            f"read of {name!r}", task, timeout_in_ms, "session.read", name, container
        )

    def variables(
        self, container: str = "", *, task: Any = None, timeout_in_ms: float = 0
    ) -> dict[str, TensorSpec]:
        """Return shape and dtype of each variable in a container, by name. The arguments are those
        of `assign`, the errors those of `run`.

        >>> session = zd.Session(task.target)
        >>> session.assign("bias", np.zeros(2, np.float32), container="run 1")
        >>> list(session.variables("run 1"))
        ['bias']
        """
        specs = self._call_task("variables", task, timeout_in_ms, "session.variables", container)
        return dict(specs)

    def list_tasks(self, timeout_in_ms: float = 0) -> list[TaskInfo]:
        """Return every task of the cluster with its state. This waits for the target only. A task
        that does not reply within TASK_PROBE_S is reported as missing.

        >>> len(zd.Session(task.target).list_tasks())
        1
        """
        cluster = self._get_cluster(self._due(timeout_in_ms), "list_tasks")
        # a probe of the ports is quick, so that a missing task costs no time-out
        up = listening(cluster.addresses)
        due = time.monotonic() + TASK_PROBE_S
        replies = {
            task: start(self._connection(task).client, "server.about", due=due) for task in up
        }
        rows = []
        for task, address in cluster.addresses.items():
            here = task in replies and replies[task].is_ok()
            incarnation = replies[task].get_value()["incarnation"] if here else 0
            rows.append(
                TaskInfo(
                    task_name(task),
                    address,
                    device_of(*task),
                    "up" if here else "missing",
                    incarnation,
                )
            )
        return rows

    def stop_task(
        self, task: Any = None, grace: float | None = None, *, timeout_in_ms: float = 0
    ) -> None:
        """Stop the server of a task, as `Server.stop(grace)` does. This returns when the task has
        received the request, before the task has stopped.

        >>> other = zd.Server.create_local_server()
        >>> zd.Session(other.target).stop_task()
        >>> other.join(timeout=10)
        True
        """
        connection = self._reach(task, due := self._due(timeout_in_ms), "stop_task")
        self._wait(connection, "stop_task", due, "server.stop", grace_s(grace))

    def shutdown(self, grace: float | None = None, *, timeout_in_ms: float = 0) -> list[str]:
        """Stop all tasks of the cluster that are up, and return their names.

        >>> other = zd.Server.create_local_server()
        >>> zd.Session(other.target).shutdown()
        ['localhost:0']

        Raises:
          UnavailableError: a task that is up did not receive the request. The target stops
            nevertheless, with the tasks that received it.
        """
        connection = self._reach(None, due := self._due(timeout_in_ms), "shutdown")
        names = self._wait(connection, "shutdown", due, "server.shutdown", grace_s(grace))
        return list(names)

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
        """Clear containers on all tasks that are up and that the target sees, and end every session
        with this target.

        >>> other = zd.Server.create_local_server()
        >>> zd.Session.reset(other.target)
        >>> other.stop()

        Args:
          containers: names of the containers; None or an empty list means all containers.
          config: `operation_timeout_in_ms`, which is used if `timeout_in_ms` is 0.

        Raises:
          NotFoundError: `target` is not the target of a task.
          InvalidArgumentError, FailedPreconditionError: as for the constructor.
          DeadlineExceededError: the target did not reply within the time-out.
          UnavailableError: a task could not be reached; the text names it.
        """
        address, credentials = _target_of(target, keys_dir, token_file)
        began = time.monotonic()
        due = _due(timeout_in_ms, _checked(config))
        names = [containers] if isinstance(containers, str) else list(containers or ())
        with ZmqClient(
            address, f"reset pid {os.getpid()}", security=credentials.client(address, "submit")
        ) as client:
            try:
                start(client, "session.reset", names, due=due).get_value()
            except DeadlineExceededError:
                raise DeadlineExceededError(
                    f"no task's server at {address} replied to the reset within {due - began:.3g} s"
                ) from None

    def close(self) -> None:
        """Close the session. Operations under way end with CancelledError, and the variables of an
        isolated session are freed. Idempotent.

        >>> zd.Session(task.target).close()
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pending = tuple(self._pending)
            connections = [self._master, *self._other_connections.values()]
        # end the operations of other threads, which would wait for their tasks otherwise
        for result in pending:
            result.cancel()
        due = time.monotonic() + _CLOSING_S
        closing = [
            start(connection.client, "session.close", self._id, due=due)
            for connection in connections
            if connection.opened
        ]
        for result in closing:
            result.is_ok()
        for connection in connections:
            connection.client.close()

    def snapshot(self) -> SessionSnapshot:
        """Return an immutable record of this moment: operations under way and connections. This
        calls no task.

        >>> type(zd.Session(task.target).snapshot()).__name__
        'SessionSnapshot'
        """
        with self._lock:
            connections = [self._master, *self._other_connections.values()]
        names = tuple(connection.name for connection in connections if connection.opened)
        return SessionSnapshot(len(self._pending), names, self._functions.pickles)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Session with {self._master.name}{', closed' if self._closed else ''}>"

    # -- calls -------------------------------------------------------------------------------------

    def _call_task(
        self, operation: str, task: Any, timeout_in_ms: float, method: str, *args: Any
    ) -> Any:
        due = self._due(timeout_in_ms)
        return self._wait(
            self._reach(task, due, operation), operation, due, method, self._id, *args
        )

    def _due(self, timeout_in_ms: float) -> float:
        config = self._config if self._cluster is None else self._cluster.config
        return _due(timeout_in_ms, config)

    def _reach(self, task: Any, due: float, operation: str) -> _Connection:
        """Wait until a task has opened this session, and return the connection to the task."""
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
                connection = self._other_connections[task] = _Connection(
                    task_name(task), address, self._credentials
                )
            return connection

    def _get_cluster(self, due: float, operation: str) -> _Cluster:
        """Return the target's report about its cluster. The first call waits for the target."""
        if self._cluster is None:
            me, jobs, filters, config = self._open(self._master, due, operation, True)
            job, index = me
            addresses = {
                (name, number): address
                for name, tasks in jobs.items()
                for number, address in tasks.items()
            }
            self._master.name = task_name((job, index))
            self._cluster = _Cluster(
                (job, index), addresses, ClusterDeviceFilters({job: {index: filters}}), config
            )
        return self._cluster

    def _open(self, connection: _Connection, due: float, operation: str, is_master: bool) -> Any:
        try:
            reply = self._wait(
                connection, operation, due, "session.open", self._id, is_master, self._config
            )
        except DeadlineExceededError:
            raise DeadlineExceededError(_missing(operation, connection)) from None
        except InvalidArgumentError as error:
            if not error.message.endswith("is not registered."):
                raise
            raise FailedPreconditionError(
                f"the process that listens at {connection.address} is not a task's server "
                f"(zmqdist.Server)"
            ) from None
        connection.opened = True
        return reply

    def _wait(
        self, connection: _Connection, operation: str, due: float, method: str, *args: Any
    ) -> Any:
        self._check_open()
        result = start(connection.client, method, *args, due=due)
        try:
            with self._lock:
                if not self._closed:
                    self._pending.add(result)
            if self._closed:
                # `close` has run between the check and the lock, so it has not cancelled this call
                result.cancel()
            return result.get_value()
        except OpError as error:
            self._fail(error, connection, operation)
        finally:
            self._pending.discard(result)
            # after Ctrl-C no caller waits for the call; a call that has ended is not affected
            result.cancel()

    def _fail(self, error: OpError, connection: _Connection, operation: str) -> NoReturn:
        """Raise the error of a call with a text that names the operation and the task as the user
        knows them."""
        name = connection.name
        # FAILED_PRECONDITION means that the client was closed before the call was made.
        # the close of this session has ended the call, not the task
        if self._closed and error.error_code in (CANCELLED, FAILED_PRECONDITION):
            raise CancelledError(
                f"{operation} on {name}: the session was closed (Session.close)"
            ) from None
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


def _target_of(target: Any, keys_dir: Any, token_file: Any) -> tuple[str, Credentials]:
    """Return the "host:port" of a target, and the places of the keys and of the token with which to
    connect."""
    credentials = getattr(target, "credentials", None)
    text = target if isinstance(target, str) else getattr(target, "target", None)
    scheme, separator, address = text.rpartition("://") if isinstance(text, str) else ("", "", "")
    try:
        split(address)
        is_target = scheme == _SCHEME or not separator
    except InvalidArgumentError:
        is_target = False
    if not is_target:
        raise NotFoundError(
            f'no session with {target!r}: wanted "{_SCHEME}://host:port", the target of a '
            f"zmqdist.Server, or that server"
        )
    if keys_dir is None and token_file is None and isinstance(credentials, Credentials):
        return address, credentials
    paths = (None if path is None else os.fspath(path) for path in (token_file, keys_dir))
    token, keys = paths
    return address, Credentials(token, keys, Credentials.from_environment().insecure)


def _checked(config: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(config or {}, Mapping):
        raise InvalidArgumentError(f"the config of a session is a dict of options, not {config!r}")
    settings = dict(config or {})
    for key in options.check(settings, options.OF_SESSIONS, "session"):
        warnings.warn(f"session option {key!r} is TensorFlow's and does nothing here", stacklevel=3)
    _limit_s(settings.get(options.TIMEOUT, 0))
    return {key: value for key, value in settings.items() if key in options.OF_SESSIONS}


def _due(timeout_in_ms: float, config: Mapping[str, Any]) -> float:
    """Return the deadline of an operation that begins now. If the operation has no time-out of its
    own, the time-out in the config applies.
    """
    limit_s = min(
        _limit_s(timeout_in_ms),
        inf if timeout_in_ms > 0 else _limit_s(config.get(options.TIMEOUT, 0)),
    )
    return time.monotonic() + limit_s


def _limit_s(timeout_in_ms: Any) -> float:
    limit_ms = number(timeout_in_ms)
    if isnan(limit_ms):
        raise InvalidArgumentError(
            f"timeout_in_ms: a time-out is a number of milliseconds, 0 for none, not "
            f"{timeout_in_ms!r}"
        )
    return limit_ms / 1000 if 0 < limit_ms < _LONG_MS else inf
