"""A task whose elements go to whoever asks first.

Theory
    A thread runs the pipeline into a bounded buffer. It begins with the first question. Whoever asks takes what is there at once; who
    finds nothing waits, and the thread has the waiting ones served a little later, so that a fast pipeline is not answered one by one.

Rules
    An error costs its element: one reader gets it, and the next question goes on behind it. Nothing is computed ahead of a failure that
    nobody has taken: a pipeline that cannot work at all fails as often as it is asked, and no more.
    At the end every question is answered so, and `finished` is called when the last element has been taken. A pipeline that could not be
    opened, or that died for good, has no end: everybody is told why.
    After `close` no question gets elements: the thread may make one more, and those before it are gone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, MutableSequence
from itertools import islice
from math import inf
from typing import Any, Final

from zmqdist.data.iterators import BufferedError, DatasetIterator
from zmqdist.data.service.delivery.interface import Wanted
from zmqdist.data.service.elements import fits, is_scalar, weigh
from zmqdist.data.service.failing import Failed
from zmqdist.data.service.runners.base import TAKEN, ElementReply, Named, skip_late
from zmqdist.data.service.split_requests import Drained
from zmqdist.errors import CancelledError

BUFFER_BYTES: Final = 32 << 20
BUFFER_ELEMENTS_MAX: Final = 4096
BUFFER_ELEMENTS_MIN: Final = 2


class FirstCome:
    """See the module's docstring."""

    def __init__(
        self,
        name: str,
        open: Callable[[], DatasetIterator],
        finished: Callable[[], None],
        named: Named,
        progress: MutableSequence[int],
        failed: Failed | None = None,
    ) -> None:
        """
        Args:
          open: called in the thread.
          finished: called once, in any thread.
          named: see base.py; so is `progress`, which is kept.
          failed: comes first.
        """
        self._named = named
        self._progress = progress
        self._open = open
        self._finished = finished
        self._buffer: deque[Any] = deque()
        self._failures = 0
        self._limit = BUFFER_ELEMENTS_MIN
        self._bytes = 1
        self._began = inf
        self._idle_s = 0.0
        self._waiting: deque[tuple[Wanted, ElementReply]] = deque()
        self._woken = self._serving = False
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._ended = False
        self._told = False
        self._closed = False
        self._dead: BaseException | None = None
        if failed is not None and failed.for_good:
            self._dead = failed.error
        elif failed is not None:
            self._buffer.append(BufferedError(failed.error))
            self._failures = 1
        self._thread = threading.Thread(target=self._run, name=f"zmqdist-task-{name}", daemon=True)

    def start(self) -> None:
        """Begin before the first question, which is on its way."""
        if not self._thread.ident:
            self._thread.start()

    def ask(self, wanted: Wanted, reply: ElementReply) -> None:
        self.start()
        with self._lock:
            self._waiting.append((wanted, reply))
        self._serve()

    def figures(self) -> tuple[Any, ...]:
        """The fields of a Report (machine/figures.py); what is not known exactly is taken from the last element that was weighed."""
        taken = self._progress[TAKEN]
        made = taken + len(self._buffer)
        busy_s = max(0.0, time.monotonic() - self._began - self._idle_s)
        element_s = busy_s / made if made and not self._ended else 0.0
        return taken, taken * self._bytes, len(self._buffer), self._limit, element_s

    def expire(self, reply: ElementReply) -> None:
        """The time of a question is over: it is skipped if it still waits."""
        skip_late(self._waiting, self._lock, reply)

    def close(self) -> None:
        with self._lock:
            self._closed = self._ended = True
            self._limit = 0
            self._buffer.clear()
            self._room.notify_all()
        self._serve()

    # -- the thread ---------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._dead is None:
                self._began = time.monotonic()
                self._read(self._open())
        except BaseException as error:  # it could not be opened, or not be closed
            self._dead = error
        self._end()

    def _read(self, iterator: DatasetIterator) -> None:
        buffer = self._buffer
        with iterator:
            while not self._closed:
                try:
                    for element in iterator:
                        buffer.append(element)
                        if self._waiting and not self._woken:
                            self._wake()
                        if len(buffer) >= self._limit and not self._wait_for_room(element):
                            break
                    else:
                        break
                except Drained:
                    break
                except BaseException as error:
                    with self._lock:
                        buffer.append(
                            BufferedError(self._named(error, f"element {self._progress[TAKEN] + len(buffer)}"))
                        )
                        self._failures += 1
                    self._wake()
                    self._wait_for_nothing_failed()

    def _wake(self) -> None:
        with self._lock:
            if not self._waiting or self._woken:
                return
            self._woken = True
            reply = self._waiting[0][1]
        reply.soon(self._serve)

    def _wait_for_room(self, element: Any) -> bool:
        """Until somebody took something; False when it is over."""
        with self._lock:
            if not self._closed:
                self._bytes = max(1, weigh(element))
                self._limit = min(BUFFER_ELEMENTS_MAX, max(BUFFER_ELEMENTS_MIN, BUFFER_BYTES // self._bytes))
            since = time.monotonic()
            while len(self._buffer) >= self._limit and not self._closed:
                self._room.wait()
            self._idle_s += time.monotonic() - since
            return not self._closed

    def _wait_for_nothing_failed(self) -> None:
        with self._lock:
            while self._failures and not self._closed:
                self._room.wait()

    def _end(self) -> None:
        with self._lock:
            self._ended = True
        self._wake()
        self._serve()

    # -- answers, in any thread -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """One thread at a time: answers leave in the order in which elements were taken."""
        with self._lock:
            if self._serving:
                return  # it looks again
            self._serving = True
        while True:
            with self._lock:
                self._woken = False
                while self._waiting and not self._waiting[0][1].wanted():
                    self._waiting.popleft()
                if not self._waiting or not (self._buffer or self._ended):
                    self._serving = False
                    break
                wanted, reply = self._waiting.popleft()
                taken = self._take(wanted) if self._buffer and not self._closed else None
            if taken is None:
                if self._dead is not None:
                    reply.fail(self._dead)
                elif self._closed:
                    reply.fail(CancelledError("the task was stopped"))
                else:
                    reply.end()
            elif type(taken) is BufferedError:
                reply.fail(taken.error)
            else:
                reply.elements(taken)
        if self._ended and not (self._buffer or self._closed or self._told) and self._dead is None:
            self._told = True
            self._finished()

    def _take(self, wanted: Wanted) -> Any:
        """The next elements, or one failure. With the lock."""
        buffer = self._buffer
        count = min(len(buffer), wanted.elements_max)
        if not is_scalar(buffer[0]):
            count = fits(islice(buffer, count), wanted.bytes_max)
        if not self._failures:
            popleft = buffer.popleft
            taken = [popleft() for _ in range(count)]
        else:
            taken = []
            while len(taken) < count and type(buffer[0]) is not BufferedError:
                taken.append(buffer.popleft())
            if not taken:
                self._failures -= 1
                taken = buffer.popleft()
                count = 1
            else:
                count = len(taken)
        self._progress[TAKEN] += count
        self._room.notify()
        return taken
