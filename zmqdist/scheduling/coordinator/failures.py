"""The errors of the functions of a round, and which of them the program has seen.

Rules
    `join` and `done` raise the error of a round, as TensorFlow's do, whatever became of it before. `schedule` raises it only
    while there is one that the program has not seen: what `get`, `fetch` or `exception` of a RemoteValue has given to the
    program is its own to handle, and no reason not to schedule more.
    What the program has never seen is logged when the coordinator is closed, or the program ends: else it would vanish.
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
from zmqdist.scheduling.coordinator import dependencies_and_retries as ends
from zmqdist.wire import trusted

log = logging.getLogger("zmqdist.coordinator")

ErrorFactory: TypeAlias = "Callable[[], BaseException]"
"""An error, a fresh one each time, so that no traceback grows."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How a piece of work has ended, as an error."""

    kind: int | None
    payload: Any
    name: str

    def __call__(self) -> BaseException:
        """The exception; a fresh one each time, so that no traceback grows."""
        payload, name = self.payload, self.name
        match self.kind:
            case messages.ERROR:
                return trusted.unpack_error(payload)
            case ends.LOST:
                return errors.WorkerLost(name, payload)
            case ends.UNAVAILABLE:
                return errors.UnavailableError(f"{name}: {payload.decode()}")
            case ends.INPUT_FAILED:
                return errors.ClosureInputError(payload.error())
            case ends.TIMED_OUT:
                return errors.DeadlineExceededError(f"{name} has not ended {payload:g} s after it was scheduled")
        assert self.kind == messages.CANCELLED, self.kind
        text = f"{name} was cancelled, by cancel() or because its round ended with another function's error"
        return errors.CancelledError(text + ": schedule it again")


class Failures:
    """Of one coordinator. Behind its lock, but for `saw`.

    Args:
      reported: whether what was not seen is logged at the end; an Executor's Futures tell for themselves.

    Attributes:
      unseen: the numbers of the work of this round whose errors the program has not seen.
    """

    def __init__(self, reported: bool) -> None:
        self.unseen: set[int] = set()
        self._reported = reported
        self._errors: list[tuple[int, ErrorFactory]] = []
        self._pid = os.getpid()
        _instances.add(self)

    def __bool__(self) -> bool:
        """Whether the round has failed."""
        return bool(self._errors)

    @property
    def round(self) -> object:
        """The same object as long as the round's errors have not been taken; None where there are none."""
        return self._errors[0] if self._errors else None

    def add(self, work: int, make: ErrorFactory) -> None:
        """One more; of the first FAILURES_TOLD of a round the error is kept."""
        self.unseen.add(work)
        if len(self._errors) < limits.FAILURES_TOLD:
            self._errors.append((work, make))

    def mark_seen(self, work: int) -> None:
        """The program has the error of this one. From any thread."""
        self.unseen.discard(work)

    def take(self) -> tuple[ErrorFactory, list[ErrorFactory]]:
        """The error to raise, which is the first that the program has not seen, and all of them: it sees them now. There has to be one."""
        kept, self._errors = self._errors, []
        first = next((make for work, make in kept if work in self.unseen), kept[0][1])
        self.unseen = set()
        return first, [make for _, make in kept]

    def report(self) -> None:
        """Log what the program has not seen, once."""
        unseen, self.unseen = self.unseen, set()
        if not unseen or not self._reported or self._pid != os.getpid():
            return
        error = next((make() for work, make in self._errors if work in unseen), None)
        log.error(
            "the program has not looked at %d error%s of scheduled functions: call join() before the end, or get() of each "
            "value. The first: %s",
            *(len(unseen), "s" if len(unseen) > 1 else "", f"{type(error).__name__}: {error}"),
        )


_instances: WeakSet[Failures] = WeakSet()


@atexit.register
def _report_all() -> None:
    """Of coordinators that were not closed."""
    for failures in list(_instances):
        failures.report()
