"""A task's side of coordination: barriers with the other tasks, keys, the states of tasks and their
errors.

KeeperLink: the connections of one task to the keeper, and the thread that keeps the task registered
    One connection stands for the task's incarnation. Over this connection the link's thread polls
    for errors of tasks all the time, and each poll is a sign of life. Requests use a second
    connection, so that the requesting thread reads its reply itself. If the link's thread read the
    reply and passed it on, the latency would double.

    Until the keeper appears for the first time, every request waits for the keeper, up to the
    time-out of the request. When the keeper goes, waiting requests end with UNAVAILABLE, and so do
    new requests until the keeper is back, because its barriers and keys are lost. If the keeper
    refuses the task (not allowed, unknown, restarted without a reset), all later requests raise the
    error of the refusal, until the task is reset.
    When the task itself ends, its waiting requests end with CANCELLED first, and the keeper is
    notified only after that (`end_waits`). Callbacks run in a thread of their own, because a slow
    callback must not delay the signs of life.

Not here: the keeper (service.py), and its decisions (machine.py).
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from typing import Any, Final, NamedTuple, TypeAlias

from zmqdist import clock as time
from zmqdist.background import in_background
from zmqdist.callbacks import Callbacks
from zmqdist.cluster.devices import Device
from zmqdist.conditions import Condition
from zmqdist.coordination.machine import UP
from zmqdist.coordination.replies import Task, task_name
from zmqdist.coordination.service import PREFIX, CoordinationSnapshot
from zmqdist.errors import (
    CANCELLED,
    FAILED_PRECONDITION,
    INTERNAL,
    UNAVAILABLE,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    OpError,
    UnavailableError,
    from_code,
)
from zmqdist.limits import BARRIERS_MAX, LEADER_WAIT_S, TASK_ERRORS_KEPT, WAIT_LOG_S
from zmqdist.rpc import internal_client
from zmqdist.rpc.client import StatusOrResult, ZmqClient, cancel_unsent, new_incarnation
from zmqdist.transport.credentials import Credentials

log = logging.getLogger("zmqdist.coordination")


REGISTER_AGAIN_S: Final = 0.1
"""Seconds between two attempts to register. A keeper that is about to end refuses each attempt at
once, so the link needs this pause."""

LEAVE_S: Final = 1.0
"""Seconds for which a task waits for the keeper's reply when it leaves without waiting for other
tasks."""

LOOKING, LOST, REFUSED, RESETTING, ENDED = "looking", "lost", "refused", "resetting", "ended"
"""The states of a link, besides UP: keeper not found yet; registered; keeper gone; refused for good; about to
register anew; closed."""

_CODES_OF_AN_END: Final = (CANCELLED, UNAVAILABLE, INTERNAL, FAILED_PRECONDITION)
"""The codes of errors with which a request may fail because this task has ended: the task has
closed the connection, or the keeper refuses the request of a task that has left.
"""

_THREAD_RUNS: Final = (LOOKING, UP, LOST)
"""The states in which the link's thread runs."""

OnError: TypeAlias = Callable[[str, OpError], object]


class LoggedWait:
    """A waiting request whose wait the log reports at intervals.

    Attributes:
      description: the text after "worker:0 has waited 10 s" in the log line.
      missing: the name of the barrier for which the keeper reports missing tasks; "" for a request
        that is not for a barrier.
    """

    def __init__(self, description: str, missing: str = "") -> None:
        self.description = description
        self.missing = missing
        self.began = self.logged_at = time.monotonic()


