"""A task's end of coordination: barriers with the other tasks, keys, who is there, who has failed.

Not here: the connection and the registration (link.py), who keeps all this (service.py), what is decided (machine.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import inf, nan
from threading import TIMEOUT_MAX
from typing import Any, NamedTuple, TypeAlias

from zmqdist.background import in_background
from zmqdist.cluster.devices import Device
from zmqdist.coordination.answers import Task, named
from zmqdist.coordination.link import KeeperLink, LoggedWait, OnError
from zmqdist.coordination.machine import UP
from zmqdist.coordination.snapshot import CoordinationSnapshot
from zmqdist.errors import FailedPreconditionError, InvalidArgumentError, OpError, from_code
from zmqdist.limits import LEADER_WAIT_S
from zmqdist.rpc.client import ZmqClient, new_incarnation
from zmqdist.transport.credentials import Credentials

TaskName: TypeAlias = "str | tuple[str, int]"
""" "worker:1", ("worker", 1) or "/job:worker/task:1"."""


class TaskState(NamedTuple):
    """What is known of a task.

    Attributes:
      state: "missing" (has not registered yet), "joining", "up", "error" or "left".
      incarnation: of its present or last life; 0 before the first.
      code, message: of its error; 0 and "".
    """

    state: str
    incarnation: int
    code: int
    message: str


class CoordinationClient:
    """One task among those of a cluster, as far as they coordinate. From any thread; close it.

    It registers in the background, and stays registered; other tasks are told when it is lost. Questions wait for the keeper to
    appear for the first time, up to their time-outs (LEADER_WAIT_S where they have none).

    Every question raises UnavailableError while the keeper is gone (that of a client which is no task waits for the next one);
    AbortedError or another OpError when it does not take this task (any more); InvalidArgumentError for arguments that make no sense.

    Attributes:
      kv: the keys.
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
        """Connect, and wait for nothing.

        Args:
          address: "host:port" of the keeper: of a cluster's leader, or of a dispatcher.
          task: which task this is. None: none of them; then there are only keys and `task_states`.
          incarnation: of this life of the task; 0 draws one.
          credentials: where the secret is, if not in the usual place.
          keeper: the name of the keeper, for errors.
        """
        security = (credentials or Credentials()).client(address.removeprefix("zmq://"), "worker")
        identity = None if task is None else (*task_of(task), incarnation or new_incarnation())
        name = "" if identity is None else named(identity[:2])
        self._link = KeeperLink(lambda: ZmqClient(address, name, security=security), identity, keeper)
        self.kv = KeyValues(self._link)

    # -- together -------------------------------------------------------------------------------------------------------------

    def barrier(self, name: str, timeout: float | None = None, tasks: Iterable[TaskName] | None = None) -> None:
        """Wait until all tasks have called the barrier of this name. It can be used again and again.

        When it fails, it fails for all who wait with the same error, and at once for those who come later.

        Args:
          timeout: seconds; the first one that a caller gives counts for all. None: for ever, and the log says for whom it waits.
          tasks: for whom it is; all must say the same. None: all tasks of the cluster.

        Raises:
          DeadlineExceededError: not all came in time; the text names those who are missing.
          InternalError: a task that is waited for is in error, was lost or has left; or was started again and counts anew.
          InvalidArgumentError: the callers do not agree on `tasks`, or one is not among them.
          CancelledError: somebody cancelled it, or this task called it again from elsewhere.
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
        """End the present round of a barrier for all who wait, with CancelledError.

        Raises:
          FailedPreconditionError: nobody waits there, or it is over.
        """
        self._request("cancel_barrier", self._identity(), name, self._link.counter(name))

    def wait_for_all(self, devices: Iterable[str] = (), timeout: float | None = None) -> list[str]:
        """Wait until all tasks of the cluster wait here, as a first sign that it is complete.

        Args:
          devices: what this task has to tell the others.

        Returns:
          What all have told, in the order of the tasks.

        Raises: as `barrier`.
        """
        identity, due = self._identity(), _due(timeout)
        self._link.ready(due)
        left = None if timeout is None else max(0.0, due - time.monotonic())
        wait = LoggedWait("for all tasks", "zmqdist.all") if timeout is None else None
        all_devices = self._link.request("wait_for_all", identity, list(devices), left, due=due, wait=wait)
        return list(all_devices)

    def alive_tasks(self, tasks: Iterable[TaskName] | None = None) -> list[str]:
        """Which of these tasks are alive. All of them that are must ask the same, and get the same answer when the last one has."""
        return [named(task) for task in self._request("alive", self._identity(), _tasks_of(tasks))]

    # -- who is there -----------------------------------------------------------------------------------------------------------

    def task_states(self, jobs: Iterable[str] | None = None) -> dict[str, TaskState]:
        """What is known of all tasks, or of those of some jobs, by name and in the order of the cluster."""
        rows = self._request("states", None if jobs is None else list(jobs))
        return {named((job, index)): TaskState(*rest) for job, index, *rest in rows}

    def check_alive(self, task: TaskName) -> bool:
        """Whether a task is registered and neither lost nor in error.

        Raises:
          InvalidArgumentError: the cluster has no such task.
        """
        states = self.task_states()
        name = named(task_of(task))
        if name not in states:
            raise InvalidArgumentError(f"{name} is not in the cluster, which has {', '.join(states) or 'none'}")
        return states[name].state == UP

    def report_error(self, code: int, message: str) -> None:
        """This task has failed: tell the others, and end barriers that wait for it. `reset` makes it whole again.

        Args:
          code: one of zmqdist.errors, not OK.
        """
        self._request("report_error", self._identity(), code, message)

    def on_error(self, fn: OnError) -> None:
        """Have `fn(task, error)` called when a task of the cluster fails: with its name and an OpError, in a thread for such calls."""
        self._link.callbacks.append(fn)

    @property
    def errors(self) -> list[tuple[str, OpError]]:
        """The last errors of tasks that this one was told, oldest first: (name of the task, error)."""
        return list(self._link.errors)

    def snapshot(self) -> CoordinationSnapshot:
        """An immutable record of now: whether this task is registered, what it waits for. Asks nobody."""
        return self._link.snapshot()

    # -- life -------------------------------------------------------------------------------------------------------------------

    def register(self, timeout: float | None = None) -> None:
        """Wait until this task is registered, which happens by itself.

        Raises:
          DeadlineExceededError: the keeper did not appear in time.
          AbortedError: this task is in error, or another life of it is registered: see `reset`.
        """
        self._identity()
        self._link.ready(_due(timeout))

    def beat(self) -> None:
        """Give a sign of life now. Nobody has to: the client does so by itself.

        Raises:
          OpError: this task's own error, if it is in error.
        """
        self._request("beat", self._identity())

    def reset(self) -> None:
        """Have the keeper forget that this task is in error, or was there in another life, and register again.

        Raises:
          DeadlineExceededError: there was no keeper within LEADER_WAIT_S.
        """
        self._identity()
        self._link.reset()

    def shutdown(self) -> None:
        """Leave in good order: with all others, where the cluster is configured so (`shutdown_timeout_s`).

        Raises:
          DeadlineExceededError: the others did not come in time; this task has left all the same.
        """
        self._link.shutdown()

    def close(self, say_so: bool = True) -> None:
        """Leave at once, and end the connection. Idempotent.

        Args:
          say_so: False: do not tell the keeper, which then takes this task for lost.
        """
        self._link.close(say_so)

    def end_waits(self, why: str) -> None:
        """End what waits here, with CancelledError, before `close`: for those who have more to end than this client.

        Args:
          why: what has happened, as "the server of worker:1 was stopped".
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
    """Values by key, which all tasks share. A key is a str, a path with slashes if you like; a value is anything that RPC carries.

    They live with the keeper, and as long as it. What is got is a snapshot. No question but `get` waits for another task.
    """

    def __init__(self, link: KeeperLink) -> None:
        self._link = link

    def set(self, key: str, value: Any, overwrite: bool = False) -> None:
        """Give a key its value.

        Raises:
          AlreadyExistsError: it has one, and keeps it; unless `overwrite`.
          ResourceExhaustedError: KEYS_MAX or KEYS_BYTES_MAX is reached.
        """
        self._request("kv_set", key, value, overwrite)

    def get(self, key: str, timeout: float | None = None) -> Any:
        """The value of a key; waits until somebody has set it.

        Args:
          timeout: seconds; None: for ever, and the log says so.

        Raises:
          DeadlineExceededError: nobody set it in time.
        """
        due = _due(timeout)
        if self._link.identity is not None:
            self._link.ready(due)
        left = None if timeout is None else max(0.0, due - time.monotonic())
        return self._link.request(
            "kv_get", key, left, due=due, wait=LoggedWait(f"for key {key!r}") if timeout is None else None
        )

    def try_get(self, key: str) -> Any:
        """The value of a key. Raises NotFoundError where it has none."""
        return self._request("kv_try_get", key)

    def delete(self, key: str) -> int:
        """Remove a key, and all below it ("a" also removes "a/b"). Returns how many there were."""
        return int(self._request("kv_delete", key))

    def list(self, prefix: str = "") -> dict[str, Any]:
        """All that is below a directory, by whole key, in order: "a" gives "a/b" and "a/b/c", and neither "a" nor "ab"."""
        return dict(self._request("kv_list", prefix))

    def increment(self, key: str, by: int = 1) -> int:
        """Add to a whole number, 0 where there is none, and return the sum. No two callers get the same one.

        Raises:
          FailedPreconditionError: the value is no whole number.
        """
        return int(self._request("kv_increment", key, by))

    def _request(self, method: str, *args: Any) -> Any:
        return self._link.request(method, *args, due=_due(LEADER_WAIT_S))


def task_of(name: TaskName) -> Task:
    """ "worker:1", ("worker", 1) or "/job:worker/replica:0/task:1" as a Task. Raises InvalidArgumentError."""
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
    """When a time-out is over; numbers of NumPy will do, too."""
    if timeout is None:
        return inf
    seconds = number(timeout)
    if not 0 <= seconds < inf:
        text = f"a time-out is a number of seconds, 0 or more, or None, not {timeout!r}"
        raise InvalidArgumentError(text)
    return time.monotonic() + min(seconds, TIMEOUT_MAX)


def number(value: Any) -> float:
    """A number as people give it, one of NumPy's too; NaN for what is none, or too large for a float."""
    try:
        return nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return nan
