"""The effects of the machine, which wait until the changes on which they depend are in the journal.

Theory
    The machine applies the changes of an event to its state at once, but returns no effect of the
    event until these changes are durable. The runtime writes one group of records at a time. The
    changes that are made meanwhile form the next group, so that a slow disk leads to larger groups
    and not to more of them. While a group is being written, an effect waits even if its event
    changed nothing, because the effect may show changes of the group.

    When the journal fails, every waiting reply becomes an error, and the runtime loads the state
    from the journal again. A caller that waits for news gets the error UNAVAILABLE and sends its
    request again, because the changes that the request caused may be lost.

Without a journal no effect waits.
"""

from __future__ import annotations

from zmqdist import errors
from zmqdist.data.service.dispatcher.machine import events as ev


class GroupCommit:
    """The records and effects that wait for the journal. The docstring of the module gives the
    rules."""

    def __init__(self, journaled: bool) -> None:
        self._journaled = journaled
        self._records: list[bytes] = []
        self._effects: list[ev.Effect] = []
        self._held: list[ev.Effect] = []
        """Effects to return when the group that is being written is durable."""
        self._next: list[ev.Effect] = []
        """Effects to return when the next group, whose writing has not begun, is durable."""
        self._committing = False

    def record(self, record: bytes) -> None:
        """Add the record of a change that the current event made."""
        if self._journaled:
            self._records.append(record)

    def effect(self, effect: ev.Effect) -> None:
        """Add an effect of the current event."""
        self._effects.append(effect)

    def flush(self) -> list[ev.Effect]:
        """End the current event. Return its effects if they need not wait for the journal.
        Otherwise return a CommitJournal, or no effect while an earlier group is being written.
        """
        effects, self._effects = self._effects, []
        if self._committing:
            self._next += effects
            return []
        if self._records:
            self._held = effects
            return [self._group()]
        return effects

    def committed(self) -> list[ev.Effect]:
        """Record that the group that was being written is durable. Return the effects that no
        longer have to wait, and a CommitJournal if there is a next group.
        """
        ready, self._held, self._next = self._held, self._next, []
        self._committing = False
        if self._records:
            return [*ready, self._group()]
        ready += self._held
        self._held = []
        return ready

    def failed(self, code: int, message: str) -> list[ev.Effect]:
        """Record that the group could not be written. Return the effects that reload the state and
        fail every waiting request."""
        waiting = self._held + self._next
        self._held, self._next, self._records = [], [], []
        self._committing = False
        refused: list[ev.Effect] = []
        for each in waiting:
            if isinstance(each, ev.ReplyToRequest) and each.news:
                refused.append(
                    ev.FailRequest(
                        each.token, errors.UNAVAILABLE, f"send the request again: {message}"
                    )
                )
            elif isinstance(each, ev.ReplyToRequest | ev.FailRequest):
                refused.append(ev.FailRequest(each.token, code, message))
        return [ev.Reload(), *refused]

    def _group(self) -> ev.CommitJournal:
        records, self._records = tuple(self._records), []
        self._committing = True
        return ev.CommitJournal(records)
