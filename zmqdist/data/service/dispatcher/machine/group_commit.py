"""Effects that wait for the journal.

Theory
    What an event changes is applied at once, but nothing leaves before it is durable. One group of records is on its way at a time; the
    changes of the meantime make the next group, so that a slow disk makes groups larger and not the queue longer. An effect of an event
    that changed nothing waits, too, while a group is on its way: it may tell of it.

    When the journal fails, all that waited is refused and the state is read back from the journal. Who has a question outstanding asks it
    again: what it said with it may be among what was lost.

Without a journal nothing waits.
"""

from __future__ import annotations

from zmqdist import errors
from zmqdist.data.service.dispatcher.machine import events as ev


class GroupCommit:
    """See the module's docstring."""

    def __init__(self, journaled: bool) -> None:
        self._journaled = journaled
        self._records: list[bytes] = []
        self._effects: list[ev.Effect] = []
        self._held: list[ev.Effect] = []
        """Behind the group that is on its way."""
        self._next: list[ev.Effect] = []
        """Behind the one after it."""
        self._committing = False

    def record(self, record: bytes) -> None:
        """A change of the present event."""
        if self._journaled:
            self._records.append(record)

    def effect(self, effect: ev.Effect) -> None:
        """An effect of the present event."""
        self._effects.append(effect)

    def flush(self) -> list[ev.Effect]:
        """The event is over: what can be done about it now."""
        effects, self._effects = self._effects, []
        if self._committing:
            self._next += effects
            return []
        if self._records:
            self._held = effects
            return [self._group()]
        return effects

    def committed(self) -> list[ev.Effect]:
        """The group is durable."""
        ready, self._held, self._next = self._held, self._next, []
        self._committing = False
        if self._records:
            return [*ready, self._group()]
        ready += self._held
        self._held = []
        return ready

    def failed(self, code: int, message: str) -> list[ev.Effect]:
        """It is not, and nothing after it."""
        waiting = self._held + self._next
        self._held, self._next, self._records = [], [], []
        self._committing = False
        refused: list[ev.Effect] = []
        for each in waiting:
            if isinstance(each, ev.ReplyToRequest) and each.news:
                refused.append(ev.FailRequest(each.token, errors.UNAVAILABLE, f"to be asked again: {message}"))
            elif isinstance(each, ev.ReplyToRequest | ev.FailRequest):
                refused.append(ev.FailRequest(each.token, code, message))
        return [ev.Reload(), *refused]

    def _group(self) -> ev.CommitJournal:
        records, self._records = tuple(self._records), []
        self._committing = True
        return ev.CommitJournal(records)
