"""A function as it was when `map` or an Executor took it, pickled once for all its work items."""

from __future__ import annotations

import os
from _thread import get_ident
from collections.abc import Callable
from typing import Any

from zmqdist.errors import InvalidArgumentError
from zmqdist.scheduling.coordinator.remote_value import unwrapped
from zmqdist.scheduling.coordinator.runtime import CoordinatorRuntime


class FunctionSnapshot:
    """A pickled function. `schedule` takes it in place of the function, any number of times, without pickling or comparing again.

    Args:
      blob: the pickle, or the reference to it, as messages carry it.
      bulks: the data held for it; this object owns them.
      uses, inputs: what the function captures, as the runtime's attributes of these names.
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
        """Pickle a function now. Raises as `ClusterCoordinator.schedule` does for the function."""
        with runtime.schedule_lock:
            runtime.packing_thread = get_ident()
            try:
                packed = runtime.functions.pickled(fn)
            except InvalidArgumentError as error:
                raise unwrapped(error) from error.__cause__
            finally:
                runtime.packing_thread = None
                uses, inputs, runtime.uses, runtime.inputs = runtime.uses, runtime.inputs, [], {}
            blob, bulks = runtime.hold(packed) if isinstance(packed, list) else (packed, [])
            return cls(runtime, fn, blob, bulks, uses, inputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def use(self) -> tuple[bytes, list[int]]:
        """Return the blob and the numbers of held data for one more work item, which is being packed and owns these numbers."""
        self.runtime.uses += self.uses
        self.runtime.inputs.update(self.inputs)
        self.runtime.store.hold_again(self.bulks)
        return self.blob, list(self.bulks)

    def __del__(self) -> None:
        """Release the held data. In a finalizer, so it takes no lock of the coordinator."""
        if self.bulks and self.runtime.pid == os.getpid():
            self.runtime.call_in_loop(self.runtime.drop, self.bulks)
