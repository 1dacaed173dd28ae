"""Simulated connections to the dispatcher of a data service, and the pending requests on them. See
data_service.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from zmqdist.messages import Message

Then: TypeAlias = Callable[[Any, int], None]
"""`then(value, code)` gets the reply: a value and 0, or None and an error code."""


@dataclass(eq=False)
class SimRequest:
    """A pending request, which the dispatcher has or which is in flight to it."""

    link: SimLink
    then: Then
    ended: bool = False

    def end(self, value: Any, code: int) -> None:
        if not self.ended:
            self.ended = True
            self.then(value, code)


@dataclass(eq=False)
class SimLink:
    """A connection to one incarnation of the dispatcher."""

    incarnation: int
    open: bool = True
    pending: list[SimRequest] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)
    """Direction -> the arrival time of the last message in this direction. No later message arrives
    before it."""
    receive: Callable[[Message], None] = lambda message: None
    closed: Callable[[], None] = lambda: None
    """Called when the client's side notices that the connection has ended."""
