"""What the runners of all kinds of tasks share: the thread that runs a pipeline, the requests that
wait, and the replies.

A thread of the task computes elements, and wakes the loop that sends the reply to the first
request. That loop then sends all replies that are ready. Only one thread at a time sends replies,
so that they leave in the order in which elements were taken.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, MutableSequence
from math import inf
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from zmqdist import clock as time
from zmqdist.conditions import Condition
from zmqdist.data.iterators import DatasetIterator
from zmqdist.data.service.compression import compress_batch
from zmqdist.data.service.elements import weigh
from zmqdist.data.service.reader.delivery import FAILED, SKIP, Demand
from zmqdist.data.service.split_requests import WorkerDrained
from zmqdist.data.service.worker.task_replies import BufferedMachine, ServingMachine, TaskReply
from zmqdist.errors import InternalError
from zmqdist.rpc.handler_errors import code_and_message

log = logging.getLogger("zmqdist.data")

BUFFER_BYTES: Final = 32 << 20
BUFFER_ELEMENTS_MAX: Final = 4096
BUFFER_ELEMENTS_MIN: Final = 2


DescribeError: TypeAlias = Callable[[BaseException, str], BaseException]
"""`describe_error(error, subject)` returns the error that readers get for an error of a pipeline.
`subject` is the element that could not be computed, for example "element 5".
"""


class Packed:
    """Elements that are sent to several readers. They are packed once, and compressed once for each
    codec."""

    def __init__(self, value: Any) -> None:
        """Take the result of elements.pack, which the caller must not change afterwards."""
        self._forms: dict[str, Any] = {"": value}

    def form(self, codec: str) -> Any:
        """Return the elements compressed with `codec`. Any thread may call this. If two threads
        compress at the same time, only one of the results is cached.
        """
        encoded = self._forms.get(codec)
        if encoded is None:
            encoded = self._forms[codec] = compress_batch(self._forms[""], codec)
        return encoded


class ElementReply(Protocol):
    """The protocol of an object that sends the reply to one request.

    Attributes:
      answered: whether the task has called `answer`.
    """

    answered: bool

    def wanted(self) -> bool:
        """Return whether the reader still waits for the reply."""

    def soon(self, fn: Callable[[], None]) -> bool:
        """Have the loop that sends this reply call `fn` a little later, so that the reply can
        contain elements that are computed meanwhile. Return False if that loop has ended and will
        not call `fn`.
        """

    def answer(self, kind: int, value: Any = None, tag: Any = None) -> None:
        """Send the reply, whose fields are those of a TaskReply. With the kind SOME, `value` is a
        list of elements, or Packed. The task calls this once, in any thread.
        """


class Runner(Protocol):
    """Runs one task."""

    def ask(self, demand: Demand, reply: ElementReply) -> None:
        """Reply to a request as soon as elements are ready. Does not block."""

    def expire(self, reply: ElementReply) -> None:
        """Reply with SKIP to a request whose waiting time is over, if it has no reply yet."""

    def close(self) -> None:
        """Stop the task, and reply to the waiting requests with an error. Does not wait for user
        code."""

    def join(self) -> None:
        """Wait until the user code of a closed task has ended."""

    def figures(self) -> tuple[Any, ...] | None:
        """Return the task's figures: the fields of a TaskReport
        (dispatcher/machine/events.py). Return None for a task without figures."""
        return None


class Waits:
    """How long something has waited, the present wait included. One thread at a time may use it."""

    def __init__(self) -> None:
        self._ended_s, self._since = 0.0, inf

    def note(self, *, waits: bool) -> None:
        """Record whether it waits from now on."""
        if waits != (self._since < inf):
            now = time.monotonic()
            self._ended_s, self._since = (
                (self._ended_s, now) if waits else (self._ended_s + now - self._since, inf)
            )

    @property
    def seconds(self) -> float:
        return self._ended_s + max(0.0, time.monotonic() - self._since)


class PipelineRunner(Runner):
    """Runs a task that has one thread. If a bug prevents a reply, the request gets an INTERNAL
    error that names the task, so that no reader waits for ever. The task goes on with the other
    requests.
    """

    def __init__(
        self, name: str, open: Callable[..., DatasetIterator], describe_error: DescribeError
    ) -> None:
        """Create the runner. Its thread starts with the first request, or with `start`.

        Args:
          open: a function that opens the pipeline. The runner's thread calls it.
          describe_error: a DescribeError, which makes the errors that readers
            get.
        """
        self._open = open
        self._describe_error = describe_error
        self._has_logged = False
        self._room_waits, self._element_waits = Waits(), Waits()
        """How long the thread has waited for room, and readers for elements."""
        self._lock = self._changed = Condition()
        """Notified when the thread may have something to compute."""
        self._thread = threading.Thread(target=self._run, name=f"zmqdist-task-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread, if it has not been started: before the first request when the caller
        knows that a request will soon arrive."""
        if not self._thread.ident:
            with self._lock:
                if not self._thread.ident:
                    self._thread.start()

    def join(self) -> None:
        if self._thread.ident:
            self._thread.join()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._compute()
        except BaseException as failure:  # opening or closing the pipeline may fail too
            error = failure
        self._end(error)

    def _compute(self) -> None:
        """Open the pipeline and compute its elements. Runs in the task's thread."""

    def _end(self, error: BaseException | None) -> None:
        """Record that the thread computes no further element, because of `error` or because the
        pipeline has ended."""

    def _send(self, answer: TaskReply) -> None:
        """Carry out a reply that a machine has decided on. Does not raise."""
        try:
            answer.reply.answer(answer.kind, answer.value, answer.tag)
        except BaseException as error:
            failure = self._failure(error)
            if not answer.reply.answered:
                answer.reply.answer(FAILED, failure)

    def _failure(self, error: BaseException) -> BaseException:
        """Return the error for requests that cannot be served because of `error`. Only the first
        error of the task is logged, because a bug may fail each request.
        """
        _, text = code_and_message(error)
        failure = self._describe_error(InternalError(f"a bug in zmqdist: {text}"), "a reply")
        # a bug may fail each request, and one line is enough
        if not self._has_logged:
            self._has_logged = True
            log.error("requests of readers fail: %s", failure)
        return failure


