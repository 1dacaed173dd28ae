"""Functions run while links lose, double and swap whole messages between coordinator, dispatcher
and workers."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import zmqdist as zd
from tests.campaigns.proxy import Frames, Harm, Pair, Proxy
from tests.scheduling.work import until
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.scheduling.shared.config import DispatcherConfig, WorkerConfig

TASKS = 400
ROUNDS = 3
HARM_EACH = 12
"""One message in this many is harmed, on average."""
PATIENCE_S = 60.0
LARGE_BYTES = 200_000
LATE_S = 0.1
REFUSALS: Final = (errors.FailedPreconditionError, errors.CancelledError)

started: Counter[int] = Counter()
_counting = threading.Lock()


def works(number: int) -> Any:
    """Count a start of the function. Return a large result every tenth time, which the coordinator
    fetches from the worker."""
    with _counting:
        started[number] += 1
    return bytes([number % 251]) * LARGE_BYTES if number % 10 == 0 else number * number


def right(number: int) -> Any:
    return bytes([number % 251]) * LARGE_BYTES if number % 10 == 0 else number * number


def ended_well(value: zd.RemoteValue, number: int, kind: str) -> bool:
    """Return whether a value has its result. If messages of a connection were swapped, the
    dispatcher may refuse a round with an error."""
    try:
        assert value.get(PATIENCE_S) == right(number), f"task {number}"
    except REFUSALS:
        assert kind == "swapped", f"task {number} was refused"
        return False
    return True


class Harmful:
    """Harms one message in `HARM_EACH`, in the way of its kind."""

    def __init__(self, rng: random.Random, kind: str) -> None:
        self.count = 0
        self._rng, self._kind = rng, kind

    def __call__(self, pair: Pair, way: str, frames: Frames) -> list[Frames]:
        if self._rng.randrange(HARM_EACH):
            return [frames]
        self.count += 1
        if self._kind == "doubled":
            return [frames, frames]
        if self._kind == "swapped":
            pair.send_later(way, frames, self._rng.uniform(0.0, LATE_S))
            return []
        pair.drop_connection()  # TCP loses a message only together with its connection
        return []


def harmed(seed: int, kind: str) -> dict[str, Any]:
    """Run rounds of functions over links that harm messages, and one over mended links.

    Returns:
      Figures.

    Raises:
      AssertionError: a task was lost, has a wrong result, or was returned twice.
    """
    rng = random.Random(seed)
    started.clear()
    faults, refused, longest = 0, 0, 0.0
    with ExitStack() as stack:
        dispatcher = stack.enter_context(
            zd.DispatchServer(DispatcherConfig(reconnect_grace_s=1.0, lease_s=4.0))
        )
        links = [stack.enter_context(Proxy(dispatcher.address)) for _ in range(3)]
        for link in links[1:]:
            stack.enter_context(zd.WorkerServer(WorkerConfig(link.address)))
        coordinator = stack.enter_context(ClusterCoordinator(links[0].address))
        for _ in range(ROUNDS):
            harms = [Harmful(rng, kind) for _ in links]
            for link, harm in zip(links, harms, strict=True):
                link.harm(harm)
            settled: Counter[int] = Counter()
            values = [coordinator.schedule(works, (number,)) for number in range(TASKS)]
            for number, value in enumerate(values):
                value.add_done_callback(
                    lambda _, number=number, settled=settled: settled.update([number])
                )
            mender = threading.Timer(
                rng.uniform(0.5, 3.0), lambda: [link.harm(None) for link in links]
            )
            mender.start()
            mender.join()
            mended = time.monotonic()
            ended = [ended_well(value, number, kind) for number, value in enumerate(values)]
            refused += not all(ended)
            longest = max(longest, time.monotonic() - mended)
            with contextlib.suppress(*REFUSALS if kind == "swapped" else ()):
                coordinator.join(PATIENCE_S)
            until(lambda settled=settled: len(settled) == TASKS, "each value calls back")  # type: ignore[misc]
            assert set(settled.values()) == {1}, "a result was given twice"
            faults += sum(harm.count for harm in harms)
        again = max(0, sum(started.values()) - ROUNDS * TASKS)
    return {
        "faults": faults,
        "tasks": ROUNDS * TASKS,
        "lost": 0,
        "run again": again,
        "rounds refused": refused,
        "recovery_s": longest,
    }


def campaign_of(kind: str) -> Callable[[int], dict[str, Any]]:
    return lambda seed: harmed(seed, kind)


__all__ = ["Harm", "harmed", "campaign_of"]
