"""Which updates with a key each variable of a session has: what a parameter server that is started again must know of them.

Rules
    An update is noted under the locks of the variables that it changes, so that what `saved` of a variable gives is of the same moment as
    the value beside it. A variable that comes back from a checkpoint comes with what its value there has; an update that is asked for
    again is passed over for those variables that have it, and made for the others.
    As many are remembered as updates_machine.py remembers keys.

Not here: who is answered what while an update is carried out (variable_host.py, updates_machine.py).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from zmqdist.errors import InvalidArgumentError
from zmqdist.limits import PS_ONCE_MAX

AppliedUpdate: TypeAlias = "tuple[int, bool]"
"""What was answered: the variable's version, and whether the update had changed it."""


class _Saved(msgspec.Struct):
    """Of one variable.

    Attributes:
      step: the last synchronous one that was applied; -1: none.
      updates: key, version, changed.
    """

    step: int
    updates: list[tuple[str, int, bool]]


class Once:
    """Of one session. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._updates: OrderedDict[str, tuple[tuple[int, int, bool], ...]] = OrderedDict()

    def of(self, key: str) -> dict[int, AppliedUpdate]:
        """The variables that have this update, by their numbers."""
        with self._lock:
            return {number: (version, changed) for number, version, changed in self._updates.get(key, ())}

    def note(self, key: str, outcomes: Iterable[tuple[int, int, bool]]) -> None:
        """These variables have it now: (number, version, changed). Under their locks."""
        with self._lock:
            self._updates[key] = (*self._updates.get(key, ()), *outcomes)
            if len(self._updates) > PS_ONCE_MAX:
                self._updates.popitem(last=False)

    def saved(self, number: int, step: int) -> bytes:
        """What a variable has, for `restore`; b"" for nothing. Under its lock.

        Args:
          step: the last synchronous one that was applied to it.
        """
        with self._lock:
            found = [
                (key, version, changed)
                for key, outcomes in self._updates.items()
                for other, version, changed in outcomes
                if other == number
            ]
        return msgspec.json.encode(_Saved(step, found)) if found or step >= 0 else b""

    def restore(self, number: int, saved: bytes) -> int:
        """A variable is there again, and has what it had when that was saved; gives its last step. Raises InvalidArgumentError."""
        if not saved:
            return -1
        try:
            found = msgspec.json.decode(saved, type=_Saved)
        except msgspec.DecodeError as error:
            raise InvalidArgumentError(f"what a variable remembers of its updates is damaged: {error}") from None
        for key, version, changed in found.updates:
            self.note(key, [(number, version, changed)])
        return found.step
