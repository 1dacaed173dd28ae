"""The runtime of elasticity_machine.py. One thread hands the machine the requests of users, the
ends of workers and figures of the dispatcher. It carries out the machine's effects through `Tasks`
(tasks.py), and through the dispatcher, which drains workers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from zmqdist import clock as time
from zmqdist import errors
from zmqdist.events import Ticked
from zmqdist.launch import elasticity_machine as machine
from zmqdist.launch.elasticity_machine import (
    Elasticity,
    ElasticityEffect,
    ElasticityEvent,
    SeenWorker,
)
from zmqdist.launch.exit_codes import ExitCode
from zmqdist.launch.tasks import RunningRole, Tasks
from zmqdist.transport.credentials import Credentials
from zmqdist.variables.client import client_of, release_client

if TYPE_CHECKING:  # the launcher imports the dispatcher late
    from zmqdist.servers.dispatch_server import DispatchServer

log = logging.getLogger("zmqdist.launch")

LOOK_S: Final = 0.5
"""Seconds between two looks at the dispatcher's queue. Without `min` and `max` in the cluster file
the thread does not look."""

DECIDED_S: Final = 10.0
"""Seconds that `scale` waits for a decision. The thread decides sooner, because it waits for
nothing but the dispatcher's loop thread."""

PS_ANSWER_S: Final = 1.0
"""Seconds in which all parameter servers have to answer with the names of their variables."""
NAMES_SHOWN_MAX: Final = 20

WORKER: Final = "worker"