class KeeperLink:
    """The link of one task to its keeper. One client and the link's thread share it, and the client
    must `close` it."""

    def __init__(
        self, connect: Callable[[], ZmqClient], identity: tuple[str, int, int] | None, keeper: str
    ) -> None:
        """Connect, and start the thread. Does not block.

        Args:
          connect: makes a connection to the keeper, without waiting.
          identity: (job, index, incarnation). None means that the client is not a task, so that it
            neither registers nor has a thread.
          keeper: the name of the keeper in error texts; "" if only the address is known.
        """
        self.identity = identity
        self.name = "this client" if identity is None else task_name(identity[:2])
        self._registration_client, self._request_client = connect(), connect()
        self.keeper = f"{keeper or 'the server'} at {self._registration_client.address}, which keeps barriers and keys,"
        self.errors: list[tuple[str, OpError]] = []
        self.callbacks: list[OnError] = []
        self._changed = Condition()
        self._state = LOOKING
        self._refused: OpError | None = None
        self._last_error: OpError | None = None
        """The last error that has ended the registration."""
        self._pending: StatusOrResult | None = None
        self._was_up = False
        self._end_reason = ""
        """The reason why this link has ended."""
        self.closed = False
        self._waits: set[LoggedWait] = set()
        self._requests: set[StatusOrResult] = set()
        """The requests that wait for a reply. Requests that `_cancel_unsent` has ended are not
        among them."""
        self._counters: OrderedDict[str, int] = OrderedDict()
        self._thread: threading.Thread | None = None
        # a slow callback must not delay the signs of life
        self._callback_thread = Callbacks(f"zmqdist-on-error-{self.name}")
        if identity is not None:
            self._start_thread()

    def _start_thread(self) -> None:
        self._thread = threading.Thread(
            target=self._stay_registered, name=f"zmqdist-coordination-{self.name}", daemon=True
        )
        self._thread.start()

    # -- requests ----------------------------------------------------------------------------------

    def ask(self, method: str, *args: Any) -> Any:
        """Send a request to which the keeper replies at once. Raises the errors of `request`."""
        return self.request(method, *args, due=time.monotonic() + LEADER_WAIT_S)

    def request(
        self, method: str, *args: Any, due: float = inf, wait: LoggedWait | None = None
    ) -> Any:
        """Send a request to the keeper, and wait for the reply.

        Args:
          due: when to stop waiting, by `time.monotonic`. For a task, `due` ends only the wait until
            the keeper appears. Once the request is sent, the keeper alone watches its time-out.
          wait: the description with which the log reports the wait at intervals; None means that it
            is not logged.

        Raises:
          DeadlineExceededError: the keeper did not appear until `due`.
          UnavailableError: the keeper has gone.
          OpError: the error in the keeper's reply.
        """
        if self.identity is not None:
            self.ready(due)
            # once the request is sent, the keeper alone watches its time-out
            due = inf
        elif self._state == ENDED:
            raise self._ended_error()
        result = internal_client.start(self._request_client, PREFIX + method, *args, due=due)
        with self._changed:
            self._requests.add(result)
        if self._state == LOST:
            # the keeper has gone since `ready`, and the link's thread may have missed this request
            self._cancel_unsent()
        elif self._state == ENDED:
            result.cancel()
        if wait is not None:
            self._waits.add(wait)
        try:
            # A client without a registration has no thread that logs the wait, so this thread logs
            # it.
            if wait is not None and self.identity is None:
                self._wait_and_log(result, wait)
            return result.get_value()
        except UnavailableError as error:
            self.unless_ended(error.error_code)
            raise UnavailableError(f"{self.keeper} has gone: {error.message}") from None
        except OpError as error:
            self.unless_ended(error.error_code)
            with self._changed:
                own = result in self._requests
            if own:
                raise
            # `_cancel_unsent` ended this request before it had reached the keeper. A request that
            # has reached the keeper, such as the poll of the link's thread, ends with the keeper's
            # own error, so raise this error here, too.
            if isinstance(self._last_error, CancelledError):
                raise CancelledError(self._last_error.message) from error
            raise UnavailableError(f"{self.keeper} has gone") from error
        except BaseException:
            # for example Ctrl-C, after which the keeper must not count this task as waiting
            result.cancel()
            raise
        finally:
            with self._changed:
                self._requests.discard(result)
            if wait is not None:
                self._waits.discard(wait)

    def _wait_and_log(self, result: StatusOrResult, wait: LoggedWait) -> None:
        finished_event = threading.Event()
        result.add_done_callback(lambda _: finished_event.set())
        while not finished_event.wait(WAIT_LOG_S):
            log.warning(
                "%s has waited %.0f s %s",
                self.name,
                time.monotonic() - wait.began,
                wait.description,
            )

    def ready(self, due: float) -> None:
        """Wait until the task is registered. Raises the errors of `request`."""
        began = time.monotonic()
        with self._changed:
            if self._state == ENDED:
                raise self._ended_error()
            while self._state != UP:
                if self._state == LOST:
                    raise self._keeper_gone()
                self.unless_ended()
                if self._refused is not None:
                    raise from_code(self._refused.error_code, self._refused.message)
                now = time.monotonic()
                if now >= due:
                    raise DeadlineExceededError(
                        f"{self.keeper} did not appear within {now - began:.1f} s"
                    )
                if not self._changed.wait(min(due - now, WAIT_LOG_S)):
                    log.warning(
                        "%s has waited %.0f s for %s to appear",
                        self.name,
                        time.monotonic() - began,
                        self.keeper,
                    )

    def counter(self, name: str) -> int:
        """Return the number of the next round of a barrier."""
        return self._counters.get(name, 0)

    def ended(self, name: str, counter: int) -> None:
        """Record that a round of a barrier has ended. If there are too many names, drop the least
        recently used one, as the keeper does."""
        with self._changed:
            self._counters[name] = max(counter + 1, self._counters.pop(name, 0))
            # the keeper forgets the same name
            if len(self._counters) > BARRIERS_MAX:
                self._counters.popitem(last=False)

    def snapshot(self) -> CoordinationSnapshot:
        """Return the current figures, as `CoordinationClient.snapshot` does."""
        with self._changed:
            return CoordinationSnapshot(self._state, len(self._requests), tuple(self._counters))

    # -- the end -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Tell the keeper that this task leaves. If the cluster has a `shutdown_timeout_s`, wait
        for the other tasks. Then close the link.

        Raises:
          OpError: the error in the keeper's reply. The link is closed even then.
        """
        try:
            if self._state == UP:
                # Call `close` only after this request, because the thread has to send signs of life
                # while this task waits.
                self.request("leave", self.identity, True)
        finally:
            self.close(notify=False)

    def close(self, notify: bool = True) -> None:
        """Leave, end the thread, and close the connections. Idempotent.

        Args:
          notify: whether to tell a connected keeper that the task leaves. If False, the keeper only
            notices the end of the connection.
        """
        self.end_waits(f"{self.name} was closed")
        with self._changed:
            if self.closed:
                return
            self.closed = True
        try:
            if notify and self._was_up:
                internal_client.start(
                    self._registration_client,
                    PREFIX + "leave",
                    self.identity,
                    False,
                    due=time.monotonic() + LEAVE_S,
                ).is_ok()
        finally:
            self._join()
            self._callback_thread.close()
            self._registration_client.close()
            self._request_client.close()

    def end_waits(self, why: str) -> None:
        """End the waiting requests of this task and refuse new requests, without notifying the
        keeper. `close` begins with this."""
        with self._changed:
            if self._state == ENDED:
                return
            self._was_up, self._state, self._end_reason = self._state == UP, ENDED, why
            requests = list(self._requests)
            self._changed.notify_all()
        for request in requests:
            request.cancel()

    def unless_ended(self, code: int = CANCELLED) -> None:
        """Raise CancelledError if this link has ended and its end may have caused an error with
        this code."""
        if self._state == ENDED and code in _CODES_OF_AN_END:
            raise CancelledError(f"{self._end_reason} while this request waited")

    def reset(self) -> None:
        """Have the keeper forget the error of this task, and register again. Waits at most
        LEADER_WAIT_S for the keeper."""
        assert self.identity is not None
        with self._changed:
            if self._state == ENDED:
                raise self._ended_error()
            if self._state == LOST:
                # the keeper is gone, and with it the error that a reset would clear
                raise self._keeper_gone()
            if self._state == RESETTING:
                raise FailedPreconditionError(
                    f"{self.name} is being reset already, by another thread"
                )
            self._state = RESETTING
            self._changed.notify_all()
        self._join()
        try:
            self._call_keeper(
                "reset",
                *self.identity[:2],
                due=time.monotonic() + LEADER_WAIT_S,
                states=(RESETTING,),
            )
        except DeadlineExceededError:
            raise DeadlineExceededError(f"{self.keeper} did not reply to a reset") from None
        except (UnavailableError, CancelledError, FailedPreconditionError) as error:
            self.unless_ended(error.error_code)
            if isinstance(error, FailedPreconditionError):
                raise
            raise self._keeper_gone() from None
        finally:
            with self._changed:
                if self._state == RESETTING:
                    self._state, self._refused = LOOKING, None
                    self._start_thread()

    def _keeper_gone(self) -> UnavailableError:
        return UnavailableError(
            f"{self.keeper} has gone; its barriers and keys are lost, and it can be used again "
            f"when it is back"
        )

    def _ended_error(self) -> FailedPreconditionError:
        return FailedPreconditionError(
            f"{self.name} can make no more requests to the keeper: {self._end_reason}"
        )

    def _join(self) -> None:
        with self._changed:
            pending = self._pending
        if pending is not None:
            pending.cancel()
        if self._thread is not None:
            self._thread.join()

    # -- the thread --------------------------------------------------------------------------------

    def _stay_registered(self) -> None:
        """Register and poll for errors, until this link ends or the keeper refuses this task for
        good."""
        keeper = after = 0
        while self._state in _THREAD_RUNS:
            try:
                errors_count, incarnation = self._call_keeper(
                    "register", self.identity, os.getpid()
                )
                if incarnation != keeper:
                    # a restarted keeper counts rounds and errors from 0 again
                    keeper, after = incarnation, errors_count
                    with self._changed:
                        self._counters.clear()
                self._set_state(UP)
                while self._state == UP:
                    for number, task, code, message in self._call_keeper(
                        "poll", self.identity, after
                    ):
                        after = number
                        self._record_error(task_name(task), from_code(code, message))
                    self._log_waits()
            except (UnavailableError, CancelledError) as error:
                self._last_error = error
                self._set_state(LOST if keeper else LOOKING)
                self._cancel_unsent()
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._state not in _THREAD_RUNS, REGISTER_AGAIN_S
                    )
            except OpError as error:
                self._set_state(REFUSED, error)
            except BaseException as error:
                # for example a MemoryError, after which the waiting requests must end
                log.exception("%s cannot go on", self.name)
                self._set_state(REFUSED, InternalError(f"{type(error).__name__}: {error}"))

    def _call_keeper(
        self, method: str, *args: Any, due: float = inf, states: tuple[str, ...] = _THREAD_RUNS
    ) -> Any:
        pending = internal_client.start(self._registration_client, PREFIX + method, *args, due=due)
        with self._changed:
            self._pending = pending
            may_send = self._state in states
        if not may_send:
            pending.cancel()
        return pending.get_value()

    def _cancel_unsent(self) -> None:
        """Cancel the requests that were not sent before the keeper had gone.

        Otherwise these requests would wait for the next incarnation of the keeper, which does not
        know their barriers and keys.
        """
        with self._changed:
            for request in list(self._requests):
                if cancel_unsent(request):
                    self._requests.discard(request)

    def _set_state(self, state: str, refused: OpError | None = None) -> None:
        with self._changed:
            if self._state in _THREAD_RUNS:
                self._state, self._refused = state, refused
            self._changed.notify_all()

    def _record_error(self, task: str, error: OpError) -> None:
        self.errors.append((task, error))
        del self.errors[:-TASK_ERRORS_KEPT]
        for fn in list(self.callbacks):
            self._callback_thread.put(partial(self._call_back, fn, task), error)

    def _call_back(self, fn: OnError, task: str, error: OpError) -> None:
        try:
            fn(task, error)
        except BaseException:
            log.exception("on_error of %s failed", self.name)

    def _log_waits(self) -> None:
        now = time.monotonic()
        for wait in [wait for wait in list(self._waits) if now - wait.logged_at >= WAIT_LOG_S]:
            wait.logged_at = now
            tasks = self._call_keeper("missing", wait.missing) if wait.missing else []
            missing = f", for {', '.join(map(task_name, tasks))}" if tasks else ""
            log.warning(
                "%s has waited %.0f s %s%s", self.name, now - wait.began, wait.description, missing
            )


TaskName: TypeAlias = "str | tuple[str, int]"
"""The name of a task, as users write it: "worker:1", ("worker", 1) or "/job:worker/task:1"."""


class TaskState(NamedTuple):
    """The state of a task, as the keeper knows it.

    Attributes:
      state: "missing" (has not registered yet), "joining", "up", "error" or "left".
      incarnation: the incarnation of the task's current or last process; 0 before the first
        process.
      code, message: the code and text of the task's error; 0 and "" if the task is not in error.
    """

    state: str
    incarnation: int
    code: int
    message: str


class CoordinationClient:
    """A client of the keeper: barriers, keys and the states of tasks. It belongs to one task or,
    with `task=None`, to a process that is no task. Any thread may call the methods. Close the
    client at the end.

    The client of a task registers the task in the background and keeps it registered. The other
    tasks are notified when this task is lost, unless its job may recover. Until the keeper appears
    for the first time, each request waits for the keeper, up to its `timeout`, or LEADER_WAIT_S if
    it has no such argument.

    While the keeper is gone, every request of a task's client raises UnavailableError, but a new
    request of a client without a task waits for the next keeper. If the keeper refuses this task,
    requests raise AbortedError or another OpError. Wrong arguments raise InvalidArgumentError.

    Attributes:
      kv: the key-value store.
    """

    def __init__(
        self,
        address: str,
        task: TaskName | None = None,
        incarnation: int = 0,
        *,
        credentials: Credentials | None = None,
        keeper: str = "",
    ) -> None:
        """Connect in the background. Does not block.

        Args:
          address: "host:port" of the keeper, which is the leader of a cluster or a dispatcher.
          task: the task that this process is. None means that the process is no task, so that only
            keys, `task_states` and `check_alive` can be used.
          incarnation: the incarnation of this process; 0 draws a number.
          credentials: the places of the keys and the token; None means the default places.
          keeper: the name of the keeper in error texts.
        """
        security = (credentials or Credentials()).client(address.removeprefix("zmq://"), "worker")
        identity = None if task is None else (*task_of(task), incarnation or new_incarnation())
        name = "" if identity is None else task_name(identity[:2])
        self._link = KeeperLink(
            lambda: ZmqClient(address, name, security=security), identity, keeper
        )
        self.kv = KeyValues(self._link)

    # -- barriers ----------------------------------------------------------------------------------

    def barrier(
        self, name: str, timeout: float | None = None, tasks: Iterable[TaskName] | None = None
    ) -> None:
        """Wait until all tasks have called the barrier of this name. A barrier can be used any
        number of times.

        If a use of the barrier (a round) fails, all waiting tasks get the same error, and tasks
        that call later get this error at once.

        Args:
          name: any text that does not begin with "zmqdist.", of up to KEY_CHARS_MAX characters.
          timeout: seconds. The first time-out that a caller passes in a round holds for all
            callers. With None the wait has no limit, and the log reports at intervals which tasks
            are missing.
          tasks: the tasks that must call, all with the same list. None means all tasks of the
            cluster except evaluators and dispatchers. Where the keeper is a dispatcher, the list is
            required.

        Raises:
          DeadlineExceededError: some tasks did not call in time; the text names them.
          InternalError: a task of the barrier is in error, was lost, has left, or was restarted and
            counts rounds from 0 again.
          InvalidArgumentError: the callers pass different lists of tasks, a caller is not in the
            list, or the list is required.
          FailedPreconditionError: this process is no task, or its job takes no part in barriers.
          CancelledError: a task cancelled the round, or this task has called the barrier again from
            another thread.
        """
        identity, due, members = self._identity(), _due(timeout), _tasks_of(tasks)
        self._link.ready(due)
        left_s = _left(due)
        code, message, counter = self._link.request(
            "barrier",
            identity,
            name,
            self._link.counter(name),
            left_s,
            members,
            due=due,
            wait=LoggedWait(f"at barrier {name!r}", name) if due == inf else None,
        )
        self._link.ended(name, counter)
        if code:
            self._link.unless_ended(code)
            raise from_code(code, message)

    def cancel_barrier(self, name: str) -> None:
        """End the current round of a barrier, with CancelledError for all waiting tasks.

        Raises:
          FailedPreconditionError: no task waits in this round, or the round is over.
        """
        self._link.ask("cancel_barrier", self._identity(), name, self._link.counter(name))

    def wait_for_all(self, devices: Iterable[str] = (), timeout: float | None = None) -> list[str]:
        """Wait until all tasks of the cluster have called this method. Use it at the start, to know
        that the cluster is complete.

        Args:
          devices: names of this task's devices, or any other texts for the other tasks.

        Returns:
          The texts of all tasks, in the order of the tasks.

        Raises the errors of `barrier`.
        """
        identity, due = self._identity(), _due(timeout)
        self._link.ready(due)
        left_s = _left(due)
        return list(
            self._link.request(
                "wait_for_all",
                identity,
                list(devices),
                left_s,
                due=due,
                wait=LoggedWait("for all tasks", "zmqdist.all") if due == inf else None,
            )
        )

    def alive_tasks(self, tasks: Iterable[TaskName] | None = None) -> list[str]:
        """Return the names of the tasks in `tasks` that are alive. None means all tasks of the
        cluster.

        This is a collective operation: each of `tasks` that is alive must call this method, with
        the same set of tasks. All callers get the same result, as soon as the last task that is
        alive has called.

        Raises:
          InvalidArgumentError: a task is not in the cluster, or this task is not among `tasks`.
        """
        return [
            task_name(task) for task in self._link.ask("alive", self._identity(), _tasks_of(tasks))
        ]

    # -- states of tasks ---------------------------------------------------------------------------

    def task_states(self, jobs: Iterable[str] | None = None) -> dict[str, TaskState]:
        """Return the state of every task, or of the tasks of some jobs, by name and in the order of
        the cluster. In a cluster of servers, evaluators and dispatchers are left out.
        """
        return {
            task_name((job, index)): TaskState(*rest)
            for job, index, *rest in self._link.ask("states", None if jobs is None else list(jobs))
        }

    def check_alive(self, task: TaskName) -> bool:
        """Return whether a task is registered, and is neither lost nor in error.

        Raises:
          InvalidArgumentError: `task_states` does not have the task.
        """
        states = self.task_states()
        name = task_name(task_of(task))
        if name not in states:
            raise InvalidArgumentError(
                f"{name} is not in the cluster, which has {', '.join(states) or 'none'}"
            )
        return states[name].state == UP

    def report_error(self, code: int, message: str) -> None:
        """Report to the keeper that this task has failed. The keeper ends barriers that wait for
        this task. It also notifies the other tasks, unless the job of this task may recover.

        Args:
          code: a code of zmqdist.errors, but not OK. `reset` clears the error.
        """
        self._link.ask("report_error", self._identity(), code, message)

    def on_error(self, fn: OnError) -> None:
        """Have `fn(task, error)` called when a task of the cluster fails, with the name of the task
        and an OpError.

        Callbacks run one after the other, in a thread of their own. The failure of another task is
        not reported if its job may recover.
        """
        self._link.callbacks.append(fn)

    @property
    def errors(self) -> list[tuple[str, OpError]]:
        """The latest errors that the keeper has reported to this task, oldest first, as (name of
        the failed task, error)."""
        return list(self._link.errors)

    def snapshot(self) -> CoordinationSnapshot:
        """Return an immutable record of the present state: whether this task is registered, and its
        waiting requests. Sends no message."""
        return self._link.snapshot()

    # -- registration and end ----------------------------------------------------------------------

    def register(self, timeout: float | None = None) -> None:
        """Wait until this task is registered. The client registers the task in the background even
        if this is not called.

        Raises:
          DeadlineExceededError: the keeper did not appear in time.
          AbortedError: this task is in error, or another incarnation of this task is registered.
            `reset` helps in both cases.
        """
        self._identity()
        self._link.ready(_due(timeout))

    def beat(self) -> None:
        """Send a sign of life now. No program has to call this, because the client sends signs of
        life in the background.

        Raises:
          OpError: this task is in error, and this is its error.
        """
        self._link.ask("beat", self._identity())

    def reset(self) -> None:
        """Have the keeper forget the error or the earlier incarnation of this task, and register
        again.

        Raises:
          DeadlineExceededError: no keeper appeared within LEADER_WAIT_S.
        """
        self._identity()
        self._link.reset()

    def shutdown(self) -> None:
        """Leave the cluster in good order. If the cluster has a `shutdown_timeout_s`, wait until
        all other tasks shut down as well.

        Raises:
          DeadlineExceededError: some tasks did not shut down in time. This task has left
            nevertheless.
          InternalError: a task was lost, or left without waiting. This task has left nevertheless.
        """
        self._link.shutdown()

    def close(self, notify: bool = True) -> None:
        """Leave the cluster at once, and close the connection. Idempotent.

        Args:
          notify: whether to tell the keeper that this task leaves. If False, the keeper counts the
            task as lost.
        """
        self._link.close(notify)

    def end_waits(self, why: str) -> None:
        """End the waits of this client with CancelledError. Use it if the owner must end other
        waits, too, before it calls `close`.

        Args:
          why: the reason in the error text, such as "the server of worker:1 was stopped".
        """
        self._link.end_waits(why)

    def __enter__(self) -> CoordinationClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        link = self.__dict__.get("_link")
        if link is not None and not link.closed:
            in_background("zmqdist-coordination-stop", link.close, False)

    def _identity(self) -> tuple[str, int, int]:
        if self._link.identity is None:
            raise FailedPreconditionError(
                "this client is no task of the cluster: it has keys and task_states only"
            )
        return self._link.identity


class KeyValues:
    """A key-value store that all tasks share. A key is a str of up to KEY_CHARS_MAX characters;
    with slashes it is a path. A value may be any value that RPC can send.

    The values are in the keeper's memory, and are lost when the keeper ends. A read returns a copy.
    Only `get` waits for another task.
    """

    def __init__(self, link: KeeperLink) -> None:
        self._link = link

    def set(self, key: str, value: Any, overwrite: bool = False) -> None:
        """Set the value of a key.

        Raises:
          AlreadyExistsError: the key has a value and `overwrite` is False. The value is not
            changed.
          ResourceExhaustedError: the store has KEYS_MAX keys already, or would have more than
            KEYS_BYTES_MAX bytes with this value.
        """
        self._link.ask("kv_set", key, value, overwrite)

    def get(self, key: str, timeout: float | None = None) -> Any:
        """Return the value of a key. If the key has no value, wait until a task sets it.

        Args:
          timeout: seconds to wait. With None the wait has no limit, and the client logs at
            intervals that it waits.

        Raises:
          DeadlineExceededError: no task set the key in time.
        """
        due = _due(timeout)
        if self._link.identity is not None:
            self._link.ready(due)
        return self._link.request(
            "kv_get",
            key,
            _left(due),
            due=due,
            wait=LoggedWait(f"for key {key!r}") if due == inf else None,
        )

    def try_get(self, key: str) -> Any:
        """Return the value of a key. Raises NotFoundError if the key has no value."""
        return self._link.ask("kv_try_get", key)

    def delete(self, key: str) -> int:
        """Remove a key and all keys below it ("a" also removes "a/b"). Return the number of removed
        keys."""
        return int(self._link.ask("kv_delete", key))

    def list(self, prefix: str = "") -> dict[str, Any]:
        """Return all keys below a directory, in order, with their values. For "a" these include
        "a/b" and "a/b/c", but not "a" or "ab"."""
        return dict(self._link.ask("kv_list", prefix))

    def increment(self, key: str, by: int = 1) -> int:
        """Add `by` to the whole number that is the value of a key, and return the sum. A key
        without a value counts as 0.

        The keeper adds atomically, so callers that all add 1 get different sums.

        Raises:
          FailedPreconditionError: the value of the key is not a whole number.
        """
        return int(self._link.ask("kv_increment", key, by))


def task_of(name: TaskName) -> Task:
    """Convert "worker:1", ("worker", 1) or "/job:worker/replica:0/task:1" to a Task. Raises
    InvalidArgumentError for other values."""
    if isinstance(name, str) and name.startswith("/"):
        try:
            device = Device.parse(name)
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from None
        job, index = device.job, device.task
    elif isinstance(name, str):
        job, _, digits = name.rpartition(":")
        index = int(digits) if digits.isdecimal() else None
    else:
        job, index = name if isinstance(name, tuple | list) and len(name) == 2 else (None, None)
    if not isinstance(job, str) or not job or type(index) is not int or index < 0:
        raise InvalidArgumentError(f'{name!r} is no task: wanted one like "worker:1"')
    return job, index


def _tasks_of(names: Iterable[TaskName] | None) -> list[Task] | None:
    if names is None:
        return None
    if isinstance(names, str | bytes) or not isinstance(names, Iterable):
        raise InvalidArgumentError(
            f'{names!r} is no list of tasks: wanted one like ["worker:0", "worker:1"]'
        )
    return [task_of(name) for name in names]


def _due(timeout: float | None) -> float:
    """Return the time at which a time-out is over, by the clock of `time.monotonic`; `inf` for
    None."""
    until = time.deadline(timeout)
    return inf if until is None else until


def _left(due: float) -> float | None:
    """Return the seconds until `due`; None for `inf`."""
    return None if due == inf else time.left(due)
