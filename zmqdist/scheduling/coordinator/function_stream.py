"""`FunctionStream`: the values of a generator function that runs on a worker, as they are made.

A scheduled function (scheduling/shared/stream_source.py) sends the values to the service of the
coordinator, whose loop records their arrival.

Promises
    Values come in order, each once, and an error comes after the values before it.
    At most `ahead` values have been made and not taken.
    A later run counts in place of an earlier one, whose calls are refused from then on. It begins
    after the values that have arrived, if the program allows so many runs.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, Final, Generic, TypeVar
from weakref import WeakValueDictionary, ref

from zmqdist import errors
from zmqdist.conditions import Condition
from zmqdist.rpc.payload import pack_result
from zmqdist.rpc.service import PendingCall, RpcService
from zmqdist.scheduling.coordinator.remote_value import RemoteValue, release_at_end
from zmqdist.scheduling.shared import stream_source
from zmqdist.wire import results

T = TypeVar("T")

WORKERS: Final = frozenset({"worker"})
_AFTER_LAST: Any = object()
LOST: Final = (
    "began again after {count} values had arrived, because its worker, its process or the "
    "dispatcher was lost: call stream() again, or with `retries`, which leaves out these values if "
    "the function yields the same again"
)
"""The end of a stream whose values cannot be continued."""

_NONE: Final = pack_result([None], lends=False)
"""A packed reply. `PendingCall.reply` would make an error reply of a Ctrl-C while it packs."""


class Arrivals:
    """The values of one stream that have arrived. The loop adds them, and one thread takes them.

    Args:
      name: the function, for error texts.
      restarts: how often the function may begin again after values have arrived.
    """

    def __init__(self, name: str, restarts: int) -> None:
        self.number = secrets.randbits(62)
        self.name = name
        self.closed = False
        self.refusal = ""
        """Why all calls are refused; "" while they are not."""
        self.changed = Condition()
        self._restarts = restarts
        self._values: dict[int, list[Any]] = {}
        self._puts: dict[int, PendingCall] = {}
        """The calls that have brought values that were not taken, by index."""
        self._end: tuple[PendingCall, int] | None = None
        """The call END of the present run, and the number of values before it."""
        self._taken = self._runs = self._run = 0

    @property
    def count(self) -> int:
        """The number of values that have arrived without a gap, taken ones included."""
        count = self._taken
        while count in self._values:
            count += 1
        return count

    def take(self, ended: Callable[[], bool]) -> list[Any] | None:
        """Wait for the next value, and return its parts; None if `ended()` and there is none."""
        with self.changed:
            while self._taken not in self._values:
                if self.closed or ended():
                    return None
                self.changed.wait()
            taken = self._taken
            self._taken += 1  # before the value goes, because Ctrl-C may come after it
            put = self._puts.pop(taken, None)
            parts = self._values.pop(taken)
        if put is not None:
            put.reply_packed(*_NONE)
        return parts

    def refuse(self, reason: str) -> None:
        """Refuse the calls that wait and all that follow, and wake the thread that takes values."""
        with self.changed:
            self.refusal = reason
            puts, self._puts = list(self._puts.values()), {}
            self.changed.notify_all()
        self.fail(puts, reason)

    def close(self, *, is_finalizer: bool = False) -> None:
        """Drop the values, and refuse all calls from now on. A finalizer takes no lock."""
        self.closed, self._values = True, {}
        if is_finalizer:
            self.refusal = "the program has dropped the stream"
            self.fail(list(self._puts.values()), self.refusal)
        else:
            self.refuse("the program has closed the stream")

    def fail(self, calls: list[PendingCall], reason: str) -> None:
        for call in calls:
            call.fail(errors.CancelledError(f"{self.name}: {reason}"))

    # -- in the loop -------------------------------------------------------------------------------

    def open(self, call: PendingCall, run: int) -> None:
        """Begin a run, and reply with the number of values that it leaves out."""
        with self.changed:
            count = self.count
            stale, self._puts = list(self._puts.values()), {}
            may_begin = not self.refusal and (not count or self._runs <= self._restarts)
            if may_begin:
                self._run, self._end = run, None
                self._runs += 1
                self._values = {i: parts for i, parts in self._values.items() if i < count}
        self.fail(stale, "another run has taken the place of this one")
        if may_begin:
            call.reply(count)
        elif self.refusal:
            self.fail([call], self.refusal)
        else:
            call.fail(errors.UnavailableError(f"{self.name} {LOST.format(count=count)}"))

    def put(self, call: PendingCall, run: int, index: int, head: Any, *parts: Any) -> None:
        """Add a value. The reply follows when it is taken."""
        with self.changed:
            if is_present := run == self._run and not self.refusal:
                self._values[index] = [head, *parts]
                self._puts[index] = call
                self.changed.notify_all()
        if is_present:
            self._check_end()
        else:
            self.fail([call], self.refusal or "another run has taken the place of this one")

    def end(self, call: PendingCall, run: int, count: int) -> None:
        """Reply when so many values have arrived."""
        if run == self._run:
            self._end = call, count
            self._check_end()
        else:
            self.fail([call], "another run has taken the place of this one")

    def _check_end(self) -> None:
        if self._end is not None and (self.refusal or self.count >= self._end[1]):
            self._end[0].reply(None)
            self._end = None


class Streams:
    """The streams of one coordinator, whose service has the methods of their slots."""

    def __init__(self, service: RpcService) -> None:
        self._arrivals: WeakValueDictionary[int, Arrivals] = WeakValueDictionary()
        for method, serve in (
            (stream_source.OPEN, Arrivals.open),
            (stream_source.PUT, Arrivals.put),
            (stream_source.END, Arrivals.end),
        ):
            service.register_later(method, partial(self._pass_on, serve), roles=WORKERS)

    def add(self, arrivals: Arrivals) -> None:
        self._arrivals[arrivals.number] = arrivals

    def _pass_on(
        self, serve: Callable[..., None], call: PendingCall, number: int, *args: Any
    ) -> None:
        arrivals = self._arrivals.get(number)
        if arrivals is None:
            call.fail(errors.CancelledError("the program has dropped the stream"))
        else:
            serve(arrivals, call, *args)


class FunctionStream(Iterator[T], AsyncIterator[T], Generic[T]):
    """Yields the values of a generator function in order, in a for-loop or an `async for`;
    `ClusterCoordinator.stream` makes it.

    An error of the function comes after the values before it. `close`, also as the end of a
    with-statement, cancels the function, and so does the garbage collector when the program has
    dropped the stream. One thread at a time may take values.

    >>> with coordinator.stream(range, 3) as stream:
    ...     list(stream), stream.arrived
    ([0, 1, 2], 3)
    """

    def __init__(self, arrivals: Arrivals, value: RemoteValue[int], safe_only: bool) -> None:
        self._arrivals, self._value, self._safe_only = arrivals, value, safe_only
        release_at_end(value, _EndWaiter(arrivals))

    @property
    def arrived(self) -> int:
        """The number of values that have arrived, taken ones included."""
        with self._arrivals.changed:
            return self._arrivals.count

    def __repr__(self) -> str:
        return f"<FunctionStream of {self._arrivals.name}: {self.arrived} values have arrived>"

    def __next__(self) -> T:
        parts = self._arrivals.take(self._value.done)
        if parts is None:
            if not self._arrivals.closed:
                self._value.result()
            raise StopIteration
        head = memoryview(parts[0])
        packed = [head, *parts[1:]] if len(parts) > 1 else head
        value: T = results.unpack(packed, safe_only=self._safe_only)
        return value

    async def __anext__(self) -> T:
        import asyncio  # imported here, because asyncio is slow to import

        value = await asyncio.get_running_loop().run_in_executor(None, next, self, _AFTER_LAST)
        if value is _AFTER_LAST:
            raise StopAsyncIteration
        return value

    def close(self) -> None:
        """Cancel the function, and drop the values that were not taken. Does not wait.

        >>> coordinator.stream(range, 3).close()
        """
        self._value.cancel()
        self._arrivals.close()

    def __enter__(self) -> FunctionStream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "_value" in self.__dict__:  # the constructor has not failed
            self._value.cancel()
            self._arrivals.close(is_finalizer=True)


class _EndWaiter:
    """A waiter whose `release` wakes the thread that takes values. It is weak, because the record of
    the pending work holds it."""

    __slots__ = ("_arrivals",)

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = ref(arrivals)

    def release(self) -> None:
        if (arrivals := self._arrivals()) is not None:
            arrivals.refuse("the function has ended")
