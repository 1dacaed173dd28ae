"""`ScatteredValue`: a value of the program, pickled once for any number of functions."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

from zmqdist import errors
from zmqdist.messages import KEPT
from zmqdist.scheduling.coordinator.remote_value import NOTHING, RemoteValue, unwrapped
from zmqdist.scheduling.coordinator.work import KeptAt, State, Work
from zmqdist.scheduling.shared.references import Held, encode_reference
from zmqdist.wire import results, trusted

if TYPE_CHECKING:
    from zmqdist.scheduling.coordinator.runtime import CoordinatorRuntime

T = TypeVar("T")


class ScatteredValue(RemoteValue[T]):
    """The RemoteValue of `ClusterCoordinator.scatter`. The coordinator's store holds the value for
    the processes that use it, until this object is garbage-collected."""

    __slots__ = ("_parts", "_runtime")

    def __init__(self, runtime: CoordinatorRuntime, number: int, value: T) -> None:
        try:
            packed = results.pack(value) if runtime.target.form.safe_only else trusted.pack(value)
        except errors.InvalidArgumentError as error:
            raise unwrapped(error) from error.__cause__
        reference = runtime.store.hold(
            packed if isinstance(packed, list) else [packed], shared=True
        )
        self._runtime, self._parts = runtime, reference.parts
        # a record of a work item that has ended, and that the machine never gets
        work = Work(number, 0, f"a scattered {trusted.type_name(value)}", b"")
        work.state, work.kind = State.SUCCEEDED, KEPT
        work.outcome = KeptAt(0, encode_reference(reference), False)
        super().__init__(runtime, work)

    def __del__(self) -> None:
        if (parts := getattr(self, "_parts", None)) and self._runtime.pid == os.getpid():
            bulks = [part.bulk for part in parts if isinstance(part, Held)]
            self._runtime.call_in_loop(self._runtime.store.free, bulks)

    def __repr__(self) -> str:
        return f"<RemoteValue of {self.name}: ready>"

    def _get_kept(self, timeout: float | None) -> T:
        if self._runtime.closed:
            raise errors.FailedPreconditionError(f"{self.name}: its coordinator has been closed")
        store = self._runtime.store
        parts: list[Any] = [
            store.view(part.bulk).copy() if isinstance(part, Held) else part for part in self._parts
        ]
        with self._owner.packing.unpacking:
            if self._value is NOTHING:
                self._value = results.unpack(parts, safe_only=False)
        return self._value
