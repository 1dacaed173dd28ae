"""The run of one scheduled function: unpickle it, call it, pickle the result. No other module runs
the user's scheduled code.

An outcome is (kind, payload). The payload of VALUE is the packed result, and that of ERROR the
packed exception. The payload of BULK is the list of the parts of a large result. The payload of
KEPT is the list of the parts of a result, large or small, that stays with the worker. INPUT_LOST
means that the function could not begin, because the holder of an input has lost the value. No
exception of the user's code leaves this module.
"""

from __future__ import annotations

from typing import Any

from zmqdist.errors import InternalError
from zmqdist.messages import BULK, ERROR, INPUT_LOST, KEPT, VALUE
from zmqdist.scheduling.shared import remote_results, resources
from zmqdist.scheduling.shared.references import (
    INPUTS,
    KEEP,
    MARK,
    MUTABLE,
    PartsFetcher,
    decode_reference,
)
from zmqdist.scheduling.shared.resources import SlotResources
from zmqdist.wire import results, trusted


class Functions:
    """The functions of one slot, by (coordinator, fn). Pickles that are too large for a message are
    fetched from their holders.

    A function is unpickled at its first use, so that a failure is the error of the work item that
    uses the function. A function that captures a mutable object, or whose pickle is too large for a
    message, is unpickled for each run. A run therefore does not see changes by an earlier run, and
    large captured data does not stay in memory.

    Attributes:
      resources: the per-worker resources. No resource has the number of a function, so `forget`
        accepts the numbers of both.
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
                raise InternalError(
                    f"function {fn} was not sent to this worker: this is a bug of zmqdist"
                )
            if pickled[:1] == MARK:
                return trusted.unpack_parts(self.fetched(pickled))
            # Not cached: a run must not see what an earlier run has changed.
            if pickled[:1] == MUTABLE:
                return trusted.unpack(memoryview(pickled)[1:])
            loaded = self._loaded[key] = trusted.unpack(pickled)
        return loaded

    def fetched(self, payload: bytes) -> list[Any]:
        """Return the parts of a payload. The holder keeps the parts, because another attempt may
        need them."""
        return self._fetcher.fetch(decode_reference(payload))


def run(functions: Functions, coordinator: int, fn: int, payload: bytes) -> tuple[int, Any]:
    """Run a function on its packed arguments, and return the outcome (see the module's docstring).
    Raises no exception.

    If the payload is marked SAFE, the result or the error is packed in the safe form, and an input
    in another form is refused (wire/results.py).
    """
    safely = payload[:1] == results.SAFE
    if safely:
        payload = payload[1:]
    keep = payload[:1] == KEEP
    if keep:
        payload = payload[1:]
    # An error before the function has begun is one of unpickling, and the error's text says so.
    began = False
    remote_results.of_thread.safe_only = safely
    pack, pack_error = (
        (results.pack, results.pack_error) if safely else (trusted.pack, trusted.pack_error)
    )
    try:
        if payload[:1] == INPUTS:
            payload = remote_results.prepare_inputs(payload[1:], functions.fetched)
        function = functions.get(coordinator, fn)
        if payload[:1] == MARK:
            args, kwargs = trusted.unpack_parts(functions.fetched(payload))
        else:
            args, kwargs = trusted.unpack(payload)
        began = True
        value = function(*args, **kwargs)
        if type(value) in resources.LAZY:
            value = resources.run_to_end(function, value)
        packed = pack(value)
    except remote_results.InputLost as lost:
        return INPUT_LOST, remote_results.encode_loss(lost)
    except Exception as error:
        frames = error.__traceback__ and error.__traceback__.tb_next
        if frames is not None and frames.tb_frame.f_code is pack.__code__:
            error = error.with_traceback(None)  # no frame of it is the function's
        return ERROR, pack_error(error, unpickling=not began)
    except BaseException as error:
        return ERROR, pack_error(trusted.as_ordinary_error(error), unpickling=not began)
    if keep:
        return KEPT, [packed] if isinstance(packed, bytes) else packed
    return (VALUE, packed) if isinstance(packed, bytes) else (BULK, packed)
