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
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from zmqdist.data.dataset import Dataset, deserialize
from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.service import local_workers
from zmqdist.data.service.compression import codec_for, codec_of, compress_batch
from zmqdist.data.service.dispatcher.machine.records import DYNAMIC
from zmqdist.data.service.elements import pack
from zmqdist.data.service.policy import ShardingPolicy
from zmqdist.data.service.reader.delivery import END, FAILED, SOME, Demand
from zmqdist.data.service.snapshots.worker import AGAIN_S, SnapshotWorker, report_until_replied
from zmqdist.data.service.snapshots.writer import SnapshotTaskProgress
from zmqdist.data.service.split_requests import SplitClient
from zmqdist.data.service.task_errors import describe_error
from zmqdist.data.service.worker import rounds_task, shared_task
from zmqdist.data.service.worker.first_come_task import FirstComeRunner
from zmqdist.data.service.worker.portions_task import PortionsRunner
from zmqdist.data.service.worker.task_runner import ElementReply, Packed, Runner
from zmqdist.data.service.worker.tasks_machine import (
    BeginTask,
    DropTask,
    GiveBackPositions,
    RequestWork,
    RequestWorkLater,
    WorkerTask,
    WorkerTasks,
    WorkerTasksEffect,
    WorkerTaskState,
)
from zmqdist.data.sharding import shard_for_worker
from zmqdist.data.splits import open_split, portion_pipeline
from zmqdist.errors import CancelledError, FailedPreconditionError, OpError, UnavailableError
from zmqdist.limits import SNAPSHOT_CHUNK_BYTES_MAX, TRAINER_CACHE_BYTES
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.internal_client import LoopClient
from zmqdist.rpc.service import PendingCall, RpcService
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.endpoint import with_key
from zmqdist.transport.loop import Loop
from zmqdist.wire.hello import host_identity

log = logging.getLogger("zmqdist.data")

PROFILE: Final = "zmqdist.data.profile"

ELEMENTS: Final = "zmqdist.data.elements"

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
    began: Callable[[], None] = staticmethod(lambda: None)
    finished: Callable[[int], None] = staticmethod(lambda number: None)
    crashed: Callable[[int, str, Callable[[], None]], None] = staticmethod(
        lambda number, how, then: then()
    )

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
      key: the public key that the worker publishes for readers; empty without CURVE.
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
        host: TaskHost | None = None,
        chunk_bytes_max: int = SNAPSHOT_CHUNK_BYTES_MAX,
    ) -> None:
        """Register the methods on `service`, which must not be attached to a server yet.

        Args:
          host: the object that runs the tasks. If it is None, the tasks run in threads of this
            process.
          chunk_bytes_max: the number of bytes, before compression, at which a chunk of a snapshot
            ends.
        """
        self._loop = loop
        self._calls = calls
        self._incarnation = incarnation
        self.host: TaskHost = host or TaskThreads(
            loop, service, dispatcher, credentials, incarnation, dispatcher_timeout_s
        )
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
        self.key = b""
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

    def bound(self, address: str, read_at: str, key: bytes) -> None:
        """Take the worker's address, the address of its second port ("" without one), and its
        public key (b"" without CURVE)."""
        self.host.address, self.host.read_at, self.key = address, read_at, key

    # -- assignments of the dispatcher -------------------------------------------------------------

    def registered(self) -> None:
        """Record that the dispatcher has registered this worker, for the first time or again."""
        # elements of tasks in processes cannot be passed by reference
        if isinstance(self.host, TaskThreads):
            local_workers.add(self._incarnation, self.host)
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
        read_at = {number: with_key(self.host.location(number), self.key) for number in has}
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
        local_workers.remove(self._incarnation)
        self.host.close()


class RemoteReply:
    """The ElementReply to a reader in another process. It is sent as the reply to the reader's RPC
    call, and compressed as the reader requested."""

    def __init__(self, call: PendingCall, loop: Loop, codec: str) -> None:
        self.wanted = call.wanted
        self.answered = False
        self._call = call
        self._loop = loop
        self._codec = codec

    def soon(self, fn: Callable[[], None]) -> bool:
        try:
            self._loop.call_soon(fn)
        except OpError:  # the loop has ended, because the worker has stopped
            return False
        return True

    def answer(self, kind: int, value: Any = None, tag: Any = None) -> None:
        if kind == SOME:
            try:
                if isinstance(value, Packed):
                    value = value.form(self._codec)
                else:
                    value = compress_batch(pack(value), self._codec)
            except BaseException as error:
                kind, value = FAILED, error
        self.answered = True
        if kind == FAILED:
            self._call.fail(value)
        else:
            self._call.reply((kind, value, tag))


