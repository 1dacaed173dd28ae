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

import itertools
import logging
import os
import secrets
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import inf
from operator import attrgetter
from typing import Any, Final

from zmqdist.data.iterators import Openings
from zmqdist.data.ops.background import FORKED
from zmqdist.data.service import local
from zmqdist.data.service.dealing import FIRST_PAUSE_S, PAUSE_GROWS, RETRIABLE, insist
from zmqdist.data.service.elements import check_spec
from zmqdist.data.service.machine.records import Terms
from zmqdist.data.service.policy import STATIC, ShardingPolicy, check_shared
from zmqdist.data.service.remote_reply import END, SOME
from zmqdist.data.service.runners.base import Wanted
from zmqdist.data.service.sources import LocalSource, RemoteSource, open_batch
from zmqdist.data.service.targets import LOCAL_PROTOCOL, PROTOCOLS, check_local, reads_from, target_of
from zmqdist.data.structure import UNKNOWN_SPEC
from zmqdist.errors import ABORTED, FailedPreconditionError, NotFoundError, OpError, UnavailableError, from_code
from zmqdist.limits import WAIT_LOG_S
from zmqdist.random import chance
from zmqdist.rpc import asking
from zmqdist.rpc.client import ZmqClient
from zmqdist.rpc.result import StatusOrResult
from zmqdist.transport.address import split_key
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.loop import Loop

log = logging.getLogger("zmqdist.data")

AHEAD: Final = 2
"""Batches asked for of each task."""

ELEMENTS_MAX: Final = 4096
BATCH_BYTES: Final = 17 << 20

PAUSE_S_MAX: Final = 1.0

TURN_S: Final = 0.02
"""Where there are more tasks than questions allowed, one that has nothing is left for the next after so long."""

LONG_TURN_S: Final = 1.0
"""Where there are enough questions for all, there may be more tasks a moment later, and one that has nothing must not have the only one."""

TARGET_OF: Final = 16
"""The consumer's time for an element is a mean over about so many batches."""

WATCH: Final = "zmqdist.data.watch"
RELEASE: Final = "zmqdist.data.release"
RELEASE_S: Final = 1.0
"""A reader that leaves waits no longer for a dispatcher to hear it, which forgets it by itself in time."""


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
    protocol: str = ""
    compression: str | None = "AUTO"
    spec: Any = UNKNOWN_SPEC
    saved: tuple[Any, ...] | None = None
    """Where to go on: portions_reading.py."""
    refresh_s: float = 0.0
    """Pause before asking for news again; 0: they come at once."""


@dataclass(eq=False)
class TaskSource:
    """One task. `life` is that of the worker that has it."""

    task: int
    address: str
    life: int
    at: LocalSource | RemoteSource
    asked: int = 0
    asked_at: int = 0
    """Its turn, for those of which not all can be asked at once."""
    ended: bool = False
    gone: bool = False
    """Not to be asked any more; what was asked may still come."""
    pause_s: float = 0.0
    """It did not answer: not to be asked before so long."""
    answers: deque[list[Any]] = field(default_factory=deque)
    """Of each question asked its answer, or nothing yet: two answers may come in from two threads, and the order of a task counts."""