Serving = TypeVar("Serving", bound=ServingMachine)


class QueueRunner(PipelineRunner, Generic[Serving]):
    """Runs a task whose machine replies to requests in order of arrival. `_lock` guards the
    machine."""

    def __init__(
        self,
        name: str,
        open: Callable[..., DatasetIterator],
        describe_error: DescribeError,
        machine: Serving,
    ) -> None:
        super().__init__(name, open, describe_error)
        self._machine = machine
        self._woken = False
        """Whether a call of `_serve` is scheduled."""
        self._is_sending = False
        """Whether a thread sends replies."""

    def ask(self, demand: Demand, reply: ElementReply) -> None:
        self.start()
        with self._lock:
            self._machine.add_request(demand, reply)
        self._serve()

    def expire(self, reply: ElementReply) -> None:
        with self._lock:
            late = withdraw(self._machine.waiting, reply)
        if late:
            self._send(TaskReply(reply, SKIP))

    def close(self) -> None:
        with self._lock:
            self._machine.close()
            self._changed.notify_all()
        self._serve()

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            self._machine.end(error)
        self._serve()

    def _wake(self) -> None:
        """If requests wait, have the loop that will reply to the first of them call `_serve` a
        little later."""
        with self._lock:
            if not self._machine.waiting or self._woken:
                return
            self._woken = True
            reply = self._machine.waiting[0][1]
        if not reply.soon(self._serve):
            # the loop that would reply to the first request has ended, so serve other readers in
            # this thread
            self._serve()

    def _serve(self) -> None:
        """Send all replies that are ready. Any thread may call this."""
        with self._lock:
            if self._is_sending:
                return  # another thread sends, and it looks for replies once more before it stops
            self._is_sending = True
        while (answer := self._next_reply()) is not None:
            self._send(answer)
        self._note_served()

    def _next_reply(self) -> TaskReply | None:
        """Return the next reply to send. If no reply is ready, note that this thread has ceased to
        send replies, and return None."""
        waiting = self._machine.waiting
        with self._lock:
            self._woken = False
            # an element must not go to a reader that has gone
            while waiting and not waiting[0][1].wanted():
                waiting.popleft()
            first = waiting[0][1] if waiting else None
            try:
                answer = self._machine.next_reply()
                if answer is not None:
                    self._note_reply()
            except BaseException as error:
                failure = self._failure(error)
                answer = None
                if first is not None:
                    withdraw(waiting, first)
                    answer = TaskReply(first, FAILED, failure)
            self._is_sending = answer is not None
            self._element_waits.note(waits=answer is None and bool(waiting))
        return answer

    def _note_reply(self) -> None:
        """Called with the lock held each time the machine has decided on a reply."""
        self._changed.notify()

    def _note_served(self) -> None:
        """Called without the lock after all ready replies have been sent."""


Buffered = TypeVar("Buffered", bound=BufferedMachine)


class BufferRunner(QueueRunner[Buffered]):
    """Runs a task whose thread fills a bounded buffer."""

    def _fill(
        self,
        iterator: DatasetIterator,
        elements: MutableSequence[Any],
        fail: Callable[[BaseException], None],
    ) -> bool:
        """Append the elements of a pipeline to `elements`, and call `fail` for each element whose
        computation raises. Return whether the pipeline has ended; otherwise the task is closed."""
        machine = self._machine
        waiting = machine.waiting
        while not machine.closed:
            try:
                for element in iterator:
                    elements.append(element)
                    if waiting and not self._woken:
                        self._wake()
                    if len(elements) >= machine.room and not self._wait_for_room(element):
                        return False
                return True
            except WorkerDrained:
                return True
            except BaseException as error:
                fail(error)
                self._wake()
                self._wait()
        return False

    def _wait_for_room(self, element: Any) -> bool:
        """Weigh `element`, adapt the buffer's bound to its size, and wait until the buffer has
        room. Return False if the task is closed."""
        element_bytes = max(1, weigh(element))
        fit = min(BUFFER_ELEMENTS_MAX, max(BUFFER_ELEMENTS_MIN, BUFFER_BYTES // element_bytes))
        with self._lock:
            if not self._machine.closed:
                self._machine.weighed(element_bytes, fit)
        self._wait()
        return not self._machine.closed

    def _wait(self) -> None:
        """Wait until another element may be computed, or the task is closed."""
        with self._lock:
            while not (self._machine.closed or self._machine.may_add()):
                self._room_waits.note(waits=True)
                self._changed.wait()
            self._room_waits.note(waits=False)


def withdraw(waiting: deque[tuple[Demand, ElementReply]], reply: ElementReply) -> bool:
    """Remove a request from the waiting requests. Return whether it was among them. Call it with
    the lock of the task held."""
    request = next((request for request in waiting if request[1] is reply), None)
    if request is not None:
        waiting.remove(request)
    return request is not None
