"""Run one scheduled function: unpickle, call, pickle. The only place where user code of scheduled work runs.

An outcome is (kind, payload): VALUE with the packed result, ERROR with the packed exception, BULK with a list of parts, KEPT with the same,
however small, where the result is to stay with the worker, INPUT_LOST where it could not begin. Nothing that user code does gets out of
here as an exception.
"""

from __future__ import annotations

from typing import Any

from zmqdist.errors import InternalError
from zmqdist.messages import BULK, ERROR, INPUT_LOST, KEPT, VALUE
from zmqdist.scheduling.worker import remote_results
from zmqdist.scheduling.worker.references import INPUTS, KEEP, MUTABLE, PartsFetcher, decode_reference, is_reference
from zmqdist.scheduling.worker.resources import SlotResources
from zmqdist.wire import trusted


class Functions:
    """Functions by (coordinator, fn), and what is too large for a message, fetched from whoever holds it.

    A function is unpickled at first use, so that a failure to do so is the error of the work that uses it. One that captures what may
    change, or is too large for a message, is unpickled for each use: what one run leaves in it the next one does not see, and nothing that
    it captures stays.

    Attributes:
      resources: what stands under numbers that are no functions'.
    """

    def __init__(self, fetcher: PartsFetcher) -> None:
        self.resources = SlotResources(fetcher)
        self._fetcher = fetcher
        self._pickled: dict[tuple[int, int], bytes] = {}
        self._loaded: dict[tuple[int, int], Any] = {}

    def define(self, functions: list[tuple[int, int, bytes]]) -> None:
        for coordinator, fn, pickled in functions:
            self._pickled[coordinator, fn] = pickled
            self._loaded.pop((coordinator, fn), None)

    def forget(self, functions: list[tuple[int, int]]) -> None:
        for key in functions:
            self._pickled.pop(key, None)
            self._loaded.pop(key, None)
        self.resources.forget(functions)

    def get(self, coordinator: int, fn: int) -> Any:
        key = (coordinator, fn)
        loaded = self._loaded.get(key)
        if loaded is None:
            pickled = self._pickled.get(key)
            if pickled is None:
                raise InternalError(f"function {fn} was not sent to this worker")
            if is_reference(pickled):
                return trusted.unpack_parts(self.fetched(pickled))
            if pickled[:1] == MUTABLE:
                return trusted.unpack(memoryview(pickled)[1:])
            loaded = self._loaded[key] = trusted.unpack(pickled)
        return loaded

    def fetched(self, payload: bytes) -> list[Any]:
        """The parts that a reference stands for; they stay with their holder, other attempts may want them, too."""
        return self._fetcher.fetch(decode_reference(payload))


def run(functions: Functions, coordinator: int, fn: int, payload: bytes) -> tuple[int, Any]:
    """Run a function on its packed arguments; see the module's docstring for what comes back."""
    keep = payload[:1] == KEEP
    if keep:
        payload = payload[1:]
    began = False
    try:
        if payload[:1] == INPUTS:
            payload = remote_results.prepare_inputs(payload[1:], functions.fetched)
        function = functions.get(coordinator, fn)
        if is_reference(payload):
            args, kwargs = trusted.unpack_parts(functions.fetched(payload))
        else:
            args, kwargs = trusted.unpack(payload)
        began = True
        packed = trusted.pack(function(*args, **kwargs))
    except remote_results.InputLost as lost:
        return INPUT_LOST, remote_results.encode_loss(lost)
    except Exception as error:
        return ERROR, trusted.pack_error(error, unpickling=not began)
    except BaseException as error:
        return ERROR, trusted.pack_error(trusted.as_ordinary_error(error), unpickling=not began)
    if keep:
        return KEPT, [packed] if isinstance(packed, bytes) else packed
    return (VALUE, packed) if isinstance(packed, bytes) else (BULK, packed)
