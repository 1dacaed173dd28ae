"""The connections of one task to the keeper of barriers and keys, and the thread that keeps the
task registered.

Rules
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

Not here: the requests (client.py).
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from math import inf
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

from zmqdist import clock as time
from zmqdist.coordination.replies import task_name
from zmqdist.coordination.service import PREFIX
from zmqdist.coordination.snapshot import CoordinationSnapshot
from zmqdist.errors import (
    CANCELLED,
    FAILED_PRECONDITION,
    INTERNAL,
    UNAVAILABLE,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    OpError,
    UnavailableError,
    from_code,
)
from zmqdist.limits import BARRIERS_MAX, LEADER_WAIT_S, TASK_ERRORS_KEPT, WAIT_LOG_S
from zmqdist.rpc import internal_client
from zmqdist.rpc.client import StatusOrResult, ZmqClient, is_sent

log = logging.getLogger("zmqdist.coordination")

REGISTER_AGAIN_S: Final = 0.1
"""Seconds between two attempts to register. A keeper that is about to end refuses each attempt at
once, so the link needs this pause."""

LEAVE_S: Final = 1.0
"""Seconds for which a task waits for the keeper's reply when it leaves without waiting for other
tasks."""

LOOKING, UP, LOST, REFUSED, RESETTING, ENDED = (
    "looking",
    "up",
    "lost",
    "refused",
    "resetting",
    "ended",
)
"""The states of a link: keeper not found yet; registered; keeper gone; refused for good; about to
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
        self._changed = threading.Condition()
        self._state = LOOKING
        self._refused: OpError | None = None
        self._last_error: OpError | None = None
        """The last error that has ended the registration."""
        self._pending: StatusOrResult | None = None
        self._was_up = False
        self._end_reason = ""
        """The reason why this link has ended."""
        self._closed = False
        self._waits: set[LoggedWait] = set()
        self._requests: set[StatusOrResult] = set()
        """The requests that wait for a reply. Requests that `_cancel_unsent` has ended are not
        among them."""
        self._counters: OrderedDict[str, int] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._error_queue: SimpleQueue[tuple[str, OpError] | None] = SimpleQueue()
        self._callback_thread: threading.Thread | None = None
        if identity is not None:
            self._start_thread()

    def _start_thread(self) -> None:
        self._thread = threading.Thread(
            target=self._stay_registered, name=f"zmqdist-coordination-{self.name}", daemon=True
        )
        self._thread.start()

    # -- requests ----------------------------------------------------------------------------------

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
        ended = threading.Event()
        result.add_done_callback(lambda _: ended.set())
        while not ended.wait(WAIT_LOG_S):
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
            if len(self._counters) > BARRIERS_MAX:
                self._counters.popitem(last=False)

    def snapshot(self) -> CoordinationSnapshot:
        """Return the current figures, as `CoordinationClient.snapshot` does."""
        with self._changed:
            return CoordinationSnapshot(self._state, len(self._requests), tuple(self._counters))

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

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
            if self._closed:
                return
            self._closed = True
        try:
            if notify and self._was_up:
                due = time.monotonic() + LEAVE_S
                internal_client.start(
                    self._registration_client, PREFIX + "leave", self.identity, False, due=due
                ).is_ok()
        finally:
            self._join()
            self._error_queue.put(None)
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
        text = f"{self.keeper} has gone; its barriers and keys are lost, and it can be used again when it is back"
        return UnavailableError(text)

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
            wanted = self._state in states
        if not wanted:
            pending.cancel()
        return pending.get_value()

    def _cancel_unsent(self) -> None:
        """Cancel the requests that were not sent before the keeper had gone.

        Otherwise these requests would wait for the next incarnation of the keeper, which does not
        know their barriers and keys.
        """
        with self._changed:
            for request in list(self._requests):
                if not is_sent(request) and request.cancel():
                    self._requests.discard(request)

    def _set_state(self, state: str, refused: OpError | None = None) -> None:
        with self._changed:
            if self._state in _THREAD_RUNS:
                self._state, self._refused = state, refused
            self._changed.notify_all()

    def _record_error(self, task: str, error: OpError) -> None:
        self.errors.append((task, error))
        del self.errors[:-TASK_ERRORS_KEPT]
        if self.callbacks:
            self._error_queue.put((task, error))
            if self._callback_thread is None:
                name = f"zmqdist-on-error-{self.name}"
                self._callback_thread = threading.Thread(
                    target=self._run_callbacks, name=name, daemon=True
                )
                self._callback_thread.start()

    def _run_callbacks(self) -> None:
        """Call the callbacks with each error, in a thread that ends with the link. No other thread
        waits for the end of this thread."""
        while (report := self._error_queue.get()) is not None:
            task, error = report
            for fn in list(self.callbacks):
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
