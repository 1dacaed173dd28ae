"""A process of data-service tasks. It runs the pipelines of its tasks, and replies to the tasks'
readers without the worker.

The worker's zygote forks this process. The process has a loop, and a router on the listening
sockets that the worker has opened for the tasks, so that it sends elements directly to the readers.
It requests positions from the dispatcher. Most processes run one task. This process shares with the
worker:
    a socket for orders  The worker sends Surroundings first. Then it orders each task, and closes the
                         socket when it has dropped all tasks of the process. An order has two descriptors: the pipe of the task,
                         and the socket at which readers of the task connect.
    a pipe per task      The worker sends Begin first, later perhaps HAND_BACK or REFUSE, and closes the pipe when it drops the task. This
                         process sends the task's figures, FINISHED when readers have taken the last element, and ANSWERED when, after
                         REFUSE, no request waits any more.
    memory               This process writes the progress of each task (tasks_machine.py) to a row of shared memory. If the process
                         crashes, the worker reads the progress from this memory for the error text.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import socket
import sys
import threading
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec

from zmqdist import clock as time
from zmqdist.data.service.task_errors import TaskFailure
from zmqdist.data.service.worker.runtime import FLUSH_S
from zmqdist.data.service.worker.task_orders import (
    ANSWERED,
    ANSWERS_S,
    FINISHED,
    REFUSE,
    ROWS_BYTES,
    Begin,
    Surroundings,
    progress_of_replies,
    row,
    tasks_ended,
)
from zmqdist.data.service.worker.task_runner import Runner
from zmqdist.data.service.worker.task_threads import TaskThreads
from zmqdist.data.service.worker.tasks_machine import WorkerTask, WorkerTaskState
from zmqdist.errors import OpError, from_code
from zmqdist.rpc.service import RpcService
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.endpoint import split
from zmqdist.transport.loop import Loop
from zmqdist.transport.pipe import BYTES, BlockingPipe
from zmqdist.transport.router import Router
from zmqdist.wire.hello import our_hello

ORDER_DESCRIPTORS: Final = 2
"""The number of file descriptors of an order: the pipe and the listening socket of a task."""

SURROUNDINGS_BYTES_MAX: Final = 1 << 16
"""The size of the buffer for the worker's first message."""

FIGURES_S: Final = 1.0
"""Seconds between two reports of the process's figures to the worker."""

SWITCH_S: Final = sys.getswitchinterval()
"""Seconds for which a thread may hold the GIL while another waits for it, in a process with one
task."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt (malloc.h)."""

MAPPED_BYTES_MIN: Final = 32 << 20
"""The largest M_MMAP_THRESHOLD that glibc accepts, in bytes. glibc maps each larger array into
fresh pages."""

KEPT_BYTES_MAX: Final = 256 << 20
"""Bytes of free memory at the top of the heap that glibc keeps for later arrays."""


def main(orders_fd: int, memory_fd: int) -> None:
    """Run the tasks that the worker orders, until it closes its end of the socket. Does not
    return.
    """
    _keep_freed_memory()
    orders = socket.socket(fileno=orders_fd)
    memory = mmap.mmap(memory_fd, ROWS_BYTES)
    surroundings = msgspec.msgpack.decode(orders.recv(SURROUNDINGS_BYTES_MAX), type=Surroundings)
    # made before the first order, because a spare process is to be ready
    process = _Process(surroundings, tasks_ended(memory))
    while descriptors := socket.recv_fds(orders, 1, ORDER_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)[1]:
        pipe, listener = BlockingPipe(descriptors[0], BYTES), descriptors[1]
        try:
            begin = msgspec.msgpack.decode(pipe.receive()[0], type=Begin)
        except EOFError:  # the worker has dropped the task meanwhile
            pipe.close()
            os.close(listener)
            continue
        process.begin(begin, pipe, row(memory, begin.row), listener)
    process.stop(progress_of_replies(memory))
    os._exit(0)