class Reader:
    """See the module's docstring. One consumer at a time."""

    def __init__(self, wish: Wish, credentials: Credentials, openings: Openings) -> None:
        """Open the iteration; waits until the dispatcher is there, or `openings` are closed.

        Raises:
          OpError: what the dispatcher says.
        """
        if wish.terms.cache:
            check_shared(wish.job_name, wish.repetition, wish.terms.num_consumers)
        self._wish = wish
        self._credentials = credentials
        self._stopped = threading.Event()
        self._abandoned = threading.Event()
        """Nobody waits for the iteration to be opened."""
        self._ready = threading.Condition()
        self._queue: deque[Any] = deque()
        self._over = False
        self._error: OpError | None = None
        self._given: list[Any] = []
        """The elements that the consumer is at."""
        self._sources: dict[int, TaskSource] = {}
        self._clients: dict[tuple[str, bytes], ZmqClient] = {}
        self._held = 0
        """Questions asked and batches in the queue."""
        self._turns = itertools.count()
        self._begun = False
        self._target = ""
        self._target_s = 0.0
        """The consumer needs so long for an element."""
        self._subset = False
        """There are tasks that this reader leaves to others."""
        self._awaits = False
        """There are tasks for it that do not serve yet."""
        self._finished = False
        self._version = 0
        self._watching = 0
        self._watch_pause_s = FIRST_PAUSE_S
        self._trouble = ""
        """Why the dispatcher did not do what it was asked the last time."""
        self._dispatcher = self._connect(wish.dispatcher)
        self._opened: tuple[int, int] | None = None
        self._number = 0
        """Of the client that this is to the dispatcher."""
        request = secrets.randbits(62)
        terms = tuple(getattr(wish.terms, name) for name in wish.terms.__struct_fields__)

        args = (request, wish.job_name, wish.repetition, terms, wish.consumer_index, wish.saved)

        def question() -> Any:
            return asking.start(self._dispatcher, "zmqdist.data.open", *args).get_value()

        self._loop = Loop("zmqdist-reader")
        self._loop.start()
        _readers.add(self)
        try:
            with openings.one(self._give_up):
                self._target = target_of(wish.terms, self._deployment_mode())
                client, self.iteration, state, self._cut = insist(
                    question, inf, self._abandoned, f"reading from {wish.dispatcher}"
                )
                self._opened, self._number = (state, client), client
                if self._target == "LOCAL":
                    check_local(wish.terms, wish.dispatcher, state)
        except BaseException:
            self.close()
            raise
        self._loop.call_soon(self._watch)

    def _deployment_mode(self) -> str:
        """What the dispatcher was told of its workers; asked only where it matters."""
        if self._wish.terms.target_workers != "AUTO" or ShardingPolicy(self._wish.terms.mode) not in STATIC:
            return ""

        def question() -> Any:
            return asking.start(self._dispatcher, "zmqdist.data.config").get_value()

        return str(insist(question, inf, self._abandoned, f"asking {self._wish.dispatcher}")["deployment_mode"])

    def batches(self) -> Iterator[list[Any]]:
        """The elements, in lists, as they come. Raises an error that one of them ended in; a new call goes on behind it.

        Raises:
          OpError: also what ends the reading.
        """
        self._soon(self._begin)
        while (value := self._take()) is not None:
            self._soon(self._taken)
            if isinstance(value, OpError):
                raise value
            elements = self._given = self._opened_batch(value)
            given_at = time.monotonic()
            yield elements
            took_s = (time.monotonic() - given_at) / max(1, len(elements))
            self._target_s += (took_s - self._target_s) / TARGET_OF if self._target_s else took_s

    def _take(self) -> Any:
        """What is next in the queue; waits for it. None at the end. Raises what ended the reading."""
        with self._ready:
            waited_s = 0.0
            while not self._queue and not self._over:
                if not self._ready.wait(WAIT_LOG_S):
                    waited_s += WAIT_LOG_S
                    log.warning("%s", self._waits_for(waited_s))
            if self._queue:
                return self._queue.popleft()
            if self._error is not None:
                raise self._error
            return None

    def _opened_batch(self, value: tuple[Any, ...]) -> list[Any]:
        elements = open_batch(value)
        check_spec(elements, self._wish.spec)
        return elements

    def _waits_for(self, waited_s: float) -> str:
        names = ", ".join(sorted(each.address for each in list(self._sources.values()) if not each.ended)) or "a worker"
        return f"for {waited_s:.0f} s nothing has come from {names} (dispatcher {self._wish.dispatcher}{self._trouble})"

    def _give_up(self) -> None:
        """Whoever waits for the iteration to be opened waits no longer."""
        self._abandoned.set()
        if self._opened is None:
            self._dispatcher.close()

    def interrupt(self) -> None:
        """Who waits for elements gets the end."""
        with self._ready:
            self._queue.clear()
            self._over = True
            self._ready.notify_all()

    def close(self) -> None:
        """Stop reading and say so to the dispatcher. Harmless when called twice."""
        if self._stopped.is_set() or sys.is_finalizing():
            return
        self._stopped.set()
        self._loop.stop()
        self._end(None)
        if self._target == "LOCAL":
            for source in self._sources.values():
                if isinstance(source.at, LocalSource):
                    source.at.delete()
        if self._opened is not None:
            try:
                self._leave()
                due = time.monotonic() + RELEASE_S
                asking.start(self._dispatcher, RELEASE, *self._opened, due=due, waits_for_server=False).is_ok()
            except OpError:
                pass
        for client in self._clients.values():
            client.close()

    def _leave(self) -> None:
        """Say what is to be said before the reader is released."""

    def forked(self) -> None:
        """In the child of a fork: the loop is not there, and what lies here belongs to the parent, which goes on."""
        self._stopped, self._ready = threading.Event(), threading.Condition()  # somebody may have been in them
        self._stopped.set()
        self._given.clear()
        self._queue.clear()
        self._over, self._error = True, FailedPreconditionError(FORKED)

    def _connect(self, address: str, key: bytes = b"") -> ZmqClient:
        """`key`: the public key that a worker told with its address; empty for the dispatcher."""
        client = self._clients.get((address, key))
        if client is None:
            security = self._credentials.client(address, "submit", key)
            client = self._clients[address, key] = ZmqClient(address, "data reader", security=security)
        return client

    # -- in the loop: the dispatcher's news ---------------------------------------------------------------------------------------

    def _soon(self, fn: Callable[..., object], *args: Any) -> None:
        if self._stopped.is_set():
            return
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
        self._watching += 1
        then = partial(self._watched, self._watching)
        self._start(self._dispatcher, then, WATCH, *self._opened, self._version, self._target_s, *self._standing())

    def _standing(self) -> tuple[Any, ...]:
        """What else the dispatcher is told with a question for news."""
        return ()

    def _watched(self, asking: int, call: StatusOrResult) -> None:
        if asking != self._watching:
            return  # there is a later question
        code, message = call.get_error()
        if code in RETRIABLE and code != ABORTED:  # that: another reader has taken over
            pause_s, self._watch_pause_s = self._watch_pause_s, min(PAUSE_S_MAX, self._watch_pause_s * PAUSE_GROWS)
            self._loop.set_timer(self, self._loop.now() + pause_s, self._watch)
            self._trouble = f": {message}"
            return
        if code:
            self._end(from_code(code, message))
            return
        self._watch_pause_s, self._trouble = FIRST_PAUSE_S, ""
        told = call.get_value()
        if told is not None:
            self._version, tasks, self._finished, hold, ended, failed = told
            if failed:
                self._end(UnavailableError(failed))
            try:
                self._note(tasks, hold, ended)
            except OpError as error:  # a worker at which no connection may be tried
                self._end(error)
            self._top_up()
        if not self._finished:
            if self._wish.refresh_s:
                self._loop.set_timer(self, self._loop.now() + self._wish.refresh_s, self._watch)
            else:
                self._watch()

    def _note(self, tasks: list[tuple[Any, ...]], hold: bool, ended: dict[int, int]) -> None:
        """Which tasks there are now. The rest is of coordinated reads."""
        chance.shuffle(tasks)
        there = set()
        coordinated = self._wish.terms.coordinated
        self._subset = self._awaits = False
        for task, _worker, where, life, tags, _starting_round in tasks:
            if not reads_from(self._target, coordinated, life, tags):
                self._subset = True
                continue
            if not where:
                self._awaits = True
                continue
            there.add(task)
            known = self._sources.get(task)
            if known is None or known.life != life:
                self._sources[task] = TaskSource(task, split_key(where)[0], life, self._at(task, where, life))
        for task, source in self._sources.items():
            source.gone = task not in there

    def _at(self, task: int, where: str, life: int) -> LocalSource | RemoteSource:
        assert self._opened is not None
        address, key = split_key(where)
        state = self._opened[0]
        protocol, shared = self._wish.protocol, bool(self._wish.trainer)
        # What others get, too, is not handed over as it is.
        worker = local.find(life) if protocol in ("", LOCAL_PROTOCOL) and not shared else None
        if worker is not None:
            return LocalSource(worker, address, state, task, self._soon)
        if protocol and protocol not in PROTOCOLS and not (shared and protocol == LOCAL_PROTOCOL):
            why = "it is not one of this process" if protocol == LOCAL_PROTOCOL else f"it has {', '.join(PROTOCOLS)}"
            self._end(NotFoundError(f"Protocol '{protocol}' is not available for worker '{address}': {why}"))
        return RemoteSource(self._connect(address, key), state, task, self._wish.compression)

    def _end(self, error: OpError | None) -> None:
        with self._ready:
            self._over = True
            self._error = self._error or error
            self._ready.notify_all()

    # -- in the loop: elements ----------------------------------------------------------------------------------------------------

    def _top_up(self) -> None:
        """Ask for as much as there is room for: some batches of each task, or the elements that the user allows."""
        if self._over or not self._begun:
            return
        sources = [each for each in self._sources.values() if self._may_ask(each)]
        sources.sort(key=attrgetter("asked", "asked_at"))
        limit = self._wish.max_outstanding
        if limit < 0:
            room, each_max, wait_s = AHEAD * (len(sources) + 1) - self._held, ELEMENTS_MAX, None
        else:
            each_max = max(1, limit // max(1, AHEAD * len(sources)))
            room, wait_s = limit // each_max - self._held, LONG_TURN_S if limit >= len(sources) else TURN_S
        for _ in range(AHEAD):
            for source in sources:
                if room > 0 and source.asked < AHEAD:
                    room -= 1
                    self._ask(source, Wanted(each_max, BATCH_BYTES, wait_s, self._number, trainer=self._wish.trainer))
        mine = self._sources.values()
        if any(source.asked for source in mine):
            return
        # A task may give its last batch, and the dispatcher drop it as finished, before it was asked once more and could say so itself.
        over = mine and all(source.ended or source.gone for source in mine)
        if self._finished or (self._subset and not self._awaits and over):
            self._end(None)

    def _may_ask(self, source: TaskSource) -> bool:
        return not (source.ended or source.gone or source.pause_s)

    def _ask(self, source: TaskSource, wanted: Wanted) -> None:
        self._held += 1
        source.asked += 1
        source.asked_at = next(self._turns)
        answer: list[Any] = []
        source.answers.append(answer)
        source.at.ask(wanted, partial(self._soon, self._came, source, answer))

    def _came(self, source: TaskSource, answer: list[Any], *told: Any) -> None:
        answer.append(told)
        while source.answers and source.answers[0]:
            self._answered(source, *source.answers.popleft()[0])

    def _answered(self, source: TaskSource, kind: int, value: Any, error: OpError | None) -> None:
        source.asked -= 1
        if kind == SOME:
            source.pause_s = 0.0
            self._put(value)
        else:
            self._held -= 1
            if kind == END:
                source.ended = True
            elif error is not None and error.error_code in RETRIABLE:
                source.pause_s = min(PAUSE_S_MAX, max(FIRST_PAUSE_S, source.pause_s * PAUSE_GROWS))
                self._loop.set_timer(source, self._loop.now() + source.pause_s, partial(self._again, source))
            elif error is not None:
                self._held += 1
                self._put(_from_worker(source.address, error))
        self._top_up()

    def _begin(self) -> None:
        """Somebody wants elements. Before that nothing is asked for: what nobody reads is nobody's loss."""
        self._begun = True
        self._top_up()

    def _taken(self) -> None:
        """The consumer has taken a batch or an error."""
        self._held -= 1
        self._top_up()

    def _again(self, source: TaskSource) -> None:
        source.pause_s = 0.0
        self._top_up()

    def _put(self, value: Any) -> None:
        with self._ready:
            self._queue.append(value)
            self._ready.notify_all()


_readers: weakref.WeakSet[Reader] = weakref.WeakSet()


def _forked() -> None:
    for reader in list(_readers):
        reader.forked()


os.register_at_fork(after_in_child=_forked)


def _from_worker(address: str, error: OpError) -> OpError:
    """A permanent error of a task, as tf.data service words it."""
    text = f"Failed to get element from worker {address}: Failed to get an element, with a nonretryable error: "
    made = from_code(error.error_code, text + error.message)
    made.__cause__ = error.__cause__
    return made
