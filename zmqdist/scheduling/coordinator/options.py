"""The options of a work item, checked: those that its Submit message has, and those of its retries
and time-out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any, Final, NamedTuple

from zmqdist.clock import deadline, seconds
from zmqdist.scheduling.shared.quantities import Quantities, quantities

NUM_RETURNS_MAX: Final = 1000
"""The largest number of parts of a result, because each part has a frame of the message of a large
result (limits.FRAMES_MAX)."""


class WorkOptions(NamedTuple):
    """The options of a work item, in the order of the last fields of `messages.Submit`. A work item
    without options is *plain*.

    Detached work belongs to no round: it takes no room in the queue, its error fails no round, and
    the end of a round does not cancel it.
    """

    worker: str = ""
    priority: int = 0
    detached: bool = False
    resources: Quantities = ()

    @classmethod
    def checked(
        cls, worker: int | str | None, priority: int, resources: Mapping[str, float] | None = None
    ) -> WorkOptions:
        """Return the checked options, or PLAIN for the defaults. Raises ValueError if an option is
        invalid, TypeError if its type is.
        """
        if not -(2**31) <= whole("priority", priority) < 2**31:
            raise ValueError(
                f"priority is {priority}, wants a whole number from -2**31 to 2**31 - 1"
            )
        if worker is None and not priority and not resources:
            return PLAIN
        needed = quantities(resources or {})
        return cls("" if worker is None else worker_name(worker), index(priority), resources=needed)


PLAIN: Final = WorkOptions()


def whole(name: str, value: Any) -> int:
    """Return a whole number of any kind as an int. Raises TypeError with the `name` of the option
    for anything else, also for True and False.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r:.100}, wants a whole number") from None


def worker_name(worker: int | str) -> str:
    """Return a worker's name, such as "worker:1". Raises ValueError if `worker` is neither an index
    nor the name of a worker.
    """
    name = worker if isinstance(worker, str) else f"worker:{whole('worker', worker)}"
    if (
        re.fullmatch(
            "(?!(ps|chief|evaluator|dispatcher):)[A-Za-z_][A-Za-z0-9_.-]*:(0|[1-9][0-9]{0,8})", name
        )
        is None
    ):
        raise ValueError(
            f'worker is {worker!r}, wants the index of a worker or its name, as "worker:1"'
        )
    return name


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options that only this process knows. `timeout` is in seconds; `until` is a time by the
    clock of time.monotonic. `num_returns` is the number of parts of the result; 0 if the result is
    one value."""

    retries: int = 0
    timeout: float | None = None
    until: float | None = None
    lineage: bool = False
    num_returns: int = 0

    @classmethod
    def checked(
        cls, retries: int, timeout: float | None, lineage: bool, num_returns: int | None = None
    ) -> PlanOptions:
        """Return the checked options, or NO_OPTIONS for the defaults.

        Raises ValueError if an option is out of range, TypeError if `retries` is not a whole
        number.
        """
        if whole("retries", retries) < 0:
            raise ValueError(f"retries is {retries}, wants 0 or more")
        if (limit_s := seconds(timeout)) == 0:
            raise ValueError(f"timeout is {timeout}, wants more than 0 s, or None")
        parts = 0 if num_returns is None else whole("num_returns", num_returns)
        if num_returns is not None and not 1 <= parts <= NUM_RETURNS_MAX:
            raise ValueError(f"num_returns is {num_returns}, wants 1 to {NUM_RETURNS_MAX}, or None")
        options = cls(retries, limit_s, deadline(limit_s), lineage, parts)
        return NO_OPTIONS if options == NO_OPTIONS else options


NO_OPTIONS = PlanOptions()
