"""The worker's side of data-service tasks that run in child processes. User code that crashes or
hangs stops only its own process.

Which process runs a task
    Each task gets a process of its own, as long as the worker has fewer than
    TASK_PROCESSES_PER_CORE processes for each core. A further task joins the process that has the
    fewest unfinished tasks, and runs there as threads. A task whose process has crashed runs alone
    from then on, so that the next crash is charged to the right task. Such processes come on top of
    the bound.

    A process that has run the tasks of one dataset is kept for KEPT_S after its last task, and the
    next task of this dataset runs in it, if the user code of the earlier tasks has ended. So a new
    iterator waits for no fork, no import and no pipeline. For other datasets, a worker that has had
    a task has a spare process, which waits for its first task with loop, sockets and a
    connection to the dispatcher, for at most SPARE_KEPT_S.

How readers reach a task
    The worker opens a listening socket for each task, and publishes the socket's port at once. It
    accepts no connection on this socket. When the first reader connects, the worker has its zygote
    fork a child, which accepts the connections (task_main.py). A task without readers therefore
    costs a socket and no process, and a reader need not request the start of the process. The
    worker keeps the socket open. If the child crashes, its readers reconnect to the same port,
    where the next child accepts their connections. A task that joins a process has a port of its
    own, too: the worker passes its listening socket to the process.

When the process crashes (a signal, os._exit, out of memory)
    Only the tasks of the process are affected, each as if the process were its own, except that the
    crash of a process with several unfinished tasks is charged to none of them. In a DYNAMIC task
    one request gets an error that says how the process ended. The elements that the process held
    are lost, and a new process continues with the positions that have not been given to a process.
    After CRASHES_MAX crashes the task has failed for good, and every request gets the error. A
    coordinated task, a task that trainers share, and any task that is not DYNAMIC have failed for
    good after the first crash, because a new process would begin again and deliver all elements a
    second time.

    A task that computes portions loses no elements. The worker reports the crash to the dispatcher,
    which gives out the portions of the process again, and counts the crashes. The next process
    starts only after the dispatcher has confirmed the report, so that the crash is not charged to
    the portions of the next process.

    If the zygote ended the process because this worker was suspended, this is no crash. Another
    process starts when a reader connects.

The end
    A process that is not kept, or no longer, sends its last replies, and ends. The worker kills the
    process when it has sent nothing for END_S, even if user code is running. All processes end with
    the worker.

Everything here runs in the worker's loop thread.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import socket
from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from zmqdist.addresses import join_address
from zmqdist.blas_threads import cores
from zmqdist.data.service.dispatcher.machine.records import DYNAMIC
from zmqdist.data.service.retry import next_pause_s
from zmqdist.data.service.task_errors import describe_exit, process_death_error
from zmqdist.data.service.worker.runtime import TaskHost
from zmqdist.data.service.worker.task_orders import (
    ANSWERED,
    ANSWERS_S,
    FINISHED,
    HAND_BACK,
    REFUSE,
    ROWS_BYTES,
    Begin,
    Surroundings,
    progress_of_replies,
    row,
    tasks_ended,
)
from zmqdist.data.service.worker.tasks_machine import WorkerTask, WorkerTaskState
from zmqdist.errors import OpError, UnknownError
from zmqdist.limits import TASK_PROCESSES_PER_CORE
from zmqdist.process.bound_children import SpawnChild
from zmqdist.process.zygote import SILENT
from zmqdist.transport.endpoint import DTS_PORT, split
from zmqdist.transport.loop import Loop
from zmqdist.transport.own_address import listen
from zmqdist.transport.pipe import BYTES, LoopPipe, Parts

log = logging.getLogger("zmqdist.data")

CRASHES_MAX: Final = 3
"""The number of crashes after which a DYNAMIC task has failed for good."""

END_S: Final = ANSWERS_S + 3.0
"""Seconds after which the worker kills a process whose tasks are all dropped, and whose last
replies do not move on."""

KEPT_S: Final = 10.0
"""Seconds for which a process without tasks waits for another task of its dataset."""

KEPT_MAX: Final = 2
"""Processes without tasks that a worker keeps. Two serve a program that opens the next iterator
before it closes the last one."""

SPARE_S: Final = 0.25
"""Seconds after the first task of a process until the worker forks the next spare process, so that
the fork does not delay the first elements."""

SPARE_KEPT_S: Final = 60.0
"""Seconds after which a spare process that has got no task ends."""

ORDER_AGAIN_S: Final = 0.05
"""Seconds after which the worker repeats an order that a process could not take."""


class TaskProcesses(TaskHost):
    """Runs the tasks of a worker in processes.

    Args:
      spawn: a function that forks a process for tasks. It reports the exit code SILENT for a
        process that the zygote ended because this worker was suspended.
      bind: the host to which listening sockets are bound.

    Attributes:
      processes: the running processes.
      kept: those that wait for another task, first the one that has waited longest.
      spare: the one that waits for its first task.
      processes_max: the number of processes beyond which tasks share processes.
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
        self.loop = loop
        self.spawn = spawn
        self.bind = bind
        self.dispatcher = dispatcher
        self.incarnation = incarnation
        self.dispatcher_timeout_s = dispatcher_timeout_s
        self._tasks: dict[int, _Task] = {}
        self.processes: list[_Process] = []
        self.kept: list[_Process] = []
        self.kept_max = KEPT_MAX
        self.spare: _Process | None = None
        self.processes_max = TASK_PROCESSES_PER_CORE * cores()

    def begin(self, task: WorkerTask) -> None:
        self._tasks[task.id] = _Task(self, task)

    def process_for(self, task: _Task) -> _Process:
        """Return the process that is to run a task."""
        for process in self.kept:
            if process.dataset == task.dataset and process.is_idle and not task.suspect:
                return process
        shared = [process for process in self.processes if process.tasks and not process.alone]
        # the next crash of a suspect task must be charged to it alone
        if task.suspect or len(shared) < self.processes_max:
            process, self.spare = self.spare or _Process(self), None
            process.alone = task.suspect
            self.loop.set_timer("spare task process", self.loop.now() + SPARE_S, self._start_spare)
            return process
        return min(shared, key=lambda process: len(process.unfinished))

    def _start_spare(self) -> None:
        if self.kept_max and self.spare is None:
            self.spare = _Process(self)
            self.loop.set_timer(self.spare, self.loop.now() + SPARE_KEPT_S, self.spare.end)

    def keep(self, kept_max: int) -> None:
        """Keep at most `kept_max` processes without tasks."""
        self.kept_max = kept_max
        for process in self.kept[: max(0, len(self.kept) - kept_max)]:
            process.end()

    def leave(self) -> None:
        self.keep(0)
        if self.spare is not None:
            self.spare.end()

    def location(self, number: int) -> str:
        return self._tasks[number].address

    def drop(self, number: int) -> None:
        task = self._tasks.pop(number, None)
        if task is not None:
            task.end()

    def hand_back(self, number: int) -> bool:
        return self._tasks[number].hand_back()

    def figures(self) -> dict[int, tuple[Any, ...]]:
        """Return the figures that the processes reported last."""
        return {number: task.figures for number, task in self._tasks.items() if task.figures}

    @property
    def unsent(self) -> bool:
        """Whether any process still runs, because a running process may have unsent replies."""
        return bool(self.processes)

    @property
    def has_requests(self) -> bool:
        """Whether any process still runs, because readers may wait for replies of a running
        process."""
        return self.unsent

    def refuse(self) -> None:
        self.leave()
        for task in list(self._tasks.values()):
            task.refuse()

    def close(self) -> None:
        """Drop all tasks. Their processes end when the worker closes its ends of the sockets, or
        when the zygote ends."""
        self.kept_max = 0
        for task in self._tasks.values():
            task.end()
        for process in self.processes:
            process.close()
        self._tasks.clear()
        self.processes.clear()
        self.kept.clear()


