"""The record of the updates with a key that are part of the value of each variable in a session. A
restarted parameter server needs this record, so that it applies no update twice.

Rules
    An update is recorded under the locks of the variables that it changes, so that the record
    agrees with the value that is saved at the same time. A variable is restored from a checkpoint
    together with the record of the updates that its value contains. A repeated update skips the
    variables that contain it already, and changes the other variables.
    The record has at most PS_UPDATE_KEYS_MAX updates, which is also the number of keys that
    updates_machine.py keeps.

Not here: replies to requests while an update is being executed (variable_host.py,
updates_machine.py).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from zmqdist.errors import InvalidArgumentError
from zmqdist.limits import PS_UPDATE_KEYS_MAX

AppliedUpdate: TypeAlias = "tuple[int, bool]"
"""The outcome of an update for one variable: the variable's version, and whether the update changed
it."""


class _Saved(msgspec.Struct):
    """The saved updates of one variable.

    Attributes:
      step: the last synchronous step that was applied; -1 if no step was applied.
      updates: (key, version, changed) of each update.
    """

    step: int
    updates: list[tuple[str, int, bool]]


class AppliedUpdates:
    """The updates of one session that have a key. Threads may share this object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._updates: OrderedDict[str, tuple[tuple[int, int, bool], ...]] = OrderedDict()

    def of(self, key: str) -> dict[int, AppliedUpdate]:
        """Return the variables that contain the update with this key, as a dict: number of the
        variable -> outcome for this variable."""
        with self._lock:
            return {
                number: (version, changed)
                for number, version, changed in self._updates.get(key, ())
            }

    def note(self, key: str, outcomes: Iterable[tuple[int, int, bool]]) -> None:
        """Record that variables contain the update with this key. `outcomes` has (number, version,
        changed) of each variable. The caller holds the variables' locks.
        """
        with self._lock:
            self._updates[key] = (*self._updates.get(key, ()), *outcomes)
            if len(self._updates) > PS_UPDATE_KEYS_MAX:
                self._updates.popitem(last=False)

    def saved(self, number: int, step: int) -> bytes:
        """Return the encoded updates of a variable for `restore`; b"" if there are no updates and
        no steps. The caller holds the variable's lock.

        Args:
          step: the last synchronous step that was applied to the variable; -1 if no step was
            applied.
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
        """Restore the updates of a variable from the result of `saved`. Return the variable's last
        synchronous step. Raises InvalidArgumentError if `saved` is damaged.
        """
        if not saved:
            return -1
        try:
            found = msgspec.json.decode(saved, type=_Saved)
        except msgspec.DecodeError as error:
            raise InvalidArgumentError(
                f"the saved list of a variable's updates is damaged: {error}"
            ) from None
        for key, version, changed in found.updates:
            self.note(key, [(number, version, changed)])
        return found.step
