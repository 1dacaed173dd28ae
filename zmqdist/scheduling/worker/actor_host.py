"""The processes of a worker's actors, from the worker's side: the runtime of ActorHost
(actor_host_machine.py).

The worker opens a listening socket for each process, so that the address of the actor is known and
lies within ZMQDIST_PORTS, and hands it to the process (actor_main.py) together with a pipe. The
worker closes its end of the pipe's sending direction to end the process.

The code of this module runs in the loop's thread.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable

from zmqdist.addresses import join_address
from zmqdist.errors import OpError, describe_exit
from zmqdist.limits import ORPHAN_LIMIT_S
from zmqdist.messages import KeepActor
from zmqdist.process.bound_children import BoundChild, BoundChildren
from zmqdist.process.zygote import SILENT
from zmqdist.scheduling.worker import actor_main
from zmqdist.scheduling.worker.actor_main import (
    ACTOR_CODEC,
    ActorBegin,
    ActorFailed,
    ActorMessage,
    ActorReport,
    ActorServes,
)
from zmqdist.scheduling.worker.run_figures import TABLE_BYTES, RunReader, new_table
from zmqdist.scheduling.worker.worker_events import (
    ActorEnded,
    ActorServing,
    EndActor,
    KillActor,
    SpawnActor,
)
from zmqdist.scheduling.worker.worker_reports import ActorAtWork, WorkerReports
from zmqdist.task_context import Worker
from zmqdist.transport.endpoint import split
from zmqdist.transport.loop import Loop
from zmqdist.transport.own_address import listen
from zmqdist.transport.pipe import LoopPipe, Parts

log = logging.getLogger("zmqdist.scheduling")

Feed = Callable[[ActorServing | ActorEnded], None]


class ActorProcesses:
    """The processes of the actors of one worker.

    Args:
      feed: called with each event of a process.
      bind: the host to which listening sockets are bound.
      worker_address: the address at which other processes reach the worker; they reach the actors
        at the same host.
      dispatcher: the dispatcher's address.
      worker: returns the worker's index and the number of workers.
      variables: returns the environment variables of a process for these devices.
      facts: gets what the processes report for the facts.
    """

    def __init__(
        self,
        loop: Loop,
        children: BoundChildren,
        feed: Feed,
        bind: str,
        worker_address: str,
        dispatcher: str,
        worker: Worker,
        variables: Callable[[tuple[int, ...]], dict[str, str]],
        facts: WorkerReports,
    ) -> None:
        self.facts = facts
        self.loop = loop
        self.feed = feed
        self._children = children
        self._bind, self._host = bind, split(worker_address)[0]
        self._dispatcher = dispatcher
        self._worker = worker
        self._variables = variables
        self._processes: dict[int, _Process] = {}

    def spawn(self, spawn: SpawnActor) -> None:
        descriptors: list[int] = []
        process = _Process(self, spawn)
        try:
            listener = listen(self._bind)
            address = join_address(self._host, listener.getsockname()[1])
            descriptors.append(listener.detach())
            descriptors.append(process.share_table())
            process.pipe = LoopPipe(self.loop, ACTOR_CODEC, process.receive)
            descriptors.insert(0, process.pipe.theirs)
            begin = ActorBegin(
                spawn.spec,
                spawn.incarnation,
                self._dispatcher,
                self._bind,
                *self._worker(),
                address,
            )
            process.pipe.send(begin)
            process.child = self._children.spawn(
                actor_main.__name__,
                descriptors,
                process.process_exited,
                self._variables(spawn.devices),
                f"actor {spawn.spec.cls}",
            )
        except (OpError, OSError) as error:  # no descriptor, or no port in ZMQDIST_PORTS, is left
            for descriptor in descriptors:
                os.close(descriptor)
            process.close()
            reason = f"its process could not be started: {error}"
            self.loop.call_soon(self.feed, ActorEnded(spawn.incarnation, reason))
            return
        self._processes[spawn.incarnation] = process

    def end(self, end: EndActor) -> None:
        if end.incarnation in self._processes:
            self._processes[end.incarnation].end()

    def keep(self, keep: KeepActor) -> None:
        if keep.incarnation in self._processes:
            self._processes[keep.incarnation].child.keep(ORPHAN_LIMIT_S)

    def kill(self, kill: KillActor) -> None:
        if kill.incarnation in self._processes:
            self._processes[kill.incarnation].kill()

    def at_work(self) -> list[ActorAtWork]:
        """Return the actors that have a process."""
        return [process.at_work for process in self._processes.values() if process.child.pid]

    def forget(self, incarnation: int) -> None:
        self._processes.pop(incarnation).close()

    def close(self) -> None:
        """Release the pipes. The processes end together with the zygote."""
        for incarnation in list(self._processes):
            self.forget(incarnation)


class _Process:
    """One process of an actor. `child` and `pipe` exist once it was ordered."""

    child: BoundChild
    pipe: LoopPipe[ActorMessage] | None = None
    _table: tuple[mmap.mmap, RunReader] | None = None

    def __init__(self, owner: ActorProcesses, spawn: SpawnActor) -> None:
        self._owner = owner
        self._spec = spawn.spec
        self._incarnation, self._cls = spawn.incarnation, spawn.spec.cls
        self._error = b""
        self._ends = False

    def share_table(self) -> int:
        """Make the table of the process's figures, and return its descriptor."""
        fd = new_table("zmqdist-actor")
        memory = mmap.mmap(fd, TABLE_BYTES)
        self._table = memory, RunReader(memory)
        self._table[1].observe(self._owner.facts.runs_per_table)
        return fd

    @property
    def at_work(self) -> ActorAtWork:
        assert self._table is not None
        spec = self._spec
        return ActorAtWork(
            spec.actor, spec.cls, self.child.pid, self._table[1], sorted(spec.methods)
        )

    def receive(self, message: ActorMessage, _: Parts) -> None:
        if isinstance(message, ActorServes):
            self._owner.feed(ActorServing(self._incarnation, message.address, message.key))
        elif isinstance(message, ActorFailed):
            self._error = message.error
        elif isinstance(message, ActorReport):
            self._owner.facts.calls_reported(message.failures, message.runs)

    def end(self) -> None:
        self._ends = True
        if self.pipe is not None:
            self.pipe.end()

    def kill(self) -> None:
        self._ends = True
        self.child.kill()

    def process_exited(self, code: int) -> None:
        assert self.pipe is not None
        self.pipe.drain()  # the process may have sent the error of its `__init__`
        last = self.at_work
        self._owner.facts.take_runs(last.runs, last.cls, last.methods)
        self._owner.forget(self._incarnation)
        if self._error:
            reason = "its object could not be made"
        elif code == SILENT:
            reason = "it was killed, because its worker was suspended"
        else:
            tail = self.child.tail()
            reason = f"its process ended: {describe_exit(code)}"
            if not self._ends:
                log.warning("the process of an actor %s ended: %s", self._cls, describe_exit(code))
            if tail:
                reason += f"; it last wrote:\n{tail}"
        self._owner.feed(ActorEnded(self._incarnation, reason, self._error))

    def close(self) -> None:
        if self.pipe is not None:
            self.pipe.close()
        if self._table is not None:
            memory, runs = self._table
            runs.close()
            memory.close()
