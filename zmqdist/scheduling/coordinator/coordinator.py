"""`ClusterCoordinator`: schedule functions on a dispatcher's workers and get their results.

ClusterCoordinator is the class for users. runtime.py has the loop that talks to the dispatcher;
machine.py makes the decisions.

The methods take two locks of the runtime. `schedule_lock` admits one `schedule` or `join` at a
time, so that `join` waits for exactly the work that was scheduled before. `lock` guards the state
and is held for microseconds only.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from _thread import get_ident
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    ValuesView,
)
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, overload

from zmqdist import clock as time
from zmqdist import errors, limits, nest
from zmqdist.clock import deadline, duration, left, seconds
from zmqdist.field_types import check_type, checked, checks_options, converted
from zmqdist.html_repr import HtmlRows, html_repr
from zmqdist.scheduling import notebook_cells
from zmqdist.scheduling.coordinator import metrics
from zmqdist.scheduling.coordinator.actor_groups import ActorGroup, kill, make_group
from zmqdist.scheduling.coordinator.actors import ActorHandle, Actors, open_actors
from zmqdist.scheduling.coordinator.affinity import Joined
from zmqdist.scheduling.coordinator.completion import AsCompleted, wait_for
from zmqdist.scheduling.coordinator.coordinator_snapshot import CoordinatorSnapshot, snapshot_of
from zmqdist.scheduling.coordinator.dispatcher_target import resolve
from zmqdist.scheduling.coordinator.failures import with_failures
from zmqdist.scheduling.coordinator.function_stream import FunctionStream
from zmqdist.scheduling.coordinator.options import (
    NO_OPTIONS,
    PLAIN,
    PlanOptions,
    Retries,
    WorkOptions,
    worker_name,
)
from zmqdist.scheduling.coordinator.ordered_results import AHEAD, OrderedResults
from zmqdist.scheduling.coordinator.per_worker import (
    PerSlot,
    PerWorkerDataset,
    PerWorkerValues,
    per_slot,
    per_worker_dataset,
    per_worker_resource,
)
from zmqdist.scheduling.coordinator.queue_bounds import (
    SMALL_BYTES_MAX,
    checked_bytes_max,
    checked_queue_max,
)
from zmqdist.scheduling.coordinator.remote_value import RemoteValue, unwrapped, work_of
from zmqdist.scheduling.coordinator.resources import Resources
from zmqdist.scheduling.coordinator.runtime import CoordinatorRuntime
from zmqdist.scheduling.coordinator.scattered import ScatteredValue
from zmqdist.scheduling.coordinator.submitter import FunctionSnapshot, Submitter, TaskOptions
from zmqdist.scheduling.coordinator.typed_calls import (
    as_fetch,
    as_gather,
    as_imap,
    as_map,
    as_run,
    as_schedule,
    as_stream,
    as_submit,
)
from zmqdist.scheduling.coordinator.work import Extra
from zmqdist.scheduling.run_trace import Trace
from zmqdist.scheduling.shared import own_cluster
from zmqdist.task_context import settle_update
from zmqdist.transport.credentials import Credentials
from zmqdist.wire import trusted

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from zmqdist.scheduling.coordinator.submitter import OneResult, Parts

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("zmqdist.coordinator")


class ClusterCoordinator:
    """Schedules functions on the workers of a dispatcher.

    >>> with zd.ClusterCoordinator(cluster) as other:
    ...     other.submit(abs, -3).result()
    3

    Args:
      target: a ParameterServerStrategy (which has one coordinator), a DispatchServer, a
        `local_cluster`, "host:port" or "zmq://host:port". None means, in a scheduled function, the
        cluster that runs it, and otherwise the one that `zmqdist launch` has named in the
        environment. Without any argument, all code of a slot shares one coordinator
        (docs/nested_work.md).
      queue_max: how many work items may wait for a worker before `schedule` blocks. 0 means no
        bound. Default 2**20.
      queue_bytes_max: bytes of arguments that may be held for unfinished work before `schedule`
        blocks. 0 means no bound. Default 1/4 of memory. Data that several work items share counts
        once. A work item larger than the bound is scheduled when no other bytes are held.
      cancel_grace_s: how long a cancelled function may go on running before its slot is killed.
        Default 5.
      cluster_lost_limit_s: how long the cluster may be without a dispatcher, or without any worker,
        before unfinished work fails.
      worker_recovery_timeout_s: how long a worker may be missing while other workers are present,
        before work pinned to it fails.
      results: with "safe", the coordinator accepts only values of types that RPC accepts, and
        unpickles no bytes of workers. Default "any".

    If `target` is None, the cluster file's values replace these defaults, and its `results: safe`
    prevails. The constructor does not wait for the dispatcher. Close the coordinator, or use it in
    a with-statement. Otherwise the garbage collector closes it when the program holds neither it
    nor any of its pending or kept values. Any thread may use it, but a process forked from the
    program may not.

    Raises:
      ValueError: `target` is not of an accepted type or form, or a bound of the queue is negative.
      InvalidArgumentError: a duration is negative or not a number, or `results` is neither "any"
        nor "safe".
      FailedPreconditionError, UnavailableError: secrets for the target are missing or unreadable;
        its host name cannot be looked up.
    """

    _rounds = True
    """Whether the first failed function ends the round."""

    _width: int | None = None
    """The number of work items that the dispatcher may have at a time; None means no bound."""

    def __new__(cls, target: Any = None, **options: Any) -> ClusterCoordinator:
        allocate = getattr(type(target), "_allocate_coordinator", None)
        if target is None and not options and cls is ClusterCoordinator:
            own = process_coordinator()
            if own is not None:
                return own
        if allocate is None or cls is not ClusterCoordinator:
            return object.__new__(cls)
        # a strategy has one coordinator, which it returns here
        coordinator: ClusterCoordinator = allocate(target)
        return coordinator

    @staticmethod
    def _parent_of(dispatcher: str) -> int:
        """Return the lease of the function in which the coordinator is made; 0 if there is none."""
        return own_cluster.parent_of(dispatcher)

    @checks_options("ClusterCoordinator()")
    def __init__(
        self,
        target: Any = None,
        *,
        queue_max: int | None = None,
        queue_bytes_max: int | None = None,
        cancel_grace_s: float | None = None,
        cluster_lost_limit_s: float = limits.CLUSTER_LOST_LIMIT_S,
        worker_recovery_timeout_s: float = limits.WORKER_RECOVERY_TIMEOUT_S,
        results: str | None = None,
    ) -> None:
        resolved = resolve(target, results)
        queue_max = resolved.queue_max if queue_max is None else queue_max
        queue_bytes_max = resolved.queue_bytes_max if queue_bytes_max is None else queue_bytes_max
        cancel_grace_s = resolved.cancel_grace_s if cancel_grace_s is None else cancel_grace_s
        cancel_grace_s = duration("cancel_grace_s", cancel_grace_s)
        cluster_lost_limit_s = duration("cluster_lost_limit_s", cluster_lost_limit_s)
        recovery_limit_s = duration("worker_recovery_timeout_s", worker_recovery_timeout_s)
        self._cluster_lost_limit_s = cluster_lost_limit_s
        self._works = itertools.count(1)
        self._error_factories: list[Callable[[], BaseException]] = []
        self._runtime = CoordinatorRuntime(
            resolved,
            queue_max=checked_queue_max(queue_max),
            queue_bytes_max=checked_bytes_max(queue_bytes_max),
            cancel_grace_s=cancel_grace_s,
            lost_limit_s=cluster_lost_limit_s,
            recovery_limit_s=recovery_limit_s,
            rounds=self._rounds,
            width=self._width,
            parent=self._parent_of(resolved.address),
        )
        if (runtimes := getattr(target, "_coordinators", None)) is not None:
            runtimes.add(self._runtime)  # a local_cluster that closes ends their work
        self._scheduled_on = target
        self._alive = _Alive(target)
        weakref.finalize(self._alive, _give_up, self._runtime).atexit = False
        self._actors = Actors(self._runtime, self._works, self._alive, actor_handle)
        self._resources = Resources(self._runtime, self._works, cluster_lost_limit_s)
        notebook_cells.watch(target, self._runtime, self._works)

    # -- scheduling --------------------------------------------------------------------------------

    @as_submit
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RemoteValue[Any]:
        """Run `fn(*args, **kwargs)` on a worker and return a RemoteValue for its result, as
        `schedule` does, which says more.

        >>> coordinator.submit(sorted, [2, 3, 1], reverse=True).result()
        [3, 2, 1]

        Unlike `schedule` it raises no error of an earlier function: `result` and `exception` of
        that function's RemoteValue have it, and `join` raises it if the program has looked at
        neither.
        """
        return self._schedule(fn, args, kwargs, False, PLAIN, NO_OPTIONS)

    @overload
    def options(self, *, num_returns: None = None, **options: Unpack[OneResult]) -> Submitter: ...

    @overload
    def options(self, *, num_returns: int, **options: Unpack[OneResult]) -> Parts: ...

    def options(self, **options: Any) -> Any:
        """Return an object whose `submit`, `map` and `run` schedule functions with these options,
        for as often as you like.

        >>> patient = coordinator.options(name="power", retries=2)
        >>> patient.submit(pow, 2, 5).result(), patient.map(pow, [3], [2])[0].name
        (32, 'power')

        Args:
          name: what errors, reports and log lines call the function, in place of its own name. At
            most 200 characters.
          worker, priority, retries, timeout, keep, lineage: as in `schedule`. `timeout` counts from
            each `submit`.
          num_returns: the number of items of the result, of which each becomes a RemoteValue of its
            own (`Submitter.submit`).

        Raises:
          TypeError: there is no such option, or its value has a wrong type.
          ValueError: a value is out of range.
        """
        return Submitter(self, cast(TaskOptions, options))

    @as_schedule
    def schedule(
        self,
        fn: Callable[..., Any],
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        worker: int | str | None = None,
        priority: int = 0,
        keep: bool = False,
        retries: int | Retries = 0,
        timeout: float | None = None,
        lineage: bool = False,
        resources: Mapping[str, float] | None = None,
    ) -> RemoteValue:
        """Run `fn(*args, **kwargs)` on a worker and return a RemoteValue for its result.

        >>> coordinator.schedule(int, ("z",), {"base": 36}, worker=0).result()
        35

        Blocks while the queue is full, while another thread is in `schedule` or `join`, and while a
        failed round ends.

        Arguments, and the objects that `fn` captures, are pickled before `schedule` returns, so the
        program may change them afterwards. If the worker that runs `fn` is lost, `fn` runs again,
        so it may run more than once. The coordinator accepts exactly one result.

        RemoteValues of this coordinator may be among the arguments at any depth, or captured. The
        function then waits until these values are available, and gets copies that are private to
        the run. It fails with ClosureInputError if one of the RemoteValues has no value.

        Args:
          fn: any callable that can be pickled, lambdas and closures included. A function of an
            importable module is sent by name.
          args: positional arguments, any iterable.
          kwargs: keyword arguments.
          worker: the worker to which the function is pinned, as 1 or "worker:1". This worker runs
            the function before work that any worker may run. If the worker is absent, the function
            waits for it.
          priority: waiting functions begin in order of priority, highest first; within one
            priority, oldest first. Functions that a worker has already received are not overtaken.
          keep: whether the return value stays with its worker, from which other functions fetch it.
            If the worker is lost, a value above 64 KiB is lost as well, and these functions fail
            with UnavailableError.
          retries: how often to run the function again with the same arguments after it raised, or
            a Retries, which also says when and after which errors. Crashes of workers are counted
            separately.
          timeout: seconds from now. A function that has not ended by then is cancelled, and its
            error is DeadlineExceededError.
          lineage: as `keep`, but a lost value is recomputed when it is needed. Lost inputs that
            have a lineage are recomputed first.
          resources: what the function uses of its worker while it runs, as {"gpu": 1, "licence":
            0.5}. It waits until a worker has this much that no other function uses, and fails with
            UnavailableError if no worker could ever have it (docs/resources.md).

        Raises:
          Exception: an earlier function of this round failed, and neither `get` nor `exception` of
            its value has shown the error to the program. This call raises the error as `join`
            would, and schedules no function.
          TypeError: `fn` is not callable, `args` is text or not iterable, or another argument has a
            wrong type.
          ValueError: `worker` is not the name of a worker, `priority` does not fit 32 bits, an
            amount of `resources` is not above 0, or `gpu` is above 1 and no whole number,
            `retries` or `timeout` is out of range, or a RemoteValue of another coordinator, or a
            single value of PerWorkerValues, is among the arguments.
          InvalidArgumentError: `fn` or an argument cannot be pickled; the message says which.
          FailedPreconditionError: the coordinator has been closed.
        """
        options, plan_options = PLAIN, NO_OPTIONS
        if worker is not None or priority or resources:
            options = WorkOptions.checked(worker, priority, resources)
        if retries or timeout is not None or lineage:
            plan_options = PlanOptions.checked(retries, timeout, lineage)
        if isinstance(args, (str, bytes)) or not (args is None or isinstance(args, Iterable)):
            raise TypeError(f"args is {args!r}, wants a tuple or a list: args=({args!r},)")
        positional = () if args is None else tuple(args)
        keywords: dict[str, Any] = {} if kwargs is None else converted("kwargs", dict, kwargs)
        return self._schedule(
            fn, positional, keywords, keep or lineage, options, plan_options, None, True
        )

    def _schedule(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keep: bool,
        options: WorkOptions,
        plan_options: PlanOptions,
        name: str | None = None,
        raise_earlier: bool = False,
    ) -> RemoteValue:
        """Schedule a function. `raise_earlier`: raise the unseen error of an earlier function, and
        schedule nothing."""
        if not callable(fn):
            raise TypeError(f"fn: schedule() and submit() take a callable, not {type(fn).__name__}")
        runtime = self._runtime
        with runtime.schedule_lock:
            if raise_earlier and runtime.failures.unseen:
                self._end_round()
            packing = runtime.packing
            packing.thread = get_ident()
            if options is not PLAIN and options.detached:
                packing.by_reference = True  # detached work cannot wait for inputs
            try:
                packed = self._pack(args, kwargs)
                function: trusted.Packed
                if type(fn) is FunctionSnapshot:
                    function, function_bulks = fn.use()
                    fn = fn.fn
                else:
                    function, function_bulks = runtime.functions.pickled(fn), []
            except errors.InvalidArgumentError as error:
                raise unwrapped(error) from error.__cause__
            finally:
                packing.thread, packing.by_reference = None, False
                uses, inputs = packing.uses, packing.inputs
                if uses or inputs:
                    packing.uses, packing.inputs = [], {}
            extra: Extra | None = None
            bulks = list(function_bulks)
            try:
                if isinstance(function, list):
                    function, function_bulks = runtime.hold(function)
                    bulks += function_bulks
                if isinstance(packed, list):
                    packed, of_arguments = runtime.hold(packed)
                    bulks += of_arguments
                if (
                    inputs
                    or uses
                    or bulks
                    or keep
                    or plan_options is not NO_OPTIONS
                    or options is not PLAIN
                    or len(packed) > SMALL_BYTES_MAX
                ):
                    extra = Extra(
                        options,
                        keep=keep,
                        retries=plan_options.retries,
                        until=plan_options.until,
                        lineage=plan_options.lineage,
                        inputs=[work_of(value) for value in inputs.values()],
                    )
                    extra.timeout = plan_options.timeout
                    extra.parts = plan_options.num_returns
                    if plan_options.policy is not None:
                        extra.policy = plan_options.policy
                        runtime.listeners.retries.start()
                    if uses:
                        extra.uses = uses
                    if bulks or inputs:
                        extra.bulks = bulks
                    if inputs:
                        extra.input_values, extra.packed_inputs = inputs, {}
                        runtime.copy_inputs(extra)
                with runtime.lock:
                    # In a forked child `room` is 0 (runtime.py), so `_wait_for_room` notices the
                    # fork and `schedule` needs no getpid.
                    if (
                        runtime.queue.room <= 0
                        or runtime.closed
                        or not (extra is None or runtime.queue.fits(len(packed), bulks))
                    ):
                        self._wait_for_room(len(packed), bulks, options, raise_earlier)
                    work = next(self._works)
                    number, name_of_fn = runtime.functions.number(fn, function, function_bulks)
                    if name is None:
                        name = name_of_fn
                    return runtime.enqueue(work, number, name, packed, extra, self._alive)
            except BaseException:
                runtime.store.free(bulks)
                raise

    def _pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> trusted.Packed:
        """Pack the arguments so that the worker unpacks them as (args, kwargs)."""
        return trusted.pack_call(args, kwargs)

    def actor(self, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> ActorHandle[T]:
        """Make an object of `cls` in a process of its own on a worker, and return its handle.

        >>> from collections import Counter
        >>> counter = coordinator.actor(Counter)
        >>> counter.update("abba"), counter.most_common(1).result()
        (<RemoteValue of Counter.update: ...>, [('a', 2)])

        Does not wait: the process makes `cls(*args, **kwargs)` while the program goes on. If that
        raises, each call ends with the error. Calls of one program run in its order.

        The actor ends when the program holds no handle and no unfinished call or function carries
        one, when its program ends, or by `kill`. With options:

        >>> tally = coordinator.options(name="tally", restarts=2).actor(Counter)

        Options:
          name: by which `get_actor` of any program of the cluster finds the actor.
          lifetime: "detached": the actor outlives its program, until `kill`. It needs a name.
          worker, resources: as in `submit`.
          restarts: how often the actor begins again, with `__init__`, after its process has ended.
          concurrency: how many calls of `async def` methods run at a time. Default 1000.

        Raises:
          TypeError: `cls` is not a class.
          InvalidArgumentError: `cls` or an argument cannot be pickled, or has a RemoteValue.
        """
        return self._actors.make(cls, args, kwargs, {})

    def actors(
        self, cls: Callable[P, T], size: int, /, *args: P.args, **kwargs: P.kwargs
    ) -> ActorGroup[T]:
        """Make a group of `size` actors of one class, which are placed together, and return it.

        >>> team = coordinator.actors(set, 2)
        >>> team.union([3]).result()
        [{3}, {3}]

        A call of a method of the group calls all members, and gives one value, the list of the
        results by rank. `team[1]` is one member, and `team.method.as_completed(...)` yields the
        RemoteValues as they end. A member finds its place, and the collectives of its group, by
        `zd.current_actor()`.

        Options (`coordinator.options(...).actors(cls, size)`), beside those of `actor`:
          on_death: what the death of a member leads to: "fail" (all members end), "restart" (it
            begins again) or "restart_all". Default "fail".
          restarts, restarts_within_s: the restarts of the group in so many seconds, beyond which
            it fails. Default 3 in 600.
          supervisor: a function that is called, in a thread of the coordinator, with a MemberDeath
            (rank, reason, action) for each death.

        Raises:
          The errors of `actor`, and ValueError for a wrong size or option.
        """
        return make_group(self._actors, cls, size, args, kwargs, {})

    def get_actor(self, name: str, timeout: float | None = None) -> ActorHandle:
        """Return a handle of the actor of this name, which any program of the cluster has made.

        >>> words = coordinator.options(name="words").actor(set)
        >>> coordinator.get_actor("words") == words
        True

        Raises:
          NotFoundError: there is no actor of this name.
          DeadlineExceededError: the dispatcher has not answered for `timeout` seconds (None means
            60). A dispatcher that was started again answers after one lease.
          The dispatcher's reason, if it refuses this coordinator.
        """
        check_type("name", name, str, "the name of an actor")
        return self._actors.find(name, seconds(timeout))

    def kill(self, actor: ActorHandle | ActorGroup) -> None:
        """End an actor, also a detached one, or all members of a group. Calls end with
        ActorLostError; a running one is asked to stop, and has `cancel_grace_s` before the process
        is killed.

        >>> doomed = coordinator.actor(set)
        >>> coordinator.kill(doomed)
        """
        kill(self._actors, actor)

    @as_map
    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any]) -> list[RemoteValue]:
        """Schedule `fn(*items)` for the items of the iterables, as the built-in `map`, and return
        the RemoteValues in order.

        >>> coordinator.gather(coordinator.map(pow, [2, 3, 4], [2, 2, 2]))
        [4, 9, 16]

        The shortest iterable ends the map. `fn` and its captured objects are pickled once, now.
        `float` and `numpy.asarray` convert RemoteValues; a library that needs other results of a
        `map` takes that of an Executor.

        Raises:
          TypeError: `fn` is not callable, or an iterable is missing or not iterable. Then nothing
            is scheduled.
          Exception: any error of `schedule`, or of an iterable. What was scheduled before goes on.
        """
        return Submitter(self, {}).map(fn, *iterables)

    @as_imap
    def imap(
        self, fn: Callable[..., Any], *iterables: Iterable[Any], ahead: int = AHEAD
    ) -> OrderedResults[Any]:
        """Yield the results of `fn(*items)` for the items of the iterables, in their order. The
        iterables are read as the results are taken, so they may have no end.

        >>> import itertools
        >>> results = coordinator.imap(pow, itertools.count(), itertools.repeat(2))
        >>> [next(results) for _ in range(4)]
        [0, 1, 4, 9]
        >>> results.close()

        Args:
          ahead: how many results may be computed, or be under way, that were not taken. Each takes
            memory of this process once it has arrived.

        The OrderedResults raises an error at its place and goes on, and cancels what was not taken
        when it is closed or dropped. The errors of functions are errors of the round, too, as those
        of `submit`.

        Raises:
          TypeError, ValueError: `fn` is not callable, an iterable is missing or not iterable, or
            `ahead` is not a whole number above 0.
        """
        return Submitter(self, {}).imap(fn, *iterables, ahead=ahead)

    @as_stream
    def stream(
        self, fn: Callable[..., Any], /, *args: Any, ahead: int = AHEAD, **kwargs: Any
    ) -> FunctionStream[Any]:
        """Run a generator function on a worker, and yield its values as they are made.

        >>> def squares(count):
        ...     for number in range(count):
        ...         yield number**2
        >>> list(coordinator.stream(squares, 4))
        [0, 1, 4, 9]

        `fn` may also be an asynchronous generator function, or return any iterable. It waits while
        `ahead` values were made and not taken, and takes its slot until then. If its worker or
        process is lost after a value has arrived, the stream ends with an UnavailableError that
        says how many have. With the option `retries` the function begins again, so often at most,
        and the values that have arrived are left out, so it must yield the same values again.

        Args:
          ahead: how many values may have been made that were not taken. They take memory of this
            process.

        The FunctionStream raises an error of `fn` after the values before it. When it is closed or
        dropped, the function is cancelled. The stream is work of the round, as that of `submit`.

        Raises:
          TypeError, ValueError: `fn` is not callable, or `ahead` is not a whole number above 0.
          Exception: any other error of `submit`.
        """
        return Submitter(self, {}).stream(fn, *args, ahead=ahead, **kwargs)

    def scatter(self, value: T) -> RemoteValue[T]:
        """Pickle a value once, and return a RemoteValue for it that may be an argument of any number
        of functions.

        >>> table = coordinator.scatter({"a": 1})
        >>> coordinator.gather([coordinator.submit(len, table) for _ in range(3)])
        [1, 1, 1]

        Each function gets a copy that is private to its run; functions on this host share the
        memory of large arrays until they write. Later changes of `value` reach no function. The
        value is held here until the program has dropped the RemoteValue and the functions that use
        it have ended.

        Raises:
          ValueError: the value contains a RemoteValue.
          InvalidArgumentError: the value cannot be pickled; the message says which part.
          ResourceExhaustedError: there is not enough memory for a copy.
          FailedPreconditionError: the coordinator has been closed.
        """
        self._runtime.check_open()
        return ScatteredValue(self._runtime, next(self._works), value)

    @as_run
    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Call `fn(*args, **kwargs)` once on each worker that is present now, and return the
        results by the name of the worker.

        >>> coordinator.run(divmod, 7, 2)
        {'worker:0': (3, 1), 'worker:1': (3, 1)}

        A call begins when a slot of its worker is free. The calls belong to no round. RemoteValues
        among the arguments must be kept values (`keep=True`). The options `name`, `priority` and
        `timeout` apply: `coordinator.options(timeout=60.0).run(fn)`.

        Raises:
          Exception: the error of the first worker whose call has failed, once all calls have ended.
            Its attribute `failures` is a dict with the errors of all workers that failed. A call
            that is not over after `timeout` is cancelled, with a DeadlineExceededError. If a worker
            is lost, its call fails at once with an UnavailableError, and is not repeated. If the
            function ends its process, but not the worker, it begins again, `attempts_max` times in
            all, and the error is WorkerLost.
          UnavailableError: no worker is present, or `workers` raises it.
          Exception: any other error of `submit`.
        """
        return Submitter(self, {}).run(fn, *args, **kwargs)

    def _snapshot_of(self, fn: Callable[..., Any]) -> FunctionSnapshot:
        """Pickle the function once, in a form that `schedule` accepts any number of times. Raises
        the errors of `schedule`."""
        if not callable(fn):
            raise TypeError(f"fn: map() takes a callable, not {type(fn).__name__}")
        self._runtime.check_open()
        return FunctionSnapshot.take(self._runtime, fn)

    def join(self, timeout: float | None = None) -> None:
        """Wait until all scheduled functions have ended.

        >>> value = coordinator.submit(abs, -3)
        >>> coordinator.join()
        >>> value
        <RemoteValue of builtins.abs: ready>

        Raises:
          Exception: a function of this round failed. `join` raises the first error that the program
            has not seen. If the program has seen all errors, `join` raises the first error, as in
            TensorFlow. The error is raised once. Its `failures` has at most 100 errors of the
            round. Before `join` raises, waiting functions are dropped, and running functions are
            asked to stop and killed after `cancel_grace_s`. If slots are threads, `join` waits for
            the running functions instead. When `join` raises, no function of the round is
            executing. RemoteValues of dropped and stopped functions raise CancelledError.
          DeadlineExceededError: not all functions ended within `timeout` seconds. They continue.
            But if a function has failed, the other functions have been asked to stop, and the next
            `join` raises the error.
          UnavailableError: there was no dispatcher, or no worker, for `cluster_lost_limit_s`.
          FailedPreconditionError, other OpErrors: the coordinator has been closed, or the
          dispatcher refuses it.
        """
        until, timeout = deadline(timeout), seconds(timeout)
        runtime = self._runtime
        acquire = runtime.schedule_lock.acquire
        acquired: list[bool] = []
        try:
            # one call in C, between whose parts no Ctrl-C comes
            acquired.extend(map(acquire, [True], [-1 if timeout is None else timeout]))
            if not acquired[0]:
                raise errors.DeadlineExceededError(
                    f"waited {timeout:g} s for the join() or schedule() of another thread"
                )
            with runtime.lock:
                self._runtime.check_open()
                self._wait_until(self._has_ended, until, timeout)
                failed = bool(runtime.failures)
            if failed:
                self._end_round(until, timeout)
        finally:
            if acquired == [True]:
                runtime.schedule_lock.release()

    def done(self, timeout: float | None = None) -> bool:
        """Return whether all scheduled functions have ended. If `timeout` is given, wait until they
        have, at most `timeout` seconds.

        >>> coordinator.done(timeout=20.0)
        True

        If a function has failed, end the round, however long this takes, and raise the error as
        `join` does.
        """
        self._runtime.check_open()
        runtime = self._runtime
        if timeout is not None:
            with runtime.lock:
                try:
                    self._wait_until(self._has_ended, deadline(timeout), seconds(timeout))
                except errors.DeadlineExceededError:
                    return False
        if runtime.failures:
            self._end_round()
        return runtime.progress.resolved == runtime.progress.scheduled

    @property
    def failures(self) -> list[BaseException]:
        """The errors of the last round that failed, oldest first, at most 100. Each access returns
        new copies.

        The exception that `join` raised has the same list as its attribute `failures`, if its class
        allows new attributes.
        """
        return [make_error() for make_error in self._error_factories]

    @as_fetch
    def fetch(self, val: Any) -> Any:
        """Return `val` with each RemoteValue replaced by its result. Waits for all results.

        Each result is that of `RemoteValue.fetch`, so tensors become arrays, as in TensorFlow;
        otherwise as `gather`.

        >>> coordinator.fetch([coordinator.submit(abs, -3), 4])
        [3, 4]
        """
        return nest.map_contents(partial(_replaced, RemoteValue.fetch), val)

    @as_gather
    def gather(self, values: Any, *, timeout: float | None = None) -> Any:
        """Return `values` with each RemoteValue replaced by its `result`. Waits for all results, at
        most `timeout` seconds.

        RemoteValues are found at any depth in containers of Python (as keys, too), arrays of
        objects, dataclasses and attrs classes. PerWorkerValues, iterators and the views of a dict
        become lists.

        >>> coordinator.gather({"a": coordinator.submit(abs, -1), "b": [coordinator.submit(abs, -2), 3]})
        {'a': 1, 'b': [2, 3]}

        Raises:
          TypeError: a RemoteValue is in an object of another class, or a result cannot be the key
            of a dict or the item of a set.
          DeadlineExceededError (a TimeoutError): a function has not ended within `timeout`; the
            text has its name. It goes on.
          Exception: any error of `RemoteValue.result`, that of the first RemoteValue in the order
            of `values` that has failed.
        """
        until, timeout = deadline(timeout), seconds(timeout)

        def result(value: RemoteValue) -> Any:
            try:
                return value.result(left(until))
            except errors.DeadlineExceededError:
                if value.done() or left(until):  # the error of the function itself
                    raise
                raise errors.DeadlineExceededError(
                    f"{value.name} has not ended after {timeout:g} s"
                ) from None

        return nest.map_contents(partial(_replaced, result), values)

    def as_completed(
        self, values: Iterable[RemoteValue[T]], timeout: float | None = None
    ) -> AsCompleted[T]:
        """Return an iterator over the RemoteValues, each once, in the order in which the functions
        end. Its `add` adds further values.

        >>> sorted(value.result() for value in coordinator.as_completed(coordinator.map(abs, [-2, -1])))
        [1, 2]

        Raises:
          TypeError: `values` is not an iterable of RemoteValues.
          DeadlineExceededError (in the iteration): not all functions have ended `timeout` seconds
            after this call.
        """
        return AsCompleted(values, timeout)

    def wait(
        self,
        values: Iterable[RemoteValue[T]],
        *,
        count: int | None = None,
        timeout: float | None = None,
    ) -> tuple[list[RemoteValue[T]], list[RemoteValue[T]]]:
        """Wait until `count` functions have ended, with a result or an error, or until `timeout`
        seconds are over.

        >>> done, not_done = coordinator.wait(coordinator.map(abs, [-2, -1]), count=1)
        >>> len(done) >= 1, len(done) + len(not_done)
        (True, 2)

        Args:
          count: None, or any number above that of the values, waits for all. `done` may have more
            than `count` values.

        Returns:
          The values whose functions have ended, and the others, both in the order of `values` and
          each once. No time-out is raised.

        Raises:
          TypeError: `values` is not an iterable of RemoteValues, or `count` is not a whole number.
          ValueError: `count` is negative.
        """
        return wait_for(values, count, timeout)

    def cancel_all(self) -> int:
        """Request the cancellation of all functions that have not ended, as `RemoteValue.cancel`
        does, and return their number.

        >>> with zd.ClusterCoordinator(cluster) as other:
        ...     other.cancel_all()
        0

        Does not wait: `join` does. Functions that no worker has begun when the request arrives
        never begin. Functions that are scheduled later, the calls of `run` and the resources of
        workers are not cancelled.
        """
        self._runtime.check_open()
        return self._runtime.cancel_all(next(self._works))

    def workers(self) -> list[str]:
        """Return the names of the present workers, such as "worker:1". Waits until the dispatcher
        has reported them for the first time.

        >>> coordinator.workers()
        ['worker:0', 'worker:1']

        Raises:
          UnavailableError: no dispatcher has replied for `cluster_lost_limit_s`.
          OpError: the dispatcher refuses this coordinator; the message has its reason.
          FailedPreconditionError: the coordinator has been closed.
        """
        names = [name.rpartition(":") for name, *_ in self._present_workers()]
        return [
            f"{job}:{number}"
            for job, _, number in sorted(names, key=lambda name: (name[0], int(name[2])))
        ]

    def slots(self) -> int:
        """Return how many functions the present workers run at a time. Waits and raises as
        `workers`.

        >>> coordinator.slots()
        2
        """
        return sum(slots for *_, slots in self._present_workers())

    def _present_workers(self) -> Iterable[Joined]:
        runtime = self._runtime
        with runtime.lock:
            runtime.check_open()
            until = time.monotonic() + self._cluster_lost_limit_s
            while runtime.members is None and not runtime.closed and runtime.refusal is None:
                if runtime.changed.wait(min(limits.WAIT_LOG_S, until - time.monotonic())):
                    continue
                if time.monotonic() >= until:
                    raise errors.UnavailableError(
                        f"no workers are known: waited for {runtime.absence.description}"
                    )
                log.warning("workers(): waiting for %s", runtime.absence.description)
            runtime.check_open()
            if runtime.members is None and runtime.refusal is not None:
                raise runtime.refusal()
            return list((runtime.members or {}).values())

    @checked
    def remove_worker(
        self, worker: int | str, grace_s: float = limits.GRACE_S, *, force: bool = False
    ) -> None:
        """Have a worker finish its running functions within `grace_s` and leave. Returns once the
        dispatcher has told the worker to leave.

        >>> with zd.local_cluster(workers=2, processes=False) as small, zd.ClusterCoordinator(small) as other:
        ...     other.remove_worker(1)

        Other workers run the functions that it has not begun. With `force`, functions pinned to it
        wait for a new worker of this name.

        Raises:
          DrainRefusedError: values or work would be lost (docs/clusters.md), and `force` is False.
            The error has the names of the losses.
          ValueError, NotFoundError: `worker` is not the name of a worker, or that worker is not
            present.
          UnavailableError, DeadlineExceededError: the dispatcher cannot be reached, or does not
            reply within 20 s.
        """
        job, _, number = worker_name(worker).rpartition(":")
        _remove_workers(self, "drain", job, int(number), duration("grace_s", grace_s), force)

    def scale_workers(
        self, count: int, grace_s: float = limits.GRACE_S, *, force: bool = False
    ) -> None:
        """Set how many workers `zmqdist launch` holds. Returns once the launcher has accepted
        `count`. `force` is as in `remove_worker`.

        >>> try:
        ...     coordinator.scale_workers(3)
        ... except zd.errors.FailedPreconditionError:
        ...     print("no zmqdist launch holds these workers")
        no zmqdist launch holds these workers

        Raises DrainRefusedError as `remove_worker` does, and FailedPreconditionError if no launcher
        holds the workers, or `count` is out of bounds.
        """
        check_type("force", force, bool, "True or False")
        _remove_workers(self, "scale", "worker", count, duration("grace_s", grace_s), force)

    def create_per_worker_resource(
        self,
        fn: Callable[..., Any],
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> PerWorkerValues:
        """Have each worker call `fn(*args, **kwargs)` once and keep the result, the resource. Does
        not wait for these calls.

        >>> tables = coordinator.create_per_worker_resource(dict, ([("a", 1)],))
        >>> coordinator.submit(len, tables).result()
        1

        Pass the returned PerWorkerValues to scheduled functions, as an argument at any depth or
        captured. Each function gets the resource of the worker that runs it.

        A worker that joins later builds the resource as well. After the restart of a lost worker or
        a killed slot process, the resource is built again before a function that uses it runs. If
        slots are processes, each slot has a resource of its own. All workers drop the resource when
        the program holds none of its values and no unfinished work uses it. If `fn` raises, the
        RemoteValues raise the error. The error does not fail the round by itself, but a function
        that uses the resource fails with ClosureInputError.

        Args:
          fn: any callable that can be pickled.
          args, kwargs: the arguments of `fn`, pickled before this method returns.

        Raises:
          TypeError: `fn` is not callable, or `args` is not iterable.
          ValueError: a RemoteValue is among the arguments, and it was not scheduled with
            `keep=True` or its function has not ended.
          InvalidArgumentError: `fn` or an argument cannot be pickled; the message says which.
          UnavailableError: no worker was present for `cluster_lost_limit_s`.
          FailedPreconditionError: the coordinator has been closed.
        """
        self._runtime.check_open()
        return per_worker_resource(self._resources, fn, args, kwargs)

    def per_slot(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> PerSlot[T]:
        """Have each slot call `fn(*args, **kwargs)` when a function first uses the result, and keep
        the result for later functions of the slot. Does not wait.

        >>> import numpy as np
        >>> model = coordinator.per_slot(np.ones, 1000)
        >>> coordinator.gather(coordinator.map(lambda n: float((model * n).sum()), [1, 2]))
        [1000.0, 2000.0]

        Pass the returned PerSlot to scheduled functions, as an argument at any depth or captured.
        Unlike other captured objects, which are private to each run, the object is that of the
        slot: what a function changes in it, later functions of the slot see. Slots that are threads
        have an object each, too. A slot process that is started anew makes a new one. If `fn`
        raises, the function that needed the object fails with ClosureInputError, whose
        `original_exception` is the error, and the next function calls `fn` again. Slots drop their
        objects when the program holds no PerSlot and no unfinished work uses it.

        Raises:
          TypeError: `fn` is not callable.
          Exception: any error of `create_per_worker_resource` about `fn` and its arguments.
        """
        self._runtime.check_open()
        return per_slot(self._resources, fn, args, kwargs)

    @checked
    def create_per_worker_dataset(
        self, dataset_fn: Any, *, shard: bool = False
    ) -> PerWorkerDataset:
        """Return a dataset that each worker reads for itself. `iter(dataset)` returns
        PerWorkerValues of iterators for scheduled functions.

        >>> batches = coordinator.create_per_worker_dataset(Dataset.range(6).batch(3))
        >>> coordinator.submit(next, iter(batches)).result()
        array([0, 1, 2])

        Args:
          dataset_fn: a Dataset or another iterable, which is pickled now, or a function without
            parameters that returns such an iterable and may be a generator. Each worker calls the
            function for each `iter`.
          shard: whether the n workers that are present when `iter` is called share the elements, so
            that each of these workers reads every n-th element. A worker that was lost begins its
            share again when it is back. If each element must be read exactly once even then, have
            the data service distribute the elements (`zmqdist.data.service.distribute`). If False,
            each worker reads all elements, in an order of its own if they are shuffled without a
            seed.

        Raises:
          ValueError: `dataset_fn` is text, a mapping, or neither a function nor an iterable that
            can be read again.
          TypeError: `dataset_fn` is a function that needs parameters.
          InvalidArgumentError: `dataset_fn` cannot be pickled.
          FailedPreconditionError: the coordinator has been closed.
        """
        self._runtime.check_open()
        return per_worker_dataset(self._resources, dataset_fn, shard)

    def metrics(self) -> dict[str, Any]:
        """Return the figures of `zmqdist.coordinator.metrics` by name and, under "workers", the
        figures of `zmqdist status` by worker.

        >>> sorted(coordinator.metrics()["workers"])
        ['worker:0', 'worker:1']

        Raises:
          UnavailableError, DeadlineExceededError: the dispatcher cannot be reached, or does not
            reply within 20 s.
        """
        rows = self._runtime.call_dispatcher("facts")["workers"]
        figures = {name: metrics.get_metric_summary(name) for name in metrics.names()}
        return {**figures, "workers": {row["name"]: row for row in rows}}

    @checked
    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Record in a with-statement what the functions and actors of this coordinator do, and
        where, and write it to the file `path`, for https://ui.perfetto.dev or chrome://tracing.

        >>> import json
        >>> with coordinator.trace(folder + "/run.json"):
        ...     coordinator.gather(coordinator.map(abs, range(3)))
        [0, 1, 2]
        >>> with open(folder + "/run.json") as file:
        ...     runs = [row for row in json.load(file)["traceEvents"] if row.get("cat") == "task"]
        >>> len(runs)
        3

        The file has a row for each slot, and for each class of actors of a worker, with arrows from
        the submission to the run. It is valid even if the program fails in the with-statement, and
        has at most 50,000 runs. The end waits up to 2.5 s for the last reports of workers.

        Raises (at the beginning):
          FailedPreconditionError: this coordinator records a trace already, or was closed.
          UnavailableError, DeadlineExceededError: the dispatcher does not answer within 3 s.
          OSError: the file cannot be written.
        """
        return Trace(self._runtime, path)

    def snapshot(self) -> CoordinatorSnapshot:
        """Return an immutable record of unfinished work, waiting threads and held data. Does not
        wait. Works even after `close`.

        >>> coordinator.snapshot().workers
        2
        """
        return snapshot_of(self._runtime, len(self._resources))

    @property
    def target(self) -> str:
        """The address of the dispatcher, as "zmq://host:port"."""
        return f"zmq://{self._runtime.target.address}"

    @property
    def credentials(self) -> Credentials:
        """The paths of the secrets for the dispatcher. The data service uses them when a
        coordinator is passed as its address."""
        return self._runtime.target.credentials

    def close(self) -> None:
        """Cancel all work, kill running functions and disconnect. Idempotent. Never raises. Has no
        effect in a forked child.

        >>> other = zd.ClusterCoordinator(cluster)
        >>> other.close()
        >>> other
        <ClusterCoordinator of zmq://...: closed>
        """
        if self._runtime.pid == os.getpid():
            self._runtime.give_up()

    def __repr__(self) -> str:
        runtime = self._runtime
        state = f"{runtime.progress.unfinished} unfinished"
        if runtime.closed:
            state = "closed"
        elif not runtime.machine.registered:
            state += ", no dispatcher"
        elif (members := runtime.members) is not None:
            state += f", {len(members)} worker{'s' if len(members) != 1 else ''}"
        return f"<ClusterCoordinator of {self.target}: {state}>"

    @html_repr
    def _repr_html_(self) -> HtmlRows:
        now = self.snapshot()
        return [
            ("dispatcher", self.target),
            ("connected", "yes" if now.connected else "no"),
            ("workers", now.workers),
            ("scheduled", f"{now.scheduled:,}"),
            ("unfinished", f"{now.unfinished:,}"),
            ("wait for inputs", f"{now.waiting_for_inputs:,}"),
            ("kept on workers", f"{now.kept:,}"),
            ("round", "failed: join() raises the error" if now.failed else None),
        ]

    def __enter__(self) -> ClusterCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ClusterCoordinator stays in its process: a scheduled function cannot use this "
            "coordinator"
        )

    # -- waiting -----------------------------------------------------------------------------------

    def _wait_for_room(
        self, nbytes: int, bulks: list[int], options: WorkOptions, raise_earlier: bool
    ) -> None:
        """Wait for room in the queue, or, with `raise_earlier`, until a function fails: raise its
        error. The caller holds `lock`."""
        runtime = self._runtime
        self._runtime.check_open()
        while not options.detached and not runtime.has_room(nbytes, bulks):
            idle = runtime.machine.workers - runtime.progress.unfinished
            runtime.queue.warn_if_workers_idle(idle, nbytes, bulks)
            runtime.progress.waiting_for_room += 1
            try:
                self._wait_until(
                    lambda: (
                        runtime.closed
                        or (raise_earlier and bool(runtime.failures.unseen))
                        or runtime.has_room(nbytes, bulks)
                    )
                )
            finally:
                runtime.progress.waiting_for_room -= 1
            self._runtime.check_open()
            # Check this even if the queue has room by now, because the program must see the error
            # before it schedules more work.
            if raise_earlier and runtime.failures.unseen:
                runtime.lock.release()
                try:
                    self._end_round()
                finally:
                    runtime.lock.acquire()

    def _has_ended(self) -> bool:
        return self._runtime.progress.resolved == self._runtime.progress.scheduled or bool(
            self._runtime.failures
        )

    def _wait_until(
        self, ready: Callable[[], bool], until: float | None = None, timeout: float | None = None
    ) -> None:
        """Wait until `ready()` is True. The caller must hold `lock`. The loss of the cluster ends
        the wait, because all work then fails."""
        if ready():
            return
        runtime = self._runtime
        runtime.progress.waiting += 1
        try:
            with own_cluster.waiting():
                while not ready():
                    left_s = left(until)
                    if left_s == 0:
                        count = runtime.progress.unfinished
                        problem = f"{count} scheduled functions have not ended after {timeout:g} s"
                        raise errors.DeadlineExceededError(problem)
                    runtime.changed.wait(left_s)
        finally:
            runtime.progress.waiting -= 1

    def _end_round(self, until: float | None = None, timeout: float | None = None) -> None:
        """End a failed round and raise its error once none of its functions can be executing. Only
        one of several threads raises it."""
        runtime = self._runtime
        with runtime.lock:
            failed, scheduled, before = runtime.failures.round, runtime.progress.scheduled, -1
            if failed is None:
                return
            # Work that was scheduled while this round was ending belongs to the next round, which
            # must then end as well.
            while before < 0 or (runtime.progress.resolved < scheduled and not runtime.closed):
                before = runtime.progress.rounds_ended
                runtime.end_round()
                self._wait_until(partial(_is_over, runtime, before), until, timeout)
                if runtime.failures.round is not failed:
                    return  # another thread raises the error
            make_error, self._error_factories = runtime.failures.take()
        raise with_failures(make_error(), self.failures)


class IndependentCoordinator(ClusterCoordinator):
    """A coordinator without rounds, so that the failure of a function does not affect other
    functions."""

    _rounds = False


def independent_coordinator(target: Any) -> ClusterCoordinator:
    """Return a coordinator for a library: in a function without a target the function's own, whose
    work ends with the function; otherwise one without rounds."""
    if target is None and own_cluster.present() is not None:
        return ClusterCoordinator()
    return IndependentCoordinator(target)


class OwnCoordinator(ClusterCoordinator):
    """What `ClusterCoordinator()` returns in a scheduled function: the one coordinator of the slot,
    on the slot's own cluster. The work of each function is a session of its own. `close` and the
    end of the outermost with-statement cancel the work, and keep the connection.
    """

    _parent = 0
    """The lease of the function for which the present session was made; 0 before the first."""

    def __init__(self, target: None = None) -> None:
        if "_runtime" not in self.__dict__ or self._runtime.is_idle is None:
            self._parent = self._entered = 0
            super().__init__()

    @staticmethod
    def _parent_of(_: str) -> int:
        return 0  # a function that schedules nothing begins no session

    def _begin_session(self) -> None:
        """Have the work that is scheduled now belong to the function that runs."""
        settle_update()
        own = own_cluster.present()
        if own is None:  # a thread that outlives the slot
            return
        with _making:
            parent, form = own.parent(), self._runtime.target.form
            if parent == self._parent and self._runtime.is_idle is not None:
                return
            if not self._runtime.is_idle or own.safe_only() != form.safe_only:
                super().close()
                self.__init__()  # type: ignore[misc]
            self._parent = parent
            self._runtime.begin_session(parent)

    def _schedule(self, *args: Any, **options: Any) -> RemoteValue:
        self._begin_session()
        return super()._schedule(*args, **options)

    def create_per_worker_resource(self, *args: Any, **kwargs: Any) -> PerWorkerValues:
        self._begin_session()
        return super().create_per_worker_resource(*args, **kwargs)

    def close(self) -> None:
        if self._runtime.progress.unfinished:
            self.cancel_all()

    def __enter__(self) -> OwnCoordinator:
        self._entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if not self._entered:
            self.close()


_own_coordinators: weakref.WeakKeyDictionary[own_cluster.OwnCluster, OwnCoordinator] = (
    weakref.WeakKeyDictionary()
)
_making = threading.RLock()


def process_coordinator() -> OwnCoordinator | None:
    """Return the coordinator of the slot, or other process of a cluster, that runs this thread.
    Make it at the first use. Return None in a program of its own.
    """
    own = own_cluster.present()
    if own is None:
        return None
    with _making:
        coordinator = _own_coordinators.get(own)
        if coordinator is None:
            coordinator = _own_coordinators[own] = object.__new__(OwnCoordinator)
            own.at_end.append(partial(ClusterCoordinator.close, coordinator))
        coordinator.__init__()  # type: ignore[misc]
        return coordinator


def actor_handle(number: int, cls: str, methods: dict[str, int], dispatcher: str) -> ActorHandle:
    """Return a handle of an actor, for the coordinator of this process. Pickles call this function
    by name."""
    own = process_coordinator()
    if own is not None:
        actors = own._actors
    else:
        open_here = (actors for actors in list(open_actors) if actors.serves(dispatcher))
        actors = next(open_here, None) or ClusterCoordinator(dispatcher)._actors
    return actors.handle(number, cls, methods)


def _replaced(result: Callable[[Any], Any], part: Any) -> Any:
    """Return the result of a RemoteValue, the list of an iterator's results, and any other object
    unchanged.

    Raises TypeError if an object of a class that `nest.map_contents` does not look into has a
    RemoteValue.
    """
    if type(part) in trusted.ATOMS or isinstance(
        part, (type, FunctionType, MethodType, ModuleType)
    ):
        return part
    if isinstance(part, RemoteValue):
        return result(part)
    if isinstance(part, PerWorkerValues):
        return [result(part[position]) for position in range(len(part))]
    of_python = type(part).__module__ in ("builtins", "itertools")
    if isinstance(part, (KeysView, ValuesView, ItemsView)) or (
        isinstance(part, Iterator) and of_python
    ):
        return nest.map_contents(partial(_replaced, result), list(part))
    if nest.contents(part) is None:
        for part_name, item in (*trusted.parts_of(part), *trusted.attributes_of(part)):
            if (
                nest.map_contents(
                    lambda inner: None if isinstance(inner, RemoteValue) else inner, item
                )
                is not item
            ):
                raise TypeError(
                    f"gather() does not replace the RemoteValue in {part_name.strip('.')} of a "
                    f"{trusted.type_name(part)}: call its "
                    "result(), or put it into a dataclass, list or dict"
                )
    return part


class _Alive:
    """A token that a coordinator and its pending or kept values share. When the token is
    garbage-collected, the runtime is closed."""

    __slots__ = ("__weakref__", "_target")

    def __init__(self, target: Any) -> None:
        # This reference keeps a DispatchServer alive, which would stop when it is
        # garbage-collected.
        self._target = target


def _is_over(runtime: CoordinatorRuntime, rounds: int) -> bool:
    return runtime.progress.rounds_ended > rounds or runtime.closed


def _give_up(runtime: CoordinatorRuntime) -> None:
    """Have the loop close the runtime. A finalizer calls this, in a thread that may hold any lock,
    so this function takes no lock."""
    if runtime.pid == os.getpid():
        runtime.call_in_loop(runtime.give_up)


def _remove_workers(coordinator: ClusterCoordinator, method: str, *args: Any) -> None:
    """Call `drain` or `scale` of the dispatcher. Raises DrainRefusedError if the dispatcher refuses
    because values or work would be lost."""
    reply = coordinator._runtime.call_dispatcher(method, *args)
    if reply["refused"]:
        raise errors.DrainRefusedError(reply["reports"])
