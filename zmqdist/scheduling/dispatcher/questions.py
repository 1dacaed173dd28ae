"""Questions about the inside of workers, which the dispatcher passes to them: stacks and profiles
(scheduling/worker/inside.py answers).

Promises, checked by tests/scheduling/full/test_stacks.py
    Q1  each question ends: by the worker's answer, its loss, or ANSWER_S of silence beyond the
        seconds that it takes, with an error that names the worker
    Q2  an answer counts only from the connection that was asked
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec

from zmqdist import errors
from zmqdist.limits import ANSWER_S, PROFILE_S_MAX
from zmqdist.messages import AskWorker, LogLine, Message, WorkerAnswer
from zmqdist.rpc.service import PendingCall, RpcService
from zmqdist.scheduling.dispatcher.drain_report import not_registered
from zmqdist.scheduling.dispatcher.membership_and_leases import Member, Membership
from zmqdist.transport.loop import Loop
from zmqdist.transport.router import Peer, Router

ANSWERS: Final[dict[str, msgspec.msgpack.Decoder[Any]]] = {
    "stack": msgspec.msgpack.Decoder(dict[str, str]),
    "profile": msgspec.msgpack.Decoder(dict[str, float]),
    "logs": msgspec.msgpack.Decoder(tuple[int, list[LogLine]]),
}
"""How the answer to each kind of question is decoded."""

Answers = dict[str, Any]
"""The answer of each worker by its name, or an OpError."""


@dataclass(eq=False)
class _Inquiry:
    """A question to several workers, and the answers so far."""

    kind: str
    then: Callable[[Answers], None]
    awaited: set[int] = field(default_factory=set)
    answers: Answers = field(default_factory=dict)


class Questions:
    """The questions of one dispatcher, and the RPC methods for them. All code runs in the loop."""

    def __init__(
        self, loop: Loop, router: Router, service: RpcService, membership: Membership
    ) -> None:
        self._loop, self._router, self._members = loop, router, membership.members
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[Any, str, _Inquiry]] = {}
        router.on(WorkerAnswer, self._answered, frozenset({"worker"}))
        router.on_gone.append(self._gone)
        service.register_later("stack", self._stack)
        service.register_later("profile", self._profile)

    def _stack(self, call: PendingCall, worker: str) -> None:
        """Serve the RPC method `stack`: {process: text} of one worker."""

        def finish(answers: Answers) -> None:
            (answer,) = answers.values()
            if isinstance(answer, errors.OpError):
                call.fail(answer)
            else:
                call.reply(answer)

        self.ask([self.member(worker)], "stack", finish)

    def _profile(self, call: PendingCall, worker: str, seconds: float) -> None:
        """Serve the RPC method `profile`: the seconds of each stack, of one worker or with "" of
        all, and an error text for each worker that has failed to answer."""
        if not 0 < seconds <= PROFILE_S_MAX:
            raise errors.InvalidArgumentError(
                f"a profile of {seconds:g} s: wanted more than 0, at most {PROFILE_S_MAX:g} s"
            )

        def finish(answers: Answers) -> None:
            failed = {n: a for n, a in answers.items() if isinstance(a, errors.OpError)}
            if failed and len(failed) == len(answers):
                call.fail(next(iter(failed.values())))
                return
            stacks: dict[str, float] = defaultdict(float)
            for name in answers.keys() - failed.keys():
                for stack, stack_s in answers[name].items():
                    stacks[stack] += stack_s
            call.reply(
                {"stacks": dict(stacks), "failed": {n: a.message for n, a in failed.items()}}
            )

        members = [self.member(worker)] if worker else self.members
        self.ask(members, "profile", finish, seconds=seconds, takes_s=seconds)

    @property
    def members(self) -> list[Member]:
        """The registered workers."""
        return [*self._members.values()]

    def member(self, worker: str) -> Member:
        """Return the member with this name, such as "worker:0". Raises NotFoundError."""
        for member in self._members.values():
            if member.name == worker:
                return member
        job, _, index = worker.rpartition(":")
        raise not_registered(job, int(index) if index.isdigit() else -1, self._members)

    def ask(
        self,
        members: list[Member],
        kind: str,
        then: Callable[[Answers], None],
        seconds: float = 0.0,
        after: int = 0,
        takes_s: float = 0.0,
    ) -> None:
        """Ask each of these workers, and call `then` once with all answers and errors. `seconds`
        and `after` are those of AskWorker; an answer may come only after `takes_s`."""
        inquiry = _Inquiry(kind, then)
        for member in members:
            number = next(self._numbers)
            peer: Any = member.peer
            if peer is None or not self._router.send(peer, AskWorker(number, kind, seconds, after)):
                problem = f"{member.name} is not connected to the dispatcher"
                inquiry.answers[member.name] = errors.UnavailableError(problem)
                continue
            inquiry.awaited.add(number)
            self._pending[number] = (peer, member.name, inquiry)
            silence = f"{member.name} has not answered for {ANSWER_S:g} s: it is suspended or busy"
            self._loop.set_timer(
                (self, number),
                self._loop.now() + takes_s + ANSWER_S,
                partial(self._end, number, errors.UnavailableError(silence)),
            )
        if not inquiry.awaited:
            self._loop.call_soon(then, inquiry.answers)

    def _answered(self, peer: Peer, message: Message, _frames: object) -> None:
        assert isinstance(message, WorkerAnswer)
        worker, name, inquiry = self._pending.get(message.request, (None, "", None))
        if worker is not peer or inquiry is None:
            return
        answer: Any = None
        problem = message.error[:TEXT_CHARS_MAX]
        if not problem:
            try:
                answer = ANSWERS[inquiry.kind].decode(message.payload)
            except msgspec.DecodeError as error:
                problem = f"damaged answer: {error}"
        self._end(
            message.request, errors.UnavailableError(f"{name}: {problem}") if problem else answer
        )

    def _gone(self, peer: Peer) -> None:
        for number, (worker, name, _) in list(self._pending.items()):
            if worker is peer:
                self._end(number, errors.UnavailableError(f"{name} was lost before it answered"))

    def _end(self, number: int, answer: Any) -> None:
        _, name, inquiry = self._pending.pop(number)
        self._loop.set_timer((self, number), None, int)
        inquiry.answers[name] = answer
        inquiry.awaited.discard(number)
        if not inquiry.awaited:
            inquiry.then(inquiry.answers)


TEXT_CHARS_MAX: Final = 500
