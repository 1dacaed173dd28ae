"""The process of one task of the data service: runs its pipeline, and answers its readers itself.

It is forked from the worker's zygote, and has a loop and a router of its own over the listening socket that its worker has made:
elements go from here to the readers. Positions it asks the dispatcher for. With the worker it shares
    a pipe      the worker says Begin, perhaps HAND_BACK or REFUSE and, by closing its end, that this is over; here figures are said,
                FINISHED, and after REFUSE that all is ANSWERED
    a page      of numbers, written here: what the task is at (runners/base.py), for the error that tells how it died
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
from typing import Any, Final

import msgspec

import zmqdist.data.dataset  # noqa: F401  what a description needs, before the fork
from zmqdist.data.service.task_errors import Failed
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
"""How often the worker is told how the task does."""

ANSWERS_S: Final = 2.0
"""So long the last answers have to reach their readers."""


class Begin(msgspec.Struct, array_like=True):
    """What the process is for.

    Attributes:
      task: as the dispatcher defined it.
      state, life: of the dispatcher, and of the worker.
      host: the address that the listening socket is bound to.
      failure: code and text for the process that was here before and died; `for_good`: that is all there is.
      done: the task has come to its end: nothing but that is to be told.
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
"""The largest that glibc takes. Larger arrays are mapped, each into fresh pages."""

KEPT_BYTES_MAX: Final = 256 << 20


def main(pipe_fd: int, page_fd: int, listener_fd: int) -> None:
    """Serve until the worker says that it is over. Does not return."""
    _keep_freed_memory()
    pipe = BlockingPipe(pipe_fd, BYTES)
    page = mmap.mmap(page_fd, PAGE_BYTES)
    first, _ = pipe.receive()
    begin = msgspec.msgpack.decode(first, type=Begin)
    progress: Any = memoryview(page).cast("Q")
    task = WorkerTask(begin.task, progress)
    if begin.failure is not None:
        task.failed = Failed(from_code(*begin.failure), begin.for_good)
    task.done = begin.done
    loop = Loop(f"zmqdist-task-{task.id}")
    credentials = Credentials.of_environment()
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
    loop.call_soon(tasks.start, task)  # a reader is connecting: that was the reason for this process
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
    """Have glibc reuse the memory of arrays. It would map and unmap each large one, and making a 4 MiB array costs more in page faults then
    than sending it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES_MAX)