class TaskThreads(TaskHost):
    """Runs tasks in threads of this process, and serves the method `elements` for their
    readers."""

    def __init__(
        self,
        loop: Loop,
        service: RpcService,
        dispatcher: str,
        credentials: Credentials,
        incarnation: int,
        dispatcher_timeout_s: float,
    ) -> None:
        """Register the method `elements` on `service`, which must not be attached to a server
        yet.
        """
        self._loop = loop
        self._service = service
        self.dispatcher = dispatcher
        self._credentials = credentials
        self._incarnation = incarnation
        self._timeout_s = dispatcher_timeout_s
        self._tasks: dict[int, WorkerTask] = {}
        self._refuses = False
        self._client: ZmqClient | None = None
        self._split_clients: dict[int, SplitClient] = {}
        self._definition = ("", "")
        """The fingerprint and description of the last pipeline, which the next task often has.
        """
        service.register_later(ELEMENTS, self._elements, roles=READERS)

    def begin(self, task: WorkerTask) -> None:
        self._tasks[task.id] = task

    def location(self, number: int) -> str:
        return self.read_at or self.address

    @property
    def has_requests(self) -> bool:
        return not (self._refuses and self._service.idle)

    def refuse(self) -> None:
        self._loop.set_timer((self, "refuse"), self._loop.now() + FLUSH_S, self._refuse)

    def _refuse(self) -> None:
        self._refuses = True

    def drop(self, number: int) -> Runner | None:
        """End a task, as `TaskHost.drop` says. Return its runner, whose thread may still run."""
        task = self._tasks.pop(number, None)
        split_client = self._split_clients.pop(number, None)
        if split_client is not None:
            split_client.close()
        runner: Runner | None = None if task is None else task.runner
        if runner is not None:
            runner.close()
        return runner

    def hand_back(self, number: int) -> bool:
        split_client = self._split_clients.get(number)
        if split_client is None:
            return False
        threading.Thread(
            target=self._hand_back,
            args=(split_client,),
            name=f"zmqdist-drain-{number}",
            daemon=True,
        ).start()
        return True

    def _hand_back(self, split_client: SplitClient) -> None:
        try:
            split_client.drain()
        except BaseException as error:
            log.warning(
                "worker %s is leaving, and could not give back positions that it has not begun: %s",
                self.address,
                error,
            )

    def figures(self) -> dict[int, tuple[Any, ...]]:
        running = {
            number: task.runner.figures()
            for number, task in self._tasks.items()
            if task.runner is not None and task.state is not WorkerTaskState.DONE
        }
        return {number: figures for number, figures in running.items() if figures is not None}

    @property
    def unsent(self) -> bool:
        return bool(self._service.unsent)

    def close(self) -> None:
        for number in list(self._tasks):
            self.drop(number)
        if self._client is not None:
            self._client.close()

    # -- readers -----------------------------------------------------------------------------------

    def _elements(
        self, call: PendingCall, state: int, number: int, demand: tuple[Any, ...], compression: str
    ) -> None:
        near = call.peer.hello is not None and call.peer.hello.host == host_identity()
        codec = codec_for(compression, near=near)
        # If the codec's package is missing, `codec_of` raises. Call it now, before the request
        # takes an element, which would then be lost.
        codec_of(codec or None)
        self._answer(state, number, Demand(*demand), RemoteReply(call, self._loop, codec))

    def ask(self, state: int, number: int, demand: Demand, reply: ElementReply) -> None:
        """Reply to the request of a reader in this process. Any thread may call this."""
        try:
            self._loop.call_soon(self._answer_local, state, number, demand, reply)
        except OpError as error:
            text = f"Local worker {self.address} is no longer available: {error.message}"
            reply.answer(FAILED, CancelledError(text))

    def _answer_local(self, state: int, number: int, demand: Demand, reply: ElementReply) -> None:
        """Reply to a request of a reader in this process. If this raises, pass the error to the
        reader here, because there is no RPC call that would carry it.
        """
        try:
            self._answer(state, number, demand, reply)
        except BaseException as error:
            if not reply.answered:
                reply.answer(FAILED, error)
            raise

    def delete(self, number: int) -> None:
        """Delete a task whose only reader is in this process. Any thread may call this."""
        with suppress(OpError):  # the loop refuses the call, because the worker has ended
            self._loop.call_soon(self._delete, number)

    def _delete(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is not None:
            if task.state is WorkerTaskState.RUNNING:
                task.enter(WorkerTaskState.DELETED)
            if task.runner is not None:
                task.runner.close()

    def _answer(self, state: int, number: int, demand: Demand, reply: ElementReply) -> None:
        # the reader finds its elements at another worker
        if self._refuses:
            reply.answer(FAILED, CancelledError(f"worker {self.address} stops"))
            return
        task = self._tasks.get(number)
        if task is not None and task.state is WorkerTaskState.DELETED:
            text = f"Got a request for local task {number}, which has been deleted."
            reply.answer(FAILED, FailedPreconditionError(text))
            return
        if task is None or state != self.state:
            text = f"worker {self.address} does not have task {number}"
            reply.answer(FAILED, UnavailableError(text))
            return
        if task.runner is None:
            if (
                task.state is WorkerTaskState.DONE
            ):  # an earlier process of this task has sent the last element
                reply.answer(END)
                return
            task.runner = self._run(task)
            self.began()
        task.runner.ask(demand, reply)
        if demand.wait_s is not None and not reply.answered:
            runner = task.runner
            self._loop.set_timer(
                id(reply), self._loop.now() + demand.wait_s, lambda: runner.expire(reply)
            )

    def start(self, task: WorkerTask) -> None:
        """Create the runner of a task before its first request. A task that serves requests in
        order of arrival begins to compute elements. Call this in the loop thread.
        """
        if task.runner is None and task.state is not WorkerTaskState.DONE:
            task.runner = self._run(task)
            self.began()
            if isinstance(task.runner, FirstComeRunner):
                task.runner.start()

    def _run(self, task: WorkerTask) -> Runner:
        if self._client is None:
            security = self._credentials.client(self.dispatcher, "worker")
            self._client = ZmqClient(self.dispatcher, f"data of {self.address}", security=security)
        split_client = self._split_clients[task.id] = SplitClient(
            self._client, self.state, task.id, self._incarnation, self._timeout_s, task.progress
        )
        open_pipeline = partial(self._open, task, split_client)
        describe = partial(describe_error, where=task.describe(self.address))
        # a failed task only reports its crash, which the simplest runner can
        if not task.failed:
            if task.terms.portioned:
                return PortionsRunner(
                    str(task.id),
                    partial(self._open_portion, task, split_client),
                    describe,
                    split_client.portions,
                )
            if task.terms.coordinated:
                return rounds_task.RoundsRunner(
                    str(task.id), open_pipeline, describe, task.terms.num_consumers
                )
            if task.terms.cache:
                return shared_task.SharedRunner(
                    str(task.id), open_pipeline, describe, self.cache_bytes
                )
        return FirstComeRunner(
            str(task.id),
            open_pipeline,
            partial(self._finished, task),
            describe,
            task.progress,
            task.failed,
        )

    def _open_portion(
        self, task: WorkerTask, split_client: SplitClient, number: int, start: int, length: int
    ) -> DatasetIterator:
        """Open the pipeline of a task over the positions of one portion. Called in a thread of the
        task.

        The random numbers depend on the portion and on the pass alone, so that another worker, also
        one of another dispatcher, can continue the portion.
        """
        if task.pipeline is None:
            task.pipeline = portion_pipeline(self._pipeline(task, split_client))
        positions = iter(range(start, start + length))
        return open_split(
            task.pipeline,
            lambda source, repetition: next(positions, None),
            entropy=(number, task.repetition),
        )

    def _pipeline(self, task: WorkerTask, split_client: SplitClient) -> Dataset:
        """Return a new object of the task's dataset. Called in a thread of the task."""
        fingerprint, description = self._definition
        if fingerprint != task.fingerprint:
            description = split_client.definition(task.fingerprint)
            self._definition = task.fingerprint, description
        return deserialize(description)

    def _open(self, task: WorkerTask, split_client: SplitClient) -> DatasetIterator:
        """Open the pipeline of a task that does not compute portions. Called in the task's
        thread.
        """
        dataset = self._pipeline(task, split_client)
        if task.terms.coordinated:
            rounds_task.require_infinite(dataset.cardinality())
        if task.terms.cache:
            shared_task.require_infinite(dataset.cardinality())
        if task.terms.mode == DYNAMIC:
            return open_split(
                dataset, split_client.ask, entropy=(self.state, task.iteration), ordered=False
            )
        policy = ShardingPolicy(task.terms.mode).name
        # Where the user gave no seed, all workers of an iteration use one seed, so that their
        # shards are parts of the same order.
        return iter(
            shard_for_worker(dataset, policy, task.num_workers, task.index, seed=task.iteration)
        )

    def _finished(self, task: WorkerTask) -> None:
        with suppress(OpError):  # the loop refuses the call, because the worker has ended
            self._loop.call_soon(self.finished, task.id)
