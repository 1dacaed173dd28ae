"""The keeper's side of coordination: barriers, keys and the states of tasks, behind the port of a
leader's server or a dispatcher.

Rules
    All code runs in the loop, and no thread waits, because an RPC call that gets no immediate reply
    is a ticket in a machine. A caller names its task and its incarnation. The connection over which
    a task has last registered or polled stands for the incarnation: when this connection ends, the
    task is away. If the task's process ran on this host and ends, the task is lost before its grace
    is over. Callers must have the role `worker` or `submit`. This module validates the arguments
    before it passes them to a machine.

Methods (each name follows "coordination."; `identity` is (job, index, incarnation); times are seconds, and None means no limit)
    register(identity, pid)                 -> (number of errors so far, incarnation of the keeper's process)
    poll(identity, after)                   -> the errors with numbers above `after`, or [] after a while; each poll is a sign of life
    beat(identity)                          -> None
    reset(job, index), leave(identity, together) -> None
    report_error(identity, code, message)   -> None
    barrier(identity, name, counter, timeout, tasks)  -> (code, message, counter), as
    barriers_machine.py explains
    cancel_barrier(identity, name, counter) -> None
    missing(name)                           -> the tasks for which a barrier waits
    wait_for_all(identity, devices, timeout) -> the devices of all tasks
    alive(identity, tasks)                  -> those of `tasks` that are alive
    states(jobs)                            -> (job, index, state, incarnation, code, message) of each task
    kv_set(key, value, overwrite), kv_get(key, timeout), kv_try_get(key), kv_delete(key), kv_list(prefix), kv_increment(key, by)

Not here: the decisions (machine.py, barriers_machine.py, keys_machine.py).

Also here: the records that `snapshot` returns at the keeper and at a task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Final

import numpy as np

from zmqdist.coordination.arguments import (
    invalid_argument,
    list_argument,
    number_argument,
    seconds_argument,
    text_argument,
)
from zmqdist.coordination.barriers_machine import RoundOutcome
from zmqdist.coordination.keys_machine import Keys
from zmqdist.coordination.machine import Coordination, CoordinationConfig, TaskError, TaskWelcome
from zmqdist.coordination.replies import Effect, ReplyValue, Task, task_name
from zmqdist.errors import OK, UNAUTHENTICATED, InvalidArgumentError, UnavailableError, from_code
from zmqdist.rpc.service import PendingCall, RpcService
from zmqdist.transport.loop import Loop
from zmqdist.transport.process_ends import watch_process_end
from zmqdist.transport.router import Peer, Router
from zmqdist.wire.hello import host_identity


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task, as the keeper knows it.

    Attributes:
      state: "missing", "joining", "up", "error" or "left".
      incarnation: the incarnation of the task's current or last process; 0 before the first
        process.
      away: whether the task's connection has ended, and the task may still reconnect within its
        grace.
      heard_at: when the task's last sign of life arrived, by the keeper's clock (`time.monotonic`).
    """

    state: str
    incarnation: int
    away: bool
    heard_at: float


@dataclass(frozen=True, slots=True)
class KeeperSnapshot:
    """The keeper's side of coordination.

    Attributes:
      tasks: the tasks by name, in the order of the cluster.
      barriers: the barriers at which tasks wait, by name, each with the tasks that have not called
        the barrier yet.
      keys: the number of keys that have a value.
      key_waits: the number of requests that wait for the value of a key.
      requests: the number of requests that wait for a reply, including the poll for errors of each
        registered task.
    """

    tasks: Mapping[str, TaskRow]
    barriers: Mapping[str, tuple[str, ...]]
    keys: int
    key_waits: int
    requests: int


@dataclass(frozen=True, slots=True)
class CoordinationSnapshot:
    """A task's side of coordination.

    Attributes:
      state: "looking" (the keeper has never replied), "up" (registered), "lost" (the keeper has
        gone), "refused" (the keeper refuses this task), "resetting" or "ended". A client that is
        not a task is in state "looking" until it is closed.
      requests: the number of requests that wait for the keeper's reply, not counting the poll for
        errors.
      barriers: the names of barriers for which this task has counted rounds, the least recently
        used name first.
    """

    state: str
    requests: int
    barriers: tuple[str, ...]


PREFIX: Final = "coordination."
ROLES: Final = frozenset({"worker", "submit"})

