"""The names of a program's work, for drain reports (scheduling/dispatcher/drain_report.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

from zmqdist.limits import DESCRIBED_WORKS_MAX
from zmqdist.messages import DescribeWork, WorkDescribed

if TYPE_CHECKING:
    from zmqdist.scheduling.coordinator.machine import CoordinatorMachine


class NamedKept(Protocol):
    """The attributes of a Kept (remote_value.py) that WorkNames reads."""

    name: str
    lineage: bool


class NamedValue(Protocol):
    """The attributes of a RemoteValue that WorkNames reads."""

    name: str
    work: int


class NamedWork(Protocol):
    """The attributes of the coordinator's runtime (runtime.py) that WorkNames reads."""

    machine: CoordinatorMachine

    @property
    def values(self) -> Mapping[int, Callable[[], NamedValue | None]]: ...


class WorkNames:
    """The names of one coordinator's work and resources.

    Attributes:
      kept: the values that workers keep, by the number of the work item or attempt.
      of_resources: returns the names of the per-worker resources.
    """

    def __init__(self, owner: NamedWork) -> None:
        self.kept: WeakValueDictionary[int, NamedKept] = WeakValueDictionary()
        self.of_resources: Callable[[], list[str]] = list
        self._owner = owner

    def described(self, question: DescribeWork) -> WorkDescribed:
        """Return the reply to a DescribeWork, with names such as "sum-12": function and work
        number. The loop's thread calls this."""
        works: list[tuple[int, str, bool]] = []
        for number in question.works[:DESCRIBED_WORKS_MAX]:
            kept, reference = (
                self.kept.get(number),
                self._owner.values.get(self._owner.machine.user_of(number)),
            )
            value = None if reference is None else reference()
            if kept is not None:
                works.append((number, kept.name, kept.lineage))
            elif value is not None:
                works.append((number, label(value.name, value.work), False))
        return WorkDescribed(question.request, works, self.of_resources())


def label(name: str, work: int) -> str:
    """Return a short name for reports, such as "sum-12": the function's name without its module, or
    the `name` of its options, and the number of the work item.
    """
    parts = name.split(".")
    dotted = all(part.isidentifier() or part[:1] == "<" for part in parts)
    return f"{parts[-1] if dotted else name}-{work}"