class _Process:
    """A child process that runs tasks.

    Attributes:
      alone: whether no further task may join the process.
      tasks: the tasks that the process runs and that are not dropped, by their rows in the shared
        memory. A process without tasks is kept, or ending.
      dataset: the fingerprint of the dataset of all its tasks; "" if they have different datasets.
    """

    def __init__(self, owner: TaskProcesses) -> None:
        self.tasks: dict[int, _Task] = {}
        self.alone = False
        self.dataset: str | None = None
        self._tasks_count = 0
        self._replies_progress = 0
        self._owner = owner
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setblocking(False)
        surroundings = Surroundings(
            incarnation=owner.incarnation,
            dispatcher=owner.dispatcher,
            dispatcher_timeout_s=owner.dispatcher_timeout_s,
            worker=owner.address,
            host=owner.bind,
            cache_bytes=owner.cache_bytes,
            key=owner.security.key,
        )
        self._orders.send(msgspec.msgpack.encode(surroundings))
        memory_fd = os.memfd_create("zmqdist-task", os.MFD_CLOEXEC)
        os.ftruncate(memory_fd, ROWS_BYTES)
        self._memory = mmap.mmap(memory_fd, ROWS_BYTES)
        self._child = owner.spawn([theirs.detach(), memory_fd], self._exited)
        owner.processes.append(self)

    @property
    def unfinished(self) -> list[_Task]:
        return [task for task in self.tasks.values() if not task.finished]

    @property
    def is_idle(self) -> bool:
        """Whether the user code of all tasks has ended."""
        with tasks_ended(self._memory) as ended:
            return bool(ended[0] == self._tasks_count)

    def free_row(self) -> int:
        """Return the number of a row of the shared memory that no task has, and set the row to
        zero."""
        number = next(number for number in itertools.count() if number not in self.tasks)
        with row(self._memory, number) as progress:
            progress[:] = array("Q", bytes(progress.nbytes))
        return number

    def order(self, number: int, task: _Task, descriptors: list[int]) -> bool:
        """Have the process run a task with this row, and close the descriptors. Return False if the
        process cannot take the order now: it has crashed, or has too many orders to read.
        """
        try:
            socket.send_fds(self._orders, [b"t"], descriptors)
        except OSError:
            return False
        else:
            self.tasks[number] = task
            self._tasks_count += 1
            self.dataset = task.dataset if self.dataset in (None, task.dataset) else ""
            if self in self._owner.kept:
                self._owner.kept.remove(self)
            self._owner.loop.set_timer(self, None, self.end)
            return True
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def drop(self, number: int) -> None:
        """Remove a task, and keep or end a process without tasks."""
        del self.tasks[number]
        if self.tasks:
            return
        if self.alone or not self.dataset:
            self.end()
            return
        self._owner.kept.append(self)
        self._owner.loop.set_timer(self, self._owner.loop.now() + KEPT_S, self.end)
        self._owner.keep(self._owner.kept_max)

    def end(self) -> None:
        """Have the process end when its last replies have left. The module's docstring says when
        it is killed."""
        if self in self._owner.kept:
            self._owner.kept.remove(self)
        if self is self._owner.spare:
            self._owner.spare = None
        self._orders.close()
        self._kill_later()

    def _kill_later(self) -> None:
        self._owner.loop.set_timer(self, self._owner.loop.now() + END_S, self._kill_if_idle)

    def _kill_if_idle(self) -> None:
        before = self._replies_progress
        with progress_of_replies(self._memory) as progress:
            self._replies_progress = progress[0]
        if self._replies_progress == before:
            self._child.kill()
        else:
            self._kill_later()

    def _exited(self, code: int) -> None:
        unfinished = self.unfinished
        for number, task in self.tasks.items():
            others_count = sum(running is not task for running in unfinished)
            with row(self._memory, number) as progress:
                task.process_exited(code, self._child.tail(), progress, others_count)
        if self in self._owner.processes:
            self._owner.processes.remove(self)
            if self in self._owner.kept:
                self._owner.kept.remove(self)
            if self is self._owner.spare:
                self._owner.spare = None
            self.close()

    def close(self) -> None:
        self._orders.close()
        self._memory.close()
        self._owner.loop.set_timer(self, None, self._kill_later)