BEATS: Final = 4
"""The number of signs of life that a task sends within `heartbeat_timeout_s`, so that three may be
late."""

DEVICES_MAX: Final = 1024
"""The largest number of devices that one task may name."""

MESSAGE_CHARS_MAX: Final = 10_000
"""The largest number of characters in the text of a reported error. The text is bounded, because
every task receives it."""

_INT64: Final = 2**63


class CoordinationService:
    """The RPC methods of a keeper; the module's docstring lists them."""

    def __init__(
        self,
        service: RpcService,
        router: Router,
        loop: Loop,
        incarnation: int,
        tasks: Iterable[Task] | None,
        config: CoordinationConfig | None = None,
    ) -> None:
        """Register the RPC methods at `service`, which must not be attached to a router yet.

        Args:
          incarnation: the incarnation of the keeper's process. By it tasks notice that a restarted
            keeper has lost its barriers and keys.
          tasks: the tasks of the cluster, in its order. None means that every task that registers
            belongs to the cluster.
        """
        config = config or CoordinationConfig()
        self._tasks = Coordination(tasks, config)
        self._keys = Keys()
        self._beat_s = config.heartbeat_timeout_s / BEATS
        self._loop = loop
        self._incarnation = incarnation
        self._due = inf
        self._stopped = False
        self._connections: dict[Task, tuple[Peer, int, int]] = {}
        """The last connection of each task, with the task's incarnation and the pid of its process.
        The pid is 0 if it is unknown."""
        router.on_gone.append(self._peer_gone)
        for name, fn in self._methods().items():
            service.register_later(PREFIX + name, fn, roles=ROLES)

    def stop(self, why: str) -> None:
        """End all waiting requests with CANCELLED. Any thread may call this before the loop
        ends.
        """
        self._loop.run(self._stop, why)

    def snapshot(self) -> KeeperSnapshot:
        """Return an immutable record of the keeper's present state. Any thread may call this while
        the loop runs."""
        return self._loop.run(self._snapshot)

    def _snapshot(self) -> KeeperSnapshot:
        tasks, keys = self._tasks, self._keys
        rows = {
            task_name(record.task): TaskRow(
                record.state, record.incarnation, record.away_until < inf, record.heard_at
            )
            for record in tasks.states()
        }
        barriers = {
            name: tuple(map(task_name, missing)) for name, missing in tasks.open_barriers.items()
        }
        return KeeperSnapshot(rows, barriers, len(keys), keys.waiting, tasks.waiting + keys.waiting)

    def _methods(self) -> dict[str, Callable[..., None]]:
        return {
            "register": self._register,
            "poll": self._poll,
            "beat": self._beat,
            "reset": lambda call, job, index: self._perform(
                self._tasks.reset(call, _task((job, index)), self._now())
            ),
            "leave": self._leave,
            "report_error": self._report_error,
            "barrier": self._barrier,
            "cancel_barrier": self._cancel_barrier,
            "missing": lambda call, name: call.reply(
                self._tasks.missing(text_argument(name, "the name of a barrier"))
            ),
            "wait_for_all": self._wait_for_all,
            "alive": self._alive,
            "states": self._states,
            "kv_set": lambda call, key, value, overwrite: self._perform(
                self._keys.put(
                    call, text_argument(key, "a key"), value, _size(value), overwrite is True
                )
            ),
            "kv_get": self._kv_get,
            "kv_try_get": lambda call, key: self._perform(
                self._keys.try_get(call, text_argument(key, "a key"))
            ),
            "kv_delete": lambda call, key: self._perform(
                self._keys.delete(call, text_argument(key, "a key"))
            ),
            "kv_list": lambda call, prefix: self._perform(
                self._keys.below(call, text_argument(prefix, "a key", least=0))
            ),
            "kv_increment": self._kv_increment,
        }

    # -- tasks -------------------------------------------------------------------------------------

    def _register(self, call: PendingCall, identity: Any, pid: int) -> None:
        task, incarnation = _identity(identity)
        if type(pid) is not int or not 0 <= pid < 2**32:
            raise invalid_argument("a pid", pid)
        self._drop_with_caller(call)
        self._perform(self._tasks.registered(call, task, incarnation, self._now()))
        self._bind_connection(call.peer, task, incarnation, pid)

    def _poll(self, call: PendingCall, identity: Any, after: int) -> None:
        task, incarnation = _identity(identity)
        number_argument(after, "the number of an error")
        self._drop_with_caller(call)
        now = self._now()
        # a reply without news after a beat makes the task poll again, which is its sign of life
        self._perform(self._tasks.polled(call, task, incarnation, after, now + self._beat_s, now))
        self._bind_connection(call.peer, task, incarnation)

    def _beat(self, call: PendingCall, identity: Any) -> None:
        task, incarnation = _identity(identity)
        self._perform(self._tasks.beaten(call, task, incarnation, self._now()))

    def _leave(self, call: PendingCall, identity: Any, together: bool) -> None:
        self._drop_with_caller(call)
        self._perform(self._tasks.left(call, *_identity(identity), together is True, self._now()))

    def _report_error(self, call: PendingCall, identity: Any, code: int, message: str) -> None:
        if type(code) is not int or not OK < code <= UNAUTHENTICATED:
            raise invalid_argument("the code of an error", code)
        if type(message) is not str:
            raise invalid_argument("the text of an error", message)
        self._perform(
            self._tasks.reported(
                call, *_identity(identity), code, message[:MESSAGE_CHARS_MAX], self._now()
            )
        )

    def _states(self, call: PendingCall, jobs: Any) -> None:
        wanted_jobs = (
            None
            if jobs is None
            else [text_argument(job, "a job") for job in list_argument(jobs, "a list of jobs")]
        )
        call.reply(
            [
                (*record.task, record.state, record.incarnation, record.code, record.message)
                for record in self._tasks.states(wanted_jobs)
            ]
        )

    def _alive(self, call: PendingCall, identity: Any, tasks: Any) -> None:
        self._drop_with_caller(call)
        self._perform(
            self._tasks.alive_requested(call, *_identity(identity), _tasks(tasks), self._now())
        )

    # -- barriers ----------------------------------------------------------------------------------

    def _barrier(
        self,
        call: PendingCall,
        identity: Any,
        name: str,
        counter: int,
        timeout: float | None,
        tasks: Any,
    ) -> None:
        task, incarnation = _identity(identity)
        _barrier_name(name)
        number_argument(counter, "the number of a round")
        members = _tasks(tasks)
        now = self._now()
        due = now + seconds_argument(timeout)
        self._drop_with_caller(call)
        self._perform(
            self._tasks.barrier(call, task, incarnation, name, counter, members, due, now)
        )

    def _cancel_barrier(self, call: PendingCall, identity: Any, name: str, counter: int) -> None:
        task, _ = _identity(identity)
        number_argument(counter, "the number of a round")
        self._perform(
            self._tasks.barrier_cancelled(call, _barrier_name(name), counter, task, self._now())
        )

    def _wait_for_all(
        self, call: PendingCall, identity: Any, devices: Any, timeout: float | None
    ) -> None:
        names = [
            text_argument(device, "a device")
            for device in list_argument(devices, "a list of devices")
        ]
        if len(names) > DEVICES_MAX:
            raise InvalidArgumentError(f"wanted at most {DEVICES_MAX} devices, not {len(names)}")
        now = self._now()
        due = now + seconds_argument(timeout)
        self._drop_with_caller(call)
        self._perform(self._tasks.waited_for_all(call, *_identity(identity), names, due, now))

    # -- keys --------------------------------------------------------------------------------------

    def _kv_get(self, call: PendingCall, key: str, timeout: float | None) -> None:
        due = self._now() + seconds_argument(timeout)
        self._drop_with_caller(call)
        self._perform(self._keys.get(call, text_argument(key, "a key"), due))

    def _kv_increment(self, call: PendingCall, key: str, by: int) -> None:
        if type(by) is not int or not -_INT64 <= by < _INT64:
            raise invalid_argument("a whole number of 64 bits", by)
        self._perform(self._keys.increment(call, text_argument(key, "a key"), by, _size(by)))

    # -- the runtime -------------------------------------------------------------------------------

    def _now(self) -> float:
        if self._stopped:
            raise UnavailableError("the service of barriers and keys has stopped here")
        return self._loop.now()

    def _drop_with_caller(self, call: PendingCall) -> None:
        """Have the machines drop this RPC call if the caller cancels the call, or disconnects,
        before the reply."""
        call.on_dropped(partial(self._dropped, call))

    def _dropped(self, call: PendingCall) -> None:
        self._keys.dropped(call)
        self._perform(self._tasks.dropped(call))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            call = effect.ticket
            assert isinstance(call, PendingCall)
            if isinstance(effect, ReplyValue):
                call.reply(self._as_plain(effect.value))
            else:
                call.fail(from_code(effect.code, effect.message))
        due = min(self._tasks.deadline, self._keys.deadline)
        # most requests do not move the earliest deadline
        if due != self._due:
            self._due = due
            self._loop.set_timer(self, None if due == inf else due, self._tick)

    def _as_plain(self, value: Any) -> Any:
        """Convert a reply of a machine to plain tuples and lists, which RPC can send."""
        if isinstance(value, TaskWelcome):
            return value.errors_count, self._incarnation
        if isinstance(value, RoundOutcome):
            return tuple(value)
        if type(value) is list:
            return [tuple(item) if isinstance(item, TaskError) else item for item in value]
        return value

    def _tick(self) -> None:
        self._due = inf
        now = self._loop.now()
        self._perform(self._tasks.ticked(now) + self._keys.ticked(now))

    def _stop(self, why: str) -> None:
        if not self._stopped:
            self._perform(self._tasks.stopped(why, self._loop.now()) + self._keys.stopped(why))
            # a stopped keeper frees its values
            self._stopped, self._keys = True, Keys()

    def _bind_connection(self, peer: Peer, task: Task, incarnation: int, pid: int = 0) -> None:
        """Record that this connection stands for an incarnation of a task, if this incarnation is
        registered."""
        if not self._tasks.is_registered(task, incarnation):
            return
        previous = self._connections.get(task)
        if previous is not None and previous[1] == incarnation:
            # a poll does not name the pid
            pid = pid or previous[2]
        if previous is None or previous[0] is not peer or previous[1:] != (incarnation, pid):
            self._connections[task] = peer, incarnation, pid

    def _peer_gone(self, peer: Peer) -> None:
        for task, (connection, incarnation, pid) in list(self._connections.items()):
            if connection is not peer:
                # this task uses another connection than the one that has ended
                continue
            del self._connections[task]
            self._perform(self._tasks.away(task, incarnation, self._loop.now()))
            # only on this host can the keeper see that a process has ended
            if pid and peer.hello is not None and peer.hello.host == host_identity():
                watch_process_end(
                    self._loop,
                    (self, task),
                    pid,
                    partial(self._is_missed, task, incarnation),
                    partial(self._note_process_end, task, incarnation, pid),
                )

    def _is_missed(self, task: Task, incarnation: int) -> bool:
        return task not in self._connections and self._tasks.is_away(task, incarnation)

    def _note_process_end(self, task: Task, incarnation: int, pid: int) -> None:
        why = f"its process (pid {pid}) has ended"
        self._perform(self._tasks.lost(task, incarnation, why, self._loop.now()))


