"""ClusterCoordinator: schedule functions on a dispatcher's workers and take their results.

What users call. The work is done by runtime.py (the loop that talks to the dispatcher) and machine.py (what it
decides).

The runtime's `turn` lets one `schedule` or `join` pass at a time: `join` answers for what was scheduled before it. Its lock is for state.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import threading
import time
import weakref
from _thread import get_ident
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from operator import index
from typing import Any

from zmqdist import errors, limits, nest
from zmqdist.rpc.client import ZmqClient
from zmqdist.scheduling.coordinator import metrics
from zmqdist.scheduling.coordinator.affinity import PLAIN, WorkOptions
from zmqdist.scheduling.coordinator.bounds import check_seconds, checked_bytes_max, checked_queue_max
from zmqdist.scheduling.coordinator.figures import CoordinatorSnapshot, snapshot_of
from zmqdist.scheduling.coordinator.function_snapshot import FunctionSnapshot
from zmqdist.scheduling.coordinator.per_worker import (
    PerWorkerDataset,
    PerWorkerValues,
    per_worker_dataset,
    per_worker_resource,
)
from zmqdist.scheduling.coordinator.remote_value import RemoteValue, in_order_of_completion, unwrapped
from zmqdist.scheduling.coordinator.resources import Resources
from zmqdist.scheduling.coordinator.runtime import CoordinatorRuntime
from zmqdist.scheduling.coordinator.target import resolve
from zmqdist.scheduling.coordinator.task_specs import NO_OPTIONS, Plan, PlanOptions
from zmqdist.scheduling.worker.references import KEEP
from zmqdist.transport.credentials import Credentials
from zmqdist.wire import trusted

REQUEST_MS = 20_000
"""For a question to the dispatcher, the connection included."""

log = logging.getLogger("zmqdist.coordinator")


class ClusterCoordinator:
    """Schedules functions on the workers of a dispatcher.

    Args:
      target: a ParameterServerStrategy, of which there is one coordinator; a DispatchServer, a `local_cluster`, "host:port",
        "zmq://host:port"; None takes the cluster that `zmqdist launch` has put into the environment.
      queue_max: pieces of work that may wait for a worker; then `schedule` blocks; 0 for no bound. None: what the cluster's
        file says, or 2**20.
      queue_bytes_max: bytes of arguments that may be held for work that has not ended; then `schedule` blocks; 0 for no bound. What
        pieces of work share counts once, and one that is larger than the whole bound waits until it is the only one. None: what the
        cluster's file says, or a quarter of the memory that this process may use.
      cancel_grace_s: how long a running function has to end after it was cancelled, before its slot is cut off. None: what the
        cluster's file says, or 5.
      cluster_lost_limit_s: how long the cluster may be without a dispatcher, or without any worker, before what is unfinished fails.
      worker_recovery_timeout_s: how long a worker may be missing, while others are there, before work for it alone fails.

    The constructor does not wait for the dispatcher. Close it, or use it in a with-statement; one that nobody has any more, nor a value of
    it that is still to come or is kept, is closed by the garbage collector. Any thread may use it; it cannot be used after a fork.

    Raises:
      ValueError: `target` is none of these.
      InvalidArgumentError: a duration is negative or no number.
      FailedPreconditionError: the secrets for the target cannot be read.
    """

    _rounds = True
    """Whether a failure ends the round."""

    _width: int | None = None
    """How much work may be with the dispatcher at a time; None for no bound."""

    def __new__(cls, target: Any = None, **options: Any) -> ClusterCoordinator:
        allocate = getattr(type(target), "_allocate_coordinator", None)
        if allocate is None or cls is not ClusterCoordinator:
            return object.__new__(cls)
        coordinator: ClusterCoordinator = allocate(target)  # a strategy has one, of a class of its own
        return coordinator

    def __init__(
        self,
        target: Any = None,
        *,
        queue_max: int | None = None,
        queue_bytes_max: int | None = None,
        cancel_grace_s: float | None = None,
        cluster_lost_limit_s: float = limits.CLUSTER_LOST_LIMIT_S,
        worker_recovery_timeout_s: float = limits.WORKER_RECOVERY_TIMEOUT_S,
    ) -> None:
        resolved = resolve(target)
        queue_max = resolved.queue_max if queue_max is None else queue_max
        queue_bytes_max = resolved.queue_bytes_max if queue_bytes_max is None else queue_bytes_max
        cancel_grace_s = resolved.cancel_grace_s if cancel_grace_s is None else cancel_grace_s
        check_seconds(
            cancel_grace_s=cancel_grace_s,
            cluster_lost_limit_s=cluster_lost_limit_s,
            worker_recovery_timeout_s=worker_recovery_timeout_s,
        )
        self._cluster_lost_limit_s = cluster_lost_limit_s
        self._works = itertools.count(1)
        self._error_factories: list[Callable[[], BaseException]] = []
        self._runtime = CoordinatorRuntime(
            resolved,
            queue_max=checked_queue_max(queue_max),
            queue_bytes_max=checked_bytes_max(queue_bytes_max),
            cancel_grace_s=cancel_grace_s,
            lost_limit_s=cluster_lost_limit_s,
            recovery_limit_s=worker_recovery_timeout_s,
            rounds=self._rounds,
            width=self._width,
        )
        self._scheduled_on = target
        self._alive = _Alive(target)
        weakref.finalize(self._alive, _give_up, self._runtime).atexit = False
        self._resources = Resources(self._runtime, self._works, cluster_lost_limit_s)

    # -- scheduling -----------------------------------------------------------------------------------------------

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        worker: int | str | None = None,
        priority: int = 0,
        keep: bool = False,
        retries: int = 0,
        timeout: float | None = None,
        lineage: bool = False,
    ) -> RemoteValue:
        """Run `fn(*args, **kwargs)` once on some worker; returns its result to come at once, unless the queue is full.

        Arguments, and what the function captures, are as they are now: they may be changed as soon as this returns. The function
        runs at least once, its result is accepted once: it runs again when its worker dies.

        RemoteValues of this coordinator may be among the arguments at any depth, or captured, whether they have ended or not: the function
        runs when they have, and gets their values, private to that run; or it fails with ClosureInputError when one of them has none.

        Args:
          fn: any callable that can be pickled; lambdas and closures can. Functions of importable modules go by name.
          args: positional arguments, any iterable.
          kwargs: keyword arguments.
          worker: only this one runs it, 1 or "worker:1": before all work that any may run, and as soon as that one is there.
          priority: of what waits the higher goes first, and of one priority the oldest; what was handed out already is not overtaken.
          keep: leave what it returns with its worker, for other functions to use: they get it straight from there, or fail with
            UnavailableError when it is lost.
          retries: run it again when it raises, so often at most, with the same arguments. The deaths of its workers are counted apart.
          timeout: seconds from now; when it has not ended then it is taken back or cut off, and ends with DeadlineExceededError.
          lineage: as `keep`, and when the value is lost it is made again for whoever needs it, and its inputs that have a lineage, too.

        Raises:
          Exception: an earlier function of this round failed, and neither `get` nor `exception` of its value has given the error
            to the program yet: it is raised here, as `join` raises it; nothing was scheduled by this call.
          TypeError: `fn` is not callable, or `args` is text, or not iterable.
          ValueError: `worker` is no worker's name; `priority` has more than 32 bits; `retries` or `timeout` is out of range; or a
            RemoteValue of another coordinator is among the arguments.
          InvalidArgumentError: `fn` or an argument cannot be pickled; it says which.
          FailedPreconditionError: the coordinator has been closed.
        """
        if not callable(fn):
            raise TypeError(f"schedule() takes a callable, not {type(fn).__name__}")
        options, plan_options = PLAIN, NO_OPTIONS
        if worker is not None or priority:
            options = _options(worker, priority)
        if retries or timeout is not None or lineage:
            plan_options = PlanOptions.checked(retries, timeout, lineage)
        if isinstance(args, (str, bytes)) or not (args is None or isinstance(args, Iterable)):
            raise TypeError(f"args is {args!r}, wants a tuple or a list: args=({args!r},)")
        positional = () if args is None else tuple(args)
        keywords = {} if kwargs is None else dict(kwargs)
        return self._schedule(fn, positional, keywords, keep or lineage, options, plan_options)

    def _schedule(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keep: bool,
        options: WorkOptions,
        plan_options: PlanOptions,
    ) -> RemoteValue:
        runtime = self._runtime
        with runtime.schedule_lock:
            if runtime.failures.unseen:
                self._end_round()
            runtime.packing = get_ident()
            try:
                packed = self._pack(args, kwargs)
                function: trusted.Packed
                if type(fn) is FunctionSnapshot:
                    function, held = fn.use()
                    fn = fn.fn
                else:
                    function, held = runtime.functions.pickled(fn), []
            except errors.InvalidArgumentError as error:
                raise unwrapped(error) from error.__cause__
            finally:
                runtime.packing = None
                uses, inputs = runtime.given, runtime.inputs
                if uses or inputs:
                    runtime.given, runtime.inputs = [], {}
            plan: Plan | None = None
            bulks = list(held)
            try:
                if isinstance(function, list):
                    function, held = runtime.held(function)
                    bulks += held
                if isinstance(packed, list):
                    packed, of_arguments = runtime.held(packed)
                    bulks += of_arguments
                payload = packed
                if inputs or plan_options is not NO_OPTIONS:
                    plan = Plan(payload, bulks, inputs, uses, keep, plan_options, options)
                    plan.take(runtime.held)
                elif keep:
                    payload = KEEP + payload
                with runtime.lock:
                    # After a fork there is no room.
                    if runtime.room <= 0 or runtime.closed or not runtime.queue_bytes.fits(len(payload), bulks):
                        self._wait_for_room(len(payload), bulks)
                    work = next(self._works)
                    number, name = runtime.functions.number(fn, function, held)
                    if plan is not None:
                        return runtime.plans.enqueue(plan, work, number, name, self._alive)
                    return runtime.enqueue(work, number, name, payload, bulks, keep, uses, options, self._alive)
            except BaseException:
                runtime.drop(bulks)
                raise

    def _pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> trusted.Packed:
        """What the worker unpacks to (args, kwargs)."""
        return trusted.pack_call(args, kwargs)

    def map(self, fn: Callable[..., Any], iterable: Iterable[Any]) -> list[RemoteValue]:
        """`schedule(fn, (item,))` for each item; the results in the order of the items.

        What the function captures is for all items as it is when this is called: it is pickled once, whatever it captures.
        """
        snapshot = self._taken(fn)
        return [self.schedule(snapshot, (item,)) for item in iterable]

    def _taken(self, fn: Callable[..., Any]) -> FunctionSnapshot:
        """A function as it is now, for `schedule`. Raises as that for the function."""
        if not callable(fn):
            raise TypeError(f"map() takes a callable, not {type(fn).__name__}")
        self._check_open()
        return FunctionSnapshot.take(self._runtime, fn)

    def join(self, timeout: float | None = None) -> None:
        """Wait until everything that was scheduled has ended.

        Raises:
          Exception: the first error of a function that the program has not seen yet, else the first, as in TensorFlow also where
            `get` has given it to the program; raised once, with all errors of the round as its `failures`. Nothing that was
            scheduled is executing any more: what had not begun was dropped, what ran was told to end and cut off after `cancel_grace_s`
            (where slots are threads: waited for), and their RemoteValues raise CancelledError. The coordinator can be used on.
          DeadlineExceededError: not all have ended after `timeout` seconds. They go on; after an error they are told to end, and the next
            `join` raises it.
          UnavailableError: there was no dispatcher, or no worker, for `cluster_lost_limit_s`.
        """
        until = None if timeout is None else time.monotonic() + float(timeout)
        runtime = self._runtime
        schedule_lock = runtime.schedule_lock
        if not schedule_lock.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)):
            raise errors.DeadlineExceededError(f"another thread joins or schedules for more than {timeout:g} s")
        try:
            with runtime.lock:
                self._check_open()
                self._wait_until(self._has_ended, until, timeout)
                failed = bool(runtime.failures)
            if failed:
                self._end_round(until, timeout)
        finally:
            schedule_lock.release()

    def done(self, timeout: float | None = None) -> bool:
        """Whether everything that was scheduled has ended. After an error: raises it as `join` does, and waits for that.

        Args:
          timeout: wait at most so many seconds for the end; None does not wait.
        """
        self._check_open()
        runtime = self._runtime
        if timeout is not None:
            with runtime.lock:
                try:
                    self._wait_until(self._has_ended, time.monotonic() + float(timeout), timeout)
                except errors.DeadlineExceededError:
                    return False
        if runtime.failures:
            self._end_round()
        return runtime.resolved == runtime.scheduled

    @property
    def failures(self) -> list[BaseException]:
        """The errors of the round that was ended last, oldest first, at most 100. The one that was raised is the first that the
        program had not seen before, or the first of all.

        The same list is the attribute `failures` of that one, where it takes attributes. They are fresh copies.
        """
        return [make_error() for make_error in self._error_factories]

    def fetch(self, val: Any) -> Any:
        """The structure `val` (lists, tuples, dicts) with each RemoteValue in it replaced by its result; the rest as it is.

        Raises: what `RemoteValue.fetch` raises.
        """
        return nest.map_structure(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val)

    def as_completed(self, values: Iterable[RemoteValue], timeout: float | None = None) -> Iterator[RemoteValue]:
        """Each value once, in the order in which they end.

        Raises:
          DeadlineExceededError: not all have ended `timeout` seconds after the first was asked for.
        """
        return in_order_of_completion(values, timeout)

    def workers(self) -> list[str]:
        """The names of the workers that are there, as "worker:1"; waits for the dispatcher to tell them for the first time.

        Raises:
          UnavailableError: no dispatcher has answered for `cluster_lost_limit_s`.
          OpError: the dispatcher does not take this coordinator; with its reason.
          FailedPreconditionError: the coordinator has been closed.
        """
        runtime = self._runtime
        with runtime.lock:
            self._check_open()
            until = time.monotonic() + self._cluster_lost_limit_s
            while runtime.members is None and not runtime.closed and runtime.refusal is None:
                if runtime.changed.wait(min(limits.WAIT_LOG_S, until - time.monotonic())):
                    continue
                if time.monotonic() >= until:
                    raise errors.UnavailableError(f"no workers are known: waited for {runtime.missing.description}")
                log.warning("workers(): waiting for %s", runtime.missing.description)
            self._check_open()
            if runtime.members is None and runtime.refusal is not None:
                raise runtime.refusal()
            names = [(name.rpartition(":")) for name in runtime.members or ()]
        return [f"{job}:{number}" for job, _, number in sorted(names, key=lambda name: (name[0], int(name[2])))]

    def remove_worker(self, worker: int | str, grace_s: float = limits.GRACE_S) -> None:
        """Have a worker finish what it runs, for at most `grace_s`, and leave; returns when the dispatcher has told it so.

        What it has not begun goes elsewhere, or waits for another worker of its name where it is for that one alone.

        Raises:
          ValueError: `worker` is no worker's name.
          NotFoundError: no such worker is there.
          UnavailableError, DeadlineExceededError: the dispatcher cannot be reached, or does not answer for 20 s.
        """
        job, _, number = worker_name(worker).rpartition(":")
        self._call_dispatcher("drain", job, int(number), float(grace_s))

    def _call_dispatcher(self, method: str, *args: Any) -> Any:
        """What the dispatcher answers to a call."""
        address = self._runtime.address
        security = self.credentials.client(address, "submit")
        with closing(ZmqClient(address, "", True, REQUEST_MS, security=security)) as client:
            return getattr(client, f"{method}_blocking")(*args)

    def create_per_worker_resource(
        self, fn: Callable[..., Any], args: Iterable[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> PerWorkerValues:
        """Have each worker call `fn(*args, **kwargs)` once and keep what it returns: for functions that get these values as an argument, at
        any depth, or capture them, it is the value of the worker that runs them.

        Does not wait for the workers. One that is lost, and started again, makes it anew, before it runs a function that uses it; so does a
        slot process that was cut off. Of several slots that are processes each has its own. Workers that come later make it, too. It is
        dropped everywhere once nobody holds these values and no unfinished work uses them.

        Args:
          fn: any callable that can be pickled.
          args, kwargs: its arguments, as they are now.

        Raises:
          TypeError: `fn` is not callable, or `args` not iterable.
          InvalidArgumentError: `fn` or an argument cannot be pickled; it says which.
          UnavailableError: no worker came for `cluster_lost_limit_s`.
          FailedPreconditionError: the coordinator has been closed.

        What `fn` raises is the error of the RemoteValues, and ends no round before it is used: a function that uses it fails with
        ClosureInputError.
        """
        self._check_open()
        return per_worker_resource(self._resources, fn, args, kwargs)

    def create_per_worker_dataset(self, dataset_fn: Any, *, shard: bool = False) -> PerWorkerDataset:
        """A dataset of which each worker has its own: `iter()` of it gives PerWorkerValues of iterators for scheduled functions.

        Args:
          dataset_fn: a function without parameters, which is called at each worker for each `iter`, and returns a Dataset or anything else
            that can be iterated (it may be a generator); or a Dataset, or another iterable, as it is now.
          shard: the n workers that are there at an `iter` share the elements, each has every n-th. One that is lost begins its share
            anew when it is back: where each element has to come once in spite of that, have the data service deal them out
            (`zmqdist.data.service.distribute`). False: each worker has all elements, in an order of its own where they are shuffled without
            a seed.

        Raises:
          ValueError: `dataset_fn` is nothing of this.
          TypeError: it is a function that needs parameters.
          InvalidArgumentError: it cannot be pickled.
          FailedPreconditionError: the coordinator has been closed.
        """
        self._check_open()
        return per_worker_dataset(self._resources, dataset_fn, shard)

    def metrics(self) -> dict[str, Any]:
        """What was counted: each figure of `zmqdist.scheduling.coordinator.metrics`, by its name, and under "workers" what the dispatcher
        counts of each, by their names, as `zmqdist status` shows it: functions "done", "rate" of them in a second, "running", "idle_s", ...

        Raises:
          UnavailableError, DeadlineExceededError: the dispatcher cannot be reached, or does not answer for 20 s.
        """
        rows = self._call_dispatcher("status")["workers"]
        figures = {name: metrics.get_metric_summary(name) for name in metrics.names()}
        return {**figures, "workers": {row["name"]: row for row in rows}}

    def snapshot(self) -> CoordinatorSnapshot:
        """An immutable record of what is unfinished, waited for and held here. Does not wait; any thread may ask, also after `close`."""
        return snapshot_of(self._runtime, len(self._resources))

    @property
    def target(self) -> str:
        """The dispatcher, as "zmq://host:port"."""
        return f"zmq://{self._runtime.address}"

    @property
    def credentials(self) -> Credentials:
        """Where the secret for the dispatcher is: a data service is given the coordinator for its address."""
        return self._runtime.credentials

    def close(self) -> None:
        """Leave the dispatcher. What is unfinished is cancelled, what runs is cut off. Idempotent; does not raise.

        Does nothing in a child that was forked from the program: its threads are not there, and the parent's goes on.
        """
        if self._runtime.pid == os.getpid():
            self._runtime.give_up()

    def __enter__(self) -> ClusterCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a ClusterCoordinator stays in its process: schedule from there, not from a scheduled function")

    # -- waiting --------------------------------------------------------------------------------------------------

    def _wait_for_room(self, nbytes: int, bulks: list[int]) -> None:
        """With the lock held: until the queue has room for arguments of this size, or there is an error to raise instead."""
        runtime = self._runtime
        self._check_open()
        while not runtime.has_room(nbytes, bulks):
            idle = runtime.machine.closures.workers - (runtime.scheduled - runtime.resolved)
            runtime.queue_bytes.warn_if_workers_idle(idle, nbytes, bulks)
            runtime.waiting_for_room += 1
            try:
                self._wait_until(
                    lambda: runtime.closed or bool(runtime.failures.unseen) or runtime.has_room(nbytes, bulks)
                )
            finally:
                runtime.waiting_for_room -= 1
            self._check_open()
            if runtime.failures.unseen:  # also when it came together with the room
                runtime.lock.release()
                try:
                    self._end_round()
                finally:
                    runtime.lock.acquire()

    def _has_ended(self) -> bool:
        return self._runtime.resolved == self._runtime.scheduled or bool(self._runtime.failures)

    def _wait_until(self, ready: Callable[[], bool], until: float | None = None, timeout: float | None = None) -> None:
        """With the lock held. The machine fails what waits when the cluster is lost, so this ends."""
        runtime = self._runtime
        runtime.waiting += 1
        try:
            while not ready():
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    unfinished = runtime.scheduled - runtime.resolved
                    problem = f"{unfinished} scheduled functions have not ended after {timeout:g} s"
                    raise errors.DeadlineExceededError(problem)
                runtime.changed.wait(None if left is None else min(left, threading.TIMEOUT_MAX))
        finally:
            runtime.waiting -= 1

    def _end_round(self, until: float | None = None, timeout: float | None = None) -> None:
        """Raise the round's error once nothing of it can be executing. Of several threads one raises."""
        runtime = self._runtime
        with runtime.lock:
            failed, scheduled, before = runtime.failures.round, runtime.scheduled, -1
            if failed is None:
                return
            # What was scheduled while a round ended may have become part of the next one: then that has to end, too.
            while before < 0 or (runtime.resolved < scheduled and not runtime.closed):
                before = runtime.rounds_ended
                runtime.end_round()
                self._wait_until(partial(_is_over, runtime, before), until, timeout)
                if runtime.failures.round is not failed:
                    return  # another thread has raised it
            make_error, self._error_factories = runtime.failures.take()
        error = make_error()
        try:
            error.failures = [make() for make in self._error_factories]  # type: ignore[attr-defined]
        except Exception:  # it takes no attributes
            log.debug("a %s cannot be told the other failures", type(error).__name__)
        raise error

    def _check_open(self) -> None:
        if self._runtime.closed:
            raise errors.FailedPreconditionError("this ClusterCoordinator has been closed")
        if self._runtime.pid != os.getpid():
            raise errors.FailedPreconditionError(
                "this ClusterCoordinator was made before a fork: make a new one in the child process"
            )


