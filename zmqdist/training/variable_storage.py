"""The two kinds of storage of a variable's value, which is at a parameter server or in this
process. Both kinds accept the same changes (variables/client.py).

Each operation returns a future, so that requests to several servers can be in flight at the same
time. A LocalStorage carries the operation out before it returns the future.
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
    """The storage of a value at a parameter server. It pickles as its Ref, and its copy in another
    process uses that process's client.

    Attributes:
      ref: name, shape and dtype of the variable, and the server's address. Error texts name the
        variable by `ref`.
      key: the identity of the variable, which is equal for all its handles.
      device, task: the server that holds the value.
      session: session number of the strategy that made the variable.
      last_version: the highest version of the variable in any reply that this object has received.
    """

    def __init__(self, ref: Ref, workers_per_step: int = 0, owner: Any = None) -> None:
        """Refer to a variable that the server has.

        Args:
          workers_per_step: number of gradients in a synchronous step. 0 means that the server
            applies each gradient on arrival.
          owner: in the program that made the variable, its StrategySession, which drops the
            variable when this storage is garbage-collected.
        """
        self.ref = ref
        self.key: Hashable = ref.session, ref.number
        self.task = ref.task
        self.device = device_of("ps", int(ref.task.partition(":")[2]))
        self.session = ref.session
        self.workers_per_step = workers_per_step
        self.last_version = 1
        self._owner = owner
        self._pickled_elsewhere = False

    def __reduce__(self) -> Any:
        self.note_pickled()
        return RemoteStorage, (self.ref, self.workers_per_step)

    def note_pickled(self) -> None:
        """Record that a handle is being pickled. Unless it is a part of a work item, handles may be
        in any process from now on, so the server keeps the variable until the session is closed.
        """
        if self._owner is not None and not self._owner.note_pickled(self):
            self._pickled_elsewhere = True

    @property
    def owned(self) -> bool:
        """Whether this process made the variable, which its server drops with the last handle."""
        return self._owner is not None

    def __del__(self) -> None:
        if self.__dict__.get("_owner") is not None and not self._pickled_elsewhere:
            self._owner.release(self.ref)

    @property
    def client(self) -> client.PsClient:
        """This process's client of the server."""
        return client.client_of(self.ref.address)

    def read(self) -> Future:
        """Return a future of (version, value)."""
        return Then(self.client.read([self.ref]), self._note_version)

    def rows(self, rows: Rows) -> Future:
        """Return a future of an array with these rows. The caller owns the array."""
        reply = self.client.rows([(self.ref, rows)])
        return Then(reply, lambda arrays: None if arrays is None else arrays[0])

    def saved(self) -> Future:
        """Return a future of (version, value, slots, update keys), read atomically. Later updates
        do not change the arrays."""
        return Then(self.client.saved([self.ref]), self._note_version)

    def change(self, change: Change) -> Future:
        """Start a change, and return a future of an UpdateOutcome."""
        return Then(self.client.update([(self.ref, change)]), self._note_version)

    def apply(self, how: Any, gradient: Any, step: int | None) -> Future:
        """Start to apply a gradient with an optimizer or a function, and return a future of an
        UpdateOutcome. Raises as `Variable.apply` does.
        """
        change = client.apply(self.ref, how, gradient)
        return Then(
            self.client.update([(self.ref, change)], **self.in_step(step)), self._note_version
        )

    def _note_version(self, replies: list[Any] | None) -> Any:
        """Remember the version in the reply, and return the reply. `replies` contains exactly one
        reply."""
        if replies is None:
            return None
        if replies[0][0] > self.last_version:
            self.last_version = replies[0][0]
        return replies[0]

    def in_step(self, step: int | None) -> dict[str, Any]:
        """Return the arguments that tell `PsClient.update` to which step a gradient belongs. Raises
        ValueError in synchronous mode if `step` is None.
        """
        if not self.workers_per_step:
            return {}
        if step is None:
            raise ValueError(
                f"{self.ref} takes the gradients of {self.workers_per_step} workers for a step: "
                f"pass step=, the number of the step"
            )
        return {"step": int(step), "workers_per_step": self.workers_per_step}


class LocalStorage:
    """The storage of a value in this process. It cannot be pickled."""

    session = 0
    task: str | None = None

    def __init__(self, name: str, value: Array, device: str) -> None:
        """Take ownership of `value`."""
        number = next(_numbers)
        self.ref: Ref = _LocalRef(name, value.shape, value.dtype, "", "", 0, number)
        self.key: Hashable = "here", number
        self.device = device
        self._hosted = hosted_variable.HostedVariable(str(self.ref), name, value)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self.ref} lives in this process and stays there: make it inside strategy.scope(), "
            f"so that workers reach it"
        )

    def read(self) -> Future:
        with self._hosted.lock:  # copy under the lock, because updates change the array in place
            version, value = self._hosted.version, self._hosted.read()
            return ReadyValue((version, value.copy() if value.flags.writeable else value))

    def rows(self, rows: Rows) -> Future:
        wire_rows = client.rows_on_wire(self.ref, rows)
        with self._hosted.lock:
            return ReadyValue(self._hosted.rows(wire_rows))

    def saved(self) -> Future:
        with self._hosted.lock:
            version, value, slots = self._hosted.version, self._hosted.read(), self._hosted.saved()
            own = {
                name: slot.copy() if slot.flags.writeable else slot for name, slot in slots.items()
            }
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
"""The storage of a Variable."""
