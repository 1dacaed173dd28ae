"""The run of one scheduled function: unpickle it, call it, pickle the result. No other module runs
the user's scheduled code.

An outcome is (kind, payload). The payload of VALUE is the packed result, and that of ERROR the
packed exception. The payload of BULK is the list of the parts of a large result. The payload of
KEPT is the list of the parts of a result, large or small, that stays with the worker. INPUT_LOST
means that the function could not begin, because the holder of an input has lost the value. No
exception of the user's code leaves this module.
"""

from __future__ import annotations

import inspect
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from zmqdist import clock as time
from zmqdist import task_context
from zmqdist.errors import InternalError
from zmqdist.limits import (
    FAILURE_MESSAGE_CHARS_MAX,
    FAILURES_AT_ONCE,
    FAILURES_PER_S,
    TRACEBACK_CHARS_MAX,
)
from zmqdist.messages import BULK, ERROR, INPUT_LOST, KEPT, VALUE
from zmqdist.scheduling.shared import remote_results, resources
from zmqdist.scheduling.shared.references import (
    INPUTS,
    KEEP,
    MARK,
    MUTABLE,
    PARTS,
    PartsFetcher,
    decode_reference,
)
from zmqdist.scheduling.shared.resources import SlotResources
from zmqdist.scheduling.shared.result_parts import COUNT_BYTES, pack_parts
from zmqdist.scheduling.worker.run_figures import Allowance
from zmqdist.task_context import get_current_worker_index
from zmqdist.wire import results, trusted

RUNS: Final = frozenset({"run", "run_method", "make_object"})
"""The functions of this module that call code of programs. Stacks are shown from there on."""


class Functions:
    """The functions of one slot, by (coordinator, fn). Pickles that are too large for a message are
    fetched from their holders.

    A function is unpickled at its first use, so that a failure is the error of the work item that
    uses the function. A function that captures a mutable object, or whose pickle is too large for a
    message, is unpickled for each run. A run therefore does not see changes by an earlier run, and
    large captured data does not stay in memory.

    Attributes:
      fetched_bytes: the bytes of all parts of payloads so far.
      resources: the per-worker resources. No resource has the number of a function, so `forget`
        accepts the numbers of both.
    """

    def __init__(self, fetcher: PartsFetcher) -> None:
        self.resources = SlotResources(fetcher)
        self.fetched_bytes = 0
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
        parts = self._fetcher.fetch(decode_reference(payload))
        self.fetched_bytes += sum(memoryview(part).nbytes for part in parts)
        return parts


TRACEBACK_FRAMES = 20
"""The frames of a traceback in the facts: the last ones."""


class _LastFailure(threading.local):
    """The last failure in this thread as texts: the type of the error, its message, its traceback.
    None if there were many failures before it."""

    def __init__(self) -> None:
        self.texts: tuple[str, str, str] | None = None
        self._allowance = Allowance(FAILURES_PER_S, FAILURES_AT_ONCE)

    def note(self, error: BaseException) -> None:
        self.texts = _texts_of(error) if self._allowance.take(time.monotonic()) else None

    def take(self) -> tuple[str, str, str] | None:
        texts, self.texts = self.texts, None
        return texts


last_failure = _LastFailure()
"""What `run` has left about its error. A caller takes it before the thread runs anything else."""


class CallableSource(Protocol):
    """What `run` needs: the callables by their numbers, or the methods of an actor by their
    names."""

    def get(self, coordinator: int, fn: Any) -> Any: ...

    def fetched(self, payload: bytes) -> list[Any]: ...


