"""A task's end of coordination: barriers with the other tasks, keys, the states of tasks and their errors.

Not here: the connection and the registration (link.py), the keeper (service.py), its decisions (machine.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import inf, nan
from threading import TIMEOUT_MAX
from typing import Any, NamedTuple, TypeAlias

from zmqdist.background import in_background
from zmqdist.cluster.devices import Device
from zmqdist.coordination.link import KeeperLink, LoggedWait, OnError
from zmqdist.coordination.machine import UP
from zmqdist.coordination.replies import Task, task_name
from zmqdist.coordination.snapshot import CoordinationSnapshot
from zmqdist.errors import FailedPreconditionError, InvalidArgumentError, OpError, from_code
from zmqdist.limits import LEADER_WAIT_S
from zmqdist.rpc.client import ZmqClient, new_incarnation
from zmqdist.transport.credentials import Credentials

TaskName: TypeAlias = "str | tuple[str, int]"
""" "worker:1", ("worker", 1) or "/job:worker/task:1"."""


class TaskState(NamedTuple):
    """The state of a task, as the keeper knows it.

    Attributes:
      state: "missing" (has not registered yet), "joining", "up", "error" or "left".
      incarnation: of its process, or of the last one; 0 before the first.
      code, message: of its error; 0 and "" where it has none.
    """

    state: str
    incarnation: int
    code: int
    message: str


class CoordinationClient:
    """One task among the tasks of a cluster, for barriers, keys and states. From any thread; close it.

    The client registers in the background and stays registered; the other tasks are notified when it is lost. Until the keeper appears for
    the first time, requests wait for it, up to their time-outs (LEADER_WAIT_S where they have none).

    Every request raises UnavailableError while the keeper is gone (requests of a client that is no task wait for the next keeper),
    AbortedError or another OpError when the keeper refuses this task, and InvalidArgumentError for arguments that make no sense.

    Attributes:
      kv: the key-value store.
    """

    def __init__(
        self,
        address: str,
        task: TaskName | None = None,
        incarnation: int = 0,
        *,
        credentials: Credentials | None = None,
        keeper: str = "",
    ) -> None:
        """Connect in the background; does not block.

        Args:
          address: "host:port" of the keeper: of a cluster's leader, or of a dispatcher.
          task: which task this is. None: no task; then only keys and `task_states` can be used.
          incarnation: of this process; 0 draws one.
          credentials: where the keys and the token are, if not in the usual place.
          keeper: the name of the keeper, for error texts.
        """
        security = (credentials or Credentials()).client(address.removeprefix("zmq://"), "worker")
        identity = None if task is None else (*task_of(task), incarnation or new_incarnation())
        name = "" if identity is None else task_name(identity[:2])
        self._link = KeeperLink(lambda: ZmqClient(address, name, security=security), identity, keeper)
        self.kv = KeyValues(self._link)

    # -- barriers ------------------------------------------------------------------------------------------------------------

    def barrier(self, name: str, timeout: float | None = None, tasks: Iterable[TaskName] | None = None) -> None:
        """Wait until all tasks have called the barrier of this name. A barrier can be used again and again.

        When a round fails, it fails with the same error for all waiting tasks, and at once for those that call later.

        Args:
          timeout: seconds; the first time-out of a caller holds for all. None: no limit, and the log reports at intervals which tasks are
            missing.
          tasks: the tasks that must call; all of them must pass the same. None: all tasks of the cluster.

        Raises:
          DeadlineExceededError: some tasks did not call in time; the text names them.
          InternalError: one of the tasks is in error, was lost, has left, or was restarted and counts rounds anew.
          InvalidArgumentError: the callers differ in `tasks`, or one of them is not in it.
          CancelledError: a task cancelled the round, or this task called the barrier again from elsewhere.
        """
        identity, due, members = self._identity(), _due(timeout), _tasks_of(tasks)
        self._link.ready(due)
        left = None if timeout is None else max(0.0, due - time.monotonic())
        wait = LoggedWait(f"at barrier {name!r}", name) if timeout is None else None
        code, message, counter = self._link.request(
            "barrier", identity, name, self._link.counter(name), left, members, due=due, wait=wait
        )
        self._link.ended(name, counter)
        if code:
            self._link.unless_ended(code)
            raise from_code(code, message)

    def cancel_barrier(self, name: str) -> None:
        """End the current round of a barrier with CancelledError, for all waiting tasks.

        Raises:
          FailedPreconditionError: no task waits there, or the round is over.
        """
        self._request("cancel_barrier", self._identity(), name, self._link.counter(name))

    def wait_for_all(self, devices: Iterable[str] = (), timeout: float | None = None) -> list[str]:
        """Wait until all tasks of the cluster have called this method: a first sign that the cluster is complete.

        Args:
          devices: the names of this task's devices, or any other texts for the other tasks.

        Returns:
          The texts of all tasks, in the order of the tasks.

        Raises as `barrier`.
        """
        identity, due = self._identity(), _due(timeout)
        self._link.ready(due)
        left = None if timeout is None else max(0.0, due - time.monotonic())
        wait = LoggedWait("for all tasks", "zmqdist.all") if timeout is None else None
        all_devices = self._link.request("wait_for_all", identity, list(devices), left, due=due, wait=wait)
        return list(all_devices)

    def alive_tasks(self, tasks: Iterable[TaskName] | None = None) -> list[str]:
        """Return the names of those of `tasks` that are alive; None: of all tasks.

        A collective call: each of these tasks that is alive must make it with the same set. All get the same result, once the last of them
        has called.
        """
        return [task_name(task) for task in self._request("alive", self._identity(), _tasks_of(tasks))]

    # -- states of tasks -------------------------------------------------------------------------------------------------------

    def task_states(self, jobs: Iterable[str] | None = None) -> dict[str, TaskState]:
        """Return the state of every task, or of the tasks of some jobs, by name and in the order of the cluster."""
        rows = self._request("states", None if jobs is None else list(jobs))
        return {task_name((job, index)): TaskState(*rest) for job, index, *rest in rows}

    def check_alive(self, task: TaskName) -> bool:
        """Return whether a task is registered and neither lost nor in error.

        Raises:
          InvalidArgumentError: the cluster has no such task.
        """
        states = self.task_states()
        name = task_name(task_of(task))
        if name not in states:
            raise InvalidArgumentError(f"{name} is not in the cluster, which has {', '.join(states) or 'none'}")
        return states[name].state == UP

    def report_error(self, code: int, message: str) -> None:
        """Report that this task has failed: the other tasks are notified, and barriers that wait for it end. `reset` clears the error.

        Args:
          code: one of zmqdist.errors, not OK.
        """
        self._request("report_error", self._identity(), code, message)

    def on_error(self, fn: OnError) -> None:
        """Have `fn(task, error)` called when a task of the cluster fails, with its name and an OpError.

        Callbacks run in a thread of their own, one after another.
        """
        self._link.callbacks.append(fn)

    @property
    def errors(self) -> list[tuple[str, OpError]]:
        """The last errors that the keeper has reported to this task, oldest first: (name of the failed task, error)."""
        return list(self._link.errors)

    def snapshot(self) -> CoordinationSnapshot:
        """Return an immutable record of this moment: whether this task is registered, and its waiting requests. Calls nothing."""
        return self._link.snapshot()

    # -- life -------------------------------------------------------------------------------------------------------------------

    def register(self, timeout: float | None = None) -> None:
        """Wait until this task is registered, which happens in the background.

        Raises:
          DeadlineExceededError: the keeper did not appear in time.
          AbortedError: this task is in error, or another incarnation of it is registered: see `reset`.
        """
        self._identity()
        self._link.ready(_due(timeout))

    def beat(self) -> None:
        """Send a sign of life now. Not necessary, because the client sends them in the background.

        Raises:
          OpError: this task's own error, if it is in error.
        """
        self._request("beat", self._identity())

    def reset(self) -> None:
        """Have the keeper forget the error or the earlier incarnation of this task, and register again.

        Raises:
          DeadlineExceededError: no keeper appeared within LEADER_WAIT_S.
        """
        self._identity()
        self._link.reset()

    def shutdown(self) -> None:
        """Leave in good order: together with all other tasks, where the cluster is configured for that (`shutdown_timeout_s`).

        Raises:
          DeadlineExceededError: some tasks did not shut down in time; this one has left all the same.
        """
        self._link.shutdown()

    def close(self, notify: bool = True) -> None:
        """Leave at once, and end the connection. Idempotent.

        Args:
          notify: whether to inform the keeper. If not, the keeper takes this task for lost.
        """
        self._link.close(notify)

    def end_waits(self, why: str) -> None:
        """End the waits of this client with CancelledError, before `close`: for an owner that has more to end than this client.

        Args:
          why: the event, as "the server of worker:1 was stopped".
        """
        self._link.end_waits(why)

    def __enter__(self) -> CoordinationClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        link = self.__dict__.get("_link")
        if link is not None and not link.closed:
            in_background("zmqdist-coordination-stop", link.close, False)

    def _identity(self) -> tuple[str, int, int]:
        if self._link.identity is None:
            raise FailedPreconditionError("this client is no task of the cluster: it has keys and task_states only")
        return self._link.identity

    def _request(self, method: str, *args: Any) -> Any:
        return self._link.request(method, *args, due=_due(LEADER_WAIT_S))


class KeyValues:
    """A key-value store that all tasks share. A key is a str, a path if it has slashes; a value is anything that RPC carries.

    The keeper holds the values in memory, and they are lost with it. A value that is read is a snapshot. Only `get` waits for another task.
    """

    def __init__(self, link: KeeperLink) -> None:
        self._link = link

    def set(self, key: str, value: Any, overwrite: bool = False) -> None:
        """Set the value of a key.

        Raises:
          AlreadyExistsError: the key has a value, which stays; not raised with `overwrite`.
          ResourceExhaustedError: the store has KEYS_MAX keys or KEYS_BYTES_MAX bytes.
        """
        self._request("kv_set", key, value, overwrite)

    def get(self, key: str, timeout: float | None = None) -> Any:
        """Return the value of a key; wait until a task sets it.

        Args:
          timeout: seconds; None: no limit, and the log reports the wait at intervals.

        Raises:
          DeadlineExceededError: no task set the key in time.
        """
        due = _due(timeout)
        if self._link.identity is not None:
            self._link.ready(due)
        left = None if timeout is None else max(0.0, due - time.monotonic())
        return self._link.request(
            "kv_get", key, left, due=due, wait=LoggedWait(f"for key {key!r}") if timeout is None else None
        )

    def try_get(self, key: str) -> Any:
        """Return the value of a key. Raises NotFoundError where it has none."""
        return self._request("kv_try_get", key)

    def delete(self, key: str) -> int:
        """Remove a key and all keys below it ("a" also removes "a/b"). Returns how many keys were removed."""
        return int(self._request("kv_delete", key))

    def list(self, prefix: str = "") -> dict[str, Any]:
        """Return all keys below a directory, in order, with their values: "a" gives "a/b" and "a/b/c", and neither "a" nor "ab"."""
        return dict(self._request("kv_list", prefix))

    def increment(self, key: str, by: int = 1) -> int:
        """Add to a whole number, which starts at 0, and return the sum. No two callers get the same sum.

        Raises:
          FailedPreconditionError: the value is no whole number.
        """
        return int(self._request("kv_increment", key, by))

    def _request(self, method: str, *args: Any) -> Any:
        return self._link.request(method, *args, due=_due(LEADER_WAIT_S))


def task_of(name: TaskName) -> Task:
    """Return "worker:1", ("worker", 1) or "/job:worker/replica:0/task:1" as a Task. Raises InvalidArgumentError."""
    if isinstance(name, str) and name.startswith("/"):
        try:
            device = Device.parse(name)
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from None
        job, index = device.job, device.task
    elif isinstance(name, str):
        job, _, digits = name.rpartition(":")
        index = int(digits) if digits.isdecimal() else None
    else:
        job, index = name if isinstance(name, tuple | list) and len(name) == 2 else (None, None)
    if not isinstance(job, str) or not job or type(index) is not int or index < 0:
        raise InvalidArgumentError(f'{name!r} is no task: wanted one like "worker:1"')
    return job, index


def _tasks_of(names: Iterable[TaskName] | None) -> list[Task] | None:
    if names is None:
        return None
    if isinstance(names, str | bytes) or not isinstance(names, Iterable):
        raise InvalidArgumentError(f'{names!r} is no list of tasks: wanted one like ["worker:0", "worker:1"]')
    return [task_of(name) for name in names]


def _due(timeout: float | None) -> float:
    """Return when a time-out is over, on `time.monotonic`. Accepts NumPy's numbers."""
    if timeout is None:
        return inf
    seconds = number(timeout)
    if not 0 <= seconds < inf:
        text = f"a time-out is a number of seconds, 0 or more, or None, not {timeout!r}"
        raise InvalidArgumentError(text)
    return time.monotonic() + min(seconds, TIMEOUT_MAX)


def number(value: Any) -> float:
    """Return a number, also one of NumPy's, as a float; NaN for anything else, or for a number too large for a float."""
    try:
        return nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return nan
