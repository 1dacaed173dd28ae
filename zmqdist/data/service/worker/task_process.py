"""The worker's side of data-service tasks that run as child processes. User code that crashes or hangs stops only its own task.

How readers reach a task
    The worker opens a listening socket for each task, and publishes the socket's port at once. It accepts no connection on this socket.
    When the first reader connects, the worker has its zygote fork a child, which accepts the connections (task_main.py). A task without
    readers therefore costs a socket and no process, and a reader need not request the start of the process. The worker keeps the socket
    open. If the child crashes, its readers reconnect to the same port, where the next child accepts their connections.

When the process crashes (a signal, os._exit, out of memory)
    Only the task of the process is affected. In a DYNAMIC task one request gets an error that says how the process ended. The elements that
    the process held are lost, and a new process continues with the positions that have not been given to a process. After CRASHES_MAX
    crashes the task has failed for good, and every request gets the error. A coordinated task, a task that trainers share, and any task
    that is not DYNAMIC have failed for good after the first crash, because a new process would begin again and deliver all elements a
    second time.

    A task that computes portions loses no elements. The worker reports the crash to the dispatcher, which gives out the portions of the
    process again, and counts the crashes. The next process starts only after the dispatcher has confirmed the report, so that the crash is
    not charged to the portions of the next process.

    If the zygote ended the process because this worker was suspended, this is no crash. Another process starts when a reader connects.

The end
    After a task is dropped, its process may send its last replies for END_S. Then the worker kills the process, even if user code is
    running. All processes end with the worker.

Everything here runs in the worker's loop thread.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable
from typing import Any, Final

import msgspec

from zmqdist.addresses import join_address
from zmqdist.data.service.dispatcher.machine.records import DYNAMIC
from zmqdist.data.service.task_errors import describe_exit, process_death_error
from zmqdist.data.service.worker.task_main import (
    ANSWERED,
    ANSWERS_S,
    FINISHED,
    HAND_BACK,
    PAGE_BYTES,
    REFUSE,
    Begin,
)
from zmqdist.data.service.worker.tasks_machine import WorkerTask
from zmqdist.errors import OpError, UnknownError
from zmqdist.process.bound_children import BoundChild, SpawnChild
from zmqdist.process.pipe import BYTES, LoopPipe, Parts
from zmqdist.process.zygote import SILENT
from zmqdist.transport.endpoint import DTS_PORT, split
from zmqdist.transport.listener import listen
from zmqdist.transport.loop import Loop

log = logging.getLogger("zmqdist.data")

CRASHES_MAX: Final = 3
"""The number of crashes after which a DYNAMIC task has failed for good."""

END_S: Final = ANSWERS_S + 3.0
"""Seconds after which the worker kills the process of a dropped task."""


class TaskProcesses:
    """Runs each task of a worker in a process of its own. Implements `TaskHost` (runtime.py).

    Args:
      spawn: a function that forks a task's process. It reports the exit code SILENT for a process that the zygote ended because this worker
        was suspended.
      bind: the host to which listening sockets are bound.

    Attributes:
      crashed: `crashed(task, how, then)` reports a crash to the dispatcher, and calls `then` in the loop thread when the dispatcher has
        confirmed the report.
      ending: the dropped tasks whose processes still run.
    """

    def __init__(
        self,
        loop: Loop,
        spawn: SpawnChild,
        bind: str,
        dispatcher: str,
        incarnation: int,
        dispatcher_timeout_s: float,
    ) -> None:
        self.state = 0
        self.address = self.read_at = ""
        self.cache_bytes = 0
        self.began: Callable[[], None] = lambda: None
        self.finished: Callable[[int], None] = lambda number: None
        self.crashed: Callable[[int, str, Callable[[], None]], None] = lambda number, how, then: then()
        self.loop = loop
        self.spawn = spawn
        self.bind = bind
        self._dispatcher = dispatcher
        self._incarnation = incarnation
        self._dispatcher_timeout_s = dispatcher_timeout_s
        self._tasks: dict[int, _TaskProcess] = {}
        self.ending: set[_TaskProcess] = set()

    def begin(self, task: WorkerTask) -> None:
        self._tasks[task.id] = _TaskProcess(self, task)

    def location(self, number: int) -> str:
        return self._tasks[number].address

    def drop(self, number: int) -> None:
        process = self._tasks.pop(number, None)
        if process is not None:
            process.end()

    def hand_back(self, number: int) -> bool:
        return self._tasks[number].hand_back()

    def figures(self) -> dict[int, tuple[Any, ...]]:
        """Return the last figures that each process reported."""
        return {number: process.figures for number, process in self._tasks.items() if process.figures}

    @property
    def unsent(self) -> bool:
        """Whether any process of a task still runs, because a running process may have unsent replies."""
        return bool(self.ending) or any(process.alive for process in self._tasks.values())

    @property
    def has_requests(self) -> bool:
        """Whether any process of a task still runs, because readers may wait for replies of a running process."""
        return self.unsent

    def refuse(self) -> None:
        for process in self._tasks.values():
            process.refuse()

    def close(self) -> None:
        """Drop all tasks. Their processes end when the worker's end of the pipe closes, or when the zygote ends."""
        for process in (*self._tasks.values(), *self.ending):
            process.close()
        self._tasks.clear()
        self.ending.clear()

    def begin_message(self, task: WorkerTask, error: OpError | None, for_good: bool) -> Begin:
        """Return the first message for a new process of a task."""
        failure = None if error is None else (error.error_code, error.message)
        return Begin(
            task=list(task.definition),
            state=self.state,
            incarnation=self._incarnation,
            dispatcher=self._dispatcher,
            dispatcher_timeout_s=self._dispatcher_timeout_s,
            worker=self.address,
            host=self.bind,
            cache_bytes=self.cache_bytes,
            failure=failure,
            for_good=for_good,
            done=task.done,
        )


