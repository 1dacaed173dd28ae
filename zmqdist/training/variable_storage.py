"""Where a variable's value lives: at a parameter server, or in this process. Both take the same changes (variables/client.py).

Everything is started and then waited for, so that several can be asked at once; at home it has happened when it was started.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

from numpy.typing import NDArray

from zmqdist.cluster.devices import device_of
from zmqdist.futures import Future, ReadyValue, Then
from zmqdist.training.indexing import Rows
from zmqdist.variables import client, hosted_variable
from zmqdist.variables.client import Change, Ref, UpdateOutcome
from zmqdist.wire.trusted import describe

Array = NDArray[Any]

_numbers = itertools.count(1)


class RemoteStorage:
    """At a parameter server. Pickles as what it says about itself, and finds the client of whatever process it is in.

    Attributes:
      ref: name, shape and dtype; its errors name the variable.
      key: of the variable, the same for all handles of it.
      device, task: where it is.
      session: of the strategy that made it.
      seen: the highest version that this one was told of.
    """

    def __init__(self, ref: Ref, workers_per_step: int = 0, owner: Any = None) -> None:
        """Args:
        workers_per_step: in synchronous mode; 0: gradients are applied as they come.
        owner: the Session that made it, in the program; kept as long as this. The variable goes with this one.
        """
        self.ref = ref
        self.key: Hashable = ref.session, ref.number
        self.task = ref.task
        self.device = device_of("ps", int(ref.task.partition(":")[2]))
        self.session = ref.session
        self.workers_per_step = workers_per_step
        self.version_seen = 1
        self._owner = owner
        self._pickled_elsewhere = False

    def __reduce__(self) -> Any:
        if self._owner is not None and not self._owner.note_pickled(self):
            self._pickled_elsewhere = True  # handles may be anywhere: it stays until the session ends
        return RemoteStorage, (self.ref, self.workers_per_step)

    def __del__(self) -> None:
        if self.__dict__.get("_owner") is not None and not self._pickled_elsewhere:
            self._owner.release(self.ref)

    @property
    def client(self) -> client.PsClient:
        """Of this process."""
        return client.client_of(self.ref.address)

    def read(self) -> Future:
        """Version and value."""
        return Then(self.client.read([self.ref]), self._note_version)

    def rows(self, rows: Rows) -> Future:
        """Rows, in an array of the caller's own."""
        return Then(self.client.rows([(self.ref, rows)]), _only)

    def saved(self) -> Future:
        """Version, value, slots and updates, all of one moment; none of them changes any more."""
        return Then(self.client.saved([self.ref]), self._note_version)

    def change(self, change: Change) -> Future:
        """An UpdateOutcome."""
        return Then(self.client.update([(self.ref, change)]), self._note_version)

    def apply(self, how: Any, gradient: Any, step: int | None) -> Future:
        """A step of an optimizer or a function: an UpdateOutcome. Raises as `Variable.apply`."""
        change = client.apply(self.ref, how, gradient)
        return Then(self.client.update([(self.ref, change)], **self.in_step(step)), self._note_version)

    def _note_version(self, replies: list[Any] | None) -> Any:
        """The only answer, which begins with the version."""
        if replies is None:
            return None
        if replies[0][0] > self.version_seen:
            self.version_seen = replies[0][0]
        return replies[0]

    def in_step(self, step: int | None) -> dict[str, Any]:
        """What `PsClient.update` must be told about a step. Raises ValueError: synchronous mode, and none is given."""
        if not self.workers_per_step:
            return {}
        if step is None:
            raise ValueError(
                f"{self.ref} takes the gradients of {self.workers_per_step} workers for a step: say step=, the number of the step"
            )
        return {"step": int(step), "workers_per_step": self.workers_per_step}


def _only(replies: list[Any] | None) -> Any:
    return None if replies is None else replies[0]


class LocalStorage:
    """In this process. It cannot be pickled."""

    session = 0
    task: str | None = None

    def __init__(self, name: str, value: Array, device: str) -> None:
        """Args: value: nobody else has it."""
        number = next(_numbers)
        self.ref: Ref = _LocalRef(name, value.shape, value.dtype, "", "", 0, number)
        self.key: Hashable = "here", number
        self.device = device
        self._hosted = hosted_variable.HostedVariable(str(self.ref), name, value)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self.ref} lives in this process and stays there: make it inside strategy.scope(), so that workers reach it"
        )

    def read(self) -> Future:
        with self._hosted.lock:  # updates are made in place
            version, value = self._hosted.version, self._hosted.read()
            return ReadyValue((version, value.copy() if value.flags.writeable else value))

    def rows(self, rows: Rows) -> Future:
        wanted = client.rows_wanted(self.ref, rows)
        with self._hosted.lock:
            return ReadyValue(self._hosted.rows(wanted))

    def saved(self) -> Future:
        with self._hosted.lock:
            version, value, slots = self._hosted.version, self._hosted.read(), self._hosted.saved()
            own = {name: slot.copy() if slot.flags.writeable else slot for name, slot in slots.items()}
            return ReadyValue((version, value.copy() if value.flags.writeable else value, own, b""))

    def change(self, change: Change, function: Callable[..., Any] | None = None) -> Future:
        with self._hosted.lock:
            commit = self._hosted.prepare(change, lambda _digest: (describe(function), function))
            changed = self._hosted.commit(commit)
            return ReadyValue(UpdateOutcome(self._hosted.version, changed))

    def apply(self, how: Any, gradient: Any, step: int | None) -> Future:
        return self.change(client.apply(self.ref, how, gradient), how)


@dataclasses.dataclass(frozen=True)
class _LocalRef(Ref):
    def __str__(self) -> str:
        return f"variable {self.name!r}"


VariableStorage: TypeAlias = RemoteStorage | LocalStorage
"""What a handle holds."""
