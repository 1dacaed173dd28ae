"""The requests and replies of a task that serves requests in order of arrival.

A thread of the task computes elements, and wakes the loop that sends the reply to the first
request. That loop then sends all replies that are ready. Only one thread at a time sends replies,
so that they leave in the order in which elements were taken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from zmqdist.data.service.reader.delivery import Wanted
from zmqdist.data.service.worker.element_replies import (
    DescribeError,
    ElementReply,
    ReplySender,
    withdraw,
)
from zmqdist.data.service.worker.task_replies import GiveError, GiveSkip, TaskReply


class ServingMachine(Protocol):
    """A machine that replies to requests in order of arrival.

    Attributes:
      waiting: the requests, in the order in which they will be served.
    """

    waiting: deque[tuple[Wanted, Any]]

    def add_request(self, wanted: Wanted, reply: Any) -> None:
        """Add a request, to which `next_reply` will return the reply."""

    def next_reply(self) -> TaskReply | None:
        """Remove the first request from `waiting`, and return the reply to it. Return None if no
        reply is possible now."""


class RequestQueue:
    """The requests that wait for the elements of one machine.

    Args:
      taken: called with the lock held each time the machine has decided on a reply.
      served: called without the lock after all ready replies have been sent.

    Attributes:
      lock: guards the machine.
      woken: whether a call of `serve` is scheduled.
      is_serving: whether a thread sends replies.
    """

    def __init__(
        self,
        machine: ServingMachine,
        describe_error: DescribeError,
        taken: Callable[[], None],
        served: Callable[[], None] = lambda: None,
    ) -> None:
        self.lock = threading.Lock()
        self.woken = self.is_serving = False
        self._machine = machine
        self._sender = ReplySender(describe_error)
        self._taken = taken
        self._served = served

    def ask(self, wanted: Wanted, reply: ElementReply) -> None:
        """Add a request, and send the replies that are ready."""
        with self.lock:
            self._machine.add_request(wanted, reply)
        self.serve()

    def expire(self, reply: ElementReply) -> None:
        """Reply with `skip` to a request whose waiting time is over, if it still waits."""
        with self.lock:
            late = withdraw(self._machine.waiting, reply)
        if late:
            self._sender.send(GiveSkip(reply))

    def wake(self) -> None:
        """If requests wait, have the loop that will reply to the first of them call `serve` a
        little later."""
        with self.lock:
            if not self._machine.waiting or self.woken:
                return
            self.woken = True
            reply = self._machine.waiting[0][1]
        if not reply.soon(self.serve):
            # the loop that would reply to the first request has ended, so serve other readers in
            # this thread
            self.serve()

    def serve(self) -> None:
        """Send all replies that are ready. Any thread may call this."""
        with self.lock:
            if self.is_serving:
                return  # another thread serves, and it looks for replies once more before it stops
            self.is_serving = True
        while (answer := self._next_reply()) is not None:
            self._sender.send(answer)
        self._served()

    def _next_reply(self) -> TaskReply | None:
        """Return the next reply to send. If no reply is ready, note that this thread has ceased to
        send replies, and return None."""
        waiting = self._machine.waiting
        with self.lock:
            self.woken = False
            while waiting and not waiting[0][1].wanted():
                waiting.popleft()
            first = waiting[0][1] if waiting else None
            try:
                answer = self._machine.next_reply()
                if answer is not None:
                    self._taken()
            except BaseException as error:
                failure = self._sender.failure(error)
                answer = None
                if first is not None:
                    withdraw(waiting, first)
                    answer = GiveError(first, failure)
            self.is_serving = answer is not None
        return answer
