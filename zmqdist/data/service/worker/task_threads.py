"""The tasks of a worker in threads of one process: that of the worker, or one for data tasks
(task_main.py). This module loads all operators.

A task opens its pipeline when the first reader sends a request. A task that has a process and
serves requests in order of arrival opens its pipeline earlier, when the first reader connects.

Not here: how each kind of task computes elements and distributes them
({first_come,rounds,shared,portions}_task.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from zmqdist.data.dataset import Dataset, deserialize
from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.service import local_workers
from zmqdist.data.service.compression import codec_for, codec_of, compress_batch
from zmqdist.data.service.dispatcher.machine.records import DYNAMIC
from zmqdist.data.service.elements import pack
from zmqdist.data.service.policy import ShardingPolicy
from zmqdist.data.service.reader.delivery import END, FAILED, SOME, Demand
from zmqdist.data.service.split_requests import SplitClient
from zmqdist.data.service.task_errors import describe_error
from zmqdist.data.service.worker import rounds_task, shared_task
from zmqdist.data.service.worker.first_come_task import FirstComeRunner
from zmqdist.data.service.worker.portions_task import PortionsRunner
from zmqdist.data.service.worker.runtime import FLUSH_S, READERS, TaskHost
from zmqdist.data.service.worker.task_orders import ELEMENTS
from zmqdist.data.service.worker.task_runner import ElementReply, Packed, Runner
from zmqdist.data.service.worker.tasks_machine import WorkerTask, WorkerTaskState
from zmqdist.data.sharding import shard_for_worker
from zmqdist.data.splits import open_split, portion_pipeline
from zmqdist.errors import CancelledError, FailedPreconditionError, OpError, UnavailableError
from zmqdist.limits import HEARTBEAT_SERVER_S
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.service import PendingCall, RpcService
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.loop import Loop
from zmqdist.wire.hello import host_identity

log = logging.getLogger("zmqdist.data")


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


class _QuietClient(ZmqClient):
    """A client whose connection may be idle as long as the worker lives."""

    _heartbeat_s = HEARTBEAT_SERVER_S


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

    def registered(self) -> None:
        # readers of this process may take the elements by reference
        local_workers.add(self._incarnation, self)

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
        local_workers.remove(self._incarnation)
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

    def connect(self) -> ZmqClient:
        """Connect to the dispatcher, unless an earlier call did, and return the connection."""
        if self._client is None:
            security = self._credentials.client(self.dispatcher, "worker")
            self._client = _QuietClient(
                self.dispatcher, f"data of {self.address}", security=security
            )
        return self._client

    def _run(self, task: WorkerTask) -> Runner:
        split_client = self._split_clients[task.id] = SplitClient(
            self.connect(), self.state, task.id, self._incarnation, self._timeout_s, task.progress
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
