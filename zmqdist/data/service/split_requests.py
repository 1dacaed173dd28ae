"""The requests of a task to the dispatcher, for positions, for portions, and for the definition of
the task's pipeline.

Each request blocks, and is repeated while the dispatcher is away. A repeated request has the same
number as before, so that the dispatcher does not give out other positions for it.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import MutableSequence
from math import inf
from typing import Any, Final

from zmqdist import clock as time
from zmqdist import limits
from zmqdist.data.service.retry import FIRST_PAUSE_S, PATIENT, PAUSE_GROWS, RETRIABLE
from zmqdist.data.service.worker.tasks_machine import POSITION, SOURCE
from zmqdist.errors import CancelledError, NotFoundError, OpError, UnavailableError
from zmqdist.random import chance
from zmqdist.rpc import internal_client
from zmqdist.rpc.client import ZmqClient

log = logging.getLogger("zmqdist.data.service")

PAUSE_S_MAX: Final = 10.0

RUN_MAX: Final = 4096
QUICK_S: Final = 0.02
"""Seconds. If a run of positions is used up in less time, the next run is twice as long, up to
RUN_MAX; otherwise it is half as long."""


def call_until_answered(
    client: ZmqClient,
    method: str,
    *args: Any,
    purpose: str,
    stop_event: threading.Event,
    timeout_s: float = inf,
    due: float = inf,
    again: frozenset[int] = RETRIABLE,
) -> Any:
    """Call a method of the dispatcher until it replies with success or a permanent error.

    Blocks. Every WAIT_LOG_S it logs why the call is repeated.

    Args:
      method: the part of the method's name after "zmqdist.data.".
      timeout_s: seconds for which a failed call is repeated; `inf` means for ever.
      due: the deadline of each call, on the clock of `time.monotonic`.
      stop_event: an event that ends the wait with CancelledError when it is set.
      purpose: a phrase that names the call in the log and in error texts.
      again: the codes after which the call is repeated.

    Raises:
      OpError: the error of the last call.
    """
    began = said_at = time.monotonic()
    until = began + timeout_s
    pause_s = FIRST_PAUSE_S
    while True:
        if stop_event.is_set():
            raise CancelledError(f"{purpose} was stopped")
        try:
            return internal_client.start(
                client, f"zmqdist.data.{method}", *args, due=due
            ).get_value()
        except OpError as error:
            left_s = until - time.monotonic()
            # the dispatcher would give the same reply again; a stop may have closed the client
            if (error.error_code not in again or left_s <= 0) and not stop_event.is_set():
                raise
            if (now := time.monotonic()) - said_at >= limits.WAIT_LOG_S:
                said_at = now
                log.warning(
                    "%s has failed for %.0f s; zmqdist tries again: %s",
                    purpose,
                    now - began,
                    error.message,
                )
        stop_event.wait(min(pause_s * chance.uniform(0.6, 1.0), left_s))
        pause_s = min(PAUSE_S_MAX, pause_s * PAUSE_GROWS)


class PositionsUnavailable(UnavailableError):
    """The task got no positions, because the dispatcher did not reply or refused the request. This
    is not an error of the pipeline, so readers repeat their requests after it, until they learn
    from the dispatcher whether the task continues.
    """


class WorkerDrained(CancelledError):
    """The worker is leaving and takes no more positions. This error ends a pipeline that would
    otherwise repeat its sources for ever."""


class SplitClient:
    """Requests positions, portions and the definition of the pipeline for one task. Any thread of
    the pipeline may call `ask`.

    Attributes:
      stop_event: an event that is set when the task has ended. It ends pending requests with
        CancelledError.
    """

    def __init__(
        self,
        client: ZmqClient,
        state: int,
        task: int,
        incarnation: int,
        timeout_s: float,
        progress: MutableSequence[int],
    ) -> None:
        self._progress = progress
        self._client = client
        self._task = (state, task, incarnation)
        self._timeout_s = timeout_s
        self.stop_event = threading.Event()
        self._lock = threading.Lock()
        self._runs: dict[int, _Run] = {}
        self._drained = False

    def ask(self, source: int, repetition: int) -> int | None:
        """Return the next position of a source, or None at the end of this repetition. Blocks while
        a request is pending.

        Raises:
          PositionsUnavailable: the dispatcher refuses the request, or does not reply in time.
          WorkerDrained: the worker is leaving, so the current repetition has ended early, and the
            pipeline asks for positions of the next repetition.
        """
        with self._lock:
            run = self._runs.setdefault(source, _Run())
            if run.repetition != repetition:
                run.repetition, run.next, run.stop = repetition, 0, 0
            if self._drained:
                # End the current repetition. If the pipeline then begins another repetition, raise,
                # because it may repeat its source without end.
                if repetition > run.drained_in >= 0:
                    raise WorkerDrained("the worker takes no more positions")
                run.drained_in = repetition
                return None
            if run.next == run.stop:
                now = time.monotonic()
                run.size = (
                    min(RUN_MAX, run.size * 2)
                    if now - run.requested_at < QUICK_S
                    else max(1, run.size // 2)
                )
                run.requested_at = now
                start, length = self._more(source, repetition, run.size)
                run.next, run.stop = start, start + length
                if not length:
                    return None
            position = run.next
            run.next = position + 1
            self._progress[SOURCE], self._progress[POSITION] = source + 1, position
            return position

    def _more(self, source: int, repetition: int, count: int) -> tuple[int, int]:
        try:
            start, length = self._call(
                "splits", *self._task, source, secrets.randbits(62), repetition, count
            )
        except (
            NotFoundError,
            UnavailableError,
        ) as error:  # the dispatcher is away, the task has ended, or another worker has the task
            raise PositionsUnavailable(error.message) from error
        return int(start), int(length)

    def drain(self) -> None:
        """Give the pipeline no more positions, and return unused positions to the dispatcher.
        Blocks until the dispatcher has confirmed the returned positions.

        Raises:
          OpError: the dispatcher has refused the positions.
        """
        with self._lock:
            self._drained = True
            for source, run in self._runs.items():
                run.drained_in = -1
                if run.next < run.stop:
                    request, runs = secrets.randbits(62), ((run.next, run.stop - run.next),)
                    self._call("hand_back", *self._task, source, request, run.repetition, runs)
                    run.next = run.stop

    def portions(self, client: int, count: int) -> list[tuple[int, int, int, int, int]]:
        """Return the next portions for a reader. Blocks until the dispatcher has a portion. Return
        an empty list if no more portions will come, if the dispatcher no longer knows the reader or
        the task, or after `close`.
        """
        try:
            return [
                tuple(portion)
                for portion in self._call(
                    "portions", *self._task, client, secrets.randbits(62), count
                )
            ]
        except (NotFoundError, CancelledError):
            return []

    def definition(self, fingerprint: str) -> Any:
        """Return the description of the pipeline with this fingerprint. Blocks until the dispatcher
        has replied."""
        return self._call("definition", fingerprint, again=RETRIABLE)

    def _call(self, method: str, *args: Any, again: frozenset[int] = PATIENT) -> Any:
        return call_until_answered(
            self._client,
            method,
            *args,
            purpose=f"task {self._task[1]}",
            stop_event=self.stop_event,
            timeout_s=self._timeout_s,
            again=again,
        )

    def close(self) -> None:
        """End the pending requests of the task with CancelledError, because the task has ended."""
        self.stop_event.set()


class _Run:
    """The positions of one source that the task has received and not used, from `next` to `stop` -
    1. `size` is the number of positions in the last request. `drained_in` is the repetition that
    has ended early because the worker leaves; -1 if there is none.
    """

    def __init__(self) -> None:
        self.repetition = -1
        self.next = self.stop = 0
        self.size = 1
        self.requested_at = -inf
        self.drained_in = -1
