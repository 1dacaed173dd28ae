"""Connections to the dispatcher of a data service in virtual time, and the questions on them. See data_service.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from zmqdist.messages import Message

Then: TypeAlias = Callable[[Any, int], None]
"""Gets an answer and 0, or None and a code."""


@dataclass(eq=False)
class SimRequest:
    """A question that is with the dispatcher, or on its way."""

    link: SimLink
    then: Then
    ended: bool = False

    def end(self, value: Any, code: int) -> None:
        if not self.ended:
            self.ended = True
            self.then(value, code)


@dataclass(eq=False)
class SimLink:
    """A connection to one life of the dispatcher."""

    incarnation: int
    open: bool = True
    pending: list[SimRequest] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)
    """When what was sent last in a direction arrives: order holds within a connection."""
    receive: Callable[[Message], None] = lambda message: None
    closed: Callable[[], None] = lambda: None
    """Called when this side notices that the connection has ended."""
