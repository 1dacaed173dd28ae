"""The lines that functions write, for programs that follow them (`zmqdist logs -f`, `logs=True`).

The workers keep their lines. While a program follows, the dispatcher asks them for more every
RENEW_S; they send the lines of the next FOLLOW_S by themselves. The dispatcher has one stream for
all programs; its rows have numbers of their own.

Promises, checked by tests/scheduling/full/test_logs.py
    a program that follows gets each line once, in the order of its worker; lines that a worker or
    the stream has dropped are counted by a row in their place
    nothing is sent and nothing is kept for programs that do not ask any more
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final

from zmqdist import clock as time
from zmqdist import errors
from zmqdist.limits import LOG_LINE_BYTES_MAX, LOG_LINES_KEPT, NAME_CHARS_MAX
from zmqdist.messages import LogLine, LogLines, Message
from zmqdist.rpc.service import PendingCall, RpcService
from zmqdist.scheduling.dispatcher.membership_and_leases import Member
from zmqdist.scheduling.dispatcher.questions import Answers, Questions
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Peer, Router

FOLLOW_S: Final = 15.0
RENEW_S: Final = 3.0
"""Seconds after which the workers are asked again, if there is a call."""
WAIT_S_MAX: Final = 10.0
ROWS_MAX: Final = 2000
"""Rows of one reply."""

KEPT: Final = -1
FROM_NOW: Final = -2
ALL: Final = 2**62
"""More than the number of any line."""

Row = tuple[int, str, float, str, int, str]
"""The number of the row, the worker, seconds since 1970, the process, the stream (1 or 2), text."""


class LogStream:
    """The stream of one dispatcher, and the RPC method `logs`. All code runs in the loop."""

    def __init__(
        self, loop: Loop, router: Router, service: RpcService, questions: Questions
    ) -> None:
        self._loop, self._questions = loop, questions
        self._rows: deque[Row] = deque(maxlen=LOG_LINES_KEPT)
        self._last = 0
        self._taken: dict[int, int] = {}
        """The number of the last line of each worker, by the worker's incarnation; ALL of one whose
        lines count from its answer on."""
        self._peers: dict[Any, Member] = {}
        """The workers that were asked and are connected."""
        self._asked_at = float("-inf")
        self._waiting: dict[PendingCall, Callable[[], bool]] = {}
        """The calls that wait for rows, each with the function that replies if there are any."""
        router.on(LogLines, self._received, frozenset({"worker"}))
        router.on_gone.append(self._gone)
        service.register_later("logs", self._logs)

    def _logs(self, call: PendingCall, worker: str, since: int, wait_s: float) -> None:
        """Serve the RPC method `logs`: rows after the one with the number `since`, of one worker or
        with "" of all. Without such rows the reply comes after `wait_s`. With FROM_NOW the reply
        has no rows, and with KEPT those that the workers have kept.

        The reply has `rows`, `next` for the next call, the number of `connected` workers, and an
        error text for each worker that has `failed` to answer.
        """
        if since == KEPT:
            self._reply_kept(call, worker)
            return
        self._follow(ALL if since == FROM_NOW else 0)

        def reply(*, is_last: bool = False) -> bool:
            rows = [] if since == FROM_NOW else self._after(since, worker)
            if rows or is_last:
                self._reply(call, rows, rows[-1][0] if rows else self._last)
            return bool(rows)

        def give_up() -> None:
            if self._waiting.pop(call, None) is not None:
                reply(is_last=True)

        replies_now = since == FROM_NOW or wait_s <= 0
        if not reply(is_last=replies_now) and not replies_now:
            self._waiting[call] = reply
            call.on_dropped(lambda: self._forget(call))
            self._loop.set_timer(call, self._loop.now() + min(wait_s, WAIT_S_MAX), give_up)

    def _reply_kept(self, call: PendingCall, worker: str) -> None:
        members = [self._questions.member(worker)] if worker else self._questions.members

        def finish(answers: Answers) -> None:
            failed = {
                name: answer.message
                for name, answer in answers.items()
                if isinstance(answer, errors.OpError)
            }
            rows = [
                _row(0, name, line)
                for name, answer in answers.items()
                if name not in failed
                for line in answer[1]
            ]
            rows.sort(key=lambda row: row[2])
            self._reply(call, rows[-ROWS_MAX:], self._last, failed)

        self._questions.ask(members, "logs", finish)

    def _reply(
        self, call: PendingCall, rows: list[Row], number: int, failed: dict[str, str] | None = None
    ) -> None:
        answer = {"rows": rows, "next": number, "connected": len(self._peers)}
        call.reply({**answer, "failed": failed or {}})

    def _after(self, since: int, worker: str) -> list[Row]:
        begin = since + len(self._rows) - self._last
        rows = [*islice(self._rows, max(begin, 0), None)]
        if begin < 0:
            rows.insert(0, (since + 1, "", time.time(), "", 2, _left_out(-begin)))
        return [row for row in rows if not worker or row[1] in (worker, "")][:ROWS_MAX]

    def _follow(self, after: int) -> None:
        """Have the workers send their lines for FOLLOW_S from now. If no program has followed
        them before, the first are those after this number."""
        now = self._loop.now()
        if now < self._asked_at + RENEW_S:
            return
        if now > self._asked_at + FOLLOW_S:  # no program has followed, so the stream begins anew
            self._rows.clear()
            self._taken = {member.incarnation: after for member in self._questions.members}
        self._asked_at = now
        for member in self._questions.members:
            self._ask(member)

    def members_changed(self) -> None:
        """Follow the workers that have joined."""
        if self._loop.now() < self._asked_at + FOLLOW_S:
            for member in self._questions.members:
                if member.incarnation not in self._taken:
                    self._ask(member)

    def _ask(self, member: Member) -> None:
        after = self._taken.setdefault(member.incarnation, 0)
        peer: Any = member.peer
        if peer is not None:
            self._peers[peer] = member

        def finish(answers: Answers) -> None:
            answer = answers[member.name]
            if not isinstance(answer, errors.OpError) and member.incarnation in self._taken:
                last, lines = answer
                if self._taken[member.incarnation] == ALL:
                    self._taken[member.incarnation] = last
                self._take(member, lines)

        self._questions.ask([member], "logs", finish, seconds=FOLLOW_S, after=after)

    def _received(self, peer: Peer, message: Message, _frames: object) -> None:
        assert isinstance(message, LogLines)
        member = self._peers.get(peer)
        if member is not None and member.incarnation in self._taken:
            self._take(member, message.lines)

    def _take(self, member: Member, lines: Iterable[LogLine]) -> None:
        taken = self._taken[member.incarnation]
        for line in lines:
            if line.number <= taken:
                continue
            if taken and line.number > taken + 1:
                text = _left_out(line.number - taken - 1)
                self._append(member.name, LogLine(0, line.at, "", 2, text))
            taken = line.number
            self._append(member.name, line)
        self._taken[member.incarnation] = taken
        for call, reply in list(self._waiting.items()):
            if reply():
                self._forget(call)

    def _append(self, worker: str, line: LogLine) -> None:
        self._last += 1
        self._rows.append(_row(self._last, worker, line))

    def _forget(self, call: PendingCall) -> None:
        self._waiting.pop(call, None)
        self._loop.set_timer(call, None, int)

    def _gone(self, peer: Peer) -> None:
        member = self._peers.pop(peer, None)
        if member is not None and member not in self._questions.members:
            self._taken.pop(member.incarnation, None)


def _row(number: int, worker: str, line: LogLine) -> Row:
    text, process = line.text[:LOG_LINE_BYTES_MAX], line.process[:NAME_CHARS_MAX]
    return (number, worker, line.at, process, line.stream, text)


def _left_out(count: int) -> str:
    return f"... {count:,} lines left out"
