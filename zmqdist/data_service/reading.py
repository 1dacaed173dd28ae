"""What stands behind an iterator over a distributed dataset: which tasks there are, what was asked of them, what has come.

Theory
    The dispatcher tells which tasks there are (`watch`, always one question outstanding). Of each task some batches are asked for ahead;
    answers go into one queue in the order in which they come, so that a slow or silent worker delays nobody. The consumer takes
    batches out of the queue; taking one makes room to ask for another.

    Everything but the consumer happens in a loop of the reader's own; only the queue is shared.

End and errors
    The end is: the iteration has ended, or all that this reader reads from has; and the queue is empty.
    A worker that does not answer is not an error: it is asked again when it, or another in its place, is told of. So is a dispatcher
    that does not answer: what is known goes on. Everything else that one of them says is raised, once.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Final

from zmqdist.core.splits.records import Terms
from zmqdist.data_service.dealing import FIRST_PAUSE_S, PAUSE_GROWS, RETRIABLE, insist
from zmqdist.data_service.elements import unpack
from zmqdist.data_service.worker import ELEMENTS, END, SOME
from zmqdist.errors import FailedPreconditionError, OpError, from_code
from zmqdist.limits import WAIT_LOG_S
from zmqdist.net.credentials import Credentials
from zmqdist.net.loop import Loop
from zmqdist.rpc import asking
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.result import StatusOrResult

log = logging.getLogger("zmqdist.data")

AHEAD: Final = 2
"""Batches asked for of each task."""

ELEMENTS_MAX: Final = 1024
BATCH_BYTES: Final = 8 << 20

PAUSE_S_MAX: Final = 1.0

WATCH: Final = "zmqdist.data.watch"
RELEASE: Final = "zmqdist.data.release"


@dataclass(frozen=True)
class Wish:
    """What is to be read, and how."""

    dispatcher: str
    terms: Terms
    job_name: str | None
    repetition: int
    max_outstanding: int = -1
    consumer_index: int = -1
    trainer: str = ""


@dataclass(eq=False)
class _Source:
    """One task. `life` is that of the worker that has it."""

    task: int
    address: str
    life: int
    client: ZmqClient
    asked: int = 0
    ended: bool = False
    gone: bool = False
    """Not to be asked any more; what was asked may still come."""
    pause_s: float = 0.0
    """It did not answer: not to be asked before so long."""


class Reader:
    """See the module's docstring. One consumer at a time."""

    def __init__(self, wish: Wish, credentials: Credentials) -> None:
        """Open the iteration; waits until the dispatcher is there.

        Raises:
          OpError: what the dispatcher says.
        """
        self._wish = wish
        self._credentials = credentials
        self._stopped = threading.Event()
        self._ready = threading.Condition()
        self._queue: deque[Any] = deque()
        self._over = False
        self._error: OpError | None = None
        self._sources: dict[int, _Source] = {}
        self._clients: dict[str, ZmqClient] = {}
        self._finished = False
        self._version = 0
        self._watch_pause_s = FIRST_PAUSE_S
        self._dispatcher = self._connect(wish.dispatcher)
        self._opened: tuple[int, int] | None = None
        request = random.getrandbits(62)
        terms = tuple(getattr(wish.terms, name) for name in wish.terms.__struct_fields__)

        def question() -> Any:
            return asking.start(
                self._dispatcher, "zmqdist.data.open", request, wish.job_name, wish.repetition, terms
            ).get_value()

        self._loop = Loop("zmqdist-reader")
        self._loop.start()
        try:
            client, self.iteration, state = insist(question, inf, self._stopped, f"reading from {wish.dispatcher}")
        except BaseException:
            self.close()
            raise
        self._opened = state, client
        self._loop.call_soon(self._watch)

    def batches(self) -> Iterator[list[Any]]:
        """The elements, in lists, as they come. Raises an error that one of them ended in; a new call goes on behind it.

        Raises:
          OpError: also what ends the reading.
        """
        while True:
            with self._ready:
                waited_s = 0.0
                while not self._queue and not self._over:
                    if not self._ready.wait(WAIT_LOG_S):
                        waited_s += WAIT_LOG_S
                        log.info("%s", self._waits_for(waited_s))
                if not self._queue:
                    if self._error is not None:
                        raise self._error
                    return
                value = self._queue.popleft()
            self._soon(self._top_up)
            if isinstance(value, OpError):
                raise value
            yield unpack(*value)

    def _waits_for(self, waited_s: float) -> str:
        names = ", ".join(sorted(each.address for each in list(self._sources.values()) if not each.ended)) or "a worker"
        return f"for {waited_s:.0f} s nothing has come from {names} (dispatcher {self._wish.dispatcher})"

    def close(self) -> None:
        """Stop reading and say so to the dispatcher. Harmless when called twice."""
        if self._stopped.is_set() or sys.is_finalizing():
            return
        self._stopped.set()
        self._loop.stop()
        self._end(None)
        if self._opened is not None:
            try:
                asking.start(self._dispatcher, RELEASE, *self._opened, waits_for_server=False).is_ok()
            except OpError:
                pass
        for client in self._clients.values():
            client.close()

    def _connect(self, address: str) -> ZmqClient:
        client = self._clients.get(address)
        if client is None:
            security = self._credentials.client(address, "submit")
            client = self._clients[address] = ZmqClient(address, "data reader", security=security)
        return client

    # -- in the loop: the dispatcher's news ---------------------------------------------------------------------------------------

    def _soon(self, fn: Callable[..., object], *args: Any) -> None:
        try:
            self._loop.call_soon(fn, *args)
        except FailedPreconditionError:
            pass  # closed

    def _start(self, client: ZmqClient, then: Callable[[StatusOrResult], None], method: str, *args: Any) -> None:
        """Ask, and have `then` called in the loop with the ended call."""
        try:
            call = asking.start(client, method, *args, waits_for_server=False)
        except OpError:
            return  # closed
        call.add_done_callback(partial(self._soon, then))

    def _watch(self) -> None:
        assert self._opened is not None
        self._start(self._dispatcher, self._watched, WATCH, *self._opened, self._version)

    def _watched(self, call: StatusOrResult) -> None:
        code, message = call.get_error()
        if code in RETRIABLE:
            pause_s, self._watch_pause_s = self._watch_pause_s, min(PAUSE_S_MAX, self._watch_pause_s * PAUSE_GROWS)
            self._loop.set_timer(self, self._loop.now() + pause_s, self._watch)
            return
        if code:
            self._end(from_code(code, message))
            return
        self._watch_pause_s = FIRST_PAUSE_S
        told = call.get_value()
        if told is not None:
            self._version, tasks, self._finished = told
            self._note(tasks)
            self._top_up()
        if not self._finished:
            self._watch()

    def _note(self, tasks: list[tuple[Any, ...]]) -> None:
        """Which tasks there are now."""
        random.shuffle(tasks)
        there = set()
        for task, _worker, address, life, _tags, _starting_round in tasks:
            there.add(task)
            known = self._sources.get(task)
            if known is None or known.life != life:
                self._sources[task] = _Source(task, address, life, self._connect(address))
        for task, source in self._sources.items():
            source.gone = task not in there

    def _end(self, error: OpError | None) -> None:
        with self._ready:
            self._over = True
            self._error = self._error or error
            self._ready.notify_all()

    # -- in the loop: elements ----------------------------------------------------------------------------------------------------

    def _top_up(self) -> None:
        """Ask for as much as there is room for."""
        if self._over:
            return
        sources = [source for source in self._sources.values() if not (source.ended or source.gone)]
        room = AHEAD * (len(sources) + 1) - len(self._queue) - sum(source.asked for source in self._sources.values())
        for asked in range(AHEAD):
            for source in sources:
                if source.asked == asked and room > 0 and not source.pause_s:
                    room -= 1
                    source.asked += 1
                    wanted = (ELEMENTS_MAX, BATCH_BYTES, None, 0)
                    then = partial(self._answered, source)
                    self._start(source.client, then, ELEMENTS, self._opened[0], source.task, wanted)  # type: ignore[index]
        if self._finished and not any(source.asked for source in self._sources.values()):
            self._end(None)

    def _answered(self, source: _Source, call: StatusOrResult) -> None:
        code, message = call.get_error()
        source.asked -= 1
        if code in RETRIABLE:
            source.pause_s = min(PAUSE_S_MAX, max(FIRST_PAUSE_S, source.pause_s * PAUSE_GROWS))
            self._loop.set_timer(source, self._loop.now() + source.pause_s, partial(self._again, source))
        elif code:
            self._put(from_code(code, message))
        else:
            kind, value, _tag = call.get_value()
            if kind == SOME:
                self._put((value, source.address))
            elif kind == END:
                source.ended = True
        self._top_up()

    def _again(self, source: _Source) -> None:
        source.pause_s = 0.0
        self._top_up()

    def _put(self, value: Any) -> None:
        with self._ready:
            self._queue.append(value)
            self._ready.notify_all()