def run(functions: CallableSource, coordinator: int, fn: Any, payload: bytes) -> tuple[int, Any]:
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
    pack: Callable[[Any], trusted.Packed] = results.pack if safely else trusted.pack
    if payload[:1] == PARTS:
        pack = partial(pack_parts, pack, int.from_bytes(payload[1 : 1 + COUNT_BYTES], "big"))
        payload = payload[1 + COUNT_BYTES :]
    # An error before the function has begun is one of unpickling, and the error's text says so.
    began = False
    remote_results.of_thread.safe_only = safely
    try:
        function, args, kwargs = _unpacked_call(functions, coordinator, fn, payload)
        began = True
        value = function(*args, **kwargs)
        if type(value) in resources.LAZY:
            value = resources.run_to_end(function, value)
        packed = pack(value)
        if keep or not isinstance(packed, bytes):
            task_context.settle_update()
    except BaseException as error:
        return failure(error, safely, unpickling=not began)
    if keep:
        return KEPT, [packed] if isinstance(packed, bytes) else packed
    return (VALUE, packed) if isinstance(packed, bytes) else (BULK, packed)


async def run_method(
    methods: CallableSource, coordinator: int, method: str, payload: bytes
) -> tuple[int, Any]:
    """Run a method of an actor with `async` methods, as `run` does, and await what it returns."""
    safely = payload[:1] == results.SAFE
    began = False
    try:
        # no await before the arguments are unpacked: `of_thread` is of one call at a time
        remote_results.of_thread.safe_only = safely
        function, args, kwargs = _unpacked_call(methods, coordinator, method, payload[safely:])
        began = True
        value = function(*args, **kwargs)
        if inspect.isawaitable(value):
            value = await value
        packed = results.pack(value) if safely else trusted.pack(value)
    except BaseException as error:
        return failure(error, safely, unpickling=not began)
    return (VALUE, packed) if isinstance(packed, bytes) else (BULK, packed)


def make_object(call: bytes, fetcher: PartsFetcher) -> tuple[Any, bytes]:
    """Make the object of an actor from its packed class and arguments. Return (object, b""), or
    (None, packed error) if that fails."""
    safely = call[:1] == results.SAFE
    call = call[safely:]
    began = False
    try:
        if call[:1] == MARK:
            cls, args, kwargs = trusted.unpack_parts(fetcher.fetch(decode_reference(call)))
        else:
            cls, args, kwargs = trusted.unpack(call)
        began = True
        return cls(*args, **kwargs), b""
    except BaseException as error:
        return None, failure(error, safely, unpickling=not began)[1]


def _unpacked_call(
    functions: CallableSource, coordinator: int, fn: Any, payload: bytes
) -> tuple[Any, Any, Any]:
    if payload[:1] == INPUTS:
        payload = remote_results.prepare_inputs(payload[1:], functions.fetched)
    function = functions.get(coordinator, fn)
    if payload[:1] == MARK:
        args, kwargs = trusted.unpack_parts(functions.fetched(payload))
    else:
        args, kwargs = trusted.unpack(payload)
    return function, args, kwargs


def failure(error: BaseException, safely: bool, *, unpickling: bool) -> tuple[int, bytes]:
    """Return the outcome for an error."""
    if isinstance(error, remote_results.InputLost):
        return INPUT_LOST, remote_results.encode_loss(error)
    form: Any = results if safely else trusted
    last_failure.note(error)
    frames = error.__traceback__ and error.__traceback__.tb_next
    packers = form.pack.__code__, pack_parts.__code__
    if frames is not None and frames.tb_frame.f_code in packers:
        error = error.with_traceback(None)  # no frame of it is the function's
    if not isinstance(error, Exception):
        error = trusted.as_ordinary_error(error)
    origin = f"worker:{get_current_worker_index()} ({trusted.here()})"
    return ERROR, form.pack_error(error, unpickling=unpickling, origin=origin)


def _texts_of(error: BaseException) -> tuple[str, str, str]:
    """Return what the facts show of an error."""
    try:
        frames = error.__traceback__ and error.__traceback__.tb_next  # without the one of `run`
        lines = traceback.format_exception(type(error), error, frames, limit=-TRACEBACK_FRAMES)
        shown = "".join(lines)
    except Exception:  # of a method of the program's exception
        shown = ""
    return (
        trusted.type_name(error),
        trusted.text_of(error)[:FAILURE_MESSAGE_CHARS_MAX],
        shown[-TRACEBACK_CHARS_MAX:],
    )
