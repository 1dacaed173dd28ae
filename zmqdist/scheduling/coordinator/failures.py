"""The errors of the functions of a round, and which of them the program has seen.

Rules
    The program has seen an error when `result` or `exception` of a RemoteValue has raised or
    returned the error. `join` and `done` raise the error of a round whether or not the program has
    seen it, as in TensorFlow. `schedule` raises an error only while the program has not seen all
    errors of the round, because a program that has seen an error handles it itself. Errors that the
    program has never seen are logged when the coordinator is closed or the program ends, so that no
    error is lost.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakSet

from zmqdist import errors, limits, messages
from zmqdist.scheduling.coordinator import work as ends
from zmqdist.wire import results, trusted

log = logging.getLogger("zmqdist.coordinator")

ErrorFactory: TypeAlias = "Callable[[], BaseException]"
"""Returns a new exception object in each call, so that tracebacks do not accumulate."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How a work item has failed. A call of this object returns the error as a new exception."""

    kind: int | None
    payload: Any
    name: str
    attempt: int = 1
    safe_only: bool = False
    """Whether a pickled error is refused, because the program accepts only safe results."""

    def __call__(self) -> BaseException:
        """Return a new exception."""
        payload, name = self.payload, self.name
        match self.kind:
            case messages.ERROR:
                error = results.unpack_error(payload, safe_only=self.safe_only)
                if name and isinstance(cause := error.__cause__, trusted.RemoteTraceback):
                    place = cause.origin and f", attempt {self.attempt} on {cause.origin}"
                    cause.args = (f"{name}{place}:\n{cause.args[0]}",)
                return error
            case ends.LOST:
                return errors.WorkerLost(name, payload)
            case messages.OUT_OF_MEMORY:
                return errors.ResourceExhaustedError(f"{name}: {payload.decode()}")
            case ends.UNAVAILABLE:
                return errors.UnavailableError(f"{name}: {payload.decode()}")
            case ends.ACTOR_LOST:
                return errors.ActorLostError(name, *payload)
            case ends.INPUT_FAILED:
                return errors.ClosureInputError(payload.exception())
            case ends.TIMED_OUT:
                return errors.DeadlineExceededError(
                    f"{name} has not ended {payload:g} s after it was scheduled"
                )
        assert self.kind == messages.CANCELLED, self.kind
        text = f"{name} was cancelled, by cancel() or close(), or because its round ended with another function's error"
        return errors.CancelledError(text + ": schedule it again")


class Failures:
    """The errors of one coordinator. Except for `mark_seen`, the caller of a method must hold the
    coordinator's lock.

    Args:
      reported: whether unseen errors are logged at the end. False for an Executor, whose Futures
        hold the errors.

    Attributes:
      unseen: the work items of this round whose errors the program has not seen.
    """

    def __init__(self, reported: bool) -> None:
        self.unseen: set[int] = set()
        self._reported = reported
        self._errors: list[tuple[int, ErrorFactory]] = []
        self._pid = os.getpid()
        _instances.add(self)

    def __bool__(self) -> bool:
        """Return whether the round has failed."""
        return bool(self._errors)

    @property
    def round(self) -> object:
        """An object that identifies the failed round until its errors are taken; None while no work
        of the round has failed."""
        return self._errors[0] if self._errors else None

    def add(self, work: int, make: ErrorFactory) -> None:
        """Add the error of a work item. The first FAILURES_KEPT errors of a round are kept; later
        ones are only counted."""
        self.unseen.add(work)
        if len(self._errors) < limits.FAILURES_KEPT:
            self._errors.append((work, make))

    def mark_seen(self, work: int) -> None:
        """Record that the program has seen the error of this work item. Any thread may call
        this.
        """
        self.unseen.discard(work)

    def take(self) -> tuple[ErrorFactory, list[ErrorFactory]]:
        """Return the first unseen error, or the first error if all were seen, and the list of all
        errors. Mark all errors as seen.

        The round must have failed.
        """
        round_errors, self._errors = self._errors, []
        first = next(
            (make for work, make in round_errors if work in self.unseen), round_errors[0][1]
        )
        self.unseen = set()
        return first, [make for _, make in round_errors]

    def report(self) -> None:
        """Log the number of errors that the program has not seen, and the first of those that are
        kept. Later calls log nothing."""
        unseen, self.unseen = self.unseen, set()
        if not unseen or not self._reported or self._pid != os.getpid():
            return
        make = next((make for work, make in self._errors if work in unseen), None)
        error, name = (None, "") if make is None else (make(), getattr(make, "name", ""))
        log.error(
            "the program has not looked at %d error%s of scheduled functions: call join() before "
            "the end, or result() of each "
            "value.%s",
            len(unseen),
            "s" if len(unseen) > 1 else "",
            ""
            if error is None
            else f" The first: {name and f'{name}: '}{type(error).__name__}: {error}",
        )


def with_failures(error: BaseException, failures: object) -> BaseException:
    """Return `error` with this attribute `failures`, if its class allows new attributes."""
    try:
        error.failures = failures  # type: ignore[attr-defined]
    except Exception:
        log.debug("a %s takes no attributes, so it has no `failures`", type(error).__name__)
    return error


_instances: WeakSet[Failures] = WeakSet()


@atexit.register
def _report_all() -> None:
    """Log the unseen errors of each coordinator that the program did not close."""
    for failures in list(_instances):
        failures.report()
