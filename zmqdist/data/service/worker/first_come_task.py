"""A task whose elements go to whoever asks first: a thread runs the pipeline into the machine's buffer (first_come_machine.py).

The thread begins with the first question. Whoever asks takes what is there at once; who finds nothing waits, and the thread has the waiting
ones served a little later, so that a fast pipeline is not answered one by one. After `close` the thread may make one more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, MutableSequence
from itertools import chain
from math import inf
from typing import Any, Final

from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.service.elements import fits, is_scalar, weigh
from zmqdist.data.service.reader.delivery import Wanted
from zmqdist.data.service.split_requests import Drained
from zmqdist.data.service.task_errors import Failed
from zmqdist.data.service.worker.element_replies import TAKEN, ElementReply, Named, give, skip_late
from zmqdist.data.service.worker.first_come_machine import FirstComeBuffer

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
          named: see element_replies.py; so is `progress`, which is kept.
          failed: comes first.
        """
        self._named = named
        self._progress = progress
        self._open = open
        self._finished = finished
        self._machine = FirstComeBuffer(BUFFER_ELEMENTS_MIN, fitting)
        self._bytes = 1
        self._started = inf
        self._idle_s = 0.0
        self._woken = self._serving = False
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._taken_before = progress[TAKEN]
        if failed is not None and failed.for_good:
            self._machine.end(failed.error)
        elif failed is not None:
            self._machine.failed(failed.error)
        self._thread = threading.Thread(target=self._run, name=f"zmqdist-task-{name}", daemon=True)

    def start(self) -> None:
        """Begin before the first question, which is on its way."""
        if not self._thread.ident:
            self._thread.start()

    def ask(self, wanted: Wanted, reply: ElementReply) -> None:
        self.start()
        with self._lock:
            self._machine.asked(wanted, reply)
        self._serve()

    def figures(self) -> tuple[Any, ...]:
        """The fields of a Report (machine/figures.py); what is not known exactly is taken from the last element that was weighed."""
        machine = self._machine
        taken = self._progress[TAKEN]
        computed = taken + len(machine.elements)
        busy_s = max(0.0, time.monotonic() - self._started - self._idle_s)
        element_s = busy_s / computed if computed and not machine.ended else 0.0
        return taken, taken * self._bytes, len(machine.elements), machine.limit, element_s

    def expire(self, reply: ElementReply) -> None:
        """The time of a question is over: it is skipped if it still waits."""
        skip_late(self._machine.waiting, self._lock, reply)

    def close(self) -> None:
        with self._lock:
            self._machine.close()
            self._room.notify_all()
        self._serve()

    # -- the thread ---------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            if not self._machine.ended:
                self._started = time.monotonic()
                self._read(self._open())
        except BaseException as failure:  # it could not be opened, or not be closed
            error = failure
        with self._lock:
            self._machine.end(error)
        self._wake()
        self._serve()

    def _read(self, iterator: DatasetIterator) -> None:
        machine = self._machine
        elements, waiting = machine.elements, machine.waiting
        with iterator:
            while not machine.closed:
                try:
                    for element in iterator:
                        elements.append(element)
                        if waiting and not self._woken:
                            self._wake()
                        if len(elements) >= machine.limit and not self._wait_for_room(element):
                            break
                    else:
                        break
                except Drained:
                    break
                except BaseException as error:
                    with self._lock:
                        number = self._progress[TAKEN] + len(elements)
                        machine.failed(self._named(error, f"element {number}"))
                    self._wake()
                    self._wait()

    def _wake(self) -> None:
        with self._lock:
            if not self._machine.waiting or self._woken:
                return
            self._woken = True
            reply = self._machine.waiting[0][1]
        reply.soon(self._serve)

    def _wait_for_room(self, element: Any) -> bool:
        """Until somebody took something; False when it is over."""
        element_bytes = max(1, weigh(element))
        with self._lock:
            if not self._machine.closed:
                self._bytes = element_bytes
                self._machine.limit = min(BUFFER_ELEMENTS_MAX, max(BUFFER_ELEMENTS_MIN, BUFFER_BYTES // element_bytes))
        since = time.monotonic()
        self._wait()
        self._idle_s += time.monotonic() - since
        return not self._machine.closed

    def _wait(self) -> None:
        """Until another element may be made, or it is over."""
        with self._lock:
            while not (self._machine.may_go_on or self._machine.closed):
                self._room.wait()

    # -- answers, in any thread -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """One thread at a time: answers leave in the order in which elements were taken."""
        machine = self._machine
        with self._lock:
            if self._serving:
                return  # it looks again
            self._serving = True
        while True:
            with self._lock:
                self._woken = False
                while machine.waiting and not machine.waiting[0][1].wanted():
                    machine.waiting.popleft()
                answer = machine.next_answer()
                if answer is None:
                    self._serving = False
                    finished = machine.has_finished()
                    break
                self._progress[TAKEN] = self._taken_before + machine.taken
                self._room.notify()
            give(answer)
        if finished:
            self._finished()


def fitting(elements: Iterable[Any], bytes_max: int) -> int:
    """How many of these make an answer."""
    iterator = iter(elements)
    first = next(iterator)
    return BUFFER_ELEMENTS_MAX if is_scalar(first) else fits(chain((first,), iterator), bytes_max)
