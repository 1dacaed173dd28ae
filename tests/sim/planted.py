"""Bugs that are planted at the border of a machine, where its events enter and its effects leave.

Each is a fault of an event, an effect or a transition: one is dropped, doubled, delayed, altered or
added. So the inside of a machine may change without its planted bugs.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from zmqdist.events import Heard

Plant = Callable[[pytest.MonkeyPatch], None]


def expect_report(
    complain: Callable[[int], str | None], seeds_max: int, bug: str, promise: str | tuple[str, ...]
) -> None:
    """Check that one of the seeds reports the planted bug, and by this promise.

    Args:
      complain: returns the report of the simulation for a seed, or None if it finds nothing.
      promise: the start of the report, or its possible starts.
    """
    reports = (complain(seed) for seed in range(seeds_max))
    report = next((report for report in reports if report is not None), None)
    assert report is not None, f"{seeds_max} seeds did not find that {bug}"
    assert report.startswith(promise), f"the simulation reports another promise: {report[:200]}"


def around(owner: Any, name: str, method: Callable[..., Any]) -> Plant:
    """Replace a public method by `method`, which gets the former one as its first argument."""
    assert not name.startswith("_") or name == "__init__", f"{name} is private"

    def plant(patch: pytest.MonkeyPatch) -> None:
        former = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **kwargs: method(former, *args, **kwargs))

    return plant


def events(machine: type, alter: Callable[[Any, Any], Any]) -> Plant:
    """The machine gets `alter(machine, event)` in place of an event, or nothing if that is None."""

    def handle(former: Any, self: Any, event: Any, now: float) -> Any:
        altered = alter(self, event)
        return [] if altered is None else former(self, altered, now)

    return around(machine, "handle", handle)


def effects(machine: type, alter: Callable[[Any, Any, list[Any]], list[Any]]) -> Plant:
    """`alter(machine, event, effects)` takes the place of the effects of an event."""

    def handle(former: Any, self: Any, event: Any, now: float) -> Any:
        return alter(self, event, former(self, event, now))

    return around(machine, "handle", handle)


def without(
    machine: type, dropped: type | tuple[type, ...], cause: type | tuple[type, ...] = object
) -> Plant:
    """Effects of this kind are dropped if an event of the kind `cause` had them."""
    return effects(
        machine,
        lambda self, event, answer: (
            [effect for effect in answer if not isinstance(effect, dropped)]
            if isinstance(event, cause)
            else answer
        ),
    )


def unheard(machine: type, kind: type) -> Plant:
    """Events of this kind are dropped."""
    return events(machine, lambda self, event: None if isinstance(event, kind) else event)


def no_arrow(table: Mapping[Any, frozenset[Any]], before: enum.Enum, *after: enum.Enum) -> Plant:
    """The table of transitions lacks these arrows."""
    return lambda patch: patch.setitem(
        table,  # type: ignore[arg-type]
        before,
        table[before] - {*after},
    )


def heard(machine: type, kind: type, alter: Callable[[Any], Any]) -> Plant:
    """The machine gets `alter(message)` in place of a message of this kind, or nothing if that is
    None."""

    def altered(_: Any, event: Any) -> Any:
        if not isinstance(event, Heard) or not isinstance(event.message, kind):
            return event
        message = alter(event.message)
        return None if message is None else Heard(event.peer, message)

    return events(machine, altered)


def redirected(record: type, arrows: Mapping[Any, enum.Enum | None]) -> Plant:
    """The transitions to a state lead to another state; None means that the state stays."""

    def enter(former: Any, self: Any, state: Any) -> None:
        if state not in arrows:
            former(self, state)
        elif (target := arrows[state]) is not None:
            self.state = target

    return around(record, "enter", enter)
