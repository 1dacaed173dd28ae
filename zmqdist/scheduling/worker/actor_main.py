"""The process of an actor: it makes the object, and runs the calls that programs send to it.

The worker's zygote forks this process. The process has a loop with a router on the listening socket
that the worker has opened for it, so that callers send calls to it directly. The main thread runs
the program's code: `__init__`, then the methods. The pipe to the worker carries ActorBegin, then
ActorServes or ActorFailed; when the worker closes its end, the actor ends: no further call begins.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
import threading
from typing import Final, TypeAlias

import msgspec

from zmqdist import task_context
from zmqdist.messages import ActorSpec, FailureFacts
from zmqdist.rpc.service import RpcService
from zmqdist.scheduling.shared import actor_class, own_cluster, remote_results
from zmqdist.scheduling.shared.store import BulkStore, Fetcher
from zmqdist.scheduling.worker.actor_calls import CALLERS, ActorCalls
from zmqdist.scheduling.worker.function_call import make_object
from zmqdist.scheduling.worker.run_figures import TABLE_BYTES, CallRun, RunTable
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.loop import Loop
from zmqdist.transport.pipe import BlockingPipe, PipeCodec
from zmqdist.transport.router import Router
from zmqdist.wire.hello import our_hello


class ActorBegin(msgspec.Struct, array_like=True, tag=1):
    """Worker to actor, the first message.

    Attributes:
      dispatcher: the dispatcher's address.
      host: the address to which the listening socket is bound.
      index, workers: the index of the worker, and the number of workers.
      address: the address at which other processes reach the actor.
    """

    spec: ActorSpec
    incarnation: int
    dispatcher: str
    host: str
    index: int
    workers: int
    address: str


class ActorServes(msgspec.Struct, array_like=True, tag=2):
    """Actor to worker: the object is made, and its calls are served at this address."""

    address: str
    key: bytes


class ActorFailed(msgspec.Struct, array_like=True, tag=3):
    """Actor to worker: the object could not be made, because of this packed error. The process
    ends."""

    error: bytes


class ActorReport(msgspec.Struct, array_like=True, tag=4):
    """Actor to worker: calls that have failed and, while a watcher asks, calls that have ended."""

    failures: list[FailureFacts]
    runs: list[CallRun]


ActorMessage: TypeAlias = ActorBegin | ActorServes | ActorFailed | ActorReport

ACTOR_CODEC: Final[PipeCodec[ActorMessage]] = PipeCodec(
    msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(ActorMessage).decode
)


def main(pipe_fd: int, listener_fd: int, table_fd: int) -> None:
    """Run an actor until the worker closes the pipe. Does not return."""
    pipe = BlockingPipe(pipe_fd, ACTOR_CODEC)
    try:
        begin, _ = pipe.receive()
        assert isinstance(begin, ActorBegin)
        table = RunTable(mmap.mmap(table_fd, TABLE_BYTES))
        os.close(table_fd)
        _serve(begin, pipe, listener_fd, table)
    except (EOFError, OSError):
        pass
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass
        os._exit(0)


def _serve(
    begin: ActorBegin, pipe: BlockingPipe[ActorMessage], listener_fd: int, table: RunTable
) -> None:
    spec = begin.spec
    credentials = Credentials.from_environment()
    store_number = secrets.randbits(62) | 1
    loop = Loop(f"zmqdist-actor-{spec.cls}")
    security = credentials.server(begin.host, "worker")
    router = Router(loop, security, our_hello("server", store_number, f"actor {spec.cls}"))
    service = RpcService("actor")
    store = BulkStore(service, CALLERS, store_number)
    calls = ActorCalls(
        loop,
        router,
        store,
        spec,
        begin.incarnation,
        table,
        lambda failures, runs: pipe.send(ActorReport(failures, runs)),
    )
    fetcher = Fetcher(credentials, "worker", begin.dispatcher)
    service.attach(router, loop, store_number)
    loop.on_stop(service.close)
    task_context.enter_process(calls.is_cancelled, lambda: (begin.index, begin.workers))
    remote_results.of_thread.fetcher = fetcher
    actor_class.own = spec
    own_cluster.enter(own_cluster.of_slot(begin.dispatcher, credentials), whole_process=True)
    instance, error = make_object(spec.call, fetcher)
    if error:
        pipe.send(ActorFailed(error))
        return
    router.bind_fd(listener_fd)
    store.address, store.key = begin.address, security.public
    loop.start()
    pipe.send(ActorServes(store.address, store.key))
    threading.Thread(
        target=_wait_for_end, args=(pipe, calls), name="zmqdist-actor-end", daemon=True
    ).start()
    calls.run(instance, fetcher)
    loop.stop()


def _wait_for_end(pipe: BlockingPipe[ActorMessage], calls: ActorCalls) -> None:
    """End the actor when the worker has closed the pipe."""
    try:
        while True:
            pipe.receive()
    except (EOFError, OSError):
        calls.end()