class _Process:
    """What the tasks of this process share: a loop, a router, and the TaskThreads.

    Args:
      ended: the number that `tasks_ended` returns.
    """

    def __init__(self, worker: Surroundings, ended: memoryview) -> None:
        self._ended = ended
        self._pipes: dict[int, BlockingPipe[bytes]] = {}
        self._addresses: dict[int, str] = {}
        self._loop = Loop("zmqdist-tasks")
        credentials = Credentials.from_environment()
        incarnation = secrets.randbits(62) | 1
        security = replace(credentials.server(worker.host, "worker"), key=worker.key)
        hello = our_hello("server", incarnation, f"data tasks of {worker.worker}")
        self._router = Router(self._loop, security, hello)
        self._service = RpcService("task")
        self._tasks = TaskThreads(
            self._loop,
            self._service,
            worker.dispatcher,
            credentials,
            worker.incarnation,
            worker.dispatcher_timeout_s,
        )
        self._tasks.finished = lambda number: self._send(number, FINISHED)
        self._tasks.address = worker.worker
        self._tasks.cache_bytes = worker.cache_bytes
        self._tasks.began = self._report
        self._service.attach(self._router, self._loop, incarnation)
        self._loop.on_stop(self._service.close)
        self._loop.call_soon(self._tasks.connect)
        self._loop.start()

    def begin(self, begin: Begin, pipe: BlockingPipe[bytes], progress: Any, listener: int) -> None:
        task = WorkerTask(begin.task, progress)
        if begin.failure is not None:
            task.failed = TaskFailure(from_code(*begin.failure), begin.for_good)
        if begin.finished:
            task.enter(WorkerTaskState.DONE)
        self._tasks.state = begin.state
        self._pipes[task.id] = pipe
        # While n tasks compute, the loop waits for n of Python's intervals each time that it needs
        # the GIL.
        sys.setswitchinterval(SWITCH_S / len(self._pipes))
        self._loop.call_soon(self._serve, task, listener)
        threading.Thread(
            target=self._obey, args=(task.id, pipe), name=f"zmqdist-orders-{task.id}", daemon=True
        ).start()

    def _serve(self, task: WorkerTask, listener: int) -> None:
        self._tasks.begin(task)
        self._addresses[task.id] = self._router.bind_fd(listener)
        self._tasks.start(task)  # start computing at once, because a reader is connecting

    def _obey(self, number: int, pipe: BlockingPipe[bytes]) -> None:
        """Carry out the worker's messages about a task, and drop the task when the worker has
        closed the pipe."""
        with contextlib.suppress(OpError):
            # the loop has ended, because the worker has dropped all tasks
            with contextlib.suppress(EOFError):
                while True:
                    message, _ = pipe.receive()
                    self._loop.call_soon(
                        self._refuse if message == REFUSE else self._hand_back, number
                    )
            runner = self._loop.run(self._drop, number)
            if runner is not None:
                runner.join()
            self._loop.call_soon(self._count_end)

    def _count_end(self) -> None:
        self._ended[0] += 1

    def _hand_back(self, number: int) -> None:
        if not self._tasks.hand_back(number):
            self._send(number, FINISHED)

    def _refuse(self, number: int) -> None:
        self._tasks.refuse()
        self._end_if_answered(number)

    def _end_if_answered(self, number: int) -> None:
        if self._tasks.has_requests:
            again = partial(self._end_if_answered, number)
            self._loop.set_timer(("answered", number), self._loop.now() + FLUSH_S, again)
        else:
            self._send(number, ANSWERED)

    def _drop(self, number: int) -> Runner | None:
        runner = self._tasks.drop(number)
        self._pipes.pop(number).close()
        self._unbind_later(self._addresses.pop(number))
        return runner

    def _unbind_later(self, address: str) -> None:
        self._loop.set_timer(
            address, self._loop.now() + ANSWERS_S, partial(self._unbind_if_sent, address)
        )

    def _unbind_if_sent(self, address: str) -> None:
        """Close the port of a dropped task when its last replies have left, because ZeroMQ ends the
        connections with it."""
        if self._router.unsent_bytes(split(address)[1]):
            self._unbind_later(address)
        else:
            self._router.unbind(address)

    def _report(self) -> None:
        for number, figures in self._tasks.figures().items():
            self._send(number, msgspec.msgpack.encode(figures))
        self._loop.set_timer("report", self._loop.now() + FIGURES_S, self._report)

    def _send(self, number: int, message: bytes) -> None:
        """Send the worker a message about a task, unless the worker has dropped the task."""
        with contextlib.suppress(KeyError, OSError):
            self._pipes[number].send(message)

    def stop(self, progress: memoryview) -> None:
        """End all tasks, and wait until their last replies have reached the readers, or the readers
        have gone. The worker kills this process if `progress` does not change meanwhile.
        """
        self._loop.run(self._tasks.close)
        self._service.stop(ANSWERS_S)
        before, unsent = 1, self._loop.run(self._router.unsent_bytes)
        while before or unsent:
            # looks twice, because it cannot look into ZeroMQ's queues (Router.unsent_bytes)
            time.sleep(FLUSH_S)
            before, unsent = unsent, self._loop.run(self._router.unsent_bytes)
            progress[0] += unsent != before
        self._loop.stop()


def _keep_freed_memory() -> None:
    """Have glibc reuse the memory of arrays. By default glibc maps and unmaps the memory of each
    large array, and for an array of 4 MiB the page faults then take more time than sending it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have no mallopt
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES_MAX)
