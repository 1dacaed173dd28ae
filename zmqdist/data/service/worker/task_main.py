"""The process of one data-service task. It runs the task's pipeline, and replies to the task's readers without the worker.

The worker's zygote forks this process. The process has a loop, and a router on the listening socket that the worker has opened, so that it
sends elements directly to the readers. It requests positions from the dispatcher. It shares two things with the worker:
    a pipe      The worker sends Begin first, later perhaps HAND_BACK or REFUSE, and closes its end of the pipe when the task is dropped.
                This process sends its figures, FINISHED when readers have taken the last element, and ANSWERED when, after REFUSE, no
                request waits any more.
    a page      This process writes the progress of the task (element_replies.py) to a page of shared memory. If the process crashes, the
                worker reads the progress from this page for the error text.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
from typing import Any, Final

import msgspec

import zmqdist.data.dataset  # noqa: F401  loads the operators before the fork
from zmqdist.data.service.task_errors import TaskFailure
from zmqdist.data.service.worker.runtime import FLUSH_S, TaskThreads
from zmqdist.data.service.worker.tasks_machine import WorkerTask
from zmqdist.errors import from_code
from zmqdist.process.pipe import BYTES, BlockingPipe
from zmqdist.rpc.service import RpcService
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Router
from zmqdist.wire.hello import our_hello

PAGE_BYTES: Final = 4096

HAND_BACK: Final = b"hand back"
REFUSE: Final = b"refuse"
FINISHED: Final = b"finished"
ANSWERED: Final = b"answered"

FIGURES_S: Final = 1.0
"""Seconds between two reports of the process's figures to the worker."""

ANSWERS_S: Final = 2.0
"""Seconds within which the last replies have to reach their readers."""


class Begin(msgspec.Struct, array_like=True):
    """The first message of the worker to the process of a task.

    Attributes:
      task: definition of the task, as the dispatcher sent it.
      state, incarnation: random number of the dispatcher's durable state, and incarnation of the worker.
      worker: address of the worker, for error texts.
      host: address that the listening socket is bound to.
      failure: error code and text of the crash of the previous process of this task; None if there was no crash.
      for_good: whether the task has failed for good, so that every request gets `failure`. Otherwise only one request gets it.
      done: whether the task has ended, so that every request gets END.
    """

    task: list[Any]
    state: int
    incarnation: int
    dispatcher: str
    dispatcher_timeout_s: float
    worker: str
    host: str
    cache_bytes: int = 0
    failure: tuple[int, str] | None = None
    for_good: bool = False
    done: bool = False


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt (malloc.h)."""

MAPPED_BYTES_MIN: Final = 32 << 20
"""The largest M_MMAP_THRESHOLD that glibc accepts, in bytes. glibc maps each larger array into fresh pages."""

KEPT_BYTES_MAX: Final = 256 << 20
"""Bytes of free memory at the top of the heap that glibc keeps for later arrays."""


def main(pipe_fd: int, page_fd: int, listener_fd: int) -> None:
    """Serve the task until the worker closes its end of the pipe. Does not return."""
    _keep_freed_memory()
    pipe = BlockingPipe(pipe_fd, BYTES)
    page = mmap.mmap(page_fd, PAGE_BYTES)
    first, _ = pipe.receive()
    begin = msgspec.msgpack.decode(first, type=Begin)
    progress: Any = memoryview(page).cast("Q")
    task = WorkerTask(begin.task, progress)
    if begin.failure is not None:
        task.failed = TaskFailure(from_code(*begin.failure), begin.for_good)
    task.done = begin.done
    loop = Loop(f"zmqdist-task-{task.id}")
    credentials = Credentials.from_environment()
    incarnation = secrets.randbits(62) | 1
    security = credentials.server(begin.host, "worker")
    router = Router(loop, security, our_hello("server", incarnation, f"task {task.id} of {begin.worker}"))
    service = RpcService("task")
    tasks = TaskThreads(loop, service, begin.dispatcher, credentials, begin.incarnation, begin.dispatcher_timeout_s)
    tasks.finished = lambda number: pipe.send(FINISHED)
    tasks.address = begin.worker
    tasks.cache_bytes = begin.cache_bytes
    tasks.state = begin.state
    tasks.begin(task)

    def report() -> None:
        for figures in tasks.figures().values():
            pipe.send(msgspec.msgpack.encode(figures))
        loop.set_timer("report", loop.now() + FIGURES_S, report)

    def end_if_answered() -> None:
        if tasks.has_requests:
            loop.set_timer("answered", loop.now() + FLUSH_S, end_if_answered)
        else:
            pipe.send(ANSWERED)

    tasks.began = report
    service.attach(router, loop, incarnation)
    loop.on_stop(service.close)
    router.bind_fd(listener_fd)
    loop.start()
    loop.call_soon(tasks.start, task)  # start computing at once, because a reader is connecting
    with contextlib.suppress(EOFError):
        while True:
            message, _ = pipe.receive()
            if message == REFUSE:
                loop.run(tasks.refuse)
                loop.run(end_if_answered)
            elif not loop.run(tasks.hand_back, task.id):
                pipe.send(FINISHED)
    loop.run(tasks.close)
    service.stop(ANSWERS_S)
    loop.stop()
    os._exit(0)


def _keep_freed_memory() -> None:
    """Have glibc reuse the memory of arrays. By default glibc maps and unmaps the memory of each large array, and for an array of 4 MiB the
    page faults then take more time than sending it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have no mallopt
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES_MAX)
