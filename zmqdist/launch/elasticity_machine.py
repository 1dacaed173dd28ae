"""The rules by which a launcher has more or fewer workers: when a worker starts, which worker
leaves, and which request is refused. No I/O, no clock.

Theory of operation
    The *wanted size* is how many workers the launcher wants. It begins as the `count` of the
    cluster file, and a user's request sets it within the bounds. If the file has `min` and `max`,
    the wanted size also grows while work waits, and shrinks when workers have been idle for
    `idle_s`.
    A worker is *held* from the start of its process until it is told to leave or its process has
    ended for good. The index of a worker that was told to leave is free once its process has ended.
    The dispatcher tells a registered worker to leave (DrainWorker); the launcher sends SIGTERM to a
    worker that has not registered (StopWorker).
    A worker that crashes and may not be restarted again has failed. It stays held and keeps its
    index, because a new worker in its place would most likely fail as well. The next accepted
    request starts it again.
    If a worker stops in good order and was not told to leave by this machine, an admin has drained
    it. The wanted size then shrinks by one, but not below `min`.
    *Room* is how many workers the hosts have slots for. When a host is lost, the room shrinks, but
    the wanted size remains: workers of that host that find no slot on another host fail. Later
    sizes have to fit into the room that is left.

Promises, checked by tests/launch/test_elasticity_machine.py and tests/sim/simulations/elasticity.py
    P1   the wanted size is within the bounds of the file, and never grows beyond `room`
    P2   no more workers are held than are wanted, and no worker starts while `room` workers have a
         process
    P3   a worker starts only under an index that has no process and waits for no restart
    P4   a worker is told to leave at most once, and is not started again before its process has
         ended; a process that outlives its grace by LEAVE_MARGIN_S is killed once
    P5   a worker whose drain would be refused leaves for a request only if the request has `force`;
         the workers with the least to lose leave first
    P6   without a request a worker leaves only if it has been idle for `idle_s` with nothing to
         lose, no work waits, and `min` workers remain
    P7   without a request the wanted size grows only after work has waited for BACKLOG_S without a
         pause, and while no worker is starting
    P8   a request gets one reply, which is the accepted size or a refusal with its reason; a
         refused request changes nothing
    P9   after Closing no worker starts or is told to leave, and each request is refused
    P10  when no more faults occur, as many workers are held as are wanted or as there is room for,
         and all of them run except those that failed

Not here: processes and their restarts (tasks.py), and what a worker has to lose
(scheduling/dispatcher/drain_report.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count
from math import inf
from typing import Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from zmqdist.events import Ticked
from zmqdist.limits import GRACE_S, WORKERS_MAX

BACKLOG_S: Final = 1.0
"""Seconds for which work has to wait before workers are started for it, because a short burst ends
before new workers have registered."""

LEAVE_MARGIN_S: Final = 5.0
"""Seconds after its grace at which a worker that was told to leave is killed if its process still
runs."""


class SizeBounds(Struct, frozen=True):
    """The bounds of the wanted size, and how much room the hosts have.

    Attributes:
      least, most: `min` and `max` of the cluster file. None means that the file has no such bound.
        The size then changes by requests only.
      idle_s: how long a worker is idle before it leaves without a request.
      room: how many workers can run at a time. None means any number.
      room_reason: why more than `room` workers cannot run, as the end of a sentence.
    """

    least: int | None = None
    most: int | None = None
    idle_s: float = inf
    room: int | None = None
    room_reason: str = ""

    @property
    def are_set(self) -> bool:
        """Whether the cluster file has `min` and `max`, so that the size also changes without a
        request."""
        return self.least is not None and self.most is not None

    @property
    def min(self) -> int:
        return 1 if self.least is None else self.least

    @property
    def max(self) -> int:
        return min(
            WORKERS_MAX if self.most is None else self.most,
            WORKERS_MAX if self.room is None else self.room,
        )


class SeenWorker(Struct, frozen=True):
    """A registered worker as the dispatcher sees it.

    Attributes:
      leases: number of work items that the worker has.
      done: number of work items that the worker has ended.
      burden: how much would be lost if the worker left: the number of its kept values, its data
        tasks, its snapshot streams, its actors and the work items pinned to it.
      refused: whether the dispatcher would refuse to drain the worker, because something would be
        lost. Always False except in SizeRequested.
    """

    index: int
    slots: int
    leases: int
    done: int
    burden: int = 0
    refused: bool = False


# -- events ----------------------------------------------------------------------------------------


class SizeRequested(Struct, frozen=True):
    """A user has asked for `count` workers.

    Attributes:
      request: the number of the request, which the reply repeats.
      grace_s: how long the functions on a worker that leaves may continue.
      seen: all registered workers, with `refused` filled in.
      force: whether workers may leave although the dispatcher would refuse to drain them.
    """

    request: int
    count: int
    grace_s: float
    seen: Sequence[SeenWorker] = ()
    force: bool = False


class ClusterSeen(Struct, frozen=True):
    """The runtime has read the dispatcher's figures.

    Attributes:
      queued: number of work items that wait in the dispatcher's queue and may run on any worker.
      seen: all registered workers.
    """

    queued: int
    seen: Sequence[SeenWorker]


class RoomChanged(Struct, frozen=True):
    """The runtime has learned how many workers the hosts have slots for, at the start or after the
    loss of a host. SizeBounds explains the fields.
    """

    room: int | None
    room_reason: str


class RegisteredChanged(Struct, frozen=True):
    """The set of registered workers has changed. `indices` has all workers that are registered
    now.
    """

    indices: frozenset[int]


class WorkerEnded(Struct, frozen=True):
    """The process of a worker has ended, or could not be started.

    Attributes:
      in_order: whether the worker stopped in good order. False if it crashed or could not run.
      restarts: whether the launcher will start the worker again, as the `restarts` of the cluster
        file allows.
    """

    index: int
    in_order: bool
    restarts: bool


class DrainFailed(Struct, frozen=True):
    """The runtime could not carry out a DrainWorker, because the dispatcher does not know the
    worker with this index."""

    index: int


class Closing(Struct, frozen=True):
    """The cluster shuts down."""


# -- effects ---------------------------------------------------------------------------------------


class StartWorker(Struct, frozen=True):
    """Start a worker under this index."""

    index: int


class DrainWorker(Struct, frozen=True):
    """Have the dispatcher tell this worker to leave, and cancel its restarts."""

    index: int
    grace_s: float


class StopWorker(Struct, frozen=True):
    """Send SIGTERM to this worker, which has not registered, and cancel its restarts."""

    index: int


class KillWorker(Struct, frozen=True):
    """Send SIGKILL to this worker, because its process still runs LEAVE_MARGIN_S after its
    grace.
    """

    index: int


class AcceptSize(Struct, frozen=True):
    """Accept a request. The reply has the new wanted size, and the workers that start or leave
    because of the request."""

    request: int
    count: int
    starts: tuple[int, ...]
    leaves: tuple[int, ...]


class RefuseSize(Struct, frozen=True):
    """Refuse a request for a size. The request has had no effect.

    Attributes:
      problem: the reason, or "" if `refused` is the reason.
      refused: the workers that the dispatcher would refuse to drain.
    """

    request: int
    problem: str = ""
    refused: tuple[int, ...] = ()


ElasticityEvent: TypeAlias = (
    SizeRequested
    | ClusterSeen
    | RoomChanged
    | RegisteredChanged
    | WorkerEnded
    | DrainFailed
    | Closing
    | Ticked
)
ElasticityEffect: TypeAlias = (
    StartWorker | DrainWorker | StopWorker | KillWorker | AcceptSize | RefuseSize
)


class _Held(Struct):
    """A held worker.

    Attributes:
      registered: whether the worker is registered with the dispatcher.
      failed: whether its process has failed and is not restarted.
      done: number of work items that it had ended when its figures were last read, -1 before the
        first time.
      idle_since: since when it has had no work and nothing to lose. None means that it has work or
        something to lose, or that it was not seen yet.
    """

    registered: bool = False
    failed: bool = False
    done: int = -1
    idle_since: float | None = None


class Elasticity:
    """The wanted size and the workers of a launcher. The module's docstring has the rules.

    Args:
      indices: the workers that are held from the beginning. The caller starts them, so that the
        machine returns no StartWorker for them. When another worker starts, it gets the lowest free
        index of these, or else the lowest free index of all.

    Attributes:
      wanted: the wanted size.
    """

    def __init__(self, bounds: SizeBounds, indices: Sequence[int]) -> None:
        self.bounds = bounds
        self.wanted = len(indices)
        self._first = sorted(indices)
        self._held = {index: _Held() for index in indices}
        self._leaving: dict[int, float] = {}
        """When each worker is killed that was told to leave and whose process has not ended."""
        self._own = set(indices)
        self._manual: frozenset[int] = frozenset()
        """Registered workers that a user has started by hand. The machine only avoids their
        indices."""
        self._backlog_since: float | None = None
        self._closing = False

    @property
    def starting(self) -> list[int]:
        """The held workers that have not registered and have not failed."""
        return sorted(
            index
            for index, worker in self._held.items()
            if not worker.registered and not worker.failed
        )

    @property
    def leaving(self) -> list[int]:
        """The workers that were told to leave and whose processes have not ended."""
        return sorted(self._leaving)

    @property
    def failed(self) -> list[int]:
        """The held workers that failed and are not restarted."""
        return sorted(index for index, worker in self._held.items() if worker.failed)

    @property
    def deadline(self) -> float | None:
        """When the caller has to call `handle(Ticked(), now)` next, to kill a worker that is
        overdue. None means that no such call is due.
        """
        at = min(self._leaving.values(), default=inf)
        return None if at == inf or self._closing else at

    def handle(self, event: ElasticityEvent, now: float) -> list[ElasticityEffect]:
        """Apply one event and return the effects, in order. `now` is in monotonic seconds and never
        less than in an earlier call."""
        if self._closing:
            if isinstance(event, SizeRequested):
                return [RefuseSize(event.request, "the cluster shuts down")]
            return []
        match event:
            case SizeRequested():
                return self._request(event, now)
            case ClusterSeen():
                return self._look(event, now)
            case RoomChanged(room, reason):
                self.bounds = replace(self.bounds, room=room, room_reason=reason)
                return []
            case RegisteredChanged(indices):
                self._manual = indices - self._own
                for index, worker in self._held.items():
                    worker.registered = index in indices
                    if not worker.registered:
                        # when the worker registers again, its idle time begins anew
                        worker.idle_since = None
                return []
            case WorkerEnded():
                return self._exited(event)
            case DrainFailed(index):
                return [StopWorker(index)] if index in self._leaving else []
            case Closing():
                self._closing = True
                return []
            case Ticked():
                return self._kill_overdue(now)

    # -- requests ----------------------------------------------------------------------------------

    def _request(self, event: SizeRequested, now: float) -> list[ElasticityEffect]:
        problem = self._problem(event.count)
        if problem:
            return [RefuseSize(event.request, problem)]
        leaves = self._choose(len(self._held) - event.count, event.seen)
        refused = tuple(item.index for item in event.seen if item.index in leaves and item.refused)
        if refused and not event.force:
            # P5, P8: nothing has changed yet, so the refused request has no effect
            return [RefuseSize(event.request, refused=refused)]
        self.wanted = event.count
        effects = [effect for index in leaves for effect in self._leave(index, event.grace_s, now)]
        start_effects: list[ElasticityEffect] = []
        for index in self.failed:
            if len(self._held) + len(self._leaving) <= self._room:
                self._held[index] = _Held()
                start_effects.append(StartWorker(index))
            else:
                # There is no room to restart this worker now. When a leaving worker has ended,
                # `_fill` starts a worker instead.
                del self._held[index]
        start_effects += self._fill()
        starts = tuple(item.index for item in start_effects if isinstance(item, StartWorker))
        return [
            *effects,
            *start_effects,
            AcceptSize(event.request, self.wanted, starts, tuple(leaves)),
        ]

    def _problem(self, size: int) -> str:
        """Return why there cannot be `size` workers. "" means that there can be."""
        bounds = self.bounds
        if bounds.room is not None and size > bounds.room:
            return f"there cannot be {size} workers: {bounds.room_reason}"
        if not bounds.min <= size <= bounds.max:
            where = (
                "the cluster file has"
                if bounds.least is not None or bounds.most is not None
                else "a cluster has"
            )
            return f"worker={size} is out of bounds: {where} min {bounds.min} and max {bounds.max}"
        return ""

    def _choose(self, how_many: int, workers: Sequence[SeenWorker]) -> list[int]:
        """Return the `how_many` held workers with the least to lose. Among workers with equal
        losses the highest index is taken first."""
        by_index = {registered.index: registered for registered in workers}

        def loss(index: int) -> tuple[bool, bool, int, int, int]:
            worker = by_index.get(index)
            if worker is None or self._held[index].failed:
                return (False, self._held[index].registered, 0, 0, -index)
            return (worker.refused, True, worker.burden, worker.leases, -index)

        return sorted(self._held, key=loss)[: max(0, how_many)]

    # -- by itself ---------------------------------------------------------------------------------

    def _look(self, event: ClusterSeen, now: float) -> list[ElasticityEffect]:
        for worker in event.seen:
            self._note_idle(worker, now)
        if not self.bounds.are_set:
            return []
        registered = [worker for worker in event.seen if worker.index in self._held]
        backlog = event.queued + sum(max(0, worker.leases - worker.slots) for worker in registered)
        if not backlog:
            self._backlog_since = None
            return self._shrink(now)
        if self._backlog_since is None:
            self._backlog_since = now
        # P7: workers that are starting may be enough for the work that waits
        if now - self._backlog_since < BACKLOG_S or self.starting:
            return []
        # The size never shrinks here: `bounds.max` may have sunk below it with a lost host.
        slots = max((worker.slots for worker in registered), default=1)
        self.wanted = max(self.wanted, min(self.bounds.max, len(self._held) - (-backlog // slots)))
        return self._fill()

    def _note_idle(self, figures: SeenWorker, now: float) -> None:
        worker = self._held.get(figures.index)
        if worker is None:
            return
        if figures.leases or figures.burden:
            worker.idle_since = None
        # a worker that has ended work since the last figures was not idle all the time
        elif worker.idle_since is None or worker.done != figures.done:
            worker.idle_since = now
        worker.done = figures.done

    def _shrink(self, now: float) -> list[ElasticityEffect]:
        effects: list[ElasticityEffect] = []
        for index in sorted(self._held, reverse=True):
            worker = self._held[index]
            if worker.idle_since is None or not worker.registered:
                continue
            running = len(self._held) - len(self.failed)
            if now - worker.idle_since >= self.bounds.idle_s and running > self.bounds.min:
                # The worker gets a grace, because it may have received work since the runtime read
                # the figures.
                effects += self._leave(index, GRACE_S, now)
                self.wanted = len(self._held)
        return effects

    # -- steps -------------------------------------------------------------------------------------

    def _fill(self) -> list[ElasticityEffect]:
        """Start workers until as many are held as are wanted. Workers that are still leaving count
        against `room`."""
        effects: list[ElasticityEffect] = []
        while len(self._held) < self.wanted and len(self._held) + len(self._leaving) < self._room:
            used = self._held.keys() | self._leaving.keys() | self._manual
            index = next(number for number in chain(self._first, count()) if number not in used)
            self._own.add(index)
            self._held[index] = _Held()
            effects.append(StartWorker(index))
        return effects

    @property
    def _room(self) -> float:
        return inf if self.bounds.room is None else self.bounds.room

    def _leave(self, index: int, grace_s: float, now: float) -> list[ElasticityEffect]:
        worker = self._held.pop(index)
        if worker.failed:  # it has no process that could be told to leave
            return []
        self._leaving[index] = now + grace_s + LEAVE_MARGIN_S
        return [DrainWorker(index, grace_s) if worker.registered else StopWorker(index)]

    def _exited(self, event: WorkerEnded) -> list[ElasticityEffect]:
        index = event.index
        if self._leaving.pop(index, None) is None and index in self._held:
            worker = self._held[index]
            worker.registered, worker.idle_since = False, None
            if event.restarts:
                # the worker stays held, so that no other worker is started in its place (P3)
                return []
            if not event.in_order:
                worker.failed = True
                return []
            # An admin has drained the worker: do not start another one in its place.
            del self._held[index]
            self.wanted = max(self.bounds.min, self.wanted - 1)
        return self._fill()

    def _kill_overdue(self, now: float) -> list[ElasticityEffect]:
        overdue = [index for index, kill_at in self._leaving.items() if kill_at <= now]
        self._leaving |= dict.fromkeys(overdue, inf)  # so that each is killed once
        return [KillWorker(index) for index in overdue]
