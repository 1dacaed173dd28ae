"""What a worker answers about its inside: the stacks of its slots, actors and data tasks, and the
lines that they write (AskWorker, WorkerAnswer, LogLines).

A question about stacks is answered by a thread of its own, because a process may take seconds to
write its stacks. Slots that are threads are in this process, and their stacks are read here.

Promises, checked by tests/scheduling/full/test_stacks.py and test_logs.py
    each AskWorker gets one WorkerAnswer, also if the answer fails
    at most QUESTIONS_MAX questions about stacks are answered at a time; more are refused
    LogLines are sent only for as long as the dispatcher has asked
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import msgspec

from zmqdist import clock as time
from zmqdist.background import in_background
from zmqdist.errors import OpError, of_the_system
from zmqdist.messages import AskWorker, LogLine, LogLines, Message, WorkerAnswer
from zmqdist.process.bound_children import BoundChildren
from zmqdist.process.stack_dump import parse_stacks, read_stacks
from zmqdist.scheduling.worker.profiles import record
from zmqdist.scheduling.worker.stacks import stack_text, stacks_of_threads
from zmqdist.transport.loop import Loop

QUESTIONS_MAX: Final = 4
"""Each question has a thread. Programs that ask many at once are faulty."""

STACK_S: Final = 2.0
"""Seconds that one process may take to write its stacks."""
STACKS_S: Final = 8.0
"""Seconds for the stacks of all processes, below those after which the dispatcher gives up."""

PUSH_S: Final = 0.1
"""Seconds for which new lines are collected."""
LOG_LINES_PUSHED: Final = 1000
"""Lines of one LogLines: ten times as many a second pass, and the book keeps a second's more."""
LOG_LINES_ANSWERED: Final = 2000


class Inside:
    """Answers the questions to one worker. Call its methods in the loop's thread.

    Args:
      send: sends a message to the dispatcher.
      children: the slots, actors and data tasks; None if slots are threads.
    """

    def __init__(
        self,
        loop: Loop,
        send: Callable[[Message], object],
        children: BoundChildren | None,
    ) -> None:
        self._loop = loop
        self._send = send
        self._children = children
        self._running = 0
        self._sent, self._follow_until = 0, 0.0
        self._pushes = False
        if children is not None:
            children.on_lines = self._note_lines
        self._tree = 0 if children is None else children.zygote_pid
        self._reading = threading.Lock()
        """Held while a process is signalled and read, because a process has one file."""

    def answer(self, question: AskWorker) -> None:
        if question.kind == "logs":
            self._answer_logs(question)
            return
        processes = None if self._children is None else self._children.present
        if self._running >= QUESTIONS_MAX:
            text = f"this worker answers {QUESTIONS_MAX} other questions: ask again later"
            self._send(WorkerAnswer(question.request, b"", text))
            return
        self._running += 1
        in_background("zmqdist-inside", self._find, question, processes)

    def _answer_logs(self, question: AskWorker) -> None:
        lines: list[LogLine] = []
        if self._children is not None:
            book = self._children.book
            after = max(question.after, book.last - LOG_LINES_ANSWERED)
            lines = book.after(after, LOG_LINES_ANSWERED)
            if question.seconds:
                self._follow_until = self._loop.now() + question.seconds
                self._sent = book.last
        payload = msgspec.msgpack.encode((self._sent, lines))
        self._send(WorkerAnswer(question.request, payload))

    def _note_lines(self) -> None:
        if not self._pushes and self._loop.now() < self._follow_until:
            self._pushes = True
            self._loop.set_timer((self, "lines"), self._loop.now() + PUSH_S, self.push)

    def push(self) -> None:
        """Send the lines that followers have not got."""
        self._pushes = False
        if self._children is None or self._loop.now() >= self._follow_until:
            return
        lines = self._children.book.after(self._sent, LOG_LINES_PUSHED)
        # without a connection the lines stay here, and are sent after the next question
        if lines and self._send(LogLines(lines)):
            self._sent = lines[-1].number
            if self._sent < self._children.book.last:
                self._note_lines()

    def _find(self, question: AskWorker, processes: list[tuple[str, int]] | None) -> None:
        payload, problem = b"", ""
        try:
            if question.kind == "profile":
                profile = record(question.seconds, self._present, self._tree, self._reading)
                payload = msgspec.msgpack.encode(profile)
            else:
                payload = msgspec.msgpack.encode(self._stacks(processes))
        except Exception as error:
            named = error if isinstance(error, OpError) else of_the_system(error)
            problem = str(named or repr(error))
        self._loop.call_soon(self._answered, WorkerAnswer(question.request, payload, problem))

    def _answered(self, answer: WorkerAnswer) -> None:
        self._running -= 1
        self._send(answer)

    def _present(self) -> list[tuple[str, int]] | None:
        """Return the processes of the worker, from another thread."""
        children = self._children
        return None if children is None else self._loop.run(lambda: children.present)

    def _stacks(self, processes: list[tuple[str, int]] | None) -> dict[str, str]:
        if processes is None:
            return {name: stack_text([frames]) for name, frames in stacks_of_threads()}
        until, texts = time.monotonic() + STACKS_S, {}
        for name, pid in processes:
            try:
                with self._reading:
                    text = read_stacks(pid, min(STACK_S, max(until - time.monotonic(), 0.0)))
                texts[f"{name}, pid {pid}"] = stack_text(parse_stacks(text)[::-1])
            except OpError as error:
                texts[f"{name}, pid {pid}"] = f"  {error.message}"
        return texts
