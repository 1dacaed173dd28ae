"""The worker's machine as it reads its events from the lines of a transcript.

`machine` makes a worker, `ready` one that is registered under index 3 and whose slots are ready;
their options are `slots`, `threads`, `index`, `delay` and `extra` (nested_slots_max). `at` sets the time in seconds, which begins at 0.
Any other line is one event, or one message of the dispatcher; `> done 1:value` is a message to the
dispatcher. `deadline` writes when the machine must be called next, `state` its slots and its queue.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any, Final

from tests.transcripts import classes, leased_text, line_of, thing_of
from zmqdist.events import Heard, Send, Ticked
from zmqdist.messages import Message, Register
from zmqdist.scheduling.worker import worker_events
from zmqdist.scheduling.worker.machine import DISPATCHER, WorkerMachine

CLASSES: Final = classes(worker_events)
OPTIONS: Final = ("slots", "threads", "index", "delay", "extra")
REGISTER: Final = {
    "incarnation": 9,
    "job": "worker",
    "pid": 100,
    "host": "host",
    "stale_leases": [],
}
"""The fields of a Register that a line leaves out."""


class Script:
    """The machine of one transcript, and the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.machine = self.new_machine({})

    def new_machine(self, options: dict[str, str]) -> WorkerMachine:
        assert not {*options} - {*OPTIONS}, options
        self.now = 0.0
        delay, _, delay_max = options.get("delay", "0,0").partition(",")
        return WorkerMachine(
            incarnation=9,
            job="worker",
            index=int(options.get("index", -1)),
            slots=int(options.get("slots", 1)),
            pid=100,
            host="host",
            orphan_limit_s=60.0,
            can_kill="threads" not in options,
            now=0.0,
            start_delay=(float(delay), float(delay_max)),
            nested_slots_max=int(options.get("extra", 0)),
        )

    def answer(self, line: str) -> Iterator[str]:
        command, *words = shlex.split(line)
        options = dict(word.partition("=")[::2] for word in words)
        match command:
            case "machine":
                self.machine = self.new_machine(options)
            case "ready":
                self.machine = self.new_machine(options)
                slots = [f"slot-ready {slot}" for slot in range(int(options.get("slots", 1)))]
                for event in (*slots, "dispatcher-connected 77", "registered 3 serial=1"):
                    list(self.answer(event))
            case "at":
                self.now = float(words[0])
            case "start":
                yield from map(effect_line, self.machine.start())
            case "tick":
                yield from self.effects(Ticked())
            case "deadline":
                deadline = self.machine.deadline
                yield "deadline none" if deadline is None else f"deadline {deadline:g}"
            case "state":
                yield from self.state()
            case _:
                kind = CLASSES[command]
                thing = thing_of(kind, words)
                is_message = issubclass(kind, Message)
                yield from self.effects(Heard(DISPATCHER, thing) if is_message else thing)

    def effects(self, event: Any) -> Iterator[str]:
        yield from map(effect_line, self.machine.handle(event, self.now))

    def state(self) -> Iterator[str]:
        machine = self.machine
        if machine.exit is not None:
            yield f"ended code={machine.exit.code}"
        yield f"registered={machine.contact.registered} index={machine.index} running={machine.running}"
        for slot in machine.slots:
            items = " ".join(leased_text((at, *item[1:])) for at, item in slot.given)
            waits = " waits" if slot.waits_at else ""
            yield f"slot {slot.index} {slot.state.value} {items}".rstrip() + waits
        if machine.queue:
            yield f"queue {' '.join(map(leased_text, machine.queue))}"


def effect_line(effect: Any) -> str:
    if not isinstance(effect, Send):
        return line_of(effect)
    message = effect.message
    return f"> {line_of(message, REGISTER if isinstance(message, Register) else None)}"
