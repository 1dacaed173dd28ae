"""The connections of one task to the keeper of barriers and keys, and the thread that keeps the task registered there.

Rules
    One connection stands for the task's life. The thread asks for errors of tasks over it all the time: that is the sign of life.
    Questions have another one, made at the first of them: an answer that a thread has to read for others takes twice as long.
    Until the keeper has been there for the first time, every question waits for it, up to its own time-out. When the keeper goes,
    what waits ends with UNAVAILABLE, and so does what is asked before it is back: what it kept is gone.
    An error that waiting cannot mend - not allowed, unknown, started again without a reset - is raised by every question from then on.
    When the task itself ends, that comes first: whatever it waits for ends with CANCELLED, and only then is anybody told (`end_waits`).
    Callbacks have a thread of their own: one that takes its time must not hold up the signs of life.

Not here: what can be asked (client.py).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from math import inf
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

from zmqdist.coordination.answers import named
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
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.future import StatusOrResult, is_sent

log = logging.getLogger("zmqdist.coordination")

REGISTER_AGAIN_S: Final = 0.1
"""Between two attempts to register with a keeper that is just ending."""

LEAVE_S: Final = 1.0
"""A goodbye without the others waits no longer for its answer."""

LOOKING, UP, LOST, REFUSED, RESETTING, ENDED = "looking", "up", "lost", "refused", "resetting", "ended"
"""What a link may be: the keeper was never there; registered; the keeper has gone; refused for good; on the way to begin anew; closed."""

_CODES_OF_AN_END: Final = (CANCELLED, UNAVAILABLE, INTERNAL, FAILED_PRECONDITION)
"""What a question may end with because its own task has: its connection was closed, or the keeper counts the task as one that has left."""

_THREAD_RUNS: Final = (LOOKING, UP, LOST)
"""The thread is there."""

OnError: TypeAlias = Callable[[str, OpError], object]


class LoggedWait:
    """A question that may take long, for the log.

    Attributes:
      missing: where the keeper knows for whom it waits: the name of a barrier.
    """

    def __init__(self, description: str, missing: str = "") -> None:
        self.description = description
        self.missing = missing
        self.began = self.logged_at = time.monotonic()


class KeeperLink:
    """See the module's docstring. Belongs to one client and to its thread; the client must `close` it."""

    def __init__(self, connect: Callable[[], ZmqClient], identity: tuple[str, int, int] | None, keeper: str) -> None:
        """Args:
        connect: makes a connection to the keeper, which waits for nothing.
        who: (job, index, incarnation); None for somebody who is no task: then there is neither a registration nor a thread.
        keeper: its name, for errors; "" where only the address is known.
        """
        self.identity = identity
        self.name = "this client" if identity is None else named(identity[:2])
        self._registration_client, self._request_client = connect(), connect()
        self.keeper = f"{keeper or 'the server'} at {self._registration_client.address}, which keeps barriers and keys,"
        self.errors: list[tuple[str, OpError]] = []
        self.callbacks: list[OnError] = []
        self._changed = threading.Condition()
        self._state = LOOKING
        self._refused: OpError | None = None
        self._last_error: OpError | None = None
        """How the registration has ended the last time."""
        self._pending: StatusOrResult | None = None
        self._was_up = False
        self._end_reason = ""
        """Why it has ended."""
        self._closed = False
        self._waits: set[LoggedWait] = set()
        self._requests: set[StatusOrResult] = set()
        """Questions that wait; not those that were cut off."""
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

    # -- questions ------------------------------------------------------------------------------------------------------------

    def request(self, method: str, *args: Any, due: float = inf, wait: LoggedWait | None = None) -> Any:
        """Ask the keeper, and wait for its answer.

        Args:
          due: until when to wait for the keeper to appear, on `time.monotonic`. From then on it is the keeper who sees to the time.
          wait: told in the log while it lasts.

        Raises:
          DeadlineExceededError: no keeper until `due`.
          UnavailableError: it has gone.
          OpError: what it answers.
        """
        if self.identity is not None:
            self.ready(due)
            due = inf
        elif self._state == ENDED:
            raise self._ended_error()
        result = internal_client.start(self._request_client, PREFIX + method, *args, due=due)
        with self._changed:
            self._requests.add(result)
        if self._state == LOST:  # meanwhile
            self._cancel_unsent()
        elif self._state == ENDED:
            result.cancel()
        if wait is not None:
            self._waits.add(wait)
        try:
            if wait is not None and self.identity is None:  # there is no thread that would tell
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
            if isinstance(
                self._last_error, CancelledError
            ):  # the keeper has said so, and its answer to this was not read any more
                raise CancelledError(self._last_error.message) from error
            raise UnavailableError(f"{self.keeper} has gone") from error
        except BaseException:  # Ctrl-C, say: the keeper must not count us among those who wait
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
            log.warning("%s has waited %.0f s %s", self.name, time.monotonic() - wait.began, wait.description)

    def ready(self, due: float) -> None:
        """Wait until the task is registered. Raises as `ask`."""
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
                    raise DeadlineExceededError(f"{self.keeper} did not appear within {now - began:.1f} s")
                if not self._changed.wait(min(due - now, WAIT_LOG_S)):
                    log.warning(
                        "%s has waited %.0f s for %s to appear", self.name, time.monotonic() - began, self.keeper
                    )

    def counter(self, name: str) -> int:
        """The next round of a barrier."""
        return self._counters.get(name, 0)

    def ended(self, name: str, counter: int) -> None:
        """A round of a barrier has ended. The keeper forgets names that nobody has used for long, and so may we."""
        with self._changed:
            self._counters[name] = max(counter + 1, self._counters.pop(name, 0))
            if len(self._counters) > BARRIERS_MAX:
                self._counters.popitem(last=False)

    def snapshot(self) -> CoordinationSnapshot:
        """See CoordinationClient."""
        with self._changed:
            return CoordinationSnapshot(self._state, len(self._requests), tuple(self._counters))

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    # -- the end ------------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Wait until the others leave, too, where the keeper wants that; leave. Raises what it answers, after the end."""
        try:
            if self._state == UP:
                self.request("leave", self.identity, True)  # as one that is there: the signs of life go on
        finally:
            self.close(say_so=False)

    def close(self, say_so: bool = True) -> None:
        """Leave, and end the thread and the connection. Idempotent.

        Args:
          say_so: tell the keeper, if it is there; else the end of the connection does.
        """
        self.end_waits(f"{self.name} was closed")
        with self._changed:
            if self._closed:
                return
            self._closed = True
        try:
            if say_so and self._was_up:
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
        """The first half of `close`, for those who have more to end than this: what is asked here ends, and nobody is told yet."""
        with self._changed:
            if self._state == ENDED:
                return
            self._was_up, self._state, self._end_reason = self._state == UP, ENDED, why
            requests = list(self._requests)
            self._changed.notify_all()
        for request in requests:
            request.cancel()

    def unless_ended(self, code: int = CANCELLED) -> None:
        """A wait is about to end with an error of this code. Raises CancelledError where this task has ended, which is the reason then."""
        if self._state == ENDED and code in _CODES_OF_AN_END:
            raise CancelledError(f"{self._end_reason} while this waited")

    def reset(self) -> None:
        """Have the keeper forget what this task was, and register again. Waits for a keeper at most LEADER_WAIT_S."""
        assert self.identity is not None
        with self._changed:
            if self._state == ENDED:
                raise self._ended_error()
            if self._state == LOST:  # the next one knows nothing that it could forget
                raise self._keeper_gone()
            if self._state == RESETTING:
                raise FailedPreconditionError(f"{self.name} is being reset already, by another thread")
            self._state = RESETTING
            self._changed.notify_all()
        self._join()
        try:
            self._call_keeper("reset", *self.identity[:2], due=time.monotonic() + LEADER_WAIT_S, states=(RESETTING,))
        except DeadlineExceededError:
            raise DeadlineExceededError(f"{self.keeper} did not answer to a reset") from None
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
        text = f"{self.keeper} has gone; what it kept is lost, and it can be used again when it is back"
        return UnavailableError(text)

    def _ended_error(self) -> FailedPreconditionError:
        return FailedPreconditionError(f"{self.name} takes part in nothing any more: {self._end_reason}")

    def _join(self) -> None:
        with self._changed:
            pending = self._pending
        if pending is not None:
            pending.cancel()
        if self._thread is not None:
            self._thread.join()

    # -- the thread -----------------------------------------------------------------------------------------------------------

    def _stay_registered(self) -> None:
        """Stay registered, until the end or until refused for good."""
        keeper = after = 0
        while self._state in _THREAD_RUNS:
            try:
                errors_count, incarnation = self._call_keeper("register", self.identity, os.getpid())
                if incarnation != keeper:  # another life of the keeper
                    keeper, after = incarnation, errors_count
                    with self._changed:
                        self._counters.clear()
                self._set_state(UP)
                while self._state == UP:
                    for number, task, code, message in self._call_keeper("poll", self.identity, after):
                        after = number
                        self._record_error(named(task), from_code(code, message))
                    self._log_waits()
            except (UnavailableError, CancelledError) as error:
                self._last_error = error
                self._set_state(LOST if keeper else LOOKING)
                self._cancel_unsent()
                with self._changed:
                    self._changed.wait_for(lambda: self._state not in _THREAD_RUNS, REGISTER_AGAIN_S)
            except OpError as error:
                self._set_state(REFUSED, error)
            except BaseException as error:  # a MemoryError, say: who waits must hear of it
                log.exception("%s cannot go on", self.name)
                self._set_state(REFUSED, InternalError(f"{type(error).__name__}: {error}"))

    def _call_keeper(self, method: str, *args: Any, due: float = inf, states: tuple[str, ...] = _THREAD_RUNS) -> Any:
        pending = internal_client.start(self._registration_client, PREFIX + method, *args, due=due)
        with self._changed:
            self._pending = pending
            wanted = self._state in states
        if not wanted:
            pending.cancel()
        return pending.get_value()

    def _cancel_unsent(self) -> None:
        """What was asked just after the keeper had gone would wait for its successor, which knows nothing of it."""
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
                self._callback_thread = threading.Thread(target=self._run_callbacks, name=name, daemon=True)
                self._callback_thread.start()

    def _run_callbacks(self) -> None:
        """In a thread, which ends with the link; nobody waits for it."""
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
            missing = f", for {', '.join(map(named, tasks))}" if tasks else ""
            log.warning("%s has waited %.0f s %s%s", self.name, now - wait.began, wait.description, missing)
