"""A coordinator's machine that reads its events from the lines of a transcript, and writes its
effects as lines.

`machine` makes a coordinator without a dispatcher, `ready` one with function 7, a dispatcher and a
worker; the words after it are its options. `at` and `tick` set the time in seconds, which begins
at 0. `retry 1/0` is the decision of the program after an error, which a work item with `backoff=` (its
first wait in seconds; 5 at most) asks for. `states` writes the number, state and attempt of each record, `show` the named properties. Any
other line is one event of the program, or one message of the dispatcher.

An attempt is written as work/attempt. Attempts of a later submission, retry or recomputation begin
with its number: 1/2:3 is the third attempt after the first of submission 2 of work 1. The payload
of a result is its attempt in this form, so that a line shows which attempt a value came from.

Actors have numbers. `call` schedules calls, of which `bytes=` is the size of the arguments. `changed`
is what the dispatcher says of an actor, `outcomes` are results of its calls.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import Any, Final

from tests import transcripts
from tests.transcripts import FUNCTION, number_and_attempt
from zmqdist.events import Heard, Send, Ticked
from zmqdist.messages import (
    ITEM,
    KEPT,
    SUBMISSION_SHIFT,
    ActorChanged,
    ActorFound,
    ActorKnown,
    ActorsOwned,
    ActorSpec,
    Begun,
    CancelActorCalls,
    CancelWork,
    CoordinatorRegistered,
    CreateActor,
    Define,
    DropActor,
    EndRound,
    FindActor,
    Forget,
    Members,
    Message,
    QueueProgress,
    RegisterCoordinator,
    ResultReceived,
    Results,
    RoundEnded,
    StartsLost,
    StreamCredit,
    WatchActor,
    Workers,
)
from zmqdist.scheduling.coordinator.affinity import MembersChanged
from zmqdist.scheduling.coordinator.coordinator_events import (
    ActorConnected,
    ActorDisconnected,
    ActorKilled,
    ActorMade,
    ActorReported,
    ActorSearched,
    ActorSought,
    ActorWatched,
    BulkArrived,
    BulkUnreachable,
    CallsEnded,
    CancelRequested,
    ConnectActor,
    CoordinatorRefused,
    DecideRetry,
    DisconnectActor,
    DispatcherDown,
    DispatcherUp,
    Effect,
    EndRoundRequested,
    Event,
    Fetch,
    ForgetRequested,
    Free,
    FunctionsDefined,
    FunctionsDropped,
    HandlesDropped,
    KeepInput,
    KeptDropped,
    PackingFailed,
    Recomputed,
    Resolve,
    RetryDecided,
    RoomMade,
    RoundRefused,
    RoundSettled,
    Scheduled,
    SendCalls,
    SendToActor,
    SessionRequested,
    StreamTaken,
    SubmitWork,
    TakeBackRequested,
    ValueLost,
    WorkBegun,
)
from zmqdist.scheduling.coordinator.machine import DISPATCHER, CoordinatorMachine
from zmqdist.scheduling.coordinator.options import PLAIN, Retries, WorkOptions
from zmqdist.scheduling.coordinator.work import (
    ACTOR_LOST,
    ATTEMPTED,
    AWAITING_RESULT,
    IN_PROGRAM,
    INPUT_FAILED,
    LOST,
    TIMED_OUT,
    TRANSITIONS,
    UNAVAILABLE,
    UNFINISHED,
    CalledActor,
    Extra,
    KeptAt,
    MethodCall,
    State,
    Work,
)
from zmqdist.scheduling.shared.actors import ActorState

KINDS: Final = {
    **transcripts.KINDS,
    "lost": LOST,
    "unavailable": UNAVAILABLE,
    "input-failed": INPUT_FAILED,
    "timed-out": TIMED_OUT,
    "actor-lost": ACTOR_LOST,
    "item": ITEM,
}
KIND_NAMES: Final = {kind: name for name, kind in KINDS.items()}


ACTOR_EVENTS: Final = frozenset(
    {"make", "watch", "handles-dropped", "kill", "connected", "disconnected", "outcomes"}
)

STATE_SLOT: Any = vars(Work)["state"]


class WatchedWork(Work):
    """A work item of which each change of state is checked, even where the machine does not call
    `move`."""

    __slots__ = ()

    @property
    def state(self) -> State:
        state: State = STATE_SLOT.__get__(self)
        return state

    @state.setter
    def state(self, state: State) -> None:
        if state is not State.NEW:
            assert state in TRANSITIONS[self.state], f"{self!r} must not become {state.name}"
        STATE_SLOT.__set__(self, state)


def attempt_text(attempt: int) -> str:
    submission, start = divmod(attempt, 1 << SUBMISSION_SHIFT)
    return f"{submission}:{start}" if submission else f"{start}"


def texts_of(items: Iterable[tuple[int, int]]) -> str:
    return " ".join(f"{number}/{attempt_text(attempt)}" for number, attempt in items)


class Script:
    """The machine of one transcript, its work items and the time."""

    def __init__(self) -> None:
        self.works: dict[int, Work] = {}
        self.actors: dict[int, CalledActor] = {}
        self.now = 0.0
        self.machine = self.new_machine({})

    def new_machine(self, options: dict[str, str]) -> CoordinatorMachine:
        self.works.clear()
        self.actors.clear()
        self.now = 0.0
        return CoordinatorMachine(
            coordinator=5,
            queue_max=int(options.get("queue", 1000)),
            cancel_grace_s=2.0,
            lost_limit_s=60.0,
            now=0.0,
            decode_loss=lambda payload: (int(payload), b"input %d is lost" % int(payload)),
            recomputations_max=int(options.get("recomputations", 1)),
            recovery_limit_s=20.0 if "watch-members" in options else None,
            rounds="no-rounds" not in options,
            starts="report-starts" in options,
            width=int(options["width"]) if "width" in options else None,
            parent=int(options.get("parent", 0)),
        )

    # -- lines of input ----------------------------------------------------------------------------

    def answer(self, line: str) -> Iterator[str]:
        """Yield the lines that follow from one line of input."""
        command, _, rest = line.partition(" ")
        groups = [shlex.split(group) for group in rest.split(", ")] if rest else []
        words = groups[0] if groups else []
        match command:
            case "machine":
                self.machine = self.new_machine(options_of(words))
            case "ready":
                self.machine = self.new_machine(options_of(words))
                for event in ("define 7", "up", "registered workers=1"):
                    list(self.answer(event))
            case "at":
                self.now = float(words[0])
            case "states":
                for work in self.works.values():
                    if not words or str(work.number) in words:
                        yield f"{work.number} {work.state.name} {attempt_text(work.attempt)}"
            case "actors":
                for actor in self.actors.values():
                    words = [f"{actor.number} {actor.state.name} incarnation={actor.incarnation}"]
                    words += ["connected"] if actor.is_connected else []
                    words += [f"bytes={actor.calling_bytes}"] if actor.calling_bytes else []
                    words += (
                        [f"calling={','.join(map(str, actor.calling))}"] if actor.calling else []
                    )
                    yield " ".join(words)
            case "show":
                yield " ".join(f"{name}={self.shown(name)}" for name in words)
            case _:
                if command == "tick" and words:
                    self.now = float(words[0])
                for effect in self.machine.handle(self.event(command, groups), self.now):
                    yield from self.effect_lines(effect)
                self.check()

    def shown(self, name: str) -> object:
        command, _, argument = name.partition(":")
        match command:
            case "wants":
                return self.machine.wants(*number_and_attempt(argument))
            case "lost_starts":
                return self.machine.lost_starts(int(argument))
            case "members":
                affinity = self.machine.affinity
                return ",".join(affinity.members) or "none" if affinity.members_known else "unknown"
        value = getattr(self.machine, command)
        return f"{value:g}" if isinstance(value, float) else value

    def event(self, command: str, groups: list[list[str]]) -> Event:
        words = groups[0] if groups else []
        numbers = [int(word) for word in words if word.isdecimal()]
        match command:
            case "define":
                return FunctionsDefined([(number, b"f") for number in numbers])
            case "drop":
                return FunctionsDropped(numbers)
            case "forget":
                return ForgetRequested(numbers)
            case "schedule":
                works = [work for group in groups for work in self.new_works(group)]
                return Scheduled(sorted(works, key=lambda work: work.number))
            case "packing-failed":
                return PackingFailed(self.new_works(words)[0], b"cannot be packed")
            case "up":
                return DispatcherUp()
            case "session":
                return SessionRequested(numbers[0])
            case "down":
                return DispatcherDown()
            case "refused":
                return CoordinatorRefused(" ".join(words).encode())
            case "cancel":
                return CancelRequested(numbers)
            case "take-back":
                return TakeBackRequested(numbers)
            case "end-round":
                return EndRoundRequested(numbers[0] if numbers else self.machine.round)
            case "arrived":
                return BulkArrived(*number_and_attempt(words[0]), words[0].encode())
            case "unreachable":
                return BulkUnreachable(*number_and_attempt(words[0]), "no route")
            case "kept-dropped":
                return KeptDropped(numbers)
            case "taken":
                call = self.works[numbers[0]]
                assert isinstance(call, MethodCall)
                return StreamTaken(call, numbers[1])
            case "seek":
                return ActorSought(numbers[0], "".join(words[1:]))
            case "value-lost":
                number, attempt = number_and_attempt(words[0])
                return ValueLost(self.works[number], attempt)
            case "retry" | "no-retry":
                work = self.works[number_and_attempt(words[0])[0]]
                asked = DecideRetry(work, number_and_attempt(words[0])[1], words[0].encode())
                draw = float(options_of(words).get("draw", 0.5))
                return RetryDecided(asked, command == "retry", draw)
            case "tick":
                return Ticked()
            case "call":
                calls = [call for group in groups for call in self.new_calls(group)]
                return Scheduled(sorted(calls, key=lambda call: call.number))
            case _ if command in ACTOR_EVENTS:
                return self.actor_event(command, groups)
        return Heard(DISPATCHER, self.message(command, groups))

    def actor_event(self, command: str, groups: list[list[str]]) -> Event:
        (first, *words), *others = groups
        options, number = options_of(words), int(first)
        actor = self.actors.get(number)
        if actor is None:
            actor = self.actors[number] = CalledActor(number, "A")
        match command:
            case "make":
                actor.spec = ActorSpec(number, "A", b"", 0 if "detached" in options else 5)
                return ActorMade(actor)
            case "watch":
                return ActorWatched(actor)
            case "handles-dropped":
                return HandlesDropped([int(word) for word in (first, *words)])
            case "kill":
                return ActorKilled(number, " ".join(words))
            case "connected":
                return ActorConnected(actor)
            case "disconnected":
                return ActorDisconnected(actor, " ".join(words))
            case "outcomes":
                return CallsEnded(actor, [result(*group) for group in others])
        raise ValueError(f"no such input: {command}")

    def new_calls(self, words: list[str]) -> list[MethodCall]:
        options = options_of(words)
        actor = self.actors[int(options["actor"])]
        ends = [word.split("..") for word in words if word[0].isdecimal()]
        numbers = [
            n for first, *last in ends for n in range(int(first), int((last or [first])[0]) + 1)
        ]
        calls = [
            MethodCall(n, actor, "m", "A.m", b"x" * int(options.get("bytes", 0))) for n in numbers
        ]
        for call in calls:
            if options.keys() & {"until", "inputs"}:
                call.extra = Extra(
                    WorkOptions(detached=True),
                    until=float(options["until"]) if "until" in options else None,
                    inputs=[self.works[int(n)] for n in options.get("inputs", "").split(",") if n],
                )
            if "stream" in options:
                call.items = SimpleQueue()
            self.works[call.number] = call
        return calls

    def message(self, command: str, groups: list[list[str]]) -> Message:
        words = groups[0] if groups else []
        options = options_of(words)
        match command:
            case "registered":
                return CoordinatorRegistered(3, int(options["workers"]))
            case "results":
                return Results([result(*group) for group in groups])
            case "starts-lost":
                return StartsLost([lost_start(*group) for group in groups])
            case "begun":
                return Begun([number_and_attempt(word) for word in words])
            case "progress":
                return QueueProgress(int(words[0]))
            case "workers":
                return Workers(int(words[0]))
            case "round-ended":
                return RoundEnded(int(words[0]) if words else self.machine.wire_round)
            case "changed":
                return ActorChanged(
                    int(words[0]),
                    ActorState[words[1].upper()],
                    int(options.get("incarnation", 0)),
                    int(options.get("left", 0)),
                    options.get("at", ""),
                    reason=options.get("reason", ""),
                    error=options.get("error", "").encode(),
                )
            case "found":
                return ActorFound(int(words[0]), int(options.get("actor", 0)))
            case "members":
                members = [re.fullmatch(r"([+-])(.*?)(?:#(\d+))?(?:=(.*))?", w) for w in words]
                left = [m for m in members if m and m[1] == "-"]
                return Members(
                    [(m[2], int(m[3] or 1), 100, "host", 1) for m in members if m and m[1] == "+"],
                    [(m[2], int(m[3] or 1), m[4] or "killed") for m in left],
                )
        raise ValueError(f"no such input: {command}")

    def new_works(self, words: list[str]) -> list[WatchedWork]:
        options = options_of(words)
        numbers = [int(word) for word in words if word.isdecimal()]
        works = [WatchedWork(n, int(options.get("fn", FUNCTION)), "f", b"") for n in numbers]
        for work in works:
            if options.keys() - {"fn"}:
                work_options = WorkOptions(
                    options.get("worker", ""),
                    int(options.get("priority", 0)),
                    "detached" in options,
                )
                work.extra = Extra(
                    PLAIN if work_options == PLAIN else work_options,
                    keep="keep" in options,
                    retries=int(options.get("retries", 0)),
                    until=float(options["until"]) if "until" in options else None,
                    lineage="lineage" in options,
                    inputs=[self.works[int(n)] for n in options.get("inputs", "").split(",") if n],
                )
                if "backoff" in options:
                    work.extra.policy = Retries(work.extra.retries, float(options["backoff"]), 5.0)
            self.works[work.number] = work
        return works

    # -- lines of output ---------------------------------------------------------------------------

    def effect_lines(self, effect: Effect) -> Iterator[str]:
        match effect:
            case Send(_, message):
                yield message_line(message)
            case SubmitWork():
                assert effect.works
                for submit in effect.messages(lambda work: work.payload):
                    words = [f"submit round={submit.round}"]
                    words += [f"worker={submit.worker}"] if submit.worker else []
                    words += [f"priority={submit.priority}"] if submit.priority else []
                    words += ["detached"] if submit.detached else []
                    for number, attempt, lost, function, _ in submit.items:
                        words.append(texts_of([(number, attempt)]))
                        words += [f"fn={function}"] if function != FUNCTION else []
                        words += [f"lost={lost}"] if lost else []
                    yield " ".join(words)
            case Resolve(items, failures):
                yield "resolve " + "; ".join(
                    self.resolve(work, kind, payload) + " FAILS" * (work in failures)
                    for work, kind, payload in items
                )
                assert {*failures} <= {work for work, _, _ in items}
            case KeepInput(work, payload, dependents):
                numbers = " ".join(str(dependent.number) for dependent in dependents)
                yield f"keep-input {work.number} {payload.decode()} for {numbers}"
            case Recomputed(work):
                yield f"recomputed {work.number}"
            case DecideRetry(work, attempt, _):
                yield f"decide-retry {texts_of([(work.number, attempt)])}"
            case Free(work):
                yield f"free {work.number}"
            case Fetch(work, attempt, _):
                yield f"fetch {texts_of([(work.number, attempt)])}"
            case RoundSettled(number):
                yield f"round-settled {number}"
            case RoundRefused(error, for_good):
                yield f"round-refused {error.decode()}" + " FOR GOOD" * for_good
            case RoomMade():
                yield "room-made"
            case MembersChanged(joined, left):
                words = [f"+{name}#{incarnation}" for name, incarnation, *_ in joined]
                words += [f"-{name}#{incarnation} ({reason})" for name, incarnation, reason in left]
                yield " ".join(["members", *(words or ["none"])])
            case WorkBegun(numbers):
                yield f"begun {' '.join(map(str, numbers))}"
            case ConnectActor(actor):
                yield f"connect {actor.number} at {actor.address}"
            case DisconnectActor(actor):
                yield f"disconnect {actor.number}"
            case SendCalls(actor, calls):
                yield f"to {actor.number}: calls {numbers_text([call.number for call in calls])}"
            case SendToActor(actor, message):
                yield f"to {actor.number}: {message_line(message)}"
            case ActorReported(actor, state, reason):
                yield f"report {actor.number} {state.name}" + f" ({reason})" * bool(reason)
            case ActorSearched(answer):
                yield f"searched {answer.request} {answer.actor or 'none'}"

    def resolve(self, work: Work, kind: int, payload: Any) -> str:
        """Do what the runtime does with a resolved work item, and return what the line says."""
        if work.kind is not None:
            assert work.kind == KEPT, f"{work!r} is resolved twice"
            assert work.outcome.lineage, f"{work!r} is resolved twice"
        again = " AGAIN" * (work.kind is not None)
        work.kind, work.outcome = kind, payload
        if isinstance(payload, KeptAt):
            payload = f"at {attempt_text(payload.attempt)}" + " lineage" * payload.lineage
        elif isinstance(payload, bytes):
            payload = payload.decode()
        elif kind == ACTOR_LOST:
            payload = f"({payload[0]}) {'MAYBE' if payload[1] else 'NOT'} EXECUTED"
        elif kind == LOST:
            payload = ", ".join(
                f"start {attempt_text(attempt)} at {worker}"
                + f" exit={exit_code}" * (exit_code is not None)
                + f" log={log}" * bool(log)
                for worker, attempt, exit_code, log in payload
            )
        return f"{work.number} {KIND_NAMES[kind]}{again} {payload}".rstrip()

    # -- what must be true after each event --------------------------------------------------------

    def check(self) -> None:
        """Check that what the machine counts agrees with the states of its records."""
        machine, works = self.machine, list(self.machine.works.values())
        assert all(self.works[number] is work for number, work in machine.works.items())
        assert machine.unfinished == sum(work.state in UNFINISHED for work in works)
        assert machine.waiting == sum(work.state in IN_PROGRAM for work in works)
        there = [w for w in works if w.state in AWAITING_RESULT or w.state is State.ABANDONED]
        attached = sum(not work.is_detached for work in there)
        if machine.registered:
            assert machine.at_dispatcher == attached
        queued = {work for work in works if work.state is State.QUEUED}
        assert {*machine._unsent} == queued  # reach: lost work never ends
        pins = Counter(
            work.extra.options.worker
            for work in works
            if work.extra and work.extra.options.worker and work.state in ATTEMPTED
        )
        pinned = machine.affinity._pinned  # reach: a leak shows nowhere else
        assert {worker: len(works_of_worker) for worker, works_of_worker in pinned.items()} == pins
        uses = Counter(
            work.function
            for work in works
            if not isinstance(work, MethodCall)
            and work.state is not State.ABANDONED
            and (work.state is not State.KEPT or (work.extra and work.extra.lineage))
        )
        assert +Counter(machine._uses) == uses  # reach: a function that is never forgotten
        for work in self.works.values():
            is_finished = work.state in (State.SUCCEEDED, State.FAILED)
            assert is_finished == (work.number not in machine.works), work
            first = work.state in UNFINISHED and (
                work.extra is None or work.extra.value_attempt < 0
            )
            assert first == (work.kind is None), work
            may_recompute = work.extra is not None and work.extra.lineage
            needs_inputs = not is_finished and (work.state is not State.KEPT or may_recompute)
            if work.extra is not None and not needs_inputs:
                links = (work.extra.inputs, work.extra.used, work.extra.missing)
                assert not any(links), f"{work} holds other records"
        self.check_calls()

    def check_calls(self) -> None:
        called = self.machine.actors
        assert not called.touched, "an actor is not looked at"
        calls = [work for work in self.works.values() if isinstance(work, MethodCall)]
        for actor in self.actors.values():
            own = [call for call in calls if call.actor is actor]
            calling = {call.number: call for call in own if call.state is State.CALLING}
            assert actor.calling == calling
            assert actor.calling_bytes == sum(len(call.payload) for call in calling.values())
            waiting = [call for call in own if call.state in (State.WAITING, State.HELD)]
            assert [call for call in actor.queue if call.state in UNFINISHED] == waiting
            assert not actor.queue or actor.queue[0].state in UNFINISHED
            assert actor.receiving >= sum(call.state is State.RECEIVING for call in own)
            assert actor.is_connected <= bool(actor.address)
            is_needed = actor.holders or actor.queue or actor.calling or actor.receiving
            if actor.number in called.actors:
                is_killed = actor.end_reason and actor.state is not ActorState.ENDED
                may_drop = self.machine.registered and not is_killed
                assert is_needed or not may_drop, f"{actor} is kept"
            else:
                assert not is_needed, f"{actor} is forgotten"
                assert not actor.address


def numbers_text(numbers: list[int]) -> str:
    """Return numbers as words; many of them in a row as the first and the last."""
    if len(numbers) > 4 and numbers == [*range(numbers[0], numbers[-1] + 1)]:
        return f"{numbers[0]}..{numbers[-1]}"
    return " ".join(map(str, numbers))


def options_of(words: Iterable[str]) -> dict[str, str]:
    return {
        name: value for name, _, value in (w.partition("=") for w in words) if name[0].isalpha()
    }


def result(attempt: str, kind: str) -> tuple[int, int, int, bytes]:
    kind, _, lost = kind.partition("=")
    payload = b"" if kind == "cancelled" else (lost or attempt).encode()
    return *number_and_attempt(attempt), KINDS[kind], payload


def lost_start(attempt: str, *words: str) -> tuple[int, int, str, int | None, str, bool]:
    options = options_of(words)
    number, start = number_and_attempt(attempt)
    exit_code = int(options["exit"]) if "exit" in options else None
    worker = options.get("worker", "worker:0")
    return number, start, worker, exit_code, options.get("log", ""), "final" in options


def message_line(message: object) -> str:
    match message:
        case RegisterCoordinator():
            flags = {
                "previous-dispatcher": message.previous_dispatcher,
                "watch-members": message.watch_members,
                "report-starts": message.report_starts,
                f"parent={message.parent}": message.parent > 0,
            }
            words = [f"register round={message.round}", *(f for f in flags if flags[f])]
            return " ".join(words)
        case Define(functions):
            return f"define {' '.join(str(number) for number, _ in functions)}"
        case Forget(_, numbers, everywhere):
            return f"forget {' '.join(map(str, numbers))}" + " everywhere" * everywhere
        case CancelWork(items, _, spares_running):
            return f"cancel {texts_of(items)}" + " unless-begun" * spares_running
        case EndRound(number):
            return f"end-round {number}"
        case ResultReceived(items, keep):
            return f"receipt {texts_of(items)}" + " keep" * keep
        case CreateActor(spec, incarnation, left, may_live):
            words = [f"create {spec.actor} incarnation={incarnation} left={left}"]
            return " ".join(words + ["may-live"] * may_live)
        case ActorsOwned(numbers):
            return f"owned {' '.join(map(str, numbers)) or 'none'}"
        case DropActor():
            return f"drop {message.actor} ({message.reason})"
        case WatchActor(number, stop):
            return f"{'unwatch' if stop else 'watch'} {number}"
        case FindActor(request, name):
            return f"find {request} {name}"
        case ActorKnown(number, incarnation):
            return f"known {number} incarnation={incarnation}"
        case CancelActorCalls(items):
            return f"cancel {texts_of(items)}"
        case StreamCredit(number, count):
            return f"credit {number} {count}"
    raise AssertionError(f"an unknown message: {message}")
