"""The data-service side of a worker. It carries out the dispatcher's assignments, and passes the
requests of readers to the tasks.

Rules
    The machine (tasks_machine.py) decides which tasks the worker has. Tasks run in threads of the
    worker's process (`TaskThreads`), or in processes of their own (task_process.py). With
    processes, no user code runs in the worker's process. Such a process has a `TaskThreads` that
    runs only its tasks, mostly one. A task opens its pipeline when the first reader sends a
    request. A task that has a process and serves requests in order of arrival opens its pipeline
    earlier, when the first reader connects.

    Pipelines run in threads of their own. Everything else runs in the loop thread, except for
    methods that say so.

Methods (each name has the prefix "zmqdist.data.")
    elements(state, task, demand, compression)   -> (kind, batch, tag); the kinds are in reader/delivery.py
    profile()                                    -> {number of a task: figures of the task}

Not here: how each kind of task computes elements and distributes them
({first_come,rounds,shared,portions}_task.py), snapshots (../snapshots).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from zmqdist.data.service.snapshots.worker import AGAIN_S, SnapshotWorker, report_until_replied
from zmqdist.data.service.worker.tasks_machine import (
    BeginTask,
    DropTask,
    GiveBackPositions,
    RequestWork,
    RequestWorkLater,
    WorkerTask,
    WorkerTasks,
    WorkerTasksEffect,
)
from zmqdist.errors import OpError, UnavailableError
from zmqdist.limits import SNAPSHOT_CHUNK_BYTES_MAX, TRAINER_CACHE_BYTES
from zmqdist.rpc.internal_client import LoopClient
from zmqdist.rpc.service import PendingCall, RpcService
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.endpoint import with_key
from zmqdist.transport.loop import Loop
from zmqdist.transport.security import NONE, ServerSecurity

if TYPE_CHECKING:
    from zmqdist.data.service.snapshots.writer import SnapshotTaskProgress

log = logging.getLogger("zmqdist.data")

PROFILE: Final = "zmqdist.data.profile"

REPORT_S: Final = 5.0
"""Seconds between two reports of figures by a worker with running tasks."""

FLUSH_S: Final = 0.1
"""Seconds that a stopping worker waits before each check whether its last replies have left the
process."""

READERS: Final = frozenset({"submit", "worker"})


@dataclass(frozen=True, slots=True)
class WorkerDataSnapshot:
    """The work of a worker for the data service at one moment.

    Attributes:
      tasks: number of tasks that the dispatcher has assigned to the worker and that have not ended.
      writing: number of streams of distributed snapshots that the worker is writing.
      streams: the progress of these streams, and of the streams that the worker has completed in
        this incarnation.
    """

    tasks: int
    writing: int
    streams: tuple[SnapshotTaskProgress, ...]


class TaskHost(Protocol):
    """Base class of the objects that run a worker's tasks.

    Attributes:
      state: the random number that identifies the dispatcher's durable state, which has these
        tasks.
      address: the worker's address.
      read_at: the address to which readers connect; empty if they connect to `address`. If each
        task has a port of its own, "%dts_port%" in this address stands for that port.
      cache_bytes: size of the window of a task that trainers share.
      security: the security of the worker's ports. Readers expect its key at the tasks' ports.
      began: called in the loop thread when a task has begun to run.
      finished: called in the loop thread with the number of a task whose last element was taken.
      crashed: `crashed(task, how, then)` is called in the loop thread when the process of a task
        that computes portions has crashed. The function reports the crash to the dispatcher, and
        calls `then` when the dispatcher has confirmed the report.
    """

    state: int = 0
    address: str = ""
    read_at: str = ""
    cache_bytes: int = TRAINER_CACHE_BYTES
    security: ServerSecurity = ServerSecurity(NONE)
    began: Callable[[], None] = staticmethod(lambda: None)
    finished: Callable[[int], None] = staticmethod(lambda number: None)
    crashed: Callable[[int, str, Callable[[], None]], None] = staticmethod(
        lambda number, how, then: then()
    )

    def registered(self) -> None:
        """Record that the dispatcher has registered the worker, for the first time or again."""
        return

    def begin(self, task: WorkerTask) -> None:
        """Serve `task` from now on."""

    def location(self, number: int) -> str:
        """Return the address to which readers of task `number` connect."""

    def drop(self, number: int) -> object:
        """End task `number`. Ignores an unknown number. Does not block."""

    def hand_back(self, number: int) -> bool:
        """Have task `number` take no more positions, and give back the positions that it has not
        begun. Return False if the task has not begun to run.
        """

    def figures(self) -> dict[int, tuple[Any, ...]]:
        """Return the figures of the running tasks (data/service/dispatcher/machine/events.py),
        by number."""

    def leave(self) -> None:
        """Keep nothing for later tasks from now on, because the worker is leaving."""
        return

    @property
    def unsent(self) -> bool:
        """Whether some replies to readers have not left the process yet."""

    @property
    def has_requests(self) -> bool:
        """Whether readers wait for replies or may still send requests. After `refuse`, False when
        all replies have been sent."""

    def refuse(self) -> None:
        """Reply to the requests that have been received, and refuse new requests with CANCELLED."""

    def close(self) -> None:
        """End all tasks."""


class DataWorker:
    """The part of a WorkerServer that works for the data service. The docstring of the module gives
    the rules.

    Attributes:
      host: the object that runs the tasks.
    """

    def __init__(
        self,
        loop: Loop,
        service: RpcService,
        calls: LoopClient,
        dispatcher: str,
        credentials: Credentials,
        incarnation: int,
        dispatcher_timeout_s: float,
        host: TaskHost,
        chunk_bytes_max: int = SNAPSHOT_CHUNK_BYTES_MAX,
    ) -> None:
        """Register the methods on `service`, which must not be attached to a server yet.

        Args:
          host: the object that runs the tasks.
          chunk_bytes_max: the number of bytes, before compression, at which a chunk of a snapshot
            ends.
        """
        self._loop = loop
        self._calls = calls
        self._incarnation = incarnation
        self.host = host
        self.host.finished = self._note_finished
        self.host.began = self._report_later
        self.host.crashed = self._report_crash
        self.snapshots = SnapshotWorker(
            loop, calls, dispatcher, credentials, incarnation, dispatcher_timeout_s, chunk_bytes_max
        )
        self._machine = WorkerTasks()
        self._drained: Callable[[], None] | None = None
        """Called when a worker that is leaving has nothing left to do; None while the worker is not
        leaving."""
        service.register_later(PROFILE, self._profile, roles=READERS)
        loop.on_stop(self.close)

    @property
    def num_tasks(self) -> int:
        """Number of tasks that the dispatcher has assigned to this worker and that have not
        ended.
        """
        return self._machine.num_tasks

    def snapshot(self) -> WorkerDataSnapshot:
        """Return the worker's present tasks and streams. Call this in the loop thread."""
        return WorkerDataSnapshot(
            self.num_tasks, self.snapshots.writing, tuple(self.snapshots.progresses())
        )

    def bound(self, address: str, read_at: str, security: ServerSecurity) -> None:
        """Take the worker's address, the address of its second port ("" without one), and the
        security of its ports."""
        self.host.address, self.host.read_at, self.host.security = address, read_at, security

    # -- assignments of the dispatcher -------------------------------------------------------------

    def registered(self) -> None:
        """Record that the dispatcher has registered this worker, for the first time or again."""
        self.host.registered()
        self.snapshots.registered()
        self._perform(self._machine.ask())
        if self._drained is not None:
            self._report_leaving()

    def _perform(self, effects: list[WorkerTasksEffect]) -> None:
        for effect in effects:
            match effect:
                case RequestWork(request, has, finished):
                    self._ask(request, has, finished)
                case RequestWorkLater():
                    self._loop.set_timer(self, self._loop.now() + AGAIN_S, self._ask_again)
                case BeginTask(task):
                    self.host.state = self._machine.state
                    self.host.begin(task)
                case DropTask(number):
                    self.host.drop(number)
                case GiveBackPositions(number):
                    # promise T4: without a reader there is nothing to give back
                    if not self.host.hand_back(number):
                        self._perform(self._machine.finished(number))

    def _ask(self, request: int, has: tuple[int, ...], finished: tuple[int, ...]) -> None:
        self.host.state = self._machine.state
        figures = self.host.figures()
        read_at = {
            number: with_key(self.host.location(number), self.host.security.public)
            for number in has
        }
        args = self._machine.state, self._incarnation, read_at, finished, figures
        self._calls.call("zmqdist.data.work", args, partial(self._work_replied, request))
        if figures:
            self._report_later()

    def _report_later(self) -> None:
        self._loop.set_timer((self, "report"), self._loop.now() + REPORT_S, self._ask_again)

    def _work_replied(self, request: int, value: Any, error: OpError | None) -> None:
        effects = (
            self._machine.request_failed(request)
            if error
            else self._machine.work_received(request, value)
        )
        if effects:
            self._perform(effects)
            self._end_if_drained()

    def _ask_again(self) -> None:
        """Request work if the dispatcher is connected. After a reconnect, `registered` requests
        work."""
        if self._calls.connected:
            self._perform(self._machine.ask())

    def _note_finished(self, number: int) -> None:
        self._perform(self._machine.finished(number))
        self._end_if_drained()

    def _report_crash(self, number: int, how: str, then: Callable[[], None]) -> None:
        # after a permanent error the dispatcher will tell this worker to drop the task
        report_until_replied(
            self._loop,
            self._calls,
            "zmqdist.data.crashed",
            lambda: (self._machine.state, number, self._incarnation, how),
            lambda: number in self._machine.tasks,
            then,
        )

    def _profile(self, call: PendingCall) -> None:
        figures = self.host.figures()
        if not figures:
            raise UnavailableError(
                f"No trace event was collected: no task of worker {self.host.address} is at work"
            )
        waits = "room_wait_s", "element_wait_s"
        names = ("elements", "bytes", "buffered", "room", "element_s", *waits)
        call.reply(
            {
                number: {
                    "dataset": self._machine.tasks[number].dataset,
                    **dict(zip(names, values, strict=True)),
                }
                for number, values in figures.items()
            }
        )

    # -- leaving -----------------------------------------------------------------------------------

    def refuse(self, then: Callable[[], None]) -> None:
        """Prepare to stop after the dispatcher has released this worker. Send no further request to
        the dispatcher, reply to the pending requests of readers, and then call `then`. Call this in
        the loop thread.
        """
        self._machine.leave()
        self.host.refuse()
        self._end_if_answered(then)

    def _end_if_answered(self, then: Callable[[], None]) -> None:
        again = partial(self._end_if_answered, then) if self.host.has_requests else then
        self._loop.set_timer((self, "answered"), self._loop.now() + FLUSH_S, again)

    def drain(self, then: Callable[[], None]) -> None:
        """Finish the worker's tasks. Take no more positions, give back the positions that are not
        begun, wait until readers have taken the elements that are ready, and then call `then`. Call
        this in the loop thread.

        A task that reads the whole dataset or a static shard continues until its pipeline has
        ended. To stop without this delay, call `close`.
        """
        self._drained = then
        self.host.leave()
        self._report_leaving()
        self.snapshots.drain(self._end_if_drained)
        self._perform(self._machine.drain())
        self._end_if_drained()

    def _report_leaving(self) -> None:
        self._calls.call("zmqdist.data.leave", (self._incarnation,), lambda value, error: None)

    def _end_if_drained(self) -> None:
        if self._drained is not None and not self.num_tasks and not self.snapshots.writing:
            if self._machine.tasks:
                self._loop.set_timer(
                    (self, "drained"), self._loop.now() + FLUSH_S, self._end_if_sent
                )
            else:
                self._end_if_sent()

    def _end_if_sent(self) -> None:
        assert self._drained is not None
        if self.host.unsent:
            self._loop.set_timer((self, "drained"), self._loop.now() + FLUSH_S, self._end_if_sent)
        else:
            self._drained()

    def close(self) -> None:
        """End all tasks. The loop calls this when it stops."""
        self.host.close()
