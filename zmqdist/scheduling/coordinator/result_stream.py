"""`ResultStream`: the values of a generator that runs elsewhere, as they are made."""

from __future__ import annotations

import queue
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, Generic

from zmqdist.limits import STREAM_AHEAD
from zmqdist.scheduling.coordinator.coordinator_events import StreamTaken
from zmqdist.scheduling.coordinator.remote_value import RemoteValue, release_at_end
from zmqdist.scheduling.coordinator.runtime import CoordinatorRuntime
from zmqdist.scheduling.coordinator.work import MethodCall
from zmqdist.scheduling.shared.references import is_reference
from zmqdist.type_variables import T_co
from zmqdist.wire import results

_END: Final = None


class ResultStream(Iterator[T_co], AsyncIterator[T_co], Generic[T_co]):
    """Yields the values of a generator method, in order, in a for-loop or an `async for`.

    >>> class Words:
    ...     def of(self, text):
    ...         yield from text.split()
    >>> words = coordinator.actor(Words)
    >>> list(words.of("a few words"))
    ['a', 'few', 'words']

    The generator runs ahead of the loop by STREAM_AHEAD values at most. An error of it is raised
    after the values before it. When the stream is closed or garbage-collected, the generator is
    closed. One thread at a time may take values.
    """

    def __init__(
        self, runtime: CoordinatorRuntime, call: MethodCall, end: RemoteValue[Any]
    ) -> None:
        self._runtime, self._call, self._end = runtime, call, end
        self._items: queue.SimpleQueue[bytes | None] = call.items
        self._taken = 0
        release_at_end(end, _EndMark(call.items))

    def __next__(self) -> T_co:
        payload = self._items.get()
        if payload is _END:
            self._items.put(_END)  # for the next call
            self._end.result()
            raise StopIteration
        value: T_co
        if is_reference(payload):
            value = self._runtime.result_fetcher.fetch_kept(payload, self._call.name)
        else:
            value = results.unpack(payload, safe_only=self._runtime.target.form.safe_only)
        self._taken += 1
        if self._taken == STREAM_AHEAD // 2 or is_reference(payload):
            self._runtime.post_event(StreamTaken(self._call, self._taken))
            self._taken = 0
        return value

    async def __anext__(self) -> T_co:
        import asyncio  # here, because it is slow to import, and few programs need it

        run = asyncio.get_running_loop().run_in_executor
        taken: Any = await run(None, next, self, _EndMark)
        if taken is _EndMark:
            raise StopAsyncIteration
        value: T_co = taken
        return value

    def close(self) -> None:
        """End the generator. Idempotent."""
        self._end.cancel()

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ResultStream of {self._call.name}: {'ended' if self._end.done() else 'open'}>"


class _EndMark:
    """A waiter whose `release` puts the mark of the end after the values."""

    __slots__ = ("_items",)

    def __init__(self, items: queue.SimpleQueue[bytes | None]) -> None:
        self._items = items

    def release(self) -> None:
        self._items.put(_END)
