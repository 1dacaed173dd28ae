"""The tasks of one worker: what the dispatcher wants done, and who is answered from it.

Rules
    All but the tasks themselves runs in the worker's loop. Which tasks there are the machine decides (tasks_machine.py). A task's
    pipeline is made when somebody reads it first.
    Tasks run in threads of the worker's process (`TaskThreads`), or each in a process of its own (task_process.py), which has a
    `TaskThreads` with that one in it: then no user code runs in the worker's.

Methods (after "zmqdist.data.")
    elements(state, task, wanted, compression)   -> (kind, batch, its tag); kinds are below
    profile()                                    -> {task: its figures}
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from zmqdist.data.dataset import deserialize
from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.service import local_workers
from zmqdist.data.service.batch_compression import codec_for
from zmqdist.data.service.compression import codec_of
from zmqdist.data.service.dispatcher.machine.records import DYNAMIC
from zmqdist.data.service.policy import ShardingPolicy
from zmqdist.data.service.reader.delivery import Wanted
from zmqdist.data.service.retry import RETRIABLE
from zmqdist.data.service.snapshots.stream import SnapshotTaskProgress
from zmqdist.data.service.snapshots.worker import SnapshotWorker
from zmqdist.data.service.split_requests import Dealer
from zmqdist.data.service.task_errors import named
from zmqdist.data.service.worker import rounds_task, shared_task
from zmqdist.data.service.worker.element_replies import ElementReply, Runner
from zmqdist.data.service.worker.first_come_task import FirstCome
from zmqdist.data.service.worker.portions_task import PortionsRunner
from zmqdist.data.service.worker.remote_reply import RemoteReply
from zmqdist.data.service.worker.tasks_machine import (
    AskForWork,
    AskLater,
    BeginTask,
    DropTask,
    GiveBackPositions,
    WorkerTask,
    WorkerTasks,
    WorkerTasksEffect,
)
from zmqdist.data.sharding import shard_for_worker
from zmqdist.data.splits import open_split, portion_pipeline
from zmqdist.errors import CancelledError, FailedPreconditionError, OpError, UnavailableError
from zmqdist.limits import SNAPSHOT_CHUNK_BYTES_MAX, TRAINER_CACHE_BYTES
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.loop_client import LoopCalls
from zmqdist.rpc.pending_call import Asked
from zmqdist.rpc.service import RpcService
from zmqdist.transport.address import with_key
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.loop import Loop
from zmqdist.wire.hello import host_identity

log = logging.getLogger("zmqdist.data")

PROFILE: Final = "zmqdist.data.profile"

ELEMENTS: Final = "zmqdist.data.elements"

AGAIN_S: Final = 0.05
"""After a refused question for work."""

REPORT_S: Final = 5.0
"""How often a worker that has tasks tells how they do."""

FLUSH_S: Final = 0.1
"""What was answered last has so long to leave before a worker goes."""

READERS: Final = frozenset({"submit", "worker"})


@dataclass(frozen=True, slots=True)
class WorkerDataSnapshot:
    """What a worker has of the data service.

    Attributes:
      tasks: that the dispatcher wants from it and that have not ended.
      writing: streams of distributed snapshots that it writes now.
      streams: how far these are, and those that it has completed in this life.
    """

    tasks: int
    writing: int
    streams: tuple[SnapshotTaskProgress, ...]


class TaskHost(Protocol):
    """Where a worker's tasks run.

    Attributes:
      state: number of the dispatcher's state that they belong to.
      address: of the worker.
      read_at: where readers are sent, if not to `address`; "%dts_port%" stands for the port of a task that has one of its own.
      cache_bytes: what the window of a task that trainers share may take.
      began: called in the loop when a task has got its first reader.
      finished: called in the loop with the number of a task whose last element was taken.
      crashed: `crashed(task, how, then)`, called in the loop when the process of a task that computes portions has died: has the dispatcher
        know it, and then calls `then`.
    """

    state: int
    address: str
    read_at: str
    cache_bytes: int
    began: Callable[[], None]
    finished: Callable[[int], None]
    crashed: Callable[[int, str, Callable[[], None]], None]

    def begin(self, task: WorkerTask) -> None:
        """Serve it from now on."""

    def where(self, number: int) -> str:
        """The address at which it is read."""

    def drop(self, number: int) -> None:
        """End it. Waits for nothing; one that is not there is fine."""

    def hand_back(self, number: int) -> bool:
        """Have a task give back the positions that it has not begun, and take no more. False: it has begun nothing."""

    def figures(self) -> dict[int, tuple[Any, ...]]:
        """What the tasks at work tell of themselves (data/service/dispatcher/machine/figures.py)."""

    @property
    def unsent(self) -> bool:
        """Whether answers are on their way to readers."""

    @property
    def has_requests(self) -> bool:
        """Whether readers wait for answers, or may: after `refuse` this ends."""

    def refuse(self) -> None:
        """Take no more questions of readers, but those that are on their way: each is answered CANCELLED. What was asked is answered."""

    def close(self) -> None:
        """End all."""


class DataWorker:
    """See the module's docstring. Hosted by a WorkerServer.

    Attributes:
      host: where its tasks run.
      key: the public key that the worker shows to readers; empty without CURVE.
    """

    def __init__(
        self,
        loop: Loop,
        service: RpcService,
        calls: LoopCalls,
        dispatcher: str,
        credentials: Credentials,
        incarnation: int,
        dispatcher_timeout_s: float,
        host: TaskHost | None = None,
        chunk_bytes_max: int = SNAPSHOT_CHUNK_BYTES_MAX,
    ) -> None:
        """Before the service is attached.

        Args:
          host: where tasks run; None: in threads of this process.
          chunk_bytes_max: of the files of a snapshot.
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
        """The worker leaves: to be called when nothing is left to do."""
        self._left = False
        self.key = b""
        service.register_later(PROFILE, self._profile, roles=READERS)
        loop.on_stop(self.close)

    @property
    def left(self) -> bool:
        """Whether it was drained, and all answers are on their way."""
        return self._left

    @property
    def num_tasks(self) -> int:
        """Tasks that the dispatcher wants from this worker and that have not ended."""
        return self._machine.num_tasks

    def snapshot(self) -> WorkerDataSnapshot:
        """In the loop."""
        return WorkerDataSnapshot(self.num_tasks, self.snapshots.writing, tuple(self.snapshots.progresses()))

    # -- the dispatcher's wishes ------------------------------------------------------------------------------------------------

    def registered(self) -> None:
        """The dispatcher has taken this worker: now, or again."""
        if isinstance(self.host, TaskThreads):
            local_workers.add(self._incarnation, self.host)
        self.snapshots.registered()
        self._perform(self._machine.ask())
        if self._drained is not None:
            self._report_leaving()

    def _perform(self, effects: list[WorkerTasksEffect]) -> None:
        for effect in effects:
            match effect:
                case AskForWork(request, has, done):
                    self._ask(request, has, done)
                case AskLater():
                    self._loop.set_timer(self, self._loop.now() + AGAIN_S, self._ask_again)
                case BeginTask(task):
                    self.host.state = self._machine.state
                    self.host.begin(task)
                case DropTask(number):
                    self.host.drop(number)
                case GiveBackPositions(number):
                    if not self.host.hand_back(number):
                        self._perform(self._machine.finished(number))

    def _ask(self, request: int, has: tuple[int, ...], done: tuple[int, ...]) -> None:
        self.host.state = self._machine.state
        figures = self.host.figures()
        read_at = {number: with_key(self.host.where(number), self.key) for number in has}
        args = self._machine.state, self._incarnation, read_at, done, figures
        self._calls.ask("zmqdist.data.work", args, partial(self._work_replied, request))
        if figures:
            self._report_later()

    def _report_later(self) -> None:
        self._loop.set_timer((self, "report"), self._loop.now() + REPORT_S, self._ask_again)

    def _work_replied(self, request: int, value: Any, error: OpError | None) -> None:
        effects = self._machine.refused(request) if error else self._machine.told(request, value)
        if effects:
            self._perform(effects)
            self._end_if_drained()

    def _ask_again(self) -> None:
        """Only while there is a connection: else `registered` comes."""
        if self._calls.connected:
            self._perform(self._machine.ask())

    def _note_finished(self, number: int) -> None:
        self._perform(self._machine.finished(number))
        self._end_if_drained()

    def _report_crash(self, number: int, how: str, then: Callable[[], None]) -> None:
        def replied(value: Any, error: OpError | None) -> None:
            if error is None or error.error_code not in RETRIABLE:
                then()  # where it does not know the task it will have it dropped
            else:
                again = partial(self._report_crash, number, how, then)
                self._loop.set_timer((self, "crash", number), self._loop.now() + AGAIN_S, again)

        if number in self._machine.tasks:
            self._calls.ask("zmqdist.data.crashed", (self._machine.state, number, self._incarnation, how), replied)

    def _profile(self, call: Asked) -> None:
        found = self.host.figures()
        if not found:
            raise UnavailableError(f"No trace event was collected: no task of worker {self.host.address} is at work")
        names = ("elements", "bytes", "buffered", "room", "element_s")
        call.answer(
            {
                number: {"dataset": self._machine.tasks[number].dataset, **dict(zip(names, values, strict=True))}
                for number, values in found.items()
            }
        )

    # -- leaving ----------------------------------------------------------------------------------------------------------------

    def refuse(self, then: Callable[[], None]) -> None:
        """Ask the dispatcher, which has let this worker go, nothing more; answer what readers have asked, and call `then`. In the loop."""
        self._machine.leave()
        self.host.refuse()
        self._end_if_answered(then)

    def _end_if_answered(self, then: Callable[[], None]) -> None:
        again = partial(self._end_if_answered, then) if self.host.has_requests else then
        self._loop.set_timer((self, "answered"), self._loop.now() + FLUSH_S, again)

    def drain(self, then: Callable[[], None]) -> None:
        """Take no more positions, hand back what was not begun, have readers take the rest, and call `then`. In the loop.

        A task that has the whole dataset for itself goes on to its end. Whoever has not the time for it just closes.
        """
        self._drained = then
        self._report_leaving()
        self.snapshots.drain(self._end_if_drained)
        self._perform(self._machine.drain())
        self._end_if_drained()

    def _report_leaving(self) -> None:
        self._calls.ask("zmqdist.data.leave", (self._incarnation,), lambda value, error: None)

    def _end_if_drained(self) -> None:
        if self._drained is not None and not self.num_tasks and self.snapshots.idle:
            if self._machine.tasks:
                self._loop.set_timer((self, "drained"), self._loop.now() + FLUSH_S, self._end_if_sent)
            else:
                self._end_if_sent()

    def _end_if_sent(self) -> None:
        assert self._drained is not None
        if self.host.unsent:
            self._loop.set_timer((self, "drained"), self._loop.now() + FLUSH_S, self._end_if_sent)
        else:
            self._left = True
            self._drained()

    def close(self) -> None:
        """In the loop, when it ends."""
        local_workers.remove(self._incarnation)
        self.host.close()


