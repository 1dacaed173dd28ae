"""FunctionSnapshot: a function that `map` or an Executor pickles once, in its present state, for
many work items."""

from __future__ import annotations

import os
from _thread import get_ident
from collections.abc import Callable
from typing import Any

from zmqdist.errors import InvalidArgumentError
from zmqdist.scheduling.coordinator.remote_value import unwrapped
from zmqdist.scheduling.coordinator.runtime import CoordinatorRuntime


class FunctionSnapshot:
    """A pickled function. `schedule` accepts a FunctionSnapshot in place of the function, so that
    it need not pickle the function again.

    Args:
      blob: the pickle or a reference to the pickle, as messages carry it.
      bulks: the numbers under which the store holds the pickle. The FunctionSnapshot releases them.
      uses, inputs: the resources and the RemoteValues that the function captures.
    """

    __slots__ = ("blob", "bulks", "fn", "inputs", "runtime", "uses")

    def __init__(
        self,
        runtime: CoordinatorRuntime,
        fn: Callable[..., Any],
        blob: bytes,
        bulks: list[int],
        uses: list[Any],
        inputs: dict[int, Any],
    ) -> None:
        self.runtime = runtime
        self.fn = fn
        self.blob = blob
        self.bulks = bulks
        self.uses = uses
        self.inputs = inputs

    @classmethod
    def take(cls, runtime: CoordinatorRuntime, fn: Callable[..., Any]) -> FunctionSnapshot:
        """Pickle a function in its present state. Raises the errors that
        `ClusterCoordinator.schedule` raises for such a function."""
        packing = runtime.packing
        with runtime.schedule_lock:
            packing.thread = get_ident()
            try:
                packed = runtime.functions.pickled(fn)
            except InvalidArgumentError as error:
                raise unwrapped(error) from error.__cause__
            finally:
                packing.thread = None
                uses, inputs, packing.uses, packing.inputs = packing.uses, packing.inputs, [], {}
            blob, bulks = runtime.hold(packed) if isinstance(packed, list) else (packed, [])
            return cls(runtime, fn, blob, bulks, uses, inputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def use(self) -> tuple[bytes, list[int]]:
        """Have one more work item use this function. Add the captured resources and inputs to those
        of the work item's arguments, and count one more use of the held pickle. The caller must
        free this use with the work item. Return the blob, and its numbers in the store."""
        self.runtime.packing.uses += self.uses
        self.runtime.packing.inputs.update(self.inputs)
        self.runtime.store.hold_again(self.bulks)
        return self.blob, list(self.bulks)

    def __del__(self) -> None:
        """Have the loop release the held data. A finalizer must take no lock of the coordinator, so
        it does not release the data itself."""
        if self.bulks and self.runtime.pid == os.getpid():
            self.runtime.call_in_loop(self.runtime.drop, self.bulks)
