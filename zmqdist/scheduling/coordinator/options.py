"""The options of a work item, checked: those that its Submit message has, and those of its retries
and time-out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any, Final, NamedTuple

from zmqdist.clock import deadline, duration, number, seconds
from zmqdist.scheduling.shared.quantities import Quantities, quantities

NUM_RETURNS_MAX: Final = 1000
"""The largest number of parts of a result, because each part has a frame of the message of a large
result (limits.FRAMES_MAX)."""


DOUBLINGS_MAX: Final = 64
"""From this retry on the planned wait does not double any more, so that it stays a finite number."""


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
class Retries:
    """How often, when and after which errors a function runs again, for the option `retries`.

    >>> patient = zd.Retries(5, backoff_s=0.01, retry_if=(OSError, TimeoutError))
    >>> coordinator.options(retries=patient).submit(abs, -3).result()
    3

    Args:
      times: how often the function runs again at most.
      backoff_s: seconds before the first retry. The wait doubles with each further retry.
      backoff_max_s: the longest wait in seconds, before the jitter.
      jitter: the share by which a random number makes each wait shorter or longer: with 0.2 it
        lasts 0.8 to 1.2 times as long, so that functions that failed together do not return
        together.
      retry_if: a class of exceptions, a tuple of such classes, or a function that gets the exception
        and returns whether to run again. It is called in a thread of the program, for one error
        after the other, and may wait. If it raises, the function has failed. None means any error.

    The function waits in the program and takes no slot. Its `timeout` goes on, and `cancel` and the
    end of the round end the wait.

    Raises:
      TypeError, ValueError: an argument is of a wrong type, or out of range.
    """

    times: int
    backoff_s: float = 1.0
    backoff_max_s: float = 60.0
    jitter: float = 0.2
    retry_if: type[BaseException] | tuple[type[BaseException], ...] | Callable[..., Any] | None = (
        None
    )

    def __post_init__(self) -> None:
        if whole("times", self.times) < 0:
            raise ValueError(f"times is {self.times}, wants 0 or more")
        for name in ("backoff_s", "backoff_max_s"):
            object.__setattr__(self, name, duration(name, getattr(self, name)))
        if not 0 <= number(self.jitter) <= 1:
            raise ValueError(f"jitter is {self.jitter!r}, wants 0 to 1")
        of_classes = self.retry_if if isinstance(self.retry_if, tuple) else ()
        if not all(isinstance(cls, type) and issubclass(cls, BaseException) for cls in of_classes):
            raise TypeError(f"retry_if is {self.retry_if!r:.100}, wants classes of exceptions")
        if not (of_classes or self.retry_if is None or callable(self.retry_if)):
            raise TypeError(f"retry_if is {self.retry_if!r:.100}, wants classes, or a function")

    def accepts(self, error: BaseException) -> bool:
        """Return whether to run the function again after this error. Raises what `retry_if`
        raises.

        >>> zd.Retries(3, retry_if=OSError).accepts(ValueError())
        False
        """
        if self.retry_if is None:
            return True
        if isinstance(self.retry_if, (type, tuple)):
            return isinstance(error, self.retry_if)
        return bool(self.retry_if(error))

    def delay_s(self, retry: int, draw: float) -> float:
        """Return the seconds before a retry. `retry` counts from 1; `draw` is from 0 to 1.

        >>> zd.Retries(3, backoff_s=1.0).delay_s(2, 0.5)
        2.0
        """
        planned = self.backoff_s * 2.0 ** min(retry - 1, DOUBLINGS_MAX)
        return float(min(planned, self.backoff_max_s) * (1 + self.jitter * (2 * draw - 1)))


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options that only this process knows.

    Attributes:
      policy: when and after which errors the function runs again; None: at once, after any error.
      timeout: seconds.
      until: a time by the clock of time.monotonic.
      num_returns: the number of parts of the result; 0 if the result is one value.
    """

    retries: int = 0
    policy: Retries | None = None
    timeout: float | None = None
    until: float | None = None
    lineage: bool = False
    num_returns: int = 0

    @classmethod
    def checked(
        cls,
        retries: int | Retries,
        timeout: float | None,
        lineage: bool,
        num_returns: int | None = None,
    ) -> PlanOptions:
        """Return the checked options, or NO_OPTIONS for the defaults.

        Raises ValueError if an option is out of range, TypeError if `retries` is not a whole
        number.
        """
        policy = retries if isinstance(retries, Retries) else None
        retries = retries.times if isinstance(retries, Retries) else retries
        if whole("retries", retries) < 0:
            raise ValueError(f"retries is {retries}, wants 0 or more")
        if (limit_s := seconds(timeout)) == 0:
            raise ValueError(f"timeout is {timeout}, wants more than 0 s, or None")
        parts = 0 if num_returns is None else whole("num_returns", num_returns)
        if num_returns is not None and not 1 <= parts <= NUM_RETURNS_MAX:
            raise ValueError(f"num_returns is {num_returns}, wants 1 to {NUM_RETURNS_MAX}, or None")
        options = cls(retries, policy, limit_s, deadline(limit_s), lineage, parts)
        return NO_OPTIONS if options == NO_OPTIONS else options


NO_OPTIONS = PlanOptions()
