"""The worker's decisions about its actors: which processes it starts, keeps and ends. No I/O.

`ActorHost` is a part of the worker's machine (machine.py), which has the contact with the
dispatcher and says when processes must end because it was lost for too long.

Promises, checked by tests/scheduling/worker/test_actor_host_machine.py and tests/sim
    H1  without contact to a dispatcher the processes end when all work of the worker must stop, but
        for those that are kept (KeepActor), which end with the worker
    H2  the worker names each process that it has in each Register, until its end was seen
    H3  a process that was told to stop is killed when its grace is over
    H4  an order to start an incarnation that the worker had before starts no process, nor does an
         order that may have waited in the socket while the worker was suspended
    H5  the end of each process is reported once, and each order to start is followed by a report
    H6  a worker that leaves starts no process, and ends those that it has within its grace
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from zmqdist.messages import (
    ActorExited,
    ActorReady,
    ActorSpec,
    HostedActor,
    KeepActor,
    Message,
    StartActor,
    StopActor,
)
from zmqdist.scheduling.worker.worker_events import EndActor, KillActor, SpawnActor
from zmqdist.transitions import enter


class ProcessState(enum.Enum):
    """The state of an actor's process at its worker."""

    STARTING = "starting"
    """It makes its object."""
    READY = "ready"
    """It serves calls."""
    STOPPING = "stopping"
    """It was told to stop: no further call begins."""
    KILLED = "killed"
    """It was killed, and its end was not seen yet."""
    GONE = "gone"


_P = ProcessState
PROCESS_TRANSITIONS: Final[Mapping[ProcessState, frozenset[ProcessState]]] = {
    _P.STARTING: frozenset({_P.READY, _P.STOPPING, _P.KILLED, _P.GONE}),
    _P.READY: frozenset({_P.STOPPING, _P.KILLED, _P.GONE}),
    _P.STOPPING: frozenset({_P.KILLED, _P.GONE}),
    _P.KILLED: frozenset({_P.GONE}),
    _P.GONE: frozenset(),
}


@dataclass(slots=True, eq=False)
class ActorProcess:
    """One process of an actor. `kill_at` is the end of its grace; None while it is to live."""

    spec: ActorSpec
    incarnation: int
    restarts_left: int
    devices: tuple[int, ...]
    state: ProcessState = ProcessState.STARTING
    is_kept: bool = False
    address: str = ""
    key: bytes = b""
    kill_at: float | None = None

    def enter(self, state: ProcessState) -> None:
        self.state = enter(
            PROCESS_TRANSITIONS, self.state, state, "actor", self.spec.actor, self.incarnation
        )


class ActorHost:
    """The actors of one worker; the module's docstring has the rules.

    Attributes:
      actors_max: how many the dispatcher may place here; 0 if slots are threads.
      processes: the processes whose end was not seen, by incarnation.
      deadline: the time at which `kill_overdue` must next be called; None means never.
      orders: the orders to start that wait until contact to the dispatcher is certain.
    """

    def __init__(self, actors_max: int) -> None:
        self.actors_max = actors_max
        self.processes: dict[int, ActorProcess] = {}
        self.deadline: float | None = None
        self.orders: list[StartActor] = []
        self._latest = 0
        """The highest incarnation that the present dispatcher has ordered. It orders them in their
        order, and repeats only those that were lost with a connection."""

    @property
    def present(self) -> list[HostedActor]:
        return [
            HostedActor(
                p.spec, p.incarnation, p.restarts_left, p.is_kept, p.address, p.key, p.devices
            )
            for p in self.processes.values()
        ]

    def met_dispatcher(self) -> None:
        """The worker has connected to a new dispatcher, whose numbers may begin anywhere."""
        self._latest = 0

    def start(self, order: StartActor, *, leaving: bool) -> list[SpawnActor | Message]:
        spec, incarnation = order.spec, order.incarnation
        if incarnation in self.processes:
            return []
        if leaving:
            reason = "its worker leaves"
            return [ActorExited(spec.actor, incarnation, reason, has_begun=False)]
        if incarnation <= self._latest:
            return [ActorExited(spec.actor, incarnation, "its process has ended before")]
        self._latest = incarnation
        self.processes[incarnation] = ActorProcess(
            spec, incarnation, order.restarts_left, order.devices
        )
        return [SpawnActor(spec, incarnation, order.devices)]

    def keep(self, order: KeepActor) -> list[KeepActor]:
        if order.incarnation not in self.processes:
            return []
        self.processes[order.incarnation].is_kept = True
        return [order]

    def stop(self, order: StopActor, now: float) -> Sequence[EndActor | Message]:
        process = self.processes.get(order.incarnation)
        self.orders = [start for start in self.orders if start.incarnation != order.incarnation]
        if process is None:
            # The report of its end may be lost.
            return [ActorExited(order.actor, order.incarnation, "its process has ended before")]
        return self._stop(process, now + order.grace_s)

    def stop_all(self, until: float) -> list[EndActor]:
        return [
            effect for process in self.processes.values() for effect in self._stop(process, until)
        ]

    def _stop(self, process: ActorProcess, until: float) -> list[EndActor]:
        if process.state is _P.KILLED:
            return []
        # A second order can shorten the grace, but not prolong it.
        process.kill_at = until if process.kill_at is None else min(process.kill_at, until)
        self._set_deadline()
        if process.state is _P.STOPPING:
            return []
        process.enter(_P.STOPPING)
        return [EndActor(process.incarnation)]

    def kill_unkept(self) -> list[KillActor]:
        """Kill the processes that may not live without contact (H1)."""
        return self._kill([p for p in self.processes.values() if not p.is_kept])

    def kill_all(self) -> list[KillActor]:
        return self._kill([*self.processes.values()])

    def kill_overdue(self, now: float) -> list[KillActor]:
        if self.deadline is None or now < self.deadline:
            return []
        return self._kill(
            [p for p in self.processes.values() if p.kill_at is not None and p.kill_at <= now]
        )

    def _kill(self, processes: list[ActorProcess]) -> list[KillActor]:
        effects = []
        for process in processes:
            if process.state is not _P.KILLED:
                process.enter(_P.KILLED)
                process.kill_at = None
                effects.append(KillActor(process.incarnation))
        self._set_deadline()
        return effects

    def served(self, incarnation: int, address: str, key: bytes) -> list[Message]:
        """A process has made its object, and serves calls."""
        process = self.processes.get(incarnation)
        if process is None or process.state is not _P.STARTING:
            return []
        process.enter(_P.READY)
        process.address, process.key = address, key
        return [ActorReady(process.spec.actor, incarnation, address, key)]

    def ended(self, incarnation: int, reason: str, error: bytes) -> list[Message]:
        """A process has ended. `error` is the packed error of its `__init__`."""
        process = self.processes.pop(incarnation, None)
        if process is None:
            return []
        process.enter(_P.GONE)
        self._set_deadline()
        return [ActorExited(process.spec.actor, incarnation, reason, bool(error), error)]

    def _set_deadline(self) -> None:
        times = [p.kill_at for p in self.processes.values() if p.kill_at is not None]
        self.deadline = min(times, default=None)