class TaskThreads:
    """Tasks in threads of this process, and the method that answers their readers."""

    def __init__(
        self,
        loop: Loop,
        service: RpcService,
        dispatcher: str,
        credentials: Credentials,
        incarnation: int,
        dispatcher_timeout_s: float,
    ) -> None:
        """Before the service is attached."""
        self.state = 0
        self.address = self.read_at = ""
        self.cache_bytes = TRAINER_CACHE_BYTES
        self.began: Callable[[], None] = lambda: None
        self.finished: Callable[[int], None] = lambda number: None
        self.crashed: Callable[[int, str, Callable[[], None]], None] = lambda number, how, then: then()
        self._loop = loop
        self._service = service
        self.dispatcher = dispatcher
        self._credentials = credentials
        self._incarnation = incarnation
        self._timeout_s = dispatcher_timeout_s
        self._tasks: dict[int, WorkerTask] = {}
        self._refuses = False
        self._client: ZmqClient | None = None
        self._dealers: dict[int, Dealer] = {}
        service.register_later(ELEMENTS, self._elements, roles=READERS)

    def begin(self, task: WorkerTask) -> None:
        self._tasks[task.id] = task

    def where(self, number: int) -> str:
        return self.read_at or self.address

    @property
    def has_requests(self) -> bool:
        return not (self._refuses and self._service.idle)

    def refuse(self) -> None:
        self._loop.set_timer((self, "refuse"), self._loop.now() + FLUSH_S, self._refuse)

    def _refuse(self) -> None:
        self._refuses = True

    def drop(self, number: int) -> None:
        task = self._tasks.pop(number, None)
        dealer = self._dealers.pop(number, None)
        if dealer is not None:
            dealer.close()
        if task is not None and task.runner is not None:
            task.runner.close()

    def hand_back(self, number: int) -> bool:
        dealer = self._dealers.get(number)
        if dealer is None:
            return False
        threading.Thread(target=self._hand_back, args=(dealer,), name=f"zmqdist-drain-{number}", daemon=True).start()
        return True

    def _hand_back(self, dealer: Dealer) -> None:
        try:
            dealer.drain()
        except BaseException as error:
            log.warning("%s leaves, and could not hand back what it has not begun: %s", self.address, error)

    def figures(self) -> dict[int, tuple[Any, ...]]:
        found = {}
        for number, task in self._tasks.items():
            figures = getattr(task.runner, "figures", None)
            if figures is not None and not task.done:
                found[number] = figures()
        return found

    @property
    def unsent(self) -> bool:
        return bool(self._service.unsent)

    def close(self) -> None:
        for number in list(self._tasks):
            self.drop(number)
        if self._client is not None:
            self._client.close()

    # -- readers ----------------------------------------------------------------------------------------------------------------

    def _elements(self, call: Asked, state: int, number: int, wanted: tuple[Any, ...], compression: str) -> None:
        near = call.peer.hello is not None and call.peer.hello.host == host_identity()
        codec = codec_for(compression, near=near)
        codec_of(codec or None)  # where its package is missing the question fails, before any element is taken for it
        self._answer(state, number, Wanted(*wanted), RemoteReply(call, self._loop, codec))

    def ask(self, state: int, number: int, wanted: Wanted, reply: ElementReply) -> None:
        """A question of a reader in this process; from any thread."""
        try:
            self._loop.call_soon(self._answer, state, number, wanted, reply)
        except OpError as error:
            reply.fail(CancelledError(f"Local worker {self.address} is no longer available: {error.message}"))

    def delete(self, number: int) -> None:
        """A reader in this process was the only one whom this task was for; from any thread."""
        try:
            self._loop.call_soon(self._delete, number)
        except OpError:
            pass  # the worker has ended

    def _delete(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is not None:
            task.deleted = True
            if task.runner is not None:
                task.runner.close()

    def _answer(self, state: int, number: int, wanted: Wanted, reply: ElementReply) -> None:
        if self._refuses:
            reply.fail(CancelledError(f"worker {self.address} stops"))
            return
        task = self._tasks.get(number)
        if task is not None and task.deleted:
            text = f"Got a request for local task {number}, which has been deleted."
            reply.fail(FailedPreconditionError(text))
            return
        if task is None or state != self.state:
            reply.fail(UnavailableError(f"worker {self.address} does not have task {number}"))
            return
        if task.runner is None:
            if task.done:  # in a process before this one
                reply.end()
                return
            task.runner = self._run(task)
            self.began()
        task.runner.ask(wanted, reply)
        if wanted.wait_s is not None and not reply.answered:
            runner = task.runner
            self._loop.set_timer(id(reply), self._loop.now() + wanted.wait_s, lambda: runner.expire(reply))

    def start(self, task: WorkerTask) -> None:
        """Begin a task before its first question, where its elements go to whoever asks first. In the loop."""
        if task.runner is None and not task.done:
            task.runner = self._run(task)
            self.began()
            if isinstance(task.runner, FirstCome):
                task.runner.start()

    def _run(self, task: WorkerTask) -> Runner:
        if self._client is None:
            security = self._credentials.client(self.dispatcher, "worker")
            self._client = ZmqClient(self.dispatcher, f"data of {self.address}", security=security)
        dealer = self._dealers[task.id] = Dealer(
            self._client, self.state, task.id, self._incarnation, self._timeout_s, task.progress
        )
        open_pipeline = partial(self._open, task, dealer)
        name_error = partial(named, where=task.where(self.address))
        if not task.failed:
            if task.terms.portioned:
                return PortionsRunner(
                    str(task.id), partial(self._open_portion, task, dealer), name_error, dealer.portions
                )
            if task.terms.coordinated:
                return rounds_task.RoundsRunner(str(task.id), open_pipeline, name_error, task.terms.num_consumers)
            if task.terms.cache:
                return shared_task.Shared(str(task.id), open_pipeline, name_error, self.cache_bytes)
        return FirstCome(
            str(task.id),
            open_pipeline,
            partial(self._finished, task),
            name_error,
            task.progress,
            task.failed,
        )

    def _open_portion(self, task: WorkerTask, dealer: Dealer, start: int, length: int) -> DatasetIterator:
        """In a thread of the task."""
        if task.pipeline is None:
            task.pipeline = portion_pipeline(deserialize(dealer.definition(task.fingerprint)))
        positions = iter(range(start, start + length))
        return open_split(task.pipeline, lambda source, repetition: next(positions, None))

    def _open(self, task: WorkerTask, dealer: Dealer) -> DatasetIterator:
        """In the task's thread."""
        dataset = deserialize(dealer.definition(task.fingerprint))
        if task.terms.coordinated:
            rounds_task.require_infinite(dataset.cardinality())
        if task.terms.cache:
            shared_task.require_infinite(dataset.cardinality())
        if task.terms.mode == DYNAMIC:
            return open_split(dataset, dealer.ask)
        policy = ShardingPolicy(task.terms.mode).name
        # Seeds that nobody gave are the same for all workers of an iteration: else their shares would not be parts of one order.
        return iter(shard_for_worker(dataset, policy, task.num_workers, task.index, seed=task.iteration))

    def _finished(self, task: WorkerTask) -> None:
        try:
            self._loop.call_soon(self.finished, task.id)
        except OpError:
            pass  # the worker has ended
