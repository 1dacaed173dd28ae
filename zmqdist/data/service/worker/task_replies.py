"""The replies that the machines of tasks return."""

from __future__ import annotations

from typing import Any, NamedTuple


class TaskReply(NamedTuple):
    """The reply to one request of a reader.

    Attributes:
      reply: the handle of the request, as in element_replies.py.
      kind: SOME, END, SKIP or FAILED (reader/delivery.py).
      value: the elements in order (SOME), or the error (FAILED): an element could not be computed,
        the task cannot continue, or the request was wrong.
      tag: rounds_machine.py and portions_machine.py define it for their kinds of tasks.
    """

    reply: Any
    kind: int
    value: Any = None
    tag: Any = None
