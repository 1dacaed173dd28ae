"""The values of a generator function as they are made, in the slot that runs it: each value goes
straight to the coordinator, which admits so many as its program has asked for.

A run has a random number. The coordinator's reply to OPEN is the number of values that an earlier
run has brought, which this run leaves out. PUT is replied to when the program has taken the value,
so the values whose replies are missing are those that are ahead of the program. Values may overtake
each other on the way, because large ones travel apart, so END, the last call of a run, is replied
to when all values have arrived.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from types import AsyncGeneratorType, GeneratorType
from typing import Any, Final

import numpy as np

from zmqdist import task_context
from zmqdist.errors import CancelledError
from zmqdist.limits import INLINE_BYTES_MAX
from zmqdist.rpc import internal_client
from zmqdist.rpc.client import StatusOrResult, ZmqClient
from zmqdist.scheduling.shared.remote_results import of_thread
from zmqdist.wire import results, trusted

OPEN: Final = "zmqdist_stream_open"
"""The coordinator's RPC method (stream, run) -> how many values have arrived from earlier runs."""
PUT: Final = "zmqdist_stream_put"
"""The coordinator's RPC method (stream, run, index, *parts of the packed value)."""
END: Final = "zmqdist_stream_end"
"""The coordinator's RPC method (stream, run, number of values)."""
POLL_S: Final = 0.05
"""Seconds between two looks whether the function was cancelled, while the program takes nothing."""


def send_values(
    address: str,
    key: bytes,
    stream: int,
    ahead: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> int:
    """Send the values of the iterable that `fn(*args, **kwargs)` returns, and return their number.
    A coordinator schedules this function by its name.

    Args:
      address, key: the address of the coordinator's service, and its public key.
      stream: the number of the stream.
      ahead: how many values may be ahead of the program.

    Raises:
      CancelledError: the program has closed the stream, or another run has taken this one's place.
      UnavailableError: this slot cannot reach the coordinator, or the stream cannot begin again.
      TypeError: `fn` has returned no iterable.
      Exception: any error of `fn`, once the values before it have arrived.
    """
    safely, count = of_thread.safe_only, 0
    with of_thread.fetcher.clients.use(address, key) as holder:
        sender = _Sender(holder.client, stream, ahead)
        skipped = sender.wait(sender.call(OPEN))
        with closing(_values_of(fn(*args, **kwargs))) as values:
            try:
                for value in values:
                    if count >= skipped:
                        sender.put(count, results.pack(value) if safely else trusted.pack(value))
                    count += 1
            except BaseException:
                if not sender.is_over:
                    sender.wait(sender.call(END, count))  # so that the error comes last
                raise
        sender.wait(sender.call(END, count))
    return count


class _Sender:
    """Sends the values of one run, so many ahead of the program.

    Attributes:
      is_over: whether the stream accepts nothing more, or the function was cancelled.
    """

    def __init__(self, client: ZmqClient, stream: int, ahead: int) -> None:
        self.is_over = False
        self._client, self._ahead = client, ahead
        self._name = stream, secrets.randbits(62)
        self._puts: deque[StatusOrResult] = deque()
        self._failed: deque[StatusOrResult] = deque()

    def call(self, method: str, *args: Any) -> StatusOrResult:
        return internal_client.start(
            self._client, method, *self._name, *args, waits_for_server=False
        )

    def put(self, index: int, packed: trusted.Packed) -> None:
        """Send a value, once the program has taken so many that this one may be ahead."""
        if len(self._puts) == self._ahead:
            self.wait(self._puts.popleft())
        parts = packed if isinstance(packed, list) else [packed]
        put = self.call(PUT, index, *map(_sendable, parts))
        put.add_done_callback(self._note_end)
        self._puts.append(put)

    def _note_end(self, put: StatusOrResult) -> None:
        if not put.is_ok():
            self._failed.append(put)

    def wait(self, call: StatusOrResult) -> Any:
        """Wait for the reply to a call, and return it. Raises CancelledError if the function is
        cancelled, and the error of the call or of an earlier PUT."""
        ended = threading.Event()
        call.add_done_callback(lambda _: ended.set())
        self.is_over = True
        while True:
            has_ended = ended.wait(POLL_S)
            if task_context.cancelled():
                raise CancelledError("the function was cancelled")
            if self._failed:
                self._failed[0].get_value()
            if has_ended:
                reply = call.get_value()
                self.is_over = False
                return reply


def _sendable(part: Any) -> Any:
    """Return a part of a packed value as an argument of a call: a large part as an array, which
    travels apart."""
    if memoryview(part).nbytes > INLINE_BYTES_MAX:
        return np.frombuffer(part, np.uint8)
    return bytes(part)


def _values_of(made: Any) -> Generator[Any, None, None]:
    if isinstance(made, AsyncGeneratorType):
        return _values_of_async(made)
    if isinstance(made, GeneratorType):
        return made
    if not isinstance(made, Iterable):
        raise TypeError(
            f"stream() wants a generator function, or one that returns an iterable: it returned a {trusted.type_name(made)}"
        )
    return (value for value in made)


def _values_of_async(made: AsyncGeneratorType[Any, Any]) -> Generator[Any, None, None]:
    import asyncio  # imported here, because asyncio is slow to import, and few functions are async

    loop = asyncio.new_event_loop()
    try:
        while True:
            try:
                value = loop.run_until_complete(anext(made))
            except StopAsyncIteration:
                return
            yield value
    finally:
        loop.run_until_complete(made.aclose())
        loop.close()