class ElasticWorkers:
    """The workers of one launcher. This object is the Scaler of the launcher's dispatcher, which
    passes requests of users on to it.

    Args:
      elasticity: the machine. The caller starts the workers that the machine holds at the
        beginning.
      start: a function that starts the worker with the given index through `tasks`.
      ps_problem: a function that returns why the number of parameter servers cannot change.
    """

    def __init__(
        self,
        elasticity: Elasticity,
        dispatcher: DispatchServer,
        tasks: Tasks,
        start: Callable[[int], object],
        ps_problem: Callable[[], str],
    ) -> None:
        self._ps_problem = ps_problem
        self._machine = elasticity
        self._dispatcher = dispatcher
        self._tasks = tasks
        self._start = start
        self._events: queue.SimpleQueue[ElasticityEvent | None] = queue.SimpleQueue()
        self._replies: dict[int, Future[machine.AcceptSize | machine.RefuseSize]] = {}
        self._requests = 0
        self._shut_down = False
        self._lock = threading.Lock()
        self._figures = self._new_figures()
        self._thread = threading.Thread(target=self._run, name="zmqdist-elastic", daemon=True)
        self._thread.start()
        dispatcher.watch_members(
            lambda members: self._events.put(
                machine.RegisteredChanged(
                    frozenset(index for job, index in members if job == WORKER)
                )
            )
        )

    # -- in any thread -----------------------------------------------------------------------------

    def scale(self, job: str, count: int, grace_s: float, force: bool) -> dict[str, Any]:
        """Change the number of workers and return the decision (`Scaler.scale`)."""
        if job == "ps":
            raise errors.FailedPreconditionError(self._ps_problem())
        if job != WORKER:
            raise errors.InvalidArgumentError(
                f"only the number of workers can change, not that of job {job!r}"
            )
        if isinstance(count, bool) or not isinstance(count, int):
            raise errors.InvalidArgumentError(
                f"the number of workers is an int, as 8, not {count!r}"
            )
        if (
            isinstance(grace_s, bool)
            or not isinstance(grace_s, int | float)
            or not 0 <= grace_s < math.inf
        ):
            raise errors.InvalidArgumentError(
                f"grace_s is {grace_s!r}, wants a finite number of seconds, 0 or more"
            )
        reports = {report.worker: report for report in self._dispatcher.drain_reports()}
        losing = {name for name, report in reports.items() if report.losses}
        workers = [
            replace(worker, refused=f"{WORKER}:{worker.index}" in losing)
            for worker in self._registered_workers()
        ]
        reply: Future[machine.AcceptSize | machine.RefuseSize] = Future()
        with self._lock:
            # `stop` takes the same lock, so that no request comes after the last event
            if self._shut_down:
                raise errors.FailedPreconditionError("the cluster shuts down")
            self._requests += 1
            request = self._requests
            self._replies[request] = reply
            self._events.put(machine.SizeRequested(request, count, grace_s, workers, force))
        try:
            decision = reply.result(DECIDED_S)
        except FutureTimeoutError:
            raise errors.DeadlineExceededError(
                f"the launcher has not replied within {DECIDED_S:g} s whether it changes the "
                f"number of workers"
            ) from None
        if isinstance(decision, machine.RefuseSize):
            names = refused = _names(decision.refused)
            starts, leaves = list[str](), list[str]()
        else:
            names = leaves = _names(decision.leaves)
            starts, refused = _names(decision.starts), []
        return {
            "starts": starts,
            "leaves": leaves,
            "refused": refused,
            "reports": [reports[name].to_dict() for name in names if name in reports],
        }

    def figures(self) -> dict[str, Any]:
        """Return the wanted size, its bounds, and the workers that start, leave or have failed
        (`Scaler.figures`)."""
        return self._figures

    def close(self) -> None:
        """Have the thread start and stop no more workers, and refuse all later requests
        (`Scaler.close`)."""
        self._events.put(machine.Closing())

    def worker_exited(self, index: int, role: RunningRole | None, restarts: bool) -> None:
        """Record that the process of a worker has ended. `role` is None if the process could not be
        started."""
        self._events.put(
            machine.WorkerEnded(index, role is not None and role.exit_code == ExitCode.OK, restarts)
        )

    def room_changed(self, room: int | None, reason: str) -> None:
        """Record for how many workers the hosts have room now, and why not for more (`room` and
        `room_reason` of SizeBounds)."""
        self._events.put(machine.RoomChanged(room, reason))

    def stop(self) -> None:
        """Call `close`, and wait until the thread has ended. Later requests are refused."""
        self.close()
        with self._lock:
            self._shut_down = True
            self._events.put(None)
        self._thread.join()

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        look_at = time.monotonic()
        while True:
            due = [
                at
                for at in (
                    self._machine.deadline,
                    look_at if self._machine.bounds.are_set else None,
                )
                if at is not None
            ]
            try:
                event = self._events.get(
                    timeout=max(0.0, min(due) - time.monotonic()) if due else None
                )
            except queue.Empty:
                if self._machine.bounds.are_set and time.monotonic() >= look_at:
                    look_at = time.monotonic() + LOOK_S
                    self._look()
                event = Ticked()
            if event is None:
                return
            self._handle(event)

    def _look(self) -> None:
        try:
            snapshot = self._dispatcher.snapshot()
            workers = self._registered_workers()
        except errors.OpError:  # the dispatcher has been stopped, so there are no figures to read
            return
        self._handle(machine.ClusterSeen(snapshot.queued - snapshot.queued_pinned, workers))

    def _registered_workers(self) -> list[SeenWorker]:
        rows = [
            row for row in self._dispatcher.snapshot().workers if row.name.startswith(f"{WORKER}:")
        ]
        tasks = self._dispatcher.data_tasks_by_worker()
        return [
            SeenWorker(
                int(row.name.rpartition(":")[2]),
                row.slots,
                row.leases,
                row.done,
                row.kept + row.pinned + row.actors + tasks.get(row.name, 0),
            )
            for row in rows
        ]

    def _handle(self, event: ElasticityEvent) -> None:
        try:
            effects = self._machine.handle(event, time.monotonic())
        # An error does not end this thread, because the thread must handle later events. A caller
        # that waits for a reply gets the error.
        except Exception as error:
            log.exception("an event of the workers failed: %s", event)
            if isinstance(event, machine.SizeRequested):
                self._take_reply(event.request).set_exception(
                    errors.InternalError(f"the launcher failed: {error!r}")
                )
            return
        self._figures = self._new_figures()
        for effect in effects:
            try:
                self._carry_out(effect)
            except Exception:  # the thread must go on with the other effects and events
                log.exception("an order about the workers failed: %s", effect)

    def _carry_out(self, effect: ElasticityEffect) -> None:
        match effect:
            case machine.StartWorker(index):
                self._start(index)
            case machine.DrainWorker(index, grace_s):
                if self._retire(index):
                    try:
                        self._dispatcher.drain(WORKER, index, grace_s)
                    except errors.OpError:  # the worker was lost meanwhile
                        self._events.put(machine.DrainFailed(index))
            case machine.StopWorker(index):
                if self._retire(index):
                    self._tasks.signal(f"{WORKER}:{index}", signal.SIGTERM)
            case machine.KillWorker(index):
                self._tasks.signal(f"{WORKER}:{index}", signal.SIGKILL)
            case machine.AcceptSize(request):
                self._take_reply(request).set_result(effect)
            case machine.RefuseSize(request, problem) if problem:
                self._take_reply(request).set_exception(errors.FailedPreconditionError(problem))
            case machine.RefuseSize(request):
                self._take_reply(request).set_result(effect)

    def _retire(self, index: int) -> bool:
        """Make sure that `tasks` never starts this worker again. Return whether the worker has a
        process. If it was waiting for a restart, report its end to the machine.
        """
        if self._tasks.retire(f"{WORKER}:{index}"):
            return True
        self._events.put(machine.WorkerEnded(index, in_order=True, restarts=False))
        return False

    def _take_reply(self, request: int) -> Future[machine.AcceptSize | machine.RefuseSize]:
        with self._lock:
            return self._replies.pop(request)

    def _new_figures(self) -> dict[str, Any]:
        elasticity = self._machine
        bounds = elasticity.bounds
        return {
            "wanted": elasticity.wanted,
            "min": bounds.least,
            "max": bounds.most,
            "idle_s": bounds.idle_s if bounds.are_set else None,
            "starting": _names(elasticity.starting),
            "leaving": _names(elasticity.leaving),
            "failed": _names(elasticity.failed),
        }


def _names(indices: tuple[int, ...] | list[int]) -> list[str]:
    return [f"{WORKER}:{index}" for index in indices]


def scaling_problem(addresses: Mapping[int, str], credentials: Credentials) -> str:
    """Return why the number of parameter servers cannot change. The text has the names of the
    variables on each parameter server. This blocks until the parameter servers have replied, at
    most PS_ANSWER_S seconds.
    """
    if not addresses:
        return (
            "this cluster has no parameter servers: write jobs.ps into its file and launch it again"
        )
    due = time.monotonic() + PS_ANSWER_S
    variables = "; ".join(
        f"ps:{index}: {_variables_on(address, credentials, due)}"
        for index, address in addresses.items()
    )
    return (
        f"the number of parameter servers is fixed, because each holds variables ({variables}): for "
        f"another number save a checkpoint, change "
        "jobs.ps in the file, and launch it again"
    )


def _variables_on(address: str, credentials: Credentials, due: float) -> str:
    try:
        status = client_of(address, credentials).status(due).get_value()
    except errors.OpError:
        return "it does not reply"
    finally:
        with contextlib.suppress(errors.OpError):
            release_client(address)
    names = sorted({variable["name"] for variable in status["variables"]})
    more = f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else ""
    return (", ".join(names[:NAMES_SHOWN_MAX]) + more) or "none now"