class _Alive:
    """Of the coordinator, and of its values that have not ended or are kept: its threads end when nobody has one of them any more."""

    __slots__ = ("__weakref__", "_target")

    def __init__(self, target: Any) -> None:
        self._target = target  # a server stops when nobody refers to it any more


def _is_over(runtime: CoordinatorRuntime, rounds: int) -> bool:
    return runtime.rounds_ended > rounds or runtime.closed


def _give_up(runtime: CoordinatorRuntime) -> None:
    """In the garbage collector, and so in any thread, which may have any lock: the loop does it."""
    if runtime.pid == os.getpid():
        runtime.call_in_loop(runtime.give_up)


def _options(worker: int | str | None, priority: int) -> WorkOptions:
    """Raises ValueError for what cannot be a worker."""
    if not -(2**31) <= index(priority) < 2**31:
        raise ValueError(f"priority is {priority}, wants a number of 32 bits")
    return WorkOptions("" if worker is None else worker_name(worker), index(priority))


def worker_name(worker: int | str) -> str:
    """As "worker:1". Raises ValueError: it is no index and no such name."""
    name = worker if isinstance(worker, str) else f"worker:{index(worker)}"
    if re.fullmatch("(?!(ps|chief|evaluator|dispatcher):)[A-Za-z_][A-Za-z0-9_.-]*:(0|[1-9][0-9]{0,8})", name) is None:
        raise ValueError(f'worker is {worker!r}, wants the index of a worker or its name, as "worker:1"')
    return name
