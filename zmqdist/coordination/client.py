"""A task's side of coordination: barriers with the other tasks, keys, the states of tasks and their
errors.

Not here: the connection and the registration (link.py), the keeper (service.py), and its decisions
(machine.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, NamedTuple, TypeAlias

from zmqdist.background import in_background
from zmqdist.clock import deadline, left
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
"""The name of a task, as users write it: "worker:1", ("worker", 1) or "/job:worker/task:1"."""


class TaskState(NamedTuple):
    """The state of a task, as the keeper knows it.

    Attributes:
      state: "missing" (has not registered yet), "joining", "up", "error" or "left".
      incarnation: the incarnation of the task's current or last process; 0 before the first
        process.
      code, message: the code and text of the task's error; 0 and "" if the task is not in error.
    """

    state: str
    incarnation: int
    code: int
    message: str


class CoordinationClient:
    """A client of the keeper: barriers, keys and the states of tasks. It belongs to one task or,
    with `task=None`, to a process that is no task. Any thread may call the methods. Close the
    client at the end.

    The client of a task registers the task in the background and keeps it registered. The other
    tasks are notified when this task is lost, unless its job may recover. Until the keeper appears
    for the first time, each request waits for the keeper, up to its `timeout`, or LEADER_WAIT_S if
    it has no such argument.

    While the keeper is gone, every request of a task's client raises UnavailableError, but a new
    request of a client without a task waits for the next keeper. If the keeper refuses this task,
    requests raise AbortedError or another OpError. Wrong arguments raise InvalidArgumentError.

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
        """Connect in the background. Does not block.

        Args:
          address: "host:port" of the keeper, which is the leader of a cluster or a dispatcher.
          task: the task that this process is. None means that the process is no task, so that only
            keys, `task_states` and `check_alive` can be used.
          incarnation: the incarnation of this process; 0 draws a number.
          credentials: the places of the keys and the token; None means the default places.
          keeper: the name of the keeper in error texts.
        """
        security = (credentials or Credentials()).client(address.removeprefix("zmq://"), "worker")
        identity = None if task is None else (*task_of(task), incarnation or new_incarnation())
        name = "" if identity is None else task_name(identity[:2])
        self._link = KeeperLink(
            lambda: ZmqClient(address, name, security=security), identity, keeper
        )
        self.kv = KeyValues(self._link)

    # -- barriers ----------------------------------------------------------------------------------

    def barrier(
        self, name: str, timeout: float | None = None, tasks: Iterable[TaskName] | None = None
    ) -> None:
        """Wait until all tasks have called the barrier of this name. A barrier can be used any
        number of times.

        If a use of the barrier (a round) fails, all waiting tasks get the same error, and tasks
        that call later get this error at once.

        Args:
          name: any text that does not begin with "zmqdist.", of up to KEY_CHARS_MAX characters.
          timeout: seconds. The first time-out that a caller passes in a round holds for all
            callers. With None the wait has no limit, and the log reports at intervals which tasks
            are missing.
          tasks: the tasks that must call, all with the same list. None means all tasks of the
            cluster except evaluators and dispatchers. Where the keeper is a dispatcher, the list is
            required.

        Raises:
          DeadlineExceededError: some tasks did not call in time; the text names them.
          InternalError: a task of the barrier is in error, was lost, has left, or was restarted and
            counts rounds from 0 again.
          InvalidArgumentError: the callers pass different lists of tasks, a caller is not in the
            list, or the list is required.
          FailedPreconditionError: this process is no task, or its job takes no part in barriers.
          CancelledError: a task cancelled the round, or this task has called the barrier again from
            another thread.
        """
        identity, due, members = self._identity(), _due(timeout), _tasks_of(tasks)
        self._link.ready(due)
        left_s = _left(due)
        wait = LoggedWait(f"at barrier {name!r}", name) if due == inf else None
        code, message, counter = self._link.request(
            "barrier", identity, name, self._link.counter(name), left_s, members, due=due, wait=wait
        )
        self._link.ended(name, counter)
        if code:
            self._link.unless_ended(code)
            raise from_code(code, message)

    def cancel_barrier(self, name: str) -> None:
        """End the current round of a barrier, with CancelledError for all waiting tasks.

        Raises:
          FailedPreconditionError: no task waits in this round, or the round is over.
        """
        self._request("cancel_barrier", self._identity(), name, self._link.counter(name))

    def wait_for_all(self, devices: Iterable[str] = (), timeout: float | None = None) -> list[str]:
        """Wait until all tasks of the cluster have called this method. Use it at the start, to know
        that the cluster is complete.

        Args:
          devices: names of this task's devices, or any other texts for the other tasks.

        Returns:
          The texts of all tasks, in the order of the tasks.

        Raises the errors of `barrier`.
        """
        identity, due = self._identity(), _due(timeout)
        self._link.ready(due)
        left_s = _left(due)
        wait = LoggedWait("for all tasks", "zmqdist.all") if due == inf else None
        all_devices = self._link.request(
            "wait_for_all", identity, list(devices), left_s, due=due, wait=wait
        )
        return list(all_devices)

    def alive_tasks(self, tasks: Iterable[TaskName] | None = None) -> list[str]:
        """Return the names of the tasks in `tasks` that are alive. None means all tasks of the
        cluster.

        This is a collective operation: each of `tasks` that is alive must call this method, with
        the same set of tasks. All callers get the same result, as soon as the last task that is
        alive has called.

        Raises:
          InvalidArgumentError: a task is not in the cluster, or this task is not among `tasks`.
        """
        return [
            task_name(task) for task in self._request("alive", self._identity(), _tasks_of(tasks))
        ]

    # -- states of tasks ---------------------------------------------------------------------------

    def task_states(self, jobs: Iterable[str] | None = None) -> dict[str, TaskState]:
        """Return the state of every task, or of the tasks of some jobs, by name and in the order of
        the cluster. In a cluster of servers, evaluators and dispatchers are left out.
        """
        rows = self._request("states", None if jobs is None else list(jobs))
        return {task_name((job, index)): TaskState(*rest) for job, index, *rest in rows}

    def check_alive(self, task: TaskName) -> bool:
        """Return whether a task is registered, and is neither lost nor in error.

        Raises:
          InvalidArgumentError: `task_states` does not have the task.
        """
        states = self.task_states()
        name = task_name(task_of(task))
        if name not in states:
            raise InvalidArgumentError(
                f"{name} is not in the cluster, which has {', '.join(states) or 'none'}"
            )
        return states[name].state == UP

    def report_error(self, code: int, message: str) -> None:
        """Report to the keeper that this task has failed. The keeper ends barriers that wait for
        this task. It also notifies the other tasks, unless the job of this task may recover.

        Args:
          code: a code of zmqdist.errors, but not OK. `reset` clears the error.
        """
        self._request("report_error", self._identity(), code, message)

    def on_error(self, fn: OnError) -> None:
        """Have `fn(task, error)` called when a task of the cluster fails, with the name of the task
        and an OpError.

        Callbacks run one after the other, in a thread of their own. The failure of another task is
        not reported if its job may recover.
        """
        self._link.callbacks.append(fn)

    @property
    def errors(self) -> list[tuple[str, OpError]]:
        """The latest errors that the keeper has reported to this task, oldest first, as (name of
        the failed task, error)."""
        return list(self._link.errors)

    def snapshot(self) -> CoordinationSnapshot:
        """Return an immutable record of the present state: whether this task is registered, and its
        waiting requests. Sends no message."""
        return self._link.snapshot()

    # -- registration and end ----------------------------------------------------------------------

    def register(self, timeout: float | None = None) -> None:
        """Wait until this task is registered. The client registers the task in the background even
        if this is not called.

        Raises:
          DeadlineExceededError: the keeper did not appear in time.
          AbortedError: this task is in error, or another incarnation of this task is registered.
            `reset` helps in both cases.
        """
        self._identity()
        self._link.ready(_due(timeout))

    def beat(self) -> None:
        """Send a sign of life now. No program has to call this, because the client sends signs of
        life in the background.

        Raises:
          OpError: this task is in error, and this is its error.
        """
        self._request("beat", self._identity())

    def reset(self) -> None:
        """Have the keeper forget the error or the earlier incarnation of this task, and register
        again.

        Raises:
          DeadlineExceededError: no keeper appeared within LEADER_WAIT_S.
        """
        self._identity()
        self._link.reset()

    def shutdown(self) -> None:
        """Leave the cluster in good order. If the cluster has a `shutdown_timeout_s`, wait until
        all other tasks shut down as well.

        Raises:
          DeadlineExceededError: some tasks did not shut down in time. This task has left
            nevertheless.
          InternalError: a task was lost, or left without waiting. This task has left nevertheless.
        """
        self._link.shutdown()

    def close(self, notify: bool = True) -> None:
        """Leave the cluster at once, and close the connection. Idempotent.

        Args:
          notify: whether to tell the keeper that this task leaves. If False, the keeper counts the
            task as lost.
        """
        self._link.close(notify)

    def end_waits(self, why: str) -> None:
        """End the waits of this client with CancelledError. Use it if the owner must end other
        waits, too, before it calls `close`.

        Args:
          why: the reason in the error text, such as "the server of worker:1 was stopped".
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
            raise FailedPreconditionError(
                "this client is no task of the cluster: it has keys and task_states only"
            )
        return self._link.identity

    def _request(self, method: str, *args: Any) -> Any:
        return self._link.request(method, *args, due=_due(LEADER_WAIT_S))


class KeyValues:
    """A key-value store that all tasks share. A key is a str of up to KEY_CHARS_MAX characters;
    with slashes it is a path. A value may be any value that RPC can send.

    The values are in the keeper's memory, and are lost when the keeper ends. A read returns a copy.
    Only `get` waits for another task.
    """

    def __init__(self, link: KeeperLink) -> None:
        self._link = link

    def set(self, key: str, value: Any, overwrite: bool = False) -> None:
        """Set the value of a key.

        Raises:
          AlreadyExistsError: the key has a value and `overwrite` is False. The value is not
            changed.
          ResourceExhaustedError: the store has KEYS_MAX keys already, or would have more than
            KEYS_BYTES_MAX bytes with this value.
        """
        self._request("kv_set", key, value, overwrite)

    def get(self, key: str, timeout: float | None = None) -> Any:
        """Return the value of a key. If the key has no value, wait until a task sets it.

        Args:
          timeout: seconds to wait. With None the wait has no limit, and the client logs at
            intervals that it waits.

        Raises:
          DeadlineExceededError: no task set the key in time.
        """
        due = _due(timeout)
        if self._link.identity is not None:
            self._link.ready(due)
        left_s = _left(due)
        return self._link.request(
            "kv_get",
            key,
            left_s,
            due=due,
            wait=LoggedWait(f"for key {key!r}") if due == inf else None,
        )

    def try_get(self, key: str) -> Any:
        """Return the value of a key. Raises NotFoundError if the key has no value."""
        return self._request("kv_try_get", key)

    def delete(self, key: str) -> int:
        """Remove a key and all keys below it ("a" also removes "a/b"). Return the number of removed
        keys."""
        return int(self._request("kv_delete", key))

    def list(self, prefix: str = "") -> dict[str, Any]:
        """Return all keys below a directory, in order, with their values. For "a" these include
        "a/b" and "a/b/c", but not "a" or "ab"."""
        return dict(self._request("kv_list", prefix))

    def increment(self, key: str, by: int = 1) -> int:
        """Add `by` to the whole number that is the value of a key, and return the sum. A key
        without a value counts as 0.

        The keeper adds atomically, so callers that all add 1 get different sums.

        Raises:
          FailedPreconditionError: the value of the key is not a whole number.
        """
        return int(self._request("kv_increment", key, by))

    def _request(self, method: str, *args: Any) -> Any:
        return self._link.request(method, *args, due=_due(LEADER_WAIT_S))


def task_of(name: TaskName) -> Task:
    """Convert "worker:1", ("worker", 1) or "/job:worker/replica:0/task:1" to a Task. Raises
    InvalidArgumentError for other values."""
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
        raise InvalidArgumentError(
            f'{names!r} is no list of tasks: wanted one like ["worker:0", "worker:1"]'
        )
    return [task_of(name) for name in names]


def _due(timeout: float | None) -> float:
    """Return the time at which a time-out is over, by the clock of `time.monotonic`; `inf` for
    None."""
    until = deadline(timeout)
    return inf if until is None else until


def _left(due: float) -> float | None:
    """Return the seconds until `due`; None for `inf`."""
    return None if due == inf else left(due)
