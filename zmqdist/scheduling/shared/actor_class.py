"""The methods of an actor's class, and the actor whose process this is."""

from __future__ import annotations

import enum
import inspect

from zmqdist.messages import ActorSpec

own: ActorSpec | None = None
"""The actor whose process this is; None in any other process."""


class MethodKind(enum.IntEnum):
    """How a method of an actor runs."""

    PLAIN = enum.auto()
    """Calls run one after the other, in the main thread."""
    ASYNC = enum.auto()
    """Calls run concurrently, in an event loop."""
    STREAM = enum.auto()
    """A generator: its values arrive as they are made."""


def method_kinds(cls: type) -> dict[str, int]:
    """Return the kinds of the public methods of a class, by name."""
    kinds: dict[str, int] = {}
    for name, method in inspect.getmembers(cls, callable):
        if name.startswith("_"):
            continue
        if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
            kinds[name] = MethodKind.STREAM
        elif inspect.iscoroutinefunction(method):
            kinds[name] = MethodKind.ASYNC
        else:
            kinds[name] = MethodKind.PLAIN
    return kinds


def is_async(cls: type) -> bool:
    """Return whether a class has `async` methods, so that all its calls run in an event loop."""
    return any(
        inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
        for name, method in inspect.getmembers(cls, callable)
        if not name.startswith("_")
    )
