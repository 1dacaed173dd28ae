"""The machines of a keeper (tasks with their barriers, and keys), which read their events from the
lines of a transcript, and write their replies as lines.

`cluster 3` makes a cluster of the tasks w0 to w2 (worker:0 to worker:2) that have registered, and
`cluster chief:0 w0` one of these tasks; `down` leaves out the registrations, `open` the list of
tasks, and the other words are options of the config. `keys` makes an empty store, with its bounds.
`at` lets time pass, with a tick at each deadline. `states` writes the state of each task, `show` the
named properties. Any other line is one request or one event.

A request is the ticket of its reply, and a repeated one gets a number. A task calls as the
incarnation that has registered last, or as the one after #.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from math import inf
from typing import Any, Final

from zmqdist import errors
from zmqdist.coordination.barriers_machine import RoundOutcome
from zmqdist.coordination.keys_machine import Keys
from zmqdist.coordination.machine import Coordination, CoordinationConfig, TaskError, TaskWelcome
from zmqdist.coordination.replies import Effect, ReplyValue, Task, task_name

CODES: Final = {
    getattr(errors, name): name
    for name in (
        *("OK", "ABORTED", "ALREADY_EXISTS", "CANCELLED", "DEADLINE_EXCEEDED"),
        *("FAILED_PRECONDITION", "INTERNAL", "INVALID_ARGUMENT", "NOT_FOUND"),
        *("RESOURCE_EXHAUSTED", "UNAVAILABLE"),
    )
}
OPTIONS: Final = {
    "shutdown": "shutdown_timeout_s",
    "register": "register_timeout_s",
    "heartbeat": "heartbeat_timeout_s",
}


def short(task: Task) -> str:
    return task_name(task).replace("worker:", "w")


def task_of(text: str) -> Task:
    job, _, index = text.rpartition(":")
    return (job, int(index)) if job else ("worker", int(text.removeprefix("w")))


class Script:
    """The machines of one transcript, the time, and the requests without a reply."""

    def __init__(self) -> None:
        self.now = 0.0
        self.keys = Keys()
        self.machine = Coordination((), CoordinationConfig())
        self.lives: dict[Task, int] = {}
        self.requests: Counter[str] = Counter()
        self.open: set[str] = set()

    # -- lines of input ----------------------------------------------------------------------------

    def answer(self, line: str) -> Iterator[str]:
        """Yield the lines that follow from one line of input."""
        command, *words = shlex.split(line)
        options = dict(word.partition("=")[::2] for word in words if "=" in word)
        words = [word for word in words if "=" not in word]
        match command:
            case "cluster":
                self.new_cluster(words, options)
            case "keys":
                bounds = {name: int(bound) for name, bound in options.items()}
                self.keys = Keys(**bounds)
            case "at":
                yield from self.advance(float(words[0]))
            case "states":
                yield from (
                    f"{short(record.task)} {record.state}"
                    + f" {CODES[record.code]} {record.message}" * bool(record.code)
                    for record in self.machine.states(words or None)
                )
            case "show":
                yield " ".join(f"{name}={self.shown(name)}" for name in words)
            case "drop":
                ticket = " ".join(words)
                self.open.remove(ticket)
                self.keys.dropped(ticket)
                yield from self.lines(self.machine.dropped(ticket))
            case _:
                ticket = self.new_ticket(command, words)
                yield from self.lines(self.effects(ticket, command, words, options))

    def new_cluster(self, words: list[str], options: dict[str, str]) -> None:
        flags = {word for word in words if word in ("down", "open", "returns", "together")}
        names = [word for word in words if word not in flags]
        tasks = [task_of(name) for name in names]
        if names and names[0].isdecimal():
            tasks = [("worker", index) for index in range(int(names[0]))]
        config: dict[str, Any] = {
            "heartbeat_timeout_s": 2.0,
            "reconnect_grace_s": 0.5,
            "recoverable_jobs": frozenset(filter(None, options.pop("recoverable", "").split(","))),
            "new_incarnation_may_return": "returns" in flags,
            "register_together": "together" in flags,
        }
        config |= {OPTIONS[name]: float(value) for name, value in options.items()}
        self.now = 0.0
        self.lives.clear()
        self.requests.clear()
        self.open.clear()
        self.machine = Coordination(
            None if "open" in flags else tasks, CoordinationConfig(**config)
        )
        if not flags & {"down", "open"}:
            for task in tasks:
                list(self.answer(f"register {short(task)}"))

    def new_ticket(self, command: str, words: list[str]) -> str:
        ticket = " ".join([command, *words[: 2 if command == "barrier" else 1]])
        self.requests[ticket] += 1
        if self.requests[ticket] > 1:
            ticket += f" ({self.requests[ticket]})"
        self.open.add(ticket)
        return ticket

    def advance(self, end: float) -> Iterator[str]:
        while (at := min(self.machine.deadline, self.keys.deadline)) <= end:
            self.now = max(self.now, at)
            yield from self.lines(self.machine.ticked(self.now) + self.keys.ticked(self.now))
            assert min(self.machine.deadline, self.keys.deadline) > self.now, "the same deadline"
        self.now = end

    def shown(self, name: str) -> object:
        command, _, argument = name.partition(":")
        match command:
            case "waiting":
                return self.machine.waiting + self.keys.waiting
            case "missing":
                return ",".join(map(short, self.machine.missing(argument))) or "none"
            case "keys":
                return len(self.keys)
        return self.keys.nbytes

    def effects(
        self, ticket: str, command: str, words: list[str], options: dict[str, str]
    ) -> list[Effect]:
        machine, keys, now = self.machine, self.keys, self.now
        due = now + float(options.get("timeout", inf))
        match command:
            case "stop":
                self.open.discard(ticket)
                return machine.stopped("the service stops", now) + keys.stopped("the service stops")
            case "put":
                nbytes = int(options.get("bytes", 10))
                return keys.put(ticket, words[0], words[1], nbytes, "overwrite" in words)
            case "get":
                return keys.get(ticket, words[0], due)
            case "try-get":
                return keys.try_get(ticket, words[0])
            case "below":
                return keys.below(ticket, words[0])
            case "delete":
                return keys.delete(ticket, words[0])
            case "increment":
                return keys.increment(ticket, words[0], int(words[1]), 8)
        name, _, incarnation = words[0].partition("#")
        task = task_of(name)
        life = int(incarnation or self.lives.get(task, 100 + task[1]))
        counter = int(options.get("round", 0))
        barrier = words[1] if len(words) > 1 else "b"
        tasks = [task_of(text) for text in options.get("tasks", "").split(",") if text] or None
        match command:
            case "register":
                effects = machine.registered(ticket, task, life, now)
                if machine.is_registered(task, life):
                    self.lives[task] = life
                return effects
            case "beat":
                return machine.beaten(ticket, task, life, now)
            case "poll":
                until = float(options.get("until", inf))
                return machine.polled(ticket, task, life, int(options.get("after", 0)), until, now)
            case "report":
                code = getattr(errors, words[1])
                return machine.reported(ticket, task, life, code, " ".join(words[2:]), now)
            case "reset":
                return machine.reset(ticket, task, now)
            case "leave":
                return machine.left(ticket, task, life, "alone" not in words, now)
            case "barrier":
                return machine.barrier(ticket, task, life, barrier, counter, tasks, due, now)
            case "cancel":
                return machine.barrier_cancelled(ticket, barrier, counter, task, now)
            case "wait-for-all":
                return machine.waited_for_all(ticket, task, life, words[1:], due, now)
            case "alive":
                return machine.alive_requested(ticket, task, life, tasks, now)
        self.open.discard(ticket)
        match command:
            case "away":
                return machine.away(task, life, now)
            case "lost":
                return machine.lost(task, life, " ".join(words[1:]), now)
        raise ValueError(f"no such input: {command}")

    # -- lines of output ---------------------------------------------------------------------------

    def lines(self, effects: list[Effect]) -> Iterator[str]:
        for effect in effects:
            assert effect.ticket in self.open, f"a second reply to {effect.ticket}"
            self.open.remove(effect.ticket)  # type: ignore[arg-type]
            if not isinstance(effect, ReplyValue):
                yield f"{effect.ticket}: {CODES[effect.code]} {effect.message}"
            else:
                yield f"{effect.ticket}: {value_text(effect.value)}"


def value_text(value: Any) -> str:
    match value:
        case None:
            return "OK"
        case TaskWelcome(count):
            return f"welcome, {count} errors so far"
        case RoundOutcome(code, message, counter):
            return f"{CODES[code]} in round {counter}" + f" {message}" * bool(message)
        case [*items] if items and isinstance(items[0], TaskError):
            return "; ".join(
                f"error {error.number} {short(error.task)} {CODES[error.code]} {error.message}"
                for error in items
            )
        case [*items]:
            texts = (short(item) if isinstance(item, tuple) else item for item in items)
            return f"[{', '.join(texts)}]"
        case dict():
            return "{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}"
    return str(value)