class _TaskProcess:
    """One task, and the process that runs the task while readers need it."""

    def __init__(self, owner: TaskProcesses, task: WorkerTask) -> None:
        self._owner = owner
        self._loop = owner.loop
        self._task = task
        # The listening socket stays open across crashes, so that readers reach the next process at the same port.
        try:
            self._listener = listen(owner.bind)
        except UnknownError as error:
            # Take any free port, because the readers of a task without a port would wait for ever.
            log.warning("task %d of the data service takes a port that a firewall may reject: %s", task.id, error)
            self._listener = listen(owner.bind, any_port=True)
        port = self._listener.getsockname()[1]
        self.address = owner.read_at.replace(DTS_PORT, str(port)) or join_address(split(owner.address)[0], port)
        self._child: BoundChild | None = None
        self._pipe: LoopPipe[bytes] | None = None
        self._page: mmap.mmap | None = None
        self.figures: tuple[Any, ...] = ()
        self._crashes = 0
        self._error: OpError | None = None
        self._for_good = False
        self._ended = False
        self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        if self._ended:
            return
        self._loop.add_fd(self._listener.fileno(), self._fork)

    def _fork(self) -> None:
        """Start a process, because a reader has connected."""
        self._loop.remove_fd(self._listener.fileno())
        self._pipe = LoopPipe(self._loop, BYTES, self._receive)
        self._pipe.send(msgspec.msgpack.encode(self._owner.begin_message(self._task, self._error, self._for_good)))
        if not self._for_good:
            self._error = None
        page_fd = os.memfd_create("zmqdist-task", os.MFD_CLOEXEC)
        os.ftruncate(page_fd, PAGE_BYTES)
        self._page = mmap.mmap(page_fd, PAGE_BYTES)
        fds = [self._pipe.theirs, page_fd, os.dup(self._listener.fileno())]
        self._child = self._owner.spawn(fds, self._exited)
        self._owner.began()

    def _receive(self, message: bytes, _: Parts) -> None:
        if message == FINISHED:
            self._finish()
        elif message == ANSWERED:
            self.end()
        else:
            self.figures = tuple(msgspec.msgpack.decode(message))

    def _finish(self) -> None:
        if not self._task.done:
            self._task.done = True
            self.figures = ()
            self._owner.finished(self._task.id)

    def _exited(self, code: int) -> None:
        child, self._child = self._child, None
        assert child is not None
        crashed = False
        if not self._ended and self._pipe is not None:
            self._pipe.drain()
            # An exit after the last element is no crash, because no element is lost. The code SILENT is no crash either: the zygote ended
            # the process, because the worker was suspended.
            crashed = not self._task.done and code != SILENT
            if crashed:
                self._crashed(code, child.tail())
        self._close_pipe()
        if self._ended:
            self._owner.ending.discard(self)
            self._loop.set_timer(self, None, self._kill)
        elif self._task.terms.portioned:
            self._owner.crashed(self._task.id, describe_exit(code) if crashed else "", self._wait_for_readers)
        else:
            self._wait_for_readers()

    def _crashed(self, code: int, tail: str) -> None:
        assert self._page is not None
        self._crashes += 1
        terms = self._task.terms
        if terms.portioned:
            goes_on = "Another process computes again the elements that readers have not acknowledged."
        elif terms.mode != DYNAMIC or terms.num_consumers or terms.cache:
            goes_on = "The iteration cannot go on: another process would begin again with its first element."
            self._for_good = True
        elif self._crashes >= CRASHES_MAX:
            goes_on = f"This was crash number {self._crashes} of the task, which has failed for good."
            self._for_good = True
        else:
            goes_on = "The elements that it held are lost; another process continues with the positions that no process was given."
        with memoryview(self._page).cast("Q") as progress:
            where = self._task.describe(self._owner.address)
            error = process_death_error(code, tail, progress, where, goes_on)
        log.warning("%s", error.message)
        if not terms.portioned:
            self._error = error

    @property
    def alive(self) -> bool:
        return self._child is not None

    def hand_back(self) -> bool:
        """Have the process of the task give back positions, as `TaskHost.hand_back` says. Return False if the task has no process."""
        if self._pipe is None:
            return False
        self._pipe.send(HAND_BACK)
        return True

    def refuse(self) -> None:
        """Have the process refuse requests, as `TaskHost.refuse` says. If the task has no process, no request waits for a reply, so the
        task only closes its port.
        """
        if self._pipe is not None:
            self._pipe.send(REFUSE)
        else:
            self._ended = True
            self._close_listener()

    def end(self) -> None:
        """End the task. Its process may send its last replies."""
        self._ended = True
        self._close_listener()
        if self._child is not None and self._pipe is not None:
            self._owner.ending.add(self)
            self._pipe.end()
            self._loop.set_timer(self, self._loop.now() + END_S, self._kill)

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        """End the task, and close all descriptors. Its process ends because the pipe is closed, or when the zygote ends."""
        self._ended = True
        self._loop.set_timer(self, None, self._kill)
        self._close_listener()
        self._close_pipe()

    def _close_listener(self) -> None:
        self._loop.remove_fd(self._listener.fileno())
        self._listener.close()

    def _close_pipe(self) -> None:
        if self._pipe is not None and self._page is not None:
            self._pipe.close()
            self._page.close()
            self._pipe = self._page = None
