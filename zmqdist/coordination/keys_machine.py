"""A store of values by key, which tasks share. A request for a key that has no value may wait for a
value. No I/O.

Rules
    A key is a path: "dir/name". Slashes at its ends have no meaning, and several slashes in a row
    count as one slash. Deleting a key also deletes all keys below the key.
    The store owns its values, because the runtime passes copies. `nbytes` is the size of a value,
    which counts towards `bytes_max`.

Promises, checked by tests/coordination/test_machine.py
    P1  a key has the value that was set last; without `overwrite` the first value stays
    P2  each ticket gets one reply: the value at the time of the request, the next value, or an
        error at its deadline or the keeper's stop
    P3  no state of a ticket is kept after its reply, or after it was dropped
    P4  the store has at most `keys_max` keys and `bytes_max` bytes; a value that does not fit
        changes nothing

Not here: the content of values.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf
from typing import Any

from zmqdist.coordination.replies import Effect, Fail, ReplyValue, Ticket
from zmqdist.errors import (
    ALREADY_EXISTS,
    CANCELLED,
    DEADLINE_EXCEEDED,
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    NOT_FOUND,
    RESOURCE_EXHAUSTED,
)
from zmqdist.limits import KEY_CHARS_MAX, KEYS_BYTES_MAX, KEYS_MAX

_AFTER_SLASH = chr(ord("/") + 1)


def normal(key: str) -> str:
    """Return the key without meaningless slashes; "" if the key has only slashes."""
    return "/".join(part for part in key.split("/") if part)


class Keys:
    """The keys and the requests that wait for them; the module's docstring has the rules.

    *Invariant*: `_sorted` has the keys of `_values` in order, and no key of `_waiting` has a value.

    Attributes:
      deadline: the latest time for the next call of `ticked`; `inf` means never.
      nbytes: the size of all values and their keys, in bytes.
    """

    def __init__(self, keys_max: int = KEYS_MAX, bytes_max: int = KEYS_BYTES_MAX) -> None:
        self.deadline = inf
        self.nbytes = 0
        self._keys_max = keys_max
        self._bytes_max = bytes_max
        self._values: dict[str, tuple[Any, int]] = {}
        self._sorted: list[str] = []
        self._waiting: dict[str, dict[Ticket, float]] = {}
        self._by_ticket: dict[Ticket, str] = {}

    def __len__(self) -> int:
        return len(self._values)

    def put(
        self, ticket: Ticket, key: str, value: Any, nbytes: int, overwrite: bool = False
    ) -> list[Effect]:
        """Set the value of a key. If the key has a value and `overwrite` is False, fail with
        ALREADY_EXISTS."""
        path = normal(key)
        if not path:
            return [
                Fail(
                    ticket,
                    INVALID_ARGUMENT,
                    f"{key!r} is no key: wanted a name, or several with slashes between",
                )
            ]
        if path in self._values and not overwrite:  # the first value stays (P1)
            return [
                Fail(
                    ticket,
                    ALREADY_EXISTS,
                    f"key {path!r} has a value already; overwrite=True gives it another",
                )
            ]
        problem = self._full(path, nbytes)
        if problem:  # the value does not fit, and changes nothing (P4)
            return [Fail(ticket, RESOURCE_EXHAUSTED, problem)]
        return [*self._put(path, value, nbytes), ReplyValue(ticket)]

    def get(self, ticket: Ticket, key: str, due: float = inf) -> list[Effect]:
        """Reply with the value of a key. If the key has no value, reply when a value is set."""
        path = normal(key)
        if path in self._values:
            return [ReplyValue(ticket, self._values[path][0])]
        if not path:
            return [Fail(ticket, INVALID_ARGUMENT, f"{key!r} is no key")]
        self._waiting.setdefault(path, {})[ticket] = due
        self._by_ticket[ticket] = path
        self.deadline = min(self.deadline, due)
        return []

    def try_get(self, ticket: Ticket, key: str) -> list[Effect]:
        """Reply with the value of a key, or with NOT_FOUND if the key has no value."""
        path = normal(key)
        if path not in self._values:
            return [Fail(ticket, NOT_FOUND, f"there is no key {path!r}")]
        return [ReplyValue(ticket, self._values[path][0])]

    def below(self, ticket: Ticket, prefix: str) -> list[Effect]:
        """Reply with all values below a directory, by their complete keys. The prefix "" means the
        root."""
        return [
            ReplyValue(
                ticket, {path: self._values[path][0] for path in self._below(normal(prefix))}
            )
        ]

    def delete(self, ticket: Ticket, key: str) -> list[Effect]:
        """Remove a key and all keys below it. Reply with the number of removed keys."""
        path = normal(key)
        if not path:
            return [Fail(ticket, INVALID_ARGUMENT, f"{key!r} is no key")]
        removed = self._below(path)
        if removed:
            # the keys below a key are neighbours in the order
            start = bisect_left(self._sorted, removed[0])
            del self._sorted[start : start + len(removed)]
        if path in self._values:
            removed.append(path)
            del self._sorted[bisect_left(self._sorted, path)]
        for name in removed:
            self.nbytes -= self._values.pop(name)[1]
        return [ReplyValue(ticket, len(removed))]

    def increment(self, ticket: Ticket, key: str, by: int, nbytes: int) -> list[Effect]:
        """Add `by` to the whole number that is the value of a key, and reply with the sum. A key
        without a value counts as 0."""
        path = normal(key)
        before = self._values.get(path, (0, 0))[0]
        if type(before) is not int:
            return [
                Fail(
                    ticket,
                    FAILED_PRECONDITION,
                    f"key {path!r} has a value of type {type(before).__name__}, not a whole number "
                    f"to add to",
                )
            ]
        total = before + by
        return [
            ReplyValue(ticket, total) if effect == ReplyValue(ticket) else effect
            for effect in self.put(ticket, key, total, nbytes, overwrite=True)
        ]

    def dropped(self, ticket: Ticket) -> None:
        """Record that the caller with this ticket does not wait any more."""
        path = self._by_ticket.pop(ticket, None)
        if path is not None:
            del self._waiting[path][ticket]
            if not self._waiting[path]:
                del self._waiting[path]

    def ticked(self, now: float) -> list[Effect]:
        """Fail the requests whose deadline has come."""
        if now < self.deadline:
            return []
        late = [
            (ticket, path)
            for path, waiting in self._waiting.items()
            for ticket in waiting
            if waiting[ticket] <= now
        ]
        for ticket, _ in late:
            self.dropped(ticket)
        self.deadline = min(
            (due for waiting in self._waiting.values() for due in waiting.values()), default=inf
        )
        return [
            Fail(ticket, DEADLINE_EXCEEDED, f"no task set key {path!r} in time")
            for ticket, path in late
        ]

    def stopped(self, why: str) -> list[Effect]:
        """Fail all waiting requests with CANCELLED, because the keeper of these keys stops."""
        tickets = list(self._by_ticket)
        for ticket in tickets:
            self.dropped(ticket)
        return [Fail(ticket, CANCELLED, why) for ticket in tickets]

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._by_ticket)

    def _below(self, path: str) -> list[str]:
        if not path:
            return list(self._sorted)
        start = bisect_left(self._sorted, path + "/")
        return self._sorted[start : bisect_left(self._sorted, path + _AFTER_SLASH, start)]

    def _full(self, path: str, nbytes: int) -> str:
        if len(path) > KEY_CHARS_MAX:
            return f"a key of {len(path)} characters; at most {KEY_CHARS_MAX} are allowed"
        if path not in self._values and len(self._values) >= self._keys_max:
            return f"{self._keys_max} keys are held: delete some before setting {path!r}"
        after = self.nbytes - self._values.get(path, (None, 0))[1] + nbytes + len(path)
        if after > self._bytes_max:
            return f"the values would take {after} bytes with {path!r}; at most {self._bytes_max} are held: delete some"
        return ""

    def _put(self, path: str, value: Any, nbytes: int) -> list[Effect]:
        if path in self._values:
            self.nbytes -= self._values[path][1]
        else:
            insort(self._sorted, path)
        self._values[path] = value, nbytes + len(path)
        self.nbytes += nbytes + len(path)
        # P2: the requests that wait for the key get this value
        waiting = self._waiting.pop(path, {})
        for ticket in waiting:
            del self._by_ticket[ticket]
        return [ReplyValue(ticket, value) for ticket in waiting]