# -- arguments of callers --------------------------------------------------------------------------


def _barrier_name(text: Any) -> str:
    name = text_argument(text, "the name of a barrier")
    if name.startswith("zmqdist."):
        raise invalid_argument("the name of a barrier (zmqdist.* is reserved)", name)
    return name


def _task(value: Any) -> Task:
    if type(value) not in (list, tuple) or len(value) != 2:
        raise invalid_argument("a task: (job, index)", value)
    return text_argument(value[0], "a job"), number_argument(value[1], "the index of a task")


def _tasks(value: Any) -> list[Task] | None:
    return (
        None if value is None else [_task(item) for item in list_argument(value, "a list of tasks")]
    )


def _identity(value: Any) -> tuple[Task, int]:
    if type(value) not in (list, tuple) or len(value) != 3:
        raise invalid_argument("a task and its incarnation: (job, index, incarnation)", value)
    return _task(value[:2]), number_argument(value[2], "an incarnation")


def _size(value: Any) -> int:
    """Return approximately how many bytes a value occupies in the store."""
    if isinstance(value, np.ndarray | np.generic):
        return int(value.nbytes) + 100
    if isinstance(value, str | bytes):
        return len(value) + 50
    if isinstance(value, dict):
        return 100 + sum(_size(key) + _size(item) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return 100 + sum(map(_size, value))
    return 50