class _Task:
    """One task, and its connection to the process that runs the task while readers need it.

    Attributes:
      suspect: whether a process of the task has crashed, so that the task may be the cause.
    """

    def __init__(self, owner: TaskProcesses, task: WorkerTask) -> None:
        self._owner = owner
        self._loop = owner.loop
        self._task = task
        # The listening socket stays open across crashes, so that readers reach the next process at
        # the same port.
        try:
            self._listener = listen(owner.bind)
        except UnknownError as error:
            # Take any free port, because the readers of a task without a port would wait for ever.
            log.warning(
                "task %d of the data service takes a port that a firewall may reject: %s",
                task.id,
                error,
            )
            self._listener = listen(owner.bind, any_port=True)
        port = self._listener.getsockname()[1]
        self.address = owner.read_at.replace(DTS_PORT, str(port)) or join_address(
            split(owner.address)[0], port
        )
        self._process: _Process | None = None
        self._row = 0
        self._pipe: LoopPipe[bytes] | None = None
        self.figures: tuple[Any, ...] = ()
        self.suspect = False
        self._crashes = 0
        self._pause_s = 0.0
        self._error: OpError | None = None
        self._for_good = False
        self._closed = False
        self._wait_for_readers()

    @property
    def dataset(self) -> str:
        return str(self._task.fingerprint)

    @property
    def finished(self) -> bool:
        return self._task.state is WorkerTaskState.DONE

    def _wait_for_readers(self) -> None:
        if not self._closed:
            self._loop.add_fd(self._listener.fileno(), self._run)

    def _run(self) -> None:
        """Have a process run the task, because a reader has connected."""
        self._loop.remove_fd(self._listener.fileno())
        process = self._owner.process_for(self)
        self._row = process.free_row()
        self._pipe = LoopPipe(self._loop, BYTES, self._receive)
        begin = Begin(
            task=list(self._task.definition),
            row=self._row,
            state=self._owner.state,
            failure=None if self._error is None else (self._error.error_code, self._error.message),
            for_good=self._for_good,
            finished=self.finished,
        )
        self._pipe.send(msgspec.msgpack.encode(begin))
        if not process.order(self._row, self, [self._pipe.theirs, os.dup(self._listener.fileno())]):
            self._close_pipe()
            self._loop.set_timer(self, self._loop.now() + ORDER_AGAIN_S, self._wait_for_readers)
            return
        self._process = process
        if not self._for_good:
            self._error = None
        self._owner.began()

    def _receive(self, message: bytes, _: Parts) -> None:
        if message == FINISHED:
            self._finish()
        elif message == ANSWERED:
            self.end()
        else:
            self.figures = tuple(msgspec.msgpack.decode(message))

    def _finish(self) -> None:
        if not self.finished:
            self._task.enter(WorkerTaskState.DONE)
            self.figures = ()
            self._owner.finished(self._task.id)

    def process_exited(
        self, code: int, tail: str, progress: Sequence[int], others_count: int
    ) -> None:
        """Note the end of the process, and wait for readers of the next process.

        Args:
          tail: the last lines of the process's standard error.
          progress: the task's row of the shared memory.
          others: number of other tasks that the process ran and that were not finished.
        """
        assert self._pipe is not None
        self._process = None
        self._pipe.drain()
        if self._closed:  # the last message was ANSWERED
            return
        # An exit after the last element is no crash, because no element is lost. The code SILENT is
        # no crash either: the zygote ended the process, because the worker was suspended.
        crashed = not self.finished and code != SILENT
        if crashed:
            self._crashed(code, tail, progress, others_count)
        self._close_pipe()
        if self._task.terms.portioned:
            # After a crash of a process with other tasks, the worker does not know which task was
            # the cause.
            how = describe_exit(code) if crashed and not others_count else ""
            self._owner.crashed(self._task.id, how, self._wait_for_readers)
        else:
            # a host on which no process lives must not start one after the other
            self._pause_s = next_pause_s(self._pause_s) if crashed else 0.0
            self._loop.set_timer(self, self._loop.now() + self._pause_s, self._wait_for_readers)

    def _crashed(self, code: int, tail: str, progress: Sequence[int], others_count: int) -> None:
        self.suspect = True
        self._crashes += not others_count
        terms = self._task.terms
        if terms.portioned:
            goes_on = (
                "Another process computes again the elements that readers have not acknowledged."
            )
        elif terms.mode != DYNAMIC or terms.num_consumers or terms.cache:
            goes_on = "The iteration cannot go on: another process would begin again with its first element."
            self._for_good = True
        elif self._crashes >= CRASHES_MAX:
            goes_on = (
                f"This was crash number {self._crashes} of the task, which has failed for good."
            )
            self._for_good = True
        else:
            goes_on = "The elements that it held are lost; another process continues with the positions that no process was given."
        where = self._task.describe(self._owner.address) + (
            f", shared with {others_count} more," if others_count else ""
        )
        error = process_death_error(code, tail, progress, where, goes_on)
        log.warning("%s", error.message)
        if not terms.portioned:
            self._error = error

    def hand_back(self) -> bool:
        """Have the process of the task give back positions, as `TaskHost.hand_back` says. Return
        False if the task has no process."""
        if self._process is None or self._pipe is None:
            return False
        self._pipe.send(HAND_BACK)
        return True

    def refuse(self) -> None:
        """Have the process refuse requests, as `TaskHost.refuse` says. If the task has no process,
        no request waits for a reply, so the task only closes its port.
        """
        if self._process is not None and self._pipe is not None:
            self._pipe.send(REFUSE)
        else:
            self.end()

    def end(self) -> None:
        """End the task. Its process may send its last replies."""
        self._closed = True
        self._loop.remove_fd(self._listener.fileno())
        self._listener.close()
        self._loop.set_timer(self, None, self._wait_for_readers)
        self._close_pipe()
        process, self._process = self._process, None
        if process is not None:
            process.drop(self._row)

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
