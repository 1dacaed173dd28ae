"""Effects that wait until the changes on which they depend are in the journal.

Theory
    The machine applies the changes of an event at once, but no effect leaves before these changes are durable. One group of records is
    being written at a time. The changes made meanwhile form the next group, so that a slow disk makes groups larger and not more
    numerous. An effect of an event that changed nothing also waits while a group is being written, because it may show the group's
    changes.

    When the journal fails, every waiting reply becomes an error, and the state is read back from the journal. A caller with a pending
    request for news sends it again, because the facts that it reported may be among the lost changes.

Without a journal no effect waits.
"""

from __future__ import annotations

from zmqdist import errors
from zmqdist.data.service.dispatcher.machine import events as ev


class GroupCommit:
    """The records and effects that wait for the journal; the module's docstring gives the rules."""

    def __init__(self, journaled: bool) -> None:
        self._journaled = journaled
        self._records: list[bytes] = []
        self._effects: list[ev.Effect] = []
        self._held: list[ev.Effect] = []
        """Effects that leave when the group that is being written is durable."""
        self._next: list[ev.Effect] = []
        """Effects that leave when the group after the one that is being written is durable."""
        self._committing = False

    def record(self, record: bytes) -> None:
        """Add the record of a change that the current event made."""
        if self._journaled:
            self._records.append(record)

    def effect(self, effect: ev.Effect) -> None:
        """Add an effect of the current event."""
        self._effects.append(effect)

    def flush(self) -> list[ev.Effect]:
        """End the current event. Return the effects that can leave now."""
        effects, self._effects = self._effects, []
        if self._committing:
            self._next += effects
            return []
        if self._records:
            self._held = effects
            return [self._group()]
        return effects

    def committed(self) -> list[ev.Effect]:
        """Note that the group that was being written is durable. Return the effects that can leave now."""
        ready, self._held, self._next = self._held, self._next, []
        self._committing = False
        if self._records:
            return [*ready, self._group()]
        ready += self._held
        self._held = []
        return ready

    def failed(self, code: int, message: str) -> list[ev.Effect]:
        """Note that the group could not be written. Return the effects: a reload of the state, and an error for every waiting request."""
        waiting = self._held + self._next
        self._held, self._next, self._records = [], [], []
        self._committing = False
        refused: list[ev.Effect] = []
        for each in waiting:
            if isinstance(each, ev.ReplyToRequest) and each.news:
                refused.append(ev.FailRequest(each.token, errors.UNAVAILABLE, f"send the request again: {message}"))
            elif isinstance(each, ev.ReplyToRequest | ev.FailRequest):
                refused.append(ev.FailRequest(each.token, code, message))
        return [ev.Reload(), *refused]

    def _group(self) -> ev.CommitJournal:
        records, self._records = tuple(self._records), []
        self._committing = True
        return ev.CommitJournal(records)
